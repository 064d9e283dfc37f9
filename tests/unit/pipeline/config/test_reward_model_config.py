"""Configs of reward models: the shipped ones load, and a config that cannot work is refused with its key."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoModelForSequenceClassification, LlamaConfig

from pipeline.cli.main import main
from pipeline.config.loading import load_config, load_label_config, load_reward_model_config, to_yaml
from pipeline.config.preflight import preflight
from pipeline.config.reward_preflight import check_training
from pipeline.errors import ConfigError
from stages.models.spec import read_config
from tests.support.configs import arguments, write_config
from tests.support.paths import ROOT

SHIPPED = sorted((ROOT / "conf/reward").glob("*.yaml"))
TINY = ROOT / "conf/reward/tiny.yaml"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_config_loads(path: Path) -> None:
    assert load_reward_model_config([path], ["train.epochs=3"]).train.epochs == 3


def test_tiny_passes_all_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    parts = check_training(load_reward_model_config([TINY], ["runs_dir=nowhere"]))
    assert [len(part.pairs) for part in (parts.train, parts.validation, parts.held_out)] == [168, 24, 48]


@pytest.mark.parametrize(
    ("change", "key", "part"),
    [
        ("train.epoch=2", "train.epoch", "did you mean train.epochs"),
        ("train.epochs=0", "train.epochs", "1 or more"),
        ("train.rows_per_step=1", "train.rows_per_step", "2 or more"),
        ("train.loss=regression", "train.loss", "pairs have no ratings"),
        ("train.patience=0", "train.patience", "1 or more"),
        ("optimizer.lr=-1", "optimizer.lr", "0 or more"),
        ("optimizer.min_lr=1", "optimizer.min_lr", "from 0 to optimizer.lr"),
        ("optimizer.micro_batch_rows=4", "optimizer.micro_batch_rows", "whole groups"),
        ("model.lora.targets=[all]", "model.lora.targets", "qkv"),
        ("workers=3 layout.tensor=2", "workers", "multiple"),
        ("layout.sequence_parallel=true", "layout.sequence_parallel", "layout.tensor of 2"),
        ("tracking.uri=file:///x", "tracking.uri", "sqlite"),
        ("data.held_out=2", "data.held_out", "between 0 and 1"),
        ("data.min_gap=2", "data.min_gap", "only data.kind=ratings reads it"),
        ("data.kind=ratings data.chosen=best", "data.chosen", "only data.kind=pairs reads it"),
        ("data.held_out_url=x data.held_out=0.3", "data.held_out", "data.held_out_url has the held-out rows"),
        ("teacher.dtype=bfloat16", "teacher.dtype", "give teacher.paths"),
        ("name=a/b", "name", "letters"),
        ("model.path=nowhere", "model.path", "nowhere"),
        ("model.frozen_blocks=4", "model.frozen_blocks", "the model has 4 blocks: at most 3"),
        ("model.lora.rank=33", "model.lora.rank", "at most 32"),
        ("workers=3 layout.pipeline=3", "layout.pipeline", "must divide"),
        ("optimizer.optimizer=muon model.lora.rank=4", "optimizer.optimizer", "not those of LoRA's factors"),
        ("optimizer.optimizer=muon workers=2 layout.tensor=2", "layout.tensor", "optimizer.optimizer=adamw"),
        ("data.max_tokens=1000", "data.max_tokens", "context is 256"),
        ("data.url=none.jsonl", "data.url", "cannot read none.jsonl"),
        ("data.chosen=best", "data.chosen", "tiny_pairs.jsonl line 1: given 'best', available: prompt, chosen"),
        ("runs_dir=/proc/runs", "runs_dir", "cannot write to /proc"),
        ("data.max_tokens=8", "data.max_tokens", "too_long=skip"),
        ("data.held_out_url=conf/data/tiny_pairs.jsonl", "data.held_out_url", "trained on too"),
    ],
)
def test_a_refusal_is_one_message_and_exit_code_2(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: str,
    key: str,
    part: str,
) -> None:
    monkeypatch.chdir(ROOT)
    assert main(["reward", "train", str(TINY), f"runs_dir={tmp_path}/runs", *change.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"refused {key}: ")
    assert part in err
    assert err.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("path", sorted((ROOT / "conf/label").glob("*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_labelling_loads(path: Path) -> None:
    assert load_label_config([path], ["responses.url=x.jsonl"]).judge.kind == "judge"


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ("responses.last_steps=2", "responses.last_steps"),
        ("responses.per_prompt=8", "responses.per_prompt"),
        ("prompts.max_tokens=8", "prompts.max_tokens"),
        ("sampling.temperature=0.5", "sampling.temperature"),
        ("engine.embedded.kernels=torch", "engine.embedded.kernels"),
    ],
)
def test_settings_of_other_responses_are_refused(change: str, key: str) -> None:
    """The responses of a file are neither a run's nor sampled."""
    with pytest.raises(ConfigError) as refused:
        load_label_config([ROOT / "conf/label/kinder.yaml"], ["responses.url=x.jsonl", change])
    assert [error.key for error in refused.value.errors] == [key]


