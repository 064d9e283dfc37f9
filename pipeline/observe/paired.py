"""Two policies on the same prompts, score by score: what lies between the prompts is then no uncertainty of the
comparison. Pure functions. Standard library only.

    gain = mean of (after - before)      error = sd / sqrt(n)      t = gain / error      sd with n - 1
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PairedScores:
    """Two sets of scores, on the prompts that both have."""

    num_prompts: int
    before: float
    """Mean score."""
    after: float
    gain: float
    """Mean of after - before."""
    error: float | None
    """Standard error of the gain; None for fewer than two prompts."""
    t: float | None
    """gain / error; None for fewer than two prompts or equal differences."""
    better: int
    """Prompts whose score rose."""
    worse: int


def paired(before: Mapping[int, float], after: Mapping[int, float]) -> PairedScores | None:
    """Compares scores by prompt; None where no prompt is in both."""
    prompts = sorted(before.keys() & after.keys())
    n = len(prompts)
    if not n:
        return None
    differences = [after[p] - before[p] for p in prompts]
    return PairedScores(
        num_prompts=n,
        before=math.fsum(before[p] for p in prompts) / n,
        after=math.fsum(after[p] for p in prompts) / n,
        gain=math.fsum(differences) / n,
        error=standard_error(differences),
        t=paired_t(differences),
        better=sum(d > 0 for d in differences),
        worse=sum(d < 0 for d in differences),
    )


def paired_t(differences: Sequence[float]) -> float | None:
    """Student's t of paired differences: mean / standard error; None where there is no spread."""
    error = standard_error(differences)
    return math.fsum(differences) / len(differences) / error if error else None


def standard_error(values: Iterable[float]) -> float | None:
    """Of the mean: sd / sqrt(n), sd with n - 1. None for fewer than two."""
    numbers = [float(value) for value in values]
    n = len(numbers)
    if n < 2:
        return None
    mean = math.fsum(numbers) / n
    return math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (n - 1) / n)
