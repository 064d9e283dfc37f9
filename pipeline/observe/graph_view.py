"""The state of a run's graph at one moment, as the frozen record `GraphView`. The page `/stageline` shows the record.
Nothing here reads a clock.

A running driver makes the record from its own state:

    Dispatch ──states of nodes, reasons why gangs are idle──┐
    Flow ──nodes that still have to read each version───────┼──► GraphView ──► graph_page (HTML)
    journal ──NodeEvents────────────────────────────────────┘

Without a driver, `recorded_view` makes the record from the ledger and the journal of the run. It first builds `Flow`
and `ObservedDispatch` in the state from which `resume` would continue:

    ledger ──► Flow, ObservedDispatch ──► states, idle reasons, nodes still to read ──┐
    journal ──► nodes in progress, durations, incidents ──────────────────────────────┴──► GraphView
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.graph.display import (
    STAGE_ORDER,
    NodeState,
    NodeStatus,
    ObservedDispatch,
    Wait,
    add_finished_steps,
    find_waits,
)
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Gang, GraphSpec, Node, is_evaluated
from pipeline.observe.curves import MAX_POINTS, HeldOutPoint, RunCurves, round_or_none
from pipeline.observe.history import EVALUATION_METRIC, STEP_METRIC
from pipeline.observe.incidents import Incident, WorkerLosses
from pipeline.observe.journal import Event
from pipeline.observe.node_events import NodeEvents
from stages.models.protocol import Role
from storage.address import Address
from storage.ledger import Ledger

MAX_FINISHED_STEPS = 6
"""Maximum number of finished steps that are shown."""
MAX_NODES = 4000
"""Maximum number of nodes on a page. If there are more, finished steps are left out, the oldest first. The open steps
are always shown, even if they alone have more nodes."""


@dataclass(frozen=True)
class NodeView:
    """One node of the graph as the page `/stageline` shows it, in a grid with one column per PPO step and one row per
    stage."""

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
    start_s: float | None = None
    """Start time of a RUNNING node, seconds since the epoch, if known (`NodeEvents.earliest_start`)."""
    seconds: float | None = None
    """Duration of a DONE node, if known."""
    num_losses: int = 0
    """Number of times that the node was lost with its worker."""


@dataclass(frozen=True)
class RunningNode:
    """A node that a worker is running."""

    address: Address
    start_s: float | None
    """Start time, seconds since the epoch. None if it is not known."""


@dataclass(frozen=True)
class GangView:
    """The current work of a gang, or the reason why it waits."""

    name: str
    roles: tuple[str, ...]
    workers: int
    is_up: bool
    running_nodes: tuple[RunningNode, ...]
    """Running nodes. Nodes of unknown start time come first, then the node that has run longest."""
    num_queued: int
    """Number of nodes that are queued at busy workers."""
    wait_reason: str | None
    """A text about the nodes or devices that the gang waits for. None if the gang is busy, is not up, or has no nodes
    left."""


@dataclass(frozen=True)
class VersionView:
    """A published version of the weights. A live view lists the versions that are in memory. A recorded view lists the
    versions that some node still has to read."""

    version: int
    num_bytes: int | None
    """Size of the weights. None in a recorded view."""
    readers: tuple[Address, ...]
    """Nodes that still have to read this version."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run that are not in its graph."""

    name: str
    steps: int
    staleness: int
    links: tuple[tuple[str, str], ...] = ()
    """Pairs (label, web address or shell command). The page shows web addresses as links and commands as text."""
    logs: tuple[str, ...] = ()
    """Names of the workers' log files."""


@dataclass(frozen=True)
class GraphView:
    """The state of a run at one moment."""

    facts: RunFacts
    is_live: bool
    """True if the driver made this record, False if it was read from the run's directory."""
    is_driven: bool
    """True if a driver is running."""
    is_finished: bool
    time_s: float
    """Time of this state, seconds since the epoch: the current time in a live view, else the time of the latest
    event."""
    steps_done: int
    nodes: tuple[NodeView, ...]
    """Nodes of the open steps and of up to `MAX_FINISHED_STEPS` finished steps, parents first."""
    gangs: tuple[GangView, ...]
    versions: tuple[VersionView, ...]
    curves: RunCurves
    """Curves of the reward and of the KL to the reference."""
    incidents: tuple[Incident, ...]
    """The latest incidents, in order of time."""

    @property
    def staleness_edges(self) -> tuple[tuple[Address, Address], ...]:
        """Pairs (publish, generate) of shown nodes. The staleness bound makes the generation wait for the
        publication."""
        shown = {node.address for node in self.nodes}
        return tuple(
            (parent, node.address)
            for node in self.nodes
            if node.address.stage == "generate"
            for parent in node.parents
            if parent.stage == "publish" and parent in shown
        )


