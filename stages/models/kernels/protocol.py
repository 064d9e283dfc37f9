"""The protocol of a transformer block's operations besides matrix products and attention.

Shape suffixes: N tokens (of all rows of a micro-batch, one after another), H hidden size, F features, D head dimension,
P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class RotaryAngles:
    """The rotary embedding's angles for the tokens of a micro-batch."""

    cosines: Tensor
    """float32 [positions, head dimension / 2], like the sines."""
    sines: Tensor
    positions: Tensor
    """int64 [tokens]: the position of each token within its row."""


@dataclass(frozen=True)
class HeadSizes:
    """The layout of `linear_qkv`'s output: for each group of queries that share a key, the group's queries, its key and
    its value."""

    groups: int
    queries_per_group: int
    dim: int


class BlockKernels(Protocol):
    """The operations. All but `accumulate` are differentiable. All compute in float32 precision and round once if the
    output has a smaller dtype."""

    name: str
    portable: bool
    """True: the model takes Megatron's own linears and embedding, and attention gets the blocks' dtype. False: it takes
    the linears and the embedding for CPUs, and attention gets float32."""

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        """Return x / rms(x) * weight over the last axis of float32 x, in `dtype` (RMSNorm, Zhang & Sennrich 2019)."""
        ...

    def gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of [..., 2 F], with the gate's features first (SwiGLU, Shazeer 2020)."""
        ...

    def split_heads(
        self, qkv_NF: Tensor, sizes: HeadSizes, angles: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries [N, heads, D], keys and values [N, groups, D], in the dtype that attention takes: see
        `portable`. Queries and keys are rotated by `angles`, if any (RoPE, Su et al. 2021, pairs half a head
        apart)."""
        ...

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        """Return x + y in x's dtype."""
        ...

    def accumulate(self, total: Tensor, part: Tensor) -> None:
        """Add `part`, which may have a smaller dtype, to `total`."""
        ...
