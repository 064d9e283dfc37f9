"""Closes the ledger behind a run: records of steps that are over go into segments (`storage/segments.py`).

    steps:   0 ···· 15 │ 16 ···· 31 │ 32 ··· 44 45 46 47
                closed │     open   │  over ─┘   └─ in the window
                       └─ closed when the steps up to 31 + margin are over: what a late attempt at one of their nodes
                          comes to has not counted for long, and whoever resumes the run finds all versions of the
                          weights that it may still need among the open steps

May import pipeline.graph and storage.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable

from pipeline.graph.graph import GraphSpec, step_nodes, window
from storage.address import Address
from storage.ledger import Ledger
from storage.segments import SPAN, first_step


def all_committed(spec: GraphSpec, ledger: Ledger, outlived: Collection[Address] = frozenset()) -> bool:
    """Whether every node of the run has its commit, but for those that it has `outlived`."""
    first = ledger.closed_until()
    # Not only open ones: a segment before others may have been reopened.
    there = {*ledger.addresses(from_step=first), *outlived}
    nodes = (node for step in range(max(0, first - 1), spec.steps) for node in step_nodes(spec, step))
    return all(node.address.step < first or node.address in there for node in nodes)


def close_what_is_over(spec: GraphSpec, ledger: Ledger, outlived: Collection[Address]) -> None:
    """Closes segments that were opened again for a damaged record which the run has `outlived`. For a driver that has
    no workers yet: a run that goes on begins behind them then, as before."""
    if not outlived:
        return
    while True:
        first = ledger.closed_until()
        there = {*ledger.addresses(from_step=first), *outlived}
        over = range(max(0, first - 1), first + SPAN + _margin(spec))
        nodes = [node.address for step in over if step < spec.steps for node in step_nodes(spec, step)]
        if over.stop > spec.steps or any(first <= address.step and address not in there for address in nodes):
            return
        closed = (address for address in nodes if first <= address.step < first + SPAN)
        ledger.close(first, [address for address in closed if address not in outlived])


def _margin(spec: GraphSpec) -> int:
    """Steps between the last that is closed and the last that is over."""
    return 2 * window(spec)


class OpenBooks:
    """Owns the list of records that are in no segment yet, from the first open step on."""

    def __init__(self, spec: GraphSpec, ledger: Ledger, outlived: Collection[Address] = frozenset()) -> None:
        """`outlived`: nodes that count as done, and have no record."""
        self._ledger = ledger
        self._outlived = outlived
        self._margin = _margin(spec)
        self.first_step = ledger.closed_until()
        """Before it, all steps are over and closed."""
        self._over: set[int] = set()
        self._next_over = self.first_step
        self._addresses: defaultdict[int, list[Address]] = defaultdict(list)

    @property
    def over_until(self) -> int:
        """Before it, all steps are over."""
        return self._next_over

    def over(self, step: int, addresses: Iterable[Address]) -> None:
        """Every node of a step is done: these, some of which (a publication, an evaluation) count as a later step's.
        Closes what can be closed."""
        for address in addresses:
            if address.step >= self.first_step and address not in self._outlived:
                self._addresses[first_step(address.step)].append(address)
        self._over.add(step)
        while self._next_over in self._over:
            self._over.remove(self._next_over)
            self._next_over += 1
        while self.first_step + SPAN + self._margin <= self._next_over:
            self._ledger.close(self.first_step, self._addresses.pop(self.first_step))
            self.first_step += SPAN
