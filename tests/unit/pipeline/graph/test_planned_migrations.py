"""The choice of rows that migrate: an oracle by hand, and properties for any load."""

from __future__ import annotations

import random

import pytest

from pipeline.graph.migration import BANDWIDTH_PRIOR, HANDLING_S, Migration, MigrationPlanner, plan_migrations
from stages.engines.row_loads import EngineLoad, MigrationRequest, RowLoad

MIB = 1 << 20
SLOW = 1e6
"""Bytes per second."""


def row(number: int, left: int = 500, cached: int = 99, tokens: int = 100) -> RowLoad:
    return RowLoad((0, 0, number), tokens, cached, left)


def load(
    *rows: RowLoad, version: int = 0, max_rows: int = 8, pass_s: float = 0.02, prefill_s: float = 0.001
) -> EngineLoad:
    """46 KiB a position, as SmolLM2-135M has."""
    return EngineLoad(version, max_rows, rows, 46_080, pass_s, prefill_s)


def rows(*numbers: int, **more: int) -> list[RowLoad]:
    return [row(number, **more) for number in numbers]


def shape(moves: list[Migration]) -> list[tuple[int, int, list[int]]]:
    return [(move.source, move.target, [wanted.key[2] for wanted in move.rows]) for move in moves]


# ---- which replicas -----------------------------------------------------------------------------------------------


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
    loads = {i: load(*rows(*range(10 * i, 10 * i + n)), max_rows=max_rows) for i, n in enumerate(counts)}
    assert [(m.source, m.target, len(m.rows)) for m in plan_migrations(loads, 1e9, below=100)] == expected


def test_only_below_the_threshold() -> None:
    loads = {0: load(*rows(0, 1)), 1: load(*rows(10, 11, 12))}
    assert plan_migrations(loads, 1e9, below=5) == []
    assert shape(plan_migrations(loads, 1e9, below=6)) == [(0, 1, [0, 1])]


