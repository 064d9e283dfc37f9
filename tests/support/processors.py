"""The native kernels as other processors of this architecture would have them."""

from __future__ import annotations

import functools
import os
import platform
import shutil
from pathlib import Path
from unittest import mock

import pytest

from stages.engines.embedded.kernels.cpu.native import NativeKernels, load_native_kernels

NEEDED = {"x86-64": "sse2", "x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}
"""What kernels can be compiled for (gcc's and clang's -march), and what the CPU must have to run them."""

_COMPILER = """#!/bin/sh
for argument do
    shift
    [ "$argument" = -march=native ] && argument=-march={march}
    set -- "$@" "$argument"
done
exec {compiler} "$@"
"""


@functools.cache
def kernels_for(march: str, folder: Path) -> NativeKernels:
    """Compiled for one of `NEEDED`, into `folder`; skips the test where this machine cannot do that."""
    compiler, cpuinfo = shutil.which(os.environ.get("CC", "cc")), Path("/proc/cpuinfo")
    if compiler is None or platform.machine() != "x86_64" or not cpuinfo.is_file():
        pytest.skip("needs a C compiler (cc, or what $CC names) and an x86-64 CPU under Linux")
    if NEEDED[march] not in cpuinfo.read_text("utf8").split():
        pytest.skip(f"needs a CPU of {march}: with {NEEDED[march]}")
    wrapper = folder / f"cc-{march}"
    wrapper.write_text(_COMPILER.format(march=march, compiler=compiler), "utf8")
    wrapper.chmod(0o755)
    with mock.patch.dict(os.environ, {"CC": str(wrapper), "XDG_CACHE_HOME": str(folder)}):
        return load_native_kernels()
