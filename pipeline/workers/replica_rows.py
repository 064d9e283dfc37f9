"""The rows of the shards that run in a replica: which are elsewhere, and what `row_transfer` does with them.

May import storage and stages.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

from stages.engines.migration import IncomingRows, MigratedRow, key_of
from stages.engines.protocol import Completion
from stages.engines.row_loads import EngineLoad, MigrationRequest, RowKey
from storage.address import Address


class VersionedMigration(Protocol):
    """An engine with versions, whose rows can migrate."""

    def watch_load(self, below: int, listener: Callable[[EngineLoad], None]) -> None: ...

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]: ...

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> AbstractContextManager[IncomingRows]: ...

    def deliver(self, ticket: int, completion: Completion) -> None: ...

    def give_back(self, tickets: Collection[int]) -> None: ...

    def wanted(self, tickets: Collection[int]) -> set[int]: ...


@dataclass(eq=False)
class Shard:
    """A node whose rows are being sampled."""

    address: Address
    keys: frozenset[RowKey]
    finished_elsewhere: int = 0


class ReplicaRows:
    """Owns what is known of the rows of the shards that run in this process."""

    def __init__(self, engine: VersionedMigration, below: int, silence_s: float) -> None:
        """`below`: while there are fewer rows here, they are reported to the driver. `silence_s`: how long a replica
        that accepted rows may say nothing before it counts as lost."""
        self.silence_s = silence_s
        self._engine, self._below = engine, below
        self._lock = threading.Lock()
        """Guards what follows. Nothing of the engine is called under it."""
        self._shards: list[Shard] = []
        self._here: frozenset[RowKey] = frozenset()
        self._elsewhere: dict[int, RowKey] = {}
        """Rows that migrated to other replicas, by ticket."""

    @contextmanager
    def shard(self, address: Address, keys: Iterable[RowKey]) -> Iterator[Shard]:
        """A shard that runs until the block ends."""
        shard = Shard(address, frozenset(keys))
        with self._lock:
            self._shards.append(shard)
        try:
            yield shard
        finally:
            with self._lock:
                self._shards.remove(shard)

    @property
    def away(self) -> tuple[Address, ...]:
        """Nodes whose unfinished rows are all elsewhere."""
        with self._lock:
            gone = set(self._elsewhere.values())
            return tuple(s.address for s in self._shards if s.keys & gone and not s.keys & self._here)

    def watch(self, report: Callable[[EngineLoad, tuple[Address, ...]], None]) -> None:
        """From now on the rows here are reported while they are few, with the nodes that have none here."""

        def listen(here: EngineLoad) -> None:
            with self._lock:
                self._here = frozenset(row.key for row in here.rows)
            report(here, self.away)

        self._engine.watch_load(self._below, listen)

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        """Takes rows out of the engine, for another replica."""
        migrated = self._engine.migrate_out(rows)
        with self._lock:
            self._elsewhere.update((one.ticket, key_of(one.request)) for one in migrated)
            self._here -= set(self._elsewhere.values())
        return migrated

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> AbstractContextManager[IncomingRows]:
        """Rows of another replica, here until the block ends. Raises RequestError for what cannot be accepted."""
        return self._engine.migrate_in(migrated)

    def deliver(self, ticket: int, completion: Completion) -> None:
        """A row was finished elsewhere."""
        with self._lock:
            key = self._elsewhere.pop(ticket, None)
            for shard in self._shards:
                shard.finished_elsewhere += key in shard.keys
        self._engine.deliver(ticket, completion)

    def give_back(self, tickets: Collection[int]) -> None:
        """These rows go on here after all."""
        with self._lock:
            for ticket in tickets:
                self._elsewhere.pop(ticket, None)
        self._engine.give_back(tickets)

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """Those that somebody here still waits for."""
        return self._engine.wanted(tickets)
