"""The environment of worker processes: inherited from the process that they are forked from, and by role on GPUs."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.workers.worker_process import FORKSERVER_ENVIRONMENT, trainer_environment, worker_environment
from stages.models.protocol import Role
from tests.support.waiting import TIMEOUT_S

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
    done = subprocess.run(command, env=clean | environment, check=True, capture_output=True, timeout=TIMEOUT_S)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_a_freed_buffer_is_used_again_without_faulting_its_pages_anew() -> None:
    """Setting one threshold alone switches off the adaptation of the other: every activation was mapped afresh."""
    found = page_faults(FORKSERVER_ENVIRONMENT)
    assert found < 1.5 * BUFFER_BYTES / PAGE
    assert page_faults({"MALLOC_TRIM_THRESHOLD_": "65536"}) > 0.5 * TIMES * found  # what it was


def test_only_trainers_with_gpus_get_cudas_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    trainer = trainer_environment({Role.POLICY, Role.CRITIC}, "0")
    assert trainer == {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    for roles, gpus in (({Role.POLICY}, None), ({Role.POLICY}, ""), ({Role.GENERATE}, "0"), ({Role.SCORE}, "0")):
        assert trainer_environment(roles, gpus) == {}
    assert trainer_environment({Role.GENERATE, Role.POLICY}, "0") == {}, "its engine captures graphs"


def test_a_worker_has_variables_that_were_set_after_the_forkserver_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "set-in-a-notebook")
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    environment = worker_environment(1, shared=True)
    assert environment["AWS_ACCESS_KEY_ID"] == "set-in-a-notebook"
    assert "HF_HUB_OFFLINE" not in environment, "the forkserver's own value stays"


def test_a_users_own_values_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512")
    assert trainer_environment({Role.POLICY}, "0") == {"CUDA_DEVICE_MAX_CONNECTIONS": "8"}


BINDING = """
import os, sys, threading
from pathlib import Path
from pipeline.workers.worker_process import bind_to_gpus
go = threading.Event()
found = []
other = threading.Thread(target=lambda: (go.wait(), found.append(os.sched_getaffinity(0))))
other.start()
print(sorted(bind_to_gpus(sys.argv[2:], Path(sys.argv[1]))))
go.set()
other.join()
print(sorted(os.sched_getaffinity(0)), sorted(found[0]))
"""


def test_threads_stay_on_the_cores_near_their_gpus(tmp_path: Path) -> None:
    """The threads stay on both GPUs' cores, as far as the process may use them. Another thread moves too."""
    mine = sorted(os.sched_getaffinity(0))
    for address, cores in {"0000:1b:00.0": f"{mine[0]}", "0000:9b:00.0": f"100000-100003,{mine[-1]}"}.items():
        (tmp_path / address).mkdir()
        (tmp_path / address / "local_cpulist").write_text(f"{cores}\n")

    def bound(*addresses: str) -> list[str]:
        command = [sys.executable, "-c", BINDING, str(tmp_path), *addresses]
        done = subprocess.run(command, check=True, capture_output=True, timeout=TIMEOUT_S, text=True)
        return done.stdout.split("\n")[:2]

    both = [*{mine[0]: None, mine[-1]: None}]
    assert bound("0000:1b:00.0") == [f"[{mine[0]}]", f"[{mine[0]}] [{mine[0]}]"]
    assert bound("0000:1b:00.0", "0000:9b:00.0") == [f"{both}", f"{both} {both}"]
    assert bound("0000:2b:00.0") == ["[]", f"{mine} {mine}"], "nothing is known of it"
