"""Who computes what lies between the products: the C kernels where they run, plain torch elsewhere.

The last bits of a run depend on it, so that a gang's rank 0 decides for all of its ranks.

May import torch, stages.native and this folder.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
import torch.distributed as dist

from stages.models.kernels.composed import ComposedKernels
from stages.models.kernels.native import load_block_kernels
from stages.models.kernels.protocol import BlockKernels
from stages.native.compile import NoNativeKernelsError

LOG = logging.getLogger("stageline.kernels")

NATIVE_DTYPES = (torch.float32, torch.bfloat16)


def choose_kernels(asked: Literal["auto", "torch", "native"], dtype: torch.dtype, device: torch.device) -> BlockKernels:
    """The gang's kernels; blocks until every rank has come. Raises ValueError, naming the key, for `native` where they
    do not run, and NoNativeKernelsError where the machine of rank 0, or under `native` any, cannot build them."""
    fits = device.type == "cpu" and dtype in NATIVE_DTYPES
    if asked == "native" and not fits:
        raise ValueError(f"model.kernels = native needs float32 or bfloat16 on a CPU; here {dtype}, {device}")
    wanted = [asked != "torch" and fits]
    if wanted[0] and dist.get_rank() == 0:
        try:
            load_block_kernels()
        except NoNativeKernelsError as error:
            if asked == "native":
                raise
            LOG.warning("blocks are computed by plain torch, about twice as slow: %s", error)
            wanted = [False]
    dist.broadcast_object_list(wanted)
    return load_block_kernels() if wanted[0] else ComposedKernels()
