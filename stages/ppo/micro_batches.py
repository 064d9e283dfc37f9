"""Divide the rows of a step into batches.

Each epoch divides the rows anew into minibatches. Each minibatch is one optimizer step. The data-parallel ranks share
the rows of a minibatch. Each rank divides its rows into micro-batches. Each micro-batch is one forward pass.

Only `minibatch_rows` changes the result. The rest of this file changes the speed (see `stages.ppo.masks`).
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Int


def minibatch_rows(num_rows: int, minibatches: int, epochs: int, seed: int, step: int) -> list[list[np.ndarray]]:
    """Return the row indices of each minibatch of each epoch: one list per epoch, with one array of num_rows /
    minibatches indices per minibatch. Every epoch has each row once.

    Each epoch shuffles the rows anew. The permutation depends only on (seed, step, epoch), so that a replay trains on
    the same minibatches.

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
    rows: Int[np.ndarray, " rows"],
    lengths: Int[np.ndarray, " rows"],
    *,
    max_tokens: int,
    max_rows: int | None = None,
) -> list[np.ndarray]:
    """Divide row indices into micro-batches with similar numbers of tokens.

    Each micro-batch has at most `max_tokens` tokens and at most `max_rows` rows. A row of more than `max_tokens` tokens
    is in a micro-batch of its own. The other rows are divided by `split_balanced`, into the smallest number of
    micro-batches that keeps both limits. Within a micro-batch the longest row comes first. The micro-batch with the
    most tokens comes first, so that the first forward pass needs the most memory.

    Args:
        rows: row indices.
        lengths: number of tokens of each row in `rows`.
        max_tokens: maximum number of tokens of a micro-batch with several rows.
        max_rows: maximum number of rows of a micro-batch, or None for no limit."""
    alone, others = np.flatnonzero(lengths > max_tokens), np.flatnonzero(lengths <= max_tokens)
    parts = [*alone[:, None], *(others[part] for part in _split_within(lengths[others], max_tokens, max_rows))]
    return [rows[part] for part in sorted(parts, key=lambda part: -int(lengths[part].sum()))]


def _split_within(lengths: np.ndarray, max_tokens: int, max_rows: int | None) -> list[np.ndarray]:
    """Call `split_balanced` with more and more parts until no part exceeds `max_tokens` or `max_rows`, and return these
    parts. No row may be longer than `max_tokens`."""
    fewest = max(-(-int(lengths.sum()) // max_tokens), -(-len(lengths) // (max_rows or max(1, len(lengths)))))
    for pieces in range(fewest, len(lengths)):
        parts = split_balanced(lengths, pieces)
        if all(lengths[part].sum() <= max_tokens and len(part) <= (max_rows or len(part)) for part in parts):
            return parts
    return split_balanced(lengths, len(lengths))


def split_balanced(lengths: Int[np.ndarray, " rows"], parts: int) -> list[np.ndarray]:
    """Divide the indices of `lengths` into `parts` parts whose sums of lengths are nearly equal. If there are fewer
    rows than parts, some parts are empty.

    Rows are assigned from the longest to the shortest. Each row goes to the part with the smallest sum so far, and
    among equal sums to the part with the fewest rows. This is Graham's LPT rule (1969): the largest sum is at most 4/3
    of the best possible one. So each part has its longest row first, and rows of one length keep their order."""
    sums = np.zeros(parts, np.int64)
    held: list[list[int]] = [[] for _ in range(parts)]
    for index in np.argsort(-lengths, kind="stable"):
        least = min(range(parts), key=lambda part: (sums[part], len(held[part]), part))
        sums[least] += lengths[index]
        held[least].append(int(index))
    return [np.array(part, dtype=np.int64) for part in held]
