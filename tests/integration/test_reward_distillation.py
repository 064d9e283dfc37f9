"""`stageline reward train` with a teacher: a student of fewer blocks learns its scores, whatever the judgements say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification

from pipeline.cli.main import main
from tests.support.families import random_model
from tests.support.paths import ROOT
from tests.support.reward_models import assert_scores_are_the_trainings, export_reward_model

TINY = ROOT / "conf/reward/tiny.yaml"
PAIRS = ROOT / "conf/data/tiny_pairs.jsonl"


def train(folder: Path, name: str, *changes: str, exit_code: int = 0) -> Path:
    """The directory that a training leaves."""
    fixed = (f"runs_dir={folder}", f"name={name}", f"data.url={PAIRS}", "tracking.uri=null", "tracking.report=false")
    assert main(["reward", "train", str(TINY), *fixed, *changes]) == exit_code
    return folder / name


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text()))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("teacher"), "teacher", "train.epochs=4") / "model"


def test_a_student_learns_the_teachers_scores(
    tmp_path: Path, teacher: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two of four blocks; the best of its states, exported, gives the scores that were measured."""
    turned = [json.loads(line) for line in PAIRS.open()]
    turned = [row | {"chosen": row["rejected"], "rejected": row["chosen"]} for row in turned]
    (tmp_path / "turned.jsonl").write_text("".join(json.dumps(row) + "\n" for row in turned))
    learns = ("train.loss=distill", f"teacher.paths=[{teacher}]", "model.blocks=2", "train.epochs=10")
    for name, changes in (("student", ()), ("turned", (f"data.url={tmp_path}/turned.jsonl", "train.epochs=1"))):
        run = train(tmp_path, name, *learns, *changes)
        found = summary_of(run)["held_out"]
        assert found.keys() >= {"agreement", "spearman", "teacher_accuracy", "accuracy_of_teachers"}
        assert found["accuracy_of_teachers"] == pytest.approx(found["accuracy"] / found["teacher_accuracy"])
        assert not (run / ".student").exists()
    assert found["teacher_accuracy"] < 0.2, "the teacher learnt the opposite, and is not asked to agree"
    run = tmp_path / "student"
    found, speed = summary_of(run)["held_out"], summary_of(run)["speed"]
    assert found["teacher_accuracy"] > 0.85
    assert found["agreement"] > 0.85
    assert found["spearman"] > 0.85
    assert found["accuracy_of_teachers"] > 0.9
    assert speed["speed_up"] == pytest.approx(speed["teacher_cpu_s"] / speed["student_cpu_s"])
    assert "beside its teacher: " in capsys.readouterr().out

    model = AutoModelForSequenceClassification.from_pretrained(run / "model")
    assert model.config.num_hidden_layers == 2
    assert_scores_are_the_trainings(run, PAIRS)


@pytest.mark.processes
def test_two_ranks_and_an_ensemble_of_teachers_give_the_same(tmp_path: Path, teacher: Path) -> None:
    other = export_reward_model(tmp_path / "other")
    learns = ("train.loss=distill", f"teacher.paths=[{teacher},{other}]", "model.blocks=2", "train.epochs=1")
    learns += ("optimizer.lr=1e-3", "optimizer.micro_batch_tokens=200")
    alone, two = (train(tmp_path, f"w{n}", *learns, f"workers={n}") for n in (1, 2))
    scores = [[json.loads(line)["score"] for line in (run / "held_out.jsonl").open()] for run in (alone, two)]
    np.testing.assert_allclose(scores[0], scores[1], atol=2e-4)
    assert summary_of(alone)["held_out"]["teacher_accuracy"] == summary_of(two)["held_out"]["teacher_accuracy"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["train.loss=distill"], "teacher.paths: given []; train.loss=distill needs a teacher"),
        (["teacher.paths=[x]"], "teacher.paths: given ['x']; a teacher's scores are learnt by train.loss=distill"),
        (["train.loss=distill", "teacher.paths=[gone]"], "teacher.paths[0]: given 'gone'; "),
        (["train.loss=distill", "teacher.paths=['random:tiny']"], "it is no reward model: give RUN/model"),
        (["model.blocks=0"], "model.blocks: given 0"),
        (["model.blocks=9"], "model.blocks: given 9; the model has 4"),
        (["model.blocks=2", "model.frozen_blocks=2"], "model.frozen_blocks: given 2"),
    ],
)
def test_impossible_distillation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], said: str
) -> None:
    train(tmp_path, "run", *changes, exit_code=2)
    assert said in capsys.readouterr().err


def test_a_teacher_of_other_tokens_or_short_context_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    random_model("Llama 2", vocab_size=128).save_pretrained(tmp_path / "start")
    other = export_reward_model(tmp_path / "other", source=str(tmp_path / "start"))
    train(tmp_path, "run", "train.loss=distill", f"teacher.paths=[{other}]", exit_code=2)
    assert "its tokens are others than those of model.path ('random:tiny')" in capsys.readouterr().err
    random_model("Llama 2", vocab_size=256, max_position_embeddings=32).save_pretrained(tmp_path / "start")
    short = export_reward_model(tmp_path / "short", source=str(tmp_path / "start"))
    train(tmp_path, "run", "train.loss=distill", f"teacher.paths=[{short}]", exit_code=2)
    assert "its context is 32, data.max_tokens is 64" in capsys.readouterr().err
