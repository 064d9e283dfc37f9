"""Show people what every node and every gang is doing. Nothing is decided here. No clock, no I/O, no Dask.

`ObservedDispatch` is a dispatch that also records what it hands out, and tells people the state of nodes and gangs.

**Queues.** Workers do not report when a node begins. Dispatch knows enough to infer this: a worker runs as many nodes
as it has threads, begins the most urgent node that can run, and never interrupts a node.

    handed out ──its parents are done──► queued ──a thread is free, nothing queued is more urgent──► running ──► gone

**States** of a node in the driver's window:

    waiting ──parents done──► ready ──handed to a worker──► queued ──it begins──► running ──committed──► done
       ▲                        └─────────────── its worker is lost ───────────────┘
       └── also a node that was handed out ahead of its parents

**Waits.** What an idle gang waits for is found by following unfinished parents:

    idle gang ──► its most urgent node ──► unfinished parents ──► their parents ──► ... ──► nodes that run
                                           (for a queued node:                       └────► nodes that wait for a worker
                                           the nodes its worker runs first)
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import StrEnum

from pipeline.graph.dispatch import Dispatch, NodeEntry, State, Submit
from pipeline.graph.graph import STAGE_ROLES, Gang, GraphSpec, Mode, Node, step_nodes, step_of_node
from stages.models.protocol import Role
from storage.address import Address


class WorkerQueues:
    """Owns the queue of every worker. A worker of a pool is named by (gang, replica). An ordered gang, whose ranks act
    together (`Gang.is_ordered`), has one queue, named (gang, 0)."""

    def __init__(self) -> None:
        self._workers: dict[Address, tuple[str, int]] = {}
        """Node that is handed out -> its worker."""
        self._threads: dict[tuple[str, int], int] = {}
        self._unfinished: dict[Address, set[Address]] = {}
        """Node that was handed out ahead of its parents -> the parents that are not done."""
        self._children: defaultdict[Address, set[Address]] = defaultdict(set)
        """Parent that is not done -> the nodes that were handed out ahead of it."""
        self._queued: defaultdict[tuple[str, int], list[Node]] = defaultdict(list)
        """Worker -> heap of the nodes that are queued on it. A node that has left its worker stays in the heap until it
        reaches the top."""
        self._running: defaultdict[tuple[str, int], set[Address]] = defaultdict(set)
        self._nodes: dict[Address, Node] = {}
        self._beside: set[Address] = set()
        """Running nodes that only wait for rows on other replicas, in threads of their own. They do not count towards
        the worker's `threads`."""

    def hand_out(self, node: Node, worker: tuple[str, int], threads: int, unfinished: Iterable[Address]) -> None:
        """Record that a node was handed to a worker that runs `threads` nodes at once. `unfinished`: the node's parents
        that are not done."""
        address = node.address
        self._workers[address], self._nodes[address], self._threads[worker] = worker, node, threads
        parents = set(unfinished)
        if not parents:
            self._enter(node)
            return
        self._unfinished[address] = parents
        for parent in parents:
            self._children[parent].add(address)

    def remove_done(self, address: Address) -> None:
        """Record that a node has its commit. The node leaves its worker. Nodes that waited only for this node are now
        queued on their workers."""
        self.remove_lost(address)
        for child in self._children.pop(address, ()):
            left = self._unfinished.get(child)
            if left is not None and address in left:
                left.remove(address)
                if not left:
                    del self._unfinished[child]
                    self._enter(self._nodes[child])

    def remove_lost(self, address: Address) -> None:
        """Take a node off its worker's queue, because its attempt was lost or is over. The worker then begins its next
        queued nodes. Do nothing if the node is on no worker."""
        worker = self._workers.pop(address, None)
        if worker is None:
            return
        del self._nodes[address]
        self._unfinished.pop(address, None)
        self._beside.discard(address)
        self._running[worker].discard(address)
        self._begin(worker)

    def free_thread_of(self, address: Address) -> None:
        """Record that a running node from now on only waits for rows on other replicas, in a thread of its own."""
        worker = self._workers.get(address)
        if worker is not None and address in self._running[worker]:
            self._running[worker].remove(address)
            self._beside.add(address)
            self._begin(worker)

    def is_running(self, address: Address) -> bool:
        """Return True if the node's worker runs it."""
        worker = self._workers.get(address)
        return worker is not None and (address in self._running[worker] or address in self._beside)

    def nodes_before(self, address: Address) -> tuple[Address, ...]:
        """Return the nodes that a worker runs now while the node at `address` is queued there. Empty if this node is
        itself running, waits for parents, or is on no worker."""
        worker = self._workers.get(address)
        if worker is None or address in self._unfinished or self.is_running(address):
            return ()
        return tuple(sorted(self._running[worker]))

    def _enter(self, node: Node) -> None:
        worker = self._workers[node.address]
        heapq.heappush(self._queued[worker], node)
        self._begin(worker)

    def _begin(self, worker: tuple[str, int]) -> None:
        queued, running = self._queued[worker], self._running[worker]
        while queued and len(running) < self._threads[worker]:
            node = heapq.heappop(queued)
            if self._nodes.get(node.address) is node:
                running.add(node.address)


