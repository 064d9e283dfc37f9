"""Long tails: which rows move between replicas when few are left, so that some replicas are free sooner.

    replicas ──rows here, measured costs──► Tails (the last reports) ──plan_moves──► orders to the sources
    dispatch ──what else could start─────────┘

A decoding pass costs nearly the same for one row as for a few, so a pool whose last rows are spread over its replicas
keeps all of them for what one could do. Events in, instructions out: no clock, no I/O, no Dask. May import
stages.engines.row_loads and the standard library.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from stages.engines.row_loads import EngineLoad, MigrationRequest, RowLoad

BANDWIDTH_PRIOR = 200e6
"""Bytes per second between two replicas, before any was measured: a slow network's."""
HANDLING_S = 0.02
"""What a move costs a row besides its bytes: it waits for the end of a pass here and there, and for messages."""
_LEARNING_RATE = 0.5
_MEASURABLE_BYTES = 1 << 20
"""A smaller move says more about messages than about bandwidth."""


@dataclass(frozen=True)
class Move:
    """An instruction: these rows go from one replica to another."""

    source: int
    target: int
    rows: tuple[MigrationRequest, ...]


def plan_moves(loads: Mapping[int, EngineLoad], bytes_per_s: float, below: int) -> list[Move]:
    """Which replicas empty into which, if fewer than `below` rows are left on all of them together.

    Replicas with the fewest rows are emptied first, into those with the most; whole, or not at all; only into free
    slots, of replicas that have rows of the same version to do anyway (an empty one is free already). So every move
    leaves one replica less with rows, and no row comes back. Rows that are nearly done stay: their replica is free as
    soon."""
    if sum(len(load.rows) for load in loads.values()) >= below:
        return []
    moves: list[Move] = []
    for version in sorted({load.version for load in loads.values()}):
        busy = {i: load for i, load in loads.items() if load.version == version and load.rows}
        moves += _gather(busy, bytes_per_s)
    return moves


def _gather(busy: Mapping[int, EngineLoad], bytes_per_s: float) -> list[Move]:
    """Among replicas that hold rows of one version."""
    moves: list[Move] = []
    free = {i: load.slots - len(load.rows) for i, load in busy.items()}
    by_rows = sorted(busy, key=lambda i: (len(busy[i].rows), -i))
    receivers: set[int] = set()
    for position, source in enumerate(by_rows):
        others = by_rows[position + 1 :]
        if source in receivers or not others:
            continue
        wanted = [w for row in busy[source].rows if (w := _worth(row, busy[source], busy[others[-1]], bytes_per_s))]
        if not wanted or len(wanted) > sum(max(free[i], 0) for i in others):
            continue
        for target in reversed(others):
            part, wanted = wanted[: max(free[target], 0)], wanted[max(free[target], 0) :]
            if part:
                moves.append(Move(source, target, tuple(part)))
                free[target] -= len(part)
                receivers.add(target)
    return moves


def _worth(row: RowLoad, source: EngineLoad, target: EngineLoad, bytes_per_s: float) -> MigrationRequest | None:
    """How the row would move, if that is worth it: with its keys and values, or to be fed again, whichever is sooner;
    and only if it may go on for longer than that takes."""
    if source.pass_s == 0.0:
        return None  # nothing is known of it yet
    carried_s = row.cached * source.position_bytes / bytes_per_s if row.cached else math.inf
    fed_s = row.tokens * (target.prefill_s or source.prefill_s or source.pass_s)
    cost_s = HANDLING_S + min(carried_s, fed_s)
    min_left = math.ceil(cost_s / source.pass_s)
    return MigrationRequest(row.key, carried_s <= fed_s, min_left) if row.left >= min_left else None


@dataclass
class Tails:
    """Owns the last load that each replica of a pool reported, and the moves under way."""

    below: int
    bytes_per_s: float = BANDWIDTH_PRIOR
    _loads: dict[int, EngineLoad] = field(default_factory=dict)
    """By replica; those that have reported nothing since they were built are not in it."""
    _under_way: dict[int, Move] = field(default_factory=dict)
    """By number."""
    _ordered: int = 0

    def update_load(self, replica: int, load: EngineLoad) -> None:
        """A replica reports what it has."""
        self._loads[replica] = load

    def replica_lost(self, replica: int) -> None:
        """It is lost, or not to be counted on: its moves are over, and it must report to be part of one again."""
        self._loads.pop(replica, None)
        for number, move in list(self._under_way.items()):
            if move.source == replica:
                del self._under_way[number]

    def arrived(self, number: int, num_bytes: int, seconds: float) -> None:
        """A move is over: its rows were accepted, or came back."""
        self._under_way.pop(number, None)
        if num_bytes >= _MEASURABLE_BYTES and seconds > 0:
            self.bytes_per_s *= (num_bytes / seconds / self.bytes_per_s) ** _LEARNING_RATE

    def next_moves(self, usable: Collection[int], startable: Iterable[int]) -> list[tuple[int, Move]]:
        """Moves to order now, each with its number. `usable`: replicas that get work. `startable`: versions of the
        nodes that are ready and wait for a slot: rows of such a version are no tail, since more will join them."""
        loads = {i: load for i, load in self._loads.items() if i in usable}
        if self._under_way or len(loads) < len(usable):
            return []  # what is not known may be much
        waiting = set(startable)
        loads = {i: load for i, load in loads.items() if load.version not in waiting or not load.rows}
        orders = []
        for move in plan_moves(loads, self.bytes_per_s, self.below):
            self._under_way[self._ordered] = move
            orders.append((self._ordered, move))
            self._ordered += 1
        return orders
