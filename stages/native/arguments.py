"""What is given to kernels in C is looked at before its address is passed on: C would read and write whatever lies
there. May import torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = {torch.float32: 0, torch.bfloat16: 1}
"""numbers.h: FLOAT32, BFLOAT16."""
_FLOAT32 = (torch.float32,)


def kind_of(dtype: torch.dtype) -> int:
    """Its number in C. Raises ValueError for one that C does not know."""
    kind = KINDS.get(dtype)
    if kind is None:
        raise ValueError(f"native kernels compute in float32 and bfloat16, not in {dtype}")
    return kind


def expect(name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype] = _FLOAT32) -> None:
    """Raises ValueError, naming the tensor, unless it is contiguous, on the CPU, of this shape and one of `dtypes`."""
    if (
        tensor.dtype in dtypes
        and tensor.shape == tuple(shape)
        and tensor.is_contiguous()
        and tensor.device.type == "cpu"
    ):
        return
    given = f"{list(tensor.shape)} {tensor.dtype}{'' if tensor.is_contiguous() else ', not contiguous'}"
    wanted = f"{list(shape)} {' or '.join(map(str, dtypes))}, contiguous, on cpu"
    raise ValueError(f"native kernels: {name} is {given} on {tensor.device}; wanted: {wanted}")


def require(holds: bool, what: str) -> None:
    """Raises ValueError, saying what does not hold, unless it does."""
    if not holds:
        raise ValueError(f"native kernels: {what}")
