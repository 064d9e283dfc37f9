"""The protocol through which the engine uses speculative decoding: guesses of next tokens, which the next batch
verifies.

The engine also runs without it. `drafts.speculation.Speculation` implements the protocol.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from jaxtyping import Float32

from stages.engines.embedded.rows import DraftTree, Row
from stages.engines.embedded.scheduler import Chunk


@dataclass
class DraftCounts:
    """Counts for `EngineStats` since the last call of `stats`."""

    drafted: Counter[str] = field(default_factory=Counter)
    """Kind of guess -> number of guesses that were verified."""
    accepted: Counter[str] = field(default_factory=Counter)
    """Kind of guess -> number of guesses that were accepted."""
    lengths: Counter[int] = field(default_factory=Counter)
    """Number of guesses that a row had in a batch -> how often this number occurred."""
    accepted_at: Counter[int] = field(default_factory=Counter)
    """Number of right guesses at each depth in the tree of guesses. A guess of the row's next token has depth 0."""


class Drafts(Protocol):
    """Speculative decoding: proposes guesses of the next tokens, and learns from the tokens that were kept. All methods
    must be called by the engine's thread, except `refit`, which any thread may call."""

    wants_hidden: bool
    """True if `observe` needs the hidden states from which tokens are drawn."""
    counts: DraftCounts
    """Counts since the last call of the engine's `stats`. That method puts a new object here, under the engine's
    lock."""

    def propose(self, rows: Sequence[Row], num_other_tokens: int) -> Mapping[Row, DraftTree]:
        """Return the guesses for `rows`, which decode in the next batch. Rows without guesses are left out.
        `num_other_tokens`: number of tokens that the batch feeds besides the last token of each of these rows."""
        ...

    def observe(
        self,
        chunks: Sequence[Chunk],
        kept: Sequence[Sequence[int]],
        hidden: Float32[np.ndarray, "M C"] | None,
        seconds: float | None,
        drafting_s: float = 0.0,
    ) -> None:
        """Record a batch.

        Args:
            chunks: the chunks of the batch that sample (`Chunk.samples`).
            kept: for each chunk, the indices of the draws that became tokens (see `batch.keep`).
            hidden: the hidden state from which each of the M draws was made; None if `wants_hidden` is False.
            seconds: the batch's duration without `propose`; None if prompts were fed.
            drafting_s: the duration of `propose`.
        """
        ...

    def finish(self, row: Row) -> None:
        """Forget a row that is complete, was dropped, or has moved to another engine."""
        ...

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Receive the model's new weights. Any thread may call this. Do not keep a view of the tensors."""
        ...

    def train(self) -> float | None:
        """Train the drafters for some tens of milliseconds while the engine is idle. Return the seconds until the next
        call, or None if there is nothing to learn."""
        ...
