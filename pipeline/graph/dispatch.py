"""Decide what runs next: a state machine with events in and instructions out. No clock, no I/O, no Dask.

A node gets a worker in one of three ways:
- **ordered**: on a gang whose ranks act together. Nodes wait in order of priority once their parents are done. The
  driver numbers the nodes as it hands them out, and every rank executes them in the order of these numbers. A gang of
  several ranks gets one node at a time, and a gang of one rank gets two (`Gang.max_submitted_nodes`), which hides the
  round trips to driver and store. It gets only one if a child of the first node is more urgent than the second node.
- **slot**: on one replica of a pool, when the replica has a free slot. So a slow replica gets fewer shards than a fast
  replica. Dask's own placement would give both the same number.
- **free**: on the least loaded replica of a pool, as soon as the node's parents of the same step are submitted. So Dask
  runs this part of the graph by itself. The node does wait until parents of earlier steps are done, so that a chain of
  steps does not become one endless Dask graph.

A node that may use several versions of the weights is handed out with the newest readable one. If it is handed out
again, it gets the version that is newest then. Dispatch alone chooses versions; replicas do not.

A gang that shares its devices (`device_sharing`) gets nodes only while it holds the devices. It keeps the devices until
it has nothing submitted and nothing ready, and another gang has a ready node.

When a worker is lost, its unfinished nodes go back to waiting, and so do submitted nodes that depend on them. Finished
nodes stay finished, since their output is in the store.

`pipeline/graph/display.py` shows people what dispatch has decided.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pipeline.graph.device_sharing import DeviceSharing, Handover
from pipeline.graph.graph import STAGE_ROLES, Gang, Mode, Node
from storage.address import Address


class Submit(NamedTuple):
    """An instruction: run this node on that worker."""

    node: Node
    """The node, with the version of the weights to use."""
    gang: str
    mode: Mode
    attempt: int
    """Number of earlier attempts."""
    replica: int = 0
    """Index of the replica that runs the node. 0 in mode ORDERED, in which all ranks of a gang run it."""
    sequence: int | None = None
    """Number of an ORDERED node in the gang's order; None for SLOT and FREE nodes."""


class State(StrEnum):
    """State of a node. `NodeState` in display.py distinguishes more states."""

    WAITING = "waiting"
    SUBMITTED = "submitted"
    DONE = "done"


_WAITING, _SUBMITTED, _DONE = State
_ORDERED, _SLOT, _FREE = Mode
# Module-level names are looked up faster than members of an enum, and these are looked up for every node.


@dataclass(eq=False, slots=True)
class NodeEntry:
    """A node of an open step (see `flow.Flow`), with its state."""

    node: Node
    place: GangMode
    state: State = _WAITING
    attempts: int = 0
    times_lost: int = 0
    num_unfinished_parents: int = 0
    """Number of parents that the node still waits for."""
    submit: Submit | None = None
    holds_capacity: bool = False
    """True while the node occupies a slot, or counts in a gang's or a replica's load."""
    is_ready: bool = False
    """True while the node waits only for a worker."""
    in_heap: bool = False
    """True while this entry is in the heap of `place.ready`."""
    followers: list[NodeEntry] = field(default_factory=list)
    """Nodes in mode FREE (`Mode`) that depend on this node and belong to the same step. They may be submitted before
    this node is done, because Dask itself makes them wait for it."""
    children: list[NodeEntry] = field(default_factory=list)
    """All other admitted nodes that depend on this node. They wait until this node is done."""


@dataclass(eq=False)
class _GangState:
    gang: Gang
    is_up: bool = False
    next_sequence: int = 0
    submitted: set[NodeEntry] = field(default_factory=set)
    """Nodes of an ordered gang that are handed out and not finished."""
    free_slots: dict[int, int] = field(default_factory=dict)
    """Usable replica of a pool -> number of shards that it can still take."""
    loads: dict[int, int] = field(default_factory=dict)
    """Index of each usable replica of a pool -> number of nodes in mode FREE (`Mode`) that are submitted to this
    replica and not done."""
    without_slot: set[Address] = field(default_factory=set)
    """Nodes of a pool that are submitted, but have given up their slots. All their unfinished rows have migrated to
    other replicas, and the nodes only wait for these rows."""


