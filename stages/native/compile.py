"""Compile kernels in C on the machine they run on, and load them.

The kernels include no header of Python or torch, so they need only a C compiler and compile in seconds. A compiled
library is kept in the user's cache folder. Its name contains a digest of the sources, the compiler, the flags and the
processor. Loaded code runs with this user's rights, so the folder must belong to this user and be closed to others. If
the user has no usable home, as in some containers, the folder is created in the temporary directory.

The environment variable CC names another compiler. STAGELINE_CFLAGS adds flags, such as the tests' sanitizers.

The functions at the end check the arguments of kernels, because C code does not check the addresses that it gets.
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
    """An error for a machine that cannot build or load the kernels. The message says why."""


def build_library(name: str, folder: Path, sources: Sequence[str], headers: Sequence[str] = ()) -> Path:
    """Compile the sources in a folder into a library, unless the cache has it. Return the library's path.

    The C code may `#include` the `headers`, which are in the same folder, and `numbers.h`. Several processes may build
    the same library at once, because each compiles it under another name and then moves it to its place.

    Raises:
        NoNativeKernelsError: there is no compiler or no cache folder for this user, or the compilation failed.
    """
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
        # Another user's library can only date from before the folder was closed to others. It is replaced.
        if library.exists() and library.lstat().st_uid == os.geteuid():
            return library
        with tempfile.TemporaryDirectory(dir=cache) as scratch:
            built = Path(scratch) / library.name
            command = [compiler, *flags, f"-I{_NUMBERS.parent}", *map(str, files), "-o", str(built), "-lm"]
            # If $PATH is not set, the compiler is found nevertheless, but gcc would not find its linker.
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
    """Return the C compiler's version on one line, or None if there is no compiler or it does not report a version. The
    path does not identify a compiler, because an upgrade replaces the file at the same path."""
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
    """Build a library with `build_library`, load it, and check that C and Python lay out its structs alike.

    Args:
        records: name in C -> class, for each struct that is passed to the library. For each `struct NAME` the library
            has a function `layout_NAME`, which the macro LAYOUT in `numbers.h` defines.

    Raises:
        NoNativeKernelsError: the library cannot be built or loaded.
        RuntimeError: a struct has different layouts in C and in Python."""
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
    """Return the folder in which compiled kernels are cached as shared libraries. Only this user can enter it. The
    folder is created if necessary. Raises NoNativeKernelsError if it cannot be created."""
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
    with suppress(RuntimeError):  # raised if there is neither $HOME nor a user database entry
        yield Path.home() / ".cache" / "stageline"
    yield Path(tempfile.gettempdir()) / f"stageline-cache-{os.geteuid()}"


def _processor() -> str:
    """Return what -march=native depends on. It is part of a library's name, since machines with different processors
    may share a cache folder."""
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.is_file():
        return f"{platform.machine()} {platform.processor()}"
    wanted = ("model name", "flags", "Features", "CPU part")
    lines = cpuinfo.read_text("utf8", "replace").splitlines()
    return "\n".join(sorted({line for line in lines if line.startswith(wanted)}))


# ---- arguments -------------------------------------------------------------------------------------------

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""Dtype -> its number in C (FLOAT32 and BFLOAT16 in numbers.h)."""
_FLOAT32 = (torch.float32,)


def kind_of(dtype: torch.dtype) -> int:
    """Return the dtype's number in C. Raises ValueError if the kernels do not support the dtype."""
    kind = KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"native kernels compute in float32 and bfloat16, not in {dtype}")
    return kind


def expect(name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype] = _FLOAT32) -> None:
    """Raise ValueError unless the tensor is contiguous, on the CPU, of this shape, and of one of `dtypes`. The message
    contains `name`."""
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
