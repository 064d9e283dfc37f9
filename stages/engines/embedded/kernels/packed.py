"""Weights in the layout their device multiplies fastest. Here: as plain torch has it; `gemm.c` has a layout of its own.

On a CPU torch's is oneDNN's blocked layout, made once. It also makes a row's result independent of the batch: the same
bits at every number of rows from 2 up and at every place in the batch, in float32 and bfloat16 (plain `F.linear` does
not keep that below 4 rows); one row alone is computed as two. Elsewhere the weight stays as it is.
May import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float

_TYPICAL_ROWS = 32
"""Hint to oneDNN, which picks its blocking for about so many rows."""


@dataclass(frozen=True, eq=False)
class NativeWeight:
    """A weight [out, in] as gemm.c packs it. Never written after it was made."""

    tiles: torch.Tensor
    """Its memory: bytes on the CPU."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    handle: int
    """Address of the same as a record of C; `record` keeps it."""
    record: object


Packed = torch.Tensor | NativeWeight


class NotFiniteError(ValueError):
    """The part of a weight from row `start` on holds NaN or infinity, once it is in the weight's dtype."""

    def __init__(self, start: int) -> None:
        super().__init__(f"the part from row {start} on holds NaN or infinity")
        self.start = start


def pack(
    parts: Mapping[int, Float[torch.Tensor, "rows in"]], dtype: torch.dtype, old: torch.Tensor | None, wide: bool
) -> torch.Tensor:
    """See `Kernels.pack`. Never the parts' own memory."""
    for start, part in parts.items():
        if not all_finite(part.to(dtype)):
            raise NotFiniteError(start)
    if old is None:
        dense = torch.cat([parts[start].to(dtype) for start in sorted(parts)])
    else:
        dense = old.to_dense() if old.is_mkldnn else old.clone()
        for start, part in parts.items():
            dense[start : start + len(part)] = part.to(dtype)
    if wide and not dense.is_cuda:
        dense = dense.float()
    return torch.ops.mkldnn._reorder_linear_weight(dense, _TYPICAL_ROWS) if dense.device.type == "cpu" else dense


def unpack(packed: torch.Tensor) -> Float[torch.Tensor, "out in"]:
    """The exact inverse of `pack`."""
    return packed.to_dense() if packed.is_mkldnn else packed


def linear(
    x: Float[torch.Tensor, "rows in"], packed: torch.Tensor, dtype: torch.dtype
) -> Float[torch.Tensor, "rows out"]:
    """x W^T as `dtype`: the packed weight's, but on CUDA also a wider one, that of its sums; no bias, as in all of
    Llama."""
    x = x.to(packed.dtype)
    if packed.dtype != dtype:
        assert packed.is_cuda, "packed for products of another dtype"
        return torch.mm(x, packed.t(), out_dtype=dtype)
    if not packed.is_mkldnn:
        return F.linear(x, packed)
    if x.shape[0] == 1:
        return torch.ops.mkldnn._linear_pointwise(x.expand(2, -1).contiguous(), packed, None, "none", [], "")[:1]
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")


def all_finite(tensor: torch.Tensor) -> bool:
    """NaN and infinity survive every sum: a finite one proves the rest at a tenth of the cost of looking at each."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())
