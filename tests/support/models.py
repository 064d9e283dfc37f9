"""Megatron's models of one rank, and data for them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from stages.models.config import LayoutConfig, ModelConfig
from stages.models.host import MegatronHost
from stages.models.protocol import Rank, Role
from stages.models.sampling import SamplingConfig
from stages.ppo.config import PPOConfig
from storage.records import Rollout

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
    )
    try:
        yield host
    finally:
        host.close()


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
