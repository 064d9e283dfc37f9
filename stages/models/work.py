"""Count an update's floating-point operations, and compare their rate with the hardware's peak.

The count is what the mathematics needs. Recomputed activations, padding and frozen blocks (whose outputs are kept) do
not count. So recomputation lowers the utilisation instead of raising the rate.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import numpy as np
import torch

from stages.models.numerics import Products, multiply
from stages.models.spec import ModelSpec, layer_shapes

_MEASURED = {"cpu": 768, "cuda": 8192}
"""Rows, inputs and outputs of the measured product: some ten milliseconds on a core, two on a large GPU."""
_REPEATS = 4


@dataclass(frozen=True)
class UpdateWork:
    """One update of a model, over all ranks of its gang."""

    tokens: int
    """Tokens of prompts and responses, counted each time they went through the model."""
    flops: float
    seconds: float
    peak_flops: float
    """Peak operations per second of all ranks together."""

    def metrics(self) -> dict[str, float]:
        """Return tokens_per_s, tflops_per_s, peak_tflops and mfu, the model FLOPs utilisation (Chowdhery et al. 2022,
        appendix B): tflops_per_s / peak_tflops."""
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "tflops_per_s": self.flops / self.seconds / 1e12,
            "peak_tflops": self.peak_flops / 1e12,
            "mfu": self.flops / self.seconds / self.peak_flops,
        }


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
        6 B q sum n^2    attention of B blocks with queries of width q over rows of n tokens; on average a token sees
                         half of them: 2 q n^2 forward, for scores and values, and twice that backward
        6 h o M          an output layer of width o at M tokens; 4 h o M if it is not trained

    Args:
        blocks: number of trained blocks; the frozen ones below are computed once per row, elsewhere.
        outputs: o, the vocabulary size, or 1 for a critic's head.
        num_outputs: M, the number of tokens at which the output layer is computed.
        adapters: LoRA's weights per block; None: the matrices themselves are trained.
    """
    n = lengths.astype(np.float64)
    numbers = matrix_numbers(spec)
    products = (6 * numbers if adapters is None else 4 * numbers + 6 * adapters) * blocks * n.sum()
    attention = 6 * blocks * spec.q_size * (n**2).sum()
    return float(products + attention + (6 if output_trained else 4) * spec.hidden_size * outputs * num_outputs)


def measured_peak(dtype: torch.dtype, device: torch.device, products: Products = Products.TORCH) -> float:
    """Return the operations per second of a large product in this process, with its threads: the best of several. It
    estimates the hardware's peak; other load on the machine makes it too low."""
    size = _MEASURED[device.type]
    generator = torch.Generator(device).manual_seed(0)  # the process's own generator belongs to the run
    a, b = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    best = math.inf
    for _ in range(1 + _REPEATS):  # the first is a warm-up
        synchronise(device)
        started = time.perf_counter()
        multiply(a, b, products)
        synchronise(device)
        best = min(best, time.perf_counter() - started)
    return 2 * size**3 / best


def synchronise(device: torch.device) -> None:
    """Wait until a GPU has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
