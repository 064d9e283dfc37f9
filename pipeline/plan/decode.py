"""Seconds of decoding, with rows that join and leave the batch in flight.

In a pass, every row of the batch feeds its last token to the model and gains the next token. With speculation, a row
also feeds `drafts_per_pass` guessed tokens and gains `tokens_per_pass` tokens. A pass is limited by the engine's memory
bandwidth or by its arithmetic:

    pass       = max(weights_s + context * context_s,  arithmetic) / efficiency  +  collectives  +  calls * call_s
    arithmetic = fed * (rows * token_s + context * attention_s)

    rows         number of rows in the batch
    context      number of tokens so far of all these rows together
    weights_s    seconds to read all weights, the same for any number of rows: few rows cost nearly as much as many
    context_s    seconds to read the keys and values of one token
    fed          tokens that a row feeds in a pass: 1 + drafts_per_pass
    token_s      seconds of arithmetic for one token: 2 operations per weight
    attention_s  seconds of arithmetic for one token's attention to one token of its row's context
    efficiency   calibrated share of the hardware's peaks that passes reach
    collectives  seconds of the all-reduces and sends of the pass
    calls        1 + rows * row_calls: the engine's Python works once per pass, and also for each row of the pass
    call_s       calibrated seconds of this Python code for each call

The prefill of a prompt computes the output layer once, for its last token.

Rows are admitted in order of arrival while `max_rows` and the memory of keys and values allow it. From the end of one
row to the end of the next, the batch stays the same and the context grows linearly. So the time of this interval has a
closed form: the number of its passes times the cost of the middle pass. The simulation goes from interval to interval
and counts passes, which may be fractions of passes (a fluid simulation). A heap holds, for each row in flight, the
number of the pass at which the row will end.

**Tensor parallelism** divides weights, keys and values, and arithmetic. Each block all-reduces twice in a pass.
**Pipeline parallelism** runs g groups of rows in p stages. A group's pass visits all stages, and the group's next token
comes after max(p, g) stage times. Weights are read once for each group.

The rows of all shards of a replica form one queue (`RowQueue`): rows of a later shard wait while the batch is full.

Not modelled:

- prefill in chunks: here a prefill delays the rows in flight for its whole time
- keys and values that rows of one prompt share
- preemption, and rows that migrate
- the time to make drafts
- the gathering of logits over tensor-parallel ranks

Pure.
"""

from __future__ import annotations

import heapq
import operator
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pipeline.plan.links import Link, all_reduce_s, send_s
from stages.models.flops import matrix_numbers
from stages.models.spec import ModelSpec

Shard = TypeVar("Shard", bound=Hashable)
"""Type of the names of shards in a `RowQueue`. The caller chooses it."""


@dataclass(frozen=True)
class DecodeSpeed:
    """Costs of the passes of one replica (all its ranks together). Seconds are theoretical: the time that the work
    would take at the hardware's peak rates."""

    max_rows: int
    """Maximum number of rows in the batch."""
    max_context: float
    """Maximum number of tokens whose keys and values fit in memory."""
    weights_s: float
    """Seconds of a pass to read all weights."""
    context_s: float
    """Seconds to read the keys and values of one token of context."""
    token_s: float
    """Seconds of arithmetic for one token, without attention."""
    attention_s: float
    """Seconds of arithmetic for one token's attention to one token of context."""
    output_s: float = 0.0
    """Seconds of arithmetic in the output layer for one token. They are a part of `token_s`."""
    reduces: int = 0
    """Number of all-reduces in a pass."""
    ranks: int = 1
    """Number of tensor-parallel ranks, which take part in an all-reduce."""
    link: Link = field(default_factory=lambda: Link(0.0, float("inf")))
    row_bytes: float = 0.0
    """Number of bytes that an all-reduce or a send carries for each fed token."""
    sends: int = 0
    """Number of sends from stage to stage in a pass."""
    groups: int = 1
    """Number of groups that the rows are divided into. The groups take their passes in turn."""
    tokens_per_pass: float = 1.0
    """Number of tokens that a row gains in a pass."""
    drafts_per_pass: float = 0.0
    """Number of guessed tokens that a row feeds in a pass for verification, in addition to its last token."""
    row_calls: float = 0.0
    """Fixed cost of each row in a pass, as a multiple of the fixed cost of the pass itself. A pass with r rows has
    fixed costs of (1 + r x `row_calls`) x `PassRates.call_s` seconds."""

    @property
    def fed_per_pass(self) -> float:
        """Number of tokens that a row feeds in a pass."""
        return 1.0 + self.drafts_per_pass

    def prefill_s(self, prompt: float) -> float:
        """Return the seconds of a prefill. It computes the keys and values of a prompt of `prompt` tokens, and the
        first token of the response."""
        return prompt * (self.token_s - self.output_s + prompt / 2 * self.attention_s) + self.output_s

    def links_s(self, rows: float) -> float:
        """Return the seconds that a pass spends in collectives and sends."""
        num_bytes = rows * self.fed_per_pass / self.groups * self.row_bytes
        return self.reduces * all_reduce_s(self.link, self.ranks, num_bytes) + (
            self.sends * send_s(self.link, num_bytes) if self.sends else 0.0
        )


