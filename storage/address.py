"""Where a stage's output lives, and the small reference to it that travels along the graph's edges.

May import the standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, order=True)
class Address:
    """The one address of an output within a run: (stage, step, shard). For `publish`, `canary` and `evaluate`, `step`
    is the version of the weights. Stages that have one node a step have shard 0."""

    stage: str
    step: int
    shard: int = 0

    def __str__(self) -> str:
        return f"{self.stage}/step_{self.step:06d}/shard_{self.shard:04d}"


@dataclass(frozen=True)
class Ref:
    """What a node returns and an edge carries: an address that has a commit record, and nothing large."""

    address: Address
    attempt: str
    """Name of the attempt whose output was committed."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Scalars the stage measured, for the driver."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON state handed to the same stage of the next step (the KL controller's)."""
    started: float = 0.0
    """When the work began; seconds since the epoch, as is `finished`."""
    finished: float = 0.0
