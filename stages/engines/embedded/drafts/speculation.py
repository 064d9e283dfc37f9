"""Which guesses to verify in the next pass, and whose: those that maximise expected tokens per second.

    rows that decode ──► drafters ──► trees of guesses, with the gains that were measured for their kind,
                          │           depth and confidence; of one row joined ──► choose_guesses
                          │   a drafter that goes position by position is asked for the length that pays on average
                          │   (choose_depth: the time of drafting counts), or not at all
    pass: seconds, accepted or not, hidden states ──► costs, tallies, drafters

k = 0 is plain decoding: at large batches, where a pass costs in proportion to its tokens, that is the answer. It is
remembered for some passes, so that deciding costs nothing there. And whatever the costs say: where passes with drafts
are seen to gain nothing, there are none for a while (`trials`).

Standard library, numpy, torch (for types) and stages.engines only; the clock is handed in.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32

from stages.engines.config import SpeculationConfig, speculation_problems
from stages.engines.embedded.draft_tree import DraftTree
from stages.engines.embedded.drafts.costs import DraftingCosts, PassCosts, choose_depth, choose_guesses
from stages.engines.embedded.drafts.drafters import Draft, Drafter
from stages.engines.embedded.drafts.guesses import Guesses, joined
from stages.engines.embedded.drafts.trials import Trials
from stages.engines.embedded.extensions import DraftCounts
from stages.engines.embedded.rows import Row
from stages.engines.embedded.scheduler import Chunk

_PRIOR_ACCEPTED, _PRIOR_TRIED = 2.0, 3.0
"""Acceptance that is assumed before anything is seen: optimistic, so that every kind is tried."""
_MEMORY = 0.999
"""What a pass leaves of older counts: a kind that was given up is tried again some hundreds of passes later."""
_AFTER_LEARNING = 0.5
"""What is left of the counts of a drafter that has learned meanwhile."""
_LEAST_GAIN = 1.05
"""A gain below it is none: the estimates are no better."""
_NOTICEABLE = 0.02
"""Of a pass: drafts that took longer to make count against drafting even where none was worth verifying."""
_WIDTH_RATE = 0.05
_DECISION_PASSES = 16
"""So many passes with as many rows follow one decision of whether, and how far, drafts are worth making."""


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


class Speculation:
    """Owns the drafters, and what has been measured of passes, of drafting and of acceptance."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: PassCosts,
        longest: int,
        lengths: Literal["measured", "longest"],
        clock: Callable[[], float],
        train_share: float = 1.0,
        *,
        branching: bool = True,
    ) -> None:
        """`drafters`: those that go position by position come last, and are asked for the rows for which the others
        have nothing better. `branching`: whether passes may have several guesses for a position."""
        self.costs = costs
        self.counts = DraftCounts()
        self.wants_hidden = any(drafter.wants_hidden for drafter in drafters)
        smallest = min(costs.curve.values())
        self.drafting = {drafter: DraftingCosts(drafter.by_position, smallest) for drafter in drafters}
        self._drafters, self._longest, self._lengths = drafters, longest, lengths
        self._clock, self._train_share, self._branching = clock, train_share, branching
        self._tallies: dict[tuple[str, int, int | None], _Tally] = {}
        """By kind, position and the drafter's own confidence; None: whatever that was."""
        self._trials = Trials()
        self._passes = 0
        self._depths: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(drafter, rows, tokens) -> (its depth, the pass from which on it is decided anew)."""
        self._widths: dict[str, float] = {}
        """Guesses verified for each position, on average, by kind."""
        self._proposed: dict[Row, Guesses] = {}
        """Of each row the last ones to be verified: several passes may be under way."""

    # ---- for a pass ----

    def propose(self, rows: Sequence[Row], num_other_tokens: int) -> dict[Row, DraftTree]:
        """Guesses for rows that decode in the next pass, beside `num_other_tokens` of prompts and the like; those worth
        verifying."""
        measured = self._lengths == "measured"
        if measured and not self._trials.allows(len(rows)):
            return {}
        proposed: dict[Row, Guesses] = {}
        rooms = {row: min(self._longest, row.num_left - 1) for row in rows}
        asked = [row for row in rows if rooms[row] > 0]
        if not asked:
            return {}
        num_tokens = len(rows) + num_other_tokens
        context = sum(len(row.tokens) for row in rows) / len(rows)

        def seconds(size: float) -> float:
            return self.costs.seconds(size, context * size)

        def found(row: Row) -> float:
            return proposed[row].total if row in proposed else 0.0

        for number, drafter in enumerate(self._drafters):
            candidates = asked
            if drafter.by_position and proposed:
                means = self._kind_gains(drafter)
                candidates = [row for row in asked if found(row) < sum(means[: rooms[row]])]
            depth = self._longest
            if measured:
                others = sum(found(row) for row in asked if row not in candidates)
                depth = self._depth(number, len(rows), len(candidates), num_tokens, others, seconds)
            if not depth or not candidates:
                continue
            limits = [min(depth, rooms[row]) for row in candidates]
            started = self._clock()
            drafts = drafter.propose(candidates, limits)
            made = max((max(draft.tree.depths, default=-1) + 1 for draft in drafts if draft is not None), default=0)
            if made:
                self.drafting[drafter].observe(len(candidates), made, self._clock() - started)
            for row, draft in zip(candidates, drafts, strict=True):
                if draft is not None and len(draft.tree):
                    guesses = self._weighed(draft)
                    proposed[row] = self._joined(proposed[row], guesses) if row in proposed else guesses
        chosen = [list(range(len(guesses.tree))) for guesses in proposed.values()]
        if measured and proposed:
            gains = [guesses.gains for guesses in proposed.values()]
            chosen = choose_guesses(len(rows), num_tokens, gains, seconds, _LEAST_GAIN)
            if not any(chosen):
                self._depths.clear()  # they were made in vain: decide anew
        pairs = zip(proposed.items(), chosen, strict=True)
        verified = {row: guesses.only(some).as_fed() for (row, guesses), some in pairs if some}
        self._proposed |= verified
        return {row: guesses.tree for row, guesses in verified.items()}

    def observe(
        self,
        chunks: Sequence[Chunk],
        kept: Sequence[Sequence[int]],
        hidden: Float32[np.ndarray, "M C"] | None,
        seconds: float | None,
        drafting_s: float = 0.0,
    ) -> None:
        """What became of a pass: the draws that each sampling chunk kept (`batch.keep`), the hidden states behind all
        of its draws, and how long it took (None if prompts were fed in it, whose tokens are cheaper: nothing is sampled
        after them), after `drafting_s` of looking for drafts."""
        self._passes += 1
        if seconds is not None and self._lengths == "measured":
            sizes = [chunk.count + len(chunk.drafts) for chunk in chunks]
            context = sum(chunk.start * size for chunk, size in zip(chunks, sizes, strict=True))
            self.costs.observe(sum(sizes), seconds, context)
            in_vain = drafting_s > _NOTICEABLE * seconds
            drafted = in_vain or any(len(chunk.drafts) for chunk in chunks)
            all_in = seconds + drafting_s if drafted else seconds
            self._trials.observe(len(chunks), sum(map(len, kept)), all_in, drafted=drafted)
        start = 0
        for chunk, draws in zip(chunks, kept, strict=True):
            if hidden is not None:
                for drafter in self._drafters:
                    if drafter.wants_hidden:
                        drafter.observe(chunk.row, hidden[[start + draw for draw in draws]])
            start += 1 + len(chunk.drafts)
            self.counts.lengths[len(chunk.drafts)] += 1
            if len(chunk.drafts):
                self._count(chunk, draws)

    def finish(self, row: Row) -> None:
        self._proposed.pop(row, None)
        for drafter in self._drafters:
            drafter.finish(row)

    # ---- between passes ----

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """New weights of the model are coming in. From any thread."""
        for drafter in self._drafters:
            drafter.refit(tensors)

    def train(self) -> float | None:
        """Lets drafters learn for some tens of milliseconds; seconds that must pass before they may again, so that
        training takes no more than its share; None if there is nothing to learn."""
        started = self._clock()
        learned = False
        for drafter in self._drafters:
            generation = drafter.generation
            learned = drafter.train() or learned
            if drafter.generation != generation:
                self._forget(drafter.kinds)
        if not learned:
            return None
        return (self._clock() - started) * (1 / self._train_share - 1)

    # ---- as data ----

    def acceptance(self, kind: str) -> list[float]:
        """Measured probability that some guess is right if one was for the position before, as far as drafts went."""
        rates: list[float] = []
        while (kind, len(rates), None) in self._tallies:
            rates.append(self._rate(kind, len(rates), None))
        return rates

    # ---- inside ----

    def _count(self, chunk: Chunk, kept: Sequence[int]) -> None:
        guesses, tree = self._proposed[chunk.row], chunk.drafts
        depths, right = tree.depths, {draw - 1 for draw in kept[1:]}
        reached = {draw - 1 for draw in kept}
        if chunk.row.finished is not None:
            reached.discard(kept[-1] - 1)  # what lies behind the row's end says nothing
        some_right: dict[tuple[str, int], bool] = {}
        for guess, (parent, depth) in enumerate(zip(tree.parents, depths, strict=True)):
            kind, is_right = guesses.kinds[guess], guess in right
            self.counts.drafted[kind] += 1
            if is_right:
                self.counts.accepted[kind] += 1
                self.counts.accepted_at[depth] += 1
            if parent in reached:
                some_right[kind, depth] = some_right.get((kind, depth), False) or is_right
                if (level := guesses.levels[guess]) is not None:
                    self._tally(kind, depth, level, accepted=is_right)
        for (kind, depth), is_right in some_right.items():
            self._tally(kind, depth, None, accepted=is_right)
        for kind in dict.fromkeys(guesses.kinds[: len(tree)]):
            own = [depth for other, depth in zip(guesses.kinds, depths, strict=False) if other == kind]
            width = self._widths.get(kind, 1.0)
            self._widths[kind] = width + _WIDTH_RATE * (len(own) / len(set(own)) - width)

    def _tally(self, kind: str, depth: int, level: int | None, *, accepted: bool) -> None:
        tally = self._tallies.setdefault((kind, depth, level), _Tally())
        tally.age(self._passes)
        tally.tried += 1
        tally.accepted += accepted

    def _forget(self, kinds: Sequence[str]) -> None:
        """These kinds of drafts are better now than what has been counted of them."""
        for (kind, _, _), tally in self._tallies.items():
            if kind in kinds:
                tally.age(self._passes)
                tally.tried, tally.accepted = tally.tried * _AFTER_LEARNING, tally.accepted * _AFTER_LEARNING

    def _rate(self, kind: str, position: int, level: int | None) -> float:
        tally = self._tallies.get((kind, position, level))
        return tally.rate(self._passes) if tally else _PRIOR_ACCEPTED / _PRIOR_TRIED

    def _weighed(self, draft: Draft) -> Guesses:
        """The draft with its gains; its first line only, where passes cannot branch."""
        tree, gains = draft.tree, list[float]()
        levels = draft.levels or (None,) * len(tree)
        for parent, depth, level in zip(tree.parents, tree.depths, levels, strict=True):
            gains.append((gains[parent] if parent >= 0 else 1.0) * self._rate(draft.kind, depth, level))
        guesses = Guesses(tree, (draft.kind,) * len(tree), tuple(levels), tuple(gains))
        return guesses if self._branching else guesses.only(guesses.main_chain)

    def _joined(self, first: Guesses, second: Guesses) -> Guesses:
        """Of two drafters; the better ones, where passes cannot branch."""
        return joined(first, second) if self._branching else max(first, second, key=lambda guesses: guesses.total)

    def _kind_gains(self, drafter: Drafter) -> list[float]:
        """Of the drafter's best kind, on average over what it was sure of: by position, that some guess is right."""
        each = [
            list(itertools.accumulate((self._rate(kind, depth, None) for depth in range(self._longest)), operator.mul))
            for kind in drafter.kinds
        ]
        return max(each, key=sum)

    def _depth(
        self,
        number: int,
        num_rows: int,
        num_drafted: int,
        num_tokens: int,
        others: float,
        seconds: Callable[[float], float],
    ) -> int:
        """How long drafts this drafter should be asked for: 0 where none could pay."""
        key = (number, num_drafted, num_tokens)
        depth, until = self._depths.get(key, (0, -1))
        if self._passes < until:
            return depth
        drafter = self._drafters[number]
        depth = choose_depth(
            num_rows,
            num_drafted,
            self._kind_gains(drafter),
            others,
            lambda drafted: seconds(num_tokens + drafted),
            lambda length: self.drafting[drafter].seconds(num_drafted, length),
            _LEAST_GAIN,
            max(self._widths.get(kind, 1.0) for kind in drafter.kinds),
        )
        if depth and not drafter.by_position:
            depth = self._longest  # whole drafts cost the same: which of them are good is seen afterwards
        if len(self._depths) > 4096:
            self._depths.clear()
        self._depths[key] = (depth, self._passes + _DECISION_PASSES)
        return depth


def check_speculation(config: SpeculationConfig) -> None:
    """Raises ValueError, with the key, for settings that cannot work."""
    for problem in speculation_problems(config):
        raise ValueError(f"{problem.key} is {problem.given}; {problem.need}")
