"""The measured costs of passes and drafts, and the choices that follow from them.

`choose_guesses` and `choose_depth` maximise the expected tokens per second under the cost model. The model may be wrong
where a gain is small, so `Trials` checks it. For each number of decoding rows `Trials` compares the tokens per second
of passes with and without drafts, the time of drafting included. If drafts do not gain, they pause, each time for
longer. If they gain, one pass in `_PLAIN_EVERY` still runs without drafts, so that the comparison stays current.

Imports the standard library only, and reads no clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

CALIBRATED = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sizes of the passes that are timed before the first draft."""
_MEAN_RATE = 0.1
"""Smallest weight of a new measurement in the running mean."""
_COMMON_RATE, _LOCAL_RATE = 0.08, 0.04
"""Rates at which a pass moves the whole curve, and the sizes next to its own. The whole curve moves because usually the
whole machine has become slower or faster. Otherwise a size that was last timed at a faster moment would look too
cheap."""
_FIRST_STEP_SHARE = 0.03
"""Time that a drafted position is assumed to take until it is measured, as a share of the smallest pass."""
_NEGLIGIBLE = 0.01
"""Probability below which guesses are ignored."""


class PassCosts:
    """Measured seconds of a pass by its number of tokens: linear between the calibrated sizes. Each pass moves the
    curve towards its time, the nearest sizes most. Every position that a token attends to adds a constant."""

    def __init__(self, seconds: Mapping[int, float], per_position: float = 0.0) -> None:
        """`seconds`: measured for at least two sizes, at short context. Raises ValueError for fewer."""
        if len(seconds) < 2:
            raise ValueError("a cost curve needs measurements of at least two sizes")
        self.per_position = max(per_position, 0.0)
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]
        for i in range(1, len(self._seconds)):  # more tokens are never faster; another process must have interfered
            self._seconds[i] = max(self._seconds[i], self._seconds[i - 1])

    @property
    def curve(self) -> dict[int, float]:
        """Seconds by number of tokens, at short context."""
        return dict(zip(self._sizes, self._seconds, strict=True))

    def seconds(self, num_tokens: float, positions: float = 0.0) -> float:
        """Return the seconds of a pass of `num_tokens` tokens that attend to `positions` positions in total."""
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
        """Return the index of the smaller one of the two measured sizes around `num_tokens`, and how far `num_tokens`
        lies from it to the larger one, as a share. Beyond the largest size the share exceeds 1."""
        left = 0
        while left < len(self._sizes) - 2 and self._sizes[left + 1] <= num_tokens:
            left += 1
        return left, (num_tokens - self._sizes[left]) / (self._sizes[left + 1] - self._sizes[left])


class DraftingCosts:
    """Measured seconds of drafting, by number of rows. They are the seconds of one position of all rows if the drafter
    works position by position, otherwise those of whole drafts."""

    def __init__(self, by_position: bool, smallest_pass: float) -> None:
        self._by_position = by_position
        self._first_guess = _FIRST_STEP_SHARE * smallest_pass if by_position else 0.0
        self._measured: dict[int, tuple[float, int]] = {}
        """Rows -> (seconds, number of measurements)."""

    @property
    def curve(self) -> dict[int, float]:
        return {rows: seconds for rows, (seconds, _) in sorted(self._measured.items())}

    def seconds(self, num_rows: int, length: int) -> float:
        """Return the seconds of drafts of `length` tokens, as measured for this or the nearest number of rows."""
        if not length or not num_rows:
            return 0.0
        if self._measured:
            nearest = min(self._measured, key=lambda rows: abs(rows - num_rows))
            each = self._measured[nearest][0]
        else:
            each = self._first_guess
        return each * (length if self._by_position else 1)

    def observe(self, num_rows: int, length: int, seconds: float) -> None:
        """Update the mean seconds for this number of rows. At first all measurements have the same weight; later the
        old ones fade. A measurement counts as at most 3 times the mean, since a longer one was probably slowed by
        another process."""
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
    """Return for each row the guesses to verify, the best first: those that maximise the expected tokens per second.

    `gains[i][j]`: probability that guess j of row i and all before it on its path are right; at most that of its
    parent, which has a smaller j. With all gains sorted, g_1 >= g_2 >= ..., the best k give B + g_1 + ... + g_k tokens
    in T(n + k) seconds, for B = `num_rows` decoding rows and n = `num_tokens` tokens that are fed anyway. A choice must
    beat k = 0 by the factor `threshold`."""
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
    """Return the draft length to ask for, the same for all rows: gamma = argmax of

        (B + b (g_1 + ... + g_gamma) + others) / (T(b w gamma) + D(gamma)),   gamma = 0 .. len(gains)

    B = `num_rows` rows decode, and drafts are made for b = `num_drafted` of them. `gains`: means over rows. `others`:
    tokens expected from other drafters. `seconds(k)`: T of a pass with k guesses; w = `width` guesses per position.
    `drafting`: D. gamma > 0 must beat 0 by the factor `threshold`."""
    best, best_depth = (num_rows + others) / seconds(0) * threshold, 0
    expected = num_rows + others
    for depth, gain in enumerate(gains, 1):
        expected += num_drafted * gain
        rate = expected / (seconds(num_drafted * depth * width) + drafting(depth))
        if rate > best:
            best, best_depth = rate, depth
    return best_depth


