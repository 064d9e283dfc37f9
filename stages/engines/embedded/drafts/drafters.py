"""Drafters guess a row's next tokens, which one pass verifies. This module has their protocol, the lookup of n-grams,
and `Guesses`, which adds to each guess its probability of being accepted.

A draft is accepted up to its first wrong token. A token is right if the row would get the same token without drafts. So
a drafter can make generation faster or slower, but never change the tokens.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float32

from stages.engines.embedded.rows import DraftTree, Row, chain

_LENGTHS = (3, 2)
"""Lengths of the n-grams to look up; the longer match is tried first, since it is right more often."""
_MAX_PROMPTS = 4096
"""Maximum number of prompts whose responses are kept. The prompt whose last response is oldest is dropped first."""
_RESPONSES = 2
"""Number of latest responses that are kept per prompt."""


@dataclass(frozen=True)
class Draft:
    """A drafter's guesses for one row. `kind` names the way in which the guesses were found. Acceptance is measured for
    each kind and depth."""

    tree: DraftTree
    kind: str
    levels: tuple[int, ...] = ()
    """Confidence class of each guess; acceptance is measured per class. Empty if the drafter does not estimate its
    confidence."""


class Drafter(Protocol):
    """Source of drafts, which guess the next tokens of rows. Only the engine thread uses it, but any thread may call
    `refit`."""

    kinds: tuple[str, ...]
    """Kinds of this drafter's drafts (`Draft.kind`)."""
    by_position: bool
    """True if drafting takes a time in proportion to the number of positions."""
    wants_hidden: bool
    """True if `observe` must get the model's hidden states."""
    generation: int
    """Number of the trained version that makes the drafts. The number increases when a newly trained version comes into
    use."""

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        """Return for each row a draft of the tokens after `row.tokens`, or None if there is none. `longest`: maximum
        number of positions per row, at least 1."""
        ...

    def observe(self, row: Row, hidden: Float32[np.ndarray, "kept C"]) -> None:
        """Receive the model's hidden states from which the row's last tokens were drawn."""
        ...

    def finish(self, row: Row) -> None:
        """Forget a row that is complete, was dropped, or has moved to another engine. A drafter may learn from the
        response of a complete row."""
        ...

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Receive the model's new weights. Any thread may call this. Do not keep a view of the tensors."""
        ...

    def train(self) -> bool:
        """Train for some tens of milliseconds while the engine is idle. Return False if there is nothing to learn."""
        ...


