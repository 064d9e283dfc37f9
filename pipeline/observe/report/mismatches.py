"""The tokens on which trainer and sampler disagree most. Pure functions of rows that were read. May import numpy,
pipeline.observe.rows, storage.vocabulary and this folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.observe.report.numbers import number
from pipeline.observe.rows import StageRows
from storage.vocabulary import Decode

MOST = 20


@dataclass(frozen=True)
class TokenMismatch:
    """One sampled token, as both saw it."""

    step: int
    row: int
    position: int
    """In the response, from 0."""
    token: str
    sampler: float | None
    """log-prob under what was sampled from."""
    policy: float | None
    """log-prob by the trainer's weights at the step's start."""
    staleness: int
    """Versions between the two; at 0 they should agree to rounding."""


def worst_mismatches(read: Sequence[StageRows], decode: Decode, most: int = MOST) -> list[TokenMismatch] | None:
    """By |log pi - log mu|, the largest first. None where the trainer's log-probs are not computed in this run."""
    steps = [step for step in read if step.mismatch is not None]
    if not steps:
        return None
    found: list[tuple[float, int, int, int]] = []
    for i, step in enumerate(steps):
        assert step.mismatch is not None
        size = np.abs(step.mismatch).ravel()
        size = np.where(np.isfinite(size), size, np.inf)
        for flat in np.argsort(-size, kind="stable")[:most]:
            row, t = divmod(int(flat), step.mismatch.shape[1])
            if step.rollout.response_mask[row, t]:
                found.append((-float(size[flat]), i, row, t))
    return [_one(steps[i], row, t, decode) for _, i, row, t in sorted(found)[:most]]


def _one(step: StageRows, row: int, t: int, decode: Decode) -> TokenMismatch:
    rollout = step.rollout
    assert step.policy is not None
    return TokenMismatch(
        step=step.step,
        row=int(rollout.row[row]),
        position=t - int(rollout.prompt_lengths[row]),
        token=decode([int(rollout.tokens[row, t])]),
        sampler=number(float(rollout.sampler_logprobs[row, t])),
        policy=number(float(step.policy.policy_logprobs[row, t])),
        staleness=step.step - int(rollout.token_versions[row, t]),
    )
