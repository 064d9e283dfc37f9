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
_ENOUGH_DRAFTED, _ENOUGH_PLAIN = 8, 4
"""Passes of each kind that it takes to judge."""
_PLAIN_EVERY = 32
"""One in so many passes runs without drafts while they are allowed."""
_FIRST_REST, _LONGEST_REST = 128, 4096
"""Passes without drafts after they were given up: twice as many each time."""


@dataclass
class _Trial:
    """One number of rows."""

    plain: deque[float] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Seconds of passes without drafts."""
    drafted: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_WINDOW))
    """Tokens and seconds of passes with drafts."""
    passes: int = 0
    rest_until: int = 0
    rest: int = _FIRST_REST


class Trials:
    """Owns the last passes by number of rows, and where drafts rest."""

    def __init__(self) -> None:
        self._trials: dict[int, _Trial] = {}

    def allows(self, num_rows: int) -> bool:
        """Whether the next pass of so many rows may have drafts."""
        trial = self._trials.setdefault(num_rows, _Trial())
        if trial.passes < trial.rest_until:
            return False
        short_of_plain = len(trial.drafted) >= _ENOUGH_DRAFTED and len(trial.plain) < _ENOUGH_PLAIN
        return not short_of_plain and trial.passes % _PLAIN_EVERY != _PLAIN_EVERY - 1

    def observe(self, num_rows: int, tokens: int, seconds: float, *, drafted: bool) -> None:
        """A pass of so many rows, all decoding, made so many tokens in so many seconds, looking for drafts included."""
        trial = self._trials.setdefault(num_rows, _Trial())
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
        elif len(trial.drafted) == _WINDOW:
            trial.rest = _FIRST_REST

    def gain(self, num_rows: int) -> float | None:
        """Tokens per second with drafts over those without, of the last passes of so many rows; None: too few. By
        medians of seconds: a pass that another process held up says nothing."""
        trial = self._trials.get(num_rows)
        if trial is None or len(trial.drafted) < _ENOUGH_DRAFTED or len(trial.plain) < _ENOUGH_PLAIN:
            return None
        tokens = statistics.fmean(tokens for tokens, _ in trial.drafted)
        seconds = statistics.median(seconds for _, seconds in trial.drafted)
        return tokens / seconds * statistics.median(trial.plain) / num_rows
