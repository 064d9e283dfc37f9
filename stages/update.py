"""Stages `update_policy` and `update_critic`: one PPO step of a model, on all rows of the step.

Both leave the resident model dirty: the caller commits the outcome and then marks it clean (law 3).
"""

from __future__ import annotations

from stages.models.protocol import CriticBatch, ModelHost, PolicyBatch
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values


def update_policy(
    models: ModelHost,
    step: int,
    *,
    rollout: Rollout,
    advantages: Advantages,
    reference: ReferenceLogprobs,
    policy: PolicyLogprobs | None,
    kl_coef: float,
) -> dict[str, float]:
    """Train policy version `step` to `step + 1`. Return metrics."""
    return models.update_policy(step, PolicyBatch(rollout, advantages, policy, reference, kl_coef))


def update_critic(
    models: ModelHost, step: int, *, rollout: Rollout, advantages: Advantages, values: Values
) -> dict[str, float]:
    """Train critic version `step` to `step + 1`. Return metrics."""
    return models.update_critic(step, CriticBatch(rollout, advantages, values))
