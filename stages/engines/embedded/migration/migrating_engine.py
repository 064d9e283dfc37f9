"""An engine whose rows may go on in another one: rows leave and come between two batches; who hears of it.

May import numpy, torch (for types), stages.engines.protocol; of stages.engines.embedded engine, rows and scheduler.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.migration.migrated_rows import (
    AcceptedRows,
    LoadWatch,
    OutgoingRows,
    Pace,
    engine_load,
    may_move,
)
from stages.engines.embedded.migration.packing import check_migrated, pack_row, unpack_row
from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.embedded.scheduler import Chunk
from stages.engines.migration import MigratedRow, key_of
from stages.engines.protocol import Capabilities, Completion, EngineStats, Request, RowsLost
from stages.engines.row_loads import EngineLoad, MigrationRequest


class MigratingEngine:
    """Owns an engine and the rows that have left it; implements `GenerationEngine` and `MigratableRows`, and is the
    engine's observer. What is kept here is touched under the engine's lock."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        """`engine`: closed with this one."""
        self._engine = engine
        self._outgoing, self._pace = OutgoingRows(), Pace()
        self._watch: LoadWatch | None = None
        self._num_out = self._num_in = 0
        """Rows that left and came, since `stats` was last called."""
        engine.watch_with(self)

    # ---- `GenerationEngine` ----

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def capabilities(self) -> Capabilities:
        return self._engine.capabilities

    @property
    def kernels(self) -> str:
        """Which kernels run."""
        return self._engine.kernels

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """See `EmbeddedEngine`. The iterator raises RowsLost for a row that left and cannot be finished any more."""
        return self._engine.generate(requests)

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `EmbeddedEngine`; rows that have left are not waited for."""
        self._engine.load_weights(version, tensors)

    def sleep(self) -> None:
        self._engine.sleep()

    def wake(self) -> None:
        self._engine.wake()

    def stats(self) -> EngineStats:
        with self._engine.lock:
            num_out, num_in, self._num_out, self._num_in = self._num_out, self._num_in, 0, 0
            return replace(self._engine.stats(), rows_given=num_out, rows_taken=num_in)

    def close(self) -> None:
        self._engine.close()

    # ---- `MigratableRows` ----

    @property
    def num_calls_migrated(self) -> int:
        """See `MigratableRows`."""
        with self._engine.lock:
            return self._outgoing.num_calls

    def watch_load(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        """See `MigratableRows`. What the listener raises stops the engine."""
        with self._engine.lock:
            self._watch = LoadWatch(below, listener)
            self._engine.lock.notify_all()

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        """See `MigratableRows`. A row is copied whole before it leaves. Raises RuntimeError if the engine has
        stopped."""
        migrated = []
        asked_for = {one.key: one for one in rows}
        with self._engine.between_batches():
            for row in self._engine.rows_here():
                asked = asked_for.get(key_of(row.request))
                if asked is None or row.num_left < asked.min_left or row.unwanted:
                    continue
                cache = self._engine.take_out(row, asked.with_cache)
                version = self._engine.version
                migrated.append(pack_row(row, self._outgoing.leave(row, version), version, cache))
            self._num_out += len(migrated)
        return migrated

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> AcceptedRows:
        """See `MigratableRows`. Raises RuntimeError if the engine is asleep or has stopped."""
        for one in migrated:
            self._engine.check(one.request)
        call = GenerateCall(queue.SimpleQueue(), threading.Event())
        with self._engine.between_batches():
            self._engine.check_awake()
            for one in migrated:
                check_migrated(one, self._engine.version, self._engine.cache_shape)
            rows = {unpack_row(one, call, self._engine.eos_ids): one for one in migrated}
            for row, one in rows.items():
                self._engine.put_in(row, one.cache)
            self._num_in += len(rows)
        return AcceptedRows(call, {row: one.ticket for row, one in rows.items()})

    def deliver(self, ticket: int, completion: Completion) -> None:
        """See `MigratableRows`."""
        with self._engine.lock:
            left = self._outgoing.back(ticket)
            if left is not None:
                left[0].call.results.put((left[0], completion))

    def give_back(self, tickets: Collection[int]) -> None:
        """See `MigratableRows`."""
        with self._engine.lock:
            for left in map(self._outgoing.back, self._outgoing.wanted(tickets)):
                assert left is not None
                row, version = left
                if self._engine.has_stopped:
                    row.call.results.put(None)
                elif version == self._engine.version:
                    self._engine.take_back(row)
                else:
                    row.call.results.put((row, self._lost(row)))

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """See `MigratableRows`."""
        with self._engine.lock:
            return self._outgoing.wanted(tickets)

    def _lost(self, row: Row) -> RowsLost:
        return RowsLost(
            f"row {row.request.row} came back unfinished, and version {row.request.version} of the weights is gone: "
            f"version {self._engine.version} is resident"
        )

    # ---- `EngineObserver` ----

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """See `EngineObserver`."""
        self._pace.observe(chunks, seconds)

    def wants_report(self, num_rows: int) -> bool:
        """See `EngineObserver`."""
        return self._watch is not None and self._watch.due(num_rows, self._pace)

    def report(self, rows: Collection[Row]) -> None:
        """See `EngineObserver`."""
        num_rows = sum(map(may_move, rows))
        if self._watch is not None and self._watch.due(num_rows, self._pace):
            engine = self._engine
            self._watch.notify(engine_load(rows, engine.version, engine.slots, engine.cache_shape, self._pace))

    def stopped(self) -> None:
        """See `EngineObserver`: those who wait for rows that have left hear of it."""
        for row in self._outgoing.rows:
            row.call.results.put(None)
