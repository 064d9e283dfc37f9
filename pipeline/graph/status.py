"""What a node in the driver's window is doing, for people. Pure: no clock, no I/O, no Dask.

    waiting ──parents done──► ready ──a worker is handed it──► queued ──it begins──► running ──committed──► done
       ▲                        └─────────────── its worker is lost ──────────────────┘
       └── also: handed out ahead of its parents

May import pipeline.graph.graph and the standard library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from pipeline.graph.graph import STAGE_ROLES, GraphSpec, Node, step_nodes, step_of

ROWS = ("publish", *(stage for stage in STAGE_ROLES if stage != "publish"))
"""Stages as a page has them from top to bottom: `publish` first, so that its edges to `generate` are short."""


class NodeState(StrEnum):
    WAITING = "waiting"
    """For parents."""
    READY = "ready"
    """Waits for nothing but a worker."""
    QUEUED = "queued"
    """Handed to a worker, which runs others first."""
    RUNNING = "running"
    """Its worker is at it."""
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


def node_state(done: bool, submitted: bool, parents_done: bool, running: bool) -> NodeState:
    """The state that people are told. A node that was handed out ahead of its parents still waits for them."""
    if done:
        return NodeState.DONE
    if not parents_done:
        return NodeState.WAITING
    if not submitted:
        return NodeState.READY
    return NodeState.RUNNING if running else NodeState.QUEUED


def with_steps_over(
    spec: GraphSpec, statuses: Sequence[NodeStatus], admitted: int, past: int, most: int
) -> list[NodeStatus]:
    """All nodes of the steps below `admitted`, from `past` steps before the oldest that is open; parents before
    children. `statuses`: of the open steps, whole. The others are over, those between open ones too: an evaluation may
    hold its step open while later ones end. Where there would be more than `most` nodes, the latest of these alone."""
    by_step: dict[int, list[NodeStatus]] = {}
    for status in statuses:
        by_step.setdefault(step_of(status.node), []).append(status)
    over = [step for step in range(max(0, min(by_step, default=admitted) - past), admitted) if step not in by_step]
    affordable = max(0, most - len(statuses)) // len(step_nodes(spec, 1))
    for step in over[max(0, len(over) - affordable) :]:
        by_step[step] = [NodeStatus(node, NodeState.DONE) for node in step_nodes(spec, step)]
    return [status for step in sorted(by_step) for status in by_step[step]]
