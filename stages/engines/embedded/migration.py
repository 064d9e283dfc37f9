"""An engine whose rows can continue in another engine. Rows leave and arrive between two batches.

    source                                             target
    ──────                                             ──────
    migrate_out: removes rows between two batches
                 callers keep waiting           ─────► migrate_in: adds them (keys imported, or computed again),
                 the engine may refit or sleep                     sampled with the same noise
    deliver:     returns a row to its caller    ◄───── (ticket, Completion) as each finishes
    give_back:   the target is lost, the rows continue here

A migrated row's tokens and log-probs have the same bits as without the migration: noise is keyed by the row, and keys
and values are copied, or computed again by kernels whose results depend only on the row. The callers of the rows notice
nothing, apart from `RowsLost`.

`MigratedRow` is a row on its way; `Capabilities.migration` says which engines can send and receive rows. `OutgoingRows`
and `AcceptedRows` keep the rows that left and arrived, `BatchTimes` measures the engine, and `LoadWatch` reports its
load. The functions at the end check, pack and unpack rows. `OutgoingRows` is used only under the engine's lock,
`BatchTimes` and `LoadWatch` only in the engine's thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.embedded.scheduler import Chunk
from stages.engines.protocol import Completion, EngineStats, Request, RequestError, RowsLost
from stages.engines.row_loads import EngineLoad, MigrationRequest, RowKey, RowLoad


@dataclass(frozen=True, eq=False)
class MigratedRow:
    """Everything that another engine needs to continue a row."""

    ticket: int
    """Number of the row in the engine that it left."""
    request: Request
    version: int
    """Version of the weights that the row continues with."""
    tokens: Int32[np.ndarray, " new"]
    """Tokens sampled so far."""
    logprobs: Float32[np.ndarray, " new"]
    versions: Int32[np.ndarray, " new"]
    cache: Float32[np.ndarray, "layers 2 kv_heads positions dim"] | None
    """Keys and values of the first positions, in a layout that depends on no engine. None: the other engine feeds the
    row's tokens again."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and of the response so far."""
        return len(self.request.tokens) + len(self.tokens)


def key_of(request: Request) -> RowKey:
    """Return the key that identifies a request's row."""
    return request.seed, request.step, request.row