# ---- States --------------------------------------------------------------------------------------------------

STAGE_ORDER = ("publish", *(stage for stage in STAGE_ROLES if stage != "publish"))
"""Stages from top to bottom of a page. `publish` is first, so that its edges to `generate` are short."""


class NodeState(StrEnum):
    """State of a node, as people see it."""

    WAITING = "waiting"
    """The node waits for parents."""
    READY = "ready"
    """The node waits only for a worker."""
    QUEUED = "queued"
    """A worker has the node, and runs other nodes first."""
    RUNNING = "running"
    """A worker runs the node."""
    DONE = "done"
    """The node has its commit."""


@dataclass(frozen=True)
class NodeStatus:
    """The state of one node."""

    node: Node
    state: NodeState
    worker: tuple[str, int] | None = None
    """Gang and index of the replica that the node was handed to. The index is 0 in an ordered gang, whose ranks act
    together (`Gang.is_ordered`). None if the node is not handed out."""
    num_losses: int = 0
    """Number of times that the node was lost with its worker."""


def node_state(done: bool, submitted: bool, parents_done: bool, running: bool) -> NodeState:
    """Return the state of a node. A node that was handed out ahead of its parents still waits for them."""
    if done:
        return NodeState.DONE
    if not parents_done:
        return NodeState.WAITING
    if not submitted:
        return NodeState.READY
    return NodeState.RUNNING if running else NodeState.QUEUED


def add_finished_steps(
    spec: GraphSpec, statuses: Sequence[NodeStatus], admitted: int, num_finished: int, max_nodes: int
) -> list[NodeStatus]:
    """Return the statuses of all nodes of the open steps and of finished steps, parents before children.

    Args:
        statuses: every node of the open steps. All other steps below `admitted` are over. Some of them may lie between
            open steps, because an evaluation may keep its step open while later steps end.
        num_finished: number of finished steps to include before the oldest open step.
        max_nodes: maximum number of nodes to return. The oldest finished steps are left out first. Open steps are never
            left out, even if they have more nodes.
    """
    by_step: dict[int, list[NodeStatus]] = {}
    for status in statuses:
        by_step.setdefault(step_of_node(status.node), []).append(status)
    over = [
        step for step in range(max(0, min(by_step, default=admitted) - num_finished), admitted) if step not in by_step
    ]
    affordable = max(0, max_nodes - len(statuses)) // len(step_nodes(spec, 1))
    for step in over[max(0, len(over) - affordable) :]:
        by_step[step] = [NodeStatus(node, NodeState.DONE) for node in step_nodes(spec, step)]
    return [status for step in sorted(by_step) for status in by_step[step]]


# ---- Waits ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    """The reason why a gang is idle."""

    node: Address
    """Node that the gang would run next."""
    running_nodes: tuple[Address, ...]
    """Running nodes that `node` waits for, directly or through other nodes."""
    ready_nodes: tuple[Address, ...]
    """Nodes that hold `node` back, directly or through other nodes, and that themselves wait only for a worker. If
    `node` itself waits only for a worker, the tuple contains just `node`."""
    devices_of: str | None = None
    """Name of another gang, which now holds the devices that it shares with the idle gang. None if the idle gang may
    use its devices, or if no gang holds them yet."""

    def __str__(self) -> str:
        if self.devices_of is not None and self.ready_nodes == (self.node,):
            return f"{self.node} waits for the devices, which {self.devices_of} holds"
        blockers = [f"{address} (running)" for address in self.running_nodes]
        blockers += [f"{address} (waiting for a worker)" for address in self.ready_nodes]
        more = f" and {len(blockers) - 4} more" if blockers[4:] else ""
        return f"{self.node} waits for {', '.join(blockers[:4])}{more}"


