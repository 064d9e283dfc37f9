"""An alarm reaches everybody who should know, and ends the run where the config says so."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.config.loading import load_config
from pipeline.driver.alarms import Alarms, AlarmStop
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.graph import step_nodes
from pipeline.observe.journal import EventKind, Journal, read_events
from pipeline.observe.live import Progress
from pipeline.observe.tracking import NullTracker
from tests.support.paths import TINY


class Tags(NullTracker):
    """Owns what it was kept."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def tags(self, values: Mapping[str, str]) -> None:
        self.kept |= values


class Watched:
    """Owns the alarms of a run of the tiny config whose engine is up and whose trainer waits for it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        config = load_config([TINY], overrides)
        self.screen, self.tags, self.path = io.StringIO(), Tags(), folder / "events.jsonl"
        self.dispatch = Dispatch(config.gangs())
        for gang in ("generate", "score", "train"):
            self.dispatch.worker_up(gang, 0)
        self.dispatch.admit(step_nodes(config.graph(), 0))
        progress = Progress("run", 4, {}, console=Console(file=self.screen, width=200))
        self.journal = Journal(self.path, progress.event)
        self.alarms = Alarms(config, self.dispatch, self.journal, progress, self.tags)

    def close(self) -> None:
        self.journal.close()

    def raised(self) -> list[tuple[str | None, int | None, str | None]]:
        return [(e.rule, e.step, e.detail) for e in read_events(self.path) if e.kind is EventKind.ALARM]

    def publish_start(self) -> None:
        """The shards of step 0 are handed out, and nothing else can be."""
        for submit in self.dispatch.next_submits():
            self.dispatch.done(submit.node.address)
        self.dispatch.next_submits()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Return what makes a `Watched` with these overrides."""
    with ExitStack() as stack:
        yield lambda *overrides: stack.enter_context(closing(Watched(tmp_path, *overrides)))


def test_an_alarm_is_an_event_a_line_and_a_tag(watch: Callable[..., Watched]) -> None:
    watched = watch("alarms.steps=1")
    watched.alarms.step(7, {"policy/entropy": 0.01})
    text = "policy/entropy is 0.01 nats a token, below 0.05 (alarms.entropy_below)"
    assert watched.raised() == [("entropy", 7, text)]
    assert f"ALARM: entropy: {text}" in watched.screen.getvalue()
    assert watched.tags.kept == {"alarm.entropy": text}
    assert json.loads(watched.path.read_text())["rule"] == "entropy"


def test_an_alarm_that_makes_further_work_worthless_ends_the_run(watch: Callable[..., Watched]) -> None:
    watched = watch("alarms.steps=1", "alarms.stop=[kl]")
    watched.alarms.step(0, {"policy/entropy": 0.01})
    with pytest.raises(
        AlarmStop, match=r"kl: kl/ref_per_token is 3 nats, above 1 .*That ends the run \(alarms\.stop\)"
    ):
        watched.alarms.step(1, {"policy/entropy": 0.01, "kl/ref_per_token": 3.0})
    assert [rule for rule, _, _ in watched.raised()] == ["entropy", "kl"], "it is kept before it ends the run"


def test_an_idle_trainer_says_what_it_waits_for(watch: Callable[..., Watched]) -> None:
    watched = watch("alarms.trainer_idle_s=5", "alarms.engine_silent_s=null")
    watched.publish_start()
    for now in (100.0, 104.0, 105.0, 106.0):
        watched.alarms.look(now)
    ((rule, _, text),) = watched.raised()
    assert (rule, text) == (
        "trainer_idle",
        "gang train has had nothing to do for 5 s (alarms.trainer_idle_s): reference/step_000000/shard_0000 waits for "
        "generate/step_000000/shard_0000 (running)",
    )


def test_an_engine_that_finishes_nothing_is_named(watch: Callable[..., Watched]) -> None:
    watched = watch("alarms.trainer_idle_s=null", "alarms.engine_silent_s=5")
    watched.publish_start()
    watched.alarms.look(100.0)
    watched.alarms.finished("generate-0")
    watched.alarms.look(104.0)
    watched.alarms.look(108.0)
    assert watched.raised() == []
    watched.alarms.look(109.0)
    ((rule, _, text),) = watched.raised()
    assert rule == "engine_silent"
    assert text is not None
    assert text.startswith("generate-0 has work, and has finished none of it for 5 s")
