"""Nodes that could run now, in order of urgency.

May import pipeline.graph.graph, storage.address and the standard library.
"""

from __future__ import annotations

import heapq

from pipeline.graph.graph import Node
from storage.address import Address


class ReadyNodes:
    """Owns the nodes of one gang and mode that wait for nothing but capacity, the most urgent first. A node that is
    taken out stays in the heap until it comes up."""

    def __init__(self) -> None:
        self.nodes: dict[Address, Node] = {}
        self._heap: list[Node] = []

    def add(self, node: Node) -> None:
        if node.address not in self.nodes:
            self.nodes[node.address] = node
            heapq.heappush(self._heap, node)

    def discard(self, node: Node) -> None:
        self.nodes.pop(node.address, None)

    def first(self) -> Node | None:
        while self._heap and self._heap[0].address not in self.nodes:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else None
