"""Every family in the trainer, against transformers on the same weights: log-probs, gradients, and what is exported."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from stages.models.config import ModelConfig, OptimizerConfig
from stages.models.forward import MicroBatch, cut_micro_batches, response_logprobs, run_backward
from stages.models.hf_conversion import named_by_block, to_hf
from stages.models.host import MegatronHost
from stages.models.protocol import PolicyBatch, Role
from stages.models.spec import read_config, read_spec
from stages.ppo.losses import LossStats
from storage.records import Advantages, ReferenceLogprobs, Rollout
from storage.weights import WeightBoard
from tests.support.families import FAMILIES, random_model
from tests.support.models import opened, published, random_rollout

ROWS, SEQ = 6, 40


def rollout_of(seed: int) -> Rollout:
    """Responses that begin late: positions at which scaled and plain rotary embeddings differ."""
    rng = np.random.default_rng(seed)
    short = random_rollout(rng, ROWS, SEQ)
    late = 27
    mask = np.roll(short.response_mask, late, axis=1)
    return dataclasses.replace(
        short,
        prompt_lengths=(short.prompt_lengths + late).astype(np.int32),
        response_mask=mask,
        token_versions=np.where(mask, 0, -1).astype(np.int32),
    )


def logprobs_of(model: PreTrainedModel, rollout: Rollout) -> torch.Tensor:
    """Return the log-probs of every token after the first, [rows, seq - 1]."""
    tokens = torch.from_numpy(rollout.tokens).long()
    logits = model(tokens).logits[:, :-1]
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0]


def gradients(host: MegatronHost, rollout: Rollout) -> dict[str, torch.Tensor]:
    """Return the gradients of the sum of the policy's log-probs, by Hugging Face name."""
    trainer = host._trainers[Role.POLICY]
    trainer._ddp.zero_grad_buffer()

    def loss(batch: MicroBatch, hidden: torch.Tensor) -> tuple[torch.Tensor, LossStats]:
        weight = trainer.model.output_layer.weight
        if weight is None:
            weight = trainer.model.embedding.word_embeddings.weight
        products = host.product_choice.products
        found, _ = response_logprobs(hidden, batch, weight, host._distribution, products, host._kernels, entropy="none")
        return found.sum(), LossStats({}, {})

    device = host._parallel_rank.device
    batches = cut_micro_batches(rollout.tokens, rollout.response_mask, np.arange(ROWS), device, max_tokens=40)
    run_backward(trainer._ddp, None, batches, loss)
    return {
        of_name: tensor.clone()
        for name, block, parameter in named_by_block(trainer.model, 0)
        for of_name, tensor in to_hf(name, block, parameter.main_grad, host._blueprint.spec, lambda part: [part])
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_transformers(tmp_path: Path, family: str) -> None:
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path / "model")
    rounded = copy.deepcopy(theirs)  # how far float32 is off on this processor, which differs from one to another
    theirs.double()  # so that the difference is our rounding alone
    rollout = rollout_of(0)
    with opened(tmp_path, ModelConfig(path=str(tmp_path / "model"))) as host:
        found = host.policy_logprobs(rollout)
        ours = gradients(host, rollout)
    expected = logprobs_of(theirs, rollout)
    mask = rollout.response_mask[:, 1:]
    errors = np.abs(found.policy_logprobs[:, 1:] - expected.detach().numpy())[mask]
    assert errors.max() < 5e-6, errors.max()
    expected[torch.from_numpy(mask)].sum().backward()
    logprobs_of(rounded, rollout)[torch.from_numpy(mask)].sum().backward()
    wanted = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    assert ours.keys() == wanted.keys()
    assert all(gradient.abs().max() > 1e-3 for gradient in wanted.values()), "nothing is tested"

    def error(found: torch.Tensor, name: str) -> float:
        return float((found - wanted[name]).norm() / wanted[name].norm())

    their_error = max(error(parameter.grad, name) for name, parameter in rounded.named_parameters())
    assert their_error < 1e-5, "float32 is no yardstick"
    for name in wanted:
        assert error(ours[name], name) < 2 * their_error, (name, their_error)


def update(host: MegatronHost, rollout: Rollout) -> None:
    """Version 0 into version 1 on random advantages."""
    mask = rollout.response_mask
    noise = np.where(mask, np.random.default_rng(1).normal(size=mask.shape), 0).astype(np.float32)
    policy = host.policy_logprobs(rollout)
    rollout = dataclasses.replace(rollout, sampler_logprobs=policy.policy_logprobs)
    reference = ReferenceLogprobs(policy.policy_logprobs)
    host.update_policy(0, PolicyBatch(rollout, Advantages(noise, noise, noise, mask), policy, reference, 0.0))
    host.mark_clean(Role.POLICY)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_trained_model_is_exported_whole(tmp_path: Path, family: str) -> None:
    """transformers loads it as it is, and it says what the trainer says; every tensor was trained."""
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path / "model")
    rollout = rollout_of(0)
    optimizer = OptimizerConfig(lr=1e-2, decay="constant")
    with opened(tmp_path, ModelConfig(path=str(tmp_path / "model"), policy=optimizer)) as host:
        update(host, rollout)
        found = host.policy_logprobs(rollout)
        trained = published(host)
        host.export(WeightBoard(tmp_path / "board"), tmp_path / "exported")()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.float32)
    assert type(exported) is type(theirs)
    before = dict(theirs.named_parameters())
    after = dict(exported.named_parameters())
    assert trained.keys() == after.keys() == before.keys()
    for name, parameter in after.items():
        np.testing.assert_array_equal(parameter.detach().numpy(), trained[name])
        assert not torch.equal(parameter, before[name]), name
    with torch.no_grad():
        expected = logprobs_of(exported, rollout).numpy()
    mask = rollout.response_mask[:, 1:]
    np.testing.assert_allclose(found.policy_logprobs[:, 1:][mask], expected[mask], atol=5e-6)
    ours, original = (read_config(str(tmp_path / name)) for name in ("exported", "model"))
    assert ours == original | {"dtype": "float32"}


def test_a_window_bounds_the_rows(tmp_path: Path) -> None:
    """Up to its length every token sees all before it, so that it changes nothing."""
    random_model("Mistral, with a window").save_pretrained(tmp_path)
    assert read_spec(str(tmp_path)).max_positions == 64
    random_model("Mistral").save_pretrained(tmp_path)
    assert read_spec(str(tmp_path)).max_positions == 128
