"""Costs of nodes that a test chooses, for the simulator and the planner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.graph.graph import Node


@dataclass(frozen=True)
class FixedCosts:
    """Every node of a stage takes the same seconds; a stage that is not named takes none."""

    stages: Mapping[str, float]
    beside_s: float = 0.0
    """Seconds that each further shard on the same replica adds to a generation."""
    overhead_s: float = 0.0
    loading_s: float = 0.0

    def seconds(self, node: Node, lengths: Sequence[int], beside: float | None = None) -> float:
        shared = self.beside_s * ((beside or 1.0) - 1.0) if node.stage == "generate" else 0.0
        return self.stages.get(node.stage, 0.0) + shared

    def overhead(self, node: Node) -> float:
        return self.overhead_s

    def refit_s(self) -> float:
        return self.loading_s
