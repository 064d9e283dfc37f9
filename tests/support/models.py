"""Megatron's models of one rank, and data for them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch.distributed as dist

from stages.models.config import LayoutConfig, ModelConfig, Offload, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.protocol import CriticBatch, PolicyBatch, Rank, Role
from stages.ppo.config import PPOConfig
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values
from storage.weights import WeightBoard

SEED = 5
ALL_MODELS = frozenset({Role.POLICY, Role.REFERENCE, Role.CRITIC})


@contextlib.contextmanager
def opened(
    directory: Path,
    model: ModelConfig,
    ppo: PPOConfig | None = None,
    *,
    sampling: SamplingConfig | None = None,
    layout: LayoutConfig | None = None,
    offload: Offload = "none",
) -> Iterator[MegatronHost]:
    host = MegatronHost(
        model,
        sampling or SamplingConfig(),
        ppo or PPOConfig(),
        layout or LayoutConfig(),
        ALL_MODELS,
        Rank(0, 1, f"file://{directory}/rendezvous", 1),
        seed=SEED,
        total_steps=10,
        offload=offload,
    )
    try:
        yield host
    finally:
        host.close()


def published(host: MegatronHost) -> dict[str, np.ndarray] | None:
    """Return copies of the tensors that a gang publishes on rank 0, None on other ranks. All ranks make the call."""
    with tempfile.TemporaryDirectory() as folder:
        of_first = [folder]
        dist.broadcast_object_list(of_first)
        board, version = WeightBoard(Path(of_first[0]) / "board"), host.version(Role.POLICY)
        if host.publish(board, version) is None:
            return None
        with contextlib.closing(board.open(version)) as lease:
            return {name: array.copy() for name, array in lease.tensors.items()}


def random_advantages(rng: np.random.Generator, mask: np.ndarray) -> Advantages:
    """Rewards, advantages and returns drawn normal for the tokens of a response_mask."""
    return Advantages(*(np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32) for _ in range(3)), mask)


def update_both(
    host: MegatronHost,
    step: int,
    rollout: Rollout,
    advantages: Advantages,
    answers: tuple[PolicyLogprobs, ReferenceLogprobs, Values],
) -> dict[str, float]:
    """Trains both models on rows that were sampled by the version they have, and returns the metrics, without those
    that belong to the process."""
    policy, reference, values = answers
    versions = np.where(rollout.response_mask, step, -1).astype(np.int32)
    now = replace(rollout, token_versions=versions, sampler_logprobs=policy.policy_logprobs)
    metrics = host.update_policy(step, PolicyBatch(now, advantages, policy, reference, 0.1))
    metrics |= host.update_critic(step, CriticBatch(now, advantages, values))
    for role in (Role.POLICY, Role.CRITIC):
        host.mark_clean(role)
    return {name: value for name, value in metrics.items() if not name.endswith("peak_memory_bytes")}


def random_rollout(rng: np.random.Generator, rows: int, seq: int, version: int = 0) -> Rollout:
    """Prompts of 2 to 4 and responses of 1 to 8 random tokens; tokens of the padding are random too, since nothing may
    depend on them. Log-probs of the sampler are zero."""
    prompt = rng.integers(2, 5, rows).astype(np.int32)
    response = rng.integers(1, 9, rows).astype(np.int32)
    index = np.arange(seq)
    mask = (index >= prompt[:, None]) & (index < (prompt + response)[:, None])
    return Rollout(
        row=np.arange(rows),
        prompt_index=np.arange(rows),
        tokens=rng.integers(3, 256, (rows, seq)).astype(np.int32),
        prompt_lengths=prompt,
        response_lengths=response,
        response_mask=mask,
        sampler_logprobs=np.zeros((rows, seq), np.float32),
        token_versions=np.where(mask, version, -1).astype(np.int32),
        finish_reason=np.zeros(rows, np.int8),
    )
