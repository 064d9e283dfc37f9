"""The embedded generation engine: one loop in which rows join and leave the batch at every token.

    admit    accept queued rows, and drop rows whose caller has gone          `admission`
    plan     choose the rows to feed, their tokens and their cache blocks     `scheduler`, `cache`
    run      turn the batch into arrays and run the model                     `batch`, `runner`, `model`
    sample   append the drawn tokens to their rows                            `batch`, `sampling`
    finish   return complete rows to their callers

The loop runs in the engine's own thread. Callers' threads queue rows, pack new weights and wait for results
(`admission`). They change rows, cache and weights only while the engine's thread waits and no batch is under way.

There are two ways to load new weights:

- By default, `load_weights` waits until no row is in flight, and then swaps the weights. New calls of `generate` wait
  until the swap is done. A call raises RequestError if a row asks for another version than the resident one.
- With `in_flight`, the weights are swapped between two batches. The rows in flight are then fed again from their first
  token. Calls of `generate` do not wait, and rows may also ask for an older version.

Three parts are optional: speculative decoding (`drafts`, through `extensions.Drafts`), a model that spans processes
(`ranks`, through `runner.Runner`), and rows that migrate to another engine (`migration`, a subclass that uses the last
section of `EmbeddedEngine`).
"""

from __future__ import annotations

import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from stages.engines.capabilities import Capabilities
from stages.engines.embedded.admission import Admission
from stages.engines.embedded.batch import keep, lay_out
from stages.engines.embedded.cache import BlockPool
from stages.engines.embedded.extensions import DraftCounts, Drafts
from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, blocks_for
from stages.engines.embedded.rows import DraftTree, GenerateCall, Row
from stages.engines.embedded.runner import Runner
from stages.engines.embedded.scheduler import BATCH_PROMPT_TOKENS, Chunk, Scheduler
from stages.engines.protocol import Completion, EngineStats, Request, check_request, check_version, start_generator


