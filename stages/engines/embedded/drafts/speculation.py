"""Which guesses to verify in the next pass, and whose: those that maximise expected tokens per second.

    rows that decode ──► drafters ──► trees of guesses, with the gains that were measured for their kind,
                          │           depth and confidence; of one row joined ──► choose_guesses
                          │   a drafter that goes position by position is asked for the length that pays on average
                          │   (choose_depth: the time of drafting counts), or not at all
    pass: seconds, accepted or not, hidden states ──► costs, acceptance, drafters

k = 0 is plain decoding: at large batches, where a pass costs in proportion to its tokens, that is the answer. It is
remembered for some passes, so that deciding costs nothing there. And whatever the costs say: where passes with drafts
are seen to gain nothing, there are none for a while (`trials`).

Standard library, numpy, torch (for types) and stages.engines only; the clock is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32

from stages.engines.config import SpeculationConfig, speculation_problems
from stages.engines.embedded.draft_tree import DraftTree
from stages.engines.embedded.drafts.acceptance import Acceptance
from stages.engines.embedded.drafts.costs import DraftingCosts, PassCosts, choose_depth, choose_guesses
from stages.engines.embedded.drafts.drafters import Draft, Drafter
from stages.engines.embedded.drafts.guesses import Guesses, joined
from stages.engines.embedded.drafts.trials import Trials
from stages.engines.embedded.extensions import DraftCounts
from stages.engines.embedded.rows import Row
from stages.engines.embedded.scheduler import Chunk

_LEAST_GAIN = 1.05
"""A gain below it is none: the estimates are no better."""
_NOTICEABLE = 0.02
"""Of a pass: drafts that took longer to make count against drafting even where none was worth verifying."""
_DECISION_PASSES = 16
"""So many passes with as many rows follow one decision of whether, and how far, drafts are worth making."""


@dataclass
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
        self._acceptance, self._trials = Acceptance(), Trials()
        self._depths: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(drafter, rows, tokens) -> (its depth, the pass from which on it is decided anew)."""
        self._proposed: dict[Row, Guesses] = {}
        """Of each row the last ones to be verified: several passes may be under way."""

    # ---- for a pass ----

    def propose(self, rows: Sequence[Row], num_other_tokens: int) -> dict[Row, DraftTree]:
        """Guesses for rows that decode in the next pass, beside `num_other_tokens` of prompts and the like; those worth
        verifying."""
        measured = self._lengths == "measured"
        limits = {row: limit for row in rows if (limit := min(self._longest, row.num_left - 1)) > 0}
        if not limits or (measured and not self._trials.allows(len(rows))):
            return {}
        num_tokens = len(rows) + num_other_tokens
        context = sum(len(row.tokens) for row in rows) / len(rows)

        def seconds(size: float) -> float:
            return self.costs.seconds(size, context * size)

        proposed: dict[Row, Guesses] = {}
        for number, drafter in enumerate(self._drafters):
            candidates = self._candidates(drafter, limits, proposed)
            depth = self._longest
            if measured:
                others = sum(_total(proposed, row) for row in limits if row not in candidates)
                depth = self._depth(number, len(rows), len(candidates), num_tokens, others, seconds)
            if depth and candidates:
                self._ask(drafter, {row: min(depth, limits[row]) for row in candidates}, proposed)
        verified = self._worth_verifying(proposed, len(rows), num_tokens, seconds)
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
        self._acceptance.passes += 1
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
            if chunk.row.failure is not None:  # nothing is to be learned from it
                start += 1 + len(chunk.drafts)
                continue
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
                self._acceptance.forget(drafter.kinds)
        if not learned:
            return None
        return (self._clock() - started) * (1 / self._train_share - 1)

    # ---- as data ----

    def acceptance(self, kind: str) -> list[float]:
        """Measured probability that some guess is right if one was for the position before, as far as drafts went."""
        return self._acceptance.rates(kind)

    # ---- inside ----

    def _candidates(self, drafter: Drafter, limits: Mapping[Row, int], proposed: Mapping[Row, Guesses]) -> list[Row]:
        """Rows that a drafter is asked for: where each position costs time, those for which nothing better is found."""
        if not (drafter.by_position and proposed):
            return list(limits)
        means = self._acceptance.gains(drafter.kinds, self._longest)
        return [row for row, limit in limits.items() if _total(proposed, row) < sum(means[:limit])]

    def _ask(self, drafter: Drafter, limits: Mapping[Row, int], proposed: dict[Row, Guesses]) -> None:
        """Adds the drafter's guesses for these rows, of so many positions each at most, to those proposed."""
        started = self._clock()
        drafts = drafter.propose(list(limits), list(limits.values()))
        made = max((max(draft.tree.depths, default=-1) + 1 for draft in drafts if draft is not None), default=0)
        if made:
            self.drafting[drafter].observe(len(limits), made, self._clock() - started)
        for row, draft in zip(limits, drafts, strict=True):
            if draft is not None and len(draft.tree):
                guesses = self._weighed(draft)
                proposed[row] = self._joined(proposed[row], guesses) if row in proposed else guesses

    def _worth_verifying(
        self, proposed: Mapping[Row, Guesses], num_rows: int, num_tokens: int, seconds: Callable[[float], float]
    ) -> dict[Row, Guesses]:
        """Of the guesses those that are to be fed, in the order in which they are; rows without any left out."""
        chosen = [list(range(len(guesses.tree))) for guesses in proposed.values()]
        if self._lengths == "measured" and proposed:
            gains = [guesses.gains for guesses in proposed.values()]
            chosen = choose_guesses(num_rows, num_tokens, gains, seconds, _LEAST_GAIN)
            if not any(chosen):
                self._depths.clear()  # drafting them gained nothing: decide anew
        pairs = zip(proposed.items(), chosen, strict=True)
        return {row: guesses.only(some).as_fed() for (row, guesses), some in pairs if some}

    def _count(self, chunk: Chunk, kept: Sequence[int]) -> None:
        guesses, tree, counts = self._proposed[chunk.row], chunk.drafts, self.counts
        accepted = {draw - 1 for draw in kept[1:]}
        reached = {draw - 1 for draw in kept}
        if chunk.row.finished is not None:
            reached.discard(kept[-1] - 1)  # what lies behind the row's end says nothing
        for guess, depth in enumerate(tree.depths):
            kind = guesses.kinds[guess]
            counts.drafted[kind] += 1
            if guess in accepted:
                counts.accepted[kind] += 1
                counts.accepted_at[depth] += 1
        self._acceptance.observe(guesses, tree, accepted, reached)

    def _weighed(self, draft: Draft) -> Guesses:
        """The draft with its gains; its main chain only, where passes cannot branch."""
        tree, gains = draft.tree, list[float]()
        levels = draft.levels or (None,) * len(tree)
        for parent, depth, level in zip(tree.parents, tree.depths, levels, strict=True):
            rate = self._acceptance.rate(draft.kind, depth, level)
            gains.append((gains[parent] if parent >= 0 else 1.0) * rate)
        guesses = Guesses(tree, (draft.kind,) * len(tree), tuple(levels), tuple(gains))
        return guesses if self._branching else guesses.only(guesses.main_chain)

    def _joined(self, first: Guesses, second: Guesses) -> Guesses:
        """Of two drafters; the better ones, where passes cannot branch."""
        return joined(first, second) if self._branching else max(first, second, key=lambda guesses: guesses.total)

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
        if self._acceptance.passes < until:
            return depth
        drafter = self._drafters[number]
        depth = choose_depth(
            num_rows,
            num_drafted,
            self._acceptance.gains(drafter.kinds, self._longest),
            others,
            lambda drafted: seconds(num_tokens + drafted),
            lambda length: self.drafting[drafter].seconds(num_drafted, length),
            _LEAST_GAIN,
            max(map(self._acceptance.width, drafter.kinds)),
        )
        if depth and not drafter.by_position:
            depth = self._longest  # whole drafts cost the same: which of them are good is seen afterwards
        if len(self._depths) > 4096:
            self._depths.clear()
        self._depths[key] = (depth, self._acceptance.passes + _DECISION_PASSES)
        return depth


def _total(proposed: Mapping[Row, Guesses], row: Row) -> float:
    """Tokens that are expected of a row's guesses so far."""
    return proposed[row].total if row in proposed else 0.0


def check_speculation(config: SpeculationConfig) -> None:
    """Raises ValueError, with the key, for settings that cannot work."""
    for problem in speculation_problems(config):
        raise ValueError(f"{problem.key} is {problem.given}; {problem.need}")
