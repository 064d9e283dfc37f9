"""What is shown while a run goes on, on a terminal and in a log."""

import io

from rich.console import Console

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.live import Progress, clock, time_left


class _Clock:
    """Owns nothing but a time that the test sets."""

    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


def test_one_plain_line_per_step_in_a_log() -> None:
    out, now = io.StringIO(), _Clock()
    with Progress("demo", 4, {"dashboard": "http://x:8787"}, Console(file=out), now=now) as progress:
        now.t = 2.0
        progress.step(0, {"reward/mean": 0.25, "kl/ref": 0.125, "other": 1.0})
        progress.evaluation(1, 0.5)
        now.t = 6.0
        progress.step(1, {"reward/mean": 0.5, "kl/ref": 0.25})
    assert out.getvalue().splitlines() == [
        "dashboard: http://x:8787",
        "step 1/4  reward 0.25  KL 0.125  2.0 s  left 0:06",
        "held-out reward 0.5 at version 1",
        "step 2/4  reward 0.5  KL 0.25  held-out 0.5 at v1  4.0 s  left 0:06",
    ]


def test_the_panel_says_what_every_worker_does() -> None:
    out, now = io.StringIO(), _Clock()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    progress = Progress("demo", 10, {"MLflow": "mlflow ui"}, console, first_step=3, now=now)
    node = {"stage": "generate", "step": 4, "gang": "generate", "worker": "g0"}
    for shard in (0, 1):
        progress.event(Event(1.0, EventKind.STARTED, shard=shard, **node))
    progress.event(Event(2.0, EventKind.FINISHED, shard=0, **node))
    progress.event(Event(1.0, EventKind.STARTED, "update_policy", 3, 0, 0, "train", "t0"))
    progress.event(Event(3.0, EventKind.FAILED, "update_policy", 3, 0, 0, "train", "t0"))
    now.t = 5.0
    progress.evaluation(0, 0.25)
    progress.evaluation(3, 0.5)
    console.print(progress.render())
    text = out.getvalue()
    assert "step 3/10" in text
    assert "held-out 0.5 at v3 (v0: 0.25)" in text
    lines = [line.split() for line in text.splitlines()]
    assert ["generate", "g0", "generate", "4.1", "(4", "s)"] in lines
    assert ["train", "t0", "idle"] in lines
    assert ["MLflow:", "mlflow", "ui"] in lines


def test_the_start_of_the_workers_does_not_count_as_a_step() -> None:
    out, now = io.StringIO(), _Clock()
    progress = Progress("demo", 4, {}, Console(file=out), now=now)
    now.t = 30.0
    progress.event(Event(30.0, EventKind.SUBMITTED, "generate", 0, 0, gang="generate", worker="g0"))
    now.t = 31.0
    progress.event(Event(31.0, EventKind.SUBMITTED, "reference", 0, 0, gang="train", worker="t0"))
    now.t = 32.0
    progress.step(0, {})
    assert out.getvalue().split("  ")[-2:] == ["2.0 s", "left 0:06\n"]


def test_what_a_worker_was_handed_is_what_it_does() -> None:
    """The report that a node has begun comes with its result: the panel goes by the submission."""
    progress = Progress("demo", 10, {}, Console(file=io.StringIO()), now=_Clock())
    node = {"stage": "generate", "step": 2, "gang": "generate"}

    def doing() -> set[tuple[str, int]]:
        return {(worker, shard) for worker, _, _, shard in progress._open}

    progress.event(Event(0.0, EventKind.SUBMITTED, shard=0, worker="g0", **node))
    progress.event(Event(0.0, EventKind.SUBMITTED, shard=1, worker="g1", **node))
    progress.event(Event(0.0, EventKind.SUBMITTED, "score", 2, 0, gang="score"))  # runs ahead: no worker, not shown
    assert doing() == {("g0", 0), ("g1", 1)}
    progress.event(Event(1.0, EventKind.GANG_LOST, gang="generate", worker="g1"))
    assert doing() == {("g0", 0)}
    progress.event(Event(2.0, EventKind.STARTED, shard=0, worker="g0", **node))
    progress.event(Event(3.0, EventKind.FINISHED, shard=0, worker="g0", **node))
    assert doing() == set()


def test_the_live_display_starts_and_stops() -> None:
    out = io.StringIO()
    with Progress("demo", 1, {}, Console(file=out, force_terminal=True, width=80)) as progress:
        progress.step(0, {"reward/mean": 1.0})
    assert "step 1/1" in out.getvalue()


def test_time_left_is_the_mean_of_the_last_five() -> None:
    assert time_left([], 3) is None
    assert time_left([100.0, 1.0, 2.0, 3.0, 4.0, 5.0], 2) == 6.0


def test_clock() -> None:
    assert [clock(None), clock(59.6), clock(3661)] == ["-", "1:00", "1:01:01"]
