"""Whole runs without a critic: each estimator, what they write down, and that stopped, replayed and varied they come to
the same as any other run."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.graph.graph import run_nodes
from pipeline.observe.journal import EventKind, read_events
from storage.address import Address
from tests.support.kill_matrix import Case, run_struck
from tests.support.run_results import outputs, steps_of
from tests.support.runs import ONE_GANG, QUIET, finish_in, placement
from tests.support.strikes import Strike

pytestmark = pytest.mark.processes

STEPS = 4
LONGER = ("model.policy.decay=constant", "checkpoint.every=4", "evaluate.every=0")
GRPO = (
    "ppo.advantage=group", "rollout.responses_per_prompt=4", "ppo.kl.where=loss", "ppo.kl.estimator=k3",
    "ppo.aggregation=sequence", "ppo.skip_equal_groups=true", "placement.gangs.critic={}",
    "placement.roles.critic=critic", *LONGER,
)  # fmt: skip
"""Settings as shipped otherwise, eta = 1, with a gang for a critic that does not exist."""


@pytest.fixture(scope="module")
def grouped(folder: Path) -> RunConfig:
    return finish_in(folder, "grouped", *GRPO, *QUIET)


@pytest.fixture(scope="module")
def leave_one_out(folder: Path) -> RunConfig:
    """eta = 0, every role in one process; no forward for the proximal policy."""
    changes = ("ppo.advantage=rloo", "rollout.responses_per_prompt=2", "ppo.proximal=loglinear", "staleness=0")
    return finish_in(folder, "leave-one-out", *changes, ONE_GANG, *QUIET)


@pytest.fixture(scope="module")
def reinforced(folder: Path) -> RunConfig:
    """eta = 2, one response to a prompt."""
    return finish_in(folder, "reinforced", "ppo.advantage=reinforce_pp", "staleness=2", ONE_GANG, *QUIET)


def digests(config: RunConfig) -> list[str | None]:
    ledger = open_history(config).ledger
    return [ledger.get(Address("update_policy", step)).digest for step in range(STEPS)]


@pytest.mark.parametrize("name", ["grouped", "leave_one_out", "reinforced"])
def test_a_run_without_a_critic_is_sound_and_has_none(request: pytest.FixtureRequest, name: str) -> None:
    config: RunConfig = request.getfixturevalue(name)
    report = verify_run(config)
    assert report.faults == []
    history = open_history(config)
    stages = {commit.address.stage for commit in history.ledger.list()}
    assert stages == {node.stage for node in run_nodes(config.graph())}
    assert stages.isdisjoint({"value", "update_critic"})
    assert not (RunPaths(config.run_dir).checkpoints / "critic").exists()
    assert history.finished_steps() == list(range(STEPS))
    weights = digests(config)
    for step in range(STEPS):
        metrics = history.read_step_metrics(step)
        teaches = not config.ppo.skip_equal_groups or metrics["group/equal_fraction"] < 1
        assert (metrics["policy/optimizer_steps"] > 0) == teaches
        assert step == 0 or (weights[step] != weights[step - 1]) == teaches
        assert not [key for key in metrics if "critic" in key or "value" in key]
        assert ("group/equal_fraction" in metrics) == (name != "reinforced")
    assert len(set(weights)) >= STEPS - 1
    begun = next(e for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.RUN_STARTED)
    assert f"ppo.advantage={config.ppo.advantage} (no critic)" in str(begun.detail)
    assert ("gang critic is not started" in str(begun.detail)) == (name == "grouped")
    summary = json.loads(RunPaths(config.run_dir).summary.read_text())
    assert summary["steps"] == STEPS


def test_advantages_of_a_group_are_those_of_its_scores(grouped: RunConfig) -> None:
    """The records alone show it: rows 4 g to 4 g + 3 are one prompt's, and their advantages sum to zero."""
    history = open_history(grouped)
    for step, (rollout, scores) in enumerate(
        zip(steps_of(grouped, "generate"), steps_of(grouped, "score"), strict=True)
    ):
        found = history.store.read(Address("advantage", step))
        assert (rollout.prompt_index.reshape(-1, 4) == rollout.prompt_index[::4, None]).all()
        by_group = scores.scores.astype(np.float64).reshape(-1, 4)
        deviation = by_group.std(axis=1, ddof=1, keepdims=True)
        centred = by_group - by_group.mean(axis=1, keepdims=True)
        expected = np.where(deviation > 0, centred / (deviation + 1e-6), 0).reshape(-1)
        kept = np.repeat(deviation[:, 0] > 0, 4)
        mask = rollout.response_mask & kept[:, None]
        np.testing.assert_array_equal(found.loss_mask, mask)
        np.testing.assert_allclose(found.advantages, np.where(mask, expected[:, None], 0), atol=1e-5)


