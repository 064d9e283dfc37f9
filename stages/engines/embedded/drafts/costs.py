"""The measured costs of passes and drafts, and the choices that follow from them.

`choose_guesses` and `choose_depth` maximise the expected tokens per second under the cost model. The model may be wrong
where a gain is small, so `Trials` checks it. For each number of decoding rows `Trials` compares the tokens per second
of passes with and without drafts, the time of drafting included. If drafts do not gain, drafts pause, each time for
longer. If drafts gain, one pass in `_PLAIN_EVERY` still runs without drafts, so that the comparison stays current.

Imports the standard library only, and reads no clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

CALIBRATED = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sizes (numbers of tokens) of the passes that are timed before the first row is served."""
_MEAN_RATE = 0.1
"""Minimum weight of a new measurement in the running mean."""
_COMMON_RATE, _LOCAL_RATE = 0.08, 0.04
"""Exponents with which a measured pass changes the cost curve: the seconds of a pass as a function of its size (its
number of tokens). Let f be the measured time divided by the predicted time, limited to 0.5 to 2.

- The seconds at all stored sizes are multiplied by f ** `_COMMON_RATE`, because usually the whole machine has become
  slower or faster. Otherwise a size that was last timed while the machine was faster would look too cheap.
- The seconds at the two stored sizes on either side of the pass's size are also multiplied by f ** a and f ** b. The
  exponents a and b add up to `_LOCAL_RATE`. The nearer size gets the larger exponent.
"""
_FIRST_STEP_SHARE = 0.03
"""Time that a drafted position is assumed to take until it is measured, as a share of the time of the smallest pass."""
_NEGLIGIBLE = 0.01
"""Probability below which guesses are ignored."""


class PassCosts:
    """Measured seconds of a pass as a function of its number of tokens, linear between the calibrated sizes.

    Each pass that is observed changes the curve towards its time: all sizes a little, and the two nearest sizes more.
    In addition, each position that a token attends to costs a constant time."""

    def __init__(self, seconds: Mapping[int, float], per_position: float = 0.0) -> None:
        """`seconds`: number of tokens of a pass -> its measured seconds at short context. `per_position`: further
        seconds per position that a token attends to. Raises ValueError if `seconds` has fewer than two sizes."""
        if len(seconds) < 2:
            raise ValueError("a cost curve needs measurements of at least two sizes")
        self.per_position = max(per_position, 0.0)
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]
        for i in range(1, len(self._seconds)):  # more tokens are never faster; another process must have interfered
            self._seconds[i] = max(self._seconds[i], self._seconds[i - 1])

    @property
    def curve(self) -> dict[int, float]:
        """Number of tokens of a pass -> its seconds at short context."""
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
        """Return the index of the nearest measured size below `num_tokens`, and the share of the way to the next size
        (above 1 beyond the largest)."""
        left = 0
        while left < len(self._sizes) - 2 and self._sizes[left + 1] <= num_tokens:
            left += 1
        return left, (num_tokens - self._sizes[left]) / (self._sizes[left + 1] - self._sizes[left])