def short_address(address: Address) -> str:
    """Return an address as `generate 7.1`: stage, step (or version) and shard."""
    return f"{address.stage} {address.step}.{address.shard}"


def wait_text(wait: Wait) -> str:
    """Return a short text that says what an idle gang waits for."""
    if wait.node in wait.ready_nodes and wait.devices_of is not None:
        return f"{short_address(wait.node)} waits for {wait.devices_of}'s turn to end"
    if wait.node in wait.ready_nodes:
        return f"{short_address(wait.node)} waits for a worker"
    blockers = [f"{short_address(address)} (running)" for address in wait.running_nodes]
    blockers += [f"{short_address(address)} (waits for a worker)" for address in wait.ready_nodes]
    more = f" and {len(blockers) - 3} more" if blockers[3:] else ""
    return f"{short_address(wait.node)} waits for {', '.join(blockers[:3])}{more}"


def work_text(gang: GangView, now_s: float, max_named: int) -> str:
    """Return a text about the nodes of a gang: the running nodes with their durations, and the number of queued nodes.
    The text is empty if the gang has no such nodes.

    Args:
        gang: the gang.
        now_s: the time up to which durations are counted, seconds since the epoch.
        max_named: maximum number of nodes that are named."""
    parts = [
        short_address(one.address) + ("" if one.start_s is None else f" ({max(0.0, now_s - one.start_s):.0f} s)")
        for one in gang.running_nodes[:max_named]
    ]
    parts += [f"and {len(gang.running_nodes) - max_named} more"] if gang.running_nodes[max_named:] else []
    parts += [f"{gang.num_queued} queued"] if gang.num_queued else []
    return ", ".join(parts)


def nodes_to_show(spec: GraphSpec, statuses: Sequence[NodeStatus], admitted: int) -> list[NodeStatus]:
    """Return the nodes that the page shows, parents first: the nodes of the open steps, and all nodes in up to
    `MAX_FINISHED_STEPS` columns before them. The page has one column per PPO step. If all steps are finished, only the
    last columns are shown.

    The column of a node may differ from the step in its address. For example, the address of an evaluation contains the
    number of an earlier step. So steps before the first shown column are searched too.

    Args:
        spec: the shape of the graph.
        statuses: the status of each node of the open steps.
        admitted: number of steps that the run has admitted so far, finished ones included.
    """
    first = max(0, min((status.node.scheduled_step for status in statuses), default=admitted) - MAX_FINISHED_STEPS)
    nodes = add_finished_steps(spec, statuses, admitted, MAX_FINISHED_STEPS + spec.staleness + 1, MAX_NODES)
    return [status for status in nodes if status.node.scheduled_step >= first or not first]


def node_views(
    statuses: Sequence[NodeStatus], gang_of: Mapping[Role, Gang], events: NodeEvents, admitted: int
) -> tuple[NodeView, ...]:
    """Return a view of each node. Times and workers come from `events`, which has applied all events of the journal.
    `admitted`: number of steps that are admitted so far."""
    return tuple(_node_view(status, gang_of[status.node.role], events, admitted - 1) for status in statuses)


def _node_view(status: NodeStatus, gang: Gang, events: NodeEvents, last: int) -> NodeView:
    node, address = status.node, status.node.address
    running, done = status.state is NodeState.RUNNING, status.state is NodeState.DONE
    out, ended = events.submitted.get(address) if running else None, events.finished.get(address) if done else None
    worker = out or ended
    return NodeView(
        address=address,
        scheduled_step=min(node.scheduled_step, last),
        state=status.state,
        gang=gang.name,
        version=node.version,
        parents=node.parents,
        worker=None if worker is None else worker.worker,
        start_s=events.earliest_start(address, node.parents, gang.max_running_nodes) if running else None,
        seconds=None if ended is None else ended.seconds,
        num_losses=status.num_losses,
    )


