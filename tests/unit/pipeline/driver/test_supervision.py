"""Killing workers of a host that is gone: the driver must not wait for it. And what a killed driver left goes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.driver import cluster
from pipeline.driver.supervision import HeartbeatWatch, counts_as_stopped
from pipeline.workers.worker_process import remove_abandoned_scratch


class GoneHost:
    """A scheduler that believes in two workers: one goes when it is told to, the other's host answers nobody."""

    def __init__(self, *, broadcast_hangs: bool) -> None:
        self.workers = {name: SimpleNamespace(resources={f"{name}.pin": 1.0}) for name in ("alive", "gone")}
        self.resources = {f"{name}.pin": {name: 1.0} for name in self.workers}
        self._hangs = broadcast_hangs

    async def broadcast(self, **message: Any) -> None:
        assert message["workers"] == ["alive", "gone"]
        del self.workers["alive"]
        if self._hangs:
            await asyncio.Event().wait()


@pytest.mark.parametrize("broadcast_hangs", [True, False])
def test_a_lost_host_costs_bounded_time_and_gets_no_work(
    monkeypatch: pytest.MonkeyPatch, broadcast_hangs: bool
) -> None:
    monkeypatch.setattr(cluster, "_KILL_S", 0.05)
    scheduler = GoneHost(broadcast_hangs=broadcast_hangs)
    asyncio.run(cluster._kill_and_wait(["alive", "gone", "unknown"], scheduler))
    assert scheduler.resources == {"alive.pin": {"alive": 1.0}, "gone.pin": {"gone": 0}}


def test_the_scratch_of_drivers_that_are_dead_is_removed_and_no_other(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    names = {"stageline-dask-x-a", "stageline-replay-1", "other"}
    names |= {f"stageline-{whose}-{os.getpid()}-a" for whose in ("dask", "engine")}
    for name in (*names, f"stageline-dask-{ended.pid}-a", f"stageline-engine-{ended.pid}-a"):
        (tmp_path / name / "dask-scratch-space").mkdir(parents=True)
    remove_abandoned_scratch(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == names


def test_a_dashboards_address_is_the_one_that_it_listens_on() -> None:
    """Dask names the scheduler's host, which is not the loopback where workers are attached."""
    link = "http://10.0.0.7:8787/status"
    assert cluster.dashboard_link(link, "127.0.0.1:8080") == "http://127.0.0.1:8787/status"
    assert cluster.dashboard_link(link, ":8787") == cluster.dashboard_link(link, "0.0.0.0:8787") == link


def test_silence_begins_with_the_last_heartbeat_that_was_news() -> None:
    silences = HeartbeatWatch()
    assert silences.seconds_without_heartbeat({"a": 1000.0, "b": 1000.0}, now=5.0) == {"a": 0.0, "b": 0.0}
    assert silences.seconds_without_heartbeat({"a": 1000.0, "b": 1000.5}, now=9.0) == {"a": 4.0, "b": 0.0}
    assert silences.seconds_without_heartbeat({"a": 1000.0, "b": 1000.5}, now=12.0) == {"a": 7.0, "b": 3.0}
    assert silences.seconds_without_heartbeat({"a": 1000.1}, now=13.0) == {"a": 0.0}, "b is gone"
    assert silences.seconds_without_heartbeat({"a": 1000.1, "b": 1000.5}, now=14.0) == {"a": 1.0, "b": 0.0}, (
        "and there again"
    )


def test_a_process_is_stopped_after_a_third_of_its_time_and_never_before_20_s() -> None:
    assert [counts_as_stopped(silent, start_timeout_s=300.0) for silent in (100.0, 100.1)] == [False, True]
    assert [counts_as_stopped(silent, start_timeout_s=6.0) for silent in (20.0, 20.1)] == [False, True]