@dataclass(frozen=True)
class Decoded:
    """The work of decoding some rows. Each field except `calls` is the time in seconds that one cause takes at the
    hardware's peaks, such as reading weights or computing. These times add up. The field `calls` is the number of fixed
    costs: one for each pass, and `DecodeSpeed.row_calls` for each row of a pass."""

    weights: float = 0.0
    context: float = 0.0
    """Seconds to read the keys and values. Like `weights`, it counts only passes that memory bandwidth limits."""
    arithmetic: float = 0.0
    """Seconds of arithmetic in the passes in which arithmetic takes longer than reading memory. In all other passes,
    the fields `weights` and `context` count instead."""
    prefill: float = 0.0
    links: float = 0.0
    calls: float = 0.0

    @property
    def roofline(self) -> float:
        return self.weights + self.context + self.arithmetic + self.prefill


_Parts = tuple[float, float, float, float, float, float]
"""The fields of `Decoded` in their order. Tuples are made and added faster than records."""


def decode_speed(
    spec: ModelSpec,
    *,
    flops: float,
    bytes_per_s: float,
    number_bytes: int,
    tensor: int,
    pipeline: int,
    groups: int,
    max_rows: int,
    kv_bytes: float,
    link: Link,
    tokens_per_pass: float = 1.0,
    drafts_per_pass: float = 0.0,
    row_calls: float = 0.0,
) -> DecodeSpeed:
    """Return the costs of the passes of a replica, in seconds at the hardware's peaks.

    Args:
        flops: peak rate of one rank, in FLOP/s.
        bytes_per_s: peak memory bandwidth of one rank.
        number_bytes: bytes of one number of the weights, keys and values.
        tensor, pipeline: numbers of tensor-parallel ranks and of pipeline stages.
        groups: number of groups of rows that are in the pipeline's stages at once.
        kv_bytes: memory of all ranks together for keys and values. Each rank has an equal part.
        link: the link between the ranks.
        max_rows, tokens_per_pass, drafts_per_pass, row_calls: see `DecodeSpeed`.
    """
    blocks, output = spec.num_layers * matrix_numbers(spec), spec.vocab_size * spec.hidden_size
    rounds = max(pipeline, groups)  # a group's next token comes after this many stage times
    ranks = tensor * pipeline
    # a head is never divided: with more ranks than key-value heads, several ranks hold and read the same head
    kept = 2 * spec.num_layers * spec.head_dim * max(spec.num_kv_heads / tensor, 1.0) * number_bytes
    per_row = rounds / groups * 2 / ranks / flops  # seconds of a token for each weight
    return DecodeSpeed(
        max_rows=max_rows,
        max_context=kv_bytes / (tensor * kept),
        weights_s=rounds / pipeline * (blocks + output) * number_bytes / tensor / bytes_per_s,
        context_s=rounds / groups * kept / pipeline / bytes_per_s,
        token_s=per_row * (blocks + output),
        attention_s=per_row * 2 * spec.num_layers * spec.q_size,
        output_s=per_row * output,
        reduces=2 * spec.num_layers * rounds // pipeline if tensor > 1 else 0,
        ranks=tensor,
        link=link,
        row_bytes=spec.hidden_size * number_bytes,
        sends=rounds if pipeline > 1 else 0,
        groups=groups,
        tokens_per_pass=tokens_per_pass,
        drafts_per_pass=drafts_per_pass,
        row_calls=row_calls,
    )


@dataclass(frozen=True)
class PassRates:
    """Calibrated speed of an engine's passes."""

    efficiency: float = 1.0
    """Share of the hardware's peaks that passes reach."""
    link_efficiency: float = 1.0
    call_s: float = 0.0
    """Fixed cost of a pass in seconds, in addition to its work. Each row of the pass adds the fraction
    `DecodeSpeed.row_calls` of this cost."""


