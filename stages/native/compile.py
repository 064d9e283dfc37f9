"""Compiles kernels in C on the machine they run on. Standard library only.

They need no header of Python or torch, so a C compiler suffices and seconds do. A library is kept in the user's cache
folder under a digest of sources, compiler and its version, flags and processor.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_NUMBERS = Path(__file__).with_name("numbers.h")
FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120


class NoNativeKernelsError(RuntimeError):
    """This machine cannot build or load them; says why."""


def build_library(name: str, folder: Path, sources: Sequence[str], headers: Sequence[str] = ()) -> Path:
    """The path of a library made of the sources in a folder, which may include the headers there and `numbers.h`;
    compiled under another name and moved, so that several processes may do this at once. Raises
    NoNativeKernelsError."""
    compiler, release = _compiler(), compiler_version()
    if compiler is None or release is None:
        raise NoNativeKernelsError("there is no C compiler (cc, or what $CC names)")
    files = [folder / source for source in sources]
    text = b"\0".join(file.read_bytes() for file in (*files, *(folder / header for header in headers), _NUMBERS))
    digest = hashlib.sha256("\0".join([compiler, release, *FLAGS, _processor()]).encode() + text).hexdigest()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stageline"
    library = cache / f"{name}-{digest[:20]}.so"
    if library.exists():
        return library
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *FLAGS, f"-I{_NUMBERS.parent}", *map(str, files), "-o", str(built), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
            built.replace(library)
    except subprocess.CalledProcessError as error:
        raise NoNativeKernelsError(f"{compiler} refuses the kernels: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernelsError(f"the kernels cannot be compiled into {cache}: {error}") from error
    return library


def compiler_version() -> str | None:
    """What the C compiler says that it is, on one line; None where there is none. (Another one may lie behind the same
    path after an upgrade.)"""
    compiler = _compiler()
    return None if compiler is None else _version_of(compiler)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


@functools.cache
def _version_of(compiler: str) -> str | None:
    try:
        said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return said.strip().partition("\n")[0]


def _processor() -> str:
    """What -march=native depends on, where it can be read: a shared cache folder may serve unlike machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text("utf8", "replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
