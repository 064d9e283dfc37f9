"""Plan which rows migrate between replicas, so that all work of a pool ends sooner.

    replicas ──their rows, measured costs──► MigrationPlanner (last reports) ──plan_migrations──► orders to sources
    dispatch ──replicas with shards, nodes that wait──┘

A decoding pass over n rows takes floor_s + row_s * n seconds (`PassCost`, fitted to each replica's passes). A replica
whose rows need l_1 .. l_n more passes is therefore done after

    end = floor_s * max(l_i) + row_s * sum(l_i)              (more passes if it has more rows than run at once)

and all work of a pool is done after

    max(latest end, (sum of all ends + seconds of the nodes that wait for a slot) / number of replicas).

The first part falls if rows spread: a loaded replica gives rows to idle replicas. The second part falls if rows gather:
a pass costs nearly the same for one row as for a few, so replicas that are emptied can begin the next nodes. Three
plans are compared, with the cost of their migrations: rows spread, rows gather, and no row migrates. Events in,
instructions out: no clock, no I/O, no Dask.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from stages.engines.row_loads import COPY_POSITIONS, EngineLoad, MigrationRequest, RowLoad

MIN_GAIN = 0.03
"""Minimum fraction of the rows' predicted time that a plan must save. Measured times scatter, and rows may end early.
"""
_MEASURABLE_BYTES = 1 << 20
"""The measured times of a migration change `CopyCost` only if it copied at least this many bytes. Smaller copies say
little about larger copies."""


@dataclass(frozen=True)
class Migration:
    """An instruction to the replica `source`: migrate `rows` to the replica `target`, one row after the other."""

    source: int
    target: int
    rows: tuple[MigrationRequest, ...]


@dataclass(frozen=True)
class CopyCost:
    """The measured cost of migrations. The default values are assumed before the first migration."""

    bytes_per_s: float = 200e6
    """Bytes of keys and values that one replica (source or target) reads or writes in a second. The decoding passes of
    the replica wait meanwhile."""
    standstill_s: float = 0.02
    """Seconds that a row stands still during its migration."""


def plan_migrations(
    loads: Mapping[int, EngineLoad],
    copies: CopyCost = CopyCost(),
    closed: Collection[int] = (),
    waiting_s: float = 0.0,
) -> list[Migration]:
    """Return the migrations to order. For each version of the weights, three plans are compared: spread the rows,
    gather them, or migrate none. The result has the migrations of the plan with which all work ends soonest. If this
    plan saves no more than the fraction `MIN_GAIN` of the time until all rows are finished without migration, no row of
    this version migrates.

    Rows go to replicas with the same version of the weights, and only into free places. No replica both sends and
    receives rows. Nothing migrates before some replica has a measured cost of its decoding passes.

    Args:
        loads: load of each replica of the pool, by index.
        closed: replicas that have been given a node. If the load of such a replica has no rows, the replica has not
            reported the rows of its node yet. It then receives no rows.
        waiting_s: seconds that one replica would need for all nodes that wait for a slot.
    """
    migrations: list[Migration] = []
    costs = [load.cost for load in loads.values() if load.cost is not None]
    if not costs:
        return migrations
    known = {i: load if load.cost is not None else replace(load, cost=costs[0]) for i, load in loads.items()}
    for version in sorted({load.version for load in loads.values() if load.rows}):
        group = {i: one for i, one in known.items() if one.version == version and (one.rows or i not in closed)}
        stay, level, gather = (_Plan(group, copies, waiting_s) for _ in range(3))
        _level(level)
        if waiting_s:
            _gather(gather)
        best = min(stay, level, gather, key=_Plan.end_s)
        if stay.end_s() - best.end_s() > MIN_GAIN * (stay.end_s() - waiting_s / len(group)):
            migrations += best.migrations()
    return migrations


class _Side:
    """One replica in a plan, after the migrations of the plan: its rows, and the time at which it has finished them."""

    def __init__(self, load: EngineLoad) -> None:
        self.load = load
        self.passes = {row.key: row.left for row in load.rows}
        """Row's key -> passes that the row needs here. For a row that arrives, the passes during which it stands still
        are added."""
        self.held_s = 0.0
        """Seconds in which passes wait for keys and values that are read or written, or for tokens that are fed to the
        model again."""
        self.copying = 0
        """Number of passes until all rows that leave this replica have been copied, one after the other."""
        self.sends = self.receives = False

    @property
    def num_free(self) -> int:
        return max(self.load.max_rows - len(self.passes), 0)

    def end_s(self, total: int | None = None, longest: int | None = None) -> float:
        """Return the seconds until the replica has finished all its rows. Pass `total` and `longest` to see the effect
        of a migration that is not made yet.

        Args:
            total: sum of the decoding passes that the rows need. None: the sum over the present rows.
            longest: largest number of decoding passes that one row needs. None: the maximum over the present rows.
        """
        total = sum(self.passes.values()) if total is None else total
        longest = max(self.passes.values(), default=0) if longest is None else longest
        assert self.load.cost is not None
        passes = max(longest, -(-total // self.load.max_rows))
        return self.held_s + self.load.cost.floor_s * passes + self.load.cost.row_s * total


@dataclass(frozen=True)
class _Price:
    """The cost of the migration of one row from a source replica to a target replica. During the migration the source
    makes no decoding passes for `read_s` seconds in total, and the target for `write_s` seconds."""

    request: MigrationRequest
    copying: int
    """Number of decoding passes that the source replica makes until the row's keys and values are copied. They are
    copied in blocks, one block between two passes. 0 if the target feeds the row's tokens to the model again instead.
    """
    passes: int
    """Number of passes of the target during which the row stands still."""
    read_s: float
    write_s: float


class _Plan:
    """A plan to migrate rows between the replicas that hold one version of the weights. It has the migrations. For each
    replica, it also has the rows after the migrations, and the time at which the replica finishes them."""

    def __init__(self, group: Mapping[int, EngineLoad], copies: CopyCost, waiting_s: float) -> None:
        self.sides = {i: _Side(load) for i, load in group.items()}
        self._copies, self._waiting_s = copies, waiting_s
        self._migrated: dict[tuple[int, int], list[MigrationRequest]] = {}

    def end_s(self) -> float:
        """Return the seconds until all work is done (see the module docstring)."""
        ends = [side.end_s() for side in self.sides.values()]
        return max(*ends, (sum(ends) + self._waiting_s) / len(ends)) if self._waiting_s else max(ends)

    def price(self, row: RowLoad, source: int, target: int) -> _Price | None:
        """Return what a migration costs, or None if the row may be done before it has migrated. A row migrates in one
        of two ways. Either its keys and values are copied while the row goes on decoding, or the target feeds the row's
        tokens to the model again. The way that delays the passes of both replicas less is chosen."""
        giving, taking = self.sides[source].load, self.sides[target].load
        copy_s = row.cached * giving.position_bytes / self._copies.bytes_per_s if row.cached else math.inf
        fed_s = row.tokens * (taking.prefill_s or giving.prefill_s or giving.pass_s)
        with_cache = 2 * copy_s <= fed_s
        standstill_s = self._copies.standstill_s + (0.0 if with_cache else fed_s)
        copying = -(-row.cached // COPY_POSITIONS) if with_cache else 0
        min_left = math.ceil(standstill_s / giving.pass_s)
        if row.left < self.sides[source].copying + copying + min_left:
            return None
        request = MigrationRequest(row.key, with_cache, min_left)
        held = (copy_s, copy_s) if with_cache else (0.0, fed_s)
        return _Price(request, copying, math.ceil(standstill_s / self._pass_s_with_another(target)), *held)

    def _pass_s_with_another(self, target: int) -> float:
        side = self.sides[target]
        assert side.load.cost is not None
        return side.load.cost.seconds(min(len(side.passes) + 1, side.load.max_rows))

    def migrate(self, row: RowLoad, source: int, target: int, price: _Price) -> None:
        giving, taking = self.sides[source], self.sides[target]
        del giving.passes[row.key]
        taking.passes[row.key] = row.left + price.passes
        giving.held_s += price.read_s
        giving.copying += price.copying
        taking.held_s += price.write_s
        giving.sends = taking.receives = True
        self._migrated.setdefault((source, target), []).append(price.request)

    def migrations(self) -> list[Migration]:
        return [Migration(source, target, tuple(rows)) for (source, target), rows in self._migrated.items()]


def _level(plan: _Plan) -> None:
    """Migrate rows one by one from the replica that would finish last (the source) to the one that would finish first
    (the target), until the source has received rows itself, no replica can receive one, or source and target would not
    both finish before the time at which the source finishes now."""
    while True:
        source = max(plan.sides, key=lambda i: plan.sides[i].end_s())
        giving = plan.sides[source]
        targets = [i for i, side in plan.sides.items() if i != source and side.num_free and not side.sends]
        if giving.receives or not targets:
            return
        target = min(targets, key=lambda i: plan.sides[i].end_s())
        best = _row_to_migrate(plan, giving, source, target)
        if best is None:
            return
        plan.migrate(*best)


def _row_to_migrate(plan: _Plan, giving: _Side, source: int, target: int) -> tuple[RowLoad, int, int, _Price] | None:
    """Return the arguments of `_Plan.migrate` for the best migration of one row from `source` to `target`. A migration
    is judged by the time at which the later of the two replicas finishes its rows. Return None if no migration makes
    this time earlier than the time at which the source finishes now. `giving`: the source in the plan."""
    taking = plan.sides[target]
    total, *longest = sum(giving.passes.values()), *sorted(giving.passes.values(), reverse=True)[:2], 0
    their_total, their_longest = sum(taking.passes.values()), max(taking.passes.values(), default=0)
    best, soonest = None, giving.end_s()
    for row in giving.load.rows:
        price = plan.price(row, source, target) if row.key in giving.passes else None
        if price is None:
            continue
        here, there = giving.passes[row.key], row.left + price.passes
        source_end_s = price.read_s + giving.end_s(total - here, longest[1] if here == longest[0] else longest[0])
        target_end_s = price.write_s + taking.end_s(their_total + there, max(their_longest, there))
        if max(source_end_s, target_end_s) < soonest:
            best, soonest = (row, source, target, price), max(source_end_s, target_end_s)
    return best


def _gather(plan: _Plan) -> None:
    """Migrate the rows of the replicas with the fewest rows into free places of the replicas with the most rows. A
    replica sends all rows that can migrate, or none if the places do not suffice. Rows that are nearly done stay, since
    they end before they would have migrated."""
    busy = [i for i, side in plan.sides.items() if side.passes]
    by_rows = sorted(busy, key=lambda i: (len(plan.sides[i].passes), -i))
    for position, source in enumerate(by_rows):
        giving = plan.sides[source]
        places = [i for i in by_rows[:position:-1] for _ in range(plan.sides[i].num_free)]
        if giving.receives or not places:
            continue
        wanted = [row for row in giving.load.rows if plan.price(row, source, places[0])]
        if len(wanted) > len(places):
            continue
        for row, target in zip(wanted, places, strict=False):
            price = plan.price(row, source, target)
            if price is not None:
                plan.migrate(row, source, target, price)


def _nearer(known: float, measured: float) -> float:
    """Return the geometric mean of a value and a new measurement."""
    return math.sqrt(known * measured)


@dataclass
class MigrationPlanner:
    """Owns the last load that each replica of a pool reported, and the migrations under way."""

    concurrent_shards: int = 1
    """Number of nodes that a replica works on at once."""
    copies: CopyCost = CopyCost()
    node_s: float = 0.0
    """Running geometric mean of the seconds that a node takes; 0 before the first node."""
    _loads: dict[int, tuple[EngineLoad, float]] = field(default_factory=dict)
    """Last report of each replica, and its time. A replica that has not reported since it was built is missing."""
    _under_way: dict[int, Migration] = field(default_factory=dict)
    """Number of a migration -> the migration."""
    _outdated: set[int] = field(default_factory=set)
    """Replicas whose last report is outdated, because a migration from or to them was ordered after this report. If the
    migration ends without any row having migrated, its two replicas are removed from this set."""
    _ordered: int = 0
    _seen: object = None
    """The inputs of the last plan."""
    _num_reports: int = 0

    def update_load(self, replica: int, load: EngineLoad, now_s: float) -> None:
        """Record the load that a replica reports."""
        self._loads[replica] = load, now_s
        self._outdated.discard(replica)
        self._num_reports += 1

    def node_took(self, seconds: float) -> None:
        """Record how long a node was worked on."""
        self.node_s = _nearer(self.node_s, seconds) if self.node_s else seconds

    def replica_lost(self, replica: int) -> None:
        """Forget the load of a replica that is lost or does not answer. Also forget the migrations of rows away from
        it. Once the replica, or a new process in its place, reports its load, it takes part in migrations again."""
        self._loads.pop(replica, None)
        self._outdated.discard(replica)
        self._num_reports += 1
        for number in [number for number, migration in self._under_way.items() if migration.source == replica]:
            self._ended(number, has_migrated=False)

    def arrived(self, number: int, num_rows: int, num_bytes: int, held_s: float, standstill_s: float) -> None:
        """Record that a migration has ended. `number` is the number that `next_migrations` gave it.

        Args:
            num_rows: number of the migration's rows that the target accepted.
            num_bytes: bytes of keys and values that were copied.
            held_s: seconds for which decoding passes waited for the copies, summed over both replicas.
            standstill_s: seconds for which rows were not decoded, summed over all rows.
        """
        self._ended(number, has_migrated=num_rows > 0)
        if num_rows and num_bytes >= _MEASURABLE_BYTES and held_s > 0:
            rate, each_s = 2 * num_bytes / held_s, standstill_s / num_rows
            self.copies = CopyCost(_nearer(self.copies.bytes_per_s, rate), _nearer(self.copies.standstill_s, each_s))

    def _ended(self, number: int, *, has_migrated: bool) -> None:
        migration = self._under_way.pop(number, None)
        self._num_reports += 1
        if migration is not None and not has_migrated:
            self._outdated -= {migration.source, migration.target}

    def next_migrations(
        self, usable: Collection[int], busy: Collection[int], waiting: Mapping[int, int], now_s: float
    ) -> list[tuple[int, Migration]]:
        """Return the migrations to order now, each with its number. There are none while an ordered migration is under
        way or a usable replica has yet to report. There are also none if nothing has changed since the last plan.

        Args:
            usable: replicas that get work.
            busy: replicas that have a node, whether or not its rows have been reported.
            waiting: version -> number of nodes that wait only for a slot. Rows of such a version stay where they are,
                since more rows will join them.
            now_s: time of the call. The reported loads are extrapolated to this time.
        """
        seen = self._num_reports, frozenset(usable), frozenset(busy), tuple(sorted(waiting.items()))
        if self._under_way or self._outdated or not self._loads.keys() >= {*usable} or seen == self._seen:
            return []  # rows are migrating, a replica that has not reported may have many, or nothing is new
        self._seen = seen
        loads = {i: load.later(now_s - at) for i, (load, at) in self._loads.items() if i in usable}
        loads = {i: load for i, load in loads.items() if load.version not in waiting or not load.rows}
        waiting_s = sum(waiting.values()) * self.node_s / self.concurrent_shards
        orders = []
        for migration in plan_migrations(loads, self.copies, busy, waiting_s):
            self._under_way[self._ordered] = migration
            self._outdated |= {migration.source, migration.target}
            orders.append((self._ordered, migration))
            self._ordered += 1
        return orders
