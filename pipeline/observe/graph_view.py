"""The graph of a run at one moment, as a frozen record: what the page `/stageline` shows, live or of a run that has
ended. Pure functions; nothing here reads a clock or a file.

    dispatch ──statuses, waits──┐
    flow ──readers──────────────┼──► graph_view ──► GraphView ──► graph_page (HTML)
    journal ──NodeEvents────────┘

May import this folder, pipeline.graph, stages.models.protocol.Role and storage.address.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from pipeline.graph.graph import GraphSpec, step_nodes
from pipeline.graph.status import ROWS, NodeState, NodeStatus
from pipeline.graph.waits import Wait
from pipeline.observe.node_events import NodeEvents, Note
from stages.models.protocol import Role
from storage.address import Address

PAST_STEPS = 6
"""Steps that are over and still shown."""
MOST_NODES = 4000
"""Of a page; where a step has more than a few hundred, fewer steps that are over are shown."""


@dataclass(frozen=True)
class NodeView:
    """One cell's node."""

    address: Address
    turn: int
    """The step whose progress it serves, the column: `publish` of version v stands in that of step v - 1, which made
    it."""
    state: NodeState
    gang: str
    version: int
    """Of the weights that it needs."""
    parents: tuple[Address, ...]
    worker: str | None = None
    since: float | None = None
    """RUNNING: when it was handed to its worker, seconds since the epoch."""
    seconds: float | None = None
    """DONE: how long it took, where that is known."""
    losses: int = 0
    """How often it was lost with its worker."""


@dataclass(frozen=True)
class GangView:
    """What a gang does, or what it waits for."""

    name: str
    roles: tuple[str, ...]
    workers: int
    up: bool
    doing: tuple[Address, ...]
    wait: str | None
    """Of an idle gang that has nodes left."""


@dataclass(frozen=True)
class VersionView:
    """Published weights that are in memory."""

    version: int
    num_bytes: int | None
    readers: tuple[Address, ...]
    """Nodes that have still to read them."""


@dataclass(frozen=True)
class Point:
    """What a step's rows came to."""

    step: int
    reward: float
    kl: float
    """To the reference, nats a response."""


@dataclass(frozen=True)
class Facts:
    """What of a run is not in its graph."""

    name: str
    steps: int
    staleness: int
    links: tuple[tuple[str, str], ...] = ()
    """(label, address or command)."""
    logs: tuple[str, ...] = ()
    """Names of the workers' log files."""


@dataclass(frozen=True)
class GraphView:
    """A run at one moment."""

    facts: Facts
    live: bool
    """Told by the driver; else read from the run's directory."""
    finished: bool
    at: float
    """When, in seconds since the epoch: now (live), or the latest event."""
    steps_done: int
    nodes: tuple[NodeView, ...]
    """Of the steps in the window and of some before, parents before children."""
    gangs: tuple[GangView, ...]
    versions: tuple[VersionView, ...]
    points: tuple[Point, ...]
    held_out: tuple[tuple[int, float], ...]
    """(version, mean score of the held-out prompts)."""
    notes: tuple[Note, ...]
    """The latest last."""

    @property
    def staleness_edges(self) -> tuple[tuple[Address, Address], ...]:
        """(publication, generation that waits for it) among the nodes shown: the bound of the run."""
        shown = {node.address for node in self.nodes}
        return tuple(
            (parent, node.address)
            for node in self.nodes
            if node.address.stage == "generate"
            for parent in node.parents
            if parent.stage == "publish" and parent in shown
        )


def short(address: Address) -> str:
    """`generate 7.1`: stage, step (or version) and shard."""
    return f"{address.stage} {address.step}.{address.shard}"


def wait_text(wait: Wait) -> str:
    """Why a gang has nothing to do, in short words."""
    if wait.node in wait.ready and wait.devices_of is not None:
        return f"{short(wait.node)} waits for {wait.devices_of}'s turn to end"
    if wait.node in wait.ready:
        return f"{short(wait.node)} waits for a worker"
    behind = [f"{short(address)} (running)" for address in wait.running]
    behind += [f"{short(address)} (waits for a worker)" for address in wait.ready]
    more = f" and {len(behind) - 3} more" if behind[3:] else ""
    return f"{short(wait.node)} waits for {', '.join(behind[:3])}{more}"


def first_open_step(statuses: Iterable[NodeStatus]) -> int:
    """The oldest step that is not over."""
    return max(0, min((status.node.turn for status in statuses), default=0))


def past_steps(spec: GraphSpec, statuses: Sequence[NodeStatus], finished: bool) -> list[NodeStatus]:
    """Nodes of the steps before the window, all done; parents before children. Of a run that is over: of its last."""
    end = spec.steps if finished or not statuses else first_open_step(statuses)
    per_step = max(1, len(step_nodes(spec, 1)))
    most = max(0, MOST_NODES - len(statuses)) // per_step
    steps = range(max(0, end - min(PAST_STEPS, most)), end)
    return [NodeStatus(node, NodeState.DONE) for step in steps for node in step_nodes(spec, step)]


def node_views(statuses: Iterable[NodeStatus], gang_of: Mapping[Role, str], events: NodeEvents) -> tuple[NodeView, ...]:
    """Cells of nodes, with what the journal said of them."""
    return tuple(_node_view(status, gang_of[status.node.role], events) for status in statuses)


def _node_view(status: NodeStatus, gang: str, events: NodeEvents) -> NodeView:
    node, address = status.node, status.node.address
    begun = events.begun.get(address) if status.state is NodeState.RUNNING else None
    worker = begun.worker if begun is not None else events.workers.get(address)
    return NodeView(
        address=address,
        turn=node.turn,
        state=status.state,
        gang=gang,
        version=node.version,
        parents=node.parents,
        worker=worker if status.state in (NodeState.RUNNING, NodeState.DONE) else None,
        since=None if begun is None else begun.since,
        seconds=events.seconds.get(address) if status.state is NodeState.DONE else None,
        losses=status.losses,
    )


def gang_view(
    name: str, roles: Iterable[Role], workers: int, up: bool, nodes: Iterable[NodeView], wait: Wait | None
) -> GangView:
    """A gang, with its running nodes among those given."""
    doing = tuple(node.address for node in nodes if node.gang == name and node.state is NodeState.RUNNING)
    text = None if doing or wait is None else wait_text(wait)
    return GangView(name, tuple(sorted(role.value for role in roles)), workers, up, doing, text)


def stages_of(nodes: Iterable[NodeView]) -> list[str]:
    """Rows of the page."""
    there = {node.address.stage for node in nodes}
    return [stage for stage in ROWS if stage in there]
