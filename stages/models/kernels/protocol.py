"""The functions that a block is made of beside its matrix products and its attention, and the choice of who computes
them. Suffixes: N tokens (of all rows of a micro-batch, one after another), H hidden, F features, D head dimension, P
positions.

May import torch and the standard library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryAngles:
    """Of the rotary embedding, for the tokens of a micro-batch."""

    cosines: Tensor
    """float32 [positions, head dimension / 2], as are the sines."""
    sines: Tensor
    positions: Tensor
    """int64 [tokens]: the position of each token within its row."""


@dataclass(frozen=True)
class HeadSizes:
    """How queries, keys and values lie in the output of `linear_qkv`: for each group of queries that share a key, the
    group's queries, its key and its value."""

    groups: int
    queries_per_group: int
    dim: int


class BlockKernels(Protocol):
    """Differentiable, but for `accumulate`. All give their answers in float32 precision, rounded once where the output
    is of a smaller dtype."""

    name: str

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """x / rms(x) * weight over the last axis of float32 x, in `dtype` (RMSNorm, Zhang & Sennrich 2019)."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up of [..., 2 F], the gate's features first (SwiGLU, Shazeer 2020)."""
        ...

    def split_heads(
        self, qkv_NF: Tensor, sizes: HeadSizes, angles: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [N, heads, D], keys and values [N, groups, D], in the dtype that attention takes (float32 on a CPU);
        queries and keys turned by `angles`, if any (RoPE, Su et al. 2021, in halves)."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """x + y in x's dtype."""
        ...

    def accumulate(self, total: Tensor, part: Tensor) -> None:
        """total += part, where part may be of a smaller dtype."""
        ...
