"""Choose the guesses that the next pass verifies, so that the expected tokens per second are highest.

    rows that decode ──► drafters ──► trees of guesses ──► one tree per row ──► choose_guesses
                            ▲             │
                            │             └ each guess has a gain (see below)
                            └ choose_depth: sets the length of drafts
    pass ──► its seconds (costs), the right guesses (acceptance), its hidden states (drafters)

The gain is the probability that the guess and all guesses before it are right. It is measured for each kind, depth and
confidence class of guesses. The function `choose_depth` chooses the draft length that gives the most tokens per second
on average, with the time of drafting included. If this length is 0, the drafter is not asked.

The best choice may be no guesses, which is plain decoding. This happens with large batches, because the time of a large
pass grows in proportion to its tokens. A draft length is chosen once for several passes, so the choice costs almost
nothing. The class `Trials` overrules the cost model: if passes with drafts turn out not to be faster, drafts pause for
a while. The class `Acceptance` counts how often guesses were right.

The clock is a parameter. `Acceptance` measures time in passes.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float32

from stages.engines.embedded.drafts.costs import DraftingCosts, PassCosts, Trials, choose_depth, choose_guesses
from stages.engines.embedded.drafts.drafters import Draft, Drafter, Guesses, merge_guesses
from stages.engines.embedded.extensions import DraftCounts
from stages.engines.embedded.rows import DraftTree, Row
from stages.engines.embedded.scheduler import Chunk

_MIN_GAIN = 1.05
"""Minimum predicted speed-up. Drafts that promise less are not verified, since the estimates are not more precise than
this."""
_MIN_DRAFTING_SHARE = 0.02
"""If drafting takes more than this share of a pass, the pass counts as a pass with drafts, even if no draft was worth
verifying."""
_DECISION_PASSES = 16
"""Number of passes for which a chosen draft length is reused while the numbers of rows and tokens stay the same."""


class Speculation:
    """Owns the drafters, and the measurements of passes, drafting and acceptance."""

    def __init__(
        self,
        drafters: Sequence[Drafter],
        costs: PassCosts,
        longest: int,
        lengths: Literal["measured", "longest"],
        clock: Callable[[], float],
        train_share: Callable[[bool], float],
        *,
        branching: bool = True,
    ) -> None:
        """Begin with the measured costs of passes, but without measurements of the drafters.

        Args:
            drafters: sources of drafts. Drafters whose time grows with the draft length (`Drafter.by_position`) must
                come last. Such a drafter is not asked for a row that has equally good drafts from other drafters.
            costs: measured seconds of passes.
            longest: maximum number of positions in a draft.
            lengths: way to choose draft lengths; see `calibration.LENGTHS`.
            clock: function that returns the time in seconds.
            train_share: function that returns the maximum share of the engine's idle time that drafters may spend on
                training. It is called with True when training begins, and with False when training ends.
            branching: True if a pass can verify several guesses for one position.
        """
        self.costs = costs
        self.counts = DraftCounts()
        self.wants_hidden = any(drafter.wants_hidden for drafter in drafters)
        smallest = min(costs.curve.values())
        self.drafting = {drafter: DraftingCosts(drafter.by_position, smallest) for drafter in drafters}
        self._drafters, self._longest, self._lengths = drafters, longest, lengths
        self._clock, self._train_share, self._branching = clock, train_share, branching
        self._acceptance, self._trials = Acceptance(), Trials()
        self._depths: dict[tuple[int, int, int], tuple[int, int]] = {}
        """(index of the drafter, rows to draft for, tokens of the pass without drafts) -> (draft length, number of the
        pass at which to choose again)."""
        self._proposed: dict[Row, Guesses] = {}
        """Row -> its guesses that the latest pass of the row verifies. Several passes may be under way, but each has
        other rows."""

    # ---- per pass ----

    def propose(self, rows: Sequence[Row], num_other_tokens: int) -> dict[Row, DraftTree]:
        """Return the guesses that are worth verifying, by row (see `Drafts.propose`)."""
        measured = self._lengths == "measured"
        if measured and not self._trials.allows(len(rows)):
            return {}
        limits = {row: limit for row in rows if (limit := min(self._longest, row.num_left - 1)) > 0}
        if not limits:
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
                self._request_drafts(drafter, {row: min(depth, limits[row]) for row in candidates}, proposed)
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
        """Record a pass (see `Drafts.observe`). `seconds` is None if the pass fed prompts. The tokens of prompts cost
        less, because nothing is sampled after them. They would distort the measured cost of a token."""
        self._acceptance.passes += 1
        if seconds is not None and self._lengths == "measured":
            sizes = [chunk.count + len(chunk.drafts) for chunk in chunks]
            context = sum(chunk.start * size for chunk, size in zip(chunks, sizes, strict=True))
            self.costs.observe(sum(sizes), seconds, context)
            slow_drafting = drafting_s > _MIN_DRAFTING_SHARE * seconds
            drafted = slow_drafting or any(len(chunk.drafts) for chunk in chunks)
            total_s = seconds + drafting_s if drafted else seconds
            self._trials.observe(len(chunks), sum(map(len, kept)), total_s, drafted=drafted)
        start = 0
        for chunk, draws in zip(chunks, kept, strict=True):
            if chunk.row.failure is not None:  # nothing to learn from a failed row
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
        """Pass the model's new weights to the drafters. Any thread may call this."""
        for drafter in self._drafters:
            drafter.refit(tensors)

    def train(self) -> float | None:
        """Let the drafters train for some tens of milliseconds. Return the seconds to wait before the next call, or
        None if there is nothing to learn. The wait is so long that training takes at most its share (`train_share`) of
        the time of training and wait together."""
        self._train_share(True)
        started = self._clock()
        learned = False
        for drafter in self._drafters:
            generation = drafter.generation
            learned = drafter.train() or learned
            if drafter.generation != generation:
                self._acceptance.forget(drafter.kinds)
        if not learned:
            return None
        return (self._clock() - started) * (1 / self._train_share(False) - 1)

    # ---- reports ----

    def acceptance(self, kind: str) -> list[float]:
        """Return the acceptance rate of a kind of guess at each depth: the measured probability that at least one guess
        at this depth is right if the parent of the guesses is right."""
        return self._acceptance.rates(kind)

    # ---- steps of a pass ----

    def _candidates(self, drafter: Drafter, limits: Mapping[Row, int], proposed: Mapping[Row, Guesses]) -> list[Row]:
        """Return the rows of `limits` for which a drafter is asked. A drafter whose time grows with the draft length is
        not asked if the row's other drafts (`proposed`) are expected to give at least as many tokens."""
        if not (drafter.by_position and proposed):
            return list(limits)
        means = self._acceptance.gains(drafter.kinds, self._longest)
        return [row for row, limit in limits.items() if _total(proposed, row) < sum(means[:limit])]

    def _request_drafts(self, drafter: Drafter, limits: Mapping[Row, int], proposed: dict[Row, Guesses]) -> None:
        """Ask a drafter for guesses and add them to `proposed`. `limits`: maximum number of positions for each row."""
        started = self._clock()
        drafts = drafter.propose(list(limits), list(limits.values()))
        made = max((max(draft.tree.depths, default=-1) + 1 for draft in drafts if draft is not None), default=0)
        if made:
            self.drafting[drafter].observe(len(limits), made, self._clock() - started)
        for row, draft in zip(limits, drafts, strict=True):
            if draft is not None and len(draft.tree):
                guesses = self._with_gains(draft)
                proposed[row] = self._merge(proposed[row], guesses) if row in proposed else guesses

    def _worth_verifying(
        self, proposed: Mapping[Row, Guesses], num_rows: int, num_tokens: int, seconds: Callable[[float], float]
    ) -> dict[Row, Guesses]:
        """Return row -> the row's guesses that are worth verifying. The guesses are in the order in which they are fed.
        Rows without guesses worth verifying are left out."""
        chosen = [list(range(len(guesses.tree))) for guesses in proposed.values()]
        if self._lengths == "measured" and proposed:
            gains = [guesses.gains for guesses in proposed.values()]
            chosen = choose_guesses(num_rows, num_tokens, gains, seconds, _MIN_GAIN)
            if not any(chosen):
                self._depths.clear()  # these drafts gained nothing: decide again
        pairs = zip(proposed.items(), chosen, strict=True)
        return {row: guesses.only(some).as_fed() for (row, guesses), some in pairs if some}

    def _count(self, chunk: Chunk, kept: Sequence[int]) -> None:
        guesses, tree, counts = self._proposed[chunk.row], chunk.drafts, self.counts
        accepted = {draw - 1 for draw in kept[1:]}
        reached = {draw - 1 for draw in kept}
        if chunk.row.finished is not None:
            reached.discard(kept[-1] - 1)  # guesses after the row's end are not tested
        for guess, depth in enumerate(tree.depths):
            kind = guesses.kinds[guess]
            counts.drafted[kind] += 1
            if guess in accepted:
                counts.accepted[kind] += 1
                counts.accepted_at[depth] += 1
        self._acceptance.observe(guesses, tree, accepted, reached)

    def _with_gains(self, draft: Draft) -> Guesses:
        """Return the guesses of a draft with the probability that each is accepted. If the engine cannot verify a tree
        of guesses in one pass, keep only the chain of the likeliest guesses."""
        tree, gains = draft.tree, list[float]()
        levels = draft.levels or (None,) * len(tree)
        for parent, depth, level in zip(tree.parents, tree.depths, levels, strict=True):
            rate = self._acceptance.rate(draft.kind, depth, level)
            gains.append((gains[parent] if parent >= 0 else 1.0) * rate)
        guesses = Guesses(tree, (draft.kind,) * len(tree), tuple(levels), tuple(gains))
        return guesses if self._branching else guesses.only(guesses.main_chain)

    def _merge(self, first: Guesses, second: Guesses) -> Guesses:
        """Merge the guesses of two drafters, or choose the more promising ones if the engine verifies no trees."""
        return (
            merge_guesses(first, second) if self._branching else max(first, second, key=lambda guesses: guesses.total)
        )

    def _depth(
        self,
        number: int,
        num_rows: int,
        num_drafted: int,
        num_tokens: int,
        others: float,
        seconds: Callable[[float], float],
    ) -> int:
        """Return how many tokens each draft of drafter `number` should have; 0 if no length is expected to gain enough.
        A result is reused for `_DECISION_PASSES` passes.

        Args:
            num_rows: number of rows that decode.
            num_drafted: number of rows that get drafts from this drafter.
            num_tokens: number of tokens that the pass feeds in addition to guesses.
            others: expected number of tokens that rows gain from the guesses of other drafters.
            seconds: number of tokens of a pass -> its seconds.
        """
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
            _MIN_GAIN,
            max(map(self._acceptance.width, drafter.kinds)),
        )
        if depth and not drafter.by_position:
            depth = self._longest  # a draft of any length costs the same; the good guesses are chosen later
        if len(self._depths) > 4096:
            self._depths.clear()
        self._depths[key] = (depth, self._acceptance.passes + _DECISION_PASSES)
        return depth