class RowQueue(Generic[Shard]):
    """The rows of one replica, in flight and waiting. All times are in seconds, and time only moves forward.

    The rows of all shards form one queue, and are admitted in the order in which their shards were added. A shard ends
    when its last row ends.
    """

    def __init__(self, speed: DecodeSpeed, prompt: float, rates: PassRates | None = None) -> None:
        """`prompt`: mean number of tokens of a prompt."""
        self._speed, self._prompt, self._rates = speed, prompt, rates or PassRates()
        self._fed = speed.fed_per_pass
        self._now = self._before = 0.0
        """`_now`: the time. `_before`: remaining seconds of prefills and weight loading before the next pass."""
        self._clock = self._context = self._reserved = 0.0
        """`_clock`: number of passes so far. `_context`: number of tokens of all rows in flight now. `_reserved`:
        number of tokens that all rows in flight will have when they end."""
        self._waiting: deque[tuple[int, Shard]] = deque()
        self._flight: list[tuple[float, int, int, Shard]] = []
        """A heap with a tuple for each row in flight: the pass at which the row ends, its place in the order of
        admission, the length of its response, and its shard."""
        self._admitted = 0
        self._left: dict[Shard, int] = {}
        """Shard -> number of its rows that have not ended."""
        self._total: _Parts = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        """Work of the engine so far."""
        self._begun: dict[Shard, _Parts] = {}
        """Shard -> value of `_total` when the shard was added."""
        self._links_s: dict[int, float] = {}
        """Number of rows in a pass -> seconds that the pass spends in collectives and sends."""
        self._ended: list[tuple[Shard, Decoded]] = []
        self._passes = self._passes_s = 0.0
        """Number of passes to the next end of a row, and their seconds, as `_next_row_end` computed them last."""
        self._work = self._total
        """Work of these passes."""

    def add(self, shard: Shard, lengths: Sequence[int], now: float) -> None:
        """Add a shard whose responses have these lengths. `lengths` must not be empty."""
        self._advance(now)
        self._left[shard], self._begun[shard] = len(lengths), self._total
        self._waiting.extend((length, shard) for length in lengths)

    def pause(self, seconds: float, now: float) -> None:
        """Stop all passes for `seconds` after the time `now`, because the engine loads new weights."""
        self._advance(now)
        self._before += seconds

    def drop(self, shard: Shard, now: float) -> Decoded:
        """Remove a shard whose rows have not all ended. In the replay of a recorded run, a shard may have ended earlier
        than predicted. Return the engine's work that is predicted for the whole shard: from the moment at which it was
        added to the predicted end of its last row."""
        self._advance(now)
        ahead = self.copy()
        while shard in ahead._left:
            ahead._next_row_end()
            ahead._end_rows()
        for end, _, length, of in self._flight:
            if of == shard:
                self._reserved -= self._prompt + length
                self._context -= self._prompt + length - (end - self._clock) * self._speed.tokens_per_pass
        self._flight = [row for row in self._flight if row[3] != shard]
        heapq.heapify(self._flight)
        self._waiting = deque(row for row in self._waiting if row[1] != shard)
        self._left.pop(shard, None)
        self._begun.pop(shard, None)
        self._ended = [(of, work) for of, work in self._ended if of != shard]
        return next(work for of, work in ahead._ended if of == shard)

    def next_end(self) -> float | None:
        """Return the time at which the next row ends if no shard is added before that time. Return None if the queue is
        empty."""
        if self._ended:
            return self._now
        return self._next_row_end() if self._left else None

    def finish(self) -> list[tuple[Shard, Decoded]]:
        """Advance to the time that `next_end` returned last. Return the shards that end at this time, each with the
        engine's work since the shard was added. The list is empty if only rows of unfinished shards end."""
        if not self._ended:
            self._end_rows()
        ended, self._ended = self._ended, []
        return ended

    def copy(self) -> RowQueue[Shard]:
        """Return a queue in the same state."""
        copied: RowQueue[Shard] = object.__new__(RowQueue)
        vars(copied).update(vars(self))
        copied._waiting, copied._flight = self._waiting.copy(), self._flight.copy()
        copied._left, copied._begun, copied._ended = self._left.copy(), self._begun.copy(), self._ended.copy()
        return copied

    def _advance(self, now: float) -> None:
        """Advance to time `now`."""
        while self._left and self._now < now:
            if self._next_row_end() <= now:
                self._end_rows()
                continue
            available_s = now - self._now
            if available_s > self._before:
                passes = self._passes * (available_s - self._before) / self._passes_s
                self._passed(passes, self._stretch(passes))
            self._before, self._now = max(0.0, self._before - available_s), now
        self._now = max(self._now, now)

    def _next_row_end(self) -> float:
        """Return the time at which the next row ends if no shard is added before that time."""
        if self._waiting:
            self._admit()
        self._passes = self._flight[0][0] - self._clock
        self._work = self._stretch(self._passes)
        self._passes_s = self._seconds(self._work)
        return self._now + (self._before + self._passes_s)

    def _end_rows(self) -> None:
        """Advance to the time that `_next_row_end` returned last, and remove the rows that end then."""
        self._now += self._before + self._passes_s
        self._before = 0.0
        self._passed(self._passes, self._work)
        flight, prompt = self._flight, self._prompt
        # the first row of the heap ends now, but `_clock` may differ from its end by a rounding error
        self._clock = clock = flight[0][0]
        while flight and flight[0][0] <= clock:
            _, _, length, shard = heapq.heappop(flight)
            self._context -= prompt + length
            self._reserved -= prompt + length
            self._left[shard] -= 1
            if not self._left[shard]:
                del self._left[shard]
                work = map(operator.sub, self._total, self._begun.pop(shard))
                self._ended.append((shard, Decoded(*work)))

    def _admit(self) -> None:
        """Let waiting rows join the batch while `max_rows` and `max_context` allow it. An empty batch takes any row."""
        speed, joined = self._speed, 0
        while self._waiting and len(self._flight) < speed.max_rows:
            length, shard = self._waiting[0]
            if self._flight and self._reserved + self._prompt + length > speed.max_context:
                break
            self._waiting.popleft()
            self._admitted += 1
            heapq.heappush(self._flight, (self._clock + length / speed.tokens_per_pass, self._admitted, length, shard))
            self._context += self._prompt
            self._reserved += self._prompt + length
            joined += 1
        if joined:
            prefill = joined * speed.prefill_s(self._prompt)
            work = 0.0, 0.0, 0.0, prefill, 0.0, 0.0
            self._add(work)
            self._before += self._seconds(work)

    def _stretch(self, count: float) -> _Parts:
        """Return the work of the next `count` passes, in which no row joins or leaves."""
        speed, rows = self._speed, len(self._flight)
        middle = self._context + rows * count * speed.tokens_per_pass / 2
        read_kv = middle * speed.context_s
        computed = self._fed * (rows * speed.token_s + middle * speed.attention_s)
        if rows not in self._links_s:
            self._links_s[rows] = speed.links_s(rows)
        links, calls = count * self._links_s[rows], count * (1.0 + rows * speed.row_calls)
        if computed > speed.weights_s + read_kv:
            return 0.0, 0.0, count * computed, 0.0, links, calls
        return count * speed.weights_s, count * read_kv, 0.0, 0.0, links, calls

    def _seconds(self, work: _Parts) -> float:
        weights, context, arithmetic, prefill, links, calls = work
        rates = self._rates
        roofline = (weights + context + arithmetic + prefill) / rates.efficiency
        return roofline + links / rates.link_efficiency + calls * rates.call_s

    def _passed(self, count: float, work: _Parts) -> None:
        self._add(work)
        self._context += len(self._flight) * count * self._speed.tokens_per_pass
        self._clock += count

    def _add(self, work: _Parts) -> None:
        a, b, c, d, e, f = self._total
        weights, context, arithmetic, prefill, links, calls = work
        self._total = a + weights, b + context, c + arithmetic, d + prefill, e + links, f + calls


