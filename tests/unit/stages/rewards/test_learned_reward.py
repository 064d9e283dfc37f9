"""The reward of kind `model`: its scores are those of transformers and of the training's own held-out file; what is no
reward model is refused with what would be one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from stages.models.hf_files import ByteTokenizer
from stages.models.hf_weights import write_model
from stages.models.reward_model import TokenRows
from stages.models.spec import SCORE_WEIGHT
from stages.rewards.config import PartConfig, RewardPartsConfig, reward_model_parts
from stages.rewards.learned import ONE_ROW_PER_PASS, PROCESS_MODELS, LoadSettings, ModelKind, ModelReward
from stages.rewards.protocol import Sample
from stages.rewards.registry import UnfitReward, build_reward
from tests.support.families import random_model
from tests.support.reward_models import change_config, export_reward_model

TEXTS = [("a cold", " morning"), ("the", " end."), ("x", ""), ("a rather long opening of", " something else, for once")]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return export_reward_model(tmp_path_factory.mktemp("reward") / "model")


@pytest.fixture
def make() -> Iterator[Callable[..., ModelReward]]:
    """Rewards that end with the test; with the last of them this process is in no gang any more."""
    made: list[ModelReward] = []

    def one(path: str, **args: Any) -> ModelReward:
        made.append(ModelReward(path, **args))
        return made[-1]

    yield one
    for reward in made:
        reward.close()
        reward.close()
    assert not dist.is_initialized()


def samples() -> list[Sample]:
    """Every other response ends in EOS, which is 2."""
    encode = ByteTokenizer().encode
    return [
        Sample(prompt, text, prompt_ids=tuple(encode(prompt)), response_ids=(*encode(text), *([2] if row % 2 else [])))
        for row, (prompt, text) in enumerate(TEXTS)
    ]


def by_transformers(path: str) -> np.ndarray:
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    rows = [torch.tensor([[*(prompt + text).encode(), 2]]) for prompt, text in TEXTS]
    with torch.no_grad():
        logits = [model(row).logits[0, 0].item() for row in rows]
    return np.array(logits) + model.config.reward_bias


@pytest.mark.parametrize("batch_tokens", [None, 24, 4096])
def test_scores_equal_transformers_own(path: str, make: Callable[..., ModelReward], batch_tokens: int | None) -> None:
    reward = make(path, batch_tokens=batch_tokens)
    expected = by_transformers(path)
    assert np.ptp(expected) > 0.3
    np.testing.assert_allclose(reward(samples()), expected, atol=2e-5)
    assert reward.deterministic is (batch_tokens is None)


def test_models_that_sleep_free_their_weights_and_score_the_same(
    path: str, make: Callable[..., ModelReward], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, where the mechanism is that of a GPU: a local judge's model beside a reward model."""
    monkeypatch.setattr("stages.models.reward_model.has_own_memory", lambda: True)
    judge = LoadSettings(ModelKind.LANGUAGE, path, "float32", ONE_ROW_PER_PASS)
    reward, model = make(path), PROCESS_MODELS.acquire(judge)
    rows = TokenRows.of([[1, 2, 3], [4, 5]])
    before = reward(samples()), model.likeliest(rows, 3)
    for _ in range(2):
        PROCESS_MODELS.sleep()
        weights = [p for one in (reward._model, model) for p in one._model.parameters()]
        assert weights
        assert not any(parameter.untyped_storage().nbytes() for parameter in weights)
        assert (reward(samples()), model.likeliest(rows, 3)) == before
    PROCESS_MODELS.release(judge)


def test_a_row_by_itself_has_the_same_bits_in_any_company(path: str, make: Callable[..., ModelReward]) -> None:
    reward = make(path, dtype="bfloat16", batch_tokens=None)
    together = reward(samples())
    assert [reward([sample])[0] for sample in samples()] == together
    assert reward(samples()[::-1]) == together[::-1]


