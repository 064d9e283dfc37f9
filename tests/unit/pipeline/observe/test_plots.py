"""The plots are written; and the panels of the learning curves."""

from pathlib import Path

import pytest

from pipeline.observe.curves import panels_to_draw, run_curves
from pipeline.observe.evaluations import Evaluation
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.plots import plot_curves, plot_timeline
from pipeline.observe.timeline import run_timeline


def _finished(stage: str, step: int, gang: str, worker: str, start: float, end: float, shard: int = 0) -> Event:
    return Event(end, EventKind.FINISHED, stage, step, shard, 0, gang, worker, None, end - start)


def _training(num_steps: int) -> list[Event]:
    """Generation of step i+1 beside the update of step i, 2 s a step."""
    events = []
    for i in range(num_steps):
        events.append(_finished("generate", i, "gen", "g0", 100 + 2 * i, 102 + 2 * i))
        events.append(_finished("update_policy", i, "train", "t0", 102 + 2 * i, 104 + 2 * i))
    return events


@pytest.mark.parametrize("num_steps", [1, 2, 10])
def test_timeline_is_written(tmp_path: Path, num_steps: int) -> None:
    drawn = run_timeline(_training(num_steps))
    assert drawn is not None
    plot_timeline(drawn, [(101.0, "train-0")], tmp_path / "timeline.png", "run")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_curves_are_written_with_gaps_and_missing_metrics(tmp_path: Path) -> None:
    metrics = {0: {"reward/mean": 0.1}, 1: {"reward/mean": float("nan"), "kl/ref": 0.2}, 2: {"kl/ref": 0.4}}
    evaluations = [Evaluation(0, {1: 0.1, 2: 0.3}), Evaluation(2, {1: 0.2, 2: 0.5}, kl=0.5)]
    plot_curves(run_curves(metrics, 3, evaluations), tmp_path / "curves.png", "run")
    plot_curves(run_curves({}, 0, []), tmp_path / "empty.png", "run")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "empty.png").read_bytes().startswith(b"\x89PNG")


def test_parts_of_a_reward_have_a_panel_of_their_own() -> None:
    """A learned reward that rises is seen beside a measured one that falls. One part alone is the reward."""
    one = run_curves({0: {"reward/mean": 1.0, "reward/vader/mean": 1.0}}, 1, [])
    two = run_curves({0: {"reward/mean": 1.0, "reward/vader/mean": 1.0, "reward/learned/mean": 0.5}}, 1, [])
    assert [panel.title for panel in panels_to_draw([one])] == ["Reward"]
    parts = {panel.title: panel.series for panel in panels_to_draw([one, two])}["Parts of the reward"]
    assert parts == (("reward/learned/mean", "learned, training"), ("reward/vader/mean", "vader, training"))
