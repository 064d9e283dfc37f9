"""From judgements to a policy, from the command line: a tiny reward model is trained and is then the reward of a run,
whose scores are those of the training; it resumes, and replay finds the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from pipeline.cli.main import main
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.driver.results import open_history
from tests.support.paths import ROOT, TINY
from tests.support.reward_models import assert_scores_are_the_trainings
from tests.support.runs import QUIET, arguments

pytestmark = pytest.mark.processes

PAIRS = ROOT / "conf/data/tiny_pairs.jsonl"
LAST = 1


@pytest.fixture(scope="module")
def trained(folder: Path) -> Path:
    """The directory of a training of the tiny reward model."""
    where = (f"runs_dir={folder}", "name=liked", f"data.url={PAIRS}", *QUIET)
    assert main(["reward", "train", str(ROOT / "conf/reward/tiny.yaml"), *where, "train.epochs=2"]) == 0
    return folder / "liked"


@pytest.fixture(scope="module")
def changes(folder: Path, trained: Path) -> list[str]:
    """tiny.yaml with the reward model, and beside it what is only measured."""
    learned = f"learned: {{kind: model, args: {{path: {trained / 'model'}, batch_tokens: null}}}}"
    parts = f"{{{learned}, vowels: {{kind: characters, weight: 0, args: {{characters: aeiou}}}}}}"
    text = TINY.read_text().replace(
        "reward: {kind: characters, args: {characters: aeiou}}", f"reward: {{parts: {parts}}}"
    )
    (folder / "learned.yaml").write_text(text)
    constant = ("model.policy.decay=constant", "model.critic.decay=constant", f"evaluate.reward.parts={parts}")
    return [str(folder / "learned.yaml"), *arguments(folder, "learned")[1:], *QUIET, *constant]


def test_scores_are_those_that_the_training_left(trained: Path) -> None:
    """Compare the scores of the held-out rows, by prompt and response."""
    assert_scores_are_the_trainings(trained, PAIRS)


def test_scored_resumed_replayed(
    folder: Path, trained: Path, changes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", *changes, f"steps={LAST}"]) == 0
    run = folder / "runs" / "learned"
    assert main(["resume", str(run), f"steps={LAST + 1}"]) == 0
    config = load_config([changes[0]], changes[1:])
    history = open_history(config)
    model = AutoModelForSequenceClassification.from_pretrained(trained / "model").eval()
    for stage, rows_of, step, shards in (
        ("score", "generate", LAST, config.rollout.shards),
        ("evaluate_score", "evaluate", LAST + 1, config.evaluate.shards),
    ):
        found = history.store.read_step(stage, step, shards)
        rows = history.store.read_step(rows_of, step, shards)
        assert list(found.parts) == ["learned", "vowels"]
        np.testing.assert_array_equal(found.scores, found.parts["learned"])
        assert found.parts["vowels"].max() > 0
        for row in range(4):
            length = int(rows.prompt_lengths[row] + rows.response_lengths[row])
            tokens = rows.tokens[row, :length].tolist()
            score = model(torch.tensor([tokens if tokens[-1] == 2 else [*tokens, 2]])).logits[0, 0].item()
            assert found.scores[row] == pytest.approx(score + model.config.reward_bias, abs=2e-5)
    summary = json.loads(RunPaths(run).summary.read_text())
    assert all(found["parts"].keys() == {"learned", "vowels"} for found in summary["evaluations"])
    capsys.readouterr()
    assert main(["replay", str(run), "--step", str(LAST), "--stage", "score"]) == 0
    assert "identical: difference must be 0" in capsys.readouterr().out


def test_a_run_with_other_files_of_the_model_does_not_go_on(
    folder: Path, trained: Path, changes: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """After the run of the test before."""
    if not (folder / "runs" / "learned").exists():
        assert main(["run", *changes, f"steps={LAST}"]) == 0
    config = json.loads((trained / "model" / "config.json").read_text())
    (trained / "model" / "config.json").write_text(json.dumps(config | {"reward_bias": 9.0}))
    assert main(["resume", str(folder / "runs" / "learned"), f"steps={LAST + 2}"]) == 2
    assert "reward.parts.learned.args.path" in capsys.readouterr().err
