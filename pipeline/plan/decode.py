"""Seconds of decoding, with rows that join and leave the batch in flight: a fluid simulation on a clock of passes.

In a pass every row of the batch gains a token (`tokens_per_pass` with speculation). The engine's memory limits a pass,
or its arithmetic:

    pass = max(weights + context * context_s,  rows * token_s) / efficiency  +  collectives  +  call_s

    weights      all weights are read once, however many rows there are: few rows cost nearly as much as many
    context_s    keys and values of one token, of all tokens before this one in all rows
    token_s      2 operations per weight, and attention to the row's own context

The prefill of a prompt computes the output layer once, for its last token.

Rows are admitted in their order while `max_rows` and the memory of keys and values allow it. Between two rows that end
the batch is the same and the context grows linearly, so the time of that interval has a closed form: its passes times
the cost of the middle one. The heap holds the pass at which each row in flight will end.

**Tensor parallelism** divides weights, keys and values, and arithmetic; each block all-reduces its output twice.
**Pipeline parallelism** with g groups of rows in p stages: a group's pass visits all stages, and max(p, g) of the
stages' times go by until its next token. Weights are read once for each group.

Other shards of the same replica are in the same batch: with `beside` shards in flight, each row counts `beside` times.

Not modelled: prefill that is cut into chunks (it delays the rows in flight for its whole time here), keys and values
shared by rows of one prompt, preemption, rows that migrate, the drafts of speculation and its rejected tokens, the
gathering of logits over tensor-parallel ranks. Pure.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

from pipeline.plan.links import Link, all_reduce_s, send_s
from stages.models.flops import matrix_numbers
from stages.models.spec import ModelSpec


@dataclass(frozen=True)
class DecodeSpeed:
    """Roofline of one replica's passes, all ranks together; seconds at the hardware's peaks."""

    max_rows: int
    """Most rows in the batch."""
    max_context: float
    """Most tokens whose keys and values fit."""
    weights_s: float
    """Seconds to read all weights, in each pass."""
    context_s: float
    """Seconds to read the keys and values of one token of context."""
    token_s: float
    """Arithmetic of one token, without attention."""
    attention_s: float
    """Arithmetic of one token's attention to one token of context."""
    output_s: float = 0.0
    """Arithmetic of the output layer for one token, which is a part of `token_s`."""
    reduces: int = 0
    """All-reduces in a pass."""
    ranks: int = 1
    """Tensor-parallel ranks, which all-reduce."""
    link: Link = field(default_factory=lambda: Link(0.0, float("inf")))
    row_bytes: float = 0.0
    """Bytes of a row in an all-reduce or a send."""
    sends: int = 0
    """Sends from stage to stage in a pass."""
    groups: int = 1
    """Groups of rows, which take their passes in turn."""
    tokens_per_pass: float = 1.0

    def memory_s(self, context: float) -> tuple[float, float]:
        """Return the seconds of a pass for reading weights, and for reading `context` tokens' keys and values."""
        return self.weights_s, context * self.context_s

    def arithmetic_s(self, rows: float, context: float) -> float:
        return rows * self.token_s + context * self.attention_s

    def prefill_s(self, prompt: float) -> float:
        """Return the seconds in which a prompt's keys and values and its next token are computed."""
        return prompt * (self.token_s - self.output_s + prompt / 2 * self.attention_s) + self.output_s

    def links_s(self, rows: float) -> float:
        """Return the seconds of a pass in collectives and sends."""
        num_bytes = rows / self.groups * self.row_bytes
        return self.reduces * all_reduce_s(self.link, self.ranks, num_bytes) + (
            self.sends * send_s(self.link, num_bytes) if self.sends else 0.0
        )


@dataclass(frozen=True)
class Decoded:
    """Seconds of decoding some rows, by cause, at the hardware's peaks."""

    weights: float = 0.0
    context: float = 0.0
    """Seconds to read the keys and values."""
    arithmetic: float = 0.0
    """Seconds of the passes that arithmetic limits."""
    prefill: float = 0.0
    links: float = 0.0
    passes: float = 0.0

    @property
    def roofline(self) -> float:
        return self.weights + self.context + self.arithmetic + self.prefill


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
) -> DecodeSpeed:
    """Return the roofline of a replica.

    Args:
        flops: peak rate of one rank, in FLOP/s.
        bytes_per_s: peak memory bandwidth of one rank.
        number_bytes: bytes of a weight, a key or a value.
        tensor, pipeline: ranks; pipeline: stages.
        groups: groups of rows that are in the pipeline's stages at once.
        kv_bytes: memory of keys and values of all ranks together. Each has an equal part.
        link: the link between the ranks.
    """
    blocks, output = spec.num_layers * matrix_numbers(spec), spec.vocab_size * spec.hidden_size
    rounds = max(pipeline, groups)  # stage times until a group's next token
    ranks = tensor * pipeline
    # a head is never divided: with more ranks than key-value heads, several ranks hold and read the same
    kept = 2 * spec.num_layers * spec.head_dim * max(spec.num_kv_heads / tensor, 1.0) * number_bytes
    per_row = rounds / groups * 2 / ranks / flops  # seconds for each weight that a token is multiplied with
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
    )


def decode(speed: DecodeSpeed, prompt: float, lengths: Sequence[int], beside: float = 1.0) -> Decoded:
    """Return what it takes to decode responses of these lengths to prompts of `prompt` tokens.

    `beside`: shards like this one that the replica has in flight, this one included. The result is the time from the
    start to the end of this shard.
    """
    if not lengths:
        return Decoded()
    mean = sum(lengths) / len(lengths)
    fit = min(speed.max_rows, speed.max_context / (prompt + mean))
    most = max(1, int(fit / beside))
    turns = max(1.0, beside * most / max(fit, 1.0))  # above 1 if not even one row of each shard fits
    waiting = iter(lengths)
    flight: list[tuple[float, int]] = []  # (pass at which the row ends, its length)
    clock = context = 0.0
    weights = kv = arithmetic = prefill = links = passes = 0.0
    left = len(lengths)
    while left or flight:
        while left and len(flight) < most:
            length = next(waiting)
            left -= 1
            heapq.heappush(flight, (clock + length / speed.tokens_per_pass, length))
            context += prompt
            prefill += beside * speed.prefill_s(prompt)
        rows = len(flight)
        end = flight[0][0]
        count = end - clock
        middle = beside / turns * (context + rows * count * speed.tokens_per_pass / 2)
        in_batch = beside / turns * rows
        read, read_kv = speed.memory_s(middle)
        computed = speed.arithmetic_s(in_batch * speed.tokens_per_pass, middle)
        if computed > read + read_kv:
            arithmetic += turns * count * computed
        else:
            weights += turns * count * read
            kv += turns * count * read_kv
        links += turns * count * speed.links_s(in_batch)
        passes += turns * count
        context += rows * count * speed.tokens_per_pass
        clock = end
        while flight and flight[0][0] <= clock:
            context -= prompt + heapq.heappop(flight)[1]
    return Decoded(weights, kv, arithmetic, prefill, links, passes)