def test_rows_of_different_versions_stay_separate() -> None:
    loads = {0: load(row(0)), 1: load(row(1), version=1), 2: load(*rows(2, 3))}
    assert shape(plan_migrations(loads, 1e9, below=100)) == [(0, 2, [0])]
    assert plan_migrations({0: loads[0], 1: loads[1]}, 1e9, below=100) == []


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
            moves = plan_migrations(loads, 1e9, below=1000)
            sources, targets = {m.source for m in moves}, {m.target for m in moves}
            assert not sources & targets
            assert all(held[i] for i in sources | targets)
            for move in moves:
                going = [r for r in held[move.source] if r.key in {w.key for w in move.rows}]
                assert len(going) == len(move.rows)
                for one in going:
                    left.setdefault(one.key, set()).add(move.source)
                    assert move.target not in left[one.key]
                held[move.source] = [r for r in held[move.source] if r not in going]
                held[move.target] = held[move.target] + going
            assert all(not held[i] for i in sources)
            assert all(len(r) <= max_rows for r in held.values())
        busy = sum(bool(r) for r in held.values())
        total = sum(len(r) for r in held.values())
        assert plan_migrations({i: load(*r, max_rows=max_rows) for i, r in held.items()}, 1e9, below=1000) == []
        assert busy <= max(1, 2 * -(-total // max_rows)), "two half-empty replicas would have become one"


# ---- what it costs ------------------------------------------------------------------------------------------------


def test_keys_travel_where_that_is_sooner_than_feeding_again() -> None:
    """99 positions of 46,080 bytes over 1 GB/s: 4.6 ms; 100 tokens at 1 ms: 100 ms. Over 1 MB/s: 4.6 s."""

    def only(loads: dict[int, EngineLoad], bytes_per_s: float) -> MigrationRequest:
        [move] = plan_migrations(loads, bytes_per_s, below=100)
        [wanted] = move.rows
        return wanted

    loads = {0: load(row(0)), 1: load(*rows(1, 2))}
    assert only(loads, 1e9) == MigrationRequest((0, 0, 0), True, min_left=-(-(HANDLING_S + 99 * 46_080 / 1e9) // 0.02))
    assert only(loads, SLOW) == MigrationRequest((0, 0, 0), False, min_left=6)  # (20 + 100 ms) / 20 ms
    assert not only({0: load(row(0, cached=0)), 1: loads[1]}, 1e9).with_cache, "it has none"
    fast = {0: loads[0], 1: load(*rows(1, 2), prefill_s=1e-6)}
    assert not only(fast, 1e9).with_cache, "it is the target that would feed it"
    unmeasured = {0: load(row(0), prefill_s=0.0), 1: load(*rows(1, 2), prefill_s=0.0)}
    assert only(unmeasured, 1e9).with_cache, "a token of a prompt takes a pass at most: 100 x 20 ms"


def test_rows_that_are_nearly_done_stay() -> None:
    """Fed again in 120 ms, and a pass takes 20: a row with 5 tokens to go is done first."""
    loads = {0: load(row(0, left=5), row(1, left=6)), 1: load(*rows(2, 3, 4))}
    assert shape(plan_migrations(loads, SLOW, below=100)) == [(0, 1, [1])]
    assert plan_migrations({0: load(row(0, left=5)), 1: loads[1]}, SLOW, below=100) == []


def test_nothing_moves_before_anything_was_measured() -> None:
    assert plan_migrations({0: load(row(0), pass_s=0.0), 1: load(*rows(1, 2))}, 1e9, below=100) == []


# ---- what was reported, and what is under way ---------------------------------------------------------------------


def test_only_when_every_replica_has_reported() -> None:
    tails = MigrationPlanner(below=100)
    tails.update_load(0, load(row(0)))
    tails.update_load(1, load(*rows(1, 2)))
    assert tails.next_migrations([0, 1, 2], []) == [], "the third may be full"
    [(number, move)] = tails.next_migrations([0, 1], [])
    assert (number, move.source, move.target) == (0, 0, 1)


def test_one_plan_at_a_time() -> None:
    """Rows on their way are in no report."""
    tails = MigrationPlanner(below=100)
    tails.update_load(0, load(row(0)))
    tails.update_load(1, load(*rows(1, 2)))
    tails.update_load(2, load(*rows(3, 4, 5)))
    orders = tails.next_migrations([0, 1, 2], [])
    assert shape([move for _, move in orders]) == [(0, 2, [0]), (1, 2, [1, 2])]
    assert tails.next_migrations([0, 1, 2], []) == []
    tails.arrived(0, 0, 0.0)
    assert tails.next_migrations([0, 1, 2], []) == []
    tails.arrived(1, 0, 0.0)
    assert len(tails.next_migrations([0, 1, 2], [])) == 2, "nothing was accepted, as far as anybody reports"


def test_no_tail_while_more_can_join() -> None:
    """A node of this version waits for a slot. One of the next version does not: it waits for this tail."""
    tails = MigrationPlanner(below=100)
    tails.update_load(0, load(row(0), version=4))
    tails.update_load(1, load(*rows(1, 2), version=4))
    assert tails.next_migrations([0, 1], [4]) == []
    assert tails.next_migrations([0, 1], [5, 4]) == []
    assert len(tails.next_migrations([0, 1], [5])) == 1


def test_a_lost_source_ends_its_moves_and_must_report_again() -> None:
    tails = MigrationPlanner(below=100)
    tails.update_load(0, load(row(0)))
    tails.update_load(1, load(*rows(1, 2)))
    assert tails.next_migrations([0, 1], [])
    tails.replica_lost(0)
    assert tails.next_migrations([0, 1], []) == []
    tails.update_load(0, load(row(5)))
    assert [move.source for _, move in tails.next_migrations([0, 1], [])] == [0]


def test_a_lost_target_leaves_its_moves_to_the_source() -> None:
    """The source says when they are over: it has the rows again then."""
    tails = MigrationPlanner(below=100)
    for replica, numbers in enumerate(([0], [1, 2], [3])):
        tails.update_load(replica, load(*rows(*numbers)))
    numbers = [number for number, _ in tails.next_migrations([0, 1, 2], [])]
    tails.replica_lost(1)
    assert tails.next_migrations([0, 2], []) == []
    for number in numbers:
        tails.arrived(number, 0, 0.0)
    assert len(tails.next_migrations([0, 2], [])) == 1


def test_bandwidth_is_learnt() -> None:
    tails = MigrationPlanner(below=100)
    tails.arrived(0, 1000, 1e-6)
    assert tails.bytes_per_s == BANDWIDTH_PRIOR, "a few bytes say nothing"
    for _ in range(20):
        tails.arrived(0, 100 * MIB, 0.1)
    assert tails.bytes_per_s == pytest.approx(1000 * MIB, rel=1e-3)