# ---- trials: passes with and without drafts --------------------------------------------------------------

_WINDOW = 16
"""Number of last passes of each kind that are compared."""
_WINDOW_ROWS = 128
"""Fewest rows that the window of passes with drafts holds, summed over its passes. With few rows the number of tokens
per row is mostly chance, so a comparison of a few passes would sooner or later be wrong."""
_ENOUGH_PLAIN = 4
"""Fewest passes without drafts in a comparison. It also needs half a window of passes with drafts."""
_PLAIN_EVERY = 32
"""One in this many passes runs without drafts while they are allowed."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096
"""Shortest and longest pause of drafts, in passes. Each pause is twice the last one, until drafts gain over a whole
window."""


@dataclass
class _Trial:
    """The measurements at one number of rows."""

    drafted: deque[tuple[int, float]]
    """Tokens and seconds of the last passes with drafts; `maxlen` is the window."""
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Seconds of the last passes without drafts."""
    passes: int = 0
    pause_until: int = 0
    pause_passes: int = _FIRST_PAUSE

    @property
    def window(self) -> int:
        assert self.drafted.maxlen is not None
        return self.drafted.maxlen

    @property
    def enough_drafted(self) -> bool:
        return 2 * len(self.drafted) >= self.window

    @property
    def enough_plain(self) -> bool:
        return len(self.plain) >= _ENOUGH_PLAIN


class Trials:
    """Owns the last passes by number of rows, and the pauses of drafts."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def allows(self, num_rows: int) -> bool:
        """Return True if the next pass of `num_rows` rows may have drafts."""
        trial = self._trial(num_rows)
        if trial.passes < trial.pause_until:
            return False
        short_of_plain = trial.enough_drafted and not trial.enough_plain
        return not short_of_plain and trial.passes % _PLAIN_EVERY != _PLAIN_EVERY - 1

    def observe(self, num_rows: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """Record a pass of `num_rows` rows, all decoding. `seconds` includes the drafting."""
        trial = self._trial(num_rows)
        trial.passes += 1
        if drafted:
            trial.drafted.append((tokens, seconds))
        else:
            trial.plain.append(seconds)
        gain = self.gain(num_rows)
        if not drafted or gain is None:
            return
        if gain < 1.0:
            trial.pause_until, trial.pause_passes = (
                trial.passes + trial.pause_passes,
                min(2 * trial.pause_passes, _LONGEST_PAUSE),
            )
            trial.drafted.clear()
        elif len(trial.drafted) == trial.window:
            trial.pause_passes = _FIRST_PAUSE

    def gain(self, num_rows: int) -> float | None:
        """Return tokens per second with drafts, divided by those without, over the last passes; None if there are too
        few. Uses the median of the seconds, so that passes which another process held up do not count."""
        trial = self._trials.get(num_rows)
        if trial is None or not (trial.enough_drafted and trial.enough_plain):
            return None
        tokens = statistics.fmean(tokens for tokens, _ in trial.drafted)
        seconds = statistics.median(seconds for _, seconds in trial.drafted)
        return tokens / seconds * statistics.median(trial.plain) / num_rows

    def _trial(self, num_rows: int) -> _Trial:
        if num_rows not in self._trials:
            window = max(_WINDOW, -(-_WINDOW_ROWS // max(num_rows, 1)))
            self._trials[num_rows] = _Trial(deque(maxlen=window))
        return self._trials[num_rows]
