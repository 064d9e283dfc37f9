"""Sampling noise keyed by (seed, step, row, position): law 4 of the engine protocol.

A counter-based generator (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3"): nothing is carried from
one draw to the next, so the noise of a token depends on its key and its id alone. The four numbers of a key are mixed
into 64 bits by splitmix64 (Steele et al. 2014); the two halves of the key then steer two multiply-xorshift rounds
(the constants are those of Ettinger's `lowbias32`) over a word that stands for the token id.

Everything up to the uniform variate is integer arithmetic or one rounding per operation, hence the same bits on every
device; the two logarithms are the device's own. May import numpy and torch.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from jaxtyping import Float32, Int32, UInt64

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_ROUND_1 = 0x7FEB352D
_ROUND_2 = 0x846CA68B - (1 << 32)
"""As int32: torch has no arithmetic on uint32, and two's complement multiplies alike."""
_UNIFORM_SCALE = (1.0 - 2.0**-24) * 2.0**-31
"""The largest float32 below 2^-31: the largest 31-bit word, which rounds to 2^31, still gives a variate below 1."""
_BLOCK_ELEMENTS = 1 << 16
"""Elements worked on at a time on a CPU: the buffers of a block (256 KB each) stay in its cache."""
_ALL_ROWS = 1 << 30


def noise_keys(
    seed: int | np.ndarray, step: int | np.ndarray, row: int | np.ndarray, position: int | np.ndarray
) -> UInt64[np.ndarray, "*shape"]:
    """64-bit keys; the four broadcast (to one key where all are plain numbers). `position` is the token's index in its
    row, prompt included. Each number is absorbed by a splitmix64 step of its own, so that keys that differ in one of
    the four are unrelated."""
    parts = [np.asarray(part).astype(np.int64).view(np.uint64) for part in (seed, step, row, position)]
    key = np.zeros(np.broadcast_shapes((1,), *(part.shape for part in parts)), np.uint64)
    for part in parts:
        key = _splitmix(key ^ part)
    return key


def gumbel(keys: UInt64[np.ndarray, " keys"], vocab: int, device: torch.device) -> Float32[torch.Tensor, "keys vocab"]:
    """Standard Gumbel noise, -log(-log u), for every token of every key.

    1 - u is a multiple of 2^-31 away from 0 (plus half a step), kept to float32's relative precision: so the noise lies
    within (-2.9, 22.2), and its upper tail, which decides who wins, is resolved best."""
    return gumbel_of(keys, token_words(vocab, device))


def gumbel_of(
    keys: UInt64[np.ndarray, " keys"], token_words: Int32[torch.Tensor, "1 tokens"]
) -> Float32[torch.Tensor, "keys tokens"]:
    """The same noise for some tokens only: those whose columns of `token_words(vocab)` are given."""
    device, num_tokens = token_words.device, token_words.shape[1]
    words = torch.from_numpy(keys.view(np.int32).reshape(-1, 2).copy()).to(device)
    out = torch.empty(len(keys), num_tokens, dtype=torch.float32, device=device)
    block = block_rows(num_tokens, device)
    for start in range(0, len(keys), block):
        _gumbel_block(words[start : start + block], token_words, out[start : start + block])
    return out


def block_rows(vocab: int, device: torch.device) -> int:
    """Rows that are best worked on together."""
    return max(1, _BLOCK_ELEMENTS // vocab) if device.type == "cpu" else _ALL_ROWS


def _gumbel_block(
    words: Int32[torch.Tensor, "keys 2"],
    token_words: Int32[torch.Tensor, "1 tokens"],
    out: Float32[torch.Tensor, "keys tokens"],
) -> None:
    """Fills `out`. In place throughout: at one pass over memory per operation, a fresh tensor each would double it."""
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
    """Logical shift of int32, whose own shift repeats the sign."""
    return torch.bitwise_right_shift(x, bits, out=out).bitwise_and_((1 << (32 - bits)) - 1)


@functools.lru_cache(maxsize=4)
def token_words(vocab: int, device: torch.device) -> Int32[torch.Tensor, "1 vocab"]:
    """One well-mixed word per token id, all different; a constant, kept because it costs as much as a row of noise."""
    mixed = _splitmix(np.arange(vocab, dtype=np.uint64) << np.uint64(32))
    return torch.from_numpy((mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)[None].copy()).to(device)


def _splitmix(x: np.ndarray) -> np.ndarray:
    """splitmix64's next output from state x: a bijection of 64-bit words with full avalanche."""
    x = x + _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))
