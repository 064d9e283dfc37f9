"""An engine whose rows can continue in another engine. Rows leave and arrive between two batches, in two phases.

    source                                             target
    ──────                                             ──────
    copy_out:    copies a part of a row's keys and
                 values between two batches; the row
                 goes on decoding                ─────► write_in: keeps the part in blocks of its own
                 ... until few positions are left ...
    migrate_out: removes rows between two batches
                 callers keep waiting           ─────► migrate_in: adds the rows; stores the other keys and values, or
                 the engine may refit or sleep                     feeds all tokens again; samples with the same noise
    deliver:     returns a row to its caller    ◄───── (ticket, Completion) as each row finishes
    give_back:   the target is lost, the rows continue here

The first phase shortens the time for which a row stands still in the second phase. It may be left out. It may also stop
at any point, since the row is still at its source.

On a CPU a migrated row's tokens and log-probs have the same bits as without the migration. Its noise is keyed by the
row. Its keys and values are copied, or computed again by kernels whose results depend only on the row. (On a GPU the
results may differ by rounding.) The callers of the rows notice nothing, apart from `RowsLost`.

`MigratedRow` is a row on its way to another engine. `Capabilities.migration` is True for engines that can send and
receive rows. `OutgoingRows` owns the rows that have left this engine, and `AcceptedRows` owns the rows that have
arrived. `BatchTimes` measures the engine, and `LoadWatch` reports its load. The functions at the end check, pack and
unpack rows. `OutgoingRows` is used only under the engine's lock, `BatchTimes` and `LoadWatch` only in the engine's
thread.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from types import MappingProxyType
from typing import Any

import numpy as np
from jaxtyping import Float32, Int32

from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS
from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.embedded.scheduler import Chunk
from stages.engines.protocol import Completion, EngineStats, Request, RequestError, RowsLost
from stages.engines.row_loads import (
    COPY_POSITIONS,
    EngineLoad,
    MigrationRequest,
    PassCost,
    RowKey,
    RowLoad,
    can_fit_line,
    fit_pass_cost,
)


@dataclass(frozen=True, eq=False)
class MigratedRow:
    """Everything that another engine needs to continue a row."""

    ticket: int
    """Number that the source engine gave to the row."""
    request: Request
    version: int
    """Version of the weights that the row continues with."""
    tokens: Int32[np.ndarray, " new"]
    """Tokens sampled so far."""
    logprobs: Float32[np.ndarray, " new"]
    versions: Int32[np.ndarray, " new"]
    cache: Float32[np.ndarray, "layers 2 kv_heads positions dim"] | None
    """Keys and values of the positions from `num_copied` on, in a layout that is the same for all engines. None: no
    keys and values are sent with the row. If `num_copied` is 0 too, the other engine feeds all tokens of the row
    again."""
    num_copied: int = 0
    """Number of positions, from the first on, whose keys and values the other engine has already."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the prompt and of the response so far."""
        return len(self.request.tokens) + len(self.tokens)


@dataclass(frozen=True, eq=False)
class CopiedPart:
    """A copy of a part of a row's keys and values. The row itself goes on decoding at its source."""

    key: RowKey
    version: int
    """Version of the weights that computed the keys and values."""
    start: int
    """First position of the part. `start` and `stop` are multiples of `BLOCK_TOKENS`."""
    cache: Float32[np.ndarray, "layers 2 kv_heads positions dim"] | None
    """Keys and values of the row's positions `start` to `stop` - 1. None if the row has no full block of the cache from
    position `start` on."""
    held_s: float
    """Seconds for which the copy kept the engine from computing."""

    @property
    def stop(self) -> int:
        """Position after the last position of the part."""
        return self.start + (0 if self.cache is None else self.cache.shape[3])


@dataclass
class _StoredParts:
    """The parts of a row that have arrived so far, and the blocks of the cache that hold them."""

    version: int
    blocks: list[int]
    num_positions: int = 0


def key_of(request: Request) -> RowKey:
    """Return the key that identifies a request's row."""
    return request.seed, request.step, request.row


