"""Lengths of responses, in tokens, for planned runs: fixed, lognormal up to a maximum, or drawn from the lengths of a
past run. Pure: a length is a function of the seed, the step, the shard and the row.

The shape of the distribution matters as much as its mean. A batch decodes until its longest row ends, so a long tail
keeps an engine busy with few rows. A pass with few rows costs nearly as much as a pass with many rows (`decode`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import ClassVar, Protocol

import numpy as np

from pipeline.errors import ConfigError

LENGTHS = "--lengths"
"""The option that names a distribution. Each ConfigError about a value of this option names the option as the setting
at fault."""
_FORM = "fixed:TOKENS, or lognormal:MEAN,SIGMA as in lognormal:340,0.8"


class Lengths(Protocol):
    """A distribution of the lengths of responses."""

    same_every_step: ClassVar[bool]
    """True if `rows` does not depend on the step."""

    def rows(self, step: int, shard: int, count: int) -> list[int]:
        """Return the lengths of a shard's responses, each 1 token or more. The same arguments give the same lengths."""
        ...


@dataclass(frozen=True)
class FixedLengths:
    """All responses have the same length."""

    same_every_step: ClassVar[bool] = True
    tokens: int

    def rows(self, step: int, shard: int, count: int) -> list[int]:
        return [self.tokens] * count


@dataclass(frozen=True)
class LognormalLengths:
    """Lengths with a lognormal distribution. Lengths above `most` become `most`: in a run, `sampling.max_new_tokens`
    cuts the responses in the same way."""

    same_every_step: ClassVar[bool] = False
    median: float
    """Median of the lengths before the cut at `most`."""
    sigma: float
    """Standard deviation of the logarithm; 0: all lengths are the median."""
    most: int
    seed: int = 0

    def rows(self, step: int, shard: int, count: int) -> list[int]:
        first, last = shard * count, (shard + 1) * count
        return _lognormal(self, step, _DRAWN * -(-last // _DRAWN))[first:last]

    @property
    def mean(self) -> float:
        """Mean after the cut: E[min(X, c)] = exp(mu + s^2/2) Phi((ln c - mu)/s - s) + c (1 - Phi((ln c - mu)/s)), with
        mu = ln `median`, s = `sigma` and c = `most`."""
        if not self.sigma:
            return min(self.median, self.most)
        at = (math.log(self.most) - math.log(self.median)) / self.sigma
        phi = NormalDist().cdf
        below = self.median * math.exp(self.sigma**2 / 2) * phi(at - self.sigma)
        return below + self.most * (1 - phi(at))


@dataclass(frozen=True)
class EmpiricalLengths:
    """Lengths drawn with replacement from the response lengths of a run (`tokens`)."""

    same_every_step: ClassVar[bool] = False
    tokens: Sequence[int]
    seed: int = 0

    def rows(self, step: int, shard: int, count: int) -> list[int]:
        first, last = shard * count, (shard + 1) * count
        places = _uniform(self.seed, step, _DRAWN * -(-last // _DRAWN))[first:last]
        return [self.tokens[int(place * len(self.tokens))] for place in places]


@dataclass(frozen=True)
class SameLengths:
    """The same response lengths in every step, for any number of shards. The shards take the lengths in order, and
    begin again with the first length after the last one."""

    same_every_step: ClassVar[bool] = True
    tokens: Sequence[int]

    def rows(self, step: int, shard: int, count: int) -> list[int]:
        first = shard * count % len(self.tokens)
        return [self.tokens[(first + n) % len(self.tokens)] for n in range(count)]


_DRAWN = 1024
"""The count of random numbers that are drawn for a step is rounded up to a multiple of this. A shard with n rows and
index s takes the numbers from s x n to (s + 1) x n, so it needs at least (s + 1) x n numbers. With the rounded count,
most shards of a step need the same list, and find it in the cache."""


@lru_cache(maxsize=64)
def _lognormal(lengths: LognormalLengths, step: int, count: int) -> list[int]:
    """Return the first `count` lengths of a step. With a larger `count` the list begins with the same lengths."""
    normal = np.random.default_rng((lengths.seed, step)).standard_normal(count)
    tokens = np.exp(math.log(lengths.median) + lengths.sigma * normal)
    numbers: list[int] = np.clip(np.rint(tokens), 1, lengths.most).astype(int).tolist()
    return numbers


@lru_cache(maxsize=64)
def _uniform(seed: int, step: int, count: int) -> list[float]:
    """Return the first random numbers of a step in [0, 1). A larger `count` only appends numbers."""
    numbers: list[float] = np.random.default_rng((seed, step)).random(count).tolist()
    return numbers


def lognormal_with_mean(mean: float, sigma: float, most: int, seed: int = 0) -> LognormalLengths:
    """Return a lognormal distribution of response lengths, limited to `most` tokens: longer draws become `most`. The
    mean of the limited lengths is `mean`, which must be below `most`. The median of the distribution without the limit
    is found by bisection."""
    low, high = 1e-3, float(most)
    while LognormalLengths(high, sigma, most).mean < mean:
        high *= 2
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if LognormalLengths(middle, sigma, most).mean < mean else (low, middle)
    return LognormalLengths(high, sigma, most, seed)


def parse_lengths(text: str, most: int, seed: int = 0) -> Lengths:
    """Return the distribution that a text like `fixed:256` or `lognormal:340,0.8` names. `most`: maximum number of
    tokens of a response (`sampling.max_new_tokens`). Raises ConfigError if the text has another form or a number is out
    of range."""
    kind, _, rest = text.partition(":")
    try:
        numbers = [float(number) for number in rest.split(",")]
    except ValueError:
        numbers = []
    if not all(math.isfinite(number) for number in numbers):
        numbers = []
    if kind == "fixed" and len(numbers) == 1 and numbers[0].is_integer():
        if 1 <= numbers[0] <= most:
            return FixedLengths(int(numbers[0]))
        raise ConfigError(LENGTHS, f"given {text!r}; must be from 1 to {most} tokens (sampling.max_new_tokens)")
    if kind == "lognormal" and len(numbers) == 2:
        mean, sigma = numbers
        if 1 <= mean < most and 0 < sigma <= 3:
            return lognormal_with_mean(mean, sigma, most, seed)
        need = f"the mean from 1 to below {most} tokens (sampling.max_new_tokens), sigma above 0 and up to 3"
        raise ConfigError(LENGTHS, f"given {text!r}; {need}")
    raise ConfigError(LENGTHS, f"given {text!r}; must be {_FORM}")