def test_a_run_in_its_directory_is_told_whose_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path)
    (tmp_path / "runs/small").mkdir(parents=True)
    for made, whose in (
        (load_reward_model_config([TINY]), "a reward model's training"),
        (load_label_config([ROOT / "conf/label/kinder.yaml"], ["responses.url=x"]), "a labelling"),
    ):
        (tmp_path / "runs/small/config.yaml").write_text(to_yaml(made))
        for command in (["run", *arguments(tmp_path)], ["resume", str(tmp_path / "runs/small")]):
            assert main(command) == 2
            said = capsys.readouterr().err
            assert f"is the directory of {whose}: for a run choose another name=..." in said
            assert "damaged" not in said


@pytest.mark.parametrize(
    ("command", "config", "said"),
    [
        ("run", "reward/tiny", "is the config of a reward model's training: `stageline reward train"),
        ("check", "label/kinder", "is the config of a labelling: `stageline reward label"),
        ("reward train", "run/tiny", "is the config of a run: `stageline run"),
        ("reward label", "reward/tiny", "is the config of a reward model's training: `stageline reward train"),
    ],
)
def test_a_config_of_another_command(capsys: pytest.CaptureFixture[str], command: str, config: str, said: str) -> None:
    file = str(ROOT / f"conf/{config}.yaml")
    assert main([*command.split(), file, "name=x"]) == 2
    assert capsys.readouterr().err == f"refused {file}: {said} {file}`\n"


def classifier(directory: Path, num_labels: int) -> str:
    """A random one with so many outputs."""
    config = LlamaConfig(**read_config("random:tiny") | {"num_labels": num_labels})
    AutoModelForSequenceClassification.from_config(config).save_pretrained(directory)
    saved = json.loads((directory / "config.json").read_text())
    assert saved["architectures"] == ["LlamaForSequenceClassification"]
    return str(directory)


def test_a_head_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    """A reward model that continues to learn has such a head, and so has the start of a critic."""
    path = classifier(tmp_path / "two", 2)
    config = load_reward_model_config([TINY], [f"model.path={path}", f"runs_dir={tmp_path}"])
    with pytest.raises(ConfigError, match=r"model\.path: .*score\.weight is \(2, 64\), .* \(1, 64\)"):
        check_training(config)
    write_config(tmp_path)
    files, changes = arguments(tmp_path)[:1], arguments(tmp_path)[1:]
    with pytest.raises(ConfigError, match=r"model\.critic_path: .*score\.weight is \(2, 64\)"):
        preflight(load_config(files, [*changes, f"model.critic_path={path}"]))


def test_a_reward_model_is_a_critic_but_no_policy_and_no_reference(tmp_path: Path) -> None:
    path = classifier(tmp_path / "one", 1)
    write_config(tmp_path)
    files, changes = arguments(tmp_path)[:1], arguments(tmp_path)[1:]
    preflight(load_config(files, [*changes, f"model.critic_path={path}"]))
    for key in ("model.path", "model.reference_path"):
        with pytest.raises(ConfigError, match=rf"{key.replace('.', '[.]')}: .*it is a reward model") as refused:
            preflight(load_config(files, [*changes, f"{key}={path}"]))
        assert refused.value.key == key


def test_a_directory_that_holds_a_run_is_refused_and_stays_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/events.jsonl").write_text("{}\n")
    config = load_reward_model_config([TINY], [f"runs_dir={tmp_path}", "name=tiny"])
    with pytest.raises(ConfigError, match=r"name: given 'tiny'; .* holds a run: choose another name="):
        check_training(config)
