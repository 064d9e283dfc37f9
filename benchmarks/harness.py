"""Shared parts of the benchmarks: the machine, other load on it, versions, a table and a JSON of figures by name.

Both sides of a comparison are interleaved in one run; figures are medians of repeats.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch
from rich.console import Console
from rich.table import Table

from pipeline.errors import ConfigError
from pipeline.observe.provenance import git_commit
from stages.native.fingerprint import machine_numerics
from stages.native.software import installed_versions

PACKAGES = ("torch", "triton", "megatron-core", "transformers", "dask", "zarr")


def arguments(
    description: str, add: Callable[[argparse.ArgumentParser], None] = lambda parser: None
) -> argparse.Namespace:
    """Parse --json FILE, --quick (under a minute) and --repeats, which every benchmark has, and what `add` adds."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", type=Path, help="write the figures by name to this file")
    parser.add_argument("--quick", action="store_true", help="under a minute, on a tiny model: not for figures")
    parser.add_argument("--repeats", type=int, default=3)
    add(parser)
    return parser.parse_args()


@dataclass(frozen=True)
class Load:
    """CPU seconds spent during a measurement, as shares of all cores' time."""

    ours: float
    others: float


@contextmanager
def measured_load() -> Iterator[Callable[[], Load]]:
    """Yield a function that returns, after the block, the shares of the machine that this process tree and others used.
    The others are the processes that live at the end. All other busy time is ours, since some of our processes may have
    ended."""
    result: list[Load] = []
    others_before, busy_before, start = _others_seconds(), _busy_seconds(), time.perf_counter()
    yield lambda: result[0]
    total = (time.perf_counter() - start) * (os.cpu_count() or 1)
    busy = _busy_seconds() - busy_before
    others = sum(seconds - others_before.get(pid, 0.0) for pid, seconds in _others_seconds().items())
    others = min(max(0.0, others), busy)
    result.append(Load((busy - others) / total, others / total))


@contextmanager
def environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Return a context in which this process, and processes that it starts, have these variables."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def own_cpu_s() -> float:
    """Return the processor seconds of this process and of all processes below it that live."""
    process = psutil.Process()
    times = [one.cpu_times() for one in (process, *process.children(recursive=True))]
    return sum(one.user + one.system for one in times)


def _busy_seconds() -> float:
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0)


def _others_seconds() -> dict[int, float]:
    """Return the CPU seconds of every process outside this process tree, with those of its children that ended."""
    process = psutil.Process()
    own = {process.pid, *(child.pid for child in process.children(recursive=True))}
    seconds = {}
    for other in psutil.process_iter():
        try:
            times = other.cpu_times()
        except psutil.NoSuchProcess:
            continue
        ancestor = other.pid in own or any(other.pid == parent.pid for parent in process.parents())
        ended = 0.0 if ancestor else times.children_user + times.children_system
        if other.pid not in own:
            seconds[other.pid] = times.user + times.system + ended
    return seconds


def gemm_gflops(threads: int, dtype: torch.dtype = torch.float32, size: int = 1536, repeats: int = 5) -> float:
    """Return this machine's rate of matrix products now, in GFLOP/s. No schedule of the same arithmetic can be
    faster."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        a, b = torch.randn(size, size, dtype=dtype), torch.randn(size, size, dtype=dtype)
        a @ b
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            a @ b
            seconds.append(time.perf_counter() - started)
    finally:
        torch.set_num_threads(before)
    return 2 * size**3 / statistics.median(seconds) / 1e9


def this_hardware() -> str:
    """Return the name in conf/hardware of the node without GPUs whose processor is most like this machine's. Raises
    ConfigError if there is none."""
    flags = machine_numerics()["instructions"].split()
    kinds = {"amx_bf16": "cpu", "avx512_vp2intersect": "cpu-zen5", "avx512_bf16": "cpu-zen4", "avx2": "cpu-zen3"}
    found = next((kind for flag, kind in kinds.items() if flag in flags), None)
    if found is None:
        raise ConfigError(
            "--hardware", f"no file of conf/hardware has a processor without {', '.join(kinds)}: give one"
        )
    return found


def machine() -> dict[str, str | int | float]:
    """Return the place and the means of a benchmark: machine, load, versions."""
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "none"
    return {
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "commit": git_commit(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "gpu": gpu,
        "python": platform.python_version(),
        **installed_versions(PACKAGES),
    }


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[str],
    console: Console | None = None,
) -> None:
    """Print the table and the notes that are needed to read it."""
    console = console or Console()
    table = Table(title=title, title_justify="left")
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i == 0 else "right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def write_json(path: Path | None, figures: dict[str, float]) -> None:
    """Write the figures by name, with the machine that they were measured on."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"machine": machine(), "figures": figures}, indent=2) + "\n", "utf8")
