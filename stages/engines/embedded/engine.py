"""The embedded generation engine: one plain loop, with rows joining and leaving the batch at every token.

    admit    rows that came in join the queue; those that nobody waits for leave          `admission`
    plan     which rows are fed, with how many tokens, in which blocks of the cache       `scheduler`, `cache`
    run      the batch as numbers, through the model                                      `batch`, `runner`, `model`
    sample   what the runner drew, with the noise of each row and position, is its rows'  `sampling`, `batch`
    finish   complete rows go to their callers

The loop runs in the engine's own thread, the only one that touches rows, cache and model; callers' threads queue rows,
exchange weights and wait for results (`admission` says how they meet). Weights come in while no row is in flight
(`engine.update: drain`), or between two batches, and then rows in flight are fed again (`inflight`).

A call waits while weights are exchanged, and is then refused if it asks for another version than the one that came in;
so whoever sees `engine.version` differ loads first and generates afterwards.

What is not here reaches the loop through three protocols: guesses that are verified beside the next token (`drafts`,
through `extensions.Drafts`), a model that spans processes (`ranks`, through `runner.Runner`), and rows that go on in
another engine (`migration`, through `extensions.EngineObserver` and the last section of this class).

May import numpy, torch, stages.engines.protocol and requests; of stages.engines.embedded everything but build, drafts,
ranks and migration.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.engines.capabilities import Capabilities
from stages.engines.embedded.admission import Admission
from stages.engines.embedded.batch import keep, lay_out
from stages.engines.embedded.cache import BlockPool
from stages.engines.embedded.counters import Counters
from stages.engines.embedded.draft_tree import DraftTree
from stages.engines.embedded.extensions import DraftCounts, Drafts, EngineObserver
from stages.engines.embedded.kernels.paging import BLOCK_TOKENS, blocks_for
from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.embedded.runner import Runner
from stages.engines.embedded.scheduler import BATCH_PROMPT_TOKENS, Chunk, Scheduler
from stages.engines.protocol import Completion, EngineStats, Request, RequestError
from stages.engines.requests import begun, check_request


class EmbeddedEngine:
    """Owns a runner, the rows and the engine thread; implements `GenerationEngine`. `kernels` and `cache_shape` are the
    runner's; `slots`: rows that run together at most."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        capabilities: Capabilities,
        max_seq: int,
        threads: int,
        eos_ids: Set[int],
        version: int = 0,
        in_flight: bool = False,
        drafts: Drafts | None = None,
    ) -> None:
        """`runner`: holds the weights of `version`; closed with the engine. `scheduler`: of the runner's blocks and
        depth, without rows. `max_seq`: longest prompt plus response, in tokens. `threads`: of torch, in the engine's
        own thread. `in_flight`: weights come in between two batches."""
        self.version, self.eos_ids, self.drafts = version, eos_ids, drafts
        self.capabilities = capabilities
        self.kernels, self.cache_shape, self.slots = runner.kernels, runner.cache_shape, scheduler.num_slots
        self._runner, self._scheduler = runner, scheduler
        self._observer: EngineObserver | None = None
        self._max_seq, self._threads, self._in_flight = max_seq, threads, in_flight
        self._admission = Admission()
        self.lock = self._admission.changed
        """Held while rows change hands; notified at every change that someone waits for."""
        self._under_way: deque[_Begun] = deque()
        """Batches that have not ended: `runner.depth` at most."""
        self._collected_at = 0.0
        self._counters = Counters()
        self._rank_busy_s = runner.busy_s()
        self._load_lock = threading.Lock()
        runner.end_threads()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # ---- the loop, in the engine thread ----

    def _loop(self) -> None:
        """Until the engine stops. While it has no rows, drafts learn."""
        until_lesson_s: float | None = None
        while True:
            with self.lock:
                if self._admission.idle and not self._under_way:
                    self._runner.end_threads()  # another engine of this process may be at work
                if not self._admission.wait(bool(self._under_way), self._wants_report, until_lesson_s):
                    return
                self._admit()
            if self._observer is not None:
                self._observer.report((*self._scheduler.running, *self._scheduler.waiting))
            if not self._scheduler.idle:
                self._step()
            until_lesson_s = None
            if self.drafts is not None and self._admission.idle and self._runner.awake:
                until_lesson_s = self.drafts.train()

    def _admit(self) -> None:
        """Under the lock: takes weights, once no batch is under way, and the rows that came in."""
        if self._admission.weights is not None and not self._under_way:
            self._exchange(*self._admission.weights)
            self._admission.weights_taken()
        self._scheduler.waiting.extend(self._admission.take_rows())
        gone = self._scheduler.drop_abandoned()
        for row in gone:
            self._leave(row)
        self._admission.finished(len(gone))

    def _step(self) -> None:
        """Begins a batch, and ends the oldest one unless more can be begun. None is begun while weights, or somebody
        who wants the rows, wait for those under way to end."""
        awaited = self._under_way and (self._admission.weights is not None or self._admission.num_pausing > 0)
        begun = not awaited and self._plan_and_run()
        if self._under_way and (not begun or len(self._under_way) == self._runner.depth):
            self._sample_and_finish()

    def _plan_and_run(self) -> bool:
        """Begins a batch; False if there is nothing to run."""
        started = time.perf_counter()
        trees = self._propose() if self.drafts is not None else {}
        drafted = time.perf_counter()
        chunks = self._scheduler.plan(trees)
        if chunks:
            self._runner.submit(lay_out(chunks, self.drafts is not None and self.drafts.wants_hidden))
            self._under_way.append(_Begun(chunks, started, drafted))
        return bool(chunks)

    def _sample_and_finish(self) -> None:
        """Ends the oldest batch: its rows take the tokens that it drew, and those that are complete leave."""
        scheduler, begun = self._scheduler, self._under_way.popleft()
        chunks, draws = begun.chunks, self._runner.collect()
        kept = keep(chunks, draws, self.version)
        scheduler.returned(chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        ended = [chunk.row for chunk in sampling if chunk.row.failure is not None or chunk.row.finished is not None]
        for row in ended:
            if row.failure is not None:
                _clean(row, scheduler.pool, self._runner)
            scheduler.retire(row)
        before, self._collected_at = self._collected_at, time.perf_counter()
        seconds = self._collected_at - max(begun.started_at, before)  # batches under way at once share their time
        num_in_flight = len(sampling) + sum(len(other.chunks) for other in self._under_way)
        with self.lock:
            if self._observer is not None:
                self._observer.observe(chunks, seconds)
            if self.drafts is not None:
                decoded = all(chunk.decodes for chunk in chunks)
                cost = self._collected_at - max(begun.drafted_at, before) if decoded else None
                self.drafts.observe(sampling, kept, draws.hidden, cost, begun.drafted_at - begun.started_at)
            self._counters.add_batch(chunks, sum(map(len, kept)), num_in_flight, seconds)
            self._counters.add_scheduling(scheduler)
            self._finish(ended)

    def _finish(self, rows: Sequence[Row]) -> None:
        """Under the lock: complete rows go to their callers; of those that failed, the reason."""
        for row in rows:
            self._leave(row)
            row.call.results.put((row, row.outcome()))
        self._counters.rows += sum(row.failure is None for row in rows)
        self._admission.finished(len(rows))

    def _leave(self, row: Row) -> None:
        """Under the lock: nothing is made of it here any more."""
        row.call.num_here -= 1
        if self.drafts is not None:
            self.drafts.finish(row)

    def _propose(self) -> Mapping[Row, DraftTree]:
        """Guesses for the rows that decode in the next batch."""
        assert self.drafts is not None
        rows = self._scheduler.next_rows()
        decoding = [row for row in rows if row.decodes]
        again = sum(row.num_again for row in decoding)
        prompts = sum(row.num_pending for row in rows if not row.decodes)
        return self.drafts.propose(decoding, again + min(prompts, BATCH_PROMPT_TOKENS)) if decoding else {}

    def _run(self) -> None:
        """Runs the loop; however it ends, nobody is left waiting. An error also reaches threading's excepthook."""
        try:
            torch.set_num_threads(self._threads)
            self._loop()
        finally:
            with self.lock:
                self._admission.stop(sys.exc_info()[1])
                for row in self.rows_here():
                    row.call.results.put(None)
                if self._observer is not None:
                    self._observer.stopped()

    # ---- `GenerationEngine`, in callers' threads ----

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """See `GenerationEngine`. Checks and queues at once; the rows run whether or not the result is iterated, but an
        iterator that is closed early takes its unfinished rows with it. Raises RequestError also where a row asks for
        another version than the resident one, and RuntimeError if the engine is asleep or has stopped. The iterator
        raises FloatingPointError, naming the row, for one whose logits are not finite: the call ends there, and those
        of others go on."""
        rows = list(requests)
        for request in rows:
            self.check(request)
        call = GenerateCall(queue.SimpleQueue(), threading.Event())
        with self._admission.opened():
            self.check_awake()
            for request in rows:
                if request.version > self.version or (request.version < self.version and not self._in_flight):
                    raise RequestError(
                        f"row {request.row} asks for version {request.version} of the weights; "
                        f"version {self.version} is resident"
                    )
            self._admission.accept([Row(request, call, self.eos_ids) for request in rows])
        return begun(self._results(call, len(rows)))

    def _results(self, call: GenerateCall, num_rows: int) -> Iterator[Completion | None]:
        try:
            yield None
            for _ in range(num_rows):
                result = call.results.get()
                if result is None:
                    raise self._admission.why_stopped() from self._admission.failure
                _, outcome = result
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome
        finally:
            call.abandoned.set()

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `GenerationEngine`. The new tensors are packed beside the old ones while rows still run."""
        with self._load_lock:
            self.check_awake()
            started = time.perf_counter()
            try:
                new = self._runner.prepare(tensors)
            finally:
                self._runner.end_threads()
            if self.drafts is not None:
                self.drafts.refit(tensors)
            seconds = time.perf_counter() - started
            with self.lock:
                self._counters.refit_s += seconds
            if self._in_flight:
                self._admission.hand_over(version, new)
                return
            with self._admission.drained():
                self._exchange(version, new)

    def _exchange(self, version: int, weights: Any) -> None:
        """Under the lock, with no batch under way: what the cache holds is no longer true."""
        self._runner.swap(weights)
        self._scheduler.recompute()
        self.version = version

    def sleep(self) -> None:
        """See `GenerationEngine`. Raises RuntimeError while rows are in flight."""
        with self.lock:
            self._admission.check_running()
            if not self._admission.idle:
                raise RuntimeError(f"{self._admission.num_unfinished} rows are in flight: sleep() after them")
            self._runner.sleep()
            self._scheduler.recompute()

    def wake(self) -> None:
        with self.lock:
            self._admission.check_running()
            self._runner.wake()

    def stats(self) -> EngineStats:
        with self.lock:
            counted, self._counters = self._counters, Counters()
            before, self._rank_busy_s = self._rank_busy_s, self._runner.busy_s()
            rank_busy_s = [now - then for now, then in zip(self._rank_busy_s, before, strict=True)]
            counts = DraftCounts()
            if self.drafts is not None:
                counts, self.drafts.counts = self.drafts.counts, counts
        return counted.stats(self._scheduler, counts, rank_busy_s)

    def close(self) -> None:
        """Stops the thread and gives the cache back; callers that still wait get RuntimeError. Twice is harmless."""
        self._admission.stop()
        self._thread.join()
        self._runner.close()

    # ---- for `migration`: rows that leave and come, between two batches ----

    @property
    def has_stopped(self) -> bool:
        return self._admission.stopped

    def watch_with(self, observer: EngineObserver) -> None:
        """From now on the observer sees what goes on."""
        with self.lock:
            self._observer = observer

    def check(self, request: Request) -> None:
        """Raises RequestError for a request that no version of the weights could serve."""
        check_request(request, self._max_seq, self._runner.vocab, self.eos_ids)

    def check_awake(self) -> None:
        """Raises RuntimeError while the cache's memory is given back."""
        if not self._runner.awake:
            raise RuntimeError("the engine is asleep: wake() it first")

    def between_batches(self) -> AbstractContextManager[None]:
        """Holds the lock, with the engine thread standing still and no batch under way. Raises RuntimeError if the
        engine has stopped."""
        return self._admission.between_batches()

    def rows_here(self) -> tuple[Row, ...]:
        """All rows that are accepted and unfinished. Between batches."""
        return (*self._scheduler.running, *self._scheduler.waiting, *self._admission.queued)

    def take_out(self, row: Row, with_cache: bool) -> np.ndarray | None:
        """Takes a row out of queue or batch, unfinished. Returns a copy of its keys and values (see
        `Runner.read_cache`) if it is `with_cache` and has any. Between batches."""
        cache = self._runner.read_cache(row.blocks, row.num_cached) if with_cache and row.num_cached else None
        if not self._admission.withdraw(row):
            self._scheduler.remove(row)
        self._leave(row)
        self._admission.finished(1)
        return cache

    def put_in(self, row: Row, cache: np.ndarray | None) -> None:
        """Goes on with a row: with the keys and values that it brings, where there are a slot and blocks for them; else
        it queues, to be fed again. Between batches."""
        if cache is not None and self._scheduler.admit_with_blocks(row, blocks_for(cache.shape[3])):
            self._runner.write_cache(row.blocks, cache)
            row.num_cached = cache.shape[3]
        else:
            self._scheduler.waiting.append(row)
        row.call.num_here += 1
        self._admission.num_unfinished += 1

    def take_back(self, row: Row) -> None:
        """Goes on with a row that was taken out: it queues. Under the lock."""
        self._admission.accept([row])

    def _wants_report(self) -> bool:
        return self._observer is not None and self._observer.wants_report(self._admission.num_unfinished)


def _clean(row: Row, pool: BlockPool, runner: Runner) -> None:
    """Zeros into the blocks that only this row, which failed, holds: where their next holder has not yet written, it
    multiplies what lies there by 0, and that must be finite. No other batch under way reads or writes them."""
    own = pool.discard(row.blocks)
    layers, heads, dim = runner.cache_shape
    runner.write_cache(own, np.zeros((layers, 2, heads, len(own) * BLOCK_TOKENS, dim), np.float32))


@dataclass(frozen=True)
class _Begun:
    """A batch under way, and when it was begun: before and after the drafting."""

    chunks: list[Chunk]
    started_at: float
    drafted_at: float