@dataclass(eq=False)
class _Index:
    """Index of runs of 2 or 3 tokens in the row itself and in earlier rows of the same prompt. For each run of tokens
    the index holds the position after the latest occurrence."""

    sources: list[Sequence[int]]
    places: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    """Run of tokens -> (index in `sources`, position of the token that followed the run)."""
    done: int = 0
    """Number of the row's own tokens that are indexed so far."""

    def add(self, source: int, start: int) -> None:
        tokens = self.sources[source]
        for end in range(max(start, 1), len(tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self.places[tuple(tokens[end - length : end])] = (source, end)


class NgramDrafter:
    """Owns an index of every row in flight, and the latest responses to each prompt.

    If the last two or three tokens of a row have occurred before, the tokens that followed them are likely to follow
    again. The drafter searches the row itself, since text repeats, and responses to the same prompt from earlier steps,
    since the policy changes little from step to step."""

    kinds: tuple[str, ...] = tuple(f"{where}-{length}" for where in ("lookup", "earlier") for length in _LENGTHS)
    by_position = False
    wants_hidden = False
    generation = 0

    def __init__(self) -> None:
        self._indexes: dict[Row, _Index] = {}
        self._earlier: OrderedDict[tuple[int, ...], list[tuple[int, ...]]] = OrderedDict()

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        return [self._look_up(row, length) for row, length in zip(rows, longest, strict=True)]

    def observe(self, row: Row, hidden: Float32[np.ndarray, "kept C"]) -> None:
        """Do nothing: lookup uses tokens only."""

    def finish(self, row: Row) -> None:
        self._indexes.pop(row, None)
        if row.finished is None:
            return
        responses = self._earlier.setdefault(row.request.tokens, [])
        responses.append(tuple(row.tokens))
        del responses[:-_RESPONSES]
        self._earlier.move_to_end(row.request.tokens)
        while len(self._earlier) > _MAX_PROMPTS:
            self._earlier.popitem(last=False)

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: responses of the old weights are still good guesses."""

    def train(self) -> bool:
        return False

    def _look_up(self, row: Row, longest: int) -> Draft | None:
        index = self._indexes.get(row)
        if index is None:
            index = _Index([*self._earlier.get(row.request.tokens, ()), row.tokens])
            for source in range(len(index.sources) - 1):
                index.add(source, 0)
            self._indexes[row] = index
        own = len(index.sources) - 1
        index.add(own, index.done)
        index.done = len(row.tokens)
        for length in _LENGTHS:
            place = index.places.get(tuple(row.tokens[-length:]))
            if place is not None and len(row.tokens) >= length:
                source, start = place
                if source != own:
                    return Draft(chain(index.sources[source][start : start + longest]), f"earlier-{length}")
                # assume that the text between the two places repeats again and again
                period = len(row.tokens) - start
                return Draft(chain([row.tokens[start + i % period] for i in range(longest)]), f"lookup-{length}")
        return None


# ---- guesses ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Guesses:
    """A row's guesses, from one or several drafters, with the probability that each is accepted."""

    tree: DraftTree
    kinds: tuple[str, ...]
    """For each guess, the way in which it was found (`Draft.kind`), for example `learned` or `lookup-3`."""
    levels: tuple[int | None, ...]
    """Confidence class of each guess; see `Draft`."""
    gains: tuple[float, ...]
    """Probability that each guess and all guesses before it on its path are right. The gain of a guess is at most the
    gain of its parent."""

    @property
    def total(self) -> float:
        """Expected number of accepted tokens."""
        return sum(self.gains)

    @property
    def main_chain(self) -> list[int]:
        """Indices of the guesses on the path that begins at the row and takes the likeliest guess at each step."""
        best: dict[int, int] = {}
        for guess, parent in enumerate(self.tree.parents):
            if parent not in best or self.gains[guess] > self.gains[best[parent]]:
                best[parent] = guess
        chain, last = list[int](), -1
        while (following := best.get(last)) is not None:
            chain.append(following)
            last = following
        return chain

    def only(self, chosen: Sequence[int]) -> Guesses:
        """Return the chosen guesses, in the order and with the parents that `DraftTree.only` gives them."""
        return Guesses(
            self.tree.only(chosen),
            tuple(self.kinds[guess] for guess in chosen),
            tuple(self.levels[guess] for guess in chosen),
            tuple(self.gains[guess] for guess in chosen),
        )

    def as_fed(self) -> Guesses:
        """Return the same guesses in the order in which they are fed. The main chain comes first: the path that takes
        the likeliest guess at each step.

        The cache stores keys in the order of feeding. So the keys of the main chain lie where the keys of the row's
        next tokens belong. If these guesses are right, their keys need not be computed again.
        """
        chain = self.main_chain
        return self.only([*chain, *(guess for guess in range(len(self.tree)) if guess not in chain)])


def merge_guesses(first: Guesses, second: Guesses) -> Guesses:
    """Merge two trees of guesses. If a guess is in both trees, the merged tree takes its kind, class and gain from the
    tree with the higher gain."""
    tokens, parents = list(first.tree.tokens), list(first.tree.parents)
    kinds, levels, gains = list(first.kinds), list(first.levels), list(first.gains)
    numbers = {pair: guess for guess, pair in enumerate(zip(parents, tokens, strict=True))}
    places = {-1: -1}
    """Index in `second` -> index of the same guess in the merged lists."""
    for guess, (token, parent) in enumerate(zip(second.tree.tokens, second.tree.parents, strict=True)):
        kind, level, gain = second.kinds[guess], second.levels[guess], second.gains[guess]
        place = places[guess] = numbers.setdefault((places[parent], token), len(tokens))
        if place == len(tokens):
            tokens.append(token)
            parents.append(places[parent])
            kinds.append(kind)
            levels.append(level)
            gains.append(gain)
        elif gain > gains[place]:
            kinds[place], levels[place], gains[place] = kind, level, gain
    return Guesses(DraftTree(tuple(tokens), tuple(parents)), tuple(kinds), tuple(levels), tuple(gains))
