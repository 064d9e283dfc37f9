"""What an engine keeps for rows that move: who is away, who came, how fast it is, and whom it tells.

Everything here is touched under the engine's lock, `AcceptedRows` apart. May import numpy and stages.engines.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import count

import numpy as np

from stages.engines.embedded.kernels.paging import blocks_for
from stages.engines.embedded.migration.load import EngineLoad, MigrationRequest, RowLoad
from stages.engines.embedded.migration.protocol import MigratedRow, key_of, pack_row
from stages.engines.embedded.rows import Call, Row
from stages.engines.embedded.runner import Runner
from stages.engines.embedded.scheduler import Chunk, Scheduler
from stages.engines.protocol import Completion

_LEARNING_RATE = 0.2
_BULK_TOKENS = 8
"""A pass that feeds fewer tokens of prompts says little about what one costs."""


class OutgoingRows:
    """Owns the rows that are away, by ticket, until they are delivered or given back."""

    def __init__(self) -> None:
        self._away: dict[int, tuple[Row, int]] = {}
        """With the version of the weights that it left."""
        self._tickets = count()

    @property
    def rows(self) -> list[Row]:
        return [row for row, _ in self._away.values()]

    @property
    def num_calls(self) -> int:
        """Calls that have rows away and none here."""
        return len({row.call for row in self.rows if row.call.num_here == 0})

    def leave(self, row: Row, version: int) -> int:
        """Its ticket."""
        ticket = next(self._tickets)
        self._away[ticket] = row, version
        row.call.num_here -= 1
        return ticket

    def back(self, ticket: int) -> tuple[Row, int] | None:
        """The row, and the version that it left; None: it is not away."""
        return self._away.pop(ticket, None)

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """Those that somebody waits for; the others are forgotten."""
        for ticket in tickets:
            if ticket in self._away and self._away[ticket][0].unwanted:
                del self._away[ticket]
        return self._away.keys() & set(tickets)


class AcceptedRows:
    """Owns rows that came from another engine, until they are finished; implements `IncomingRows`."""

    def __init__(self, call: Call, tickets: Mapping[Row, int]) -> None:
        self._call = call
        self._tickets = dict(tickets)

    def __iter__(self) -> Iterator[tuple[int, Completion | None]]:
        while self._tickets:
            result = self._call.results.get()
            if result is None:
                raise RuntimeError("the engine has stopped")
            row, completion = result
            if row in self._tickets:
                yield self._tickets.pop(row), completion

    def drop(self, tickets: Iterable[int]) -> None:
        for ticket in set(tickets):
            for row in [row for row, number in self._tickets.items() if number == ticket]:
                row.dropped = True
                self._tickets.pop(row, None)
                self._call.results.put((row, None))  # wakes whoever iterates

    def close(self) -> None:
        self._call.abandoned.set()
        self.drop(list(self._tickets.values()))


class Pace:
    """Owns running means of what passes take."""

    def __init__(self) -> None:
        self.pass_s = 0.0
        self.prefill_s = 0.0

    def observe(self, chunks: Collection[Chunk], seconds: float) -> None:
        fed = sum(chunk.count for chunk in chunks if not chunk.decodes)
        if not fed:
            self.pass_s += (seconds - self.pass_s) * (_LEARNING_RATE if self.pass_s else 1.0)
        elif fed >= _BULK_TOKENS:
            decoding = any(chunk.decodes for chunk in chunks)
            each = max(seconds - (self.pass_s if decoding else 0.0), 0.1 * seconds) / fed
            self.prefill_s += (each - self.prefill_s) * (_LEARNING_RATE if self.prefill_s else 1.0)


class LoadWatch:
    """Owns whom to tell of the rows in flight, and what was told last: how many, and whether a pass had been timed."""

    def __init__(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        self._below, self._listener = below, listener
        self._told: tuple[int, bool] | None = None

    def due(self, num_rows: int, pace: Pace) -> bool:
        if self._told is None:
            return True
        return (num_rows, pace.pass_s > 0) != self._told and min(num_rows, self._told[0]) < self._below

    def tell(self, here: EngineLoad) -> None:
        self._told = len(here.rows), here.pass_s > 0
        self._listener(here)


def engine_load(rows: Iterable[Row], version: int, slots: int, runner: Runner, pace: Pace) -> EngineLoad:
    layers, heads, dim = runner.cache_shape
    return EngineLoad(
        version=version,
        slots=slots,
        rows=tuple(RowLoad(key_of(r.request), len(r.tokens), r.num_cached, r.num_left) for r in rows if not r.unwanted),
        position_bytes=2 * layers * heads * dim * np.dtype(np.float32).itemsize,
        pass_s=pace.pass_s,
        prefill_s=pace.prefill_s,
    )


def take_out(
    scheduler: Scheduler,
    runner: Runner,
    inbox: list[Row],
    wanted: Collection[MigrationRequest],
    departures: OutgoingRows,
    version: int,
) -> list[tuple[Row, MigratedRow]]:
    """Rows out of queue and batch, between two passes. A row is copied whole before it leaves."""
    moved = []
    by_key = {one.key: one for one in wanted}
    for row in (*scheduler.running, *scheduler.waiting, *inbox):
        asked = by_key.get(key_of(row.request))
        if asked is None or row.num_left < asked.min_left or row.unwanted:
            continue
        cache = runner.read_cache(row.blocks, row.num_cached) if asked.with_cache and row.num_cached else None
        moved.append((row, pack_row(row, departures.leave(row, version), version, cache)))
        if row in inbox:
            inbox.remove(row)
        else:
            scheduler.remove(row)
    return moved


def put_in(scheduler: Scheduler, runner: Runner, rows: Mapping[Row, MigratedRow]) -> None:
    """IncomingRows into the batch, between two passes: with the keys they brought where there are a slot and blocks for
    them, else to the queue, to be fed again."""
    for row, moved in rows.items():
        if moved.cache is None or not scheduler.admit_with_blocks(row, blocks_for(moved.cache.shape[3])):
            scheduler.waiting.append(row)
            continue
        runner.write_cache(row.blocks, moved.cache)
        row.num_cached = moved.cache.shape[3]
