"""How often guesses were right, by kind, depth and the drafter's own confidence: what is expected of those to come.

Standard library, the draft tree and guesses only; no clock: time is counted in passes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from stages.engines.embedded.draft_tree import DraftTree
from stages.engines.embedded.drafts.guesses import Guesses

_PRIOR_ACCEPTED, _PRIOR_TRIED = 2.0, 3.0
"""Acceptance that is assumed before anything is seen: optimistic, so that every kind is tried."""
_MEMORY = 0.999
"""What a pass leaves of older counts: a kind that was given up is tried again some hundreds of passes later."""
_AFTER_LEARNING = 0.5
"""What is left of the counts of a drafter that has learned meanwhile."""
_WIDTH_RATE = 0.05


@dataclass
class _Tally:
    accepted: float = 0.0
    tried: float = 0.0
    seen: int = 0
    """Pass of the last change: what lies between has been forgotten in part."""

    def age(self, now: int) -> None:
        left = _MEMORY ** (now - self.seen)
        self.accepted *= left
        self.tried *= left
        self.seen = now

    def rate(self, now: int) -> float:
        left = _MEMORY ** (now - self.seen)
        return (left * self.accepted + _PRIOR_ACCEPTED) / (left * self.tried + _PRIOR_TRIED)


class Acceptance:
    """Owns the tallies of accepted guesses, which fade from pass to pass."""

    def __init__(self) -> None:
        self.passes = 0
        """Passes so far; whoever observes counts on."""
        self._tallies: dict[tuple[str, int, int | None], _Tally] = {}
        """By kind, depth and the drafter's own confidence; None: whatever that was."""
        self._widths: dict[str, float] = {}
        """Guesses verified for each position, on average, by kind."""

    def observe(
        self, guesses: Guesses, verified: DraftTree, accepted: Collection[int], reached: Collection[int]
    ) -> None:
        """What became of a row's guesses, of which the first were verified: those that were right, and those (-1: the
        row's own last token) behind which the row went on, so that what follows them was put to the test."""
        depths = verified.depths
        some_right: dict[tuple[str, int], bool] = {}
        for guess, (parent, depth) in enumerate(zip(verified.parents, depths, strict=True)):
            if parent not in reached:
                continue
            kind, is_right = guesses.kinds[guess], guess in accepted
            some_right[kind, depth] = some_right.get((kind, depth), False) or is_right
            if (level := guesses.levels[guess]) is not None:
                self._tally(kind, depth, level, accepted=is_right)
        for (kind, depth), is_right in some_right.items():
            self._tally(kind, depth, None, accepted=is_right)
        for kind in dict.fromkeys(guesses.kinds[: len(verified)]):
            own = [depth for other, depth in zip(guesses.kinds, depths, strict=False) if other == kind]
            width = self.width(kind)
            self._widths[kind] = width + _WIDTH_RATE * (len(own) / len(set(own)) - width)

    def forget(self, kinds: Sequence[str]) -> None:
        """These kinds of drafts are better now than what has been counted of them."""
        for (kind, _, _), tally in self._tallies.items():
            if kind in kinds:
                tally.age(self.passes)
                tally.tried, tally.accepted = tally.tried * _AFTER_LEARNING, tally.accepted * _AFTER_LEARNING

    def rate(self, kind: str, depth: int, level: int | None) -> float:
        """Probability that a guess is right if the one that it follows was. `level` None: that some guess at that depth
        is."""
        tally = self._tallies.get((kind, depth, level))
        return tally.rate(self.passes) if tally else _PRIOR_ACCEPTED / _PRIOR_TRIED

    def rates(self, kind: str) -> list[float]:
        """Of some guess at each depth, as far as drafts went."""
        rates: list[float] = []
        while (kind, len(rates), None) in self._tallies:
            rates.append(self.rate(kind, len(rates), None))
        return rates

    def gains(self, kinds: Sequence[str], longest: int) -> list[float]:
        """Of the best of these kinds, on average over what its drafter was sure of: by position, the probability that
        some guess is right there and at all positions before."""
        each = [
            list(itertools.accumulate((self.rate(kind, depth, None) for depth in range(longest)), operator.mul))
            for kind in kinds
        ]
        return max(each, key=sum)

    def width(self, kind: str) -> float:
        """Guesses verified for each position, on average."""
        return self._widths.get(kind, 1.0)

    def _tally(self, kind: str, depth: int, level: int | None, *, accepted: bool) -> None:
        tally = self._tallies.setdefault((kind, depth, level), _Tally())
        tally.age(self.passes)
        tally.tried += 1
        tally.accepted += accepted
