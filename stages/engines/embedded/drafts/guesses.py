"""Guesses for one row with the chance of each, and what is fed of them. May import the draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from stages.engines.embedded.draft_tree import DraftTree


@dataclass(frozen=True)
class Guesses:
    """Of any drafters."""

    tree: DraftTree
    kinds: tuple[str, ...]
    """Which drafter each is of."""
    levels: tuple[int | None, ...]
    """How sure that drafter is; see `Draft`."""
    gains: tuple[float, ...]
    """Probability that each guess, and all that it follows, are right: at most that of the one that it follows."""

    @property
    def total(self) -> float:
        """Tokens that are expected of them."""
        return sum(self.gains)

    @property
    def main_chain(self) -> list[int]:
        """From the row on, the likeliest of those that follow the last, always."""
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
        """The main chain first: its keys then are in place (see `draft_tree`)."""
        chain = self.main_chain
        return self.only([*chain, *(guess for guess in range(len(self.tree)) if guess not in chain)])


def joined(first: Guesses, second: Guesses) -> Guesses:
    """The guesses of both; of those that both have, what the more confident one says."""
    tokens, parents = list(first.tree.tokens), list(first.tree.parents)
    kinds, levels, gains = list(first.kinds), list(first.levels), list(first.gains)
    numbers = {pair: guess for guess, pair in enumerate(zip(parents, tokens, strict=True))}
    places = {-1: -1}
    """Of the second's guesses, here."""
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