class MigratingEngine(EmbeddedEngine):
    """An engine that can send rows to other engines and receive rows from them. Also owns the rows that have left. All
    public methods are thread-safe."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        """Take the arguments of `EmbeddedEngine`."""
        self._outgoing, self._times = OutgoingRows(), BatchTimes()
        self._watch: LoadWatch | None = None
        self._stored: dict[RowKey, _StoredParts] = {}
        """Key of a row -> its parts that have arrived. The row itself may arrive later."""
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

    def watch_load(self, listener: Callable[[EngineLoad], None]) -> None:
        """Report the engine's load to `listener` from now on, in the engine's thread.

        The first report is made at once. Another report follows

        - when rows have migrated,
        - when the cost of a pass is known for the first time,
        - when the number of rows here has changed by an eighth, and at least by 1. So there are few reports while there
          are many rows, and one report for each of the last rows.

        An exception of the listener stops the engine."""
        with self.lock:
            self._watch = LoadWatch(listener)
            self.lock.notify_all()

    def copy_out(self, key: RowKey, start: int) -> CopiedPart | None:
        """Return a copy of a row's keys and values from position `start` on: only full blocks, and at most
        `COPY_POSITIONS` positions. The row stays in this engine. Return None if the row is not here, is not decoding,
        is no longer wanted, or has fewer than `start` cached positions. Raises RuntimeError if the engine has
        stopped."""
        with self.between_batches():
            began = time.perf_counter()
            row = next((row for row in self.rows_here() if key_of(row.request) == key), None)
            if row is None or row.unwanted or not row.decodes or row.num_cached < start:
                return None
            stop = min(start + COPY_POSITIONS, row.num_cached // BLOCK_TOKENS * BLOCK_TOKENS)
            cache = self.copy_cache(row, start, stop)
            return CopiedPart(key, self.version, start, cache, time.perf_counter() - began)

    def migrate_out(
        self, rows: Collection[MigrationRequest], copied: Mapping[RowKey, CopiedPart] = MappingProxyType({})
    ) -> list[MigratedRow]:
        """Remove rows from this engine. Return each with everything that another engine needs to continue it. The
        removed rows no longer count as in flight in this engine. The method `give_back` brings them back if the other
        engine cannot finish them.

        A row is skipped in four cases:

        - It is not in this engine.
        - Fewer than `min_left` tokens are left to sample.
        - No caller waits for it.
        - The weights have changed since its keys and values were copied.

        Raises RuntimeError if the engine has stopped.

        `copied`: key of a row -> the last copy that `copy_out` has returned for the row. The other engine already has
        all positions up to the end of this copy.
        """
        migrated = []
        asked_for = {one.key: one for one in rows}
        with self.between_batches():
            for row in self.rows_here():
                key = key_of(row.request)
                asked, part = asked_for.get(key), copied.get(key)
                if asked is None or row.num_left < asked.min_left or row.unwanted:
                    continue
                if part is not None and part.version != self.version:
                    continue
                num_copied = 0 if part is None else part.stop
                cache = self.copy_cache(row, num_copied, row.num_cached) if asked.with_cache else None
                self.take_out(row)
                ticket = self._outgoing.add(row, self.version)
                migrated.append(pack_row(row, ticket, self.version, cache, num_copied))
            self._num_out += len(migrated)
            self._rows_changed()
        return migrated

    def write_in(self, part: CopiedPart) -> float:
        """Store copied keys and values of a row that still decodes in another engine. The method `migrate_in` may later
        continue the row here. Return the seconds for which this kept the engine from computing.

        Raises:
            RequestError: the copy was made with other weights or by another model, does not begin where the stored
                positions of the row end, or does not fit into the free memory. Then everything that is stored for this
                row is dropped.
            RuntimeError: the engine is asleep or has stopped.
        """
        with self.between_batches():
            began = time.perf_counter()
            self.check_awake()
            self._drop_stale(part.key)
            stored = self._stored.setdefault(part.key, _StoredParts(part.version, []))
            problem = self._problem(part, stored)
            blocks = self.store_cache(part.cache) if problem is None and part.cache is not None else []
            if problem is not None or blocks is None:
                self._drop_stored(part.key)
                raise RequestError(f"row {part.key[2]} {problem or 'finds no free memory for its keys and values'}")
            stored.blocks += blocks
            stored.num_positions = part.stop
            return time.perf_counter() - began

    def _problem(self, part: CopiedPart, stored: _StoredParts) -> str | None:
        layers, heads, dim = self.cache_shape
        if not part.version == stored.version == self.version:
            return f"brings keys and values of version {part.version}; version {self.version} is resident"
        if part.start != stored.num_positions:
            return f"brings keys and values from position {part.start} on; {stored.num_positions} are here"
        expected = (layers, 2, heads, part.stop - part.start, dim)
        if part.cache is not None and (part.cache.shape != expected or part.stop % BLOCK_TOKENS):
            return f"brings keys and values of shape {part.cache.shape}; here they are {expected}"
        return None

    def drop_parts(self, key: RowKey) -> None:
        """Delete the stored parts of a row that will not arrive. Does nothing if no parts are stored, or if the engine
        has stopped."""
        with suppress(RuntimeError), self.between_batches():
            self._drop_stored(key)

    def _drop_stored(self, key: RowKey) -> None:
        stored = self._stored.pop(key, None)
        if stored is not None:
            self.free_blocks(stored.blocks)

    def migrate_in(self, migrated: Sequence[MigratedRow]) -> AcceptedRows:
        """Continue rows of another engine, and return an iterable over their completions. A row is queued if `max_rows`
        rows are running already, or if none of its keys and values are here. All tokens of a queued row are fed again.

        Raises:
            RequestError: this engine cannot continue one of the rows. For example, the row needs another version of the
                weights, has keys and values of another model, or was preceded by keys and values that `write_in` has
                not stored. Then no row is accepted.
            RuntimeError: the engine is asleep or has stopped.
        """
        for one in migrated:
            self.check(one.request)
        call = GenerateCall(queue.SimpleQueue(), threading.Event())
        with self.between_batches():
            self.check_awake()
            for one in migrated:
                self._drop_stale(key_of(one.request))
                check_migrated(one, self.version, self.cache_shape, self._num_stored(key_of(one.request)))
            rows = {unpack_row(one, call, self.eos_ids): one for one in migrated}
            for row, one in rows.items():
                stored = self._stored.pop(key_of(one.request), None)
                blocks = stored.blocks if stored is not None else []
                rest = [] if one.cache is None else self.store_cache(one.cache)
                num_cached = one.num_copied + (0 if one.cache is None or rest is None else one.cache.shape[3])
                self.put_in(row, [*blocks, *(rest or [])], num_cached)
            self._num_in += len(rows)
            self._rows_changed()
        return AcceptedRows(call, {row: one.ticket for row, one in rows.items()})

    def _drop_stale(self, key: RowKey) -> None:
        """Drop the stored parts of a row if another version of the weights computed them."""
        stored = self._stored.get(key)
        if stored is not None and stored.version != self.version:
            self._drop_stored(key)

    def _num_stored(self, key: RowKey) -> int:
        """Return the number of a row's positions whose keys and values are stored here."""
        stored = self._stored.get(key)
        return 0 if stored is None else stored.num_positions

    def sleep(self) -> None:
        """See `EmbeddedEngine.sleep`. Also raises RuntimeError while the engine holds keys and values of rows that have
        not fully arrived (see `write_in`)."""
        with self.lock:
            if self._stored:
                raise RuntimeError(f"{len(self._stored)} rows are arriving; let them finish first")
            super().sleep()

    def deliver(self, ticket: int, completion: Completion) -> None:
        """Pass the result of a migrated row, which another engine has finished, to the row's caller. `ticket`: the
        number that `migrate_out` gave to the row. If no migrated row has this ticket, nothing is done."""
        with self.lock:
            left = self._outgoing.pop(ticket)
            if left is not None:
                left[0].call.results.put((left[0], completion))

    def give_back(self, tickets: Collection[int]) -> None:
        """Take back migrated rows that another engine cannot finish, and continue them here. `tickets`: the numbers
        that `migrate_out` gave to the rows.

        A row is not continued in these cases:

        - No caller waits for the row: it is dropped.
        - This engine has stopped: the caller gets RuntimeError.
        - The weights of this engine have changed since the row left: the caller gets RowsLost.
        """
        with self.lock:
            for left in map(self._outgoing.pop, self._outgoing.tickets_awaited(tickets)):
                assert left is not None
                row, version = left
                if self.has_stopped:
                    row.call.results.put(None)
                elif version == self.version:
                    self.take_back(row)
                    self._rows_changed()
                else:
                    row.call.results.put((row, self._lost_error(row)))

    def tickets_awaited(self, tickets: Collection[int]) -> set[int]:
        """Return the tickets in `tickets` whose migrated rows still have a waiting caller. Drop the migrated rows that
        have a ticket in `tickets` and no waiting caller."""
        with self.lock:
            return self._outgoing.tickets_awaited(tickets)

    def _lost_error(self, row: Row) -> RowsLost:
        return RowsLost(
            f"row {row.request.row} came back unfinished, and version {row.request.version} of the weights is gone: "
            f"version {self.version} is resident"
        )

    def _rows_changed(self) -> None:
        """Note that rows have migrated, so that a report of the load is due. The caller holds the lock."""
        if self._watch is not None:
            self._watch.rows_migrated = True

    # ---- the engine's loop ----

    def _observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        self._times.observe(chunks, seconds, 1 + len(self._running_batches))

    def _wants_report(self) -> bool:
        return self._watch is not None and self._watch.due(self._admission.num_unfinished, self._times)

    def _report(self, rows: Collection[Row]) -> None:
        num_rows = sum(map(may_migrate, rows))
        if self._watch is not None and self._watch.due(num_rows, self._times):
            self._watch.notify(engine_load(rows, self.version, self.max_rows, self.cache_shape, self._times))

    def _stopped(self) -> None:
        """Wake the callers whose rows are in other engines: they get RuntimeError, since results can no longer reach
        them."""
        for row in self._outgoing.rows:
            row.call.results.put(None)


