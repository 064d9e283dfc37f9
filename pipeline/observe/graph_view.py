"""The state of a run's graph at one moment, as a frozen record for the page `/stageline`. No clock and no files.

A running driver makes the record from its own state:

    dispatch ──statuses, waits──┐
    flow ──readers──────────────┼──► GraphView ──► graph_page (HTML)
    journal ──NodeEvents────────┘

Without a driver, `recorded_view` makes the record from the run's directory:

    ledger ──► Flow, ObservedDispatch (as `resume` would start them) ──► states of nodes, waits, readers ──┐
    journal ──► nodes in progress, seconds, notes ─────────────────────────────────────────────────┴──► GraphView
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.graph.display import ROWS, NodeState, NodeStatus, ObservedDispatch, Wait, waits, with_steps_over
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Gang, GraphSpec, Node, evaluated
from pipeline.observe.curves import MOST_POINTS, HeldOutPoint, RunCurves, number
from pipeline.observe.history import EVALUATION_METRIC, STEP_METRIC
from pipeline.observe.incidents import Incident, WorkerLosses
from pipeline.observe.journal import Event
from pipeline.observe.node_events import NodeEvents
from stages.models.protocol import Role
from storage.address import Address
from storage.ledger import Ledger

PAST_STEPS = 6
"""Number of finished steps that are shown."""
MOST_NODES = 4000
"""Maximum number of nodes on a page. If a step has more than a few hundred nodes, fewer than `PAST_STEPS` finished
steps are shown."""


@dataclass(frozen=True)
class NodeView:
    """One node of the grid."""

    address: Address
    scheduled_step: int
    """The step in whose column the node is shown. `publish` of version v is shown in the column of step v - 1, which
    made the version. A node of a step that is not admitted yet is shown in the last column."""
    state: NodeState
    gang: str
    version: int
    """Version of the weights that the node needs."""
    parents: tuple[Address, ...]
    worker: str | None = None
    since: float | None = None
    """Start time of a RUNNING node, seconds since the epoch, if known (`NodeEvents.begun`)."""
    seconds: float | None = None
    """Duration of a DONE node, if known."""
    losses: int = 0
    """Number of times that the node was lost with its worker."""


@dataclass(frozen=True)
class Doing:
    """A node that a worker is running."""

    address: Address
    since: float | None
    """Start time, seconds since the epoch."""


@dataclass(frozen=True)
class GangView:
    """The current work of a gang, or the reason why it waits."""

    name: str
    roles: tuple[str, ...]
    workers: int
    up: bool
    doing: tuple[Doing, ...]
    """Running nodes. The node that has run longest is first."""
    queued: int
    """Number of nodes that are queued at busy workers."""
    wait: str | None
    """The event or device that the gang waits for. None if the gang is busy or has no nodes left."""


@dataclass(frozen=True)
class VersionView:
    """A published version of the weights. A live view has every version in memory. A recorded view has every version
    that is still to be read."""

    version: int
    num_bytes: int | None
    readers: tuple[Address, ...]
    """Nodes that still have to read this version."""


@dataclass(frozen=True)
class Facts:
    """Facts about a run that are not in its graph."""

    name: str
    steps: int
    staleness: int
    links: tuple[tuple[str, str], ...] = ()
    """Pairs of a label and an address or command."""
    logs: tuple[str, ...] = ()
    """Names of the workers' log files."""


@dataclass(frozen=True)
class GraphView:
    """The state of a run at one moment."""

    facts: Facts
    live: bool
    """True if the driver made this record, False if it was read from the run's directory."""
    driven: bool
    """True if a driver is running."""
    finished: bool
    at: float
    """Time of this state, seconds since the epoch: the current time in a live view, else the time of the latest
    event."""
    steps_done: int
    nodes: tuple[NodeView, ...]
    """Nodes of the open steps and of up to `PAST_STEPS` finished steps, parents first."""
    gangs: tuple[GangView, ...]
    versions: tuple[VersionView, ...]
    curves: RunCurves
    """Curves of the reward and of the KL to the reference."""
    incidents: tuple[Incident, ...]
    """The latest incidents, in order of time."""

    @property
    def staleness_edges(self) -> tuple[tuple[Address, Address], ...]:
        """Pairs (publish, generate) of shown nodes, in which the staleness bound makes the generation wait for the
        publication."""
        shown = {node.address for node in self.nodes}
        return tuple(
            (parent, node.address)
            for node in self.nodes
            if node.address.stage == "generate"
            for parent in node.parents
            if parent.stage == "publish" and parent in shown
        )