def gang_view(gang: Gang, up: bool, nodes: Iterable[NodeView], wait: Wait | None) -> GangView:
    """Return the view of a gang. Its running and queued nodes are selected from `nodes`."""
    own = [node for node in nodes if node.gang == gang.name]
    running = [RunningNode(node.address, node.start_s) for node in own if node.state is NodeState.RUNNING]
    doing = tuple(sorted(running, key=lambda one: one.start_s or 0.0))
    queued = sum(node.state is NodeState.QUEUED for node in own)
    text = None if doing or wait is None else wait_text(wait)
    return GangView(gang.name, tuple(sorted(r.value for r in gang.roles)), gang.workers, up, doing, queued, text)


def stages_in_order(nodes: Iterable[NodeView]) -> list[str]:
    """Return the stages of these nodes, in the order of the page's rows."""
    present = {node.address.stage for node in nodes}
    return [stage for stage in STAGE_ORDER if stage in present]


# ---- view of a run's directory ---------------------------------------------------------------------------


def gang_views(
    gangs: Iterable[Gang],
    nodes: Collection[NodeView],
    waits: Mapping[str, Wait],
    is_up: Callable[[str], bool] = lambda name: True,
) -> tuple[GangView, ...]:
    """Return the view of every gang.

    Args:
        gangs: the gangs.
        nodes: the nodes of all gangs.
        waits: name of an idle gang -> what the gang waits for.
        is_up: a function that returns True if the gang of that name is up."""
    return tuple(gang_view(gang, is_up(gang.name), nodes, waits.get(gang.name)) for gang in gangs)


