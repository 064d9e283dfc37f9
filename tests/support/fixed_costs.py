"""Costs of nodes that a test chooses, for the simulator and the planner."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pipeline.graph.graph import Node
from pipeline.plan.decode import RowQueue


@dataclass(frozen=True)
class FixedCosts:
    """Every node of a stage takes the same seconds; a stage that is not named takes none."""

    stages: Mapping[str, float]
    overhead_s: float = 0.0
    loading_s: float = 0.0
    behind: Mapping[str, float] = field(default_factory=dict)
    """Stage -> last seconds of a node, in which its worker computes the next node."""

    def seconds(self, node: Node) -> float:
        return self.stages.get(node.stage, 0.0)

    def engine_queue(self) -> RowQueue[Any] | None:
        return None

    def after_rows_s(self, *, beside: bool) -> float:
        return 0.0

    def overhead(self, node: Node) -> float:
        return self.overhead_s

    def writeback_s(self, gang: str, stage: str) -> float:
        return self.behind.get(stage, 0.0)

    def refit_s(self) -> float:
        return self.loading_s
