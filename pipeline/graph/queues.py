"""What workers do of the nodes that they were handed: each runs as many as it has threads, and the rest waits behind
those. No clock, no I/O, no Dask.

    handed out ──its parents are done──► queued ──a thread is free, and nothing here is more urgent──► running ──► gone

Nobody reports that a node has begun: what a worker does first follows from what dispatch knows, since a worker begins
the most urgent of the nodes that can run, and interrupts none.

May import pipeline.graph.graph, storage.address and the standard library.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Iterable

from pipeline.graph.graph import Node
from storage.address import Address


class WorkerQueues:
    """Owns the order in which workers run what they were handed. A worker is a gang, and rank 0 or a replica."""

    def __init__(self) -> None:
        self._workers: dict[Address, tuple[str, int]] = {}
        """Of every node that is handed out."""
        self._threads: dict[tuple[str, int], int] = {}
        self._unfinished: dict[Address, set[Address]] = {}
        """Parents of a node that was handed out ahead of them."""
        self._children: defaultdict[Address, set[Address]] = defaultdict(set)
        """By such a parent."""
        self._queued: defaultdict[tuple[str, int], list[Node]] = defaultdict(list)
        """Heaps. What is gone stays in them until it comes up."""
        self._running: defaultdict[tuple[str, int], set[Address]] = defaultdict(set)
        self._nodes: dict[Address, Node] = {}
        self._beside: set[Address] = set()
        """Nodes that take up no thread that others could use."""

    def hand_out(self, node: Node, worker: tuple[str, int], threads: int, unfinished: Iterable[Address]) -> None:
        """A worker, which runs `threads` nodes at once, was handed a node; `unfinished`: parents that are not done."""
        address = node.address
        self._workers[address], self._nodes[address], self._threads[worker] = worker, node, threads
        parents = set(unfinished)
        if not parents:
            self._enter(node)
            return
        self._unfinished[address] = parents
        for parent in parents:
            self._children[parent].add(address)

    def done(self, address: Address) -> None:
        """A node has its commit: it leaves its worker, and nodes that waited for it there may run."""
        self.lost(address)
        for child in self._children.pop(address, ()):
            left = self._unfinished.get(child)
            if left is not None and address in left:
                left.remove(address)
                if not left:
                    del self._unfinished[child]
                    self._enter(self._nodes[child])

    def lost(self, address: Address) -> None:
        """A node leaves its worker."""
        worker = self._workers.pop(address, None)
        if worker is None:
            return
        del self._nodes[address]
        self._unfinished.pop(address, None)
        self._beside.discard(address)
        self._running[worker].discard(address)
        self._begin(worker)

    def step_aside(self, address: Address) -> None:
        """A node that runs does nothing any more but wait, in a thread that is there for that."""
        worker = self._workers.get(address)
        if worker is not None and address in self._running[worker]:
            self._running[worker].remove(address)
            self._beside.add(address)
            self._begin(worker)

    def is_running(self, address: Address) -> bool:
        """Whether its worker is at it."""
        worker = self._workers.get(address)
        return worker is not None and (address in self._running[worker] or address in self._beside)

    def before(self, address: Address) -> tuple[Address, ...]:
        """What its worker does now, of a node that can run and does not yet; else nothing."""
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
