"""The display of a running run, on a terminal and in a log."""

import io
import json

from rich.console import Console

from pipeline.observe.graph_view import GangView, RunningNode
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.live import Progress, estimate_seconds_left
from storage.address import Address


class _Clock:
    """Owns nothing but a time that the test sets."""

    def __init__(self) -> None:
        self.t = 0.0

    def __call__(self) -> float:
        return self.t


def gang(name: str, *doing: RunningNode, queued: int = 0, wait: str | None = None) -> GangView:
    return GangView(name, (), 1, True, doing, queued, wait)


def test_one_plain_line_per_step_in_a_log() -> None:
    out, now = io.StringIO(), _Clock()
    with Progress("demo", 4, {"dashboard": "http://x:8787"}, Console(file=out), now=now) as progress:
        now.t = 2.0
        progress.on_step(0, {"reward/mean": 0.25, "kl/ref": 0.125, "other": 1.0})
        progress.on_evaluation(1, 0.5)
        now.t = 6.0
        progress.on_step(1, {"reward/mean": 0.5, "kl/ref": 0.25})
    assert out.getvalue().splitlines() == [
        "dashboard: http://x:8787",
        "step 1/4  reward 0.25  KL 0.125  2.0 s  left 0:06",
        "held-out reward 0.5 at version 1",
        "step 2/4  reward 0.5  KL 0.25  held-out 0.5 at v1  4.0 s  left 0:06",
    ]


def test_the_panel_shows_control_characters_and_obeys_none() -> None:
    """A path, an address or a node's name may hold what would colour, clear or turn the terminal."""
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    hostile = "[red]\x1b[2J\x9b31m\u202e\x07"
    workers = {f"w{hostile}": f"g{hostile}"}
    progress = Progress(f"n{hostile}", 10, {f"l{hostile}": f"/runs/{hostile}"}, console, workers=workers)
    console.print(progress.render())
    progress.on_event(Event(1.0, EventKind.GANG_BUILT, gang=f"g{hostile}", worker=f"w{hostile}"))
    progress.show_gangs([gang(f"g{hostile}", wait=f"waits for {hostile}")])
    console.print(progress.render())
    progress.show_gangs([gang(f"g{hostile}", RunningNode(Address(f"s{hostile}", 0), 1.0))])
    console.print(progress.render())
    shown = out.getvalue()
    seen = "[red]␛[2J\\x9b31m\\u202e␇"
    for text in (
        f"n{seen}",
        f"l{seen}: /runs/{seen}",
        f"loading models: w{seen}",
        f"idle: waits for {seen}",
        f"s{seen} 0.0",
    ):
        assert text in shown
    assert not any(character in shown for character in "\x1b\x9b\u202e\x07")


def test_the_panel_says_what_every_gang_does() -> None:
    out, now = io.StringIO(), _Clock()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    progress = Progress("demo", 10, {"MLflow": "mlflow ui"}, console, first_step=3, now=now)
    now.t = 5.0
    shards = [RunningNode(Address("generate", 4, shard), 1.0 + shard) for shard in range(5)]
    score = gang("score", RunningNode(Address("score", 3, 1), 3.0), queued=2)
    progress.show_gangs([gang("generate", *shards), score, gang("train")])
    progress.on_evaluation(0, 0.25)
    progress.on_evaluation(3, 0.5)
    console.print(progress.render())
    text = out.getvalue()
    assert "step 3/10" in text
    assert "held-out 0.5 at v3 (v0: 0.25)" in text
    lines = [line.split() for line in text.splitlines()]
    assert "generate 4.0 (4 s), generate 4.1 (3 s), generate 4.2 (2 s), and 2 more" in text
    assert "score 3.1 (2 s), 2 queued" in text
    assert ["train", "idle"] in lines
    assert ["MLflow:", "mlflow", "ui"] in lines


