"""Every family in the embedded engine, against transformers: what is drawn, new weights in part and whole, and a model
that spans two processes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.engines.config import SpeculationConfig
from stages.engines.protocol import Completion, GenerationEngine, Request, WeightsError
from stages.models.config import ModelConfig
from tests.contracts.embedded_engines import make_engine
from tests.contracts.engine_contract import GREEDY_TOKENS, assert_greedy_of, greedy_requests, oracle_logprobs
from tests.support.engines import assert_same_bits, by_row
from tests.support.families import FAMILIES, random_model
from tests.support.models import opened, published
from tests.support.processors import KERNELS


def answers(engine: GenerationEngine, asked: list[Request]) -> dict[int, Completion]:
    return by_row(engine.generate(asked))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_drawn_is_transformers(tmp_path: Path, family: str, kernels: str) -> None:
    model = random_model(family)
    model.save_pretrained(tmp_path)
    with closing(make_engine(tmp_path, kernels=kernels)) as engine:
        together = answers(engine, greedy_requests())
        assert_greedy_of(model, together, greedy_requests())
        assert_same_bits(answers(engine, greedy_requests()[2:3]), {2: together[2]})


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["Qwen 2.5", "Qwen 3"])
def test_bfloat16_stays_close(tmp_path: Path, family: str, kernels: str) -> None:
    model = random_model(family, initializer_range=0.05)
    model.save_pretrained(tmp_path)
    with closing(make_engine(tmp_path, dtype="bfloat16", kernels=kernels)) as engine:
        found = answers(
            engine,
            asked := [replace(each, sampling=replace(each.sampling, temperature=1.0)) for each in greedy_requests()],
        )
    for request in asked:
        expected = oracle_logprobs(model, request, found[request.row].tokens)
        chosen = expected[range(GREEDY_TOKENS), found[request.row].tokens.tolist()].numpy()
        assert 1e-6 < np.abs(found[request.row].logprobs - chosen).mean() < 0.05


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("family", ["Qwen 2.5", "Qwen 3"])
def test_new_weights_in_part_and_whole(tmp_path: Path, family: str, kernels: str) -> None:
    """First one bias or norm of several that are fused together is replaced, then all tensors."""
    old, new = random_model(family), random_model(family, seed=1)
    old.save_pretrained(tmp_path)
    name = "model.layers.1.self_attn." + ("k_proj.bias" if family == "Qwen 2.5" else "k_norm.weight")
    tensors = {each: parameter.detach().clone() for each, parameter in new.named_parameters()}
    with closing(make_engine(tmp_path, kernels=kernels)) as engine:
        before = answers(engine, greedy_requests())
        engine.load_weights(1, {name: tensors[name]})
        with torch.no_grad():
            old.get_parameter(name).copy_(tensors[name])
        changed = answers(engine, greedy_requests(1))
        assert_greedy_of(old, changed, greedy_requests(1))
        assert any(changed[row].logprobs.tolist() != before[row].logprobs.tolist() for row in before)
        engine.load_weights(2, tensors)
        assert_greedy_of(new, answers(engine, greedy_requests(2)), greedy_requests(2))
        broken = tensors[name].clone()
        broken[3] = torch.nan
        with pytest.raises(WeightsError, match=name.replace(".", r"\.") + " holds NaN"):
            engine.load_weights(3, {name: broken})
        with pytest.raises(WeightsError, match="has shape"):
            engine.load_weights(3, {name: broken[:3]})


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    model = random_model("Qwen 2.5")
    tensors = dict(model.state_dict())
    del tensors["model.layers.2.self_attn.v_proj.bias"]
    model.save_pretrained(tmp_path, state_dict=tensors)
    with pytest.raises(WeightsError, match=r"model\.layers\.2\.self_attn\.v_proj\.bias is missing"):
        make_engine(tmp_path)


@pytest.mark.usefixtures("longest_drafts")
@pytest.mark.parametrize("family", ["Llama 3.1", "Qwen 2.5", "Qwen 3"])
def test_guesses_change_no_bit(tmp_path: Path, family: str) -> None:
    """Drafts go through biases and norms at other places in a batch."""
    random_model(family).save_pretrained(tmp_path)
    with closing(make_engine(tmp_path)) as engine:
        expected = answers(engine, greedy_requests())
    speculation = SpeculationConfig(drafter="ngram")
    with closing(make_engine(tmp_path, speculation=speculation)) as engine:
        assert_same_bits(answers(engine, greedy_requests()), expected)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("Qwen 2.5", {"tensor_parallel": 2}),
        ("Qwen 2.5", {"tensor_parallel": 6}),
        ("Qwen 3", {"tensor_parallel": 2}),
        ("Qwen 3", {"pipeline_parallel": 2}),
        ("Llama 3.1", {"tensor_parallel": 2, "kernels": "torch"}),
    ],
)
def test_several_ranks_take_the_trainers_weights(tmp_path: Path, family: str, config: dict[str, int]) -> None:
    """Biases go with their heads, each rank has the norms; six ranks hold each of two keys three times."""
    model, new = random_model(family), random_model(family, seed=1)
    model.save_pretrained(tmp_path / "model")
    new.save_pretrained(tmp_path / "new")
    with opened(tmp_path, ModelConfig(path=str(tmp_path / "new"))) as host:
        trained = published(host)
        tensors = {name: torch.from_numpy(array.copy()) for name, array in trained.items()}
    with closing(make_engine(tmp_path / "model", **config)) as engine:
        assert_greedy_of(model, answers(engine, greedy_requests()), greedy_requests())
        engine.load_weights(1, tensors)
        assert_greedy_of(new, answers(engine, greedy_requests(1)), greedy_requests(1))
