"""The graph of a run as its directory tells it: what is committed, what the journal saw last, what would be next.

    ledger ──► Flow, Dispatch (as `resume` would begin) ──► states of nodes, waits, readers ──┐
    journal ──► who was in the middle of what, seconds, notes ────────────────────────────────┴──► GraphView

May import this folder, pipeline.graph, stages.models.protocol.Role and storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.gangs import Gang
from pipeline.graph.graph import GraphSpec, Node, evaluated
from pipeline.graph.status import NodeState, NodeStatus
from pipeline.graph.waits import Wait, waits
from pipeline.observe.graph_view import (
    Facts,
    GangView,
    GraphView,
    NodeView,
    Point,
    VersionView,
    gang_view,
    node_views,
    shown_steps,
)
from pipeline.observe.journal import Event
from pipeline.observe.node_events import NodeEvents
from stages.models.protocol import Role
from storage.address import Address
from storage.ledger import Ledger

MOST_POINTS = 400
"""Of a curve; a longer run is shown at so many of its steps."""


def gang_views(
    gangs: Iterable[Gang],
    nodes: Collection[NodeView],
    waits: Mapping[str, Wait],
    is_up: Callable[[str], bool] = lambda name: True,
) -> tuple[GangView, ...]:
    """Every gang, with its nodes among those given; `waits` and `is_up` by a gang's name."""
    return tuple(gang_view(gang, is_up(gang.name), nodes, waits.get(gang.name)) for gang in gangs)


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
    """The run as it would be found by whoever resumes it, if no driver is at work on it; what was under way at the
    journal's end is RUNNING or QUEUED."""
    seen = NodeEvents(ordered(gangs))
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
    gang_of = role_gangs(gangs)
    statuses = _as_seen(dispatch.statuses(), gang_of, seen)
    nodes = node_views(shown_steps(spec, statuses, flow.admitted), gang_of, seen, flow.admitted)
    curves = Curves(spec, ledger)
    return GraphView(
        facts=facts,
        live=False,
        driven=False,
        finished=flow.finished,
        at=seen.last,
        steps_done=flow.steps_done,
        nodes=nodes,
        gangs=gang_views(gangs, nodes, _waits_as_seen(statuses, gang_of, seen)),
        versions=tuple(VersionView(v, None, readers) for v, readers in flow.readers.items() if v in published),
        points=curves.points(flow.steps_done),
        held_out=curves.held_out(flow.steps_done),
        notes=tuple(seen.notes),
    )


def _as_seen(statuses: Iterable[NodeStatus], gang_of: Mapping[Role, Gang], seen: NodeEvents) -> list[NodeStatus]:
    """With the nodes that workers had: each ran as many as it has threads, those first that it could begin first."""
    statuses = list(statuses)
    had: defaultdict[str, list[tuple[float, Node]]] = defaultdict(list)
    for status in statuses:
        node, out = status.node, seen.out.get(status.node.address)
        if out is not None and status.state is NodeState.READY:
            had[out.worker].append((seen.begun(node.address, node.parents, 1) or out.at, node))
    states: dict[Address, NodeState] = {}
    for nodes in had.values():
        for i, (_, node) in enumerate(sorted(nodes)):
            running = i < gang_of[node.role].threads
            states[node.address] = NodeState.RUNNING if running else NodeState.QUEUED
    return [replace(one, state=states.get(one.node.address, one.state)) for one in statuses]


def _waits_as_seen(statuses: Collection[NodeStatus], gang_of: Mapping[Role, Gang], seen: NodeEvents) -> dict[str, Wait]:
    """What idle gangs wait for, as `Dispatch.waits` has it of a run that goes on."""
    running: defaultdict[str, list[Address]] = defaultdict(list)
    worker_of: dict[Address, str] = {}
    for status in statuses:
        address = status.node.address
        if status.state is NodeState.RUNNING:
            running[seen.out[address].worker].append(address)
        elif status.state is NodeState.QUEUED:
            worker_of[address] = seen.out[address].worker
    return waits(
        {status.node.address: status.node for status in statuses if status.state is not NodeState.DONE},
        {address for addresses in running.values() for address in addresses},
        lambda address: running[worker_of[address]] if address in worker_of else (),
        {role: gang.name for role, gang in gang_of.items()},
    )


def role_gangs(gangs: Iterable[Gang]) -> dict[Role, Gang]:
    """The gang that has a role, by role."""
    return {role: gang for gang in gangs for role in gang.roles}


def ordered(gangs: Iterable[Gang]) -> frozenset[str]:
    """Names of the gangs whose workers act together, are lost together and come up together."""
    return frozenset(gang.name for gang in gangs if gang.ordered)
