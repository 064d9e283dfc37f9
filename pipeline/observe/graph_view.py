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

from pipeline.graph.gangs import Gang
from pipeline.graph.graph import GraphSpec
from pipeline.graph.status import ROWS, NodeState, NodeStatus, with_steps_over
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
    it. What serves a step that is not there (yet) stands in the last column."""
    state: NodeState
    gang: str
    version: int
    """Of the weights that it needs."""
    parents: tuple[Address, ...]
    worker: str | None = None
    since: float | None = None
    """RUNNING: when its worker began it, seconds since the epoch, as far as that is known (`NodeEvents.begun`)."""
    seconds: float | None = None
    """DONE: how long it took, where that is known."""
    losses: int = 0
    """How often it was lost with its worker."""


@dataclass(frozen=True)
class Doing:
    """A node that a worker is at."""

    address: Address
    since: float | None
    """Seconds since the epoch."""


@dataclass(frozen=True)
class GangView:
    """What a gang does, or what it waits for."""

    name: str
    roles: tuple[str, ...]
    workers: int
    up: bool
    doing: tuple[Doing, ...]
    """The longest first."""
    queued: int
    """Nodes that could run, behind those."""
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
    driven: bool
    """A driver is at work on the run."""
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


def work_text(gang: GangView, at: float, most: int) -> str:
    """What a gang does, `most` nodes by name, with the seconds until `at` that they have taken; empty where it does
    nothing."""
    said = [
        short(one.address) + ("" if one.since is None else f" ({max(0.0, at - one.since):.0f} s)")
        for one in gang.doing[:most]
    ]
    said += [f"and {len(gang.doing) - most} more"] if gang.doing[most:] else []
    said += [f"{gang.queued} queued"] if gang.queued else []
    return ", ".join(said)


def shown_steps(spec: GraphSpec, statuses: Sequence[NodeStatus], admitted: int) -> list[NodeStatus]:
    """Nodes of the window, whose steps end before `admitted`, and of the columns before it; parents before children. Of
    a run that is over: of its last. A column's evaluations are among the nodes of steps before it."""
    first = max(0, min((status.node.turn for status in statuses), default=admitted) - PAST_STEPS)
    nodes = with_steps_over(spec, statuses, admitted, PAST_STEPS + spec.staleness + 1, MOST_NODES)
    return [status for status in nodes if status.node.turn >= first or not first]


def node_views(
    statuses: Sequence[NodeStatus], gang_of: Mapping[Role, Gang], events: NodeEvents, admitted: int
) -> tuple[NodeView, ...]:
    """Cells of nodes, with what the journal said of them; `admitted`: the steps that there are by now."""
    return tuple(_node_view(status, gang_of[status.node.role], events, admitted - 1) for status in statuses)


def _node_view(status: NodeStatus, gang: Gang, events: NodeEvents, last: int) -> NodeView:
    node, address = status.node, status.node.address
    running, done = status.state is NodeState.RUNNING, status.state is NodeState.DONE
    out, ended = events.out.get(address) if running else None, events.ended.get(address) if done else None
    worker = out or ended
    return NodeView(
        address=address,
        turn=min(node.turn, last),
        state=status.state,
        gang=gang.name,
        version=node.version,
        parents=node.parents,
        worker=None if worker is None else worker.worker,
        since=events.begun(address, node.parents, gang.threads) if running else None,
        seconds=None if ended is None else ended.seconds,
        losses=status.losses,
    )


def gang_view(gang: Gang, up: bool, nodes: Iterable[NodeView], wait: Wait | None) -> GangView:
    """A gang, with its running nodes among those given."""
    own = [node for node in nodes if node.gang == gang.name]
    running = [Doing(node.address, node.since) for node in own if node.state is NodeState.RUNNING]
    doing = tuple(sorted(running, key=lambda one: one.since or 0.0))
    queued = sum(node.state is NodeState.QUEUED for node in own)
    text = None if doing or wait is None else wait_text(wait)
    return GangView(gang.name, tuple(sorted(r.value for r in gang.roles)), gang.workers, up, doing, queued, text)


def stages_of(nodes: Iterable[NodeView]) -> list[str]:
    """Rows of the page."""
    there = {node.address.stage for node in nodes}
    return [stage for stage in ROWS if stage in there]
