"""Sampling: keyed noise, and the way from logits to tokens (suppression, temperature, the draw and its log-prob).

Each token's noise has a key: (seed, step, row, position). The generator is counter-based (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). No state passes from draw to draw, so the noise depends only on the key and on the
token's id. splitmix64 (Steele et al. 2014) mixes the four numbers of a key into 64 bits. A word that stands for the
token id then goes through two multiply-xorshift rounds (with the constants of Ettinger's `lowbias32`). Each round mixes
in one half of the key.

All operations up to the uniform variate work on integers, or round their result once. So the variate has the same bits
on every device. The two logarithms after that are computed by the device's own functions. They may differ in the last
bit between devices.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int32, Int64, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ROUND_1 = 0x7FEB352D
_ROUND_2 = 0x846CA68B - (1 << 32)
"""0x846CA68B as int32, since torch has no uint32 arithmetic. A product of int32 has the same bits as one of uint32."""
_UNIFORM_SCALE = (1.0 - 2.0**-24) * 2.0**-31
"""The largest float32 below 2^-31. The largest 31-bit word is rounded to 2^31, and its product with this scale is still
below 1."""
_BLOCK_ELEMENTS = 1 << 16
"""Number of elements to process at a time on a CPU. It is so small that the buffers (256 KB each) stay in the CPU's
cache."""
_ALL_ROWS = 1 << 30


def noise_keys(
    seed: int | np.ndarray, step: int | np.ndarray, row: int | np.ndarray, position: int | np.ndarray
) -> UInt64[np.ndarray, "*shape"]:
    """Return the 64-bit keys of noise. The four arguments broadcast, and four plain numbers give one key.

    `position` is the token's index in its row, prompt included. Each number is mixed in by a splitmix64 step of its
    own, so keys that differ in one number look independent."""
    return position_keys(row_noise(seed, step, row), position)


def row_noise(seed: int | np.ndarray, step: int | np.ndarray, row: int | np.ndarray) -> UInt64[np.ndarray, "*shape"]:
    """Return the part of `noise_keys` that is the same for all positions of a row, for `position_keys`. The arguments
    broadcast."""
    key = np.zeros(1, np.uint64)
    for part in (seed, step, row):
        key = _splitmix(key ^ _words(part))
    return key


def position_keys(noise: UInt64[np.ndarray, "*noise"], position: int | np.ndarray) -> UInt64[np.ndarray, "*shape"]:
    """Return the keys of `noise_keys`. `noise`: results of `row_noise`. The arguments broadcast."""
    return _splitmix(noise ^ _words(position))


def _words(numbers: int | np.ndarray) -> np.ndarray:
    return np.asarray(numbers).astype(np.int64).view(np.uint64)


def gumbel(keys: UInt64[np.ndarray, " keys"], vocab: int, device: torch.device) -> Float32[torch.Tensor, "keys vocab"]:
    """Return standard Gumbel noise, -log(-log u), for every pair of a key and a token.

    u is uniform between 0 and 1: 1 - u is (k + 1/2) 2^-31 for a random integer k, rounded to float32. The noise
    therefore lies within (-2.9, 22.2). Its upper tail, which decides the arg max, has the finest resolution."""
    return gumbel_of(keys, token_words(vocab, device))


def gumbel_of(
    keys: UInt64[np.ndarray, " keys"], token_words: Int32[torch.Tensor, "1 tokens"]
) -> Float32[torch.Tensor, "keys tokens"]:
    """Return the noise of `gumbel` for some tokens only. `token_words`: one word for each of these tokens, as returned
    by the function of the same name."""
    device, num_tokens = token_words.device, token_words.shape[1]
    words = torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()).to(device)
    out = torch.empty(len(keys), num_tokens, dtype=torch.float32, device=device)
    block = block_rows(num_tokens, device)
    for start in range(0, len(keys), block):
        _gumbel_block(words[start : start + block], token_words, out[start : start + block])
    return out


def block_rows(vocab: int, device: torch.device) -> int:
    """Return the number of rows to process at a time. On a CPU it is so small that the buffers fit into the CPU's
    cache. On other devices all rows are processed at once."""
    return max(1, _BLOCK_ELEMENTS // vocab) if device.type == "cpu" else _ALL_ROWS


def _gumbel_block(
    words: Int32[torch.Tensor, "keys 2"],
    token_words: Int32[torch.Tensor, "1 tokens"],
    out: Float32[torch.Tensor, "keys tokens"],
) -> None:
    """Fill `out` with noise. `words`: the two halves of each key. Every operation works in place, since a new tensor
    would double the memory traffic."""
    x = torch.bitwise_xor(token_words, words[:, :1])
    shifted = torch.empty_like(x)
    x.mul_(_ROUND_1)
    x.bitwise_xor_(_shift_right(x, 15, shifted))
    x.add_(words[:, 1:])
    x.mul_(_ROUND_2)
    x.bitwise_xor_(_shift_right(x, 16, shifted))
    x.bitwise_and_(0x7FFFFFFF)
    # w = -(1 - u), so that log1p(w) = log u = -E with E exponential, precise where 1 - u is small
    out.copy_(x).add_(0.5).mul_(-_UNIFORM_SCALE)
    out.log1p_().neg_().log_().neg_()


def _shift_right(x: torch.Tensor, bits: int, out: torch.Tensor) -> torch.Tensor:
    """Shift int32 numbers to the right and fill with zeros. torch's own shift repeats the sign bit."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)