@dataclass
class CurveCache:
    """A cache of the reward and the KL of each step, and of the held-out score of each version. Cached numbers are not
    read from the ledger again."""

    spec: GraphSpec
    ledger: Ledger
    _metrics: dict[int, Mapping[str, float]] = field(default_factory=dict)
    """Step -> metrics of the stage `advantage`."""
    _held_out: dict[int, float] = field(default_factory=dict)
    """Version of the weights -> mean score of the held-out prompts."""

    def read_curves(self, steps_done: int, max_reads: int = MAX_POINTS) -> RunCurves:
        """Return the curves of the steps before `steps_done`. If there are more than `MAX_POINTS` of them, evenly
        spaced steps are chosen, which include the last one.

        At most `max_reads` steps are read from the ledger, the newest first. Steps in the cache are not read again, and
        do not count towards `max_reads`."""
        stride = max(1, -(-steps_done // MAX_POINTS))
        wanted = range((steps_done - 1) % stride, steps_done, stride)
        self._metrics = {step: metrics for step, metrics in self._metrics.items() if step in wanted}
        for step in [step for step in reversed(wanted) if step not in self._metrics][:max_reads]:
            commit = self.ledger.find(Address("advantage", step))
            if commit is not None and STEP_METRIC in commit.metrics:
                self._metrics[step] = commit.metrics
        steps = sorted(self._metrics)
        metrics = {
            name: [round_or_none(self._metrics[step].get(name)) for step in steps] for name in (STEP_METRIC, "kl/ref")
        }
        held_out = [
            HeldOutPoint(version, round_or_none(mean), None) for version, mean in self._held_out_means(steps_done)
        ]
        return RunCurves(steps, steps_done, metrics if steps else {}, {EVALUATION_METRIC: held_out} if held_out else {})

    def _held_out_means(self, newest: int) -> list[tuple[int, float]]:
        """Return (version, mean score) of each version up to `newest`. Versions are left out if some of their held-out
        responses have no score yet."""
        for version in range(newest + 1):
            if is_evaluated(self.spec, version) and version not in self._held_out:
                shards = [Address("evaluate_score", version, s) for s in range(self.spec.eval_shards)]
                commits = [self.ledger.find(address) for address in shards]
                scores = [c.metrics["score/mean"] for c in commits if c is not None and "score/mean" in c.metrics]
                if len(scores) == len(shards):
                    self._held_out[version] = sum(scores) / len(scores)
        return sorted(self._held_out.items())


def recorded_view(
    facts: RunFacts, spec: GraphSpec, gangs: Collection[Gang], ledger: Ledger, events: Iterable[Event]
) -> GraphView:
    """Return the state of a run, derived from its ledger and its journal. It is the state from which `resume` would
    continue. But nodes that were in progress at the end of the journal are shown as RUNNING or QUEUED. The view says
    that no driver is running (`is_driven`). The caller changes this if there is a driver."""
    seen = NodeEvents(WorkerLosses(ordered_gang_names(gangs)))
    for event in events:
        seen.apply_event(event)
    dispatch = ObservedDispatch(gangs)
    for gang in gangs:
        dispatch.on_worker_up(gang.name, 0)
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
    gang_of = gangs_by_role(gangs)
    statuses = _with_recorded_states(dispatch.statuses(), gang_of, seen)
    nodes = node_views(nodes_to_show(spec, statuses, flow.num_admitted_steps), gang_of, seen, flow.num_admitted_steps)
    return GraphView(
        facts=facts,
        is_live=False,
        is_driven=False,
        is_finished=flow.is_finished,
        time_s=seen.latest_event_s,
        steps_done=flow.num_trained_steps,
        nodes=nodes,
        gangs=gang_views(gangs, nodes, _recorded_waits(statuses, gang_of, seen)),
        versions=tuple(
            VersionView(v, None, readers) for v, readers in flow.readers_by_version.items() if v in published
        ),
        curves=CurveCache(spec, ledger).read_curves(flow.num_trained_steps),
        incidents=tuple(seen.incidents),
    )


def _with_recorded_states(
    statuses: Iterable[NodeStatus], gang_of: Mapping[Role, Gang], events: NodeEvents
) -> list[NodeStatus]:
    """Return the statuses. READY nodes that were handed to a worker become RUNNING or QUEUED. The journal does not say
    which: of a worker's nodes, as many as run at once are taken to be running, in the order in which they could
    start."""
    statuses = list(statuses)
    had: defaultdict[str, list[tuple[float, Node]]] = defaultdict(list)
    for status in statuses:
        node, out = status.node, events.submitted.get(status.node.address)
        if out is not None and status.state is NodeState.READY:
            had[out.worker].append((events.earliest_start(node.address, node.parents, 1) or out.submitted_at, node))
    states: dict[Address, NodeState] = {}
    for nodes in had.values():
        for i, (_, node) in enumerate(sorted(nodes)):
            running = i < gang_of[node.role].max_running_nodes
            states[node.address] = NodeState.RUNNING if running else NodeState.QUEUED
    return [replace(one, state=states.get(one.node.address, one.state)) for one in statuses]


def _recorded_waits(
    statuses: Collection[NodeStatus], gang_of: Mapping[Role, Gang], events: NodeEvents
) -> dict[str, Wait]:
    """Return a dictionary: name of an idle gang -> what the gang waits for. The waits are derived from the recorded
    states. (In a live run, `ObservedDispatch.find_waits` finds the waits.)"""
    running: defaultdict[str, list[Address]] = defaultdict(list)
    worker_of: dict[Address, str] = {}
    for status in statuses:
        address = status.node.address
        if status.state is NodeState.RUNNING:
            running[events.submitted[address].worker].append(address)
        elif status.state is NodeState.QUEUED:
            worker_of[address] = events.submitted[address].worker
    return find_waits(
        {status.node.address: status.node for status in statuses if status.state is not NodeState.DONE},
        {address for addresses in running.values() for address in addresses},
        lambda address: running[worker_of[address]] if address in worker_of else (),
        {role: gang.name for role, gang in gang_of.items()},
    )


def gangs_by_role(gangs: Iterable[Gang]) -> dict[Role, Gang]:
    """Return a dictionary: role -> the gang that has this role."""
    return {role: gang for gang in gangs for role in gang.roles}


def ordered_gang_names(gangs: Iterable[Gang]) -> frozenset[str]:
    """Return the names of the gangs whose workers are ranks. The ranks of a gang run every node together. If one rank
    is lost, all ranks of the gang are rebuilt."""
    return frozenset(gang.name for gang in gangs if gang.is_ordered)
