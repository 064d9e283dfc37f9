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

A call waits at the door while weights are exchanged, and is then refused if it asks for another version than the one
that came in; so whoever sees `engine.version` differ loads first and generates afterwards.

May import torch, stages.engines, stages.hf_files.
"""

from __future__ import annotations

import queue
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from stages.engines.config import EngineConfig, SpeculationConfig
from stages.engines.drafting import Drafter, NgramDrafter
from stages.engines.kernels import Kernels, Tokens
from stages.engines.kv_cache import BlockPool, KVCache, block_bytes, blocks_for
from stages.engines.native_kernels import NoNativeKernelsError, load_native_kernels
from stages.engines.passes import draw, keep, lay_out
from stages.engines.protocol import Completion, EngineStats, Request, RequestError
from stages.engines.requests import check_request
from stages.engines.rows import Call, Row
from stages.engines.scheduler import PASS_TOKENS, Chunk, Scheduler
from stages.engines.speculation import CALIBRATED, DraftCounts, PassCosts, Speculation
from stages.engines.torch_kernels import TorchKernels
from stages.engines.torch_llama import (
    ATTENTION_DTYPE,
    LlamaShape,
    LlamaWeights,
    build_weights,
    check_tensors,
    forward,
    logits,
    read_shape,
    refit_weights,
)
from stages.hf_files import read_config, read_eos_ids, read_weights


class TorchEngine:
    """Owns the weights, the key/value cache and the engine thread; implements `GenerationEngine`."""

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
        drafter: Drafter | None = None,
    ) -> None:
        """`path`: a Hugging Face directory or `random:tiny`, whose weights become `version`. `max_seq`: longest prompt
        plus response, in tokens. `threads`: of torch, in the engine's own thread. `eos_token_ids`: empty means the
        model's own. `drafter`: instead of the one that `engine.speculation` names. Raises ValueError for sizes that
        cannot work, WeightsError for weights that do not fit, NoNativeKernelsError where native kernels are asked for
        and cannot be had."""
        config = read_config(path)
        self._shape = read_shape(config)
        if not 0 < max_seq <= self._shape.max_positions:
            raise ValueError(f"max_seq is {max_seq}; {path!r} has positions for {self._shape.max_positions} tokens")
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._max_seq, self._threads = max_seq, threads
        self._eos_ids = frozenset(eos_token_ids or read_eos_ids(path))
        self._kernels = _choose_kernels(engine, self._device)
        self._scheduler = Scheduler(engine.slots, BlockPool(_num_blocks(engine, self._shape, max_seq)))
        self._cache = KVCache(
            self._shape.num_layers,
            self._scheduler.pool.num_blocks,
            self._shape.num_kv_heads,
            self._shape.head_dim,
            ATTENTION_DTYPE,
            self._device,
        )
        tensors = read_weights(path)
        check_tensors(self._shape, tensors, complete=True)
        with torch.inference_mode():
            self._weights = build_weights(self._shape, tensors, getattr(torch, engine.dtype), self._device, max_seq)
            self._speculation = self._build_speculation(engine.speculation, drafter)
        self.version = version
        self._inbox: list[Row] = []
        self._num_unfinished = 0
        """Rows accepted and not yet handed over or dropped."""
        self._changed = threading.Condition()
        """Guards everything above and below that both sides touch; notified at every change that someone waits for."""
        self._door_closed = False
        self._in_flight = engine.update == "inflight"
        self._incoming: tuple[int, LlamaWeights] | None = None
        """What the engine thread is to take before its next pass."""
        self._closing = False
        self._failure: BaseException | None = None
        self._load_lock = threading.Lock()
        self._counters = _Counters()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._thread.start()

    # ---- callers' side ----

    def generate(self, requests: Iterable[Request]) -> Iterator[Completion]:
        """See `GenerationEngine`. Checks and queues at once; the rows run whether or not the result is iterated, but an
        iterator that is closed early takes its unfinished rows with it. Raises RequestError also where a row asks for
        another version than the resident one, and RuntimeError if the engine is asleep or has stopped."""
        rows = list(requests)
        for request in rows:
            check_request(request, self._max_seq, self._shape.vocab, self._eos_ids)
        call = Call(queue.SimpleQueue(), threading.Event())
        with self._changed:
            self._changed.wait_for(lambda: not self._door_closed or self._closing)
            self._check_running()
            if not self._cache.allocated:
                raise RuntimeError("the engine is asleep: wake() it first")
            for request in rows:
                if request.version != self.version:
                    raise RequestError(
                        f"row {request.row} asks for version {request.version} of the weights; "
                        f"version {self.version} is resident"
                    )
            self._inbox.extend(Row(request, call, self._eos_ids) for request in rows)
            self._num_unfinished += len(rows)
            self._changed.notify_all()
        return self._results(call, len(rows))

    def load_weights(self, version: int, tensors: Mapping[str, torch.Tensor]) -> None:
        """See `GenerationEngine`. The new tensors are packed beside the old ones while rows still run."""
        check_tensors(self._shape, tensors, complete=False)
        with self._load_lock:
            started = time.perf_counter()
            with torch.inference_mode():
                new = refit_weights(self._shape, self._weights, tensors)
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
                    self._weights, self.version = new, version
                finally:
                    self._door_closed = False
                    self._changed.notify_all()

    def sleep(self) -> None:
        """See `GenerationEngine`. Raises RuntimeError while rows are in flight."""
        with self._changed:
            self._check_running()
            if not self._idle:
                raise RuntimeError(f"{self._num_unfinished} rows are in flight: sleep() after them")
            self._cache.release()

    def wake(self) -> None:
        with self._changed:
            self._check_running()
            if not self._cache.allocated:
                self._cache.allocate()

    def stats(self) -> EngineStats:
        with self._changed:
            counted, self._counters = self._counters, _Counters()
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
        )

    def close(self) -> None:
        """Stops the thread and gives the cache back; callers that still wait get RuntimeError. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._cache.release()

    @property
    def kernels(self) -> str:
        """Which kernels run: `native` or `torch`."""
        return self._kernels.name

    def _check_running(self) -> None:
        if self._closing:
            raise RuntimeError("the engine has stopped") from self._failure

    @property
    def _idle(self) -> bool:
        return self._num_unfinished == 0

    def _results(self, call: Call, num_rows: int) -> Iterator[Completion]:
        try:
            for _ in range(num_rows):
                completion = call.results.get()
                if completion is None:
                    raise RuntimeError("the engine has stopped") from self._failure
                yield completion
        finally:
            call.abandoned.set()

    # ---- engine thread ----

    def _run(self) -> None:
        """Runs the loop; however it ends, nobody is left waiting. An error also reaches threading's excepthook."""
        try:
            torch.set_num_threads(self._threads)
            with torch.inference_mode():
                self._loop()
        finally:
            with self._changed:
                self._failure = sys.exc_info()[1]
                self._closing = True
                for row in (*self._inbox, *self._scheduler.waiting, *self._scheduler.flying):
                    row.call.results.put(None)
                self._inbox.clear()
                self._num_unfinished = 0
                self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or self._incoming is not None or not self._idle)
                if self._closing:
                    return
                if self._incoming is not None:
                    self.version, self._weights = self._incoming
                    self._incoming = None
                    self._scheduler.recompute()
                    self._changed.notify_all()
                self._scheduler.waiting.extend(self._inbox)
                self._inbox.clear()
                gone = self._scheduler.drop_abandoned()
                if self._speculation is not None:
                    for row in gone:
                        self._speculation.finish(row)
                self._count_finished(len(gone))
            if not self._scheduler.idle:
                self._step()

    def _step(self) -> None:
        """One pass: plan, forward, sample, hand over."""
        started = time.perf_counter()
        scheduler = self._scheduler
        chunks = scheduler.plan(self._drafts())
        sampling = [chunk for chunk in chunks if chunk.samples]
        kept = self._extend(chunks, sampling) if chunks else []
        finished = [chunk.row for chunk in sampling if chunk.row.finished is not None]
        for row in finished:
            scheduler.retire(row)
        with self._changed:
            counters = self._counters
            if self._speculation is not None:
                decoded = all(chunk.count == 1 for chunk in chunks)
                self._speculation.observe(sampling, kept, time.perf_counter() - started if decoded else None)
                for row in finished:
                    self._speculation.finish(row)
            counters.tokens += sum(kept)
            counters.decode_steps += 1
            counters.decoded_rows += len(sampling)
            counters.peak_blocks = max(counters.peak_blocks, scheduler.pool.peak_used)
            counters.prompt_tokens += sum(chunk.count for chunk in chunks if chunk.count > 1)
            counters.preemptions += scheduler.num_preemptions
            counters.shared_tokens += scheduler.num_shared_tokens
            scheduler.num_preemptions = scheduler.num_shared_tokens = 0
            scheduler.pool.reset_peak()
            counters.rows += len(finished)
            counters.busy_s += time.perf_counter() - started
            for row in finished:
                reason = row.finished
                assert reason is not None
                row.call.results.put(row.completion(reason))
            self._count_finished(len(finished))

    def _drafts(self) -> dict[Row, tuple[int, ...]]:
        if self._speculation is None:
            return {}
        decoding = [row for row in self._scheduler.flying if row.num_pending == 1]
        prompts = sum(row.num_pending for row in self._scheduler.flying if row.num_pending > 1)
        return self._speculation.propose(decoding, min(prompts, PASS_TOKENS)) if decoding else {}

    def _build_speculation(self, config: SpeculationConfig, drafter: Drafter | None) -> Speculation | None:
        """Times passes of several sizes first, on empty blocks. Raises ValueError for a length that cannot work."""
        if drafter is None and config.drafter == "ngram":
            drafter = NgramDrafter()
        if drafter is None:
            return None
        if config.max_tokens < 1:
            raise ValueError(f"engine.speculation.max_tokens is {config.max_tokens}; a draft has at least 1")
        seconds: dict[int, float] = {}
        if config.lengths == "measured":
            before = torch.get_num_threads()
            torch.set_num_threads(self._threads)
            try:
                seconds = {size: self._time_pass(size) for size in CALIBRATED}
            finally:
                torch.set_num_threads(before)
        costs = PassCosts(seconds or {1: 1.0, 2: 1.0})
        return Speculation(drafter, costs, config.max_tokens, config.lengths)

    def _time_pass(self, num_tokens: int, repeats: int = 3) -> float:
        """Seconds of a pass that feeds so many tokens, each a row of its own, and samples after each: the least of
        several, since other processes only ever add."""
        pool = self._scheduler.pool
        block = pool.take()
        index = torch.arange(num_tokens, device=self._device)
        tables = torch.full((num_tokens, 1), block, dtype=torch.int32, device=self._device)
        tokens = Tokens(index * 0, index * 0, index.int(), tables, 1)
        keys = np.arange(num_tokens, dtype=np.uint64)
        seconds = []
        for _ in range(repeats):
            started = time.perf_counter()
            hidden = forward(self._weights, self._shape, self._kernels, tokens, self._cache)
            scores = logits(self._weights, self._shape, self._kernels, hidden, index)
            chosen, _ = self._kernels.choose(scores, [1.0] * num_tokens, keys)
            chosen.tolist()
            seconds.append(time.perf_counter() - started)
        pool.release([block])
        return min(seconds)

    def _extend(self, chunks: Sequence[Chunk], sampling: Sequence[Chunk]) -> list[int]:
        """Runs the pass; how many tokens each sampling row gets."""
        tokens, drawn = lay_out(chunks, self._device)
        hidden = forward(self._weights, self._shape, self._kernels, tokens, self._cache)
        if not sampling:
            return []
        draws = draw(self._kernels, logits(self._weights, self._shape, self._kernels, hidden, drawn), sampling)
        return [keep(chunk, drawn_here, self.version) for chunk, drawn_here in zip(sampling, draws, strict=True)]

    def _count_finished(self, num_rows: int) -> None:
        """Under the lock: so many rows less to wait for."""
        self._num_unfinished -= num_rows
        if num_rows and self._idle:
            self._changed.notify_all()


