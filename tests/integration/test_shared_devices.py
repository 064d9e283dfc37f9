"""Whole runs whose engine and trainer have their devices in turn: the run that it would be without, one at a time."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.journal import Event, EventKind, read_events
from pipeline.observe.timeline import Box, read_boxes
from tests.support.run_results import outputs
from tests.support.runs import QUIET, configure, finish, use_runtime

pytestmark = pytest.mark.processes

SHARED = "placement.device_sharing=[[generate,train]]"


@pytest.fixture(scope="module")
def shared(folder: Path) -> RunConfig:
    return finish(configure(folder, "shared-devices", SHARED, *QUIET))


def events_of(config: RunConfig) -> list[Event]:
    return list(read_events(RunPaths(config.run_dir).events))


def boxes_of(config: RunConfig, gang: str) -> list[Box]:
    return [box for box in read_boxes(events_of(config)) if box.gang == gang]


def givers_of(config: RunConfig) -> list[str]:
    """Who passed the devices on, in order."""
    return [str(event.gang) for event in events_of(config) if event.kind is EventKind.DEVICES_HANDED_OVER]


def assert_alternating(givers: list[str]) -> None:
    assert givers == [("train", "generate")[number % 2] for number in range(len(givers))]


def test_it_is_the_run_that_it_would_be_on_devices_of_its_own(shared: RunConfig, overlapped: RunConfig) -> None:
    assert outputs(shared) == outputs(overlapped)
    assert verify_run(shared).faults == []


def test_one_of_them_works_at_a_time(shared: RunConfig) -> None:
    engine, trainer = boxes_of(shared, "generate"), boxes_of(shared, "train")
    assert engine
    assert trainer
    for one in engine:
        for other in trainer:
            assert one.end_s <= other.start_s or other.end_s <= one.start_s, f"{one} beside {other}"


def test_who_has_nothing_to_do_passes_them_on(shared: RunConfig) -> None:
    givers = givers_of(shared)
    assert_alternating(givers)
    assert len(givers) >= shared.steps, "a step has one turn of each at least, but for what is generated ahead"


def test_workers_that_do_not_leave_their_devices_are_lost_and_nothing_else_is(
    folder: Path, overlapped: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:RestlessRuntime")
    config = finish(configure(folder, "restless", SHARED, "cluster.deadline_s=8", *QUIET))
    lost = [(event.worker, event.detail or "") for event in events_of(config) if event.kind is EventKind.GANG_LOST]
    assert [worker for worker, _ in lost] == ["generate-0", "train-0", "generate-0"]
    died, unable, silent = (detail for _, detail in lost)
    assert "its process ended" in died
    assert "did not leave its devices in time (cluster.deadline_s)" in silent
    assert "did not leave its devices: RuntimeError: the device does not answer" in unable
    assert outputs(config) == outputs(overlapped)
    assert_alternating(givers_of(config))
