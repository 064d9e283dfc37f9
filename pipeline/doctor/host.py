"""The doctor's tests of the host: limits, disk, shared memory, clock, processors, compiler, loopback network."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from pipeline.config.fitting import max_descriptors
from pipeline.doctor.runner import DoctorSettings, Fault, Finding
from stages.models.kernels.blocks import load_block_kernels
from stages.native.compile import NoNativeKernelsError, compiler_version

SHARED_MEMORY = Path("/dev/shm")
"""Directory in which weights are published."""
MIN_OPEN_FILES = 1024
"""Number of open files that a run with about twenty workers needs. `stageline check` computes the number for a
config."""
MIN_FREE_DISK_BYTES = 2 << 30
MIN_FREE_SHARED_BYTES = 1 << 30
"""Free shared memory that the test requires, in bytes. It is enough for two published versions of SmolLM2-135M.
`stageline check` computes the number for a config."""
PIECE_BYTES = 64 << 20
"""Number of bytes that a test writes to measure a rate."""
MAX_CLOCK_SKEW_S = 5.0
"""Largest accepted difference between this host's clock and its file server's clock. Logs and reports order events by
times of both clocks."""
LOOPBACK_TIMEOUT_S = 10.0
MIN_SPEEDUP = 0.25
"""Lowest accepted value of (rate of all threads together) / (rate of a single thread). An undisturbed machine is far
above it. The limit is this low because other programs may use the cores too. Even then the value seldom falls below it.
"""
MAX_REPEATS = 10
"""Maximum number of times that a slow measurement is repeated."""


def limits(settings: DoctorSettings) -> Finding:
    """Test that a process may open as many files as a run of some twenty workers needs."""
    files, locked = max_descriptors(), resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if files < MIN_OPEN_FILES:
        advice = (
            f"raise the hard limit to {MIN_OPEN_FILES} or more: `ulimit -Hn`, or nofile in /etc/security/limits.conf"
        )
        raise Fault(f"a process may have {files} open files", advice, open_files=files)
    return Finding(f"a process may open {files} files", {"open_files": files, "locked_memory_bytes": locked})


def disk(settings: DoctorSettings) -> Finding:
    """Test writing and syncing files in the directory for runs, and its free space."""
    try:
        free = shutil.disk_usage(settings.scratch).free
        if free < MIN_FREE_DISK_BYTES:
            advice = f"free {MIN_FREE_DISK_BYTES >> 30} GB or more, or choose another place: --runs-dir DIR"
            raise Fault(f"{settings.runs_dir} has {free >> 20} MB free", advice, free_bytes=free)
        rate, synced = _write_rate(settings.scratch, sync=True), _sync_seconds(settings.scratch)
    except OSError as error:
        cause = f"{settings.runs_dir} cannot be written: {error.strerror}"
        raise Fault(cause, "give another place: --runs-dir DIR") from error
    speed = f"{rate / 1e9:.2f} GB/s written and synced, {synced * 1e3:.1f} ms a small sync"
    return Finding(
        f"{settings.runs_dir}: {free >> 30} GB free, {speed}",
        {"free_bytes": free, "write_bytes_per_s": rate, "sync_s": synced},
    )


def shared_memory(settings: DoctorSettings) -> Finding:
    """Test writing a file to shared memory, where weights are published, and the free space there."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
        if free < MIN_FREE_SHARED_BYTES:
            advice = "remove what is left there (`ls -l /dev/shm`), or mount it larger (a container: --shm-size=16g)"
            raise Fault(f"{SHARED_MEMORY} has {free >> 20} MB free", advice, free_bytes=free)
        rate = _write_rate(SHARED_MEMORY, sync=False)
    except OSError as error:
        advice = f"mount a tmpfs at {SHARED_MEMORY} that this account may write (a container: --shm-size=16g)"
        raise Fault(f"{SHARED_MEMORY} cannot be written: {error.strerror}", advice) from error
    return Finding(
        f"{free >> 30} GB free, {rate / 1e9:.1f} GB/s written", {"free_bytes": free, "write_bytes_per_s": rate}
    )


