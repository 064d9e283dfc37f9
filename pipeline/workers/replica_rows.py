"""Track the rows of the shards that run in a replica, including rows that migrated to other replicas.

engine (`MigratingEngine`) ◄── ReplicaRows: which shard, which version ◄── row_migration: sends and receives rows
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

from pipeline.workers.versioned_engine import VersionedEngine
from stages.engines.embedded.migration import AcceptedRows, CopiedPart, MigratedRow, MigratingEngine, key_of
from stages.engines.protocol import Completion
from stages.engines.row_loads import EngineLoad, MigrationRequest, RowKey
from storage.address import Address


@dataclass(eq=False)
class Shard:
    """A node of the run's graph: a shard of rows that this replica samples."""

    address: Address
    keys: frozenset[RowKey]
    finished_elsewhere: int = 0


class ArrivingRow:
    """Owns a row that another replica hands to this one. First copies of its keys and values arrive, while the row
    still decodes in the other replica. Then the row itself is handed over and decodes here."""

    def __init__(self, engine: MigratingEngine) -> None:
        self._engine = engine
        self._parts_of: RowKey | None = None
        self._accepted: AcceptedRows | None = None

    def write_in(self, part: CopiedPart) -> float:
        """Store copied keys and values of the arriving row in this engine. Return the seconds for which this kept the
        engine from computing. Raises the errors of `MigratingEngine.write_in`."""
        self._parts_of = part.key
        return self._engine.write_in(part)

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> AcceptedRows:
        """See `MigratingEngine.migrate_in`."""
        self._accepted = self._engine.migrate_in(migrated)
        return self._accepted

    def close(self) -> None:
        """Drop the row, or its copied parts if the row has not arrived."""
        if self._accepted is not None:
            self._accepted.close()
        elif self._parts_of is not None:
            self._engine.drop_parts(self._parts_of)


class ReplicaRows:
    """Tracks which rows of this process's shards decode here and which have migrated to other replicas. All migrations
    of rows to and from this replica's engine are made through this object."""

    def __init__(self, engine: VersionedEngine, timeout_s: float) -> None:
        """`timeout_s`: seconds without a message after which a replica that accepted rows counts as lost."""
        assert engine.migratable is not None, "this engine's rows cannot migrate"
        self._engine, self._rows = engine, engine.migratable
        self.timeout_s = timeout_s
        self._lock = threading.Lock()
        """Guards the fields below. No method of the engine is called while it is held."""
        self._shards: list[Shard] = []
        self._here: frozenset[RowKey] = frozenset()
        self._elsewhere: dict[int, RowKey] = {}
        """Ticket -> row that migrated to another replica. A ticket is the number that the engine gave a row when the
        row left."""

    @contextmanager
    def shard(self, address: Address, keys: Iterable[RowKey]) -> Iterator[Shard]:
        """Register a shard for the duration of the block."""
        shard = Shard(address, frozenset(keys))
        with self._lock:
            self._shards.append(shard)
        try:
            yield shard
        finally:
            with self._lock:
                self._shards.remove(shard)

    @property
    def waiting(self) -> tuple[Address, ...]:
        """The nodes that only wait for rows on other replicas."""
        with self._lock:
            gone = set(self._elsewhere.values())
            return tuple(s.address for s in self._shards if s.keys & gone and not s.keys & self._here)

    def watch(self, report: Callable[[EngineLoad, tuple[Address, ...]], None]) -> None:
        """From now on call `report(load, self.waiting)` whenever the engine reports its load. This method must be
        called before rows migrate."""

        def listen(here: EngineLoad) -> None:
            self._engine.rows_left()  # all unfinished rows of a call may now be on other replicas
            with self._lock:
                self._here = frozenset(row.key for row in here.rows)
            report(here, self.waiting)

        self._rows.watch_load(listen)

    @property
    def version(self) -> int:
        """Version of the weights that the rows here continue with."""
        return self._rows.version

    def copy_out(self, key: RowKey, start: int) -> CopiedPart | None:
        """Return a copy of a row's keys and values from position `start` on, or None if the row cannot be copied. See
        `MigratingEngine.copy_out`."""
        return self._rows.copy_out(key, start)

    def migrate_out(self, rows: Collection[MigrationRequest], copied: Mapping[RowKey, CopiedPart]) -> list[MigratedRow]:
        """Take rows out of the engine for another replica (see `MigratingEngine.migrate_out`)."""
        migrated = self._rows.migrate_out(rows, copied)
        self._engine.rows_left()
        with self._lock:
            self._elsewhere.update((one.ticket, key_of(one.request)) for one in migrated)
            self._here -= set(self._elsewhere.values())
        return migrated

    @contextmanager
    def arriving(self, version: int) -> Iterator[ArrivingRow]:
        """Return a context in which a row from another replica arrives and continues here. When the block ends, a row
        that is not finished is stopped. Raises RequestError if rows of this version cannot continue here."""
        with self._engine.resident({version}), closing(ArrivingRow(self._rows)) as arriving:
            yield arriving

    def deliver(self, ticket: int, completion: Completion) -> None:
        """Hand over the completion of a row that another replica has finished. The completion goes to the caller that
        waits for the row."""
        with self._lock:
            key = self._elsewhere.pop(ticket, None)
            for shard in self._shards:
                shard.finished_elsewhere += key in shard.keys
        self._rows.deliver(ticket, completion)

    def give_back(self, tickets: Collection[int]) -> None:
        """Take back rows that were handed to another replica, and continue them here. The other replica has refused the
        rows, cannot finish them, or is lost.

        A row that no caller waits for is dropped. If the engine's weights have changed since a row left, the row's
        caller gets RowsLost.
        """
        with self._lock:
            for ticket in tickets:
                self._elsewhere.pop(ticket, None)
        self._rows.give_back(tickets)

    def tickets_awaited(self, tickets: Collection[int]) -> set[int]:
        """Return those of `tickets` whose rows are in other replicas and whose callers still wait."""
        return self._rows.tickets_awaited(tickets)