class DraftingCosts:
    """Measured seconds of drafting, by number of rows. For a drafter that works position by position, this is the time
    for one position of all rows. For other drafters it is the time for the whole drafts of all rows."""

    def __init__(self, by_position: bool, smallest_pass: float) -> None:
        self._by_position = by_position
        self._first_guess = _FIRST_STEP_SHARE * smallest_pass if by_position else 0.0
        self._measured: dict[int, tuple[float, int]] = {}
        """Number of rows -> (mean seconds, number of measurements)."""

    @property
    def curve(self) -> dict[int, float]:
        return {rows: seconds for rows, (seconds, _) in sorted(self._measured.items())}

    def seconds(self, num_rows: int, length: int) -> float:
        """Return the seconds that drafts of `length` tokens take for `num_rows` rows. If this number of rows was never
        measured, the nearest measured number of rows is used."""
        if not length or not num_rows:
            return 0.0
        if self._measured:
            nearest = min(self._measured, key=lambda rows: abs(rows - num_rows))
            each = self._measured[nearest][0]
        else:
            each = self._first_guess
        return each * (length if self._by_position else 1)

    def observe(self, num_rows: int, length: int, seconds: float) -> None:
        """Update the mean seconds for this number of rows. The first measurements have equal weights; later, old
        measurements fade. A measurement above 3 times the mean counts as 3 times the mean, since another process has
        probably slowed it."""
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
    """Choose the guesses to verify so that the expected tokens per second are highest. Return the indices of each row's
    chosen guesses, the best first.

    Let B = `num_rows` be the number of decoding rows, n = `num_tokens` the number of tokens that are fed anyway, and
    g_1 >= g_2 >= ... the sorted gains of all rows. The best k guesses give B + g_1 + ... + g_k tokens in T(n + k)
    seconds.

    Args:
        num_rows: number of decoding rows.
        num_tokens: number of tokens that are fed anyway.
        gains: `gains[i][j]` is the probability that guess j of row i and all guesses before it on its path are right.
            The gain of a guess is at most the gain of its parent, and the parent has a smaller j.
        seconds: the function T, from the number of tokens of a pass to its seconds.
        threshold: factor by which the choice must be better than no guesses.
    """
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
    """Return the draft length to ask a drafter for, the same for all rows: the gamma in 0 .. len(gains) that maximises

        (B + b (g_1 + ... + g_gamma) + others) / (T(b w gamma) + D(gamma))

    Args:
        num_rows: B, the number of decoding rows.
        num_drafted: b, the number of rows that get drafts.
        gains: g_i is the probability that a draft is right up to and including position i, as a mean over rows.
        others: expected number of tokens from the drafts of other drafters.
        seconds: T, from the number of guesses in a pass to its seconds.
        drafting: D, from the draft length to the seconds of drafting.
        threshold: factor by which gamma > 0 must be better than gamma = 0.
        width: w, the number of guesses per position.
    """
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
"""Number of latest passes with drafts, and of latest passes without drafts, that are remembered. The tokens per second
of the two kinds are compared. If passes have few rows, more passes with drafts are remembered (see `_WINDOW_ROWS`)."""
_WINDOW_ROWS = 128
"""Minimum number of rows in the remembered passes with drafts, summed over the passes. If passes have few rows, more
than `_WINDOW` passes are remembered. The number of tokens that a row gets in a pass is mostly chance, so a comparison
over few rows would sooner or later be wrong."""
_ENOUGH_PLAIN = 4
"""Minimum number of measured passes without drafts before they are compared with passes with drafts. The comparison
also needs passes with drafts: at least half of the number to remember (see `_WINDOW`)."""
_PLAIN_EVERY = 32
"""While drafts are allowed, one in this many passes still runs without drafts."""
_FIRST_PAUSE, _LONGEST_PAUSE = 128, 4096
"""Shortest and longest pause, in passes, during which no drafts are made because they slow decoding down. Each pause is
twice as long as the last one. The next pause is the shortest again after a whole window of passes (`_WINDOW`) in which
decoding with drafts was at least as fast as without."""


@dataclass
class _Trial:
    """The comparison of passes with and without drafts for one number of rows: the latest measurements, and the pause
    of drafts if they brought no gain. Counts of passes include only passes with this number of rows."""

    drafted: deque[tuple[int, float]]
    """Tokens and seconds of the last passes with drafts; `maxlen` is the length of the window."""
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
    """Owns the measurements of the latest passes for each number of rows, and decides when drafts pause."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def allows(self, num_rows: int) -> bool:
        """Return True if the next pass of `num_rows` rows may have drafts. Return False in three cases:

        - Drafts pause.
        - Enough passes with drafts were measured, but too few without drafts to compare with.
        - This is the one of `_PLAIN_EVERY` passes that runs without drafts.
        """
        trial = self._trial(num_rows)
        if trial.passes < trial.pause_until:
            return False
        short_of_plain = trial.enough_drafted and not trial.enough_plain
        return not short_of_plain and trial.passes % _PLAIN_EVERY != _PLAIN_EVERY - 1

    def observe(self, num_rows: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """Record a pass of `num_rows` rows, all decoding. `tokens`: number of tokens that the rows got. If `drafted` is
        True, `seconds` includes the drafting."""
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
        """Return the speed-up by drafts over the latest passes: the tokens per second with drafts, divided by the
        tokens per second without drafts. Return None if there are too few passes. The median of the seconds is used, so
        a single pass that another process slowed down does not matter."""
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
