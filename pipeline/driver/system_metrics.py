"""CPU, memory and GPU of a run's processes by gang, as their Dask workers measured them: wherever they are, and at no
cost but a look at what the scheduler has in this process's memory.

    worker's heartbeat ──cpu, memory, gpu──► scheduler ──every 10 s──► sums by gang ──► tracker

What a worker's own children take (an engine in an environment of its own) is not in it. `gpu` is there where pynvml is
installed; that part has been tested with made-up numbers only.

May import psutil, pipeline.observe.tracking and the standard library.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import psutil

from pipeline.observe.tracking import Tracker

EVERY_S = 10.0


class WorkersSeen(Protocol):
    """What of Dask's scheduler is looked at."""

    @property
    def workers(self) -> Mapping[str, Any]:
        """By address, each with its `name` and its `metrics`."""
        ...


def gang_metrics(workers: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, float]:
    """`system/GANG/*`, from (gang, what its worker measured): sums, but for GPUs' utilisation, of which it is the
    mean."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for gang, measured in workers:
        found.setdefault(gang, []).append(measured)
    metrics = {}
    for gang, all_of in sorted(found.items()):
        metrics[f"system/{gang}/cpu_percent"] = sum(float(one.get("cpu", 0.0)) for one in all_of)
        metrics[f"system/{gang}/memory_bytes"] = sum(float(one.get("memory", 0.0)) for one in all_of)
        gpus = [one["gpu"] for one in all_of if one.get("gpu")]
        if gpus:
            metrics[f"system/{gang}/gpu_percent"] = sum(_number(gpu["utilization"]) for gpu in gpus) / len(gpus)
            metrics[f"system/{gang}/gpu_memory_bytes"] = sum(_number(gpu["memory-used"]) for gpu in gpus)
    return metrics


def _number(measured: float | None) -> float:
    return 0.0 if measured is None else float(measured)


class SystemMetrics:
    """Owns the time of the last sample."""

    def __init__(
        self, scheduler: WorkersSeen, tracker: Tracker, began: float, now: Callable[[], float] = time.time
    ) -> None:
        """`began`: when the run's first driver did, which the samples' numbers count from, in whole seconds."""
        self._scheduler = scheduler
        self._tracker = tracker
        self._began = began
        self._now = now
        self._process = psutil.Process()
        self._process.cpu_percent()  # measures from here on
        self._next = now() + EVERY_S

    def look(self) -> None:
        """Called about once a second in the driver's thread."""
        now = self._now()
        if now < self._next:
            return
        self._next = now + EVERY_S
        workers = [(str(w.name).rpartition("-")[0], w.metrics) for w in list(self._scheduler.workers.values())]
        driver = {
            "system/driver/cpu_percent": self._process.cpu_percent(),
            "system/driver/memory_bytes": float(self._process.memory_info().rss),
        }
        self._tracker.metrics(round(now - self._began), driver | gang_metrics(workers))
