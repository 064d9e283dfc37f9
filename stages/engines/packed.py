"""Linear layers for decoding: a weight in the layout its device multiplies fastest, and its product with a batch.

On a CPU that is oneDNN's blocked layout, made once. It also makes a row's result independent of the batch: the same
bits at every number of rows from 2 up and at every place in the batch, in float32 and bfloat16 (plain `F.linear` does
not keep that below 4 rows); one row alone is computed as two. Elsewhere the weight stays as it is.
May import torch.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float

_TYPICAL_ROWS = 32
"""Hint to oneDNN, which picks its blocking for about so many rows."""


def pack(weight: Float[torch.Tensor, "out in"]) -> torch.Tensor:
    """The weight as `linear` takes it. Copies on a CPU."""
    if weight.device.type == "cpu":
        return torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _TYPICAL_ROWS)
    return weight


def unpack(packed: torch.Tensor) -> Float[torch.Tensor, "out in"]:
    """The exact inverse of `pack`."""
    return packed.to_dense() if packed.is_mkldnn else packed


def linear(x: Float[torch.Tensor, "rows in"], packed: torch.Tensor) -> Float[torch.Tensor, "rows out"]:
    """x W^T; no bias, as in all of Llama."""
    if not packed.is_mkldnn:
        return F.linear(x, packed)
    if x.shape[0] == 1:
        return torch.ops.mkldnn._linear_pointwise(x.expand(2, -1).contiguous(), packed, None, "none", [], "")[:1]
    return torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")
