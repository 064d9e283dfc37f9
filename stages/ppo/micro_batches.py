"""How the rows of a step are cut: epochs, minibatches (one optimizer step each), micro-batches (one forward each).

Only `minibatches` changes what is learnt; the rest of this file changes speed (see `stages.ppo.masks`).

May import numpy, jaxtyping and the standard library.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def minibatches(num_rows: int, minibatches: int, epochs: int, seed: int, step: int) -> list[list[np.ndarray]]:
    """Row indices [num_rows / minibatches] of each minibatch of each epoch; every epoch holds each row once.

    Each epoch reshuffles. A pure function of its arguments: (seed, step, epoch) keys the permutation, so that a replay
    trains on the same minibatches.

    Raises:
        ValueError: the rows do not divide into the minibatches.
    """
    if num_rows % minibatches:
        raise ValueError(f"{num_rows} rows do not divide into {minibatches} minibatches of equal size")
    return [
        np.split(np.random.default_rng([seed, step, epoch]).permutation(num_rows), minibatches)
        for epoch in range(epochs)
    ]


def micro_batches(
    rows: Int[np.ndarray, " rows"], micro_batch_rows: int, lengths: Int[np.ndarray, " rows"] | None = None
) -> list[np.ndarray]:
    """Cuts a minibatch's row indices into pieces of at most `micro_batch_rows`.

    With `lengths` (of these rows, in their order) rows of like length go together, longest first: less padding, and the
    largest need of memory comes first.
    """
    if lengths is not None:
        rows = rows[np.argsort(-lengths, kind="stable")]
    return [rows[start : start + micro_batch_rows] for start in range(0, len(rows), micro_batch_rows)]