def short(address: Address) -> str:
    """Return an address as `generate 7.1`: stage, step (or version) and shard."""
    return f"{address.stage} {address.step}.{address.shard}"


def wait_text(wait: Wait) -> str:
    """Return a short text that says what an idle gang waits for."""
    if wait.node in wait.ready and wait.devices_of is not None:
        return f"{short(wait.node)} waits for {wait.devices_of}'s turn to end"
    if wait.node in wait.ready:
        return f"{short(wait.node)} waits for a worker"
    blockers = [f"{short(address)} (running)" for address in wait.running]
    blockers += [f"{short(address)} (waits for a worker)" for address in wait.ready]
    more = f" and {len(blockers) - 3} more" if blockers[3:] else ""
    return f"{short(wait.node)} waits for {', '.join(blockers[:3])}{more}"


def work_text(gang: GangView, at: float, most: int) -> str:
    """Return a text about the nodes of a gang: the running nodes with their durations, and the number of queued nodes.
    Empty if the gang has neither.

    Args:
        gang: the gang.
        at: the time up to which durations are counted, seconds since the epoch.
        most: maximum number of nodes that are named."""
    said = [
        short(one.address) + ("" if one.since is None else f" ({max(0.0, at - one.since):.0f} s)")
        for one in gang.doing[:most]
    ]
    said += [f"and {len(gang.doing) - most} more"] if gang.doing[most:] else []
    said += [f"{gang.queued} queued"] if gang.queued else []
    return ", ".join(said)


def shown_steps(spec: GraphSpec, statuses: Sequence[NodeStatus], admitted: int) -> list[NodeStatus]:
    """Return the nodes to show: those of the open steps, and of up to `PAST_STEPS` columns before them. Parents come
    first.

    For a finished run these are the last columns. Earlier steps are searched too, because some nodes of a column, such
    as evaluations, have the number of an earlier step in their address. `admitted` is the number of admitted steps."""
    first = max(0, min((status.node.scheduled_step for status in statuses), default=admitted) - PAST_STEPS)
    nodes = with_steps_over(spec, statuses, admitted, PAST_STEPS + spec.staleness + 1, MOST_NODES)
    return [status for status in nodes if status.node.scheduled_step >= first or not first]


def node_views(
    statuses: Sequence[NodeStatus], gang_of: Mapping[Role, Gang], events: NodeEvents, admitted: int
) -> tuple[NodeView, ...]:
    """Return a view of each node. Times and workers are taken from the journal's `events`. `admitted` is the number of
    steps that are admitted so far."""
    return tuple(_node_view(status, gang_of[status.node.role], events, admitted - 1) for status in statuses)


