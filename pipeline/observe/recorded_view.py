"""The graph of a run as its directory tells it: what is committed, what the journal saw last, what would be next.

    ledger ──► Flow, Dispatch (as `resume` would begin) ──► states of nodes, waits, readers ──┐
    journal ──► who was in the middle of what, seconds, notes ────────────────────────────────┴──► GraphView

May import this folder, pipeline.graph, stages.models.protocol.Role and storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.gangs import Gang
from pipeline.graph.graph import GraphSpec, evaluated
from pipeline.graph.status import NodeState, NodeStatus
from pipeline.observe.graph_view import (
    Facts,
    GangView,
    GraphView,
    NodeView,
    Point,
    VersionView,
    gang_view,
    node_views,
    past_steps,
)
from pipeline.observe.journal import Event
from pipeline.observe.node_events import NodeEvents
from stages.models.protocol import Role
from storage.address import Address
from storage.ledger import Ledger

MOST_POINTS = 400
"""Of a curve; a longer run is shown at so many of its steps."""


def gang_views(
    gangs: Iterable[Gang], dispatch: Dispatch, nodes: Collection[NodeView], up: bool | None = None
) -> tuple[GangView, ...]:
    """Every gang as dispatch has it. `up`: None where dispatch is to say."""
    waits = dispatch.waits()
    return tuple(
        gang_view(
            gang.name,
            gang.roles,
            gang.workers,
            dispatch.is_up(gang.name) if up is None else up,
            nodes,
            waits.get(gang.name),
        )
        for gang in gangs
    )


@dataclass
class Curves:
    """Owns what was read of the ledger for the curves: a commit is read once."""

    spec: GraphSpec
    ledger: Ledger
    _points: dict[int, Point] = field(default_factory=dict)
    _held_out: dict[int, float] = field(default_factory=dict)

    def points(self, steps_done: int, most_reads: int = MOST_POINTS) -> tuple[Point, ...]:
        """Of the steps before `steps_done`, evenly chosen where they are many; `most_reads` are new."""
        stride = max(1, -(-steps_done // MOST_POINTS))
        wanted = range((steps_done - 1) % stride, steps_done, stride)
        self._points = {step: point for step, point in self._points.items() if step in wanted}
        for step in [step for step in reversed(wanted) if step not in self._points][:most_reads]:
            commit = self.ledger.find(Address("advantage", step))
            if commit is not None and "reward/mean" in commit.metrics:
                metrics = commit.metrics
                self._points[step] = Point(step, metrics["reward/mean"], metrics.get("kl/ref", float("nan")))
        return tuple(self._points[step] for step in sorted(self._points))

    def held_out(self, newest: int) -> tuple[tuple[int, float], ...]:
        """Mean score of the versions to `newest` that are evaluated, as far as all their shards are scored."""
        for version in range(newest + 1):
            if evaluated(self.spec, version) and version not in self._held_out:
                shards = [Address("evaluate_score", version, s) for s in range(self.spec.eval_shards)]
                found = [self.ledger.find(address) for address in shards]
                scores = [c.metrics["score/mean"] for c in found if c is not None and "score/mean" in c.metrics]
                if len(scores) == len(shards):
                    self._held_out[version] = sum(scores) / len(scores)
        return tuple(sorted(self._held_out.items()))


def recorded_view(
    facts: Facts, spec: GraphSpec, gangs: Collection[Gang], ledger: Ledger, events: Iterable[Event]
) -> GraphView:
    """The run as it would be found by whoever resumes it; what was under way when its driver ended is RUNNING."""
    seen = NodeEvents()
    for event in events:
        seen.take(event)
    dispatch = Dispatch(gangs)
    for gang in gangs:
        dispatch.worker_up(gang.name, 0)
    committed = set(ledger.open_addresses())
    published = {address.step for address in committed if address.stage == "publish"}
    flow = Flow(
        spec,
        dispatch,
        first_step=ledger.closed_until(),
        committed=committed,
        published=published,
        on_step=lambda step, nodes: None,
        on_unread=lambda version: None,
    )
    flow.advance()
    statuses = [_as_seen(status, seen) for status in dispatch.statuses()]
    nodes = node_views([*past_steps(spec, statuses, flow.finished), *statuses], role_gangs(gangs), seen)
    curves = Curves(spec, ledger)
    return GraphView(
        facts=facts,
        live=False,
        finished=flow.finished,
        at=seen.last,
        steps_done=flow.steps_done,
        nodes=nodes,
        gangs=gang_views(gangs, dispatch, nodes),
        versions=tuple(VersionView(v, None, readers) for v, readers in flow.readers.items() if v in published),
        points=curves.points(flow.steps_done),
        held_out=curves.held_out(flow.steps_done),
        notes=tuple(seen.notes),
    )


def _as_seen(status: NodeStatus, seen: NodeEvents) -> NodeStatus:
    begun = status.node.address in seen.begun and status.state is NodeState.READY
    return replace(status, state=NodeState.RUNNING) if begun else status


def role_gangs(gangs: Iterable[Gang]) -> dict[Role, str]:
    """Name of the gang that has a role, by role."""
    return {role: gang.name for gang in gangs for role in gang.roles}
