"""An alarm reaches everybody who should know, and ends the run where the config says so."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.config.loading import load_config
from pipeline.config.sections import AlarmsConfig
from pipeline.driver.alarms import (
    Alarm,
    Alarms,
    AlarmStop,
    WithoutProgress,
    count_violations,
    evaluate_step_rules,
    remove_name,
    update_without_progress,
)
from pipeline.graph.display import ObservedDispatch
from pipeline.graph.graph import step_nodes
from pipeline.observe.journal import EventKind, Journal, read_events
from pipeline.observe.learning import check_learning
from pipeline.observe.live import Progress
from pipeline.observe.tracking import Tracker
from tests.support.paths import TINY


class Tags(Tracker):
    """Owns what it was kept."""

    def __init__(self) -> None:
        self.kept: dict[str, str] = {}

    def set_tags(self, values: Mapping[str, str]) -> None:
        self.kept |= values


class Watched:
    """Owns the alarms of a run of the tiny config whose engine is up and whose trainer waits for it."""

    def __init__(self, folder: Path, *overrides: str) -> None:
        config = load_config([TINY], overrides)
        self.screen, self.tags, self.path = io.StringIO(), Tags(), folder / "events.jsonl"
        self.dispatch = ObservedDispatch(config.gangs())
        for gang in ("generate", "score", "train"):
            self.dispatch.on_worker_up(gang, 0)
        self.dispatch.admit(step_nodes(config.graph(), 0))
        progress = Progress("run", 4, {}, console=Console(file=self.screen, width=200))
        self.journal = Journal(self.path, progress.on_event)
        self.alarms = Alarms(config, self.dispatch, self.journal, progress, self.tags)

    def close(self) -> None:
        self.journal.close()

    def raised(self) -> list[tuple[str | None, int | None, str | None]]:
        return [(e.rule, e.step, e.detail) for e in read_events(self.path) if e.kind is EventKind.ALARM]

    def publish_start(self) -> None:
        """The shards of step 0 are handed out, and nothing else can be."""
        for submit in self.dispatch.next_submits():
            self.dispatch.mark_done(submit.node.address)
        self.dispatch.next_submits()


@pytest.fixture
def watch(tmp_path: Path) -> Iterator[Callable[..., Watched]]:
    """Return what makes a `Watched` with these overrides."""
    with ExitStack() as stack:
        yield lambda *overrides: stack.enter_context(closing(Watched(tmp_path, *overrides)))


def test_an_alarm_is_an_event_a_line_and_a_tag(watch: Callable[..., Watched]) -> None:
    watched = watch()
    for step in (5, 6, 7):
        watched.alarms.check_step(step, {"policy/entropy": 0.01})
    text = "policy/entropy is 0.01 nats a token, below 0.05 (alarms.entropy_below), 3 steps in a row"
    assert watched.raised() == [("entropy", 7, text)]
    assert f"ALARM: entropy: {text}" in watched.screen.getvalue()
    assert watched.tags.kept == {"alarm.entropy": text}
    assert json.loads(watched.path.read_text())["rule"] == "entropy"


def test_an_alarm_that_makes_further_work_worthless_ends_the_run(watch: Callable[..., Watched]) -> None:
    watched = watch("alarms.stop=[kl]")
    watched.alarms.check_step(0, {"policy/entropy": 0.01})
    for step in (1, 2):
        watched.alarms.check_step(step, {"policy/entropy": 0.01, "kl/ref_per_token": 3.0})
    with pytest.raises(
        AlarmStop, match=r"kl: kl/ref_per_token is 3 nats, above 1 .*That ends the run \(alarms\.stop\)"
    ):
        watched.alarms.check_step(3, {"policy/entropy": 0.01, "kl/ref_per_token": 3.0})
    assert [rule for rule, _, _ in watched.raised()] == ["entropy", "kl"], "it is kept before it ends the run"


def test_an_idle_trainer_says_what_it_waits_for(watch: Callable[..., Watched]) -> None:
    watched = watch("alarms.trainer_idle_s=5", "alarms.engine_silent_s=null")
    watched.publish_start()
    for now in (100.0, 104.0, 105.0, 106.0):
        watched.alarms.check_time(now)
    ((rule, _, text),) = watched.raised()
    assert (rule, text) == (
        "trainer_idle",
        "gang train has had nothing to do for 5 s (alarms.trainer_idle_s): reference/step_000000/shard_0000 waits for "
        "generate/step_000000/shard_0000 (running)",
    )


def test_an_engine_that_finishes_nothing_is_named(watch: Callable[..., Watched]) -> None:
    watched = watch("alarms.trainer_idle_s=null", "alarms.engine_silent_s=5")
    watched.publish_start()
    watched.alarms.check_time(100.0)
    watched.alarms.on_worker_finished("generate-0")
    watched.alarms.check_time(104.0)
    watched.alarms.check_time(108.0)
    assert watched.raised() == []
    watched.alarms.check_time(109.0)
    ((rule, _, text),) = watched.raised()
    assert rule == "engine_silent"
    assert text.startswith("generate-0 has work, and has finished none of it for 5 s")


HEALTHY = {
    "staleness/mean": 0.4, "policy/entropy": 2.0, "kl/ref_per_token": 0.01, "critic/explained_variance": 0.3,
    "policy/approx_kl": 0.001, "policy/ratio_max": 1.4,
}  # fmt: skip


def alarms_of(
    steps: Iterable[Mapping[str, float]], limits: AlarmsConfig, staleness: int = 2, first: int = 0
) -> list[tuple[str, int | None]]:
    """(rule, step) of the alarms that these steps' metrics raise."""
    in_a_row: dict[str, int] = {}
    raised: list[Alarm] = []
    for step, metrics in enumerate(steps, start=first):
        in_a_row, alarms = count_violations(
            in_a_row, step, evaluate_step_rules(step, {**HEALTHY, **metrics}, limits, staleness)
        )
        raised += alarms
    return [(alarm.rule, alarm.step) for alarm in raised]


