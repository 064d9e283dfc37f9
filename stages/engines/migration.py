"""A row on its way from one engine to another. `stages.engines.embedded.migration.MigratingEngine` sends and receives
rows; `Capabilities.migration` says which engines can.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Int32

from stages.engines.protocol import Request
from stages.engines.row_loads import RowKey


@dataclass(frozen=True, eq=False)
class MigratedRow:
    """Everything that another engine needs to continue a row."""

    ticket: int
    """The row's number in the engine that it left."""
    request: Request
    version: int
    """Version of the weights to continue with."""
    tokens: Int32[np.ndarray, " new"]
    """Sampled so far."""
    logprobs: Float32[np.ndarray, " new"]
    versions: Int32[np.ndarray, " new"]
    cache: Float32[np.ndarray, "layers 2 kv_heads positions dim"] | None
    """Keys and values of the first positions, in no engine's own layout; None: it is to be fed again."""

    @property
    def num_tokens(self) -> int:
        """Prompt and response."""
        return len(self.request.tokens) + len(self.tokens)


def key_of(request: Request) -> RowKey:
    """Return the row's key."""
    return request.seed, request.step, request.row