@functools.lru_cache(maxsize=4)
def token_words(vocab: int, device: torch.device) -> Int32[torch.Tensor, "1 vocab"]:
    """Return one word of 32 well-mixed bits per token id. All words are different. Two tokens with the same word would
    get the same noise, so the less likely one could never be drawn. A token's word does not depend on `vocab`. The
    result is cached, since computing it takes as long as a row of noise."""
    mixed = _splitmix(np.arange(vocab, dtype=np.uint64) << np.uint64(32))
    while True:
        words = (mixed >> np.uint64(32)).astype(np.uint32)
        repeated = np.ones(vocab, bool)
        repeated[np.unique(words, return_index=True)[1]] = False  # the index of a word's first occurrence
        if not repeated.any():
            return torch.from_numpy(words.view(np.int32)[None]).to(device)
        mixed[repeated] = _splitmix(mixed[repeated])


def _splitmix(x: np.ndarray) -> np.ndarray:
    """Return splitmix64's next output from state x: a bijection of 64-bit words with full avalanche."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


# ---- draws -----------------------------------------------------------------------------------------------


def ban(logits: Float32[torch.Tensor, "rows vocab"], banned: Sequence[tuple[int, ...]]) -> None:
    """Set the logits of each row's banned tokens to -inf, in place. Rows with the same banned tokens are changed in one
    operation. Usually all rows have the same banned tokens."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, tokens in enumerate(banned):
        if tokens:
            groups.setdefault(tokens, []).append(row)
    for tokens, rows in groups.items():
        columns = torch.tensor(tokens, device=logits.device)
        if len(rows) == logits.shape[0]:
            logits.index_fill_(1, columns, float("-inf"))
        else:
            logits[torch.tensor(rows, device=logits.device)[:, None], columns] = float("-inf")


def sample(
    logits: Float32[torch.Tensor, "rows vocab"], temperatures: Sequence[float], keys: UInt64[np.ndarray, " rows"]
) -> tuple[Int64[torch.Tensor, " rows"], Float32[torch.Tensor, " rows"]]:
    """Draw a token for each row from softmax(logits / temperature): the arg max of log p plus the Gumbel noise of the
    row's key. Return tokens and log-probs. Overwrites `logits`.

    At temperature 0 the token is the arg max of the logits, and its log-prob is computed at temperature 1."""
    device = logits.device
    _apply_temperatures(logits, temperatures)
    drawn = torch.tensor([t > 0 for t in temperatures], device=device)[:, None]
    chosen, normalisers = [], []
    step = block_rows(logits.shape[1], device)
    for start in range(0, len(temperatures), step):
        part = slice(start, start + step)
        normalisers.append(logits[part].logsumexp(-1))
        if not any(temperatures[part]):
            chosen.append(logits[part].argmax(-1))
            continue
        noise = gumbel(keys[part], logits.shape[1], device)
        if not all(temperatures[part]):
            noise.mul_(drawn[part])
        chosen.append(noise.add_(logits[part]).argmax(-1))
    tokens = torch.cat(chosen)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - torch.cat(normalisers)


