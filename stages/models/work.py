"""Measure the rate of an update's floating-point operations (`flops`), and compare it with the hardware's peak."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from stages.models.numerics import Products, multiply

_MEASURED = {"cpu": 768, "cuda": 8192}
"""Device -> number of rows of the two square matrices whose product is timed. The product takes about 10 ms on a CPU
core and 2 ms on a large GPU."""
_REPEATS = 4


@dataclass(frozen=True)
class UpdateWork:
    """The work and the time of one update of a model, over all ranks of its gang."""

    tokens: int
    """Tokens of prompts and responses, counted each time they went through the model."""
    flops: float
    seconds: float
    peak_flops: float
    """Peak operations per second of all ranks together."""

    def metrics(self) -> dict[str, float]:
        """Return tokens_per_s, tflops_per_s, peak_tflops and mfu. mfu is the model FLOPs utilisation, tflops_per_s /
        peak_tflops (Chowdhery et al. 2022, appendix B)."""
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "tflops_per_s": self.flops / self.seconds / 1e12,
            "peak_tflops": self.peak_flops / 1e12,
            "mfu": self.flops / self.seconds / self.peak_flops,
        }


def measured_peak(dtype: torch.dtype, device: torch.device, products: Products = Products.TORCH) -> float:
    """Return the operations per second of a large product with this process's threads: the best of several runs. The
    result estimates the hardware's peak. The estimate is too low if the machine has other load."""
    size = _MEASURED[device.type]
    generator = torch.Generator(device).manual_seed(0)  # a new one, since the run uses the process's generator
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
