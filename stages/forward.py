"""The stages that run a forward pass over a shard's sampled tokens.

logprob      log pi_prox of each token and entropies, by the policy's weights at the step's start
reference    log pi_ref of each token, by the frozen start policy
value        the value of the state before each token, by the critic's weights at the step's start
"""

from __future__ import annotations

from stages.models.protocol import ModelHost
from storage.records import PolicyLogprobs, ReferenceLogprobs, Rollout, Values


def logprob(models: ModelHost, rollout: Rollout) -> PolicyLogprobs | None:
    """Return log pi_prox(token) and entropies of a shard's rollout, by the resident policy; None on ranks other than
    0."""
    return models.policy_logprobs(rollout)


# ---- reference -------------------------------------------------------------------------------------------


def reference(models: ModelHost, rollout: Rollout) -> ReferenceLogprobs | None:
    """Return log pi_ref(token) of a shard's rollout; None on ranks other than 0. The reference is fixed, without
    versions."""
    return models.ref_logprobs(rollout)


# ---- value -----------------------------------------------------------------------------------------------


def value(models: ModelHost, rollout: Rollout) -> Values | None:
    """Return values and bootstrap values of a shard's rollout, by the resident critic; None on ranks other than 0."""
    return models.values(rollout)