@dataclass(frozen=True, eq=False)
class GangMode:
    """The gang that runs the nodes of a stage (`state`), and the way in which the gang takes them: ordered, slot or
    free (`mode`).
    """

    state: _GangState
    mode: Mode
    ready: ReadyNodes
    """The ready nodes of this gang and mode."""


class Dispatch:
    """Owns the state of every node of the open steps (see `flow.Flow`).

    Report each event to it, by a method of the section Events or by `on_handed_over`. After each event, carry out what
    `next_submits` and `next_handovers` return."""

    def __init__(self, gangs: Iterable[Gang], device_sharing: Collection[Collection[str]] = ()) -> None:
        """`device_sharing`: groups of gangs that share the same devices."""
        self._gangs = {gang.name: _GangState(gang) for gang in gangs}
        self._gang_of = {role: state for state in self._gangs.values() for role in state.gang.roles}
        self._entries: dict[Address, NodeEntry] = {}
        self._ready = {(name, mode): ReadyNodes() for name in self._gangs for mode in Mode}
        """(gang's name, mode) -> waiting nodes that no parent holds back. `next_submits` looks at nothing else."""
        self._places: dict[str, GangMode] = {}
        """Stage -> gang and mode in which its nodes run. Stages without a gang are missing."""
        for stage, role in STAGE_ROLES.items():
            if role in self._gang_of:
                state = self._gang_of[role]
                mode = state.gang.mode(role)
                self._places[stage] = GangMode(state, mode, self._ready[state.gang.name, mode])
        used = {id(place.ready): place for place in self._places.values()}
        self._used = [used[id(ready)] for ready in self._ready.values() if id(ready) in used]
        """One `GangMode` for each pair of gang and mode that some stage uses."""
        self._readable: set[int] = set()
        """Versions of the weights that can be read."""
        self._device_sharing = DeviceSharing(device_sharing)
        self._shares_devices = bool(device_sharing)

    @property
    def gangs(self) -> list[Gang]:
        return [state.gang for state in self._gangs.values()]

    # ---- Events --------------------------------------------------------------------------------------------------

    def admit(self, nodes: Iterable[Node], committed: Iterable[Address] = ()) -> None:
        """Add nodes, parents before children. Nodes that already have a commit are done at once. A parent that was
        never admitted belongs to an older, retired step and counts as done."""
        finished, entries = set(committed), self._entries
        for node in nodes:
            state = _DONE if finished and node.address in finished else _WAITING
            entry = entries[node.address] = NodeEntry(node, self._places[node.address.stage], state)
            is_free, step = entry.place.mode is _FREE, node.priority[0]
            for address in node.parents:
                parent = entries.get(address)
                if parent is None:
                    continue
                if is_free and parent.node.priority[0] == step:
                    parent.followers.append(entry)
                    entry.num_unfinished_parents += parent.state is _WAITING
                else:
                    parent.children.append(entry)
                    entry.num_unfinished_parents += parent.state is not _DONE
            if not entry.num_unfinished_parents:
                self._update_ready(entry)

    def on_published(self, version: int) -> None:
        """Record that a version of the weights is published."""
        self._readable.add(version)

    def forget_version(self, version: int) -> None:
        """Hand out no node with this version from now on."""
        self._readable.discard(version)

    def on_worker_up(self, gang: str, worker: int) -> None:
        """Record that a replica can take work. For an ordered gang, call this once, with rank 0, when
        all its ranks can take work."""
        state = self._gangs[gang]
        state.is_up = True
        if not state.gang.is_ordered:
            state.free_slots[worker] = state.gang.concurrent_shards
            state.loads[worker] = 0
        self._mark_all_changed()

    def on_worker_down(self, gang: str, worker: int) -> list[Address]:
        """Record that a replica, or any rank of an ordered gang, is lost or overdue. The replica or gang gets no nodes
        until `on_worker_up`. Reset its nodes and the submitted nodes that depend on them. Return all nodes that were
        reset; the caller must release their futures."""
        state = self._gangs[gang]
        if state.gang.is_ordered:
            state.is_up = False
            return self.reset_lost(sorted(entry.node.address for entry in state.submitted))
        state.free_slots.pop(worker, None)
        state.loads.pop(worker, None)
        state.is_up = bool(state.free_slots)
        return self.reset_lost([a for a, e in self._entries.items() if self._runs_on(e, gang, worker)])

    def can_run_without(self, gang: str, worker: int) -> bool:
        """Return True if a pool has another usable replica than `worker`, so that `worker` need not be restarted at
        once. Return False if the gang shares its devices, since another gang may wait for them."""
        return not self._device_sharing.shares_devices(gang) and any(
            replica != worker for replica in self._gangs[gang].free_slots
        )

    def release_slot(self, address: Address) -> None:
        """Free the slot of a submitted node that from now on only waits for rows on other replicas. Its attempt
        continues."""
        entry = self._entries.get(address)
        if entry is not None and entry.state is _SUBMITTED:
            self._release_capacity(entry)
            entry.place.state.without_slot.add(address)

    def mark_done(self, address: Address) -> bool:
        """Record that a node has its commit. Return False if it was done already (the second of two attempts)."""
        entry = self._entries[address]
        if entry.state is _DONE:
            return False
        self._release_capacity(entry)
        entry.place.ready.changed = True  # a node that is done without an attempt may have held another one back
        self._set_state(entry, _DONE)
        return True

    def reset_lost(self, addresses: Iterable[Address]) -> list[Address]:
        """Reset nodes whose attempts will not finish, and the submitted nodes that depend on them. Return all nodes
        that were reset. A loss is counted for the nodes in `addresses`, and not for the nodes that depend on them."""
        reset: list[Address] = []
        stack = [self._entries[address] for address in addresses]
        for entry in stack:
            entry.times_lost += entry.state is _SUBMITTED
        while stack:
            entry = stack.pop()
            if entry.state is not _SUBMITTED:
                continue
            self._release_capacity(entry)
            entry.submit = None
            self._set_state(entry, _WAITING)
            reset.append(entry.node.address)
            stack += [*entry.followers, *entry.children]
        return reset

    def retire(self, addresses: Iterable[Address]) -> None:
        """Forget the nodes of a step. All must be done, and no other node may wait for them."""
        for address in addresses:
            state = self._entries.pop(address).state
            assert state is _DONE, f"{address} is retired before it is done"

    # ---- Instructions and queries --------------------------------------------------------------------------------

    def next_submits(self) -> list[Submit]:
        """Return everything that can be handed out now, and mark it as submitted. For each gang and mode, the most
        urgent ready nodes are chosen. Looks only at gangs and modes in which something has changed since the last call:
        a node became ready, or capacity was released."""
        submits: list[Submit] = []
        if self._shares_devices:
            self._device_sharing.assign_free_devices(self._first_ready)
        progress = True
        while progress:  # a node that was handed out may let FREE nodes follow
            progress = False
            for place in self._used:
                if not place.ready.changed:
                    continue
                place.ready.changed = False
                while self._has_capacity(place.state, place.mode) and (entry := place.ready.first()) is not None:
                    if place.mode is _ORDERED and self._would_delay_child(entry.node, place.state):
                        break
                    submits.append(self._hand_out(entry))
                    progress = True
        return submits

    def next_handovers(self) -> list[Handover]:
        """Return the device handovers that begin now. Until `on_handed_over`, no gang that shares these devices gets a
        node."""
        return self._device_sharing.next_handovers(self._is_busy, self._first_ready)

    def on_handed_over(self, giver: str) -> None:
        """Record that all workers of the gang `giver` have freed the devices. This ends a handover that
        `next_handovers` returned."""
        self._device_sharing.on_handed_over(giver)
        self._mark_all_changed()

    def replicas_up(self, gang: str) -> frozenset[int]:
        """Return the usable replicas of a pool."""
        return frozenset(self._gangs[gang].free_slots)

    def versions_waiting_for_slot(self, gang: str) -> Counter[int]:
        """Return version of the weights -> number of nodes that need it and wait only for a free slot in the pool
        `gang`. Rows of such a version should stay on their replicas, since these nodes will add more rows of the
        version. Canary nodes are not counted, because they add only a few rows."""
        waiting = self._ready[gang, _SLOT].nodes()
        return Counter(self._version_to_use(node) for node in waiting if node.stage != "canary")

    def is_up(self, gang: str) -> bool:
        """Return True if a gang, or any replica of a pool, takes work."""
        return self._gangs[gang].is_up

    def is_idle(self, gang: str) -> bool:
        """Return True if a gang is up and nothing is handed out to it."""
        return self._gangs[gang].is_up and not self._is_busy(gang)

    def busy_replicas(self, gang: str) -> frozenset[int]:
        """Return the usable replicas of a pool that work on at least one node in mode SLOT (`Mode`). Empty for an
        ordered gang (`Gang.is_ordered`), which has no replicas."""
        state = self._gangs[gang]
        return frozenset(replica for replica, free in state.free_slots.items() if free < state.gang.concurrent_shards)

    def worker_of(self, address: Address) -> tuple[str, int] | None:
        """Return the gang and the replica that a node is handed out to. None if the node is not handed out, or if it is
        done."""
        entry = self._entries.get(address)
        submit = entry.submit if entry is not None and entry.state is _SUBMITTED else None
        return None if submit is None else (submit.gang, submit.replica)

    def times_lost(self, address: Address) -> int:
        """Return how often a node was lost with its worker."""
        return self._entries[address].times_lost

    def is_done(self, address: Address) -> bool:
        """Return True if a node is done. Nodes of finished steps are no longer stored here, and count as done."""
        return address not in self._entries or self._entries[address].state is _DONE

    # ---- Internals -----------------------------------------------------------------------------------------------

    @staticmethod
    def _runs_on(entry: NodeEntry, gang: str, replica: int) -> bool:
        submit = entry.submit if entry.state is _SUBMITTED else None
        return submit is not None and (submit.gang, submit.replica) == (gang, replica)

    def _set_state(self, entry: NodeEntry, state: State) -> None:
        """Change the state of a node, which may release its children or hold them back."""
        before, entry.state = entry.state, state
        if state is _WAITING:
            self._update_ready(entry)
        else:
            entry.is_ready = False
        if entry.followers and (before is _WAITING) != (state is _WAITING):
            self._add_unfinished_parents(entry.followers, 1 if state is _WAITING else -1)
        if state is _DONE and entry.children:
            self._add_unfinished_parents(entry.children, -1)

    def _add_unfinished_parents(self, children: Iterable[NodeEntry], change: int) -> None:
        """Add `change` to the number of unfinished parents of each node in `children`. Also update whether each of
        these nodes is ready."""
        for child in children:
            before = child.num_unfinished_parents
            child.num_unfinished_parents += change
            if not before or not child.num_unfinished_parents:
                self._update_ready(child)

    def _mark_all_changed(self) -> None:
        """Let `next_submits` look at every gang and mode."""
        for place in self._used:
            place.ready.changed = True

    @staticmethod
    def _update_ready(entry: NodeEntry) -> None:
        """Add a node to the ready nodes if it waits only for a worker. Else mark it as not ready."""
        is_ready = entry.state is _WAITING and not entry.num_unfinished_parents
        if is_ready and not entry.is_ready:
            entry.place.ready.add(entry)
        entry.is_ready = is_ready

    def _is_busy(self, gang: str) -> bool:
        """Return True if a gang has nodes, or rows of nodes that have released their slots."""
        state = self._gangs[gang]
        return bool(state.submitted or state.without_slot or self.busy_replicas(gang) or any(state.loads.values()))

    def _first_ready(self, gang: str) -> Node | None:
        """Return the most urgent of a gang's nodes that wait only for a worker, or None if there are no such nodes."""
        ready = (self._ready[gang, mode].first() for mode in Mode)
        return min((entry.node for entry in ready if entry is not None), default=None)

    def _has_capacity(self, state: _GangState, mode: Mode) -> bool:
        if not state.is_up or (self._shares_devices and not self._device_sharing.may_use_devices(state.gang.name)):
            return False
        if mode is _ORDERED:
            return len(state.submitted) < state.gang.max_submitted_nodes
        return mode is _FREE or any(state.free_slots.values())

    def _would_delay_child(self, node: Node, state: _GangState) -> bool:
        """Return True if `node` would run before a more urgent node of its gang that waits only for nodes that the gang
        already has: the critic's update, say, before the policy's publication, for which the next generation waits."""
        for parent in state.submitted:
            for entry in parent.children:
                if entry.state is not _WAITING or entry.place.state is not state:
                    continue
                parents = map(self._entries.get, entry.node.parents)  # None if it is retired
                if entry.node < node and all(p is None or p.state is _DONE or p in state.submitted for p in parents):
                    return True
        return False

    def _hand_out(self, entry: NodeEntry) -> Submit:
        """Hand out a node to its gang, which has capacity for it."""
        node, state, mode = entry.node, entry.place.state, entry.place.mode
        replica, sequence = 0, None
        if mode is _ORDERED:
            sequence = state.next_sequence
            state.next_sequence += 1
            state.submitted.add(entry)
        elif mode is _SLOT:
            replica = _first_with(max(state.free_slots.values()), state.free_slots)
            state.free_slots[replica] -= 1
        else:
            replica = _first_with(min(state.loads.values()), state.loads)
            state.loads[replica] += 1
        if node.newest_version is not None:
            node = node._replace(version=self._version_to_use(node))
        entry.submit = Submit(node, state.gang.name, mode, entry.attempts, replica, sequence)
        entry.attempts += 1
        entry.holds_capacity = True
        self._set_state(entry, _SUBMITTED)
        return entry.submit

    def _version_to_use(self, node: Node) -> int:
        """Return the version of the weights that a node would use if it were handed out now. If it may use several
        versions, the result is the newest of them that can be read."""
        if node.newest_version is None:
            return node.version
        allowed = [version for version in self._readable if node.version <= version <= node.newest_version]
        assert allowed, f"{node.address} may start, and none of its versions can be read"
        return max(allowed)

    def _release_capacity(self, entry: NodeEntry) -> None:
        submit = entry.submit
        if submit is None:
            return
        state = entry.place.state
        if state.without_slot:
            state.without_slot.discard(entry.node.address)
        if not entry.holds_capacity:
            return
        entry.holds_capacity = False
        entry.place.ready.changed = True
        if submit.mode is _ORDERED:
            state.submitted.discard(entry)
        elif submit.mode is _SLOT and submit.replica in state.free_slots:
            state.free_slots[submit.replica] += 1
        elif submit.mode is _FREE and submit.replica in state.loads:
            state.loads[submit.replica] -= 1


