"""Compiles the kernels in C on the machine they run on. Standard library only.

They need no header of Python or torch, so a C compiler suffices and three seconds do. The library is kept in the user's
cache folder under a digest of sources, flags and processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path

_SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "gemm.c", "drafts.c"))
_HEADER = Path(__file__).with_name("kernels.h")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120


class NoNativeKernelsError(RuntimeError):
    """This machine cannot build or load them; says why."""


def build_library() -> Path:
    """The library's path; compiled under another name and moved, so that several processes may do this at once. Raises
    NoNativeKernelsError."""
    compiler = shutil.which(os.environ.get("CC", "cc"))
    if compiler is None:
        raise NoNativeKernelsError("there is no C compiler (cc, or what $CC names)")
    sources = b"\0".join(file.read_bytes() for file in (*_SOURCES, _HEADER))
    digest = hashlib.sha256("\0".join([compiler, *_FLAGS, _processor()]).encode() + sources).hexdigest()
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stageline"
    library = folder / f"kernels-{digest[:20]}.so"
    if library.exists():
        return library
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *_FLAGS, *map(str, _SOURCES), "-o", str(built), "-lm"]
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S)
            built.replace(library)
    except subprocess.CalledProcessError as error:
        raise NoNativeKernelsError(f"{compiler} refuses the kernels: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernelsError(f"the kernels cannot be compiled into {folder}: {error}") from error
    return library


def _processor() -> str:
    """What -march=native depends on, where it can be read: a shared cache folder may serve unlike machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text("utf8", "replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))
