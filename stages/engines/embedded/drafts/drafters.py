"""Guesses of a row's next tokens, to be verified in one pass: the protocol of drafters, and lookup.

A draft is accepted up to the first token that differs from what the row gets anyway, so a drafter can make generation
faster or slower, but never change it. May import numpy, torch and stages.engines.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float32

from stages.engines.embedded.draft_tree import DraftTree, chain
from stages.engines.embedded.rows import Row

_LENGTHS = (3, 2)
"""Tokens that must agree for a lookup; the longer match is tried first, being right more often."""
_MAX_PROMPTS = 4096
"""Prompts whose responses are remembered: those seen last."""
_RESPONSES = 2
"""Responses remembered of each."""


@dataclass(frozen=True)
class Draft:
    """Guesses. `kind` says how they were found: acceptance is measured by kind and depth."""

    tree: DraftTree
    kind: str
    levels: tuple[int, ...] = ()
    """How sure the drafter is of each guess, in any small number of classes: acceptance is measured for each of them.
    Empty: it cannot say."""


class Drafter(Protocol):
    """Used by the engine thread only, `refit` excepted."""

    kinds: tuple[str, ...]
    """Of all its drafts."""
    by_position: bool
    """Whether each further position of a draft costs as much time as the first."""
    wants_hidden: bool
    """Whether `observe` must be called."""
    generation: int
    """Rises when what it has learned comes into use."""

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        """For each row up to so many positions (at least 1) to follow `row.tokens`; None if it has no idea."""
        ...

    def observe(self, row: Row, hidden: Float32[np.ndarray, "kept C"]) -> None:
        """The model's hidden states from which the row's last tokens have been drawn."""
        ...

    def finish(self, row: Row) -> None:
        """The row is complete (or was given up): forget what was kept for it, learn from its response."""
        ...

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """New weights of the model are coming in. From any thread; keeps no view of the tensors."""
        ...

    def train(self) -> bool:
        """Learns for some tens of milliseconds, the engine being idle; False if there is nothing to learn."""
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
        """Looks at tokens only."""

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
        """What the old weights said is still a good guess."""

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
                # what has come round once is taken to come round again and again
                period = len(row.tokens) - start
                return Draft(chain([row.tokens[start + i % period] for i in range(longest)]), f"lookup-{length}")
        return None