def test_a_process_holds_one_of_each_model(tmp_path: Path, path: str, make: Callable[..., ModelReward]) -> None:
    """Rewards of training and evaluation have the same; members of an ensemble others; each closes in any order."""
    other = export_reward_model(tmp_path / "other", seed=6)
    first, again, second = make(path), make(path), make(other)
    scores = first(samples())
    assert second(samples()) != scores
    assert again(samples()) == scores
    assert again._model is first._model
    first.close()
    assert again(samples()) == scores


def _changed(write: Callable[[Path, dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """Return a function that writes a reward model and then changes its directory, given its tensors."""

    def change(directory: Path) -> None:
        export_reward_model(directory)
        write(directory, load_file(directory / "model.safetensors"))

    return change


def _unknown_family(directory: Path) -> None:
    random_model("Llama 2").save_pretrained(directory)
    change_config(directory, model_type="bert")


UNFIT: dict[str, tuple[Callable[[Path], object], str]] = {
    "nothing": (lambda directory: None, "stageline reward train"),
    "a language model": (
        lambda directory: write_model(directory, "random:tiny", {}, "float32"),
        "no model for sequence classification",
    ),
    "two labels": (
        _changed(lambda d, t: save_file(t | {SCORE_WEIGHT: t[SCORE_WEIGHT].repeat(2, 1)}, d / "model.safetensors")),
        "one score for each row",
    ),
    "no head": (
        _changed(lambda d, t: save_file({n: t[n] for n in t if n != SCORE_WEIGHT}, d / "model.safetensors")),
        f"its files have no {SCORE_WEIGHT}",
    ),
    "damaged": (_changed(lambda d, _: (d / "model.safetensors").write_bytes(b"half")), "stageline reward train"),
    "no weights": (_changed(lambda d, _: (d / "model.safetensors").unlink()), "stageline reward train"),
    "no JSON": (_changed(lambda d, _: (d / "config.json").write_text("{")), "stageline reward train"),
    "no EOS": (_changed(lambda d, _: change_config(d, eos_token_id=None)), "stageline reward train"),
    "unknown family": (_unknown_family, "bert"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_is_no_reward_model_is_refused(tmp_path: Path, name: str) -> None:
    write, said = UNFIT[name]
    directory = tmp_path / "model"
    write(directory)
    with pytest.raises(UnfitReward, match=r"^reward\.parts\.kind\.args\.path: given ") as refusal:
        build_reward("model", {"path": str(directory)}, "reward.parts.kind")
    assert refusal.value.problem.given == str(directory)
    assert said in refusal.value.problem.need


@pytest.mark.parametrize(
    ("args", "key"),
    [
        ({"path": None}, "path"),
        ({"batch_tokens": 0}, "batch_tokens"),
        ({"batch_tokens": True}, "batch_tokens"),
        ({"batch_tokens": 2.5}, "batch_tokens"),
    ],
)
def test_arguments_that_cannot_work_are_refused_by_name(path: str, args: Mapping[str, Any], key: str) -> None:
    with pytest.raises(UnfitReward) as refusal:
        build_reward("model", {"path": path, **args}, "reward")
    assert refusal.value.problem.key == f"reward.args.{key}"


def test_reward_models_are_found_in_ensembles_too() -> None:
    inner = {
        "kind": "ensemble",
        "args": {"members": {"c": {"kind": "model", "args": {"path": "y"}}, "d": {"kind": "a"}}},
    }
    members = {"a": {"kind": "model", "args": {"path": "x"}}, "b": inner}
    config = RewardPartsConfig(
        parts={"kind": PartConfig("ensemble", args={"members": members}), "brief": PartConfig("length")}
    )
    assert dict(reward_model_parts(config, "reward")) == {
        "reward.parts.kind.args.members.a.args": {"path": "x"},
        "reward.parts.kind.args.members.b.args.members.c.args": {"path": "y"},
    }
    assert dict(reward_model_parts(RewardPartsConfig("model", {"path": "z"}), "reward")) == {
        "reward.args": {"path": "z"}
    }
