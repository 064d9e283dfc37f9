"""The time of each step in which two gangs worked at once: numbers that can be counted on a picture."""

import pytest

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.timeline import overlap_by_step


def _ran(gang: str, stage: str, start: float, end: float) -> Event:
    return Event(end, EventKind.FINISHED, stage, 0, 0, gang=gang, worker=gang, seconds=end - start)


def _published(version: int, t: float) -> Event:
    return Event(t, EventKind.PUBLISHED, "publish", version)


def test_by_step() -> None:
    log = [
        Event(0.0, EventKind.RUN_STARTED),
        _published(0, 1.0),
        _ran("generate", "generate", 1.0, 4.0),
        _ran("train", "update_policy", 3.0, 6.0),
        _ran("generate", "generate", 5.0, 9.0),
        _published(1, 6.0),
        _ran("train", "update_policy", 8.0, 10.0),
        _published(2, 11.0),
    ]
    assert overlap_by_step(log) == pytest.approx({0: (1.0 + 1.0) / 5.0, 1: 1.0 / 5.0})


def test_a_step_in_which_a_driver_started_has_none() -> None:
    log = [_published(0, 1.0), Event(2.0, EventKind.RUN_STARTED), _published(1, 3.0), _published(2, 5.0)]
    assert overlap_by_step(log) == {1: 0.0}
    assert overlap_by_step([]) == {}
