"""The keyed noise: the exact numbers, the distribution, the independence of its keys.

Every statistical test has fixed keys, so it passes or fails for good; bounds are 5 standard errors, and each says or
shows what it would detect.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.engines.embedded.sampling import gumbel, noise_keys, token_words

CPU = torch.device("cpu")
GAMMA = 0.57721566490153286


def oracle_splitmix(state: int) -> int:
    x = (state + 0x9E3779B97F4A7C15) % 2**64
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB % 2**64
    return x ^ (x >> 31)


def oracle_gumbel(seed: int, step: int, row: int, position: int, token: int) -> float:
    """One number at a time, in Python's integers, the uniform rounded to float32, the logarithms in float64."""
    key = 0
    for part in (seed, step, row, position):
        key = oracle_splitmix(key ^ part)
    x = (oracle_splitmix(token << 32) >> 32) ^ (key % 2**32)
    x = x * 0x7FEB352D % 2**32
    x ^= x >> 15
    x = (x + (key >> 32)) % 2**32
    x = x * 0x846CA68B % 2**32
    x ^= x >> 16
    tail = np.float32(np.float32(x % 2**31) + np.float32(0.5)) * np.float32((1 - 2**-24) * 2.0**-31)
    return -math.log(-math.log1p(-float(tail)))


