"""What a node in the driver's window is doing, for people. Pure: no clock, no I/O, no Dask.

    waiting ──parents done──► ready ──a worker has it──► running ──committed──► done
       ▲                        └────────── its worker is lost ─────────┘
       └── also: handed out ahead of its parents

May import pipeline.graph.graph and the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from pipeline.graph.graph import STAGE_ROLES, Node

ROWS = ("publish", *(stage for stage in STAGE_ROLES if stage != "publish"))
"""Stages as a page has them from top to bottom: `publish` first, so that its edges to `generate` are short."""


class NodeState(StrEnum):
    WAITING = "waiting"
    """For parents."""
    READY = "ready"
    """Waits for nothing but a worker."""
    RUNNING = "running"
    """Handed to a worker, and all parents are done."""
    DONE = "done"
    """Has its commit."""


@dataclass(frozen=True)
class NodeStatus:
    """One node as dispatch has it now."""

    node: Node
    state: NodeState
    worker: tuple[str, int] | None = None
    """Handed to: gang, and rank 0 or replica."""
    losses: int = 0
    """How often it was lost with its worker."""


def node_state(done: bool, submitted: bool, parents_done: bool) -> NodeState:
    """The state that people are told. A node that was handed out ahead of its parents still waits for them."""
    if done:
        return NodeState.DONE
    if not parents_done:
        return NodeState.WAITING
    return NodeState.RUNNING if submitted else NodeState.READY