def clock(settings: DoctorSettings) -> Finding:
    """Test that this host's clock agrees with the clock of the file system that runs are written to."""
    with tempfile.NamedTemporaryFile(dir=settings.scratch) as file:
        before = time.time()
        file.write(b"x")
        file.flush()
        os.fsync(file.fileno())
        written, after = os.stat(file.name).st_mtime, time.time()
    skew = max(before - written, written - after, 0.0)
    if skew > MAX_CLOCK_SKEW_S:
        raise Fault(
            f"this host's clock and that of {settings.runs_dir} differ by {skew:.0f} s",
            "synchronise the clocks (chrony, systemd-timesyncd)",
            skew_s=skew,
        )
    return Finding(f"within {max(skew, after - before):.2f} s of the file system's", {"skew_s": skew})


def processors(settings: DoctorSettings) -> Finding:
    """Test the rate of a float32 matrix product, with one thread and with all cores that this process may use. The rate
    with all cores must not be far below the rate with one thread (`MIN_SPEEDUP`)."""
    quota = _core_quota()
    cores = max(1, min(len(os.sched_getaffinity(0)), int(quota or 1 << 20)))
    one, many = _product_rate(1), _product_rate(cores)
    for _ in range(MAX_REPEATS if cores > 1 else 0):  # another program may have used a core at that moment
        if many >= MIN_SPEEDUP * one:
            break
        many = max(many, _product_rate(cores))
    facts = {"cores": cores, "flops_one_thread": one, "flops_all_threads": many, "quota": quota}
    if cores > 1 and many < MIN_SPEEDUP * one:
        advice = "other programs use these cores, or a quota holds this one back: look at `top` and the container"
        raise Fault(
            f"{cores} threads multiply at {many / 1e9:.0f} GFLOP/s, one alone at {one / 1e9:.0f}", advice, **facts
        )
    return Finding(f"{cores} cores, {one / 1e9:.0f} GFLOP/s on one, {many / 1e9:.0f} on all", facts)


def compiler(settings: DoctorSettings) -> Finding:
    """Test that the kernels in C can be compiled and loaded."""
    try:
        load_block_kernels()
    except NoNativeKernelsError as error:
        advice = "install a C compiler (Debian: apt-get install gcc). Without one, blocks on a CPU take twice as long"
        raise Fault(str(error), advice) from error
    return Finding(compiler_version() or "", {"compiler": compiler_version()})


def network(settings: DoctorSettings) -> Finding:
    """Test that this host can be reached over loopback and at the address of its name."""
    reached = []
    for name in ("127.0.0.1", socket.gethostname()):
        try:
            with socket.create_server((name, 0)) as server:
                address = server.getsockname()
                with socket.create_connection(address[:2], timeout=LOOPBACK_TIMEOUT_S):
                    reached.append(str(address[0]))
        except OSError as error:
            advice = "let the host's name resolve to one of its addresses (/etc/hosts), and allow connections to itself"
            raise Fault(f"this host cannot be reached as {name}: {error}", advice, reached=reached) from error
    return Finding(f"reached as {' and '.join(dict.fromkeys(reached))}", {"addresses": reached})


def _write_rate(folder: Path, *, sync: bool) -> float:
    """Write a file of PIECE_BYTES and return the rate in bytes per second. `sync`: True if the rate includes the time
    to sync the file to the disk."""
    data = os.urandom(1 << 20)
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        began = time.perf_counter()
        for _ in range(PIECE_BYTES >> 20):
            file.write(data)
        file.flush()
        if sync:
            os.fsync(file.fileno())
        return PIECE_BYTES / (time.perf_counter() - began)


def _sync_seconds(folder: Path) -> float:
    """Return the median duration of nine synced writes of 4 KB. It is roughly the cost of a commit."""
    seconds = []
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        for _ in range(9):
            began = time.perf_counter()
            file.write(b"x" * 4096)
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return sorted(seconds)[4]


def _product_rate(threads: int) -> float:
    """Return the rate of a float32 matrix product in FLOP/s: the rate of the fastest of five products."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        size = 1024
        left, right = torch.ones(size, size), torch.ones(size, size)
        torch.mm(left, right)
        best = min(_time_call(lambda: torch.mm(left, right)) for _ in range(5))
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / best


def _time_call(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def _core_quota() -> float | None:
    """Return the number of cores that the control group allows, or None."""
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    return None
