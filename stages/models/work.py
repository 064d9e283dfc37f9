"""What an update computes, in floating-point operations, and how much of what the hardware can do that is.

Counted is what the mathematics needs, not what is done: activations that are computed again and padding count nothing,
and neither do frozen blocks, whose outputs are kept. So a layout that recomputes has a lower share, not a higher rate.

May import numpy, torch, stages.models (products and spec) and the standard library.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from stages.models.products import Products, multiply
from stages.models.spec import ModelSpec, layer_shapes

_MEASURED = {"cpu": 768, "cuda": 8192}
"""Rows, inputs and outputs of the product that is measured: some ten milliseconds on a core, two on a large GPU."""
_REPEATS = 4


@dataclass(frozen=True)
class UpdateWork:
    """One update of a model, over all ranks of its gang."""

    tokens: int
    """Of prompts and responses, as often as they went through the model."""
    flops: float
    seconds: float
    peak_flops: float
    """Per second, of all ranks together."""

    def metrics(self) -> dict[str, float]:
        """tokens_per_s; tflops_per_s; mfu, model FLOPs utilisation (Chowdhery et al. 2022, appendix B): the share of
        `peak_tflops`."""
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "tflops_per_s": self.flops / self.seconds / 1e12,
            "peak_tflops": self.peak_flops / 1e12,
            "mfu": self.flops / self.seconds / self.peak_flops,
        }


def matrix_numbers(spec: ModelSpec) -> int:
    """In the matrices of one block."""
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
    """Operations of a forward and a backward pass through the trained blocks, for rows of these lengths.

        6 P N            P numbers in the matrices of the blocks, N tokens: a product forward, two backward, and a
                         multiplication and an addition for each number; with adapters of A numbers in a block, which
                         alone are trained, (4 P + 6 A) N
        6 B q sum n^2    attention of B blocks with queries of width q over rows of n tokens, of which a token sees
                         half: 2 q n^2 forward, for scores and values, and twice that backward
        6 h o M          an output layer of width o after M tokens; 4 h o M where it is not trained

    Args:
        blocks: those that are trained; frozen ones below them are computed once per row, elsewhere.
        outputs: o, the vocabulary, or 1 for a critic's head.
        num_outputs: M, tokens after which the output layer is computed.
        adapters: A, of LoRA; None: the matrices themselves are trained.
    """
    n = lengths.astype(np.float64)
    numbers = matrix_numbers(spec)
    products = (6 * numbers if adapters is None else 4 * numbers + 6 * adapters) * blocks * n.sum()
    attention = 6 * blocks * spec.q_size * (n**2).sum()
    return float(products + attention + (6 if output_trained else 4) * spec.hidden_size * outputs * num_outputs)


def measured_peak(dtype: torch.dtype, device: torch.device, products: Products = Products.TORCH) -> float:
    """Operations per second of a large product in this process, with its threads: the best of several. It stands for
    what the hardware can do; other load on it makes it too low."""
    size = _MEASURED[device.type]
    generator = torch.Generator(device).manual_seed(0)  # of its own: the process's random numbers are a run's
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(1 + _REPEATS):  # the first one prepares
        synchronise(device)
        started = time.perf_counter()
        multiply(a, b, products)
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def synchronise(device: torch.device) -> None:
    """Waits for what a GPU was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
