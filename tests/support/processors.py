"""The native kernels as other processors of this architecture would have them."""

from __future__ import annotations

import fcntl
import functools
import os
import platform
import shutil
from pathlib import Path
from unittest import mock

import pytest

from stages.engines.embedded.kernels.cpu.native import NativeKernels, load_native_kernels

NEEDED = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
"""Target of gcc's and clang's -march -> feature that the CPU must have to run it."""

_COMPILER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = -march=native ] && argument=-march={march}
    set -- "$@" "$argument"
done
exec {compiler} "$@"
"""


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
KERNELS = ("torch", pytest.param("native", marks=needs_compiler))
"""Values of the setting `kernels` for an engine on this CPU."""


@functools.cache
def kernels_for(march: str) -> NativeKernels:
    """Compiled for one of `NEEDED`; skips the test where this machine cannot do that. They are kept in the user's cache
    folder, as this machine's own are: seconds each, and two processes of tests want them at once."""
    compiler, cpuinfo = shutil.which(os.environ.get("CC", "cc")), Path("/proc/cpuinfo")
    if compiler is None or platform.machine() != "x86_64" or not cpuinfo.is_file():
        pytest.skip("needs a C compiler (cc, or what $CC names) and an x86-64 CPU under Linux")
    if NEEDED[march] not in cpuinfo.read_text("utf8").split():
        pytest.skip(f"needs a CPU of {march}: with {NEEDED[march]}")
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stageline/processors"
    folder.mkdir(parents=True, exist_ok=True)
    wrapper = folder / f"cc-{march}"
    with (folder / f"{march}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        wrapper.write_text(_COMPILER.format(march=march, compiler=compiler), "utf8")
        wrapper.chmod(0o755)
        with mock.patch.dict(os.environ, {"CC": str(wrapper), "XDG_CACHE_HOME": str(folder)}):
            return load_native_kernels()
