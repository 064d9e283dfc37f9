"""The lane of each box, and the part of a run that is shown first, in numbers."""

import pytest

from pipeline.observe.summary import Box
from pipeline.observe.timeline import lanes_of, middle_window
from storage.address import Address


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
    lanes = [(lane.gang, lane.worker, [box.address.step for box in lane.boxes]) for lane in lanes_of(boxes)]
    assert lanes == [("a", "a0", [0]), ("g", "g0", [1, 3]), ("g", "g0", [2]), ("g", "g1", [0])]
    assert lanes_of([]) == []


def test_the_window_keeps_to_what_was_run() -> None:
    """The middle of 5 steps of 10 s is the first 4: the margin of 1.6 s ends where nothing ran before."""
    boxes = [_box("update_policy", i, "t0", 10.0 * i, 10.0 * i + 10) for i in range(5)]
    assert middle_window(boxes) == pytest.approx((0.0, 41.6))
    assert middle_window(boxes, num_steps=5) is None
    assert middle_window([_box("generate", 0, "g0", 0.0, 1.0)]) is None
