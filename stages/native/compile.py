"""Compile kernels in C on the machine they run on, and load them.

They include no header of Python or torch, so they need only a C compiler and compile in seconds. A library is kept in
the user's cache folder under a digest of sources, compiler, flags and processor. Loaded code runs with this user's
rights, so the folder must belong to this user and be closed to others. A user without a home (in some containers) has
it in the temporary folder.

$CC names another compiler, $STAGELINE_CFLAGS more flags (the tests' sanitizers).

The functions at the end check the arguments of kernels, since C reads and writes whatever is at an address.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from storage.errors import StoreError
from storage.host import private_directory

_NUMBERS = Path(__file__).with_name("numbers.h")
_FLAGS = ("-O3", "-march=native", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
_COMPILE_TIMEOUT_S = 120


class NoNativeKernelsError(RuntimeError):
    """This machine cannot build or load the kernels. The message says why."""


def build_library(name: str, folder: Path, sources: Sequence[str], headers: Sequence[str] = ()) -> Path:
    """Return the path of a library made from the sources in a folder, which may include the headers there and
    `numbers.h`. It is compiled under another name and moved, so several processes may do this at once. Raises
    NoNativeKernelsError, also if the cache folder is another user's."""
    compiler, release = _compiler(), compiler_version()
    if compiler is None or release is None:
        raise NoNativeKernelsError("there is no C compiler (cc, or what $CC names)")
    files = [folder / source for source in sources]
    text = b"\0".join(file.read_bytes() for file in (*files, *(folder / header for header in headers), _NUMBERS))
    flags = compiler_flags()
    digest = hashlib.sha256("\0".join([compiler, release, *flags, _processor()]).encode() + text).hexdigest()
    cache = cache_folder()
    library = cache / f"{name}-{digest[:20]}.so"
    try:
        # Another user's may lie here only from before the folder was closed to others.
        if library.exists() and library.lstat().st_uid == os.geteuid():
            return library
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *flags, f"-I{_NUMBERS.parent}", *map(str, files), "-o", str(built), "-lm"]
            # without $PATH, which the compiler was found without, gcc does not find its linker
            environment = {"PATH": os.defpath, **os.environ}
            subprocess.run(
                command, check=True, capture_output=True, text=True, timeout=_COMPILE_TIMEOUT_S, env=environment
            )
            built.replace(library)
    except subprocess.CalledProcessError as error:
        raise NoNativeKernelsError(f"{compiler} refuses the kernels: {error.stderr.strip()[-500:]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoNativeKernelsError(f"the kernels cannot be compiled into {cache}: {error}") from error
    return library


def compiler_flags() -> tuple[str, ...]:
    """Return the compiler's flags."""
    return (*_FLAGS, *os.environ.get("STAGELINE_CFLAGS", "").split())


def compiler_version() -> str | None:
    """Return the C compiler's version on one line, or None if there is no compiler. (An upgrade may replace the
    compiler at the same path.)"""
    compiler = _compiler()
    return None if compiler is None else _version_of(compiler)


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CC", "cc"))


@functools.cache
def _version_of(compiler: str) -> str | None:
    try:
        output = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip().partition("\n")[0]


def load_library(
    name: str,
    folder: Path,
    sources: Sequence[str],
    headers: Sequence[str],
    records: Mapping[str, type[ctypes.Structure]],
) -> ctypes.CDLL:
    """Load the library of `build_library`. `records`: by their names in C, the structs that are passed to it; each
    `struct NAME` has a function `layout_NAME` (`numbers.h`: LAYOUT). Raises NoNativeKernelsError; RuntimeError if a
    record has another layout here than there."""
    try:
        library = ctypes.CDLL(str(build_library(name, folder, sources, headers)))
    except OSError as error:
        raise NoNativeKernelsError(f"the compiled kernels cannot be loaded: {error}") from error
    for record, here in records.items():
        there = (ctypes.c_int64 * (len(here._fields_) + 2))()
        getattr(library, f"layout_{record}")(there, len(there))
        offsets = [getattr(here, field[0]).offset for field in here._fields_]
        layout = [*offsets, ctypes.sizeof(here), -1]
        if layout != list(there):
            raise RuntimeError(f"struct {record}: offsets and size are {layout}; in C {list(there)}")
    return library


def cache_folder() -> Path:
    """Return the folder of the libraries, which only this user can enter. Raises NoNativeKernelsError if there is no
    such place."""
    problems = []
    for folder in _candidates():
        try:
            private_directory(folder)
        except (OSError, StoreError) as error:
            problems.append(str(error))
        else:
            return folder
    raise NoNativeKernelsError(f"there is no folder to compile them into: {'; '.join(problems)} ($XDG_CACHE_HOME)")


def _candidates() -> Iterator[Path]:
    if given := os.environ.get("XDG_CACHE_HOME"):
        yield Path(given) / "stageline"
        return
    with suppress(RuntimeError):  # there is neither $HOME nor an entry for this user
        yield Path.home() / ".cache" / "stageline"
    yield Path(tempfile.gettempdir()) / f"stageline-cache-{os.geteuid()}"


def _processor() -> str:
    """Return what -march=native depends on, if it can be read: a shared cache folder may serve different machines."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text("utf8", "replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


# ---- arguments -------------------------------------------------------------------------------------------

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""numbers.h: FLOAT32, BFLOAT16."""
_FLOAT32 = (torch.float32,)


def kind_of(dtype: torch.dtype) -> int:
    """Return the dtype's number in C. Raises ValueError if C does not know it."""
    kind = KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"native kernels compute in float32 and bfloat16, not in {dtype}")
    return kind


def expect(name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype] = _FLOAT32) -> None:
    """Raise ValueError, naming the tensor, unless it is contiguous, on the CPU, of this shape and one of `dtypes`."""
    if (
        tensor.dtype in dtypes
        and tensor.shape == tuple(shape)
        and tensor.is_contiguous()
        and tensor.device.type == "cpu"
    ):
        return
    given = f"{list(tensor.shape)} {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
    wanted = f"{list(shape)} {' or '.join(map(str, dtypes))}, contiguous, on cpu"
    raise ValueError(f"native kernels: {name} is {given} on {tensor.device}; wanted: {wanted}")


def require(holds: bool, what: str) -> None:
    """Raise ValueError with the text `what` unless `holds` is true."""
    if not holds:
        raise ValueError(f"native kernels: {what}")