def test_the_panel_says_what_loads_what_waits_and_what_is_wrong() -> None:
    out, now = io.StringIO(), _Clock()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    workers = {"train-0": "train", "train-1": "train", "generate-0": "generate"}
    progress = Progress("demo", 10, {}, console, now=now, workers=workers, rebuilt_together={"train"})

    def shown() -> str:
        console.print(progress.render())
        text = out.getvalue()
        out.seek(0)
        out.truncate()
        return text

    now.t = 6.0
    assert "loading models: generate-0, train-0, train-1, 6 s" in shown()
    progress.on_event(Event(6.0, EventKind.GANG_BUILT, gang="train", worker="train-1"))  # the last rank
    text = shown()
    assert "loading models: generate-0, 6 s" in text
    assert "generate-0 loads models (6 s)" in text
    assert "idle" in text
    progress.on_event(Event(7.0, EventKind.GANG_BUILT, gang="generate", worker="generate-0"))
    progress.on_event(Event(7.0, EventKind.SUBMITTED, "generate", 0, 0, gang="generate", worker="generate-0"))
    progress.show_gangs([gang("train", wait="update_policy 0.0 waits for generate 0.0 (running)")])
    assert "idle: update_policy 0.0 waits for generate 0.0 (running)" in shown()
    for step, reward in enumerate((0.0, 0.5, 1.0)):
        progress.on_step(step, {"reward/mean": reward, "policy/approx_kl": 3.36, "samples_per_s": 2.5})
    text = shown()
    assert "▁▅█" in text
    assert "approx_kl 3.36 > 0.1" in text
    assert "2.5 responses/s" in text
    progress.on_event(Event(9.0, EventKind.GANG_LOST, gang="train", worker="train-0", detail="its process ended"))
    assert "train-0 lost at step 3: its process ended" in out.getvalue()
    now.t = 12.0
    assert "train-0 loads models (3 s)" in shown()


def test_for_programs_every_line_is_an_object() -> None:
    out, now = io.StringIO(), _Clock()
    workers = {"train-0": "train"}
    console = Console(file=out, force_terminal=True, width=40)
    with Progress("demo", 2, {"MLflow": "ui"}, console, now=now, workers=workers, json_lines=True) as progress:
        now.t = 1.5
        progress.on_event(Event(1.5, EventKind.SUBMITTED, "generate", 0, 0, gang="train", worker="train-0"))
        progress.on_event(Event(1.6, EventKind.WARNED, detail="odd \x1b[31m"))
        now.t = 3.0
        progress.on_step(0, {"reward/mean": 0.5, "policy/ratio_max": float("nan")})
        progress.on_evaluation(1, 0.25)
        progress.print_alarm("kl: far")
        progress.on_recovery("train-0 lost at step 0; 1 update replayed")
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [line.pop("event") for line in lines] == [
        "link", "loading", "ready", "warning", "step", "evaluation", "alarm", "recovered",
    ]  # fmt: skip
    assert lines[2] == {"t": 1.5, "seconds": 1.5}
    assert lines[3] == {"t": 1.5, "text": "odd \x1b[31m"}
    assert lines[4] == {
        "t": 3.0, "step": 0, "steps": 2, "seconds": 1.5, "left_s": 1.5,
        "metrics": {"reward/mean": 0.5, "policy/ratio_max": None}, "unhealthy": ["ratio_max nan > 100"],
    }  # fmt: skip


def test_the_start_of_the_workers_does_not_count_as_a_step() -> None:
    out, now = io.StringIO(), _Clock()
    progress = Progress("demo", 4, {}, Console(file=out), now=now)
    now.t = 30.0
    progress.on_event(Event(30.0, EventKind.SUBMITTED, "generate", 0, 0, gang="generate", worker="g0"))
    now.t = 31.0
    progress.on_event(Event(31.0, EventKind.SUBMITTED, "reference", 0, 0, gang="train", worker="t0"))
    now.t = 32.0
    progress.on_step(0, {})
    assert out.getvalue().split("  ")[-2:] == ["2.0 s", "left 0:06\n"]


def test_time_left_is_the_mean_of_the_last_five() -> None:
    assert estimate_seconds_left([], 3) is None
    assert estimate_seconds_left([100.0, 1.0, 2.0, 3.0, 4.0, 5.0], 2) == 6.0


def test_responses_of_a_fixed_length_are_not_shown_as_cut() -> None:
    for fixed in (False, True):
        out = io.StringIO()
        progress = Progress("sums", 4, {}, Console(file=out, width=200), now=_Clock(), has_fixed_length=fixed)
        progress.on_step(0, {"reward/mean": 0.5, "group/equal_fraction": 0.25, "response/truncated_fraction": 1.0})
        assert ("cut 1 " in out.getvalue()) is not fixed
        assert ("!!" in out.getvalue()) is not fixed
