"""What stands beside the loop and is reached from it through a small interface; the loop runs without any of it.

    Drafts           guesses that are verified in the next batch; `drafts.speculation.Speculation` makes them
    EngineObserver   sees batches and rows go by; `migration.migrating_engine.MigratingEngine`, whose rows may leave

Ranks come in through a third, `runner.Runner`. May import numpy, torch (for types); of stages.engines.embedded rows,
draft_tree and scheduler.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float32

from stages.engines.embedded.draft_tree import DraftTree
from stages.engines.embedded.rows import Row
from stages.engines.embedded.scheduler import Chunk


@dataclass
class DraftCounts:
    """For `EngineStats`: since they were last taken."""

    drafted: Counter[str] = field(default_factory=Counter)
    """Guesses verified, by kind."""
    accepted: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    """How often a decoding row had so many guesses in a batch."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Right guesses by how many were before them."""


class Drafts(Protocol):
    """Used by the engine thread only, `refit` excepted."""

    wants_hidden: bool
    """Whether `observe` needs the hidden states behind the draws."""
    counts: DraftCounts
    """Whoever reads them puts new ones in their place, under the engine's lock."""

    def propose(self, rows: Sequence[Row], num_other_tokens: int) -> Mapping[Row, DraftTree]:
        """Guesses for rows that decode in the next batch, which feeds `num_other_tokens` more."""
        ...

    def observe(
        self,
        chunks: Sequence[Chunk],
        kept: Sequence[Sequence[int]],
        hidden: Float32[np.ndarray, "M C"] | None,
        seconds: float | None,
        drafting_s: float = 0.0,
    ) -> None:
        """What became of a batch: of each chunk that sampled the draws that it kept (`batch.keep`), the hidden states
        behind all draws, and how long it took (None: prompts were fed in it) after `drafting_s` in `propose`."""
        ...

    def finish(self, row: Row) -> None:
        """The row is complete, was given up or has left."""
        ...

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """New weights of the model are coming in. From any thread; keeps no view of the tensors."""
        ...

    def train(self) -> float | None:
        """Learns for some tens of milliseconds, the engine being idle; seconds until it may again, None if there is
        nothing to learn."""
        ...


class EngineObserver(Protocol):
    """Whoever watches an engine. What it raises stops the engine."""

    def observe(self, chunks: Sequence[Chunk], seconds: float) -> None:
        """A batch has ended. Under the engine's lock."""
        ...

    def wants_report(self, num_rows: int) -> bool:
        """Whether `report` is to be called although nothing is to be computed; `num_rows`: accepted and unfinished.
        Under the engine's lock."""
        ...

    def report(self, rows: Collection[Row]) -> None:
        """All rows here, before each batch, and when it `wants_report`. In the engine thread, without the lock."""
        ...

    def stopped(self) -> None:
        """The engine has: nothing comes of any row any more. Under the engine's lock."""
        ...
