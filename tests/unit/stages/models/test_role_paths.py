"""Reference and critic from models of their own: the numbers are those models', and the policy's stay as they were."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.models.config import ModelConfig, OptimizerConfig
from stages.models.protocol import CriticBatch, Role
from stages.models.spec import read_config
from stages.models.weights import stage_tensors
from storage.records import Advantages, Values
from tests.support.models import opened, random_rollout, transformers_logprobs

ROWS, SEQ = 6, 12
TRAINING = ModelConfig(
    path="random:tiny", policy=OptimizerConfig(lr=1e-3), critic=OptimizerConfig(lr=1e-2, micro_batch_rows=3)
)


def saved(directory: Path, seed: int, **changes: object) -> tuple[Path, LlamaForCausalLM]:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**read_config("random:tiny") | changes)).eval()
    model.save_pretrained(directory)
    return directory, model


def test_a_reference_of_its_own(tmp_path: Path) -> None:
    path, other = saved(tmp_path / "other", 1, hidden_size=48, num_hidden_layers=3, tie_word_embeddings=False)
    rollout = random_rollout(np.random.default_rng(0), ROWS, SEQ)
    with opened(tmp_path, TRAINING) as host:
        ordinary = host.policy_logprobs(rollout)
    with opened(tmp_path, dataclasses.replace(TRAINING, reference_path=str(path))) as host:
        found, policy = host.ref_logprobs(rollout), host.policy_logprobs(rollout)
    with torch.no_grad():
        theirs = transformers_logprobs(other, rollout).numpy()
    expected = np.where(rollout.response_mask[:, 1:], theirs, 0)
    np.testing.assert_allclose(found.ref_logprobs[:, 1:], expected, atol=1e-5)
    assert not found.ref_logprobs[:, 0].any()
    np.testing.assert_array_equal(policy.policy_logprobs, ordinary.policy_logprobs)


def test_a_critic_of_other_sizes_learns_and_comes_back(tmp_path: Path) -> None:
    """Its first values are 0, its tensors are the other model's, and version 0 is that model again."""
    path, other = saved(tmp_path / "other", 1, hidden_size=48, num_hidden_layers=5, intermediate_size=96)
    rollout = random_rollout(np.random.default_rng(0), ROWS, SEQ)
    mask = rollout.response_mask
    returns = mask.astype(np.float32)
    advantages = Advantages(returns, returns, returns, mask)
    config = dataclasses.replace(TRAINING, critic_path=str(path), critic_blocks=3)
    with opened(tmp_path, config) as host:
        trained = dict(stage_tensors(host._trainers[Role.CRITIC].model, host._blueprints[Role.CRITIC]))
        theirs = other.state_dict()
        for name, tensor in trained.items():
            if not name.startswith("value_head"):
                torch.testing.assert_close(tensor, theirs[name], rtol=0, atol=0)
        assert {int(name.split(".")[2]) for name in trained if ".layers." in name} == {0, 1, 2}
        start = host.digest(Role.CRITIC)
        before = host.values(rollout)
        assert not before.values.any()
        for step in range(3):
            values = host.values(rollout)
            host.update_critic(step, CriticBatch(rollout, advantages, Values(values.values, values.bootstrap_values)))
            host.mark_clean(Role.CRITIC)
        after = host.values(rollout)
        assert np.abs(after.values - returns)[mask].mean() < np.abs(before.values - returns)[mask].mean()
        assert host.last_update(Role.CRITIC)["tokens_per_s"] > 0
        host.load(Role.CRITIC, None)
        assert host.digest(Role.CRITIC) == start


@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_the_same_model_under_another_path_changes_nothing(tmp_path: Path, frozen_blocks: int) -> None:
    path, _ = saved(tmp_path / "start", 1)
    config = dataclasses.replace(TRAINING, path=str(path), frozen_blocks=frozen_blocks)
    other = dataclasses.replace(config, reference_path=f"{path}/.", critic_path=f"{path}/.")
    rollout = random_rollout(np.random.default_rng(0), ROWS, SEQ)
    found = []
    for each in (config, other):
        with opened(tmp_path, each) as host:
            reference = host.ref_logprobs(rollout)
            found.append((reference.ref_logprobs, host.digest(Role.CRITIC), host.digest(Role.POLICY)))
    np.testing.assert_array_equal(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
