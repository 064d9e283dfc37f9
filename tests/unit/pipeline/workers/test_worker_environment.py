"""The environment that worker processes inherit from the process that they are forked from."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from pipeline.workers.worker_process import FORKSERVER_ENVIRONMENT

PAGE = os.sysconf("SC_PAGE_SIZE")
BUFFER_BYTES, TIMES = 24 << 20, 20
FAULTS_OF_A_BUFFER = f"""
import ctypes, resource
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range({TIMES}):
    buffer = libc.malloc({BUFFER_BYTES})
    ctypes.memset(buffer, 1, {BUFFER_BYTES})
    libc.free(buffer)
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(environment: dict[str, str]) -> int:
    """Return the page faults of a fresh process that allocates, fills and frees one buffer `TIMES` times."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    command = [sys.executable, "-c", FAULTS_OF_A_BUFFER]
    return int(subprocess.run(command, env=clean | environment, check=True, capture_output=True, timeout=60).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_freed_buffer_is_used_again_without_faulting_its_pages_anew() -> None:
    """Setting one threshold alone switches off the adaptation of the other: every activation was mapped afresh."""
    found = page_faults(FORKSERVER_ENVIRONMENT)
    assert found < 1.5 * BUFFER_BYTES / PAGE
    assert page_faults({"MALLOC_TRIM_THRESHOLD_": "65536"}) > 0.5 * TIMES * found  # what it was