# ---- rows that left or arrived, and the engine's load ----------------------------------------------------

_LEARNING_RATE = 0.2
_RECENT_PASSES = 9
"""Number of measured times that are kept for each number of rows."""
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
        """Number of calls whose unfinished rows are all in other engines."""
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

    def tickets_awaited(self, tickets: Collection[int]) -> set[int]:
        """Return the tickets in `tickets` whose stored rows still have a waiting caller. Drop the stored rows that have
        a ticket in `tickets` and no waiting caller."""
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
    """Owns the times of the recent decoding passes, by number of rows. Also owns the running mean of the seconds that
    feeding one prompt token takes."""

    def __init__(self) -> None:
        self.prefill_s = 0.0
        self.cost_known = False
        """True if enough passes were observed for `cost` to return a result."""
        self._pass_s = 0.0
        """Seconds of the last decoding pass."""
        self._passes: defaultdict[int, deque[float]] = defaultdict(lambda: deque(maxlen=_RECENT_PASSES))

    def observe(self, chunks: Collection[Chunk], seconds: float, num_groups: int = 1) -> None:
        """Record the time of a batch that has ended.

        Args:
            chunks: the tokens that the batch fed, one chunk for each row.
            seconds: time since the batch began, or since the end of the previous batch if that is later.
            num_groups: number of batches that the pipeline stages compute at the same time, with this one. These
                batches have different rows, and one of them ends every `seconds`. So a decoding pass over all these
                rows takes `num_groups * seconds`.
        """
        fed = sum(chunk.count for chunk in chunks if not chunk.decodes)
        if not fed:
            self._pass_s = seconds
            self._passes[len(chunks) * num_groups].append(seconds * num_groups)
            self.cost_known = self.cost_known or can_fit_line(self._passes)
        elif fed >= _BULK_TOKENS:
            decoding = any(chunk.decodes for chunk in chunks)
            each = max(seconds - (self._pass_s if decoding else 0.0), 0.1 * seconds) / fed
            self.prefill_s += (each - self.prefill_s) * (_LEARNING_RATE if self.prefill_s else 1.0)

    def cost(self) -> PassCost | None:
        """Return the fitted cost of a decoding pass. Return None until the timed passes differ enough in their numbers
        of rows."""
        return fit_pass_cost(self._passes)


