"""The operations of a transformer block besides matrix products and attention: their protocol `BlockKernels`, and their
implementations in plain torch. CUDA runs these, and so does a CPU without a C compiler. Tests use them as the reference
for those in C (`native.py`).

Shape suffixes: N tokens (of all rows of a micro-batch, one after another), H hidden size, F features, D head dimension,
P positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
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


# ---- plain torch ----------------------------------------------------------------------------------------


class ComposedKernels:
    """The plain torch implementation of `BlockKernels` for CPUs."""

    name = "torch"
    portable = False

    def norm(self, x: Tensor, weight_H: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
        return F.rms_norm(x, weight_H.shape, weight_H.to(x.dtype), eps).to(dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    def split_heads(
        self, qkv_NF: Tensor, sizes: HeadSizes, angles: RotaryAngles | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        num_tokens = len(qkv_NF)
        each_NGXD = qkv_NF.view(num_tokens, sizes.groups, sizes.queries_per_group + 2, sizes.dim)
        each_NGXD = each_NGXD if self.portable else each_NGXD.float()
        queries_NGXD, key_NGD, value_NGD = each_NGXD[:, :, :-2], each_NGXD[:, :, -2], each_NGXD[:, :, -1]
        query_NKD = queries_NGXD.reshape(num_tokens, -1, sizes.dim)
        if angles is not None:
            query_NKD, key_NGD = rotate(query_NKD, angles), rotate(key_NGD, angles)
        return query_NKD, key_NGD, value_NGD

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return x + y

    def accumulate(self, total: Tensor, part: Tensor) -> None:
        total += part


class PortableKernels(ComposedKernels):
    """The plain torch implementation of `BlockKernels` for any device."""

    name = "portable"
    portable = True


def rotate(x_NKD: Tensor, angles: RotaryAngles) -> Tensor:
    """Return heads [N, heads, D] rotated by the angles of their token's position. It computes in float32 and returns
    x's dtype."""
    cosine_N1D, sine_N1D = (table[angles.positions, None] for table in (angles.cosines, angles.sines))
    a, b = x_NKD.float().chunk(2, -1)
    turned = torch.cat([a * cosine_N1D - b * sine_N1D, b * cosine_N1D + a * sine_N1D], -1)
    return turned.to(x_NKD.dtype)
