"""Stage `reference`: log pi_ref of every sampled token, by the frozen start policy."""

from __future__ import annotations

from stages.models.protocol import ModelHost
from storage.records import ReferenceLogprobs, Rollout


def reference(models: ModelHost, rollout: Rollout) -> ReferenceLogprobs | None:
    """log pi_ref(token) of a shard's rollout; None on ranks other than 0. Needs no version: the reference is fixed."""
    return models.ref_logprobs(rollout)
