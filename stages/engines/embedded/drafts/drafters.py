"""Drafters guess a row's next tokens, which one pass verifies: the protocol, lookup of n-grams, and guesses with gains.

A draft is accepted up to its first token that differs from the token that the row would get without drafts. So a
drafter can make generation faster or slower, but never change its tokens.
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
"""Most prompts whose responses are kept. The prompts without a new response for the longest time are dropped first."""
_RESPONSES = 2
"""Responses kept per prompt."""


@dataclass(frozen=True)
class Draft:
    """Guesses for one row. `kind` says how they were found; acceptance is measured by kind and depth."""

    tree: DraftTree
    kind: str
    levels: tuple[int, ...] = ()
    """Confidence class of each guess; acceptance is measured per class. Empty if the drafter has no confidence."""


class Drafter(Protocol):
    """Maker of guesses. Used by the engine thread only, except `refit`."""

    kinds: tuple[str, ...]
    """Kinds of this drafter's drafts (`Draft.kind`)."""
    by_position: bool
    """True if each further position of a draft costs as much time as the first."""
    wants_hidden: bool
    """True if the drafter needs the hidden states that `observe` gives."""
    generation: int
    """Number that increases when the drafter begins to use what it has learned."""

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        """Return for each row a draft of up to `longest` positions (at least 1) after `row.tokens`, or None."""
        ...

    def observe(self, row: Row, hidden: Float32[np.ndarray, "kept C"]) -> None:
        """Receive the model's hidden states from which the row's last tokens were drawn."""
        ...

    def finish(self, row: Row) -> None:
        """Forget a row that is complete or was dropped, and learn from its response."""
        ...

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Receive the model's new weights, in any thread. Do not keep a view of the tensors."""
        ...

    def train(self) -> bool:
        """Learn for some tens of milliseconds while the engine is idle. Return False if there is nothing to learn."""
        ...


@dataclass(eq=False)
class _Index:
    """Positions where each run of 2 or 3 tokens was last seen: in the row itself or in earlier rows of its prompt."""

    sources: list[Sequence[int]]
    places: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    """Run -> (source, position of the token after it)."""
    done: int = 0
    """Number of the row's tokens that are indexed."""

    def add(self, source: int, start: int) -> None:
        tokens = self.sources[source]
        for end in range(max(start, 1), len(tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self.places[tuple(tokens[end - length : end])] = (source, end)


class NgramDrafter:
    """Owns an index of every row in flight, and the last responses to each prompt.

    The last two or three tokens of a row may have occurred before. Then the tokens that followed them are likely to
    follow again. The earlier place is in the row itself (repeated structure), or in rows of earlier steps for the same
    prompt, since the policy has moved little."""

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
    """A row's guesses, from one or several drafters, with their gains."""

    tree: DraftTree
    kinds: tuple[str, ...]
    """Kind of each guess."""
    levels: tuple[int | None, ...]
    """Confidence class of each guess; see `Draft`."""
    gains: tuple[float, ...]
    """Probability that each guess and all before it on its path are right; at most that of its parent."""

    @property
    def total(self) -> float:
        """Expected number of accepted tokens."""
        return sum(self.gains)

    @property
    def main_chain(self) -> list[int]:
        """The path that follows the likeliest guess at each position."""
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
        """See `DraftTree.only`."""
        return Guesses(
            self.tree.only(chosen),
            tuple(self.kinds[guess] for guess in chosen),
            tuple(self.levels[guess] for guess in chosen),
            tuple(self.gains[guess] for guess in chosen),
        )

    def as_fed(self) -> Guesses:
        """Put the main chain first, so that its keys are in place (see `rows`)."""
        chain = self.main_chain
        return self.only([*chain, *(guess for guess in range(len(self.tree)) if guess not in chain)])


def merge_guesses(first: Guesses, second: Guesses) -> Guesses:
    """Merge two sets of guesses. A guess in both keeps the kind, level and gain of the more confident one."""
    tokens, parents = list(first.tree.tokens), list(first.tree.parents)
    kinds, levels, gains = list(first.kinds), list(first.levels), list(first.gains)
    numbers = {pair: guess for guess, pair in enumerate(zip(parents, tokens, strict=True))}
    places = {-1: -1}
    """Index in the merged lists of each guess of `second`."""
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
