"""What passes and drafts cost, as measured, and what drafts of each length would gain: the numbers behind a choice.

Standard library only; no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CALIBRATED = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sizes of the passes that are timed before the first draft."""
_MEAN_RATE = 0.1
"""Least weight of a new measurement in the mean of those before it."""
_COMMON_RATE, _LOCAL_RATE = 0.08, 0.04
"""How fast passes move the whole curve, and the sizes next to their own. Mostly the machine as a whole has become
slower or faster; a size that is not run at present would else look cheap because it was timed at a better moment."""
_FIRST_STEP_SHARE = 0.03
"""A drafted position's time is taken to be this share of the smallest pass until it has been measured."""
_NEGLIGIBLE = 0.01
"""Guesses less likely than that are not looked at."""


class PassCosts:
    """Owns the measured seconds of a pass by its number of tokens: linear between the calibrated sizes, and moved
    toward every pass that is run, the sizes next to it most; and what each position that a token attends to adds."""

    def __init__(self, seconds: Mapping[int, float], per_position: float = 0.0) -> None:
        """`seconds`: of at least two sizes, at short context. Raises ValueError for fewer."""
        if len(seconds) < 2:
            raise ValueError("an interpolation needs two points")
        self.per_position = max(per_position, 0.0)
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]
        for i in range(1, len(self._seconds)):  # more tokens are never faster: that was another process's doing
            self._seconds[i] = max(self._seconds[i], self._seconds[i - 1])

    @property
    def curve(self) -> dict[int, float]:
        """Seconds by tokens, at short context."""
        return dict(zip(self._sizes, self._seconds, strict=True))

    def seconds(self, num_tokens: float, positions: float = 0.0) -> float:
        """Of a pass of so many tokens that attend to so many positions, all tokens together."""
        left, weight = self._interval(num_tokens)
        return (1 - weight) * self._seconds[left] + weight * self._seconds[left + 1] + self.per_position * positions

    def observe(self, num_tokens: int, seconds: float, positions: float = 0.0) -> None:
        left, weight = self._interval(num_tokens)
        factor = min(max(seconds / self.seconds(num_tokens, positions), 0.5), 2.0)
        weight = min(max(weight, 0.0), 1.0)
        self._seconds = [each * factor**_COMMON_RATE for each in self._seconds]
        self._seconds[left] *= factor ** (_LOCAL_RATE * (1 - weight))
        self._seconds[left + 1] *= factor ** (_LOCAL_RATE * weight)

    def _interval(self, num_tokens: float) -> tuple[int, float]:
        """The interval (its left end's index), and how far into it; the last one goes on for ever."""
        left = 0
        while left < len(self._sizes) - 2 and self._sizes[left + 1] <= num_tokens:
            left += 1
        return left, (num_tokens - self._sizes[left]) / (self._sizes[left + 1] - self._sizes[left])


class DraftingCosts:
    """Owns the measured seconds of making drafts, by the number of rows they are made for: of one position of all of
    them where a drafter goes position by position, else of whole drafts."""

    def __init__(self, by_position: bool, smallest_pass: float) -> None:
        self._by_position = by_position
        self._first_guess = _FIRST_STEP_SHARE * smallest_pass if by_position else 0.0
        self._measured: dict[int, tuple[float, int]] = {}
        """Rows -> (seconds, how often measured)."""

    @property
    def curve(self) -> dict[int, float]:
        return {rows: seconds for rows, (seconds, _) in sorted(self._measured.items())}

    def seconds(self, num_rows: int, length: int) -> float:
        """Of drafts of `length` tokens for so many rows: as measured for that many, or the nearest number of rows."""
        if not length or not num_rows:
            return 0.0
        if self._measured:
            nearest = min(self._measured, key=lambda rows: abs(rows - num_rows))
            each = self._measured[nearest][0]
        else:
            each = self._first_guess
        return each * (length if self._by_position else 1)

    def observe(self, num_rows: int, length: int, seconds: float) -> None:
        """A mean at first, then one that forgets. What stands out by far is another process's doing and counts
        little."""
        each = seconds / (length if self._by_position else 1)
        known, times = self._measured.get(num_rows, (each, 0))
        each = min(each, 3 * known)
        rate = max(_MEAN_RATE, 1 / (times + 1))
        self._measured[num_rows] = (known + rate * (each - known), times + 1)


