"""Model FLOPs against torch's own count of a model's products; rates by hand; what a host reports of an update."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from stages.models.config import LoraConfig, ModelConfig
from stages.models.protocol import Role
from stages.models.spec import read_config, read_spec
from stages.models.work import UpdateWork, measured_peak, update_flops
from stages.ppo.config import PPOConfig
from tests.support.models import opened
from tests.unit.stages.models.test_model_update import batches, model_config

TINY = read_spec("random:tiny")


def counted_by_torch(rows: int, tokens: int) -> int:
    """Return torch's count of the products in a forward and a backward pass; attention counts as matrices, masked
    parts included."""
    config = LlamaConfig(**read_config("random:tiny"))
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    return counter.get_total_flops()


def test_flops_are_those_that_torch_counts() -> None:
    """Less the half of the attention that a token does not see, which torch counts."""
    rows, n = 3, 40
    lengths = np.full(rows, n)
    found = update_flops(TINY, TINY.num_layers, lengths, outputs=256, num_outputs=rows * n, output_trained=True)
    unseen = 6 * TINY.num_layers * TINY.q_size * rows * n**2
    assert found + unseen == pytest.approx(counted_by_torch(rows, n), rel=1e-4)


def test_flops_by_hand() -> None:
    """One block of two: 64 x (64 + 32 + 32) and 64 x 64 of attention, 3 x 64 x 176 of the MLP; rows of 2 and 4."""
    matrices = 64 * 128 + 64 * 64 + 3 * 64 * 176
    expected = 6 * matrices * 6 + 6 * 64 * (4 + 16) + 4 * 64 * 256 * 5
    found = update_flops(TINY, 1, np.array([2, 4]), outputs=256, num_outputs=5, output_trained=False)
    assert found == expected


def test_with_adapters_frozen_weights_have_no_gradient() -> None:
    """Against torch's count, the adapters' small products aside: of a frozen weight the forward and the input's."""
    matrices, adapters = 64 * 128 + 64 * 64 + 3 * 64 * 176, 4 * (64 + 64)
    expected = (4 * matrices + 6 * adapters) * 6 + 6 * 64 * (4 + 16) + 4 * 64 * 256 * 5
    kwargs: dict[str, Any] = {"outputs": 256, "num_outputs": 5, "output_trained": False}
    assert update_flops(TINY, 1, np.array([2, 4]), **kwargs, adapters=adapters) == expected


def test_a_host_counts_adapters(tmp_path: Path) -> None:
    config = ModelConfig(path="random:tiny", lora=LoraConfig(rank=4, targets=["proj"]), peak_tflops=1.0)
    with opened(tmp_path, config) as host:
        policy, _ = batches(host)
        host.update_policy(0, policy)
        metrics = host.last_update(Role.POLICY)
    rollout = policy.rollout
    lengths = rollout.prompt_lengths + rollout.response_lengths
    kwargs: dict[str, Any] = {"outputs": 256, "num_outputs": int(rollout.response_lengths.sum())}
    flops = update_flops(TINY, 4, lengths, **kwargs, output_trained=False, adapters=4 * (64 + 64))
    assert metrics["tflops_per_s"] / metrics["tokens_per_s"] == pytest.approx(flops / lengths.sum() / 1e12)


def test_rates_by_hand() -> None:
    found = UpdateWork(tokens=600, flops=3e12, seconds=2.0, peak_flops=6e12).metrics()
    assert found == {"tokens_per_s": 300.0, "tflops_per_s": 1.5, "peak_tflops": 6.0, "mfu": 0.25}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measured_peak_leaves_the_random_numbers_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert 1e8 < measured_peak(dtype, torch.device("cpu")) < math.inf
    assert torch.equal(torch.get_rng_state(), before)


def test_a_host_reports_what_it_trained_on(tmp_path: Path) -> None:
    """Two epochs of all rows; the policy's frozen output layer after sampled tokens, the critic's head after all."""
    config = model_config(frozen_blocks=2)
    config.peak_tflops = 0.5
    with opened(tmp_path, config, PPOConfig(epochs=2, minibatches=2)) as host:
        assert host.last_update(Role.POLICY) == {}
        policy, critic = batches(host)
        host.update_policy(0, policy)
        host.update_critic(0, critic)
        found = {role: host.last_update(role) for role in (Role.POLICY, Role.CRITIC)}
    rollout = policy.rollout
    lengths = np.tile(rollout.prompt_lengths + rollout.response_lengths, 2)
    sampled, outputs = 2 * int(rollout.response_lengths.sum()), TINY.vocab_size
    flops = {
        Role.POLICY: update_flops(TINY, 2, lengths, outputs=outputs, num_outputs=sampled, output_trained=False),
        Role.CRITIC: update_flops(TINY, 2, lengths, outputs=1, num_outputs=int(lengths.sum()), output_trained=True),
    }
    for role, metrics in found.items():
        seconds = lengths.sum() / metrics["tokens_per_s"]
        assert metrics["tflops_per_s"] * 1e12 == pytest.approx(flops[role] / seconds)
        assert metrics["mfu"] == pytest.approx(metrics["tflops_per_s"] / 0.5)
        assert metrics["peak_tflops"] == 0.5


def test_steps_without_training_have_no_rate(tmp_path: Path) -> None:
    with opened(tmp_path, ModelConfig(path="random:tiny"), PPOConfig(critic_warmup_steps=1)) as host:
        policy, _ = batches(host)
        host.update_policy(0, policy)
        assert host.last_update(Role.POLICY) == {}
