"""`stageline reward train` from the command line: a tiny model learns, in every layout the same; what it
leaves loads."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.driver.session import hold_driver_lock
from stages.models.protocol import RanksMissing
from stages.ppo.losses import LossStats
from stages.preferences.losses import LOSS
from tests.support.paths import ROOT

TINY = ROOT / "conf/reward/tiny.yaml"


def train(folder: Path, name: str, *changes: str, exit_code: int = 0) -> Path:
    """The directory that a training leaves."""
    pairs = f"data.url={ROOT / 'conf/data/tiny_pairs.jsonl'}"
    fixed = (f"runs_dir={folder}", f"name={name}", pairs, "tracking.uri=null")
    assert main(["reward", "train", str(TINY), *fixed, *changes]) == exit_code
    return folder / name


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


def held_out(run: Path) -> tuple[list[str], np.ndarray]:
    rows = [json.loads(line) for line in (run / "held_out.jsonl").read_text().splitlines()]
    return [row["text"] for row in rows], np.array([row["score"] for row in rows])


def test_it_learns_and_what_it_leaves_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    untrained = train(tmp_path, "untrained", "train.epochs=1", "optimizer.lr=0", "tracking.report=false")
    run = train(tmp_path, "trained", f"tracking.uri=sqlite:///{tmp_path}/mlflow.db")
    before, after = summary_of(untrained), summary_of(run)
    assert before["held_out"]["accuracy"] < 0.75
    assert after["held_out"]["accuracy"] > 0.9
    assert after["held_out"]["loss"] < before["held_out"]["loss"]
    assert abs(after["normalisation"]["bias"] + after["normalisation"]["train_mean"]) < 1e-6
    assert after["sizes"]["held_out"] == {"rows": 96, "prompts": 48, "pairs": 48}
    assert 0 < after["best_step"] <= after["steps"]
    assert (run / "plots/reward_model.png").stat().st_size > 10_000
    assert not (untrained / "plots/reward_model.png").exists()
    assert "held out: accuracy" in capsys.readouterr().out
    metrics = [json.loads(line) for line in (run / "mlflow_spool.jsonl").read_text().splitlines()]
    names = {name for item in metrics if item["kind"] == "metrics" for name in item["values"]}
    assert {"train/loss", "train/accuracy", "train/lr", "validation/ece", "held_out/accuracy_se"} <= names

    model = AutoModelForSequenceClassification.from_pretrained(run / "model").eval()
    texts, scores = held_out(run)
    pairs = [json.loads(line) for line in (ROOT / "conf/data/tiny_pairs.jsonl").read_text().splitlines()]
    of_text = {pair[side]: pair["prompt"] for pair in pairs for side in ("chosen", "rejected")}
    with torch.no_grad():
        rows = [torch.tensor([[*(of_text[text] + text).encode(), 2]]) for text in texts]
        logits = [model(row).logits[0, 0].item() for row in rows]
    np.testing.assert_allclose(scores, np.array(logits) + model.config.reward_bias, atol=2e-5)

    train(tmp_path, "trained", exit_code=2)
    assert "holds a trained reward model already" in capsys.readouterr().err


def test_a_training_that_was_interrupted_begins_anew(tmp_path: Path) -> None:
    first = train(tmp_path, "run", "train.epochs=1", "tracking.report=false")
    summary, scores = summary_of(first), held_out(first)[1]
    for file in (first / "model").iterdir():
        file.unlink()
    (first / "model").rmdir()
    (first / ".model").mkdir()  # an export that did not come to its end
    (first / ".model/model.safetensors").write_bytes(b"half")
    again = train(tmp_path, "run", "train.epochs=1", "tracking.report=false")
    assert summary_of(again)["held_out"] == summary["held_out"]
    np.testing.assert_array_equal(held_out(again)[1], scores)


def test_two_trainings_do_not_share_a_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with hold_driver_lock(RunPaths(tmp_path / "run")):
        train(tmp_path, "run", exit_code=2)
    said = capsys.readouterr().err
    assert said.startswith(f"refused name: given 'run'; process {os.getpid()} on ")
    assert f"is running {tmp_path / 'run'} now" in said
    assert not (tmp_path / "run/config.yaml").exists()


def test_ranks_that_do_not_come_are_said_with_the_trainings_own_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: object, **__: object) -> None:
        raise RanksMissing("the training", (1,), "rank 1 did not come within cluster.collective_timeout_s = 600")

    monkeypatch.setattr("pipeline.driver.reward_training.train_reward_model", missing)
    train(tmp_path, "run", "collective_timeout_s=600", exit_code=3)
    assert "rank 1 did not come within collective_timeout_s = 600" in capsys.readouterr().err


@pytest.mark.processes
@pytest.mark.parametrize(
    "layout",
    ["{distributed_optimizer: true, recompute: full}", "{tensor: 2, sequence_parallel: true}", "{pipeline: 2}"],
    ids=["data parallel", "tensor parallel", "pipeline parallel"],
)
def test_a_layout_learns_the_same(tmp_path: Path, layout: str) -> None:
    """Two ranks, real processes. A layout sums in another order: close, not equal."""
    changes = ("train.epochs=1", "tracking.report=false", "optimizer.lr=1e-3", "optimizer.micro_batch_tokens=200")
    alone = train(tmp_path, "alone", *changes)
    two = train(tmp_path, "two", *changes, "workers=2", f"layout={layout}")
    np.testing.assert_allclose(held_out(two)[1], held_out(alone)[1], atol=2e-4)
    same = {name: value for name, value in summary_of(alone)["held_out"].items() if name in ("loss", "margin")}
    for name, value in same.items():
        assert abs(summary_of(two)["held_out"][name] - value) < 1e-4, name


def test_ratings_can_be_learnt_by_regression(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The rating is the share of vowels: scores come to correlate with it. U+202E in its path turns nothing."""
    tmp_path = tmp_path / "a\u202ec"
    tmp_path.mkdir()
    pairs = [json.loads(line) for line in (ROOT / "conf/data/tiny_pairs.jsonl").read_text().splitlines()]
    texts = sorted({pair[side] for pair in pairs for side in ("chosen", "rejected")})
    rows = [{"text": text, "rating": sum(c in "aeiou" for c in text) / 2, "sd": 0.5, "n": 9} for text in texts]
    file = tmp_path / "ratings.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = f"data={{kind: ratings, url: {file}, spread: sd, raters: n}}"
    run = train(tmp_path, "ratings", data, f"data.url={file}", "train.loss=regression", "tracking.report=true")
    said = capsys.readouterr().out
    assert "a\\u202ec" in said
    assert "\u202e" not in said
    found = summary_of(run)["held_out"]
    assert found["correlation"] > 0.9
    assert found["accuracy"] > 0.95
    assert 0.9 < found["best_accuracy"] <= 1
    assert "ece" not in found


def test_full_disk_is_exit_code_3(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/x/model")

    monkeypatch.setattr("stages.models.reward_model.write_reward_model", full)
    train(tmp_path, "run", "train.epochs=1", "tracking.report=false", exit_code=3)
    (said,) = capsys.readouterr().err.splitlines()
    assert said == "failed /runs/x/model: No space left on device. Put this right; the training begins anew"
    assert not (tmp_path / "run/model").exists()


def test_infinite_gradients(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(groups: object, num_rows: int) -> Any:
        return lambda scores, rows: (scores.sum() * float("nan"), LossStats({LOSS: scores.sum().detach()}, {}))

    monkeypatch.setattr("stages.preferences.training.pair_loss_of", broken)
    train(tmp_path, "run", exit_code=3)
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith("failed 3 optimizer steps in a row had a gradient that is not finite")
    assert "the last is step 3 of 88" in said
