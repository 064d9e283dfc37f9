"""What is kept of rows that migrate: who has left, who came, how fast the engine is, and who hears of it.

Everything but `AcceptedRows` is touched under the engine's lock. May import numpy, stages.engines.protocol; of
stages.engines.embedded rows and scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import count

import numpy as np

from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.embedded.scheduler import Chunk
from stages.engines.migration import key_of
from stages.engines.protocol import Completion, RowsLost
from stages.engines.row_loads import EngineLoad, RowLoad

_LEARNING_RATE = 0.2
_BULK_TOKENS = 8
"""A batch that feeds fewer tokens of prompts says little about what one costs."""


class OutgoingRows:
    """Owns the rows that have left, by ticket, until they are delivered or given back."""

    def __init__(self) -> None:
        self._away: dict[int, tuple[Row, int]] = {}
        """With the version of the weights that it left."""
        self._tickets = count()

    @property
    def rows(self) -> list[Row]:
        return [row for row, _ in self._away.values()]

    @property
    def num_calls(self) -> int:
        """Calls that have rows elsewhere and none here."""
        return len({row.call for row in self.rows if row.call.num_here == 0})

    def leave(self, row: Row, version: int) -> int:
        """Its ticket."""
        ticket = next(self._tickets)
        self._away[ticket] = row, version
        return ticket

    def back(self, ticket: int) -> tuple[Row, int] | None:
        """The row, and the version that it left; None: it is not elsewhere (any more)."""
        return self._away.pop(ticket, None)

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """Those that somebody waits for; the others are forgotten."""
        for ticket in tickets:
            if ticket in self._away and self._away[ticket][0].unwanted:
                del self._away[ticket]
        return self._away.keys() & set(tickets)


class AcceptedRows:
    """Owns rows that came from another engine, until they are finished; implements `IncomingRows`."""

    def __init__(self, call: GenerateCall, tickets: Mapping[Row, int]) -> None:
        self._call = call
        self._tickets = dict(tickets)

    def __iter__(self) -> Iterator[tuple[int, Completion | None]]:
        while self._tickets:
            result = self._call.results.get()
            if result is None:
                raise RuntimeError("the engine has stopped")
            row, outcome = result
            if row in self._tickets:
                yield self._tickets.pop(row), None if isinstance(outcome, Exception) else outcome

    def drop(self, tickets: Iterable[int]) -> None:
        for ticket in set(tickets):
            for row in [row for row, number in self._tickets.items() if number == ticket]:
                row.dropped = True
                self._tickets.pop(row, None)
                self._call.results.put((row, RowsLost("nobody waits for it")))  # wakes whoever iterates

    def close(self) -> None:
        self._call.abandoned.set()
        self.drop(list(self._tickets.values()))


class Pace:
    """Owns running means of what batches take."""

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
    """Owns who hears of the rows in flight, and what was reported last: how many, and whether a batch had been
    timed."""

    def __init__(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        self._below, self._listener = below, listener
        self._reported: tuple[int, bool] | None = None

    def due(self, num_rows: int, pace: Pace) -> bool:
        """Whether there is news in so many rows."""
        if self._reported is None:
            return True
        return (num_rows, pace.pass_s > 0) != self._reported and min(num_rows, self._reported[0]) < self._below

    def notify(self, here: EngineLoad) -> None:
        self._reported = len(here.rows), here.pass_s > 0
        self._listener(here)


def may_move(row: Row) -> bool:
    """Whether a row is one that others could go on with: somebody waits for it, and its tokens are drawn. Rows whose
    tokens are given are few, and are to say what this engine makes of them."""
    return not row.unwanted and not row.request.forced


def engine_load(
    rows: Iterable[Row], version: int, slots: int, cache_shape: tuple[int, int, int], pace: Pace
) -> EngineLoad:
    """What an engine with these rows reports. `cache_shape`: layers, key/value heads, head dimension."""
    layers, heads, dim = cache_shape
    reported = [row for row in rows if may_move(row)]
    return EngineLoad(
        version=version,
        slots=slots,
        rows=tuple(RowLoad(key_of(r.request), len(r.tokens), r.num_cached, r.num_left) for r in reported),
        position_bytes=2 * layers * heads * dim * np.dtype(np.float32).itemsize,
        pass_s=pace.pass_s,
        prefill_s=pace.prefill_s,
    )
