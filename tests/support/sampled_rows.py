"""Rows of a step: given ones, and what `advantage` reads of a step, drawn at random on given spans of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from storage.records import FinishReason, PolicyLogprobs, ReferenceLogprobs, Rollout


def rollout_of(tokens: ArrayLike, response_mask: np.ndarray, *, version: int = 0, **arrays: np.ndarray) -> Rollout:
    """Return rows sampled by one version, each with a response, with a log-prob of -1 for every sampled token; `arrays`
    replaces fields."""
    mask, rows = response_mask.astype(bool), np.arange(len(response_mask))
    fields = {
        "row": rows, "prompt_index": rows, "tokens": np.asarray(tokens, np.int32), "response_mask": mask,
        "prompt_lengths": mask.argmax(axis=1).astype(np.int32), "response_lengths": mask.sum(axis=1).astype(np.int32),
        "sampler_logprobs": np.where(mask, -1, 0).astype(np.float32),
        "token_versions": np.where(mask, version, -1).astype(np.int32), "finish_reason": np.zeros(len(rows), np.int8),
    }  # fmt: skip
    return Rollout(**fields | arrays)


@dataclass(frozen=True)
class SampledRows:
    rollout: Rollout
    reference: ReferenceLogprobs
    policy: PolicyLogprobs
    by_token: Callable[[np.ndarray], np.ndarray]
    """An array of numbers by token with `outside` where nothing was sampled, float32."""


def sampled_rows(
    rng: np.random.Generator,
    spans: Sequence[tuple[int, int]],
    cut: np.ndarray,
    seq: int,
    versions: tuple[int, int],
    prompts: Sequence[int],
    outside: float = 0.0,
    first_row: int = 0,
) -> SampledRows:
    """`spans`: where each response begins, and its tokens; `cut`: which ended at the length limit; `versions`: oldest
    and newest of the weights that sampled; `prompts`: each row's; `outside` fills every float outside the mask."""
    rows = len(spans)
    mask = np.zeros((rows, seq), dtype=bool)
    for i, (start, length) in enumerate(spans):
        mask[i, start : start + length] = True

    def by_token(x: np.ndarray) -> np.ndarray:
        return np.where(mask, x, outside).astype(np.float32)

    mu = -rng.random((rows, seq)) - 0.1
    rollout = Rollout(
        row=first_row + np.arange(rows),
        prompt_index=np.array(prompts),
        tokens=rng.integers(1, 9, (rows, seq), dtype=np.int32),
        prompt_lengths=np.array([start for start, _ in spans], np.int32),
        response_lengths=np.array([length for _, length in spans], np.int32),
        response_mask=mask,
        sampler_logprobs=by_token(mu),
        token_versions=np.where(mask, rng.integers(versions[0], versions[1] + 1, mask.shape), -1).astype(np.int32),
        finish_reason=np.where(cut, FinishReason.LENGTH, FinishReason.STOP).astype(np.int8),
    )
    policy = PolicyLogprobs(
        policy_logprobs=by_token(mu + 0.1 * rng.normal(size=mask.shape)), entropy=by_token(rng.random(mask.shape))
    )
    reference = ReferenceLogprobs(ref_logprobs=by_token(mu + 0.3 * rng.normal(size=mask.shape)))
    return SampledRows(rollout, reference, policy, by_token)