def _total(proposed: Mapping[Row, Guesses], row: Row) -> float:
    """Return the expected number of accepted tokens among a row's guesses so far."""
    return proposed[row].total if row in proposed else 0.0


# ---- acceptance ------------------------------------------------------------------------------------------

_PRIOR_ACCEPTED, _PRIOR_TRIED = 2.0, 3.0
"""Numbers that are added to the counts of accepted and of tried guesses. So a kind of guess (`Draft.kind`) without any
measurement has the rate 2/3. This is optimistic, so that every kind is tried."""
_DECAY = 0.999
"""Factor by which all counts are multiplied per pass. Since the counts shrink, a kind of guess that is no longer used
is tried again after some hundreds of passes."""
_DECAY_AFTER_LEARNING = 0.5
"""Factor by which a drafter's counts are multiplied when a newly trained version of the drafter comes into use."""
_WIDTH_RATE = 0.05


@dataclass
class _Tally:
    accepted: float = 0.0
    tried: float = 0.0
    seen: int = 0
    """Number of the pass at which the counts were last updated."""

    def age(self, now: int) -> None:
        factor = _DECAY ** (now - self.seen)
        self.accepted *= factor
        self.tried *= factor
        self.seen = now

    def rate(self, now: int) -> float:
        factor = _DECAY ** (now - self.seen)
        return (factor * self.accepted + _PRIOR_ACCEPTED) / (factor * self.tried + _PRIOR_TRIED)


