"""The overlap of gangs, the lane of each box, and the part of a run that is enlarged, in numbers."""

import pytest

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.timeline import Box, arrange_lanes, merge_intervals, middle_window, overlap_by_step, run_timeline
from storage.address import Address


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


def _box(stage: str, step: int, worker: str, start: float, end: float) -> Box:
    return Box(Address(stage, step), worker[0], worker, 0, start, end, 0.0)


def test_a_worker_has_as_many_lanes_as_it_runs_nodes_at_once() -> None:
    boxes = [
        _box("generate", 0, "g1", 0.0, 2.0),
        _box("generate", 1, "g0", 0.0, 3.0),
        _box("generate", 2, "g0", 1.0, 4.0),  # beside node 1
        _box("generate", 3, "g0", 3.0, 5.0),  # after node 1
        _box("update_policy", 0, "a0", 4.0, 5.0),
    ]
    lanes = [(lane.gang, lane.worker, [box.address.step for box in lane.boxes]) for lane in arrange_lanes(boxes)]
    assert lanes == [("a", "a0", [0]), ("g", "g0", [1, 3]), ("g", "g0", [2]), ("g", "g1", [0])]
    assert arrange_lanes([]) == []


def test_the_window_keeps_to_what_was_run() -> None:
    """The middle of 5 steps of 10 s is the first 4: the margin of 1.6 s ends where nothing ran before."""
    boxes = [_box("update_policy", i, "t0", 10.0 * i, 10.0 * i + 10) for i in range(5)]
    assert middle_window(boxes) == pytest.approx((0.0, 41.6))
    assert middle_window(boxes, num_steps=5) is None
    assert middle_window([_box("generate", 0, "g0", 0.0, 1.0)]) is None


def test_of_a_long_run_the_first_and_the_last_boxes_are_in_lanes() -> None:
    found = run_timeline([_ran("judge", "score", i, i + 0.5) for i in range(1000)], max_boxes=10)
    assert found is not None
    (lane,) = found.lanes
    assert [box.start_s for box in lane.boxes] == [0, 1, 2, 3, 4, 995, 996, 997, 998, 999]
    assert (found.start_s, found.end_s, found.num_boxes, found.middle_period) == (0, 999.5, 1000, None)
    assert run_timeline([]) is None


def test_the_time_between_two_drivers_is_left_out() -> None:
    """The first works from 10 to 14, the second from 100 to 103: 86 s are left out, and what falls into them is put at
    their start."""
    found = run_timeline([
        Event(9.0, EventKind.RUN_STARTED),
        _ran("train", "update_policy", 10.0, 14.0),
        Event(99.0, EventKind.RUN_STARTED),
        _ran("train", "update_policy", 100.0, 103.0),
    ])  # fmt: skip
    assert found is not None
    assert [(box.start_s, box.end_s) for lane in found.lanes for box in lane.boxes] == [(10.0, 14.0), (14.0, 17.0)]
    assert (found.start_s, found.end_s, found.gaps) == (10.0, 17.0, [(14.0, 100.0)])
    assert [found.without_gaps(t) for t in (12.0, 50.0, 99.0, 101.0)] == [12.0, 14.0, 14.0, 15.0]


def test_union() -> None:
    assert merge_intervals([(4, 5), (0, 2), (1, 3), (5, 6), (9, 9)]) == [(0, 3), (4, 6)]