def draws(logprobs: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Tokens, by the law: arg max of log p + noise."""
    noise = gumbel(keys, len(logprobs), CPU).numpy()
    return (noise + logprobs.astype(np.float32)).argmax(-1)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def test_every_number_equals_the_oracle() -> None:
    """The formula must never change silently: stored runs are replayed with it."""
    cases = [(0, 0, 0, 0), (1, 2, 3, 4), (2**40, 10**6, 2**33, 4095)]
    for case in cases:
        got = gumbel(noise_keys(*case), 300, CPU)[0]
        expected = [oracle_gumbel(*case, token) for token in range(300)]
        np.testing.assert_allclose(got.numpy(), expected, rtol=2e-6, atol=2e-6)


def test_no_two_tokens_share_a_word() -> None:
    """32 of splitmix64's bits are the same for tokens 1113 and 7357. The later one gets another word."""
    words = token_words(151_936, CPU)
    assert words.unique().numel() == words.numel()
    assert torch.equal(token_words(8_000, CPU), words[:, :8_000])
    natural = np.array([oracle_splitmix(token << 32) >> 32 for token in range(8_000)], np.uint32).view(np.int32)
    assert np.flatnonzero(natural != words[0, :8_000].numpy()).tolist() == [7357]


def test_keys_broadcast_over_rows_and_positions() -> None:
    rows, positions = np.array([5, 6, 7]), np.array([0, 9, 2])
    keys = noise_keys(1, 2, rows, positions)
    assert keys.tolist() == [int(noise_keys(1, 2, r, p)[0]) for r, p in zip((5, 6, 7), (0, 9, 2), strict=True)]
    np.testing.assert_array_equal(noise_keys(1, 2, 5, positions), noise_keys(1, 2, np.full(3, 5), positions))


@pytest.mark.parametrize("vocab", [7, 256, 49152, 70000])
def test_noise_of_a_key_does_not_depend_on_the_other_keys(vocab: int) -> None:
    keys = noise_keys(1, 2, 3, np.arange(5))
    together = gumbel(keys, vocab, CPU)
    for i in range(5):
        assert torch.equal(gumbel(keys[i : i + 1], vocab, CPU)[0], together[i])


def test_mean_variance_and_tails_of_the_noise() -> None:
    """100 keys x 49,152 tokens = 5e6 numbers: the mean is known to 6e-4, the variance to 1e-3 of itself."""
    noise = gumbel(noise_keys(3, 1, 4, np.arange(100)), 49152, CPU).double()
    n = noise.numel()
    variance = math.pi**2 / 6
    assert abs(noise.mean().item() - GAMMA) < 5 * math.sqrt(variance / n)
    assert abs(noise.var().item() - variance) < 5 * variance * math.sqrt(4.4 / n)  # excess kurtosis 12/5
    for bound in (3.0, 8.0, 12.0):
        expected = n * -math.expm1(-math.exp(-bound))
        assert abs((noise > bound).sum().item() - expected) < 5 * math.sqrt(expected)
    for bound in (-1.0, -2.0):
        expected = n * math.exp(-math.exp(-bound))
        assert abs((noise < bound).sum().item() - expected) < 5 * math.sqrt(expected)
    assert noise.min() > -2.9
    assert noise.max() < 22.3


def test_draws_have_the_exact_probabilities() -> None:
    """chi^2 with 11 degrees of freedom, 400,000 draws, bound 37.4 (p = 1e-4). A token of probability 0.2 that is off by
    3 % moves the statistic's mean by 400,000 * 0.03^2 * 0.2 * 0.8 = 58, from 11 to 69 +- 16: noticed in 97 % of cases,
    and in this one."""
    logits = np.array([2.0, 1.5, 1.0, 0.9, 0.5, 0.2, 0.0, -0.5, -1.0, -2.0, -3.0, -5.0])
    p = np.exp(logits) / np.exp(logits).sum()
    rows, positions = np.divmod(np.arange(400_000), 500)
    counts = np.bincount(draws(np.log(p), noise_keys(7, 0, rows, positions)), minlength=12)
    assert chi_square(counts, 400_000 * p) < 37.4
    biased = p.copy()
    biased[1] *= 1.03
    assert chi_square(counts, 400_000 * biased / biased.sum()) > 37.4


@pytest.mark.parametrize("neighbour", ["position", "row", "step", "seed"])
def test_neighbouring_keys_are_independent(neighbour: str) -> None:
    """Pairs of draws under keys that differ by one in one number: chi^2 over the 6 x 6 pairs (35 degrees of freedom,
    bound 73 is p = 2e-4), and the correlation of the noise itself over 2e6 numbers (5 standard errors = 0.0035)."""
    p = np.array([0.3, 0.25, 0.2, 0.1, 0.1, 0.05])
    base = {"seed": 5, "step": 9, "row": np.arange(100_000) // 200, "position": np.arange(100_000) % 200 * 2}
    other = base | {neighbour: base[neighbour] + 1}
    if neighbour == "row":
        base, other = base | {"row": base["row"] * 2}, base | {"row": base["row"] * 2 + 1}
    keys, other_keys = noise_keys(**base), noise_keys(**other)
    pairs = draws(np.log(p), keys) * 6 + draws(np.log(p), other_keys)
    assert chi_square(np.bincount(pairs, minlength=36), 100_000 * np.outer(p, p).ravel()) < 73
    a, b = (gumbel(k[:40], 49152, CPU).double().flatten() for k in (keys, other_keys))
    assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 5 / math.sqrt(len(a))


def test_neighbouring_tokens_are_independent() -> None:
    """Correlation of the noise of tokens v and v + lag, over 2e6 pairs, and of their squares (dependence in spread)."""
    noise = gumbel(noise_keys(1, 1, 1, np.arange(40)), 49152, CPU).double() - GAMMA
    for lag in (1, 2, 3, 16, 256, 4096):
        for x in (noise, noise**2):
            a, b = x[:, :-lag].flatten(), x[:, lag:].flatten()
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 5 / math.sqrt(len(a))


def test_any_two_keys_are_uncorrelated() -> None:
    """All 4,950 pairs of 100 keys over 49,152 tokens: correlations times sqrt(49,152) must be standard normal. Their
    variance is known to 2 %; a stream that leaned on another would show as a large single value."""
    noise = gumbel(noise_keys(1, 2, np.arange(100), 3), 49152, CPU).double()
    uniform = torch.exp(-torch.exp(-noise))
    for x in (noise, uniform, (uniform * 4).long() % 2, (uniform * 256).long() % 2, uniform > 0.99):
        z = (torch.corrcoef(x.double()) * math.sqrt(49152))[*torch.triu_indices(100, 100, 1)]
        assert abs(z.var().item() - 1) < 0.1
        assert z.abs().max().item() < 6