class EmbeddedEngine:
    """Owns a runner, the rows and the engine thread. Implements `GenerationEngine`.

    `cache_shape` is the runner's `cache_shape`. `max_rows` is the maximum number of rows that run at the same time."""

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
        """Start the engine thread.

        Args:
            runner: holds the weights of `version`. It is closed with the engine.
            scheduler: a scheduler without rows, built for the runner's number of blocks and its `depth`.
            capabilities: abilities that the engine reports.
            max_seq: maximum length of a prompt and its response together, in tokens.
            threads: number of torch threads in the engine's own thread.
            eos_ids: tokens that end a response.
            version: version of the runner's weights.
            in_flight: True to swap weights between two batches. By default a swap waits until all rows have
                finished.
            drafts: speculative decoding; None: without.
        """
        self.version, self.eos_ids, self.drafts = version, eos_ids, drafts
        self.capabilities = capabilities
        self.numerics: Mapping[str, str] = {"kernels": runner.kernels}
        self.cache_shape, self.max_rows = runner.cache_shape, scheduler.max_rows
        self._runner, self._scheduler = runner, scheduler
        self._max_seq, self._threads, self._in_flight = max_seq, threads, in_flight
        self._admission = Admission()
        self.lock = self._admission.changed
        """Condition variable. Its lock is held while rows pass from one thread to another. It is notified at every
        change that a thread waits for."""
        self._running_batches: deque[_RunningBatch] = deque()
        """Batches that were submitted and not yet collected; at most `runner.depth`."""
        self._collected_at = 0.0
        self._counters = Counters()
        self._rank_busy_s = runner.busy_s()
        self._load_lock = threading.Lock()
        runner.end_threads()
        self._thread = threading.Thread(target=self._run, name="embedded-engine", daemon=True)
        self._thread.start()

    # ---- the loop, in the engine thread ----

    def _loop(self) -> None:
        """Run until the engine stops. While there are no rows, train the drafters."""
        until_training_s: float | None = None
        while True:
            with self.lock:
                if self._admission.idle and not self._running_batches:
                    self._runner.end_threads()  # another engine of this process may need the cores
                if not self._admission.wait(bool(self._running_batches), self._wants_report, until_training_s):
                    return
                self._admit()
            self._report((*self._scheduler.running, *self._scheduler.waiting))
            if not self._scheduler.idle:
                self._step()
            until_training_s = None
            if self.drafts is not None and self._admission.idle and self._runner.awake:
                until_training_s = self.drafts.train()

    def _admit(self) -> None:
        """Swap in new weights if no batch is under way, queue new rows, and drop the rows whose caller has gone. The
        caller holds the lock."""
        if self._admission.weights is not None and not self._running_batches:
            self._exchange(*self._admission.weights)
            self._admission.weights_taken()
        self._scheduler.waiting.extend(self._admission.take_rows())
        abandoned = self._scheduler.drop_abandoned()
        for row in abandoned:
            self._detach(row)
        self._admission.finished(len(abandoned))

    def _step(self) -> None:
        """Start a batch, unless new weights or a thread that wants a pause wait. End the oldest batch if none was
        started, or if `Runner.depth` batches are under way."""
        paused = self._running_batches and (self._admission.weights is not None or self._admission.num_pausing > 0)
        submitted = not paused and self._plan_and_run()
        if self._running_batches and (not submitted or len(self._running_batches) == self._runner.depth):
            self._sample_and_finish()

    def _plan_and_run(self) -> bool:
        """Start a batch. Return False if there is nothing to run."""
        started = time.perf_counter()
        trees = self._propose() if self.drafts is not None else {}
        drafted = time.perf_counter()
        chunks = self._scheduler.plan(trees)
        if chunks:
            self._runner.submit(lay_out(chunks, self.drafts is not None and self.drafts.wants_hidden))
            self._running_batches.append(_RunningBatch(chunks, started, drafted))
        return bool(chunks)

    def _sample_and_finish(self) -> None:
        """End the oldest batch: append the drawn tokens to their rows, and retire the rows that are complete or
        failed."""
        scheduler, batch = self._scheduler, self._running_batches.popleft()
        chunks, draws = batch.chunks, self._runner.collect()
        kept = keep(chunks, draws, self.version)
        scheduler.returned(chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        ended = [chunk.row for chunk in sampling if chunk.row.failure is not None or chunk.row.finished is not None]
        for row in ended:
            if row.failure is not None:
                _zero_blocks(row, scheduler.pool, self._runner)
            scheduler.retire(row)
        before, self._collected_at = self._collected_at, time.perf_counter()
        seconds = self._collected_at - max(batch.started_at, before)  # concurrent batches share their time
        num_in_flight = len(sampling) + sum(len(other.chunks) for other in self._running_batches)
        with self.lock:
            self._observe(chunks, seconds)
            if self.drafts is not None:
                decoded = all(chunk.decodes for chunk in chunks)
                cost = self._collected_at - max(batch.drafted_at, before) if decoded else None
                self.drafts.observe(sampling, kept, draws.hidden, cost, batch.drafted_at - batch.started_at)
            self._counters.add_batch(chunks, sum(map(len, kept)), num_in_flight, seconds)
            self._counters.add_scheduling(scheduler)
            self._finish(ended)

    def _finish(self, rows: Sequence[Row]) -> None:
        """Send the result of each row to the row's caller: the completion, or the error of a failed row. The caller of
        this method holds the lock."""
        for row in rows:
            self._detach(row)
            row.call.results.put((row, row.outcome()))
        self._counters.rows += sum(row.failure is None for row in rows)
        self._admission.finished(len(rows))

    def _detach(self, row: Row) -> None:
        """Note that a row has left this engine and its drafters. The caller holds the lock."""
        row.call.num_local_rows -= 1
        if self.drafts is not None:
            self.drafts.finish(row)

    def _propose(self) -> Mapping[Row, DraftTree]:
        """Return the guesses for the rows that decode in the next batch."""
        assert self.drafts is not None
        rows = self._scheduler.next_rows()
        decoding = [row for row in rows if row.decodes]
        again = sum(row.num_to_refeed for row in decoding)
        prompts = sum(row.num_pending for row in rows if not row.decodes)
        return self.drafts.propose(decoding, again + min(prompts, BATCH_PROMPT_TOKENS)) if decoding else {}

    def _run(self) -> None:
        """Run the loop. Wake all waiting callers when the loop ends, even if an error ends it. The error also reaches
        threading's excepthook."""
        try:
            torch.set_num_threads(self._threads)
            self._loop()
        finally:
            with self.lock:
                self._admission.stop(sys.exc_info()[1])
                for row in self.rows_here():
                    row.call.results.put(None)
                self._stopped()

    # ---- `GenerationEngine`, in callers' threads ----

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """See `GenerationEngine`. Checks and queues the requests at once.

        The rows run whether or not the result is iterated. Closing the iterator early drops its unfinished rows.

        Raises:
            RequestError: a request cannot be served, for example because it asks for a newer version than the resident
                one. Without `in_flight`, requests for older versions are refused too.
            RuntimeError: the engine is asleep or has stopped. The iterator raises this too, if the engine stops
                later.
            FloatingPointError: raised by the iterator if the logits of a row are not finite. The message names the row.
                This call ends, and other calls continue.
        """
        rows = list(requests)
        for request in rows:
            self.check(request)
        call = GenerateCall(queue.SimpleQueue(), threading.Event())
        with self._admission.opened():
            self.check_awake()
            for request in rows:
                check_version(request, self.version, in_flight=self._in_flight)
            self._admission.accept([Row(request, call, self.eos_ids) for request in rows])
        return start_generator(self._results(call, len(rows)))

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
        """See `GenerationEngine`. Packs the new tensors beside the old ones while rows still run."""
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
        """Swap the weights and discard the cache. The caller holds the lock, and no batch is under way."""
        self._runner.swap(weights)
        self._scheduler.recompute()
        self.version = version

    def sleep(self) -> None:
        """See `GenerationEngine`. Raises RuntimeError while rows are in flight, or if the engine has stopped."""
        with self.lock:
            self._admission.check_running()
            if not self._admission.idle:
                raise RuntimeError(f"{self._admission.num_unfinished} rows are in flight; let them finish first")
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
        """Stop the thread and release the cache. Callers that still wait get RuntimeError. A second call does
        nothing."""
        self._admission.stop()
        self._thread.join()
        self._runner.close()

    # ---- for `migration.MigratingEngine`: methods to override, and rows that leave and arrive between two batches ----

    def _observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """Hook for subclasses: record a batch that has ended. Does nothing here. The caller holds the lock."""

    def _wants_report(self) -> bool:
        """Hook for subclasses: True if `_report` must be called even without work. The caller holds the lock."""
        return False

    def _report(self, rows: Collection[Row]) -> None:
        """Hook for subclasses: receive the running and the waiting rows. Does nothing here. The engine thread calls it
        before each batch and whenever `_wants_report` returns True, without holding the lock."""

    def _stopped(self) -> None:
        """Hook for subclasses: handle the stop of the engine. Does nothing here. No row finishes after this call. The
        caller holds the lock."""

    @property
    def has_stopped(self) -> bool:
        return self._admission.stopped

    def check(self, request: Request) -> None:
        """Raise RequestError if no version of the weights could serve a request."""
        check_request(request, self._max_seq, self._runner.vocab, self.eos_ids)

    def check_awake(self) -> None:
        """Raise RuntimeError while the engine sleeps, i.e. while the cache has no memory."""
        if not self._runner.awake:
            raise RuntimeError("the engine is asleep: wake() it first")

    def between_batches(self) -> AbstractContextManager[None]:
        """Return a context that holds the lock. Entering it waits until the engine thread pauses with no batch under
        way, and raises RuntimeError if the engine has stopped."""
        return self._admission.between_batches()

    def rows_here(self) -> tuple[Row, ...]:
        """Return all rows that were accepted and are unfinished. Call this between batches."""
        return (*self._scheduler.running, *self._scheduler.waiting, *self._admission.queued)

    def copy_cache(self, row: Row, start: int, stop: int) -> np.ndarray | None:
        """Return a copy of a row's keys and values (see `Runner.read_cache`) at positions `start` to `stop` - 1. Return
        None if `stop` <= `start`. `start` is the first position of a block. Call this between batches."""
        if stop <= start:
            return None
        return self._runner.read_cache(row.blocks[start // BLOCK_TOKENS :], stop - start)

    def take_out(self, row: Row) -> None:
        """Remove an unfinished row from the queue or from the scheduler. Call this between batches."""
        if not self._admission.withdraw(row):
            self._scheduler.remove(row)
        self._detach(row)
        self._admission.finished(1)

    def store_cache(self, cache: np.ndarray) -> list[int] | None:
        """Write keys and values of another engine's row into free blocks, and return the blocks. Return None if too few
        blocks are free. The caller passes the blocks to `put_in` or `free_blocks`. Call this between batches."""
        blocks = self._scheduler.take_blocks(blocks_for(cache.shape[3]))
        if blocks is not None:
            self._runner.write_cache(blocks, cache)
        return blocks

    def free_blocks(self, blocks: Sequence[int]) -> None:
        """Release blocks that `store_cache` returned. Call this between batches."""
        self._scheduler.pool.release(blocks)

    def put_in(self, row: Row, blocks: list[int], num_cached: int) -> None:
        """Continue a row from another engine. `blocks` hold the keys and values of its first `num_cached` positions. If
        `num_cached` > 0 and fewer than `max_rows` rows are running, the row runs at once. Otherwise the row is queued,
        the blocks are released, and the row's tokens are fed again. Call this between batches."""
        if num_cached and self._scheduler.admit_with_blocks(row, blocks):
            row.num_cached = num_cached
        else:
            self.free_blocks(blocks)
            self._scheduler.waiting.append(row)
        row.call.num_local_rows += 1
        self._admission.num_unfinished += 1

    def take_back(self, row: Row) -> None:
        """Queue a row that `take_out` removed before. The caller holds the lock."""
        self._admission.accept([row])


def _zero_blocks(row: Row, pool: BlockPool, runner: Runner) -> None:
    """Write zeros into the cache blocks that only this failed row holds. A later row of such a block gives unwritten
    positions weight 0, but 0 times NaN is NaN. No batch under way uses these blocks."""
    own = pool.discard(row.blocks)
    layers, heads, dim = runner.cache_shape
    runner.write_cache(own, np.zeros((layers, 2, heads, len(own) * BLOCK_TOKENS, dim), np.float32))


@dataclass(frozen=True)
class _RunningBatch:
    """A batch under way, with the times at which the drafting of its guesses began and ended."""

    chunks: list[Chunk]
    started_at: float
    drafted_at: float


# ---- statistics ------------------------------------------------------------------------------------------


@dataclass
class Counters:
    """Counts since `stats` was last called, for `EngineStats`."""

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

    def add_batch(self, chunks: Sequence[Chunk], num_tokens: int, num_in_flight: int, seconds: float) -> None:
        """Count a batch that appended `num_tokens` tokens. `num_in_flight`: number of rows that sampled in this batch,
        plus number of rows in the other batches under way."""
        self.tokens += num_tokens
        self.decode_steps += 1
        self.decoded_rows += num_in_flight
        self.prompt_tokens += sum(chunk.count for chunk in chunks if not chunk.decodes)
        self.busy_s += seconds

    def add_scheduling(self, scheduler: Scheduler) -> None:
        """Add the scheduler's counts and reset them."""
        self.peak_blocks = max(self.peak_blocks, scheduler.pool.peak_used)
        self.preemptions += scheduler.num_preemptions
        self.shared_tokens += scheduler.num_shared_tokens
        scheduler.num_preemptions = scheduler.num_shared_tokens = 0
        scheduler.pool.reset_peak()

    def stats(self, scheduler: Scheduler, drafts: DraftCounts, rank_busy_s: Collection[float]) -> EngineStats:
        """Return the statistics. `rank_busy_s`: seconds that each rank has spent computing since `stats` was last
        called."""
        decoded = scheduler.max_rows * self.decode_steps
        return EngineStats(
            tokens=self.tokens,
            rows=self.rows,
            decode_steps=self.decode_steps,
            mean_occupancy=self.decoded_rows / decoded if decoded else 0.0,
            kv_peak_fraction=self.peak_blocks / scheduler.pool.num_blocks,
            preemptions=self.preemptions,
            refit_s=self.refit_s,
            busy_s=self.busy_s,
            prompt_tokens=self.prompt_tokens,
            shared_tokens=self.shared_tokens,
            drafted_tokens=dict(drafts.drafted),
            accepted_tokens=dict(drafts.accepted),
            draft_lengths=dict(drafts.lengths),
            rank_busy_s=tuple(rank_busy_s),
            accepted_positions=dict(drafts.accepted_at),
        )