def _choose_kernels(engine: EngineConfig, device: torch.device) -> Kernels:
    if engine.kernels == "torch" or (engine.kernels == "auto" and device.type != "cpu"):
        return TorchKernels()
    if device.type != "cpu":
        raise NoNativeKernelsError(f"engine.kernels is native; they run on a CPU, not on {device}")
    try:
        return load_native_kernels()
    except NoNativeKernelsError as error:
        if engine.kernels == "native":
            raise
        warnings.warn(f"generation runs on plain torch, which is slower: {error}", stacklevel=3)
        return TorchKernels()


def _num_blocks(engine: EngineConfig, shape: LlamaShape, max_seq: int) -> int:
    """As many as all slots can use, or as the budget pays for. Raises ValueError if that is not one row."""
    if engine.slots < 1:
        raise ValueError(f"engine.slots is {engine.slots}; at least 1 row must be decoded at a time")
    per_block = block_bytes(shape.num_layers, shape.num_kv_heads, shape.head_dim, ATTENTION_DTYPE)
    per_row = blocks_for(max_seq)
    affordable = engine.kv_budget_mb * 2**20 // per_block
    if affordable < per_row:
        raise ValueError(
            f"engine.kv_budget_mb is {engine.kv_budget_mb}; one row of {max_seq} tokens needs "
            f"{-(-per_row * per_block // 2**20)}"
        )
    return min(engine.slots * per_row, affordable)


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