def test_a_healthy_run_raises_none() -> None:
    assert alarms_of([{}] * 50, AlarmsConfig(staleness_steps=1)) == []


@pytest.mark.parametrize(
    ("metric", "bad", "rule"), [("policy/entropy", 0.01, "entropy"), ("kl/ref_per_token", 1.5, "kl")]
)
def test_an_alarm_comes_when_its_rule_has_held_long_enough_and_once(metric: str, bad: float, rule: str) -> None:
    """Three in a row, broken by the fourth step; then five in a row: at steps 2 and 6."""
    values = [bad, bad, bad, HEALTHY[metric], bad, bad, bad, bad, bad]
    assert alarms_of([{metric: value} for value in values], AlarmsConfig()) == [(rule, 2), (rule, 6)]


def test_a_critic_that_is_not_trained_is_no_better_than_a_bad_one() -> None:
    assert alarms_of([{"critic/lr": 0.0}] * 5, AlarmsConfig()) == [("critic", 4)]


def test_what_is_no_number_is_out_of_bounds() -> None:
    broken = {"policy/entropy": float("nan"), "kl/ref_per_token": float("nan")}
    assert alarms_of([broken] * 3, AlarmsConfig()) == [("entropy", 2), ("kl", 2)]


def test_a_step_without_the_metric_neither_counts_nor_ends_the_count() -> None:
    limits = AlarmsConfig(critic_steps=2)
    in_a_row, none = count_violations({}, 0, evaluate_step_rules(0, {"critic/explained_variance": -1.0}, limits, 1))
    in_a_row, nor = count_violations(in_a_row, 1, evaluate_step_rules(1, {}, limits, 1))
    _, (alarm,) = count_violations(in_a_row, 2, evaluate_step_rules(2, {"critic/explained_variance": -0.5}, limits, 1))
    assert (none, nor, alarm.step) == ([], [], 2)
    assert alarm.text == "critic/explained_variance is -0.5: the critic is worse than a constant, 2 steps in a row"


LEARNS = {
    "group/equal_fraction": 0.2, "response/truncated_fraction": 0.1, "reward/mean": 0.5, "reward/std": 0.1,
    "response/length_mean": 5.0, "response/length_max": 8.0, "policy/lr": 1e-4, "policy/optimizer_steps": 2.0,
    "policy/grad_norm_max": 0.3,
}  # fmt: skip
SAME_LENGTH = {"response/length_mean": 8.0}


def holding(metrics: Mapping[str, float], **facts: bool) -> list[str]:
    return [sign.rule for sign in check_learning({**LEARNS, **metrics}, **facts) if sign.is_violated]