def choose_guesses(
    num_rows: int,
    num_tokens: int,
    gains: Sequence[Sequence[float]],
    seconds: Callable[[int], float],
    threshold: float = 1.0,
) -> list[list[int]]:
    """Which guesses to verify, of each row's: those that maximise expected tokens per second, the best ones first.

    `gains[i][j]`: probability that guess j of row i, and all that it follows, are right; at most that of the guess that
    it follows, which comes before it. With g_1 >= g_2 >= ... of all of them sorted, the best k give B + g_1 + ... + g_k
    tokens in T(n + k) seconds, for B = `num_rows` rows that decode and n = `num_tokens` tokens that are fed anyway. A
    choice must beat k = 0 by the factor `threshold`."""
    ranked = sorted((-gain, j, i) for i, row in enumerate(gains) for j, gain in enumerate(row) if gain > _NEGLIGIBLE)
    best, best_count = num_rows / seconds(num_tokens) * threshold, 0
    expected = float(num_rows)
    for count, (minus_gain, _, _) in enumerate(ranked, 1):
        expected -= minus_gain
        rate = expected / seconds(num_tokens + count)
        if rate > best:
            best, best_count = rate, count
    chosen: list[list[int]] = [[] for _ in gains]
    for _, j, i in ranked[:best_count]:
        chosen[i].append(j)
    return chosen


def choose_depth(
    num_rows: int,
    num_drafted: int,
    gains: Sequence[float],
    others: float,
    seconds: Callable[[float], float],
    drafting: Callable[[int], float],
    threshold: float = 1.0,
    width: float = 1.0,
) -> int:
    """How long drafts of equal length should be made, before they are: gamma = argmax of

        (B + b (g_1 + ... + g_gamma) + others) / (T(b w gamma) + D(gamma)),   gamma = 0 .. len(gains)

    `num_rows` B rows decode, drafts are made for `num_drafted` b of them; `gains` are means over rows; `others` are
    tokens expected from drafts of another origin; `seconds(k)` is T of a pass with k guesses, of which there are
    `width` w for each position; `drafting` D. gamma > 0 must beat 0 by the factor `threshold`."""
    best, best_depth = (num_rows + others) / seconds(0) * threshold, 0
    expected = num_rows + others
    for depth, gain in enumerate(gains, 1):
        expected += num_drafted * gain
        rate = expected / (seconds(num_drafted * depth * width) + drafting(depth))
        if rate > best:
            best, best_depth = rate, depth
    return best_depth


@dataclass(frozen=True)
class CurvePoint:
    """Expected speed of one way of drafting."""

    num_rows: int
    length: int
    tokens_per_s: float


def expected_speed(
    acceptance: Sequence[float],
    costs: PassCosts,
    drafting: DraftingCosts,
    rows: Sequence[int] = (1, 2, 4, 8, 16),
) -> list[CurvePoint]:
    """Tokens per second by rows in flight and draft length, 0 to as many as `acceptance` has entries: each is the
    probability that a token at that position is accepted if all before it were."""
    points = []
    for num_rows in rows:
        expected, together = 1.0, 1.0
        for length in range(len(acceptance) + 1):
            if length:
                together *= acceptance[length - 1]
                expected += together
            seconds = costs.seconds(num_rows * (1 + length)) + drafting.seconds(num_rows, length)
            points.append(CurvePoint(num_rows, length, num_rows * expected / seconds))
    return points
