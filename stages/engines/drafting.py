"""Guesses of a row's next tokens, to be verified in one pass. Standard library and stages.engines only.

A draft is accepted up to the first token that differs from what the row gets anyway, so a drafter can make generation
faster or slower, but never change it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from stages.engines.rows import Row

_LENGTHS = (3, 2)
"""Tokens that must agree for a lookup; the longer match is tried first, being right more often."""
_MAX_PROMPTS = 4096
"""Prompts whose responses are remembered: those seen last."""
_RESPONSES = 2
"""Responses remembered of each."""


@dataclass(frozen=True)
class Draft:
    """A guess. `kind` says how it was found: acceptance is measured by kind and position."""

    tokens: tuple[int, ...]
    kind: str


class Drafter(Protocol):
    def propose(self, row: Row, longest: int) -> Draft | None:
        """Up to `longest` tokens to follow `row.tokens`; None if it has no idea."""
        ...

    def finish(self, row: Row) -> None:
        """The row is complete (or was given up): forget what was kept for it, learn from its response."""
        ...


@dataclass(eq=False)
class _Index:
    """Where each run of 2 or 3 tokens was seen last: in the row itself, or in earlier rows of its prompt."""

    sources: list[Sequence[int]]
    places: dict[tuple[int, ...], tuple[int, int]] = field(default_factory=dict)
    """Run -> (source, position of the token after it)."""
    done: int = 0
    """Tokens of the row that are indexed."""

    def add(self, source: int, start: int) -> None:
        tokens = self.sources[source]
        for end in range(max(start, 1), len(tokens)):
            for length in _LENGTHS:
                if end >= length:
                    self.places[tuple(tokens[end - length : end])] = (source, end)


class NgramDrafter:
    """Owns an index of every row in flight, and the last responses to each prompt.

    What followed the last two or three tokens where they stood before is likely to follow again: in the row itself
    (repeated structure), or in rows of earlier steps for the same prompt, since which the policy has moved little."""

    def __init__(self) -> None:
        self._indexes: dict[Row, _Index] = {}
        self._earlier: OrderedDict[tuple[int, ...], list[tuple[int, ...]]] = OrderedDict()

    def propose(self, row: Row, longest: int) -> Draft | None:
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
                kind = f"{'lookup' if source == own else 'earlier'}-{length}"
                return Draft(tuple(index.sources[source][start : start + longest]), kind)
        return None

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