class MigratingEngine(EmbeddedEngine):
    """An engine whose rows can leave and arrive. Also owns the rows that have left. All public methods are
    thread-safe."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Take the arguments of `EmbeddedEngine`."""
        self._outgoing, self._times = OutgoingRows(), BatchTimes()
        self._watch: LoadWatch | None = None
        self._num_out = self._num_in = 0
        """Numbers of rows that left and arrived since `stats` was last called."""
        super().__init__(*args, **settings)

    def stats(self) -> EngineStats:
        with self.lock:
            num_out, num_in, self._num_out, self._num_in = self._num_out, self._num_in, 0, 0
            return replace(super().stats(), rows_given=num_out, rows_taken=num_in)

    # ---- rows that migrate ----

    @property
    def num_calls_migrated(self) -> int:
        """Number of calls of `generate` and `migrate_in` whose unfinished rows are all in other engines."""
        with self.lock:
            return self._outgoing.num_calls

    def watch_load(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        """Report the engine's load to `listener` from now on, in the engine's thread.

        The first report is made at once. Another report follows when the number of rows here changes, but only if the
        old or the new number is below `below`. A report also follows, under the same condition, when the first batch
        has been timed. An exception of the listener stops the engine."""
        with self.lock:
            self._watch = LoadWatch(below, listener)
            self.lock.notify_all()

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        """Take rows out of this engine, each with everything that another engine needs to continue it.

        A row is skipped if it is not here, if fewer than `min_left` tokens are left to sample, or if no caller waits
        for it. The rows that leave no longer count as in flight here, unless they are given back. Raises RuntimeError
        if the engine has stopped."""
        migrated = []
        asked_for = {one.key: one for one in rows}
        with self.between_batches():
            for row in self.rows_here():
                asked = asked_for.get(key_of(row.request))
                if asked is None or row.num_left < asked.min_left or row.unwanted:
                    continue
                cache = self.take_out(row, asked.with_cache)
                version = self.version
                migrated.append(pack_row(row, self._outgoing.add(row, version), version, cache))
            self._num_out += len(migrated)
        return migrated

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> AcceptedRows:
        """Continue rows of another engine. If no slot is free, they are queued. Return an iterable over their
        completions.

        Raises:
            RequestError: a row needs another version, has keys of another model, or is too long. None of the rows is
                taken.
            RuntimeError: the engine is asleep or has stopped.
        """
        for one in migrated:
            self.check(one.request)
        call = GenerateCall(queue.SimpleQueue(), threading.Event())
        with self.between_batches():
            self.check_awake()
            for one in migrated:
                check_migrated(one, self.version, self.cache_shape)
            rows = {unpack_row(one, call, self.eos_ids): one for one in migrated}
            for row, one in rows.items():
                self.put_in(row, one.cache)
            self._num_in += len(rows)
        return AcceptedRows(call, {row: one.ticket for row, one in rows.items()})

    def deliver(self, ticket: int, completion: Completion) -> None:
        """Return a completion to the caller of a row that was taken out. Does nothing if no row with this ticket is
        out."""
        with self.lock:
            left = self._outgoing.pop(ticket)
            if left is not None:
                left[0].call.results.put((left[0], completion))

    def give_back(self, tickets: Collection[int]) -> None:
        """Continue rows that were taken out, in this engine again. If the engine's weights have changed since a row
        left, its caller gets RowsLost instead."""
        with self.lock:
            for left in map(self._outgoing.pop, self._outgoing.wanted(tickets)):
                assert left is not None
                row, version = left
                if self.has_stopped:
                    row.call.results.put(None)
                elif version == self.version:
                    self.take_back(row)
                else:
                    row.call.results.put((row, self._lost(row)))

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """Return the tickets of rows that are out and whose callers still wait."""
        with self.lock:
            return self._outgoing.wanted(tickets)

    def _lost(self, row: Row) -> RowsLost:
        return RowsLost(
            f"row {row.request.row} came back unfinished, and version {row.request.version} of the weights is gone: "
            f"version {self.version} is resident"
        )

    # ---- the engine's loop ----

    def _observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        self._times.observe(chunks, seconds)

    def _wants_report(self) -> bool:
        return self._watch is not None and self._watch.due(self._admission.num_unfinished, self._times)

    def _report(self, rows: Collection[Row]) -> None:
        num_rows = sum(map(may_migrate, rows))
        if self._watch is not None and self._watch.due(num_rows, self._times):
            self._watch.notify(engine_load(rows, self.version, self.max_rows, self.cache_shape, self._times))

    def _stopped(self) -> None:
        """Wake the callers of the rows that have left. These rows will not be delivered any more."""
        for row in self._outgoing.rows:
            row.call.results.put(None)


# ---- rows that left or arrived, and the engine's load ----------------------------------------------------

_LEARNING_RATE = 0.2
_BULK_TOKENS = 8
"""Minimum number of prompt tokens in a batch that is used to measure the time per prompt token."""


class OutgoingRows:
    """Owns the rows that have left, by ticket, until they are delivered or given back."""

    def __init__(self) -> None:
        self._rows: dict[int, tuple[Row, int]] = {}
        """Ticket -> the row, and the version of the weights in this engine when the row left."""
        self._tickets = count()

    @property
    def rows(self) -> list[Row]:
        return [row for row, _ in self._rows.values()]

    @property
    def num_calls(self) -> int:
        """Number of calls that have unfinished rows in other engines and none here."""
        return len({row.call for row in self.rows if row.call.num_local_rows == 0})

    def add(self, row: Row, version: int) -> int:
        """Store a row that leaves and return its ticket."""
        ticket = next(self._tickets)
        self._rows[ticket] = row, version
        return ticket

    def pop(self, ticket: int) -> tuple[Row, int] | None:
        """Remove a row and return it with the version of the weights when it left. Return None if no row has this
        ticket."""
        return self._rows.pop(ticket, None)

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """Return the tickets whose rows are still wanted, and forget the other rows."""
        for ticket in tickets:
            if ticket in self._rows and self._rows[ticket][0].unwanted:
                del self._rows[ticket]
        return self._rows.keys() & set(tickets)


class AcceptedRows:
    """Owns rows that arrived from another engine, until they are finished."""

    def __init__(self, call: GenerateCall, tickets: Mapping[Row, int]) -> None:
        self._call = call
        self._tickets = dict(tickets)

    def __iter__(self) -> Iterator[tuple[int, Completion | None]]:
        """Yield (ticket, completion) as each row finishes. The completion is None if this engine cannot finish the row.
        Raises RuntimeError if the engine stops."""
        while self._tickets:
            result = self._call.results.get()
            if result is None:
                raise RuntimeError("the engine has stopped")
            row, outcome = result
            if row in self._tickets:
                yield self._tickets.pop(row), None if isinstance(outcome, Exception) else outcome

    def drop(self, tickets: Iterable[int]) -> None:
        """Stop the rows with these tickets, because their callers have left."""
        for ticket in set(tickets):
            for row in [row for row, number in self._tickets.items() if number == ticket]:
                row.dropped = True
                self._tickets.pop(row, None)
                self._call.results.put((row, RowsLost("no caller waits for it")))  # wakes the iterating thread

    def close(self) -> None:
        """Stop all rows."""
        self._call.abandoned.set()
        self.drop(list(self._tickets.values()))


class BatchTimes:
    """Running means of the time of a decoding pass and of feeding one prompt token, in seconds."""

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
    """Owns the listener to the engine's load, and the state of the last report: the number of rows, and whether a batch
    had been timed by then."""

    def __init__(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        self._below, self._listener = below, listener
        self._reported: tuple[int, bool] | None = None

    def due(self, num_rows: int, times: BatchTimes) -> bool:
        """Return True if a report is due for this number of rows (see `MigratingEngine.watch_load`)."""
        if self._reported is None:
            return True
        return (num_rows, times.pass_s > 0) != self._reported and min(num_rows, self._reported[0]) < self._below

    def notify(self, load: EngineLoad) -> None:
        self._reported = len(load.rows), load.pass_s > 0
        self._listener(load)


def may_migrate(row: Row) -> bool:
    """Return True if another engine may continue the row. It must be wanted, and its tokens must be drawn. A row with
    prescribed tokens stays, since it is to be scored by this engine."""
    return not row.unwanted and not row.request.forced


def engine_load(
    rows: Iterable[Row], version: int, max_rows: int, cache_shape: tuple[int, int, int], times: BatchTimes
) -> EngineLoad:
    """Return the load of an engine with these rows. `cache_shape`: layers, key/value heads, head dimension."""
    layers, heads, dim = cache_shape
    reported = [row for row in rows if may_migrate(row)]
    return EngineLoad(
        version=version,
        max_rows=max_rows,
        rows=tuple(RowLoad(key_of(r.request), len(r.tokens), r.num_cached, r.num_left) for r in reported),
        position_bytes=2 * layers * heads * dim * np.dtype(np.float32).itemsize,
        pass_s=times.pass_s,
        prefill_s=times.prefill_s,
    )


# ---- packing ---------------------------------------------------------------------------------------------


def pack_row(row: Row, ticket: int, version: int, cache: np.ndarray | None) -> MigratedRow:
    """Return a row as a `MigratedRow`."""
    return MigratedRow(
        ticket=ticket,
        request=row.request,
        version=version,
        tokens=np.array(row.tokens[len(row.request.tokens) :], np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        versions=np.array(row.versions, np.int32),
        cache=cache,
    )


def unpack_row(migrated: MigratedRow, call: GenerateCall, eos_ids: Set[int]) -> Row:
    """Return the row that `pack_row` packed. It holds no blocks of the cache yet."""
    row = Row(migrated.request, call, eos_ids)
    for token, logprob, version in zip(
        migrated.tokens.tolist(), migrated.logprobs.tolist(), migrated.versions.tolist(), strict=True
    ):
        row.append(token, logprob, version)
    return row


def check_migrated(migrated: MigratedRow, version: int, cache_shape: tuple[int, int, int]) -> None:
    """Check that this engine can continue a row. Raises RequestError, naming the row, if it cannot. `cache_shape`:
    layers, key/value heads, head dimension."""
    problem = None
    layers, heads, dim = cache_shape
    if migrated.version != version:
        problem = f"goes on with version {migrated.version} of the weights; version {version} is resident"
    elif (
        not len(migrated.tokens)
        == len(migrated.logprobs)
        == len(migrated.versions)
        < migrated.request.sampling.max_new_tokens
    ):
        problem = f"arrives with {len(migrated.tokens)} tokens of {migrated.request.sampling.max_new_tokens}"
    elif migrated.cache is not None:
        positions = migrated.cache.shape[3] if migrated.cache.ndim == 5 else 0
        expected = (layers, 2, heads, positions, dim)
        if migrated.cache.shape != expected or not 0 < positions < migrated.num_tokens:
            problem = f"brings keys and values of shape {migrated.cache.shape}; here they are {expected}"
    if problem is not None:
        raise RequestError(f"row {migrated.request.row} {problem}")
