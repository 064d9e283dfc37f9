"""The report's contents: headline, curves, timeline, troubles, facts; and reports of incomplete runs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.observe.evaluations import Comparison, VariantSummary
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.report.facts import failure_texts, progress_text, run_facts
from pipeline.observe.report.gather import read_contents, run_incidents, timeline_columns
from pipeline.observe.report.page import page_contents
from pipeline.observe.report.samples import SampleBudget
from pipeline.observe.report.source import RunSource, VariantSource
from pipeline.observe.summary import TrainerLoss
from storage.address import Address
from tests.support.report_runs import WrittenRun, write_run


def test_headline_by_hand(plain: RunSource) -> None:
    """8 rows score 0.1 v + row / 100, and even ones 0.01 more after version 0. From v0 to v4: 0.4 and on even rows
    0.41, so the differences have mean 0.405 and standard deviation 0.005 sqrt(8 / 7)."""
    found = {h.key: h for h in read_contents(plain, SampleBudget()).contents.headlines}
    error = np.std(np.arange(8) / 100, ddof=1) / np.sqrt(8)
    assert found["held_out"].value.startswith(f"0.035 ± {error:.3f} → 0.440 ± ")
    assert found["held_out"].detail == "v0 → v4, 8 prompts, ± standard error"
    spread = 0.005 * np.sqrt(8 / 7) / np.sqrt(8)
    assert found["gain"].value == f"+0.405 ± {spread:.3f}"
    assert found["gain"].detail == f"paired t {0.405 / spread:.1f} over 8 prompts"
    assert found["score"].value == f"0.035 ± {error:.3f} → 0.335 ± {error:.3f}"
    assert found["kl"].value == "0.500 ± 0.000"  # the step's metric; every row comes to the same
    assert found["staleness"].value == "0.75"


def test_curves_have_a_number_for_each_step_and_nothing_of_what_is_off(plain: RunSource) -> None:
    curves = read_contents(plain, SampleBudget()).contents.curves
    assert (curves.steps, curves.of_steps) == ([0, 1, 2, 3], 4)
    assert curves.metrics["reward/mean"] == [0.035, 0.135, 0.235, 0.335]
    assert curves.metrics["reward/tone/mean"] == pytest.approx([0.0, 0.1, 0.2, 0.3])
    assert "generate/rows_finished_elsewhere" not in curves.metrics
    assert [point[:2] for point in curves.held_out["eval/reward_mean"]] == [(0, 0.035), (2, 0.24), (4, 0.44)]


@pytest.mark.parametrize("compared", [Comparison(8, 0.25, 0.5, 0.25, 3.0, 6, 2), None])
def test_a_variant_has_its_curves_beside_its_parents(plain: RunSource, compared: Comparison | None) -> None:
    """Its summary, as it was written, is all that there is of it."""
    steps = [{"step": step, "digests": {}, "metrics": {"reward/mean": 0.1 * step, "kl/ref": 2.0}} for step in (2, 3)]
    written = VariantSummary("runs/plain", (2, 4), ["ppo.clip=0.1 (was 0.2)"], steps, "w", compared, {}).to_json()
    variant = VariantSource(
        "thin", "d", {"seed": 1, "ppo.clip": 0.1}, VariantSummary.from_json(written), plain.sameness
    )
    page = page_contents([plain, variant], [read_contents(one, SampleBudget()) for one in (plain, variant)])
    curves = page.runs[1].curves
    assert (curves.steps, curves.of_steps, curves.metrics["reward/mean"]) == ([2, 3], 2, [0.2, 0.3])
    assert curves.held_out == ({} if compared is None else {"eval/reward_mean": [(4, 0.5, None)]})
    assert [h.value for h in page.runs[1].headlines] == ([] if compared is None else ["0.500"])
    assert page.comparison is not None
    assert [(one.run, one.metrics) for one in page.comparison.left_out] == [(1, ())], "no curve of it is left out"


def finished(stage: str, step: int, end: float, seconds: float, worker: str, shard: int = 0) -> Event:
    return Event(end, EventKind.FINISHED, stage, step, shard, 0, worker.split("-")[0], worker, seconds=seconds)


def test_a_timeline_is_columns_of_milliseconds() -> None:
    """Two shards of generate side by side, so two lanes of one worker; a driver that began again is marked."""
    events = [
        Event(9.0, EventKind.RUN_STARTED),
        finished("generate", 0, 12.0, 2.0, "engine-0"),
        finished("generate", 0, 13.5, 2.5, "engine-0", shard=1),
        finished("score", 0, 14.25, 0.25, "judge-0"),
        Event(15.0, EventKind.RUN_STARTED, detail="resume"),
    ]
    found = timeline_columns(events, {Address("generate", 0, 1): "v0"}, [], max_executions=10)
    assert [(lane.gang, lane.worker) for lane in found.lanes] == [
        ("engine", "engine-0"), ("engine", "engine-0"), ("judge", "judge-0")]  # fmt: skip
    assert (found.start, found.duration_ms, found.of_executions) == (10.0, 4250, 3)
    assert (found.lane, found.begin_ms, found.length_ms) == ([0, 1, 2], [0, 1000, 4000], [2000, 2500, 250])
    assert [found.stages[i] for i in found.stage] == ["generate", "generate", "score"]
    assert found.versions == ["", "v0", ""]
    assert [(mark.ms, mark.kind, mark.text) for mark in found.marks] == [(5000, "resumed", "resume")]


def test_a_loss_is_told_with_its_recovery(plain: RunSource) -> None:
    events = [
        *plain.events,
        Event(105.0, EventKind.GANG_LOST, gang="train", worker="train-0", detail="killed"),
        Event(106.0, EventKind.WARNED, detail="a line is torn"),
        Event(109.0, EventKind.GANG_BUILT, gang="train", worker="train-0"),
    ]
    summary = replace(plain.summary, trainer_losses=(TrainerLoss(105.0, "train", "killed", 4.0, 7.5),))
    found = run_incidents(replace(plain, events=events, summary=summary))
    assert [(one.kind, one.where, one.text) for one in found.shown] == [
        ("lost", "train-0", "killed"),
        ("warning", "", "a line is torn"),
        ("recovered", "train-0", "built again in 4.0 s; trained again 7.5 s after the loss"),
    ]


def test_facts_say_who_began_the_run() -> None:
    events = [
        Event(0.0, EventKind.RUN_STARTED, command="stageline run a.yaml", host="box", code="abc"),
        Event(60.0, EventKind.RUN_STARTED, command="stageline resume runs/a", host="box", code="abc"),
    ]
    settings = {"reward.parts.x.weight": 2.0, "reward.parts.x.kind": "k", "ppo.advantage": "rloo"}
    found = {}
    for fact in run_facts(settings, events, {}, {"node-1"}):
        found.setdefault(fact.label, []).append(fact.value)
    assert found["command"] == ["stageline run a.yaml", "stageline resume runs/a"]
    assert (found["driver's host"], found["code"], found["workers' hosts"]) == (["box"], ["abc"], ["node-1"])
    assert found["reward"] == ["2.0 * x"]
    assert found["started"] == ["1970-01-01 00:00:00 UTC"]
    assert found["resumed"] == ["1970-01-01 00:01:00 UTC"]


def test_how_far_a_run_came() -> None:
    started, ended = Event(0.0, EventKind.RUN_STARTED), Event(1.0, EventKind.RUN_FINISHED)
    assert progress_text([started, ended], 4, 4) == "finished: 4 steps"
    assert progress_text([started, ended, started], 2, 4) == "not finished: 2 of 4 steps"
    failed, again = (Event(2.0, kind, "score", 2, 1) for kind in (EventKind.FAILED, EventKind.SUBMITTED))
    assert progress_text([started, failed], 2, 4) == "failed: 2 of 4 steps"
    assert progress_text([started, failed, again], 2, 4) == "not finished: 2 of 4 steps", "it is tried again"
    assert progress_text([started, failed, started], 2, 4) == "not finished: 2 of 4 steps"


def test_what_failed_and_was_not_made_again_is_said_first() -> None:
    def event(t: float, kind: EventKind, stage: str, detail: str | None = None) -> Event:
        return Event(t, kind, stage, 2, 1, detail=detail)

    retried = [event(1.0, EventKind.FAILED, "score", "its worker died"), event(2.0, EventKind.FINISHED, "score")]
    raised = event(3.0, EventKind.FAILED, "value", "ValueError: <b>\nTraceback")
    assert failure_texts([*retried, raised]) == ["value of step 2 failed: ValueError: <b>"]
    assert failure_texts([*retried, raised, Event(4.0, EventKind.RUN_STARTED)]) == []


def test_a_run_that_died_at_step_0(tmp_path: Path) -> None:
    shown = read_contents(write_run(tmp_path, WrittenRun(done=0)), SampleBudget()).contents
    assert shown.state == "not finished: 0 of 4 steps"
    assert (shown.timeline, shown.held_out, shown.mismatches) == (None, None, [])
    assert (shown.samples.rows, shown.curves.steps) == ([], [])
    assert "no step was finished: there are no curves" in shown.remarks
    assert "no version was evaluated before this was written: there are no held-out scores" in shown.remarks
    never = read_contents(write_run(tmp_path / "never", WrittenRun(eval_every=0)), SampleBudget()).contents
    assert "no version was evaluated (evaluate.every=0): there are no held-out scores" in never.remarks


def test_a_run_without_a_critic_says_so(tmp_path: Path) -> None:
    shown = read_contents(
        write_run(tmp_path, WrittenRun(steps=1, rows=2, critic=False, eval_every=0)), SampleBudget()
    ).contents
    assert {row.values is None for row in shown.samples.rows} == {True}
    assert "there is no critic (ppo.advantage=rloo), so no values" in shown.remarks
    assert shown.held_out is None


def test_rows_that_were_let_go_are_missed_and_the_curves_are_not(tmp_path: Path) -> None:
    source = write_run(tmp_path, WrittenRun(steps=2, eval_every=0))
    source.history.store.drop(1)
    shown = read_contents(source, SampleBudget()).contents
    assert {row.step for row in shown.samples.rows} == {1}
    assert shown.samples.of_rows == 8
    assert shown.curves.steps == [0, 1]
    assert "the rows of steps before 1 were deleted (storage.keep.rollouts)" in shown.remarks


def test_a_damaged_array_costs_its_step(tmp_path: Path) -> None:
    source = write_run(tmp_path, WrittenRun(steps=2, eval_every=0))
    for chunk in (tmp_path / "rollouts.zarr/step_000001/tokens").glob("c.*"):
        chunk.write_bytes(b"torn")
    shown = read_contents(source, SampleBudget()).contents
    assert {row.step for row in shown.samples.rows} == {0}
    assert any(remark.startswith("the rows of step 1 cannot be read") for remark in shown.remarks)


def test_few_steps_are_read_of_a_long_run(plain: RunSource) -> None:
    shown = read_contents(plain, SampleBudget(steps=3)).contents
    assert (shown.samples.read_steps, shown.samples.of_steps, shown.samples.of_rows) == (3, 4, 32)
    assert {row.step for row in shown.samples.rows} == {0, 2, 3}


def test_no_password_of_a_command_is_in_a_report(tmp_path: Path) -> None:
    """Settings are redacted where they are read: tests/integration/test_secrets.py looks at all files."""
    began = Event(0.0, EventKind.RUN_STARTED, command="stageline run tracking.uri=https://secret@host")
    source = write_run(tmp_path, WrittenRun(done=0, events=(began,)))
    shown = read_contents(source, SampleBudget()).contents
    assert "stageline run tracking.uri=https://***@host" in [fact.value for fact in shown.facts]


def test_of_huge_steps_few_are_held_at_once(plain: RunSource, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.observe.report.gather._MAX_READ_BYTES", 1)
    shown = read_contents(plain, SampleBudget()).contents.samples
    assert (shown.read_steps, shown.of_steps) == (3, 4)
