"""The choice of rows that migrate: oracles by hand, properties for any load, and replicas played on a clock."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Sequence

import numpy as np
import pytest

from pipeline.graph.migration import CopyCost, Migration, MigrationPlanner, plan_migrations
from stages.engines.row_loads import EngineLoad, MigrationRequest, PassCost, RowLoad

MIB = 1 << 20
FAST, SLOW = CopyCost(1e12), CopyCost(1e6)
COST = PassCost(0.020, 0.001)
FLOOR = PassCost(0.020, 0.0)
"""A pass costs the same for any number of rows."""
OTHER_WORK_S = 1e6
"""Nodes wait, so that every second of a replica counts."""


def row(number: int, left: int = 500, cached: int = 99, tokens: int = 100) -> RowLoad:
    return RowLoad((0, 0, number), tokens, cached, left)


def load(
    *rows: RowLoad, version: int = 0, max_rows: int = 8, cost: PassCost | None = COST, prefill_s: float = 0.001
) -> EngineLoad:
    """46 KiB a position, as SmolLM2-135M has."""
    return EngineLoad(version, max_rows, rows, 46_080, cost, prefill_s)


def rows(*numbers: int, **more: int) -> list[RowLoad]:
    return [row(number, **more) for number in numbers]


def shape(migrations: list[Migration]) -> list[tuple[int, int, list[int]]]:
    return [
        (migration.source, migration.target, [wanted.key[2] for wanted in migration.rows]) for migration in migrations
    ]


def loads_of(counts: Sequence[int], max_rows: int = 8, cost: PassCost | None = COST) -> dict[int, EngineLoad]:
    return {i: load(*rows(*range(10 * i, 10 * i + n)), max_rows=max_rows, cost=cost) for i, n in enumerate(counts)}


# ---- other work waits: replicas are emptied -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "max_rows", "expected"),
    [
        ((1, 3), 8, [(0, 1, 1)]),
        ((3, 1), 8, [(1, 0, 1)]),
        ((2, 2), 8, [(1, 0, 2)]),  # of equals the later one is emptied
        ((1, 2, 3), 8, [(0, 2, 1), (1, 2, 2)]),
        ((0, 3), 8, []),  # one holds all there are
        ((3, 4), 6, []),  # 7 rows do not fit one replica
        ((3, 3, 2), 4, [(2, 0, 1), (2, 1, 1)]),  # 8 fill two: the last is emptied into both
        ((1, 1, 3, 3), 4, [(1, 2, 1), (0, 3, 1)]),
        ((2, 2, 2, 2), 4, [(3, 0, 2), (2, 1, 2)]),
        ((4, 4, 3), 4, []),
    ],
)
def test_few_rows_go_to_many(counts: tuple[int, ...], max_rows: int, expected: list[tuple[int, int, int]]) -> None:
    migrations = plan_migrations(loads_of(counts, max_rows), FAST, range(len(counts)), OTHER_WORK_S)
    assert [(m.source, m.target, len(m.rows)) for m in migrations] == expected


def test_any_plan_empties_replicas_and_fills_no_slot_twice() -> None:
    """After a plan is carried out there is less to plan, so rows do not wander: at most n - 1 plans, and a row comes
    back to no replica that it has left."""
    rng = random.Random(0)
    for _ in range(300):
        max_rows, num = rng.randint(1, 6), rng.randint(2, 6)
        held = {i: rows(*range(100 * i, 100 * i + rng.randint(0, max_rows))) for i in range(num)}
        left: dict[tuple[int, int, int], set[int]] = {}
        for _ in range(num):
            loads = {i: load(*r, max_rows=max_rows) for i, r in held.items()}
            migrations = plan_migrations(loads, FAST, range(num), OTHER_WORK_S)
            sources, targets = {m.source for m in migrations}, {m.target for m in migrations}
            assert not sources & targets
            assert all(held[i] for i in sources | targets)
            for migration in migrations:
                going = [r for r in held[migration.source] if r.key in {w.key for w in migration.rows}]
                assert len(going) == len(migration.rows)
                for one in going:
                    left.setdefault(one.key, set()).add(migration.source)
                    assert migration.target not in left[one.key]
                held[migration.source] = [r for r in held[migration.source] if r not in going]
                held[migration.target] = held[migration.target] + going
            assert all(not held[i] for i in sources)
            assert all(len(r) <= max_rows for r in held.values())
        busy = sum(bool(r) for r in held.values())
        total = sum(len(r) for r in held.values())
        loads = {i: load(*r, max_rows=max_rows) for i, r in held.items()}
        assert plan_migrations(loads, FAST, range(num), OTHER_WORK_S) == []
        assert busy <= max(1, 2 * -(-total // max_rows)), "two half-empty replicas would have become one"


def test_rows_gather_only_as_far_as_the_waiting_nodes_need_replicas() -> None:
    """Two rows on each of two replicas, 500 passes of 22 ms: 11 s. Together they take 12 s. A node of 2 s waits: apart
    all is done after (11 + 11 + 2) / 2 = 12 s, together after max(12, (12 + 2) / 2). One of 12 s: 17 s against 12."""
    assert plan_migrations(loads_of((2, 2)), FAST, (), 2.0) == []
    assert shape(plan_migrations(loads_of((2, 2)), FAST, (), 12.0)) == [(1, 0, [10, 11])]


# ---- nothing waits: rows spread -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ((8, 0), {1: 4}),
        ((8, 2), {1: 3}),
        ((6, 0, 0), {1: 2, 2: 2}),
        ((7, 1, 4), {1: 3}),  # all three end with four
        ((3, 2), {}),  # 21.5 against 22.5 at best: nobody ends sooner
        ((1, 0), {}),
    ],
)
def test_rows_of_loaded_replicas_go_to_idle_ones(counts: tuple[int, ...], expected: dict[int, int]) -> None:
    """A row adds 20 times what a pass costs alone."""
    migrations = plan_migrations(loads_of(counts, cost=PassCost(0.001, 0.020)), FAST)
    assert {m.target: len(m.rows) for m in migrations} == expected
    assert {m.source for m in migrations} <= {0}


def test_nothing_spreads_where_a_row_costs_nothing() -> None:
    """A replica with eight rows ends as soon as one with one."""
    assert plan_migrations(loads_of((8, 0, 0), cost=FLOOR), FAST) == []


def test_the_longest_row_is_freed_of_the_others() -> None:
    """Limits of 600 and six times 100 passes of 1 + 10 ms a row: 12.6 s. The target takes the short ones."""
    source = load(row(0, left=600), *rows(*range(1, 7), left=100), cost=PassCost(0.001, 0.010))
    [migration] = plan_migrations({0: source, 1: load(cost=source.cost)}, FAST)
    assert {wanted.key[2] for wanted in migration.rows} in ({0}, {1, 2, 3, 4, 5, 6})


def test_a_replica_with_work_that_shows_no_rows_gets_none() -> None:
    loads = loads_of((8, 0), cost=PassCost(0.001, 0.020))
    assert plan_migrations(loads, FAST, closed=[0]) != []
    assert plan_migrations(loads, FAST, closed=[0, 1]) == []


def test_rows_wait_for_a_slot_where_others_have_free_ones() -> None:
    """Ten rows in two slots take 2,500 passes; two replicas with four slots each take 500 and 750."""
    loads = {0: load(*rows(*range(10)), max_rows=2, cost=FLOOR), 1: load(max_rows=4, cost=FLOOR)}
    [migration] = plan_migrations(loads, FAST)
    assert (migration.source, migration.target, len(migration.rows)) == (0, 1, 4)


def test_a_replica_that_has_measured_nothing_is_taken_to_be_like_the_others() -> None:
    loads = loads_of((8, 0), cost=PassCost(0.001, 0.020))
    assert plan_migrations(loads | {1: load(cost=None)}, FAST) == plan_migrations(loads, FAST)


# ---- what it costs ------------------------------------------------------------------------------------------------


def test_rows_of_different_versions_stay_separate() -> None:
    loads = {0: load(row(0)), 1: load(row(1), version=1), 2: load(*rows(2, 3))}
    assert shape(plan_migrations(loads, FAST, (), OTHER_WORK_S)) == [(0, 2, [0])]
    assert plan_migrations({0: loads[0], 1: loads[1]}, FAST, (), OTHER_WORK_S) == []
    assert plan_migrations({0: load(*rows(*range(8))), 1: load(version=1)}, FAST) == []


def test_keys_travel_where_that_holds_up_fewer_passes_than_feeding_again() -> None:
    """99 positions of 46,080 bytes at 1 GB/s, at both ends: 9.1 ms; 100 tokens at 1 ms: 100 ms. At 1 MB/s: 9.1 s. A row
    that is fed again stands still meanwhile: (20 + 100 ms) / 20 ms."""

    def only(loads: dict[int, EngineLoad], copies: CopyCost) -> MigrationRequest:
        [migration] = plan_migrations(loads, copies, (), OTHER_WORK_S)
        [wanted] = migration.rows
        return wanted

    loads = {0: load(row(0), cost=FLOOR), 1: load(*rows(1, 2), cost=FLOOR)}
    assert only(loads, CopyCost(1e9, standstill_s=0.05)) == MigrationRequest((0, 0, 0), True, min_left=3)
    assert only(loads, SLOW) == MigrationRequest((0, 0, 0), False, min_left=6)
    assert not only({0: load(row(0, cached=0)), 1: loads[1]}, CopyCost(1e9)).with_cache, "it has none"
    fast = {0: loads[0], 1: load(*rows(1, 2), cost=FLOOR, prefill_s=1e-6)}
    assert not only(fast, CopyCost(1e9)).with_cache, "it is the target that would feed it"
    unmeasured = {i: load(*one.rows, cost=FLOOR, prefill_s=0.0) for i, one in loads.items()}
    assert only(unmeasured, CopyCost(1e9)).with_cache, "a token of a prompt takes a pass at most: 100 x 20 ms"


def test_rows_that_end_while_they_are_copied_stay() -> None:
    """1,000 positions are copied between 8 passes, and a row stands still for one. The rows go in turn, so the second
    one needs 17, the third one 25."""

    def migrated(*lefts: int) -> list[int]:
        mine = load(*(row(i, left=left, cached=1000, tokens=1001) for i, left in enumerate(lefts)), cost=FLOOR)
        theirs = load(*rows(7, 8, 9, 10, left=50, cached=9000, tokens=9001), cost=FLOOR)  # end before they are copied
        migrations = plan_migrations({0: mine, 1: theirs}, FAST, (), OTHER_WORK_S)
        return [wanted.key[2] for migration in migrations for wanted in migration.rows]

    assert migrated(9, 17, 25) == [0, 1, 2]
    assert migrated(8, 17, 24) == [1, 2]
    assert migrated(9, 16, 24) == [0, 2]


def test_rows_that_are_nearly_done_stay() -> None:
    """Fed again in 120 ms, and a pass takes 20: a row with 5 tokens to go is done first."""
    loads = {0: load(row(0, left=5), row(1, left=100), cost=FLOOR), 1: load(*rows(2, 3, 4), cost=FLOOR)}
    assert shape(plan_migrations(loads, SLOW, (), OTHER_WORK_S)) == [(0, 1, [1])]
    assert plan_migrations({0: load(row(0, left=5)), 1: loads[1]}, SLOW, (), OTHER_WORK_S) == []


def test_slow_copies_keep_rows_where_they_are() -> None:
    """Keys of 20,000 positions and tokens at 50 ms each take longer than what is left."""
    costs = {"cost": PassCost(0.001, 0.020), "prefill_s": 0.05}
    loads = {0: load(*rows(*range(8), cached=20_000, tokens=20_001, left=400), **costs), 1: load(**costs)}  # type: ignore[arg-type]
    assert plan_migrations(loads, FAST) != []
    assert plan_migrations(loads, SLOW) == []


def test_nothing_migrates_before_anything_was_measured() -> None:
    assert plan_migrations(loads_of((1, 3), cost=None), FAST, (), OTHER_WORK_S) == []


# ---- what was reported, and what is under way ---------------------------------------------------------------------


def planner(*counts: int, version: int = 0, node_s: float = OTHER_WORK_S) -> MigrationPlanner:
    """A planner that has heard of replicas with so many rows."""
    made = MigrationPlanner(node_s=node_s)
    for replica, one in loads_of(counts).items():
        made.update_load(replica, EngineLoad(version, 8, one.rows, 46_080, COST, 0.001), 0.0)
    return made


def ordered(made: MigrationPlanner, num: int, waiting: Sequence[int] = (9,)) -> list[tuple[int, Migration]]:
    """Return the orders that `num` replicas get now, while a node of each version in `waiting` waits."""
    return made.next_migrations(range(num), range(num), dict.fromkeys(waiting, 1), 0.0)


def test_only_when_every_replica_has_reported() -> None:
    tails = planner(1, 2)
    assert ordered(tails, 3) == [], "the third may be full"
    [(number, migration)] = ordered(tails, 2)
    assert (number, migration.source, migration.target) == (0, 0, 1)


def test_one_plan_at_a_time() -> None:
    """Rows on their way are in no report, and neither are arrived rows until both replicas have reported."""
    tails = planner(1, 2, 3)
    orders = ordered(tails, 3)
    assert shape([migration for _, migration in orders]) == [(0, 2, [0]), (1, 2, [10, 11])]
    assert ordered(tails, 3) == []
    tails.arrived(0, 1, 0, 0.0, 0.0)
    tails.arrived(1, 2, 0, 0.0, 0.0)
    assert ordered(tails, 3) == []
    tails.update_load(0, load(*rows(0)), 0.0)
    tails.update_load(2, load(*rows(20, 21, 22)), 0.0)
    assert ordered(tails, 3) == []
    tails.update_load(1, load(*rows(10, 11)), 0.0)
    assert len(ordered(tails, 3)) == 2, "nothing was accepted, as far as anybody reports"


def test_rows_that_were_refused_may_be_ordered_again() -> None:
    tails = planner(1, 2)
    [(number, _)] = ordered(tails, 2)
    tails.arrived(number, 0, 0, 0.0, 0.0)
    assert len(ordered(tails, 2)) == 1


def test_no_tail_while_more_can_join() -> None:
    """A node of this version waits for a slot. One of the next version does not: it waits for this tail."""
    assert ordered(planner(1, 2, version=4), 2, [4]) == []
    assert ordered(planner(1, 2, version=4), 2, [5, 4]) == []
    assert len(ordered(planner(1, 2, version=4), 2, [5])) == 1
    assert ordered(planner(1, 2, version=4), 2, []) == [], "nothing waits, and nobody would end sooner"


def test_the_work_that_waits_is_measured() -> None:
    """Nodes of 16 s, two at once: each takes 8 s of a replica, so that (11 + 11 + 8) / 2 > 12 s."""
    tails = planner(2, 2, node_s=0.0)
    tails.concurrent_shards = 2
    assert ordered(tails, 2) == [], "none was seen yet"
    tails.node_took(16.0)
    assert tails.node_s == 16.0
    tails.update_load(0, load(*rows(0, 1)), 0.0)
    assert len(ordered(tails, 2)) == 1
    tails.node_took(4.0)
    assert tails.node_s == 8.0, "the geometric mean"


def test_reports_grow_older() -> None:
    """8 rows with 500 tokens left, 28 ms a pass. 13.9 s later they are nearly done."""
    for now_s, migrations in ((0.0, 1), (13.9, 0)):
        tails = MigrationPlanner()
        tails.update_load(0, load(*rows(*range(8))), 0.0)
        tails.update_load(1, load(), 0.0)
        assert len(tails.next_migrations([0, 1], [0], {}, now_s)) == migrations


def test_a_lost_source_ends_its_migrations_and_must_report_again() -> None:
    tails = planner(1, 2)
    assert ordered(tails, 2)
    tails.replica_lost(0)
    assert ordered(tails, 2) == []
    tails.update_load(0, load(row(5)), 0.0)
    assert [migration.source for _, migration in ordered(tails, 2)] == [0]


def test_a_lost_target_leaves_its_migrations_to_the_source() -> None:
    """The source says when they are over: it has the rows again then."""
    tails = planner(1, 2, 1)
    numbers = [number for number, _ in ordered(tails, 3)]
    tails.replica_lost(1)
    assert tails.next_migrations([0, 2], [0, 2], {9: 1}, 0.0) == []
    for number in numbers:
        tails.arrived(number, 0, 0, 0.0, 0.0)
    assert len(tails.next_migrations([0, 2], [0, 2], {9: 1}, 0.0)) == 1


def test_the_cost_of_copies_is_learnt() -> None:
    """100 MiB for which both ends waited 0.1 s each; two rows stood still for 8 ms together."""
    tails = MigrationPlanner()
    tails.arrived(0, 1, 1000, 1e-6, 1e-6)
    assert tails.copies == CopyCost(), "a few bytes say nothing"
    for _ in range(40):
        tails.arrived(0, 2, 100 * MIB, 0.2, 0.008)
    assert tails.copies.bytes_per_s == pytest.approx(1000 * MIB, rel=1e-3)
    assert tails.copies.standstill_s == pytest.approx(0.004, rel=1e-3)


# ---- three replicas on a clock ------------------------------------------------------------------------------------


RowKey = tuple[int, int, int]


class Played:
    """Replicas whose passes take what `cost` says, and a planner that migrates their rows."""

    def __init__(self, cost: PassCost, limit: int | None, lengths: Sequence[Sequence[int]]) -> None:
        """`lengths`: tokens that each replica's rows will have. `limit`: tokens that each of them may have, as far as
        the planner knows. None: it knows their lengths."""
        self._cost, self._limit = cost, limit
        self._planner = MigrationPlanner()
        self._ends = {(0, i, j): n for i, part in enumerate(lengths) for j, n in enumerate(part)}
        self._here: list[dict[RowKey, int]] = [{(0, i, j): 0 for j in range(len(p))} for i, p in enumerate(lengths)]
        """Tokens of the rows on each replica."""
        self._in_pass: list[list[RowKey]] = [[] for _ in lengths]
        self._leaving: list[list[tuple[int, Migration]]] = [[] for _ in lengths]
        self._events: list[tuple[float, int, int, dict[RowKey, int]]] = []
        """Heap of (time, number, replica, rows that arrive there; none: its pass ends)."""
        self._numbers = itertools.count()

    def makespan(self) -> float:
        """Return the seconds until the last row has ended."""
        now_s = last_s = 0.0
        for replica in range(len(self._here)):
            self._report(replica, 0.0)
            self._begin(replica, 0.0)
        while self._events:
            now_s, _, replica, arrived = heapq.heappop(self._events)
            if arrived:
                self._here[replica] |= arrived
                self._report(replica, now_s)
                if not self._in_pass[replica]:
                    self._begin(replica, now_s)
            elif self._end(replica, now_s):
                last_s = now_s
            for number, migration in self._planner.next_migrations(
                range(len(self._here)), [i for i, rows in enumerate(self._here) if rows], {}, now_s
            ):
                self._leaving[migration.source].append((number, migration))
            if not arrived:
                self._begin(replica, now_s)
        return last_s

    def _begin(self, replica: int, now_s: float) -> None:
        """Send away the rows that are to leave, and begin a pass of the others."""
        here = self._here[replica]
        for number, migration in self._leaving[replica]:
            going = {one.key: here.pop(one.key) for one in migration.rows if one.key in here}
            if going:
                self._push(now_s + CopyCost().standstill_s, migration.target, going)
            self._planner.arrived(number, len(going), 0, 0.0, 0.0)
            self._report(replica, now_s)
        self._leaving[replica].clear()
        self._in_pass[replica] = [*here]
        if here:
            self._push(now_s + self._cost.seconds(len(here)), replica, {})

    def _end(self, replica: int, now_s: float) -> bool:
        """Give each row of the pass a token. Return True if a row has ended."""
        here, ended = self._here[replica], False
        for key in self._in_pass[replica]:
            here[key] += 1
            if here[key] == self._ends[key]:
                del here[key]
                ended = True
        if ended:
            self._report(replica, now_s)
        return ended

    def _push(self, at_s: float, replica: int, arriving: dict[RowKey, int]) -> None:
        heapq.heappush(self._events, (at_s, next(self._numbers), replica, arriving))

    def _report(self, replica: int, now_s: float) -> None:
        known = tuple(
            RowLoad(key, 20 + n, 19 + n, (self._limit or self._ends[key]) - n) for key, n in self._here[replica].items()
        )
        self._planner.update_load(replica, EngineLoad(0, 64, known, 46_080, self._cost, 0.001), now_s)


def best_assignment_s(lengths: Sequence[int], num_replicas: int, cost: PassCost) -> float:
    """Return the shortest makespan of all assignments of rows to replicas."""
    choices = np.array(list(itertools.product(range(num_replicas), repeat=len(lengths) - 1)), np.int8)
    choices = np.hstack([np.zeros((len(choices), 1), np.int8), choices])  # replicas are alike
    known, ends = np.array(lengths), []
    for replica in range(num_replicas):
        on_it = (choices == replica) * known
        ends.append(cost.floor_s * on_it.max(axis=1) + cost.row_s * on_it.sum(axis=1))
    return float(np.max(ends, axis=0).min())


@pytest.mark.parametrize("cost", [PassCost(0.010, 0.001), PassCost(0.010, 0.010), PassCost(0.002, 0.010)])
@pytest.mark.parametrize("seed", range(5))
def test_a_long_tail_ends_as_soon_as_the_best_assignment(cost: PassCost, seed: int) -> None:
    """Three replicas with four rows each, of exponential lengths, the longest ones all on one replica. With limits that
    tell the lengths, all ends within 5 % of the best assignment. With limits that do not, the rows that will be long
    are found out too late for that, but all ends sooner than without migrations."""
    rng = random.Random(seed)
    lengths = sorted(min(1000, 20 + int(rng.expovariate(1 / 150))) for _ in range(12))
    parts = [lengths[:4], lengths[4:8], lengths[8:]]
    best = best_assignment_s(lengths, 3, cost)
    home = max(cost.floor_s * max(part) + cost.row_s * sum(part) for part in parts)
    known, unknown = (Played(cost, limit, parts).makespan() for limit in (None, 1000))
    assert known <= 1.05 * best
    assert unknown < home