def sample_part(
    logits: Float32[torch.Tensor, "rows part"],
    temperatures: Sequence[float],
    keys: UInt64[np.ndarray, " rows"],
    first: int,
    vocab: int,
) -> Float64[torch.Tensor, "rows 5"]:
    """Return the contribution of one part of the vocabulary to the draw, for `join_parts`. Overwrites `logits`, which
    are first divided by the temperature.

    The best token of a part has the largest logit plus noise. The five numbers per row are the best token, its logit
    plus noise, its logit, the part's largest logit, and the part's sum of e^(logit - largest logit).

    Args:
        logits: logits of the tokens first, first + 1, ... of the vocabulary.
        temperatures: temperature of each row.
        keys: noise key of each row.
        first: first token of the part.
        vocab: size of the whole vocabulary.
    """
    _apply_temperatures(logits, temperatures)
    noise = gumbel_of(keys, token_words(vocab, logits.device)[:, first : first + logits.shape[1]])
    noise.mul_(torch.tensor([t > 0 for t in temperatures], device=logits.device)[:, None])
    noisy, tokens = noise.add_(logits).max(-1)
    largest = logits.amax(-1)
    logit = logits.gather(1, tokens[:, None])[:, 0]
    # if every token of the part is banned, e^(-inf - 0) is 0, while e^(-inf + inf) would be NaN
    sums = logits.sub_(largest.clamp_min(torch.finfo(torch.float32).min)[:, None]).exp_().sum(-1, dtype=torch.float64)
    return torch.stack([(tokens + first).double(), noisy.double(), logit.double(), largest.double(), sums], dim=1)


def join_parts(
    parts: Float64[torch.Tensor, "parts rows 5"],
) -> tuple[Int64[torch.Tensor, " rows"], Float32[torch.Tensor, " rows"]]:
    """Choose a token of the whole vocabulary for each row. Return the tokens and their log-probs. `parts`: results of
    `sample_part` for all parts of the vocabulary. Each part proposes its best token, and the proposal with the largest
    logit plus noise wins. The log-prob is normalised over the whole vocabulary.
    """
    tokens, noisy, logits, largest, sums = parts.unbind(-1)
    best = noisy.argmax(0)[None]
    top = largest.amax(0)
    total = torch.where(sums > 0, sums * (largest - top).exp(), 0.0).sum(0)
    return tokens.gather(0, best)[0].long(), (logits.gather(0, best)[0] - top - total.log()).float()


def forced_logprobs(
    logits: Float32[torch.Tensor, "rows vocab"], temperatures: Sequence[float], forced: Mapping[int, int]
) -> dict[int, float]:
    """Return row -> log-prob of its prescribed token, as `sample` computes it for a drawn token. Leaves `logits`
    unchanged. `forced`: row -> prescribed token."""
    logprobs = {}
    for row, token in forced.items():
        scaled = logits[row] / (temperatures[row] or 1.0)
        logprobs[row] = float(scaled[token] - scaled.logsumexp(-1))
    return logprobs


def forced_logits(
    logits: Float32[torch.Tensor, "rows part"], temperatures: Sequence[float], forced: Mapping[int, int], first: int
) -> dict[int, float]:
    """Return row -> logit / temperature of its prescribed token. Rows whose token is outside this part of the
    vocabulary are left out. Call this before `sample_part`, which overwrites the logits. `put_forced` takes the result.

    `forced`: row -> prescribed token. `first`: first token of the part."""
    inside = {row: token - first for row, token in forced.items() if 0 <= token - first < logits.shape[1]}
    return {row: float(logits[row, token]) / (temperatures[row] or 1.0) for row, token in inside.items()}


def put_forced(part: Float64[torch.Tensor, "rows 5"], forced: Mapping[int, int], logits: Mapping[int, float]) -> None:
    """Change a result of `sample_part` so that `join_parts` chooses the prescribed tokens. In the rows with a
    prescribed token, the logit plus noise becomes +inf if this part holds the token, and -inf otherwise. `logits`:
    result of `forced_logits`."""
    for row, token in forced.items():
        part[row, 0] = token
        part[row, 1] = float("inf") if row in logits else float("-inf")
        part[row, 2] = logits.get(row, 0.0)


def _apply_temperatures(logits: Float32[torch.Tensor, "rows vocab"], temperatures: Sequence[float]) -> None:
    """Divide each row's logits by its temperature in place, or by 1 if the temperature is 0."""
    divisors = [t or 1.0 for t in temperatures]
    if any(d != 1.0 for d in divisors):
        logits.div_(torch.tensor(divisors, device=logits.device)[:, None])
