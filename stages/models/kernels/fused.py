"""Choose among the fused kernels that Megatron offers. All are for GPUs. SwiGLU ran on one, the other never.

SwiGLU              used: one kernel instead of three, and the backward pass keeps its input only.
                    torch.compile makes it with Triton, at the first call
weight gradients    used if Apex's extension is installed: the matrix product adds its result to
                    `main_grad`. This saves a tensor as large as the weight, and a pass over this tensor and `main_grad`
all others          not used: rotary embedding, softmax, cross entropy, norms, bias and dropout.
                    They belong to modules of Megatron for which this project has its own code
"""

from __future__ import annotations

import torch
from megatron.core.fusions.fused_bias_swiglu import bias_swiglu_impl
from megatron.core.tensor_parallel import layers
from torch import Tensor
from torch.utils._triton import has_triton

from stages.models.config import ModelConfig
from stages.models.kernels.blocks import BlockKernels, PortableKernels


class FusedBlockKernels(PortableKernels):
    """`PortableKernels` with Megatron's fused SwiGLU, which rounds once."""

    name = "fused"

    def gate(self, gate_up: Tensor) -> Tensor:
        fused: Tensor = bias_swiglu_impl(gate_up, None)
        return fused


def with_fusions(kernels: BlockKernels, model: ModelConfig, device: torch.device) -> BlockKernels:
    """Return `FusedBlockKernels` if the device is a GPU, torch has Triton, `model.kernels` is auto, and
    `model.deterministic` is off. (Nobody has checked that two compilations give the same bits.) Return `kernels`
    otherwise."""
    fuses = model.kernels == "auto" and device.type == "cuda" and not model.deterministic and has_triton()
    return FusedBlockKernels() if fuses else kernels


def adds_gradients(device: torch.device) -> bool:
    """Return True if the matrix product for a weight's gradient can add its result to `main_grad` directly. This needs
    a GPU and Apex's extension. Repeated calls with the same inputs give the same bits, with the extension or without
    it."""
    return device.type == "cuda" and bool(layers._grad_accum_fusion_available)
