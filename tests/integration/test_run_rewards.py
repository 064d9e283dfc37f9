"""Runs with a reward of three parts, one of them a user's own: stored, logged, normalised, the same after a resume; and
the best version, which stays when the rest goes."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path

import numpy as np
import pytest
import zarr

from pipeline.cli.export import export_version
from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError
from pipeline.observe.evaluations import best_evaluation
from storage.address import Address
from storage.records import Scores
from tests.support.paths import TINY
from tests.support.run_results import outputs
from tests.support.runs import QUIET, arguments, configure, finish, placement

pytestmark = pytest.mark.processes

STEPS = 4
OWN = "tests.support.own_rewards"
REWARD = """\
reward:
  normalize: {mean: true, scale: true, clip: 3}
  parts:
    vowels: {kind: characters, args: {characters: aeiou}}
    own: {kind: "tests.support.own_rewards:dies_once", weight: 0.5, args: {flag: FLAG}, writes: [FOLDER]}
    measured: {kind: "tests.support.own_rewards:two_parts", weight: 0}
"""
CHANGES = (*QUIET, "model.policy.decay=constant", "model.critic.decay=constant", "evaluate.reward.kind=vader")


def configured(folder: Path, name: str, *changes: str) -> RunConfig:
    """tiny.yaml with this reward, and a gang of its own for `advantage`."""
    text = re.sub(
        r"^reward: .*\n",
        REWARD.replace("FLAG", str(folder / "died")).replace("FOLDER", str(folder)),
        TINY.read_text(),
        flags=re.MULTILINE,
    )
    text += "placement: {gangs: {collect: {}}, roles: {advantage: collect}}\n"
    (folder / "rewarded.yaml").write_text(text)
    return load_config([folder / "rewarded.yaml"], [*arguments(folder, name)[1:], *CHANGES, *changes])


@pytest.fixture(scope="module")
def rewarded(folder: Path) -> RunConfig:
    return finish(configured(folder, "rewarded", f"steps={STEPS}"))


def scores_of(config: RunConfig, stage: str, step: int, shards: int) -> Scores:
    found: Scores = open_history(config).store.read_step(stage, step, shards)
    return found


def test_each_part_is_stored_and_the_score_is_their_weighted_sum(rewarded: RunConfig, folder: Path) -> None:
    """Also by the process that was started again when the first had died."""
    assert (folder / "died").exists()
    for step in range(STEPS):
        found = scores_of(rewarded, "score", step, rewarded.rollout.shards)
        assert list(found.parts) == ["vowels", "own", "measured.long", "measured.done"]
        np.testing.assert_allclose(found.scores, found.parts["vowels"] + 0.5 * found.parts["own"], rtol=1e-6)
        rollout = open_history(rewarded).store.read_step("generate", step, rewarded.rollout.shards)
        np.testing.assert_array_equal(found.parts["measured.done"], rollout.finish_reason == 0)
    held_out = scores_of(rewarded, "evaluate_score", STEPS, rewarded.evaluate.shards)
    assert list(held_out.parts) == ["vader"]


def test_a_plain_reader_sees_the_parts_by_name_and_check_finds_no_fault(rewarded: RunConfig) -> None:
    group = zarr.open_group(str(rewarded.run_dir / "rollouts.zarr"), mode="r")["step_000001"]
    names = {"scores", "scores.vowels", "scores.own", "scores.measured.long", "scores.measured.done"}
    assert names <= set(group.keys())  # type: ignore[union-attr]
    whole = scores_of(rewarded, "score", 1, rewarded.rollout.shards)
    np.testing.assert_array_equal(np.asarray(group["scores.own"]), whole.parts["own"])  # type: ignore[index]
    assert verify_run(rewarded).faults == []


def test_parts_are_logged_and_scores_are_normalised(rewarded: RunConfig) -> None:
    history = open_history(rewarded)
    seen = np.concatenate([scores_of(rewarded, "score", s, 2).scores for s in range(STEPS)]).astype(np.float64)
    rewards = history.store.read(Address("advantage", STEPS - 1))
    last = scores_of(rewarded, "score", STEPS - 1, 2)
    state = history.ledger.get(Address("advantage", STEPS - 1)).state
    assert (state["score_mean"], state["score_count"]) == (pytest.approx(seen.mean()), seen.size)
    assert state["score_squares"] == pytest.approx(((seen - seen.mean()) ** 2).sum())
    metrics = history.read_step_metrics(STEPS - 1)
    for name, part in last.parts.items():
        assert metrics[f"reward/{name}/mean"] == pytest.approx(float(part.mean()), abs=1e-6)
        assert metrics[f"reward/{name}/std"] == pytest.approx(float(part.std()), abs=1e-6)
    normalised = np.clip((last.scores - seen.mean()) / seen.std(), -3, 3)
    rollout = history.store.read_step("generate", STEPS - 1, 2)
    reference = history.store.read_step("reference", STEPS - 1, 2)
    policy = history.store.read_step("logprob", STEPS - 1, 2)
    log_ratio = np.where(rollout.response_mask, policy.policy_logprobs.astype(np.float64) - reference.ref_logprobs, 0)
    expected = normalised - metrics["kl/coef"] * log_ratio.sum(axis=1)
    np.testing.assert_allclose(rewards.rewards.sum(axis=1), expected, atol=1e-5)


def test_a_resumed_run_is_the_run_that_never_stopped(folder: Path, rewarded: RunConfig) -> None:
    """Scores, running moments, advantages, updates: every CRC and digest."""
    config = finish(configured(folder, "stopped", "steps=2"))
    assert main(["resume", str(config.run_dir), f"steps={STEPS}"]) == 0
    assert outputs(config) == outputs(rewarded)
    ours, its = (json.loads(RunPaths(run.run_dir).summary.read_text()) for run in (config, rewarded))
    assert (ours["best"], ours["evaluations"]) == (its["best"], its["evaluations"])


@pytest.mark.parametrize(
    ("stage", "step"), [("score", 1), ("advantage", 3), ("evaluate_score", 2), ("evaluate_reference", 2)]
)
def test_replay_is_equal(rewarded: RunConfig, capsys: pytest.CaptureFixture[str], stage: str, step: int) -> None:
    assert main(["replay", str(rewarded.run_dir), "--step", str(step), "--stage", stage]) == 0
    assert "identical: difference must be 0" in capsys.readouterr().out


def test_every_evaluation_has_kl_length_and_parts_and_the_best_is_named(
    rewarded: RunConfig, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    summary = json.loads(RunPaths(rewarded.run_dir).summary.read_text())
    assert [e["version"] for e in summary["evaluations"]] == [0, 2, 4]
    for found in summary["evaluations"]:
        rows = open_history(rewarded).store.read_step("evaluate", found["version"], 1)
        reference = open_history(rewarded).store.read_step("evaluate_reference", found["version"], 1)
        log_ratio = np.where(rows.response_mask, rows.sampler_logprobs - reference.ref_logprobs, 0)
        assert found["kl"] == pytest.approx(float(log_ratio.sum(axis=1).mean()), abs=1e-6)
        assert found["length"] == float(rows.response_lengths.mean())
        assert found["parts"] == {"vader": pytest.approx(found["reward"])}
    assert abs(summary["evaluations"][0]["kl"]) < 1e-4, "version 0 is the reference"
    best = best_evaluation(open_history(rewarded).read_evaluations(), None)
    assert summary["best"]["version"] == best.version
    assert main(["export", str(rewarded.run_dir), "--version", "best", "--to", str(tmp_path / "best")]) == 0
    assert (tmp_path / "best" / "config.json").is_file()


def test_no_version_is_the_best_where_all_are_over_the_budget(rewarded: RunConfig, tmp_path: Path) -> None:
    config = copy.deepcopy(rewarded)
    config.evaluate.select.max_kl = -1.0
    said = r"given 'best'; no evaluated version has a KL of at most -1 .*; they have v0: .*, v2: .*, v4: "
    with pytest.raises(ConfigError, match=said):
        export_version(config, "best", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_the_best_version_stays_when_exports_and_rollouts_go(folder: Path) -> None:
    """Versions 0, 2, ... 8 are evaluated, and one export is asked for: the newest, and the best, are there at the end.
    Version 0 needs none."""
    keep = ("storage.keep.rollouts=1", "storage.keep.exports=1", "staleness=0", "checkpoint.every=2")
    config = finish(configured(folder, "selected", "steps=8", *keep, "evaluate.every=2"))
    best = best_evaluation(open_history(config).read_evaluations(), None)
    there = sorted(path.name for path in RunPaths(config.run_dir).weights(0).parent.iterdir())
    assert there == sorted({f"v{v:06d}" for v in (best.version, 8) if v})
    assert main(["export", str(config.run_dir), "--version", "best"]) == 0


def test_a_reward_that_fails_ends_the_run_and_it_goes_on_when_it_is_mended(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 3, row and exception named; nothing is lost."""
    (folder / "our_reward.py").write_text("def score(samples):\n    return [1 / s.row for s in samples]\n")
    monkeypatch.chdir(folder)
    text = re.sub(r"^reward: .*\n", "reward: {kind: 'our_reward:score'}\n", TINY.read_text(), flags=re.MULTILINE)
    (folder / "failing.yaml").write_text(text)
    sources = [str(folder / "failing.yaml"), *arguments(folder, "failing")[1:], *QUIET, "steps=1", "evaluate.every=0"]
    assert main(["run", *sources]) == 3
    shown = "".join(capsys.readouterr())
    assert "ZeroDivisionError" in shown
    assert "row 0" in shown
    (folder / "our_reward.py").write_text("def score(samples):\n    return [1 / (1 + s.row) for s in samples]\n")
    assert main(["resume", str(folder / "runs" / "failing")]) == 0


def test_rows_are_scored_while_their_shard_is_generated(folder: Path) -> None:
    """The engine decodes two rows at a time, so the first rows of a shard are finished long before the last."""
    gangs = placement("{generate: {}, score: {}, train: {}}", generate="generate", score="score", others="train")
    long = ("engine.max_rows=2", "sampling.max_new_tokens=32", "steps=3")
    late, early = (
        finish(configure(folder, name, gangs, *long, *QUIET, f"reward={{parts: {{own: {{kind: {OWN}:{reward}}}}}}}"))
        for name, reward in (("late", "vowels"), ("early", "EarlyVowels"))
    )
    assert outputs(early) == outputs(late)
    fractions = [
        [commit.metrics.get("score/early_fraction", 0.0) for commit in config.stored.ledger().list()]
        for config in (late, early)
    ]
    assert max(fractions[0]) == 0 < max(fractions[1]) <= 1