def _first_with(number: int, numbers: Mapping[int, int]) -> int:
    """Return the first replica that has this number. `numbers`: replica -> its number."""
    return min([replica for replica, own in numbers.items() if own == number])


class ReadyNodes:
    """Owns the nodes of one gang and mode that wait only for capacity, the most urgent first. A node that is no longer
    ready stays in the heap until it reaches the top."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str, int, int, NodeEntry]] = []
        """Tuples with a node's sort key, followed by the node's entry. Python compares them faster than nodes."""
        self.changed = False
        """True if, since the last look of `Dispatch.next_submits`, a node was added, capacity may have become free, or
        a child that holds other nodes back may be done."""

    def add(self, entry: NodeEntry) -> None:
        """Add a node that became ready."""
        self.changed = True
        if not entry.in_heap:
            entry.in_heap = True
            address = entry.node.address
            heapq.heappush(self._heap, (*entry.node.priority, address.stage, address.step, address.shard, entry))

    def nodes(self) -> Iterator[Node]:
        """Yield the ready nodes, in no order."""
        return (entry.node for *_, entry in self._heap if entry.is_ready)

    def first(self) -> NodeEntry | None:
        """Return the entry of the most urgent ready node, or None."""
        while self._heap and not self._heap[0][-1].is_ready:
            heapq.heappop(self._heap)[-1].in_heap = False
        return self._heap[0][-1] if self._heap else None
