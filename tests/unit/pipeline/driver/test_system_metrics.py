"""Resources of processes by gang: sums of the workers' measurements, at the due times."""

from types import SimpleNamespace
from typing import Any

from pipeline.driver.tracked import SystemMetrics, gang_metrics
from pipeline.observe.tracking import NullTracker


def test_sums_by_gang() -> None:
    gpu = {"utilization": 50, "memory-used": 10}
    workers: list[tuple[str, dict[str, Any]]] = [
        ("train", {"cpu": 90.0, "memory": 100, "gpu": gpu}),
        ("train", {"cpu": 110.0, "memory": 50, "gpu": {"utilization": None, "memory-used": 5}}),
        ("score", {"cpu": 1.0, "memory": 7}),
        ("late", {}),
    ]
    assert gang_metrics(workers) == {
        "system/late/cpu_percent": 0.0,
        "system/late/memory_bytes": 0.0,
        "system/score/cpu_percent": 1.0,
        "system/score/memory_bytes": 7.0,
        "system/train/cpu_percent": 200.0,
        "system/train/memory_bytes": 150.0,
        "system/train/gpu_percent": 25.0,
        "system/train/gpu_memory_bytes": 15.0,
    }


class Samples(NullTracker):
    """Owns what it was given."""

    def __init__(self) -> None:
        self.given: list[tuple[int, Any]] = []

    def metrics(self, step: int, values: Any) -> None:
        self.given.append((step, values))


def test_every_ten_seconds_from_the_runs_beginning() -> None:
    times = iter((100.0, 105.0, 110.0, 119.0, 121.0))
    worker = SimpleNamespace(name="own-gang-1", metrics={"cpu": 5.0, "memory": 3})
    scheduler: Any = SimpleNamespace(workers={"tcp://x": worker})
    tracker = Samples()
    system = SystemMetrics(scheduler, tracker, began=40.0, now=lambda: next(times))
    for _ in range(4):
        system.look()
    assert [step for step, _ in tracker.given] == [70, 81]
    assert tracker.given[0][1]["system/own-gang/memory_bytes"] == 3.0
    assert tracker.given[0][1]["system/driver/memory_bytes"] > 0