class LoadWatch:
    """Owns the function that gets the reports of this engine's load (`EngineLoad`), and decides when a report is due.
    For this it remembers the last report's number of rows, and whether that report included a cost of a decoding pass.
    """

    def __init__(self, listener: Callable[[EngineLoad], None]) -> None:
        self._listener = listener
        self._reported: tuple[int, bool] | None = None
        self.rows_migrated = False
        """True if rows have left or arrived since the last report."""

    def due(self, num_rows: int, times: BatchTimes) -> bool:
        """Return True if a report is due for this number of rows (see `MigratingEngine.watch_load`)."""
        if self._reported is None or self.rows_migrated:
            return True
        before, was_known = self._reported
        return abs(num_rows - before) >= max(1, before // 8) or times.cost_known != was_known

    def notify(self, load: EngineLoad) -> None:
        self._reported, self.rows_migrated = (len(load.rows), load.cost is not None), False
        self._listener(load)


def may_migrate(row: Row) -> bool:
    """Return True if another engine may continue the row. This needs a caller that still waits for the row, and a
    request without prescribed tokens. A row with prescribed tokens stays, because the caller wants the log-probs of
    this engine."""
    return not row.unwanted and not row.request.forced


def engine_load(
    rows: Iterable[Row], version: int, max_rows: int, cache_shape: tuple[int, int, int], times: BatchTimes
) -> EngineLoad:
    """Return the load of an engine with these rows. Rows that may not migrate are left out. `cache_shape`: layers,
    key/value heads, head dimension."""
    layers, heads, dim = cache_shape
    reported = [row for row in rows if may_migrate(row)]
    return EngineLoad(
        version=version,
        max_rows=max_rows,
        rows=tuple(RowLoad(key_of(r.request), len(r.tokens), r.num_cached, r.num_left) for r in reported),
        position_bytes=2 * layers * heads * dim * np.dtype(np.float32).itemsize,
        cost=times.cost(),
        prefill_s=times.prefill_s,
    )


# ---- packing ---------------------------------------------------------------------------------------------


def pack_row(row: Row, ticket: int, version: int, cache: np.ndarray | None, num_copied: int) -> MigratedRow:
    """Return what another engine needs to continue a row.

    Args:
        ticket: number that this engine gave to the row.
        version: version of the weights that the row continues with.
        cache: keys and values of the positions from `num_copied` on; None: none are sent with the row.
        num_copied: number of positions, from the first on, whose keys and values the other engine has already.
    """
    return MigratedRow(
        ticket=ticket,
        request=row.request,
        version=version,
        tokens=np.array(row.tokens[len(row.request.tokens) :], np.int32),
        logprobs=np.array(row.logprobs, np.float32),
        versions=np.array(row.versions, np.int32),
        cache=cache,
        num_copied=num_copied,
    )


def unpack_row(migrated: MigratedRow, call: GenerateCall, eos_ids: Set[int]) -> Row:
    """Return the row that `pack_row` packed. It holds no blocks of the cache yet."""
    row = Row(migrated.request, call, eos_ids)
    for token, logprob, version in zip(
        migrated.tokens.tolist(), migrated.logprobs.tolist(), migrated.versions.tolist(), strict=True
    ):
        row.append(token, logprob, version)
    return row


def check_migrated(migrated: MigratedRow, version: int, cache_shape: tuple[int, int, int], num_stored: int) -> None:
    """Check that this engine can continue a row. Raises RequestError, naming the row, if it cannot. `cache_shape`:
    layers, key/value heads, head dimension. `num_stored`: number of the row's positions whose keys and values are
    stored here already."""
    problem = None
    layers, heads, dim = cache_shape
    positions = migrated.cache.shape[3] if migrated.cache is not None and migrated.cache.ndim == 5 else 0
    expected = (layers, 2, heads, positions, dim)
    if migrated.version != version:
        problem = f"goes on with version {migrated.version} of the weights; version {version} is resident"
    elif (
        not len(migrated.tokens)
        == len(migrated.logprobs)
        == len(migrated.versions)
        < migrated.request.sampling.max_new_tokens
    ):
        problem = f"arrives with {len(migrated.tokens)} tokens of {migrated.request.sampling.max_new_tokens}"
    elif migrated.num_copied != num_stored:
        problem = f"brings keys and values from position {migrated.num_copied} on; {num_stored} are here"
    elif migrated.cache is not None and (
        migrated.cache.shape != expected or not 0 < migrated.num_copied + positions < migrated.num_tokens
    ):
        problem = f"brings keys and values of shape {migrated.cache.shape}; here they are {expected}"
    if problem is not None:
        raise RequestError(f"row {migrated.request.row} {problem}")
