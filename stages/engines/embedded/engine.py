"""The embedded generation engine: Llama on torch, with rows joining and leaving the batch at every token.

    caller threads                              engine thread (the only one that touches rows and cache)
    --------------                              ------------------------------------------------------
    generate: check, queue the rows  ──inbox──► loop: waits for rows
              take results as they   ◄─result─        plans a pass (scheduler), runs it, samples
              finish                                  hands over the rows that finished
    load_weights: check, pack
      drain:    close the door, wait  ◄─drained─
                for all accepted rows,
                swap, open
      inflight: hand over, wait       ──swap────► between two passes: takes them, feeds the rows in flight again

    migrate_out, migrate_in: wait  ◄─resting─    stands still between two passes while they take rows out or put them in

A call waits at the door while weights are exchanged, and is then refused if it asks for another version than the one
that came in; so whoever sees `engine.version` differ loads first and generates afterwards.

May import numpy, torch, stages.engines, stages.models.hf_files.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from stages.engines.config import EngineConfig
from stages.engines.embedded.batch import keep, lay_out
from stages.engines.embedded.cache import BlockPool
from stages.engines.embedded.draft_tree import DraftTree
from stages.engines.embedded.drafts.calibration import build_speculation
from stages.engines.embedded.drafts.drafters import Drafter
from stages.engines.embedded.drafts.speculation import DraftCounts, Speculation
from stages.engines.embedded.migration.load import EngineLoad, MigrationRequest
from stages.engines.embedded.migration.migrated_rows import (
    AcceptedRows,
    LoadWatch,
    OutgoingRows,
    Pace,
    engine_load,
    put_in,
    take_out,
)
from stages.engines.embedded.migration.protocol import MigratedRow, RowsLost, check_migrated, unpack_row
from stages.engines.embedded.ranks.parallel_runner import ParallelRunner
from stages.engines.embedded.rows import Call, Row
from stages.engines.embedded.runner import LocalRunner, Runner
from stages.engines.embedded.scheduler import BATCH_PROMPT_TOKENS, Chunk, Scheduler
from stages.engines.protocol import Completion, EngineStats, Request, RequestError
from stages.engines.requests import check_request
from stages.models.hf_files import read_eos_ids


class EmbeddedEngine:
    """Owns weights, key/value cache and the engine thread; implements `GenerationEngine` and `MigratableRows`."""

    keyed_noise = True

    def __init__(
        self,
        path: str,
        engine: EngineConfig,
        *,
        max_seq: int,
        threads: int,
        device: torch.device | None = None,
        eos_token_ids: Sequence[int] = (),
        version: int = 0,
        drafters: Sequence[Drafter] = (),
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """`path`: a Hugging Face directory or `random:tiny`, whose weights become `version`. `max_seq`: longest prompt
        plus response, in tokens. `threads`: of torch, in the engine's own thread. `eos_token_ids`: empty means the
        model's own. `drafters`: instead of those that `engine.embedded.speculation` names. `device` and `on_lost`:
        with several ranks those of `ParallelRunner`. Raises ValueError for sizes that cannot work, WeightsError for
        weights that do not fit, NoNativeKernelsError where native kernels are asked for and cannot be had."""
        self._max_seq, self._threads = max_seq, threads
        self._eos_ids = frozenset(eos_token_ids or read_eos_ids(path))
        device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._runner: Runner
        if engine.tensor_parallel * engine.pipeline_parallel == 1:
            self._runner = LocalRunner(path, engine, max_seq=max_seq, device=device)
        else:
            self._runner = ParallelRunner(
                path, engine, max_seq=max_seq, device=device, threads=threads, on_lost=on_lost
            )
        self._scheduler = Scheduler(engine.slots, BlockPool(self._runner.num_blocks), self._runner.depth)
        self._under_way: deque[_Begun] = deque()
        """Passes that are not collected yet."""
        self._collected_at = 0.0
        self._speculation = build_speculation(
            engine, drafters, path, self._runner, self._scheduler.pool, max_seq=max_seq, threads=threads, device=device
        )
        self.version = version
        self._inbox: list[Row] = []
        self._num_unfinished = 0
        """Rows accepted and not yet handed over or dropped."""
        self._changed = threading.Condition()
        """Guards everything above and below that both sides touch; notified at every change that someone waits for."""
        self._door_closed = False
        self._in_flight = engine.update == "inflight"
        self._incoming: tuple[int, Any] | None = None
        """What the engine thread is to take before its next pass."""
        self._resting = False
        """The engine thread waits, and no pass is under way."""
        self._pausing = 0
        """How many callers want it to."""
        self._departures, self._pace = OutgoingRows(), Pace()
        self._watch: LoadWatch | None = None
        self._closing = False
        self._failure: BaseException | None = None
        self._load_lock = threading.Lock()
        self._counters = _Counters()
        self._rank_busy_s = self._runner.busy_s()
        self._runner.end_threads()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # ---- callers' side ----

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """See `GenerationEngine`. Checks and queues at once; the rows run whether or not the result is iterated, but an
        iterator that is closed early takes its unfinished rows with it. Raises RequestError also where a row asks for
        another version than the resident one, and RuntimeError if the engine is asleep or has stopped."""
        rows = list(requests)
        for request in rows:
            check_request(request, self._max_seq, self._runner.vocab, self._eos_ids)
        call = Call(queue.SimpleQueue(), threading.Event())
        with self._changed:
            self._changed.wait_for(lambda: not self._door_closed or self._closing)
            self._check_running()
            self._check_awake()
            for request in rows:
                if request.version > self.version or (request.version < self.version and not self._in_flight):
                    raise RequestError(
                        f"row {request.row} asks for version {request.version} of the weights; "
                        f"version {self.version} is resident"
                    )
            self._accept([Row(request, call, self._eos_ids) for request in rows])
        return self._results(call, len(rows))

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `GenerationEngine`. The new tensors are packed beside the old ones while rows still run."""
        with self._load_lock:
            started = time.perf_counter()
            try:
                new = self._runner.prepare(tensors)
            finally:
                self._runner.end_threads()
            if self._speculation is not None:
                self._speculation.refit(tensors)
            seconds = time.perf_counter() - started
            with self._changed:
                self._counters.refit_s += seconds
                if self._in_flight:
                    self._incoming = (version, new)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._incoming is None or self._closing)
                    self._check_running()
                    return
                self._door_closed = True
                try:
                    self._changed.wait_for(lambda: self._idle or self._closing)
                    self._check_running()
                    self._runner.swap(new)
                    self._scheduler.recompute()
                    self.version = version
                finally:
                    self._door_closed = False
                    self._changed.notify_all()

    def sleep(self) -> None:
        """See `GenerationEngine`. Raises RuntimeError while rows are in flight."""
        with self._changed:
            self._check_running()
            if not self._idle:
                raise RuntimeError(f"{self._num_unfinished} rows are in flight: sleep() after them")
            self._runner.sleep()
            self._scheduler.recompute()

    def wake(self) -> None:
        with self._changed:
            self._check_running()
            self._runner.wake()

    # ---- rows that move ----

    @property
    def num_calls_migrated(self) -> int:
        """See `MigratableRows`."""
        with self._changed:
            return self._departures.num_calls

    def watch_load(self, below: int, listener: Callable[[EngineLoad], None]) -> None:
        """See `MigratableRows`. What the listener raises stops the engine."""
        with self._changed:
            self._watch = LoadWatch(below, listener)
            self._changed.notify_all()

    def migrate_out(self, rows: Collection[MigrationRequest]) -> list[MigratedRow]:
        """See `MigratableRows`. Raises RuntimeError if the engine has stopped."""
        with self._between_passes():
            pairs = take_out(self._scheduler, self._runner, self._inbox, rows, self._departures, self.version)
            if self._speculation is not None:
                for row, _ in pairs:
                    self._speculation.finish(row)
            self._counters.rows_given += len(pairs)
            self._count_finished(len(pairs))
        return [moved for _, moved in pairs]

    def migrate_in(self, moved: Sequence[MigratedRow]) -> AcceptedRows:
        """See `MigratableRows`. Raises RuntimeError if the engine is asleep or has stopped."""
        for one in moved:
            check_request(one.request, self._max_seq, self._runner.vocab, self._eos_ids)
        call = Call(queue.SimpleQueue(), threading.Event())
        with self._between_passes():
            self._check_awake()
            for one in moved:
                check_migrated(one, self.version, self._runner.cache_shape)
            rows = {unpack_row(one, call, self._eos_ids): one for one in moved}
            put_in(self._scheduler, self._runner, rows)
            call.num_here = len(rows)
            self._num_unfinished += len(rows)
            self._counters.rows_taken += len(rows)
        return AcceptedRows(call, {row: one.ticket for row, one in rows.items()})

    def deliver(self, ticket: int, completion: Completion) -> None:
        """See `MigratableRows`."""
        with self._changed:
            left = self._departures.back(ticket)
            if left is not None:
                left[0].call.results.put((left[0], completion))

    def give_back(self, tickets: Collection[int]) -> None:
        """See `MigratableRows`."""
        with self._changed:
            for left in map(self._departures.back, self._departures.wanted(tickets)):
                assert left is not None
                row, version = left
                if self._closing:
                    row.call.results.put(None)
                elif version == self.version:
                    self._accept([row])
                else:
                    row.call.results.put((row, None))

    def wanted(self, tickets: Collection[int]) -> set[int]:
        """See `MigratableRows`."""
        with self._changed:
            return self._departures.wanted(tickets)

    @contextmanager
    def _between_passes(self) -> Iterator[None]:
        """Holds the lock, with the engine thread standing still and no pass under way."""
        with self._changed:
            self._pausing += 1
            try:
                self._changed.wait_for(lambda: self._resting or self._closing)
                self._check_running()
                yield
            finally:
                self._pausing -= 1
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            counted, self._counters = self._counters, _Counters()
            busy_before, self._rank_busy_s = self._rank_busy_s, self._runner.busy_s()
            busy_now = self._rank_busy_s
            drafts = DraftCounts()
            if self._speculation is not None:
                drafts, self._speculation.counts = self._speculation.counts, drafts
        slots = self._scheduler.num_slots
        return EngineStats(
            tokens=counted.tokens,
            rows=counted.rows,
            decode_steps=counted.decode_steps,
            mean_occupancy=counted.decoded_rows / (slots * counted.decode_steps) if counted.decode_steps else 0.0,
            kv_peak_fraction=counted.peak_blocks / self._scheduler.pool.num_blocks,
            preemptions=counted.preemptions,
            refit_s=counted.refit_s,
            busy_s=counted.busy_s,
            prompt_tokens=counted.prompt_tokens,
            shared_tokens=counted.shared_tokens,
            drafted_tokens=dict(drafts.drafted),
            accepted_tokens=dict(drafts.accepted),
            draft_lengths=dict(drafts.lengths),
            rank_busy_s=tuple(now - before for now, before in zip(busy_now, busy_before, strict=True)),
            rows_given=counted.rows_given,
            rows_taken=counted.rows_taken,
            accepted_positions=dict(drafts.accepted_at),
        )

    def close(self) -> None:
        """Stops the thread and gives the cache back; callers that still wait get RuntimeError. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._runner.close()

    @property
    def kernels(self) -> str:
        """Which kernels run: `native` or `torch`."""
        return self._runner.kernels

    @property
    def speculation(self) -> Speculation | None:
        """What has been measured of passes and drafts; None where there are no drafts."""
        return self._speculation

    def _check_running(self) -> None:
        if self._closing:
            raise RuntimeError("the engine has stopped") from self._failure

    def _check_awake(self) -> None:
        if not self._runner.awake:
            raise RuntimeError("the engine is asleep: wake() it first")

    def _accept(self, rows: list[Row]) -> None:
        """Under the lock: rows into the queue."""
        self._inbox.extend(rows)
        self._num_unfinished += len(rows)
        for row in rows:
            row.call.num_here += 1
        self._changed.notify_all()

    @property
    def _idle(self) -> bool:
        return self._num_unfinished == 0

    def _results(self, call: Call, num_rows: int) -> Iterator[Completion]:
        try:
            for _ in range(num_rows):
                result = call.results.get()
                if result is None:
                    raise RuntimeError("the engine has stopped") from self._failure
                row, completion = result
                if completion is None:
                    raise RowsLost(
                        f"row {row.request.row} came back unfinished, and version {row.request.version} of the weights "
                        f"is gone: version {self.version} is resident"
                    )
                yield completion
        finally:
            call.abandoned.set()

    # ---- engine thread ----

    def _run(self) -> None:
        """Runs the loop; however it ends, nobody is left waiting. An error also reaches threading's excepthook."""
        try:
            torch.set_num_threads(self._threads)
            self._loop()
        finally:
            with self._changed:
                self._failure = sys.exc_info()[1]
                self._closing = True
                here = (*self._inbox, *self._scheduler.waiting, *self._scheduler.running)
                for row in (*here, *self._departures.rows):
                    row.call.results.put(None)
                self._inbox.clear()
                self._num_unfinished = 0
                self._changed.notify_all()

    def _loop(self) -> None:
        pause: float | None = None
        """Seconds to wait at most: drafters learn while there are no rows."""
        while True:
            with self._changed:
                self._resting = not self._under_way
                self._changed.notify_all()
                if self._idle and not self._under_way:
                    self._runner.end_threads()  # another engine of this process may be at work
                self._changed.wait_for(
                    lambda: self._closing or self._under_way or (self._has_work and not self._pausing), pause
                )
                if self._pausing and not self._closing and not self._under_way:
                    pause = None  # the time for the next lesson came, but someone else has the rows in hand
                    continue
                self._resting = False
                if self._closing:
                    return
                if self._incoming is not None and not self._under_way:
                    self.version, new = self._incoming
                    self._runner.swap(new)
                    self._incoming = None
                    self._scheduler.recompute()
                    self._changed.notify_all()
                self._scheduler.waiting.extend(self._inbox)
                self._inbox.clear()
                gone = self._scheduler.drop_abandoned()
                for row in gone:
                    row.call.num_here -= 1
                if self._speculation is not None:
                    for row in gone:
                        self._speculation.finish(row)
                self._count_finished(len(gone))
            self._tell_watch()
            if not self._scheduler.idle:
                self._step()
            pause = None
            if self._speculation is not None and self._idle and self._runner.awake:
                pause = self._speculation.train()

    @property
    def _has_work(self) -> bool:
        return self._incoming is not None or not self._idle or self._watch_is_due

    @property
    def _watch_is_due(self) -> bool:
        return self._watch is not None and self._watch.due(self._num_unfinished, self._pace)

    def _tell_watch(self) -> None:
        """Here the engine thread has all accepted rows in its own hands."""
        rows = (*self._scheduler.running, *self._scheduler.waiting)
        if self._watch is not None and self._watch.due(len(rows), self._pace):
            self._watch.tell(engine_load(rows, self.version, self._scheduler.num_slots, self._runner, self._pace))

    def _step(self) -> None:
        """Begins a pass, and ends the oldest one unless more can be begun. None is begun while weights, or somebody who
        wants rows, wait for those under way to end."""
        wanted = self._under_way and (self._incoming is not None or self._pausing > 0)
        begun = not wanted and self._begin()
        if self._under_way and (not begun or len(self._under_way) == self._runner.depth):
            self._end()

    def _begin(self) -> bool:
        """Plans and submits a pass; False if there is nothing to run."""
        started = time.perf_counter()
        drafts = self._drafts()
        drafted = time.perf_counter()
        chunks = self._scheduler.plan(drafts)
        if chunks:
            wants_hidden = self._speculation is not None and self._speculation.wants_hidden
            self._runner.submit(lay_out(chunks, wants_hidden))
            self._under_way.append(_Begun(chunks, started, drafted))
        return bool(chunks)

    def _end(self) -> None:
        """Takes in what the oldest pass drew, and hands over the rows that it finished."""
        scheduler, begun = self._scheduler, self._under_way.popleft()
        chunks, draws = begun.chunks, self._runner.collect()
        kept = keep(chunks, draws, self.version)
        scheduler.returned(chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        finished = [chunk.row for chunk in sampling if chunk.row.finished is not None]
        for row in finished:
            scheduler.retire(row)
        before, self._collected_at = self._collected_at, time.perf_counter()
        collected_at = self._collected_at
        seconds = collected_at - max(begun.started_at, before)  # passes under way at once share their time
        with self._changed:
            counters = self._counters
            self._pace.observe(chunks, seconds)
            if self._speculation is not None:
                decoded = all(chunk.decodes for chunk in chunks)
                cost = collected_at - max(begun.drafted_at, before) if decoded else None
                self._speculation.observe(sampling, kept, draws.hidden, cost, begun.drafted_at - begun.started_at)
                for row in finished:
                    self._speculation.finish(row)
            counters.tokens += sum(map(len, kept))
            counters.decode_steps += 1
            counters.decoded_rows += len(sampling) + sum(len(other.chunks) for other in self._under_way)
            counters.peak_blocks = max(counters.peak_blocks, scheduler.pool.peak_used)
            counters.prompt_tokens += sum(chunk.count for chunk in chunks if not chunk.decodes)
            counters.preemptions += scheduler.num_preemptions
            counters.shared_tokens += scheduler.num_shared_tokens
            scheduler.num_preemptions = scheduler.num_shared_tokens = 0
            scheduler.pool.reset_peak()
            counters.rows += len(finished)
            counters.busy_s += seconds
            for row in finished:
                reason = row.finished
                assert reason is not None
                row.call.num_here -= 1
                row.call.results.put((row, row.completion(reason)))
            self._count_finished(len(finished))

    def _drafts(self) -> dict[Row, DraftTree]:
        if self._speculation is None:
            return {}
        rows = self._scheduler.next_rows()
        decoding = [row for row in rows if row.decodes]
        again = sum(row.num_again for row in decoding)
        prompts = sum(row.num_pending for row in rows if not row.decodes)
        return self._speculation.propose(decoding, again + min(prompts, BATCH_PROMPT_TOKENS)) if decoding else {}

    def _count_finished(self, num_rows: int) -> None:
        """Under the lock: so many rows less to wait for."""
        self._num_unfinished -= num_rows
        if num_rows and self._idle:
            self._changed.notify_all()


@dataclass(frozen=True)
class _Begun:
    """A pass under way, and when it was begun: before and after the drafting."""

    chunks: list[Chunk]
    started_at: float
    drafted_at: float


@dataclass
class _Counters:
    """What `stats` reports, since its last call."""

    tokens: int = 0
    rows: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0
    peak_blocks: int = 0
    prompt_tokens: int = 0
    shared_tokens: int = 0
    preemptions: int = 0
    refit_s: float = 0.0
    busy_s: float = 0.0
    rows_given: int = 0
    rows_taken: int = 0