def find_waits(
    unfinished: Mapping[Address, Node],
    running: Set[Address],
    nodes_before: Callable[[Address], Iterable[Address]],
    gang_of: Mapping[Role, str],
) -> dict[str, Wait]:
    """Return name of an idle gang -> what this gang waits for. A gang is idle if it has nodes left and runs none.

    Args:
        unfinished: every node that is not done. A parent that is missing here counts as done.
        running: addresses of the nodes that run.
        nodes_before: function that takes the address of a node. If the node is queued on a worker, the function returns
            the nodes that this worker runs now. Otherwise it returns none.
    """
    parents = {
        address: [p for p in node.parents if p in unfinished] or [*nodes_before(address)]
        for address, node in unfinished.items()
    }
    busy = {gang_of[unfinished[address].role] for address in running}
    first: dict[str, Node] = {}
    for node in unfinished.values():
        gang = gang_of[node.role]
        if gang not in busy and (gang not in first or node < first[gang]):
            first[gang] = node
    return {gang: _wait(node.address, parents, running) for gang, node in first.items()}


def _wait(node: Address, parents: Mapping[Address, list[Address]], running: Set[Address]) -> Wait:
    seen, stack = {node}, [node]
    ends: list[Address] = []
    while stack:
        address = stack.pop()
        if not parents[address]:
            ends.append(address)
        new = [parent for parent in parents[address] if parent not in seen]
        seen.update(new)
        stack += new
    return Wait(node, tuple(sorted(running & set(ends))), tuple(sorted(set(ends) - running)))


# ---- Dispatch, shown -----------------------------------------------------------------------------------------


class ObservedDispatch(Dispatch):
    """A dispatch that knows what runs, what is queued, and what idle gangs wait for."""

    def __init__(self, gangs: Iterable[Gang], device_sharing: Collection[Collection[str]] = ()) -> None:
        super().__init__(gangs, device_sharing)
        self._queues = WorkerQueues()

    def next_submits(self) -> list[Submit]:
        submits = super().next_submits()
        for one in submits:
            unfinished = [p for p in one.node.parents if not self.is_done(p)] if one.mode is Mode.FREE else ()
            threads = self._gangs[one.gang].gang.max_running_nodes
            self._queues.hand_out(one.node, (one.gang, one.replica), threads, unfinished)
        return submits

    def release_slot(self, address: Address) -> None:
        super().release_slot(address)
        self._queues.free_thread_of(address)

    def mark_done(self, address: Address) -> bool:
        self._queues.remove_done(address)
        return super().mark_done(address)

    def reset_lost(self, addresses: Iterable[Address]) -> list[Address]:
        reset = super().reset_lost(addresses)
        for address in reset:
            self._queues.remove_lost(address)
        return reset

    def statuses(self) -> list[NodeStatus]:
        """Return the status of every node in the window, in the order in which the nodes were admitted."""
        return [self._status(entry) for entry in self._entries.values()]

    def _status(self, entry: NodeEntry) -> NodeStatus:
        submit, parents_done = entry.submit, all(map(self.is_done, entry.node.parents))
        running = self._queues.is_running(entry.node.address)
        state = node_state(entry.state is State.DONE, entry.state is State.SUBMITTED, parents_done, running)
        return NodeStatus(
            entry.node, state, None if submit is None else (submit.gang, submit.replica), entry.times_lost
        )

    def find_waits(self) -> dict[str, Wait]:
        """Return name of an idle gang -> what this gang waits for. A gang is idle if it is up, has nodes left and runs
        none."""
        left = {address: entry.node for address, entry in self._entries.items() if entry.state is not State.DONE}
        running = {address for address in left if self._queues.is_running(address)}
        gang_of = {role: state.gang.name for role, state in self._gang_of.items()}
        waits = find_waits(left, running, self._queues.nodes_before, gang_of)
        up = {gang: wait for gang, wait in waits.items() if self.is_up(gang)}
        return {gang: replace(wait, devices_of=self._device_sharing.holder(gang)) for gang, wait in up.items()}