def _node_view(status: NodeStatus, gang: Gang, events: NodeEvents, last: int) -> NodeView:
    node, address = status.node, status.node.address
    running, done = status.state is NodeState.RUNNING, status.state is NodeState.DONE
    out, ended = events.out.get(address) if running else None, events.ended.get(address) if done else None
    worker = out or ended
    return NodeView(
        address=address,
        scheduled_step=min(node.scheduled_step, last),
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
    """Return the view of a gang. Its running and queued nodes are selected from `nodes`."""
    own = [node for node in nodes if node.gang == gang.name]
    running = [Doing(node.address, node.since) for node in own if node.state is NodeState.RUNNING]
    doing = tuple(sorted(running, key=lambda one: one.since or 0.0))
    queued = sum(node.state is NodeState.QUEUED for node in own)
    text = None if doing or wait is None else wait_text(wait)
    return GangView(gang.name, tuple(sorted(r.value for r in gang.roles)), gang.workers, up, doing, queued, text)


def stages_of(nodes: Iterable[NodeView]) -> list[str]:
    """Return the stages of these nodes, in the order of the page's rows."""
    there = {node.address.stage for node in nodes}
    return [stage for stage in ROWS if stage in there]


# ---- view of a run's directory ---------------------------------------------------------------------------


def gang_views(
    gangs: Iterable[Gang],
    nodes: Collection[NodeView],
    waits: Mapping[str, Wait],
    is_up: Callable[[str], bool] = lambda name: True,
) -> tuple[GangView, ...]:
    """Return the view of every gang. `waits` maps the name of a gang to its wait, and `is_up` returns True if the gang
    of that name is up."""
    return tuple(gang_view(gang, is_up(gang.name), nodes, waits.get(gang.name)) for gang in gangs)


@dataclass
class CurveCache:
    """A cache of the reward and the KL of each step, so that each commit is read only once."""

    spec: GraphSpec
    ledger: Ledger
    _metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Metrics of the stage `advantage`, by step."""
    _held_out: dict[int, float] = field(default_factory=dict)
    """Mean score, by version of the weights."""

    def curves(self, steps_done: int, most_reads: int = MOST_POINTS) -> RunCurves:
        """Return the curves of the steps before `steps_done`. If there are many steps, evenly spaced ones are chosen.

        At most `most_reads` steps are read from the ledger, the newest first. Steps in the cache need not be read."""
        stride = max(1, -(-steps_done // MOST_POINTS))
        wanted = range((steps_done - 1) % stride, steps_done, stride)
        self._metrics = {step: metrics for step, metrics in self._metrics.items() if step in wanted}
        for step in [step for step in reversed(wanted) if step not in self._metrics][:most_reads]:
            commit = self.ledger.find(Address("advantage", step))
            if commit is not None and STEP_METRIC in commit.metrics:
                self._metrics[step] = commit.metrics
        steps = sorted(self._metrics)
        metrics = {name: [number(self._metrics[step].get(name)) for step in steps] for name in (STEP_METRIC, "kl/ref")}
        held_out = [HeldOutPoint(version, number(mean), None) for version, mean in self._evaluated(steps_done)]
        return RunCurves(steps, steps_done, metrics if steps else {}, {EVALUATION_METRIC: held_out} if held_out else {})

    def _evaluated(self, newest: int) -> list[tuple[int, float]]:
        """Return (version, mean score) of the versions up to `newest` whose evaluation is completely scored."""
        for version in range(newest + 1):
            if evaluated(self.spec, version) and version not in self._held_out:
                shards = [Address("evaluate_score", version, s) for s in range(self.spec.eval_shards)]
                found = [self.ledger.find(address) for address in shards]
                scores = [c.metrics["score/mean"] for c in found if c is not None and "score/mean" in c.metrics]
                if len(scores) == len(shards):
                    self._held_out[version] = sum(scores) / len(scores)
        return sorted(self._held_out.items())


def recorded_view(
    facts: Facts, spec: GraphSpec, gangs: Collection[Gang], ledger: Ledger, events: Iterable[Event]
) -> GraphView:
    """Return the state of a run that no driver is running. It is the state from which `resume` would continue. Nodes
    that were in progress at the end of the journal are shown as RUNNING or QUEUED."""
    seen = NodeEvents(WorkerLosses(ordered(gangs)))
    for event in events:
        seen.take(event)
    dispatch = ObservedDispatch(gangs)
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
        curves=CurveCache(spec, ledger).curves(flow.steps_done),
        incidents=tuple(seen.incidents),
    )


def _as_seen(statuses: Iterable[NodeStatus], gang_of: Mapping[Role, Gang], seen: NodeEvents) -> list[NodeStatus]:
    """Return the statuses after replacing the state of each node that was handed to a worker by RUNNING or QUEUED.

    The journal does not say which of a worker's nodes were running. At most as many as the worker has threads can run
    at once. The nodes that could start first are taken to be the running ones."""
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
    """Return the wait of each idle gang, by the gang's name. The waits are derived from the recorded states, while
    `Dispatch.waits` returns them for a live run."""
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
    """Return the gang of each role."""
    return {role: gang for gang in gangs for role in gang.roles}


def ordered(gangs: Iterable[Gang]) -> frozenset[str]:
    """Return the names of the gangs whose workers are ranks. They run every node together, and if one is lost, all are
    rebuilt."""
    return frozenset(gang.name for gang in gangs if gang.ordered)
