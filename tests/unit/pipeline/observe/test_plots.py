"""The timeline's boxes, in numbers; and that both pictures are written."""

from pathlib import Path

import pytest

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.plots import CURVES, DrawnBox, Panel, lay_out, panels_of, plot_curves, plot_timeline
from pipeline.observe.summary import Box
from pipeline.observe.timeline import middle_window
from storage.address import Address


def _finished(stage: str, step: int, gang: str, worker: str, start: float, end: float, shard: int = 0) -> Event:
    return Event(end, EventKind.FINISHED, stage, step, shard, 0, gang, worker, None, end - start)


def _training(num_steps: int) -> list[Event]:
    """Generation of step i+1 beside the update of step i, 2 s a step."""
    events = []
    for i in range(num_steps):
        events.append(_finished("generate", i, "gen", "g0", 100 + 2 * i, 102 + 2 * i))
        events.append(_finished("update_policy", i, "train", "t0", 102 + 2 * i, 104 + 2 * i))
    return events


def test_lanes_and_boxes() -> None:
    timeline = lay_out(
        [
            _finished("update_policy", 0, "train", "t0", 104.0, 107.0),
            _finished("generate", 0, "gen", "g0", 100.0, 103.0, shard=0),
            _finished("generate", 0, "gen", "g0", 101.0, 104.0, shard=1),  # beside shard 0: a row of its own
            _finished("generate", 1, "gen", "g0", 103.0, 106.0, shard=0),
            _finished("generate", 0, "gen", "g1", 100.0, 102.0, shard=2),
            Event(100.0, EventKind.STARTED, "score", 0),
        ]
    )
    assert [(lane.gang, lane.worker, lane.y) for lane in timeline.lanes] == [
        ("gen", "g0", 0.0), ("gen", "g0", 1.0), ("gen", "g1", 2.0), ("train", "t0", 3.5)
    ]  # fmt: skip
    assert timeline.boxes == [
        DrawnBox("generate", 0, 0, 0.0, 0.0, 3.0),
        DrawnBox("generate", 1, 0, 0.0, 3.0, 3.0),
        DrawnBox("generate", 0, 1, 1.0, 1.0, 3.0),
        DrawnBox("generate", 0, 2, 2.0, 0.0, 2.0),
        DrawnBox("update_policy", 0, 0, 3.5, 4.0, 3.0),
    ]
    assert timeline.duration_s == 7.0


def test_window_on_the_middle_steps() -> None:
    """The middle of 10 steps is 3..6: updates from 2 + 6 s to 4 + 12 s, with 4 % of margin."""
    assert lay_out(_training(10)).middle_s == pytest.approx((8 - 0.32, 16 + 0.32))
    short = lay_out(_training(3))
    assert (short.middle_s, short.duration_s) == (None, 8.0)


@pytest.mark.parametrize("num_steps", [0, 2, 10])
def test_timeline_is_written(tmp_path: Path, num_steps: int) -> None:
    plot_timeline(_training(num_steps), tmp_path / "timeline.png", "run")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_written_with_gaps_and_missing_metrics(tmp_path: Path) -> None:
    panels = [Panel("Reward", (("reward", "training"),)), Panel("KL", (("kl", "KL"),), 0.0), Panel("X", (("x", "x"),))]
    metrics = {0: {"reward": 0.1}, 1: {"reward": float("nan"), "kl": 0.2}, 2: {"reward": 0.3, "kl": 0.4}}
    held_out = {"reward": [(0, 0.1), (3, 0.4)]}
    plot_curves(metrics, panels, held_out, tmp_path / "curves.png", "run")
    plot_curves({}, panels, {}, tmp_path / "empty.png", "run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_parts_of_a_reward_have_a_panel_of_their_own() -> None:
    assert panels_of(["vader"]) == panels_of([]) == CURVES
    first, second, *others = panels_of(["learned", "vader"])
    assert (first, *others) == CURVES
    assert second.metrics == (("reward/learned/mean", "learned"), ("reward/vader/mean", "vader"))


def test_a_lost_worker_is_a_mark(tmp_path: Path) -> None:
    log = [*_training(10), Event(1e9, EventKind.GANG_LOST, gang="train", worker="train-0")]
    (left_s, worker), timeline = lay_out(log).losses[0], tmp_path / "timeline.png"
    assert worker == "train-0"
    origin = 1e9 - left_s
    plot_timeline([*_training(10), Event(origin + 8.5, EventKind.GANG_LOST, gang="train", worker="t")], timeline, "run")
    assert timeline.stat().st_size > 0
    assert lay_out(_training(3)).losses == ()


def box_of(stage: str, step: int, worker: str, start: float, end: float) -> Box:
    return Box(Address(stage, step), worker[0], worker, 0, start, end, 0.0)


def test_the_window_keeps_to_what_was_run() -> None:
    """The middle of 5 steps of 10 s is the first 4: the margin of 1.6 s ends where nothing ran before."""
    boxes = [box_of("update_policy", i, "t0", 10.0 * i, 10.0 * i + 10) for i in range(5)]
    assert middle_window(boxes) == pytest.approx((0.0, 41.6))
    assert middle_window(boxes, num_steps=5) is None
    assert middle_window([box_of("generate", 0, "g0", 0.0, 1.0)]) is None
