"""Plan which rows migrate between replicas when few are left, so that some replicas are free sooner.

    replicas ──their rows, measured costs──► MigrationPlanner (last reports) ──plan_migrations──► orders to sources
    dispatch ──nodes that could start────────┘

A decoding pass costs nearly the same for one row as for a few. If the last rows of a pool are spread over its replicas,
all replicas are busy with the work of one. Events in, instructions out: no clock, no I/O, no Dask.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from stages.engines.row_loads import EngineLoad, MigrationRequest, RowLoad

BANDWIDTH_PRIOR = 200e6
"""Assumed bandwidth between two replicas (bytes per second) before one was measured: that of a slow network."""
HANDLING_S = 0.02
"""Seconds that a migration costs a row besides its bytes: waiting for passes to end on both sides, and messages."""
_LEARNING_RATE = 0.5
_MEASURABLE_BYTES = 1 << 20
"""The time of a smaller migration says more about messages than about bandwidth."""


@dataclass(frozen=True)
class Migration:
    """An instruction: these rows migrate from one replica to another."""

    source: int
    target: int
    rows: tuple[MigrationRequest, ...]


def plan_migrations(loads: Mapping[int, EngineLoad], bytes_per_s: float, below: int) -> list[Migration]:
    """Return the migrations to order, if fewer than `below` rows are left on all replicas together.

    Replicas with the fewest rows are emptied first, into those with the most rows. A replica sends all rows that
    are worth a migration or none, and only into free places of replicas that hold rows of the same version. So every
    migration leaves one replica fewer with rows, and no row comes back. Rows that are nearly done stay, since they end
    sooner than they would migrate."""
    if sum(len(load.rows) for load in loads.values()) >= below:
        return []
    moves: list[Migration] = []
    for version in sorted({load.version for load in loads.values()}):
        busy = {i: load for i, load in loads.items() if load.version == version and load.rows}
        moves += _gather(busy, bytes_per_s)
    return moves


def _gather(busy: Mapping[int, EngineLoad], bytes_per_s: float) -> list[Migration]:
    """Return the migrations among replicas that hold rows of one version."""
    moves: list[Migration] = []
    free = {i: load.max_rows - len(load.rows) for i, load in busy.items()}
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
                moves.append(Migration(source, target, tuple(part)))
                free[target] -= len(part)
                receivers.add(target)
    return moves


def _worth(row: RowLoad, source: EngineLoad, target: EngineLoad, bytes_per_s: float) -> MigrationRequest | None:
    """Return how the row should migrate, or None if that is not worth it. Either its keys and values are sent too, or
    the target feeds its tokens again, whichever is faster. A row migrates only if it may run for longer than that
    takes."""
    if source.pass_s == 0.0:
        return None  # not measured yet
    carried_s = row.cached * source.position_bytes / bytes_per_s if row.cached else math.inf
    fed_s = row.tokens * (target.prefill_s or source.prefill_s or source.pass_s)
    cost_s = HANDLING_S + min(carried_s, fed_s)
    min_left = math.ceil(cost_s / source.pass_s)
    return MigrationRequest(row.key, carried_s <= fed_s, min_left) if row.left >= min_left else None


@dataclass
class MigrationPlanner:
    """Owns the last load that each replica of a pool reported, and the migrations under way."""

    below: int
    bytes_per_s: float = BANDWIDTH_PRIOR
    _loads: dict[int, EngineLoad] = field(default_factory=dict)
    """Last report of each replica. A replica that has not reported since it was built is missing."""
    _under_way: dict[int, Migration] = field(default_factory=dict)
    """Migrations by their number."""
    _ordered: int = 0

    def update_load(self, replica: int, load: EngineLoad) -> None:
        """Record the load that a replica reports."""
        self._loads[replica] = load

    def replica_lost(self, replica: int) -> None:
        """Forget a replica that is lost or overdue, and the migrations whose source it is. Its next report makes it
        take part again."""
        self._loads.pop(replica, None)
        for number, move in list(self._under_way.items()):
            if move.source == replica:
                del self._under_way[number]

    def arrived(self, number: int, num_bytes: int, seconds: float) -> None:
        """Record that a migration is over: its rows were accepted or came back."""
        self._under_way.pop(number, None)
        if num_bytes >= _MEASURABLE_BYTES and seconds > 0:
            self.bytes_per_s *= (num_bytes / seconds / self.bytes_per_s) ** _LEARNING_RATE

    def next_migrations(self, usable: Collection[int], startable: Iterable[int]) -> list[tuple[int, Migration]]:
        """Return the migrations to order now, each with its number.

        Args:
            usable: replicas that get work.
            startable: versions of the nodes that wait only for a slot. Rows of such a version stay where they are,
                since more rows will join them.
        """
        loads = {i: load for i, load in self._loads.items() if i in usable}
        if self._under_way or len(loads) < len(usable):
            return []  # rows are moving, or a replica that has not reported may have many
        waiting = set(startable)
        loads = {i: load for i, load in loads.items() if load.version not in waiting or not load.rows}
        orders = []
        for move in plan_migrations(loads, self.bytes_per_s, self.below):
            self._under_way[self._ordered] = move
            orders.append((self._ordered, move))
            self._ordered += 1
        return orders
