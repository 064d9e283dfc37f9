"""Count the floating-point operations that a model's mathematics needs: forward passes, and updates.

Recomputed activations, padding and frozen blocks (whose outputs are kept) do not count in an update. So recomputation
makes an update slower, but adds no operations to the count, and the measured utilisation falls. Loads no torch, since
the planning of a run uses these functions too.
"""

from __future__ import annotations

import math
from functools import cache

import numpy as np

from stages.models.spec import ModelSpec, layer_shapes


@cache
def matrix_numbers(spec: ModelSpec) -> int:
    """Return the number of weights in the matrices of one block."""
    return sum(math.prod(shape) for shape in layer_shapes(spec).values() if len(shape) > 1)


def update_flops(
    spec: ModelSpec,
    blocks: int,
    lengths: np.ndarray,
    *,
    outputs: int,
    num_outputs: int,
    output_trained: bool,
    adapters: int | None = None,
) -> float:
    """Return the operations of a forward and a backward pass through the trained blocks, for rows of these lengths.

        6 P N            P weights in the matrices of the blocks, N tokens: one product forward, two backward, each
                         with a multiplication and an addition per weight. If only adapters are trained, with A weights
                         in the blocks: (4 P + 6 A) N
        6 B q sum n^2    attention of B blocks with queries of width q over rows of n tokens. On average a token attends
                         to half of its row: scores and values take 2 q n^2 forward, and twice as much backward
        6 h o M          an output layer of width o at M tokens; 4 h o M if it is not trained

    Args:
        blocks: number of trained blocks. The frozen blocks are not counted.
        outputs: o, the vocabulary size, or 1 for a critic's head.
        num_outputs: M, the number of tokens at which the output layer is computed.
        adapters: LoRA's weights per block; None: the matrices themselves are trained.
    """
    n = lengths.astype(np.float64)
    numbers = matrix_numbers(spec)
    products = (6 * numbers if adapters is None else 4 * numbers + 6 * adapters) * blocks * n.sum()
    attention = 6 * blocks * spec.q_size * (n**2).sum()
    return float(products + attention + (6 if output_trained else 4) * spec.hidden_size * outputs * num_outputs)


def forward_flops(
    spec: ModelSpec, blocks: int, tokens: float, squares: float, *, outputs: int, num_outputs: float
) -> float:
    """Return the operations of a forward pass through `blocks` blocks, and through an output layer of width `outputs`
    at `num_outputs` tokens. This is a third of `update_flops` without adapters and with a trained output layer.

    Args:
        tokens: number of tokens of all rows together.
        squares: the sum of the rows' squared lengths.
    """
    products = 2.0 * matrix_numbers(spec) * blocks * tokens
    return products + 2.0 * blocks * spec.q_size * squares + 2.0 * spec.hidden_size * outputs * num_outputs
