"""BlockKernels in plain torch: what CUDA runs, what a CPU without a C compiler runs, and the reference in tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from stages.models.kernels.protocol import HeadSizes, RotaryAngles


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
