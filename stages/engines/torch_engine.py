"""The embedded generation engine: Llama in plain torch, with rows joining and leaving the batch at every token.

    caller threads                              engine thread (the only one that touches the cache)
    --------------                              ---------------------------------------------------
    generate: check, queue the rows  ──rows──►  loop: waits for rows
              take results as they   ◄─result─        admits queued rows into free slots, prefills them
              finish                                  decodes one token for every row in flight
    load_weights: check, pack, close the door         hands over the rows that finished
              wait until all accepted ◄─drained─
              rows finished, swap, open

A call waits at the door while weights are exchanged, and is then refused if it asks for another version than the one
that came in; so whoever sees `engine.version` differ loads first and generates afterwards.

May import torch, stages.engines, stages.hf_files.
"""

from __future__ import annotations

import itertools
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stages.engines.config import EngineConfig
from stages.engines.kv_cache import KVCache, bytes_per_slot, round_up
from stages.engines.noise import noise_keys
from stages.engines.protocol import Completion, EngineStats, Request, RequestError
from stages.engines.requests import check_request
from stages.engines.sampling import sample
from stages.engines.torch_llama import (
    ATTENTION_DTYPE,
    build_weights,
    check_tensors,
    decode_attention,
    forward,
    logits,
    prefill_attention,
    read_shape,
    refit_weights,
)
from stages.hf_files import read_config, read_eos_ids, read_weights
from storage.records import FinishReason

_PREFILL_TOKENS = 2048
"""Prompt tokens of one prefill pass (or one prompt, if it is longer): bounds the memory of activations."""


@dataclass(frozen=True, eq=False)
class _Call:
    """One `generate`: where its results go, and whether its caller went away."""

    results: queue.SimpleQueue[Completion | None]
    """None: the engine stopped."""
    abandoned: threading.Event