class Acceptance:
    """Counts of tried and accepted guesses, which decay from pass to pass."""

    def __init__(self) -> None:
        self.passes = 0
        """Number of passes so far. The owner of this object increments it."""
        self._tallies: dict[tuple[str, int, int | None], _Tally] = {}
        """(kind, depth, confidence class) -> tally. The tally of class None counts how often at least one of a row's
        guesses of this kind and depth was right."""
        self._widths: dict[str, float] = {}
        """Kind -> mean number of guesses verified per position."""

    def observe(
        self, guesses: Guesses, verified: DraftTree, accepted: Collection[int], reached: Collection[int]
    ) -> None:
        """Record which guesses of a row were right. A guess is right if it equals the token that was drawn after its
        parent. Only guesses whose parent is in `reached` were tested, and only they are counted.

        Args:
            guesses: the guesses that were chosen for the pass.
            verified: the tree of the guesses that were fed: all of `guesses`, or only the first of them.
            accepted: indices of the guesses that were right.
            reached: indices of the parents after which a valid token was drawn. The index -1 stands for the row's own
                last token, which is the parent of the first guesses.
        """
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
        """Reduce the counts of these kinds, because a newly trained version of their drafter has come into use."""
        for (kind, _, _), tally in self._tallies.items():
            if kind in kinds:
                tally.age(self.passes)
                tally.tried, tally.accepted = (
                    tally.tried * _DECAY_AFTER_LEARNING,
                    tally.accepted * _DECAY_AFTER_LEARNING,
                )

    def rate(self, kind: str, depth: int, level: int | None) -> float:
        """Return the probability that a guess of this kind, depth and confidence class (`level`) is right if its parent
        is right. If `level` is None, return the probability that at least one of a row's guesses at that depth is
        right, if the parent of one of them is right."""
        tally = self._tallies.get((kind, depth, level))
        return tally.rate(self.passes) if tally else _PRIOR_ACCEPTED / _PRIOR_TRIED

    def rates(self, kind: str) -> list[float]:
        """Return one rate for each depth at which guesses of this kind were tested: the probability that one of a
        row's guesses is right if its parent is right."""
        rates: list[float] = []
        while (kind, len(rates), None) in self._tallies:
            rates.append(self.rate(kind, len(rates), None))
        return rates

    def gains(self, kinds: Sequence[str], longest: int) -> list[float]:
        """Return, for each position of a draft, the probability that the draft is right up to this position. A position
        is right if one of its guesses is right, of any confidence class.

        `kinds`: kinds of drafts (`Draft.kind`), which say how the guesses were found. The probabilities are those of
        one kind: the kind that is expected to give the most tokens. `longest`: number of positions.
        """
        each = [
            list(itertools.accumulate((self.rate(kind, depth, None) for depth in range(longest)), operator.mul))
            for kind in kinds
        ]
        return max(each, key=sum)

    def width(self, kind: str) -> float:
        """Return the mean number of guesses of a kind (`Draft.kind`) that are verified for one position of a draft. It
        is above 1 if drafts branch."""
        return self._widths.get(kind, 1.0)

    def _tally(self, kind: str, depth: int, level: int | None, *, accepted: bool) -> None:
        tally = self._tallies.setdefault((kind, depth, level), _Tally())
        tally.age(self.passes)
        tally.tried += 1
        tally.accepted += accepted