def least_work(speed: DecodeSpeed, prompt: float, lengths: Sequence[int]) -> Decoded:
    """Return a lower bound of the work of decoding these responses.

    The bound assumes that every pass has `max_rows` rows, so that weights are read as few times as possible. It
    therefore holds for any order of the rows. It also holds if rows of other steps are decoded in the same passes.

    A pass takes the seconds of its memory reads or the seconds of its arithmetic, whichever is larger. So all passes
    together take at least the seconds of all memory reads, and at least the seconds of all arithmetic. The larger of
    these two sums is returned.
    """
    row_passes = sum(lengths) / speed.tokens_per_pass
    passes = row_passes / speed.max_rows
    context = sum(length / speed.tokens_per_pass * (prompt + length / 2) for length in lengths)
    read, read_kv = passes * speed.weights_s, context * speed.context_s
    computed = speed.fed_per_pass * (row_passes * speed.token_s + context * speed.attention_s)
    prefill, links = len(lengths) * speed.prefill_s(prompt), passes * speed.links_s(speed.max_rows)
    calls = passes + row_passes * speed.row_calls
    if computed > read + read_kv:
        return Decoded(arithmetic=computed, prefill=prefill, links=links, calls=calls)
    return Decoded(weights=read, context=read_kv, prefill=prefill, links=links, calls=calls)


def decode(speed: DecodeSpeed, prompt: float, lengths: Sequence[int]) -> Decoded:
    """Return the work of decoding responses of these lengths to prompts of `prompt` tokens, on a replica that has no
    other rows."""
    if not lengths:
        return Decoded()
    queue = RowQueue[None](speed, prompt)
    queue.add(None, lengths, 0.0)
    ended: list[tuple[None, Decoded]] = []
    while not ended:
        queue.next_end()
        ended = queue.finish()
    return ended[0][1]
