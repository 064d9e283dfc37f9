"""Stage `value`: the critic's value of the state before each sampled token, by its weights at the step's start."""

from __future__ import annotations

from stages.models.protocol import ModelHost
from storage.records import Rollout, Values


def value(models: ModelHost, rollout: Rollout) -> Values | None:
    """Values and bootstrap values of a shard's rollout, by the resident critic; None on ranks other than 0."""
    return models.values(rollout)
