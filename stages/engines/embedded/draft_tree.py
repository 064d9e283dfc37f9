"""Guesses of what follows a row, as a tree. Standard library only.

    row ... the ─┬─ film ─┬─ is ── a        tokens   film  is  a  was  movie
                 │        └─ was            parents   -1    0  1   0    -1
                 └─ movie                   depths     0    1  2   1     0

All of them are fed in one batch, each behind its own path of ancestors; at most one of those with the same parent is
right. The keys of guess j are written j positions behind the row. Those of the main chain (film is a) so lie where the
row's own tokens will; a right guess beside it is fed again in the next batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class DraftTree:
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Of each guess the one that it follows, an earlier one, by index; -1: the row."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> list[int]:
        """How many guesses lie before each."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def is_chain(self) -> bool:
        """Whether nothing branches off."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def path_to(self, guess: int) -> list[int]:
        """The guesses from the row on to this one, which is the last."""
        path = [guess]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]

    def after(self, guess: int, token: int) -> int | None:
        """The guess that this token follows `guess` (-1: the row); None if it is not among them."""
        for other, (each, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent == guess and each == token:
                return other
        return None

    def first(self, num: int) -> DraftTree:
        """Of the guesses only the first so many."""
        return DraftTree(self.tokens[:num], self.parents[:num])

    def only(self, chosen: Sequence[int]) -> DraftTree:
        """Some of the guesses, in the order given, in which parents come before those that follow them."""
        places = {guess: place for place, guess in enumerate(chosen)} | {-1: -1}
        return DraftTree(
            tuple(self.tokens[guess] for guess in chosen), tuple(places[self.parents[guess]] for guess in chosen)
        )


def chain(tokens: Sequence[int]) -> DraftTree:
    """The tree that does not branch."""
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


NO_GUESSES = DraftTree()
