"""Decides what runs next: events in, instructions out, no clock, no I/O, no Dask.

Three ways for a node to get a worker:
- **ordered**: on a gang whose ranks act together. Nodes whose parents are done queue by priority; the driver numbers
  them as it hands them out and every rank executes them in that order. With several ranks one is out at a time: two
  could reach the ranks in different orders (each waits for its own inputs), and collectives would interleave. A single
  rank has two, which hides the round trip, unless the first lets a more urgent node follow than the second is.
- **slot**: on one replica of a pool, when a slot there is free (a replica eight times slower gets fewer shards, which
  Dask's own placement would not do).
- **free**: on the least loaded replica of a pool, as soon as its parents of the same turn are submitted: Dask's own
  graph, run ahead. It waits for parents of earlier turns, so that a chain of steps is not one endless Dask graph.

A node that several versions of the weights would serve is handed out with the newest that can be read at that moment,
and with what is newest then if it is handed out again: one owner says so, and no replica has to find out.

Gangs that have their devices in turn (`turns`) are handed nodes in their turn only; the gang that has it keeps it until
it has nothing out and nothing ready.

Losing a worker resets its unfinished nodes, and whatever was already submitted on top of them, to waiting; finished
nodes stay finished, since their output is in the store.

May import pipeline.graph.{gangs, graph, queues, ready, status, turns, waits}, storage.address and the standard library.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from pipeline.graph.gangs import Gang, Mode
from pipeline.graph.graph import Node
from pipeline.graph.queues import WorkerQueues
from pipeline.graph.ready import ReadyNodes
from pipeline.graph.status import NodeStatus, node_state
from pipeline.graph.turns import Pass, Turns
from pipeline.graph.waits import Wait, waits
from storage.address import Address


@dataclass(frozen=True)
class Submit:
    """An instruction: run this node there."""

    node: Node
    """With the version that it is to use."""
    gang: str
    mode: Mode
    attempt: int
    """0 the first time."""
    replica: int = 0
    """SLOT, FREE: which."""
    sequence: int | None = None
    """ORDERED: the node's number in the gang's order."""


class _State(StrEnum):
    WAITING = "waiting"
    SUBMITTED = "submitted"
    DONE = "done"


@dataclass
class _Entry:
    node: Node
    state: _State = _State.WAITING
    attempts: int = 0
    losses: int = 0
    blockers: int = 0
    """Parents that do not let it go yet."""
    submit: Submit | None = None
    holds_capacity: bool = False
    """Whether it takes up a slot (or counts in a gang, or in a load)."""


@dataclass
class _GangState:
    gang: Gang
    up: bool = False
    sequence: int = 0
    out: set[Address] = field(default_factory=set)
    """ORDERED: handed out and not finished."""
    slots: dict[int, int] = field(default_factory=dict)
    """Pools: free slots by usable replica."""
    loads: dict[int, int] = field(default_factory=dict)
    """Pools: FREE nodes out, by usable replica."""
    waiting: set[Address] = field(default_factory=set)
    """Pools: handed out, and do nothing any more but wait for what other replicas make for them."""


class Dispatch:
    """Owns the state of every node in the driver's window.

    Feed it `admit`, `worker_up`, `worker_down`, `done`, `lost`, `passed`; after each, carry out what `next_submits` and
    `next_passes` return."""

    def __init__(self, gangs: Iterable[Gang], turns: Collection[Collection[str]] = ()) -> None:
        """`turns`: groups of gangs that have the same devices in turn."""
        self._gangs = {gang.name: _GangState(gang) for gang in gangs}
        self._gang_of = {role: state for state in self._gangs.values() for role in state.gang.roles}
        self._entries: dict[Address, _Entry] = {}
        self._children: dict[Address, list[Address]] = {}
        self._ready = {(name, mode): ReadyNodes() for name in self._gangs for mode in Mode}
        """Waiting nodes whose parents let them go, by gang and mode: all that `next_submits` has to look at."""
        self._readable: set[int] = set()
        """Versions of the weights."""
        self._turns = Turns(turns)
        self._queues = WorkerQueues()

    # ---- what happened -------------------------------------------------------------------------------------------

    def admit(self, nodes: Iterable[Node], committed: Iterable[Address] = ()) -> None:
        """Adds nodes, parents before children; those that already have a commit are done at once. A parent that was
        never admitted (an older, retired step) counts as done."""
        finished = set(committed)
        for node in nodes:
            entry = _Entry(node, _State.DONE if node.address in finished else _State.WAITING)
            self._entries[node.address] = entry
            for address in node.parents:
                parent = self._entries.get(address)
                if parent is not None:
                    self._children.setdefault(address, []).append(node.address)
                    entry.blockers += not self._lets_go(parent, parent.state, node)
            self._look_at(entry)

    def can_read(self, version: int) -> None:
        """A version of the weights is published."""
        self._readable.add(version)

    def cannot_read(self, version: int) -> None:
        """No node is to be given this version any more."""
        self._readable.discard(version)

    def worker_up(self, gang: str, worker: int) -> None:
        """A replica can take work; for an ordered gang: all ranks can (call once, with rank 0)."""
        state = self._gangs[gang]
        state.up = True
        if not state.gang.ordered:
            state.slots[worker] = state.gang.slots
            state.loads[worker] = 0

    def worker_down(self, gang: str, worker: int) -> list[Address]:
        """A replica (of an ordered gang: any rank) is lost, or overdue: it gets no more nodes until `worker_up`. Resets
        the nodes it had, and returns all that were reset, whose futures must be released."""
        state = self._gangs[gang]
        if state.gang.ordered:
            state.up = False
            return self.lost(sorted(state.out))
        state.slots.pop(worker, None)
        state.loads.pop(worker, None)
        state.up = bool(state.slots)
        return self.lost([a for a, e in self._entries.items() if self._on(e, gang, worker)])

    def can_spare(self, gang: str, worker: int) -> bool:
        """Whether a pool has another usable replica, so that this one may stay where it is for a while; not where
        another gang is to have its devices."""
        return not self._turns.shares(gang) and any(replica != worker for replica in self._gangs[gang].slots)

    def release_slot(self, address: Address) -> None:
        """A node that is out does nothing any more but wait: its slot is free, though its attempt goes on."""
        entry = self._entries.get(address)
        if entry is not None and entry.state is _State.SUBMITTED:
            self._release_capacity(entry)
            self._gang_of[entry.node.role].waiting.add(address)
            self._queues.step_aside(address)

    def done(self, address: Address) -> bool:
        """A node has its commit. False if it already was done (the second of two attempts)."""
        entry = self._entries[address]
        if entry.state is _State.DONE:
            return False
        self._release_capacity(entry)
        self._queues.done(address)
        self._set(entry, _State.DONE)
        return True

    def lost(self, addresses: Iterable[Address]) -> list[Address]:
        """The attempts of these nodes will not finish: they, and submitted nodes that hang on them, wait again. Returns
        all that were reset. Only the nodes named count a loss."""
        reset: list[Address] = []
        stack = list(addresses)
        for address in stack:
            self._entries[address].losses += self._entries[address].state is _State.SUBMITTED
        while stack:
            entry = self._entries[stack.pop()]
            if entry.state is not _State.SUBMITTED:
                continue
            self._release_capacity(entry)
            entry.submit = None
            self._queues.lost(entry.node.address)
            self._set(entry, _State.WAITING)
            reset.append(entry.node.address)
            stack += [c for c in self._children.get(entry.node.address, ()) if c in self._entries]
        return reset

    def retire(self, addresses: Iterable[Address]) -> None:
        """Forgets done nodes (a step that nothing waits for any more)."""
        for address in addresses:
            assert self._entries[address].state is _State.DONE, f"{address} is retired before it is done"
            del self._entries[address]
            self._children.pop(address, None)

    # ---- what to do ----------------------------------------------------------------------------------------------

    def next_submits(self) -> list[Submit]:
        """Everything that can be handed out now, most urgent first; each is marked as submitted."""
        submits: list[Submit] = []
        self._turns.take_free(self._first_ready)
        progress = True
        while progress:  # a node that was handed out may let FREE nodes follow
            progress = False
            for (gang, mode), ready in self._ready.items():
                state = self._gangs[gang]
                while (node := ready.first()) is not None and self._has_capacity(state, mode):
                    if mode is Mode.ORDERED and self._comes_after_a_child(node, state):
                        break
                    submits.append(self._hand_out(node))
                    progress = True
        return submits

    def next_passes(self) -> list[Pass]:
        """Turns on devices that end now: until `passed`, none of the gangs that share them gets a node."""
        return self._turns.next_passes(self._at_work, self._first_ready)

    def passed(self, giver: str) -> None:
        """The workers of a gang have left the devices, as `next_passes` told them to."""
        self._turns.passed(giver)

    def replicas_up(self, gang: str) -> frozenset[int]:
        """A pool's usable replicas."""
        return frozenset(self._gangs[gang].slots)

    def waiting_versions(self, gang: str) -> set[int]:
        """Versions of the weights that nodes need which wait for nothing but a slot of this pool. Canaries do not
        count: the few rows that they bring are no reason for others to stay."""
        waiting = self._ready[gang, Mode.SLOT].nodes.values()
        return {self._version_for(node) for node in waiting if node.stage != "canary"}

    def waits(self) -> dict[str, Wait]:
        """By gang that is up, has nodes left and runs none: what it waits for."""
        left = {address: entry.node for address, entry in self._entries.items() if entry.state is not _State.DONE}
        running = {address for address in left if self._queues.is_running(address)}
        gang_of = {role: state.gang.name for role, state in self._gang_of.items()}
        found = waits(left, running, self._queues.before, gang_of)
        up = {gang: wait for gang, wait in found.items() if self._gangs[gang].up}
        return {gang: replace(wait, devices_of=self._turns.holder(gang)) for gang, wait in up.items()}

    def statuses(self) -> list[NodeStatus]:
        """Every node in the window, in the order admitted."""
        return [self._status(entry) for entry in self._entries.values()]

    def is_up(self, gang: str) -> bool:
        """Whether a gang (of a pool: any replica) takes work."""
        return self._gangs[gang].up

    def idle(self, gang: str) -> bool:
        """Whether a gang is up, and nothing is handed out to it."""
        return self._gangs[gang].up and not self._at_work(gang)

    def busy_replicas(self, gang: str) -> frozenset[int]:
        """A pool's usable replicas that have shards; of an ordered gang none."""
        state = self._gangs[gang]
        return frozenset(replica for replica, free in state.slots.items() if free < state.gang.slots)

    def losses(self, address: Address) -> int:
        """How often it was lost with its worker."""
        return self._entries[address].losses

    def is_done(self, address: Address) -> bool:
        """Whether a node is done; a node that is not held any more is."""
        return address not in self._entries or self._entries[address].state is _State.DONE

    # ---- how -----------------------------------------------------------------------------------------------------

    def _status(self, entry: _Entry) -> NodeStatus:
        submit, done = entry.submit, entry.state is _State.DONE
        parents_done = all(map(self.is_done, entry.node.parents))
        running = self._queues.is_running(entry.node.address)
        state = node_state(done, entry.state is _State.SUBMITTED, parents_done, running)
        worker = None if submit is None else (submit.gang, submit.replica)
        return NodeStatus(entry.node, state, worker, entry.losses)

    @staticmethod
    def _on(entry: _Entry, gang: str, replica: int) -> bool:
        submit = entry.submit if entry.state is _State.SUBMITTED else None
        return submit is not None and (submit.gang, submit.replica) == (gang, replica)

    def _set(self, entry: _Entry, state: _State) -> None:
        """Moves a node to a state, which may let its children go or hold them back."""
        before, entry.state = entry.state, state
        self._look_at(entry)
        for address in self._children.get(entry.node.address, ()):
            child = self._entries.get(address)
            if child is not None:
                held, holds = (not self._lets_go(entry, s, child.node) for s in (before, state))
                child.blockers += holds - held
                self._look_at(child)

    def _look_at(self, entry: _Entry) -> None:
        """Puts a node among the ready ones, or takes it out."""
        ready = self._ready[self._gang_of[entry.node.role].gang.name, self._mode(entry.node)]
        if entry.state is _State.WAITING and not entry.blockers:
            ready.add(entry.node)
        else:
            ready.discard(entry.node)

    def _mode(self, node: Node) -> Mode:
        return self._gang_of[node.role].gang.mode(node.role)

    def _lets_go(self, parent: _Entry, state: _State, child: Node) -> bool:
        """Whether a parent in this state no longer holds a child back."""
        if state is _State.DONE:
            return True
        return state is _State.SUBMITTED and parent.node.turn == child.turn and self._mode(child) is Mode.FREE

    def _at_work(self, gang: str) -> bool:
        """Whether anything is handed out to a gang; a node without a slot counts: its rows are in some replica."""
        state = self._gangs[gang]
        return bool(state.out or state.waiting or self.busy_replicas(gang) or any(state.loads.values()))

    def _first_ready(self, gang: str) -> Node | None:
        """The most urgent of a gang's nodes that wait for nothing but a worker."""
        return min((node for mode in Mode if (node := self._ready[gang, mode].first()) is not None), default=None)

    def _has_capacity(self, state: _GangState, mode: Mode) -> bool:
        if not state.up or not self._turns.has(state.gang.name):
            return False
        if mode is Mode.ORDERED:
            return len(state.out) < (1 if state.gang.workers > 1 else 2)
        return mode is Mode.FREE or any(state.slots.values())

    def _comes_after_a_child(self, node: Node, state: _GangState) -> bool:
        """Whether what is out on the gang will let a more urgent node follow: handed out now, `node` would run first.
        (The critic's update would hold up the publication of the policy, and with it the next generation.)"""
        for parent in state.out:
            for child in self._children.get(parent, ()):
                entry = self._entries.get(child)
                if entry is None or entry.state is not _State.WAITING or self._gang_of[entry.node.role] is not state:
                    continue
                if entry.node < node and all(p in state.out or self.is_done(p) for p in entry.node.parents):
                    return True
        return False

    def _hand_out(self, node: Node) -> Submit:
        """Hands out a node; its gang has capacity for it."""
        state, entry = self._gang_of[node.role], self._entries[node.address]
        mode = state.gang.mode(node.role)
        replica, sequence = 0, None
        if mode is Mode.ORDERED:
            sequence = state.sequence
            state.sequence += 1
            state.out.add(node.address)
        elif mode is Mode.SLOT:
            replica = max(state.slots, key=lambda r: (state.slots[r], -r))
            state.slots[replica] -= 1
        else:
            replica = min(state.loads, key=lambda r: (state.loads[r], r))
            state.loads[replica] += 1
        given = replace(node, version=self._version_for(node))
        entry.submit = Submit(given, state.gang.name, mode, entry.attempts, replica, sequence)
        entry.attempts += 1
        entry.holds_capacity = True
        self._set(entry, _State.SUBMITTED)
        unfinished = [p for p in node.parents if not self.is_done(p)] if mode is Mode.FREE else ()
        self._queues.hand_out(given, (state.gang.name, replica), state.gang.threads, unfinished)
        return entry.submit

    def _version_for(self, node: Node) -> int:
        """The version that a node would be handed out with now."""
        if node.newest is None:
            return node.version
        allowed = [version for version in self._readable if node.version <= version <= node.newest]
        assert allowed, f"{node.address} may start, and none of its versions can be read"
        return max(allowed)

    def _release_capacity(self, entry: _Entry) -> None:
        submit = entry.submit
        if submit is None:
            return
        state = self._gangs[submit.gang]
        state.waiting.discard(entry.node.address)
        if not entry.holds_capacity:
            return
        entry.holds_capacity = False
        state.out.discard(entry.node.address)
        if submit.mode is Mode.SLOT and submit.replica in state.slots:
            state.slots[submit.replica] += 1
        elif submit.mode is Mode.FREE and submit.replica in state.loads:
            state.loads[submit.replica] -= 1
