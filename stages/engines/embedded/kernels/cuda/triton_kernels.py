"""The kernels for CUDA devices, in Triton. No other file imports Triton.

Attention is split over the context (flash decoding), so that a few rows with long contexts fill the device as well as
many rows with short ones:

    _attend    one program per (token, key/value head, share of the splits): the running softmax over SPLIT positions
               of the cache at a time, with all query heads that share the key/value head as one matrix product
    _combine   one program per (token, query head): adds up the splits in order of position

Splits begin at fixed positions (0, SPLIT, 2 SPLIT, ...), and each is summed in the same order in any program. So what
these kernels compute for a token depends only on its row. On a GPU the batch can still change the matrix products
between the kernels, since cuBLAS chooses their algorithm by the number of rows.

With a bfloat16 cache the operands of both products of the attention are bfloat16; scores, softmax and sums are float32.
With a float32 cache everything is float32.

The file is long because kernels are read together with the code that launches them. `_attend` is long because its loop
shares a dozen values. Unit tests compare the kernels with `kernels.reference` in Triton's interpreter, on a CPU
(TRITON_INTERPRET=1). They have not run on a GPU yet.

Shape letters: see `kernels.protocol`. In addition: S splits, E chunks of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
import triton
import triton.language as tl
from jaxtyping import UInt64
from triton import knobs

from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, NO_BLOCK
from stages.engines.embedded.kernels.protocol import Angles, NoTritonKernelsError, Tokens
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.sampling import sample_part, token_words

SPLIT = 256
"""Number of positions in a split of the context. It is a multiple of the positions in a block."""
_TILE = 64
"""Number of positions whose keys or values are multiplied at a time. SPLIT is a multiple of it."""
_DOT_ROWS = 16
"""Smallest number of rows that a matrix product may have. Smaller groups of query heads are padded."""
_PROGRAMS_PER_PROCESSOR = 8
"""Number of programs that keep one multiprocessor busy, even if their contexts differ in length."""
_CHUNK = 4096
"""Number of logits per program. It is constant, since it decides the order in which the normaliser is summed."""
_GATE_BLOCK = 1024

_PAGE = tl.constexpr(BLOCK_TOKENS)
_NO_BLOCK = tl.constexpr(NO_BLOCK)
_MINUS_INFINITY = tl.constexpr(float("-inf"))
_ROUND_1 = tl.constexpr(0x7FEB352D)
_ROUND_2 = tl.constexpr(0x846CA68B)
_MINUS_UNIFORM = tl.constexpr(-(1.0 - 2.0**-24) * 2.0**-31)
"""Factor that turns a random integer below 2^31 into a number w between -1 and 0. The Gumbel noise of a draw is
computed from log(1 + w). The factor is `sampling._UNIFORM_SCALE` with a minus sign."""


def load_triton_kernels(device: torch.device) -> TritonKernels:
    """Return the kernels for a device. On a CPU they need Triton's interpreter. Raises NoTritonKernelsError if Triton
    cannot run on the device."""
    if device.type == "cuda":
        processors = torch.cuda.get_device_properties(device).multi_processor_count
        return TritonKernels(programs=_PROGRAMS_PER_PROCESSOR * processors)
    if not knobs.runtime.interpret:
        raise NoTritonKernelsError(f"Triton's kernels need a GPU; on {device} they run with TRITON_INTERPRET=1 only")
    return TritonKernels(programs=4)


@dataclass(frozen=True)
class TritonKernels(TorchKernels):
    """The kernels in Triton. They implement `Kernels` and `DeviceKernels`. All tensors are contiguous and on one
    device. torch computes the matrix products."""

    name: str = "triton"
    supports_trees: bool = False
    programs: int = 1
    """Number of attention programs that keep the whole device busy."""
    words: dict[int, torch.Tensor] = field(default_factory=dict)
    """Vocabulary size -> the result of `sampling.token_words`: one word of mixed bits per token, from which noise is
    computed. The words are stored here because captured graphs keep reading them."""

    def add_norm(
        self, x: torch.Tensor, delta: torch.Tensor | None, weight: torch.Tensor, eps: float, dtype: torch.dtype
    ) -> torch.Tensor:
        rows, width = x.shape
        out = torch.empty(rows, width, dtype=dtype, device=x.device)
        block = triton.next_power_of_2(width)
        _add_norm[(rows,)](
            x=x,
            delta=delta,
            weight=weight,
            out=out,
            eps=eps,
            width=width,
            HAS_DELTA=delta is not None,
            BLOCK=block,
            num_warps=min(max(block // 512, 1), 16),
        )
        return out

    def attend(
        self, qkv: torch.Tensor, angles: Angles, tokens: Tokens, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        num, width = qkv.shape
        _, kv_heads, dim, _ = keys.shape
        heads = width // dim - 2 * kv_heads
        padded_dim = max(triton.next_power_of_2(dim), 16)
        num_splits = triton.cdiv(tokens.longest, SPLIT)
        shares = min(num_splits, triton.cdiv(self.programs, num * kv_heads))
        where = {
            "qkv": qkv, "cos": angles.cos, "sin": angles.sin, "positions": tokens.positions, "rows": tokens.rows,
            "tables": tokens.tables, "keys": keys, "values": values, "kv_heads": kv_heads,
            "table_width": tokens.tables.shape[1], "DIM": dim, "PADDED_DIM": padded_dim,
        }  # fmt: skip
        if not tokens.independent:
            _write[(num, kv_heads)](**where, heads=heads, num_warps=1)
        out = torch.empty(num, heads * dim, dtype=qkv.dtype, device=qkv.device)
        direct = num_splits == 1
        # a single split needs no workspace for partial sums
        partial_sums = 0 if direct else num * heads * num_splits
        sums = torch.empty(partial_sums, dim, dtype=torch.float32, device=qkv.device)
        scales = torch.empty(partial_sums, 2, dtype=torch.float32, device=qkv.device)
        _attend[(num, kv_heads, shares)](
            **where,
            out=out,
            sums=sums,
            scales=scales,
            scale=dim**-0.5,
            num_splits=num_splits,
            GROUP=heads // kv_heads,
            PADDED_GROUP=max(triton.next_power_of_2(heads // kv_heads), _DOT_ROWS),
            SPLIT_=SPLIT,
            TILE=_TILE,
            WRITES=tokens.independent,
            DIRECT=direct,
            num_warps=4,
            num_stages=3,
        )
        if not direct:
            _combine[(num, heads)](
                positions=tokens.positions, sums=sums, scales=scales, out=out, heads=heads, num_splits=num_splits,
                DIM=dim, PADDED_DIM=padded_dim, SPLIT_=SPLIT, num_warps=1,
            )  # fmt: skip
        return out

    def gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        rows, width = gate_up.shape
        out = torch.empty(rows, width // 2, dtype=gate_up.dtype, device=gate_up.device)
        _gate[(rows, triton.cdiv(width // 2, _GATE_BLOCK))](
            gate_up=gate_up, out=out, width=width // 2, BLOCK=_GATE_BLOCK
        )
        return out

    def choose(
        self, logits: torch.Tensor, temperatures: list[float], keys: UInt64[np.ndarray, " N"]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        device = logits.device
        return self.choose_on_device(
            logits,
            torch.tensor(temperatures, dtype=torch.float32, device=device),
            torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()).to(device),
            torch.empty(len(keys), 0, dtype=torch.int32, device=device),
        )

    def choose_part(
        self, logits: torch.Tensor, temperatures: list[float], keys: UInt64[np.ndarray, " N"], first: int, vocab: int
    ) -> torch.Tensor:
        return sample_part(logits, temperatures, keys, first, vocab)

    def choose_on_device(
        self, logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, banned: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, vocab = logits.shape
        device = logits.device
        words = self.words.setdefault(vocab, token_words(vocab, device))
        num_chunks = triton.cdiv(vocab, _CHUNK)
        found = torch.empty(4, rows, num_chunks, dtype=torch.float32, device=device)
        places = torch.empty(rows, num_chunks, dtype=torch.int32, device=device)
        chosen = torch.empty(rows, dtype=torch.int64, device=device)
        logprobs = torch.empty(rows, dtype=torch.float32, device=device)
        _look[(rows, num_chunks)](
            logits=logits, temperatures=temperatures, keys=keys, words=words, banned=banned, found=found,
            places=places, vocab=vocab, num_banned=banned.shape[1], CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip
        _pick[(rows,)](
            found=found, places=places, chosen=chosen, logprobs=logprobs, num_chunks=num_chunks,
            PADDED=triton.next_power_of_2(num_chunks), num_warps=1,
        )  # fmt: skip
        return chosen, logprobs


# ---- residual and norm ----


@triton.jit
def _add_norm(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    width: tl.tensor,
    HAS_DELTA: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Add a row of `delta` to the same row of x [N, C], and then write x / rms(x) * weight to `out`."""
    i = tl.arange(0, BLOCK)
    inside = i < width
    at = tl.program_id(0).to(tl.int64) * width + i
    xs = tl.load(x + at, mask=inside, other=0.0)
    if HAS_DELTA:
        xs += tl.load(delta + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(x + at, xs, mask=inside)
    scale = tl.rsqrt(tl.sum(xs * xs, axis=0) / width + eps)
    weights = tl.load(weight + i, mask=inside, other=0.0)
    tl.store(out + at, (xs * scale * weights).to(out.dtype.element_ty), mask=inside)


# ---- attention ----


@triton.jit
def _rotated(
    at: tl.tensor, cos: tl.tensor, sin: tl.tensor, position: tl.tensor, DIM: tl.constexpr, PADDED_DIM: tl.constexpr
) -> tl.tensor:
    """Return some heads [heads, PADDED_DIM], rotated by the angles of a position. `at` [heads]: pointers to the first
    number of each head. A head is rotated in pairs (a, b): a is a number of the head's first half, and b is the number
    at the same place of its second half. A pair becomes (a cos - b sin, b cos + a sin)."""
    half: tl.constexpr = DIM // 2
    d = tl.arange(0, PADDED_DIM)
    inside = d < DIM
    cosine = tl.load(cos + position * half + d % half, mask=inside, other=0.0)
    sine = tl.load(sin + position * half + d % half, mask=inside, other=0.0)
    sine = tl.where(d < half, -sine, sine)
    own = tl.load(at[:, None] + d[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    other = tl.load(at[:, None] + ((d + half) % DIM)[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
    return own * cosine[None, :] + other * sine[None, :]


@triton.jit
def _store_own(
    key: tl.tensor, value: tl.tensor, keys: tl.tensor, values: tl.tensor, block: tl.tensor, head: tl.tensor,
    kv_heads: tl.tensor, position: tl.tensor, DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Write a token's key and value [PADDED_DIM] to the cache. Nothing is written for a padding token."""
    d = tl.arange(0, PADDED_DIM)
    wanted = d < tl.where(block != _NO_BLOCK, DIM, 0)
    base = (block.to(tl.int64) * kv_heads + head) * (_PAGE * DIM)
    offset = position % _PAGE
    tl.store(keys + base + d * _PAGE + offset, key, mask=wanted)
    tl.store(values + base + offset * DIM + d, value, mask=wanted)


@triton.jit
def _write(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, rows: tl.tensor, tables: tl.tensor,
    keys: tl.tensor, values: tl.tensor, heads: tl.tensor, kv_heads: tl.tensor, table_width: tl.tensor,
    DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
) -> None:  # fmt: skip
    """Write the key and value of one token and one head to the cache. This kernel ends before any token of the batch
    reads the cache."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    position = tl.load(positions + token).to(tl.int32)
    block = tl.load(tables + tl.load(rows + token).to(tl.int64) * table_width + position // _PAGE)
    d = tl.arange(0, PADDED_DIM)
    first = qkv + (token * (heads + 2 * kv_heads) + heads + head) * DIM
    key = tl.sum(_rotated(first + tl.zeros((1,), tl.int32), cos, sin, position, DIM, PADDED_DIM), axis=0)
    value = tl.load(first + kv_heads * DIM + d, mask=d < DIM, other=0.0)
    element = keys.dtype.element_ty
    _store_own(key.to(element), value.to(element), keys, values, block, head, kv_heads, position, DIM, PADDED_DIM)


@triton.jit
def _attend(
    qkv: tl.tensor, cos: tl.tensor, sin: tl.tensor, positions: tl.tensor, rows: tl.tensor, tables: tl.tensor,
    keys: tl.tensor, values: tl.tensor, out: tl.tensor, sums: tl.tensor, scales: tl.tensor, scale: tl.tensor,
    kv_heads: tl.tensor, table_width: tl.tensor, num_splits: tl.tensor, DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr, GROUP: tl.constexpr, PADDED_GROUP: tl.constexpr, SPLIT_: tl.constexpr,
    TILE: tl.constexpr, WRITES: tl.constexpr, DIRECT: tl.constexpr,
) -> None:  # fmt: skip
    """Compute softmax(q K^T scale) V of one token, for the query heads of one key/value head. Each program takes every
    num_programs(2)-th split of the context.

    The token's own key and value come from `qkv`, rounded as in the cache. They are not read back from the cache. If no
    other token of the batch reads them, this kernel may therefore write them to the cache (`WRITES`). The result goes
    to `out` if there is only one split (`DIRECT`), otherwise to `sums` and `scales`, which `_combine` reads."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    heads = kv_heads * GROUP
    position = tl.load(positions + token).to(tl.int32)
    table = tables + tl.load(rows + token).to(tl.int64) * table_width
    own_split = position // SPLIT_
    element = keys.dtype.element_ty
    d = tl.arange(0, PADDED_DIM)
    inside = d < DIM
    g = tl.arange(0, PADDED_GROUP)
    real = g < GROUP

    first = qkv + token * (heads + 2 * kv_heads) * DIM
    # padding heads repeat the group's last head; they are not stored
    query_heads = head * GROUP + tl.minimum(g, GROUP - 1)
    q = _rotated(first + query_heads * DIM, cos, sin, position, DIM, PADDED_DIM).to(element)
    key_at = first + (heads + head) * DIM
    own_key = tl.sum(_rotated(key_at + tl.zeros((1,), tl.int32), cos, sin, position, DIM, PADDED_DIM), axis=0)
    own_key = own_key.to(element)
    own_value = tl.load(key_at + kv_heads * DIM + d, mask=inside, other=0.0).to(element)
    own_score = tl.sum(q.to(tl.float32) * own_key.to(tl.float32)[None, :], axis=1) * scale
    # two conditions, not one with `and`: `WRITES` is known at compile time, the other only at run time
    if WRITES:  # noqa: SIM102
        if tl.program_id(2) == 0:
            block = tl.load(table + position // _PAGE)
            _store_own(own_key, own_value, keys, values, block, head, kv_heads, position, DIM, PADDED_DIM)

    for split in range(tl.program_id(2), own_split + 1, tl.num_programs(2)):
        is_own = split == own_split
        largest = tl.where(is_own, own_score, _MINUS_INFINITY)
        total = tl.where(is_own, 1.0, 0.0) + tl.zeros((PADDED_GROUP,), tl.float32)
        acc = tl.where(is_own, own_value.to(tl.float32)[None, :], 0.0) + tl.zeros(
            (PADDED_GROUP, PADDED_DIM), tl.float32
        )
        start = split * SPLIT_
        end = tl.minimum(start + SPLIT_, position)
        for tile in range(start, end, TILE):
            t = tile + tl.arange(0, TILE)
            offset = t % _PAGE
            seen = t < end
            # load whole blocks, so that loads of keys stay wide; positions after `end` are masked by `seen`
            held = (t // _PAGE) * _PAGE < end
            block = tl.load(table + t // _PAGE, mask=held, other=_NO_BLOCK).to(tl.int64)
            base = (block * kv_heads + head) * (_PAGE * DIM)
            key = tl.load(
                keys + base[None, :] + d[:, None] * _PAGE + offset[None, :],
                mask=inside[:, None] & held[None, :],
                other=0.0,
            )
            scores = tl.dot(q, key, input_precision="ieee") * scale
            scores = tl.where(seen[None, :], scores, _MINUS_INFINITY)
            new_largest = tl.maximum(largest, tl.max(scores, axis=1))
            weights = tl.exp(scores - new_largest[:, None])
            shrink = tl.exp(largest - new_largest)
            value = tl.load(
                values + base[:, None] + offset[:, None] * DIM + d[None, :],
                mask=seen[:, None] & inside[None, :],
                other=0.0,
            )
            total = total * shrink + tl.sum(weights, axis=1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(element), value, input_precision="ieee")
            largest = new_largest
        here = token * heads + head * GROUP + g
        stored = real[:, None] & inside[None, :]
        if DIRECT:
            read = (acc / total[:, None]).to(out.dtype.element_ty)
            tl.store(out + here[:, None] * DIM + d[None, :], read, mask=stored)
        else:
            place = here * num_splits + split
            tl.store(sums + place[:, None] * DIM + d[None, :], acc, mask=stored)
            tl.store(scales + place * 2, largest, mask=real)
            tl.store(scales + place * 2 + 1, total, mask=real)


@triton.jit
def _combine(
    positions: tl.tensor, sums: tl.tensor, scales: tl.tensor, out: tl.tensor, heads: tl.tensor,
    num_splits: tl.tensor, DIM: tl.constexpr, PADDED_DIM: tl.constexpr, SPLIT_: tl.constexpr,
) -> None:  # fmt: skip
    """Add up the splits of one token and query head, in order of position."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    used = tl.load(positions + token).to(tl.int32) // SPLIT_ + 1
    d = tl.arange(0, PADDED_DIM)
    inside = d < DIM
    here = token * heads + head
    place = here * num_splits
    largest = tl.load(scales + place * 2)
    total = tl.load(scales + place * 2 + 1)
    acc = tl.load(sums + place * DIM + d, mask=inside, other=0.0)
    for split in range(1, used):
        at = place + split
        level = tl.load(scales + at * 2)
        new_largest = tl.maximum(largest, level)
        shrink, grow = tl.exp(largest - new_largest), tl.exp(level - new_largest)
        total = total * shrink + tl.load(scales + at * 2 + 1) * grow
        acc = acc * shrink + tl.load(sums + at * DIM + d, mask=inside, other=0.0) * grow
        largest = new_largest
    tl.store(out + here * DIM + d, (acc / total).to(out.dtype.element_ty), mask=inside)


# ---- the MLP's gate ----


@triton.jit
def _gate(gate_up: tl.tensor, out: tl.tensor, width: tl.tensor, BLOCK: tl.constexpr) -> None:
    """Compute silu(gate) * up for one piece of a row of gate_up [N, 2 F]."""
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < width
    gate = tl.load(gate_up + row * 2 * width + i, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + i, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + i, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=inside)


# ---- the keyed draw ----


@triton.jit
def _log(x: tl.tensor) -> tl.tensor:
    """Return the natural logarithm of positive normal numbers, to about 1 ulp (Cephes' logf, as in numbers.h). Triton's
    own logarithm is the fast one of the device. Its absolute error is too large where the logarithm is near 0."""
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - 0x3F3504F3) >> 23  # x / 2^exponent is in [sqrt(1/2), sqrt(2))
    f = (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0
    e = exponent.to(tl.float32)
    z = f * f
    p = 7.0376836292e-2 * f - 1.1514610310e-1
    p = p * f + 1.1676998740e-1
    p = p * f - 1.2420140846e-1
    p = p * f + 1.4249322787e-1
    p = p * f - 1.6668057665e-1
    p = p * f + 2.0000714765e-1
    p = p * f - 2.4999993993e-1
    p = p * f + 3.3333331174e-1
    return f + (p * f * z - e * 2.12194440e-4 - 0.5 * z) + e * 0.693359375


@triton.jit
def _gumbel(words: tl.tensor, low: tl.tensor, high: tl.tensor) -> tl.tensor:
    """Return the Gumbel noise of some tokens (see `sampling.gumbel`). `words`: the tokens' `sampling.token_words`.
    `low`, `high`: the halves of the draw's 64-bit key."""
    x = (words ^ low) * _ROUND_1
    x = ((x ^ (x >> 15)) + high) * _ROUND_2
    x = (x ^ (x >> 16)) & 0x7FFFFFFF
    w = (x.to(tl.float32) + 0.5) * _MINUS_UNIFORM
    # log(1 + w), precise where w is small: log(u) w / (u - 1) with u = 1 + w rounded
    u = 1.0 + w
    below = u - 1.0
    exact = below == 0.0
    log1p = tl.where(exact, w, _log(u) * (w / tl.where(exact, 1.0, below)))
    return -_log(-log1p)


@triton.jit
def _look(
    logits: tl.tensor, temperatures: tl.tensor, keys: tl.tensor, words: tl.tensor, banned: tl.tensor,
    found: tl.tensor, places: tl.tensor, vocab: tl.tensor, num_banned: tl.tensor, CHUNK: tl.constexpr,
) -> None:  # fmt: skip
    """Reduce one chunk of a row's logits [N, V] to four numbers in `found` [4, N, E] and a token in `places` [N, E].
    There are N rows, V tokens in the vocabulary, and E chunks per row.

    Let l be logit / temperature, or the logit at temperature 0. The four numbers are

    - max l,
    - the sum of exp(l - max l),
    - max (l + noise), or max l at temperature 0,
    - l of the token at which the third number reaches its maximum. `places` gets this token.

    The logits of banned tokens [N, B] count as minus infinity. Negative entries of `banned` stand for no token.
    """
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = i < vocab
    temperature = tl.load(temperatures + row)
    divisor = tl.where(temperature > 0.0, temperature, 1.0)
    scaled = tl.div_rn(tl.load(logits + row * vocab + i, mask=inside, other=_MINUS_INFINITY), divisor)
    for b in range(num_banned):
        scaled = tl.where(i == tl.load(banned + row * num_banned + b), _MINUS_INFINITY, scaled)
    largest = tl.max(scaled, axis=0)
    total = tl.sum(tl.exp(scaled - tl.where(largest == _MINUS_INFINITY, 0.0, largest)), axis=0)
    low = tl.load(keys + row * 2).to(tl.uint32, bitcast=True)
    high = tl.load(keys + row * 2 + 1).to(tl.uint32, bitcast=True)
    noise = _gumbel(tl.load(words + i, mask=inside, other=0).to(tl.uint32, bitcast=True), low, high)
    noisy = tl.where(temperature > 0.0, scaled + noise, scaled)
    best = tl.argmax(noisy, axis=0)
    mine = tl.arange(0, CHUNK) == best
    num_chunks = tl.num_programs(1)
    stride = tl.num_programs(0).to(tl.int64) * num_chunks
    at = row * num_chunks + chunk
    tl.store(found + at, largest)
    tl.store(found + stride + at, total)
    tl.store(found + 2 * stride + at, tl.max(noisy, axis=0))
    tl.store(found + 3 * stride + at, tl.sum(tl.where(mine, scaled, 0.0), axis=0))
    tl.store(places + at, chunk * CHUNK + best)


@triton.jit
def _pick(
    found: tl.tensor,
    places: tl.tensor,
    chosen: tl.tensor,
    logprobs: tl.tensor,
    num_chunks: tl.tensor,
    PADDED: tl.constexpr,
) -> None:
    """Combine the chunks of one row, and write the drawn token and its log-prob."""
    row = tl.program_id(0).to(tl.int64)
    stride = tl.num_programs(0).to(tl.int64) * num_chunks
    e = tl.arange(0, PADDED)
    inside = e < num_chunks
    at = row * num_chunks + e
    largest = tl.load(found + at, mask=inside, other=_MINUS_INFINITY)
    totals = tl.load(found + stride + at, mask=inside, other=0.0)
    noisy = tl.load(found + 2 * stride + at, mask=inside, other=_MINUS_INFINITY)
    top = tl.max(largest, axis=0)
    normaliser = top + tl.log(tl.sum(totals * tl.exp(largest - top), axis=0))
    at_best = row * num_chunks + tl.argmax(noisy, axis=0)
    tl.store(chosen + row, tl.load(places + at_best).to(tl.int64))
    tl.store(logprobs + row, tl.load(found + 3 * stride + at_best) - normaliser)
