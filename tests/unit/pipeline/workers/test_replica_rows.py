"""A replica's versions and shards while rows are elsewhere: who may load what, and which shards only wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from pipeline.workers.replica_rows import ReplicaRows
from pipeline.workers.versioned_engine import Clock, VersionedEngine
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.migration import key_of
from stages.engines.protocol import Completion, Request, RequestError, RowsLost
from stages.engines.row_loads import EngineLoad, MigrationRequest
from stages.models.config import SamplingConfig
from stages.models.spec import RANDOM_TINY
from storage.address import Address
from storage.weights import WeightBoard
from tests.support.waiting import until

pytestmark = pytest.mark.timeout(60)
SHARD = Address("generate", 3, 1)


@pytest.fixture
def board(tmp_path: Path) -> Iterator[WeightBoard]:
    with WeightBoard(tmp_path / "board") as board:
        for version in range(3):
            board.publish(version, {"model.norm.weight": np.full(64, 1 + version, np.float32)})
        yield board


@pytest.fixture
def replicas(board: WeightBoard) -> Iterator[tuple[VersionedEngine, VersionedEngine]]:
    settings = EngineConfig(max_rows=4, kv_budget_mb=16)
    with (
        closing(
            VersionedEngine(build_embedded(RANDOM_TINY, settings, max_seq=240, threads=1, migratable=True), board)
        ) as one,
        closing(
            VersionedEngine(build_embedded(RANDOM_TINY, settings, max_seq=240, threads=1, migratable=True), board)
        ) as other,
    ):
        yield one, other


def requests(num: int, version: int, new: int = 230) -> list[Request]:
    """Return requests of some hundred passes, so that the rows are still there when something happens to them."""
    settings = SamplingConfig(new, new)
    return [Request(i, 1, 3, (5, 6 + i), version, settings) for i in range(num)]


def run(engine: VersionedEngine, rows: list[Request], inside: threading.Event) -> dict[int, Completion]:
    with engine.engine_at(rows[0].version, Clock()) as inner:
        results = inner.generate(rows)
        inside.set()
        return {c.row: c for c in results}


def rows_of(engine: VersionedEngine) -> ReplicaRows:
    rows = ReplicaRows(engine, timeout_s=1.0)
    rows.watch(lambda load, waiting: None)
    return rows


def test_the_next_version_loads_with_all_rows_elsewhere(replicas: tuple[VersionedEngine, VersionedEngine]) -> None:
    """The rows come back unchanged; until then the target keeps their version."""
    source, target = replicas
    leaving = rows_of(source)
    arriving = rows_of(target)
    rows, inside = requests(3, version=0), threading.Event()
    expected = run(target, rows, threading.Event())
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, source, rows, inside)
        assert inside.wait(60)
        moved = leaving.migrate_out([MigrationRequest(key_of(r), True) for r in rows], {})
        assert len(moved) == 3
        newer = run(source, requests(2, version=1, new=4), threading.Event())  # would wait for ever if they counted
        assert {v for c in newer.values() for v in c.versions.tolist()} == {1}
        with arriving.arriving(0) as one:
            incoming = one.migrate_in(moved)
            assert (target._inside, target._version) == (1, 0)
            for ticket, completion in incoming:
                assert completion is not None
                leaving.deliver(ticket, completion)
        got = running.result(timeout=60)
    assert all(got[row].tokens.tolist() == c.tokens.tolist() for row, c in expected.items())
    assert (source._inside, target._inside) == (0, 0)


def test_one_row_at_home_keeps_the_version(replicas: tuple[VersionedEngine, VersionedEngine]) -> None:
    source, _ = replicas
    leaving = rows_of(source)
    rows, inside = requests(2, version=0), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(run, source, rows, inside)
        assert inside.wait(60)
        [moved] = leaving.migrate_out([MigrationRequest(key_of(rows[0]), True)], {})
        newer = threads.submit(run, source, requests(1, version=1, new=4), threading.Event())
        until(lambda: source._version == 1)  # the other row has finished at home
        assert newer.result(timeout=60)[0].versions.tolist() == [1] * 4
        assert not running.done()
        leaving.give_back([moved.ticket])
        with pytest.raises(RowsLost):
            running.result(timeout=60)


def test_rows_of_another_version_are_refused(replicas: tuple[VersionedEngine, VersionedEngine]) -> None:
    source, target = replicas
    leaving = rows_of(source)
    arriving = rows_of(target)
    rows, inside = requests(1, version=0), threading.Event()
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(run, source, rows, inside)
        assert inside.wait(60)
        moved = leaving.migrate_out([MigrationRequest(key_of(rows[0]), True)], {})
        run(target, requests(1, version=2, new=2), threading.Event())
        with pytest.raises(RequestError, match="2 is resident"), arriving.arriving(0):
            pytest.fail("they were accepted")
        assert target._inside == 0
        leaving.give_back([one.ticket for one in moved])
        assert len(running.result(timeout=60)[0].tokens) == 230


def test_parts_of_a_row_keep_the_version_until_it_has_come(replicas: tuple[VersionedEngine, VersionedEngine]) -> None:
    """Their source is lost before the row comes: its blocks are free again, and the next version may load."""
    source, target = replicas
    leaving, arriving = rows_of(source), rows_of(target)
    [row], inside = requests(1, version=0), threading.Event()
    run(target, requests(1, version=0, new=2), threading.Event())
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(run, source, [row], inside)
        assert inside.wait(60)
        part = until(lambda: (found := leaving.copy_out(key_of(row), 0)) and found.cache is not None and found)
        with arriving.arriving(leaving.version) as one:
            one.write_in(part)
            newer = threads.submit(run, target, requests(1, version=1, new=2), threading.Event())
            assert (target._inside, target._version) == (1, 0)
            assert arriving._rows._scheduler.pool.num_used == part.stop // 16
        assert newer.result(timeout=60)[0].versions.tolist() == [1, 1]
        assert arriving._rows._scheduler.pool.num_used == 0
        assert len(running.result(timeout=60)[0].tokens) == 230


def test_unawaited_incoming_rows_let_the_next_version_in(replicas: tuple[VersionedEngine, VersionedEngine]) -> None:
    source, target = replicas
    leaving = rows_of(source)
    arriving = rows_of(target)
    rows, inside = requests(2, version=0), threading.Event()
    run(target, requests(1, version=0, new=2), threading.Event())
    with ThreadPoolExecutor(2) as threads:
        running = threads.submit(run, source, rows, inside)
        assert inside.wait(60)
        moved = leaving.migrate_out([MigrationRequest(key_of(r), False) for r in rows], {})
        with arriving.arriving(0) as one:
            incoming = one.migrate_in(moved)
            newer = threads.submit(run, target, requests(1, version=1, new=2), threading.Event())
            incoming.close()
            assert list(incoming) == []
        assert newer.result(timeout=60)[0].versions.tolist() == [1, 1]
        leaving.give_back([one.ticket for one in moved])
        assert len(running.result(timeout=60)) == 2


def test_shards_that_only_wait_are_known(replicas: tuple[VersionedEngine, VersionedEngine]) -> None:
    """The driver gives their slots to others, and learns how many of their rows others finished."""
    source, target = replicas
    run(target, requests(1, version=0, new=2), threading.Event())
    told: list[tuple[EngineLoad, tuple[Address, ...]]] = []
    rows = ReplicaRows(source, timeout_s=1.0)
    rows.watch(lambda load, waiting: told.append((load, waiting)))
    asked, inside = requests(3, version=0), threading.Event()
    with ThreadPoolExecutor(1) as thread, rows.shard(SHARD, map(key_of, asked)) as shard:
        running = thread.submit(run, source, asked, inside)
        assert inside.wait(60)
        until(lambda: bool(told) and len(told[-1][0].rows) == 3)
        assert told[-1][1] == ()
        first = rows.migrate_out([MigrationRequest(key_of(asked[0]), True)], {})
        assert rows.waiting == ()
        others = rows.migrate_out([MigrationRequest(key_of(r), True) for r in asked[1:]], {})
        assert rows.waiting == (SHARD,)
        until(lambda: told[-1] == (told[-1][0], (SHARD,)) and not told[-1][0].rows)
        rows.give_back([one.ticket for one in others])
        until(lambda: told[-1][1] == ())
        with rows_of(target).arriving(0) as one:
            for ticket, completion in one.migrate_in(first):
                rows.deliver(ticket, completion)  # type: ignore[arg-type]
        running.result(timeout=60)
        assert shard.finished_elsewhere == 1
    assert rows.waiting == ()