@pytest.mark.parametrize(
    ("metrics", "facts", "rules"),
    [
        ({}, {}, []),
        ({"group/equal_fraction": 0.75}, {}, ["equal_groups"]),
        ({"response/truncated_fraction": 0.5}, {}, ["cut_responses"]),
        ({"response/truncated_fraction": 0.5}, {"has_fixed_length": True}, []),
        ({"reward/std": 1e-17}, {}, ["constant_score"]),
        ({"reward/std": 0.0, "group/equal_fraction": 1.0, "policy/grad_norm_max": 0.0}, {}, ["constant_score"]),
        (SAME_LENGTH, {}, ["constant_length"]),
        (SAME_LENGTH, {"has_fixed_length": True}, []),
        ({**SAME_LENGTH, "response/truncated_fraction": 1.0}, {}, ["cut_responses"]),
        ({"policy/lr": 0.0, "policy/optimizer_steps": 0.0}, {}, ["unmoved"]),
        ({"policy/lr": 0.0, "policy/optimizer_steps": 0.0}, {"trains_only_critic": True}, []),
        ({"policy/grad_norm_max": 0.0}, {}, ["unmoved"]),
        ({"kl/ref_per_token": 0.0}, {}, []),
        ({"kl/ref_per_token": 0.0}, {"is_trained": True}, ["unmoved"]),
    ],
)
def test_the_signs_of_a_run_that_learns_nothing(
    metrics: dict[str, float], facts: dict[str, bool], rules: list[str]
) -> None:
    assert holding(metrics, **facts) == rules


def test_a_critic_values_cut_responses_so_that_they_are_no_sign() -> None:
    signs = check_learning({"response/truncated_fraction": 1.0, "reward/std": 0.1})
    assert [sign.rule for sign in signs if sign.is_violated] == []


def test_a_run_that_learns_nothing_raises_an_alarm(watch: Callable[..., Watched]) -> None:
    """The policy is not looked at while only the critic is trained: `unmoved` counts from step 2 on."""
    watched = watch("ppo.critic_warmup_steps=2")
    for step in range(5):
        watched.alarms.check_step(step, {**LEARNS, "reward/std": 0.0, "policy/optimizer_steps": 0.0})
    assert [(rule, step) for rule, step, _ in watched.raised()] == [("constant_score", 2), ("unmoved", 4)]


def test_staleness_at_its_bound() -> None:
    at_bound = [{"staleness/mean": 2.0}] * 3
    assert alarms_of(at_bound, AlarmsConfig(staleness_steps=3)) == [("staleness", 2)]
    assert alarms_of(at_bound, AlarmsConfig(staleness_steps=3), staleness=3) == []
    assert alarms_of([{"staleness/mean": 0.0}] * 3, AlarmsConfig(staleness_steps=3), staleness=0) == []


@pytest.mark.parametrize("bad", [{"policy/approx_kl": 0.3}, {"policy/ratio_max": 50.0}])
def test_only_the_first_updates_are_looked_at(bad: dict[str, float]) -> None:
    assert alarms_of([{}, bad, bad, bad], AlarmsConfig()) == [("first_updates", 1)]
    assert alarms_of([bad], AlarmsConfig(), first=3) == []


def test_null_switches_a_rule_off() -> None:
    none = AlarmsConfig(entropy_below=None, kl_above=None, critic_steps=None)
    bad = {"policy/entropy": 0.0, "kl/ref_per_token": 9.0, "critic/explained_variance": -9.0, "staleness/mean": 2.0}
    assert alarms_of([bad] * 50, none) == []


def test_who_is_quiet_for_too_long_is_told_of_once() -> None:
    """a is quiet from 10 on; b from 12, is heard at 15, and quiet again from 16."""
    quiet, overdue = update_without_progress(WithoutProgress(), 10.0, ["a"], 6.0)
    assert overdue == []
    quiet, overdue = update_without_progress(quiet, 12.0, ["a", "b"], 6.0)
    assert overdue == []
    quiet, overdue = update_without_progress(remove_name(quiet, "b"), 16.0, ["a", "b"], 6.0)
    assert overdue == ["a"]
    quiet, overdue = update_without_progress(quiet, 21.9, ["a", "b"], 6.0)
    assert overdue == []
    quiet, overdue = update_without_progress(quiet, 22.0, ["a", "b"], 6.0)
    assert overdue == ["b"]
    quiet, _ = update_without_progress(quiet, 23.0, ["b"], 6.0)
    _, overdue = update_without_progress(
        update_without_progress(quiet, 24.0, ["a", "b"], 6.0)[0], 30.0, ["a", "b"], 6.0
    )
    assert overdue == ["a"], "once it was not quiet, it may be told of again"
