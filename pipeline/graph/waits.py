"""What an idle gang waits for: a pure function of the nodes that are not done. No clock, no I/O, no Dask.

    idle gang ──► its most urgent node ──► parents that are not done ──► theirs ──► ... ──► nodes that run
                                           (of one that is queued:                 └──────► nodes that wait for a worker
                                           what its worker does first)

May import pipeline.graph.graph, stages.models.protocol.Role, storage.address and the standard library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass

from pipeline.graph.graph import Node
from stages.models.protocol import Role
from storage.address import Address


@dataclass(frozen=True)
class Wait:
    """Why a gang has nothing to do."""

    node: Address
    """What it would do next."""
    running: tuple[Address, ...]
    """Nodes that run now, from which that one comes, over however many others; or which a worker does before those."""
    ready: tuple[Address, ...]
    """Likewise, nodes that wait for nothing but a worker."""
    devices_of: str | None = None
    """The gang whose turn it is on the devices that this one has in turn with it."""

    def __str__(self) -> str:
        if self.devices_of is not None and self.ready == (self.node,):
            return f"{self.node} waits for the devices, which are {self.devices_of}'s in turn"
        behind = [f"{address} (running)" for address in self.running]
        behind += [f"{address} (waiting for a worker)" for address in self.ready]
        return f"{self.node} waits for {', '.join(behind[:4])}{f' and {len(behind) - 4} more' if behind[4:] else ''}"


def waits(
    unfinished: Mapping[Address, Node],
    running: Set[Address],
    before: Callable[[Address], Iterable[Address]],
    gang_of: Mapping[Role, str],
) -> dict[str, Wait]:
    """By gang that has nodes left and runs none. `before(address)`: what a worker runs now, before that node, which it
    was handed too. A parent that is not among the `unfinished` is done."""
    parents = {
        address: [p for p in node.parents if p in unfinished] or [*before(address)]
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