@dataclass(frozen=True, eq=False)
class _Row:
    """A row in flight; its index in the engine's list is its slot."""

    request: Request
    call: _Call
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    @property
    def length(self) -> int:
        """Prompt and response so far: the position of the next token."""
        return len(self.request.tokens) + len(self.tokens)


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
    ) -> None:
        """`path`: a Hugging Face directory or `random:tiny`, whose weights become `version`. `max_seq`: longest prompt
        plus response, in tokens. `threads`: of torch, in the engine's own thread. `eos_token_ids`: empty means the
        model's own. Raises ValueError for sizes that cannot work, WeightsError for weights that do not fit."""
        config = read_config(path)
        self._shape = read_shape(config)
        if not 0 < max_seq <= self._shape.max_positions:
            raise ValueError(f"max_seq is {max_seq}; {path!r} has positions for {self._shape.max_positions} tokens")
        self._device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._max_seq, self._threads = max_seq, threads
        self._eos_ids = frozenset(eos_token_ids or read_eos_ids(path))
        self._cache = self._build_cache(engine)
        tensors = read_weights(path)
        check_tensors(self._shape, tensors, complete=True)
        with torch.inference_mode():
            self._weights = build_weights(self._shape, tensors, getattr(torch, engine.dtype), self._device, max_seq)
        self.version = version
        self._waiting: deque[_Row] = deque()
        self._flying: list[_Row] = []
        self._changed = threading.Condition()
        """Guards everything above and below that both sides touch; notified at every change that someone waits for."""
        self._door_closed = False
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
        call = _Call(queue.SimpleQueue(), threading.Event())
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
            self._waiting.extend(_Row(request, call) for request in rows)
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
                self._door_closed = True
                try:
                    self._changed.wait_for(lambda: self._idle or self._closing)
                    self._check_running()
                    self._weights, self.version = new, version
                    self._counters.refit_s += seconds
                finally:
                    self._door_closed = False
                    self._changed.notify_all()

    def sleep(self) -> None:
        """See `GenerationEngine`. Raises RuntimeError while rows are in flight."""
        with self._changed:
            self._check_running()
            if not self._idle:
                raise RuntimeError(f"{len(self._waiting) + len(self._flying)} rows are in flight: sleep() after them")
            self._cache.release()

    def wake(self) -> None:
        with self._changed:
            self._check_running()
            if not self._cache.allocated:
                self._cache.allocate()

    def stats(self) -> EngineStats:
        with self._changed:
            counted, self._counters = self._counters, _Counters()
        slots = self._cache.num_slots
        return EngineStats(
            tokens=counted.tokens,
            rows=counted.rows,
            decode_steps=counted.decode_steps,
            mean_occupancy=counted.decoded_rows / (slots * counted.decode_steps) if counted.decode_steps else 0.0,
            kv_peak_fraction=counted.peak_tokens / self._cache.capacity_tokens,
            preemptions=0,
            refit_s=counted.refit_s,
            busy_s=counted.busy_s,
        )

    def close(self) -> None:
        """Stops the thread and gives the cache back; callers that still wait get RuntimeError. Twice is harmless."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._cache.release()

    @property
    def num_slots(self) -> int:
        """Rows decoded together: `engine.slots`, or as many as the KV budget holds."""
        return self._cache.num_slots

    def _build_cache(self, engine: EngineConfig) -> KVCache:
        shape = self._shape
        per_slot = bytes_per_slot(shape.num_layers, shape.num_kv_heads, shape.head_dim, self._max_seq, ATTENTION_DTYPE)
        affordable = engine.kv_budget_mb * 2**20 // per_slot
        if engine.slots < 1:
            raise ValueError(f"engine.slots is {engine.slots}; at least 1 row must be decoded at a time")
        if affordable < 1:
            raise ValueError(
                f"engine.kv_budget_mb is {engine.kv_budget_mb}; one row of {self._max_seq} tokens needs "
                f"{-(-per_slot // 2**20)}"
            )
        return KVCache(
            shape.num_layers,
            min(engine.slots, affordable),
            shape.num_kv_heads,
            shape.head_dim,
            self._max_seq,
            ATTENTION_DTYPE,
            self._device,
        )

    def _check_running(self) -> None:
        if self._closing:
            raise RuntimeError("the engine has stopped") from self._failure

    @property
    def _idle(self) -> bool:
        return not self._waiting and not self._flying

    def _results(self, call: _Call, num_rows: int) -> Iterator[Completion]:
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
                for row in itertools.chain(self._waiting, self._flying):
                    row.call.results.put(None)
                self._waiting.clear()
                self._flying.clear()
                self._changed.notify_all()

    def _loop(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closing or not self._idle)
                if self._closing:
                    return
                admitted = self._admit()
                if self._idle:  # all that waited had been abandoned
                    self._changed.notify_all()
            started = time.perf_counter()
            if admitted:
                self._prefill(admitted)
            if self._flying:
                self._decode()
            with self._changed:
                self._counters.busy_s += time.perf_counter() - started

    def _admit(self) -> list[_Row]:
        """Moves waiting rows into free slots: as many as one prefill pass takes, neighbours of one length together."""
        admitted: list[_Row] = []
        num_tokens = 0
        while self._waiting and len(self._flying) + len(admitted) < self._cache.num_slots:
            row = self._waiting[0]
            num_tokens += row.length
            if admitted and num_tokens > _PREFILL_TOKENS:
                break
            self._waiting.popleft()
            if not row.call.abandoned.is_set():
                admitted.append(row)
        admitted.sort(key=lambda r: r.length)
        self._flying.extend(admitted)
        return admitted

    def _prefill(self, rows: list[_Row]) -> None:
        """Runs the prompts of rows that were just admitted (the last slots), and samples their first tokens."""
        first = len(self._flying) - len(rows)
        lengths = [row.length for row in rows]
        tokens = torch.tensor([t for row in rows for t in row.request.tokens], device=self._device)
        positions = torch.tensor([p for n in lengths for p in range(n)], device=self._device)
        slots = list(range(first, len(self._flying)))
        attention = prefill_attention(self._cache, self._shape, slots, lengths)
        hidden = forward(self._weights, self._shape, tokens, positions, attention)
        last = torch.tensor(list(itertools.accumulate(lengths)), device=self._device) - 1
        self._extend(rows, logits(self._weights, self._shape, hidden[last]))
        self._retire(first)

    def _decode(self) -> None:
        """One more token for every row in flight."""
        rows = self._flying
        lengths = [row.length for row in rows]
        tokens = torch.tensor([row.tokens[-1] for row in rows], device=self._device)
        positions = torch.tensor(lengths, device=self._device) - 1
        span = min(round_up(max(lengths)), round_up(self._max_seq))
        attention = decode_attention(self._cache, self._shape, positions, span)
        hidden = forward(self._weights, self._shape, tokens, positions, attention)
        self._extend(rows, logits(self._weights, self._shape, hidden))
        with self._changed:
            self._counters.decode_steps += 1
            self._counters.decoded_rows += len(rows)
        self._retire(0)

    def _extend(self, rows: Sequence[_Row], logits_NV: torch.Tensor) -> None:
        """Samples the next token of each row. Raises FloatingPointError if the model's output is not finite."""
        requests = [row.request for row in rows]
        banned = [
            (i, token)
            for i, row in enumerate(rows)
            for token in (
                *row.request.sampling.suppress_token_ids,
                *(self._eos_ids if len(row.tokens) < row.request.sampling.min_new_tokens else ()),
            )
        ]
        key_parts = [(r.seed, r.step, r.row, row.length) for r, row in zip(requests, rows, strict=True)]
        keys = noise_keys(*np.array(key_parts, np.int64).T)
        tokens, logprobs = sample(logits_NV, [r.sampling.temperature for r in requests], banned, keys)
        for row, token, logprob in zip(rows, tokens.tolist(), logprobs.tolist(), strict=True):
            if not -float("inf") < logprob <= 1e-3:
                raise FloatingPointError(f"row {row.request.row}: the model's output is not finite ({logprob=})")
            row.tokens.append(token)
            row.logprobs.append(logprob)

    def _retire(self, first: int) -> None:
        """Hands over the finished rows from slot `first` on, and closes the gaps they leave."""
        with self._changed:
            self._counters.tokens += len(self._flying) - first
            self._counters.peak_tokens = max(self._counters.peak_tokens, sum(row.length for row in self._flying))
            for slot in reversed(range(first, len(self._flying))):
                row = self._flying[slot]
                reason = self._finished(row)
                if reason is None and not row.call.abandoned.is_set():
                    continue
                if reason is not None:
                    row.call.results.put(self._completion(row, reason))
                    self._counters.rows += 1
                last = self._flying.pop()
                if last is not row:
                    self._cache.move(len(self._flying), slot, last.length)
                    self._flying[slot] = last
            if self._idle:
                self._changed.notify_all()

    def _finished(self, row: _Row) -> FinishReason | None:
        if row.tokens[-1] in self._eos_ids:
            return FinishReason.STOP
        if len(row.tokens) >= row.request.sampling.max_new_tokens:
            return FinishReason.LENGTH
        return None

    def _completion(self, row: _Row, reason: FinishReason) -> Completion:
        return Completion(
            row=row.request.row,
            tokens=np.array(row.tokens, np.int32),
            logprobs=np.minimum(np.array(row.logprobs, np.float32), 0.0),
            versions=np.full(len(row.tokens), row.request.version, np.int32),
            finish_reason=reason,
        )


@dataclass
class _Counters:
    """What `stats` reports, since its last call."""

    tokens: int = 0
    rows: int = 0
    decode_steps: int = 0
    decoded_rows: int = 0
    peak_tokens: int = 0
    refit_s: float = 0.0
    busy_s: float = 0.0
