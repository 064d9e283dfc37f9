"""Every family in the trainer, against transformers on the same weights: log-probs, gradients, and what is exported."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from stages.models.config import ModelConfig, OptimizerConfig
from stages.models.host import MegatronHost
from stages.models.protocol import PolicyBatch, Role
from stages.models.spec import read_config
from storage.records import Advantages, ReferenceLogprobs, Rollout
from storage.weights import WeightBoard
from tests.support.families import FAMILIES, random_model
from tests.support.models import (
    logprob_gradients,
    opened,
    published,
    random_rollout,
    transformers_logprobs,
)

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


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_and_gradients_equal_transformers(tmp_path: Path, family: str) -> None:
    theirs = random_model(family)
    theirs.save_pretrained(tmp_path / "model")
    rounded = copy.deepcopy(theirs)  # how far float32 is off on this processor, which differs from one to another
    theirs.double()  # so that the difference is our rounding alone
    rollout = rollout_of(0)
    by_row = OptimizerConfig(micro_batch_rows=1)
    with opened(tmp_path, ModelConfig(path=str(tmp_path / "model"), policy=by_row)) as host:
        found = host.policy_logprobs(rollout)
        ours = logprob_gradients(host, rollout)
    expected = transformers_logprobs(theirs, rollout)
    mask = rollout.response_mask[:, 1:]
    errors = np.abs(found.policy_logprobs[:, 1:] - expected.detach().numpy())[mask]
    assert errors.max() < 5e-6, errors.max()
    expected[torch.from_numpy(mask)].sum().backward()
    transformers_logprobs(rounded, rollout)[torch.from_numpy(mask)].sum().backward()
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
        expected = transformers_logprobs(exported, rollout).numpy()
    mask = rollout.response_mask[:, 1:]
    np.testing.assert_allclose(found.policy_logprobs[:, 1:][mask], expected[mask], atol=5e-6)
    ours, original = (read_config(str(tmp_path / name)) for name in ("exported", "model"))
    assert ours == original | {"dtype": "float32"}
