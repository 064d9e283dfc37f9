"""Stage `logprob`: the proximal policy, log pi_prox of every sampled token by the weights at the step's start."""

from __future__ import annotations

from stages.models.protocol import ModelHost
from storage.records import PolicyLogprobs, Rollout


def logprob(models: ModelHost, rollout: Rollout) -> PolicyLogprobs | None:
    """log pi_prox(token) and entropies of a shard's rollout, by the resident policy; None on ranks other than 0."""
    return models.policy_logprobs(rollout)
