"""What drafts were seen to gain: the last word over the cost model, which may be wrong where a gain is small.

By number of rows that decode, passes with and without drafts are compared as they run: tokens per second of both,
drafting included. Where drafts do not gain they are given up for a while, each time for longer; where they do, a pass
now and then runs without, so that the comparison stays fresh. Standard library only; no clock.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

_WINDOW = 16
"""Passes of each kind that are compared: the last ones."""
_WINDOW_ROWS = 128
"""Of passes with drafts, so many more where rows are few: how many tokens a row gets is mostly chance, and a judgement
on a few would come out wrong sooner or later."""
_ENOUGH_PLAIN = 4
"""Passes without drafts that it takes to judge; of those with drafts, half a window."""
_PLAIN_EVERY = 32
"""One in so many passes runs without drafts while they are allowed."""
_FIRST_REST, _LONGEST_REST = 128, 4096
"""Passes without drafts after they were given up: twice as many each time."""


@dataclass
class _Trial:
    """One number of rows."""

    drafted: deque[tuple[int, float]]
    """Tokens and seconds of passes with drafts: as many as are compared."""
    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Seconds of passes without drafts."""
    passes: int = 0
    rest_until: int = 0
    rest: int = _FIRST_REST

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
    """Owns the last passes by number of rows, and where drafts rest."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def allows(self, num_rows: int) -> bool:
        """Whether the next pass of so many rows may have drafts."""
        trial = self._trial(num_rows)
        if trial.passes < trial.rest_until:
            return False
        short_of_plain = trial.enough_drafted and not trial.enough_plain
        return not short_of_plain and trial.passes % _PLAIN_EVERY != _PLAIN_EVERY - 1

    def observe(self, num_rows: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """A pass of so many rows, all decoding, made so many tokens in so many seconds, looking for drafts included."""
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
            trial.rest_until, trial.rest = trial.passes + trial.rest, min(2 * trial.rest, _LONGEST_REST)
            trial.drafted.clear()
        elif len(trial.drafted) == trial.window:
            trial.rest = _FIRST_REST

    def gain(self, num_rows: int) -> float | None:
        """Tokens per second with drafts over those without, of the last passes of so many rows; None: too few. By
        medians of seconds: a pass that another process held up says nothing."""
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