def test_one_that_goes_on_ends_as_one_that_was_never_stopped(
    folder: Path, grouped: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    """Run two steps without a checkpoint. New processes make the updates again from the stored outputs, and
    continue."""
    shorter = finish_in(folder, "grouped-shorter", *GRPO, *QUIET, "steps=2")
    assert main(["resume", str(shorter.run_dir), f"steps={STEPS}", "seed=9"]) == 2
    assert "resumed with" not in "".join(capsys.readouterr())
    assert main(["resume", str(shorter.run_dir), f"steps={STEPS}"]) == 0
    assert f"resumed with steps={STEPS} (was 2)" in capsys.readouterr().out
    assert digests(shorter) == digests(grouped)
    assert main(["check", str(shorter.run_dir)]) == 0


def test_killed_in_the_middle_it_ends_as_one_that_was_not(folder: Path, grouped: RunConfig) -> None:
    """The scorer before its commit, and the trainer between two optimizer steps."""
    gangs = placement("{generate: {workers: 1}, score: {}, train: {workers: 1}}", generate="generate", score="score",
                      others="train")  # fmt: skip
    strikes = [Strike("score-0", "commit", 2, "score-0"), Strike("train-0", "stepped", 2, "train-0")]
    config, struck = run_struck(folder, "grouped-struck", 1, strikes, Case((gangs, *GRPO)))
    assert struck.faults == [], str(struck)
    assert struck.fired == strikes, str(struck)
    assert outputs(config) == outputs(grouped)


def test_replays(grouped: RunConfig, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    run = str(grouped.run_dir)
    assert main(["replay", run, "--updates", "0:4"]) == 0
    assert "identical: updates 0:4 of policy, in this process" in capsys.readouterr().out
    assert main(["replay", run, "--stage", "advantage", "--step", "1"]) == 0
    assert main(["replay", run, "--stage", "value", "--step", "1"]) == 2
    assert "this run has no value nodes" in capsys.readouterr().err


def test_back_to_a_checkpoint(grouped: RunConfig, tmp_path: Path) -> None:
    """Its newest checkpoint is of the end, and nothing is missing: only later commits are archived."""
    copy = Path(shutil.copytree(grouped.run_dir, tmp_path / "copy"))
    assert main(["resume", str(copy), "--from-checkpoint"]) == 0
    assert main(["check", str(copy)]) == 0


def test_another_estimator(grouped: RunConfig, overlapped: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """A variant without a critic trains on the rows of a run with one, and the other way round, from the start
    weights."""
    assert main(["replay", str(overlapped.run_dir), "--updates", "1:3", "ppo.advantage=reinforce_pp", "name=v1"]) == 0
    assert main(["replay", str(grouped.run_dir), "--updates", "0:2", "name=v2"]) == 0
    other = ["ppo.advantage=gae", "ppo.skip_equal_groups=false"]
    assert main(["replay", str(grouped.run_dir), "--updates", "0:2", *other, "name=v3"]) == 0
    found = {}
    for parent, name in ((overlapped, "v1"), (grouped, "v2"), (grouped, "v3")):
        found[name] = json.loads(RunPaths(parent.run_dir.parent / name).summary.read_text())["steps"]
    assert [set(step["digests"]) for step in found["v1"] + found["v3"]] == [{"policy"}] * 2 + [{"policy", "critic"}] * 2
    assert [step["digests"]["policy"] for step in found["v2"]] == digests(grouped)[:2], "nothing differs"
    assert found["v3"][1]["digests"]["policy"] != digests(grouped)[1]
    capsys.readouterr()
    assert main(["replay", str(grouped.run_dir), "--updates", "1:2", *other, "name=v4"]) == 2
    assert "the run trained no critic that ppo.advantage=gae could start from: begin at 0" in capsys.readouterr().err
    assert not (grouped.run_dir.parent / "v4").exists()
