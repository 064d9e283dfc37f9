"""The address of a stage's output, and the small reference to an output that travels along the graph's edges."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, order=True)
class Address:
    """The address of an output within a run: (stage, step, shard). For `publish`, and for the stages of evaluations and
    canaries, `step` is the version of the weights. Stages with one node per step have shard 0."""

    stage: str
    step: int
    shard: int = 0

    def __str__(self) -> str:
        return f"{self.stage}/step_{self.step:06d}/shard_{self.shard:04d}"


@dataclass(frozen=True)
class Ref:
    """A reference to a committed output. Nodes return it and edges carry it, instead of the data."""

    address: Address
    attempt: str
    """Name of the committed attempt."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Numbers that the stage measured, for the driver."""
    state: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON state that the stage hands to itself in the next step (for example the KL controller's)."""
    started: float = 0.0
    """Start of the work, in seconds since the epoch; `finished` is its end."""
    finished: float = 0.0
