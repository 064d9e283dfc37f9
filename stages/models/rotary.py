"""Frequencies of the rotary embedding, the same numbers for the trainer and the engines.

May import torch and stages.models.spec.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float32

from stages.models.spec import ModelSpec


def rotary_frequencies(spec: ModelSpec) -> Float32[torch.Tensor, " D//2"]:
    """Radians per token of each pair of a head's numbers, on the CPU: with d = head_dim, for i = 0 .. d/2 - 1

        f_i = theta^(-2i / d)                                                       (Su et al. 2021)

    and under `rope_scaling` (Llama 3.1), with L the positions of the original training, lo and hi its factors,

        s_i = clip((L f_i / 2 pi - lo) / (hi - lo), 0, 1)            f'_i = f_i (s_i + (1 - s_i) / factor)
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    waves = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)
