"""Megatron's parallel linears and embedding on a CPU: products by the library that was chosen, and gradients of weights
added to where Megatron collects them.

Megatron's own make the gradient of a weight as a tensor of the weight's dtype, which a hook then adds to the
parameter's float32 `main_grad`: three passes over memory as large as the model for every micro-batch. Here the
product adds to `main_grad` itself (in bfloat16, whose products torch rounds to bfloat16, one pass more). On CUDA
Megatron's are kept.
Suffixes: N rows, K inputs, M outputs.

May import torch, megatron.core, stages.models.products and stages.models.kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from torch import Tensor

from stages.models.kernels.protocol import BlockKernels
from stages.models.products import Products, input_gradient, multiply, weight_gradient


class CpuColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear. Under sequence parallelism it keeps the whole gathered input for the backward
    pass, where Megatron's gathers it again."""

    def __init__(self, *args: Any, products: Products, kernels: BlockKernels, **options: Any) -> None:
        super().__init__(*args, **options)
        self.products, self.kernels = products, kernels

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(input, group=options["tp_group"])
        elif options["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=options["tp_group"])
        return _with_bias(cpu_linear(input, weight, self.products, self.kernels), options["bias"])


class CpuRowLinear(RowParallelLinear):
    """Megatron's row-parallel linear."""

    def __init__(self, *args: Any, products: Products, kernels: BlockKernels, **options: Any) -> None:
        super().__init__(*args, **options)
        self.products, self.kernels = products, kernels

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return _with_bias(cpu_linear(input, weight, self.products, self.kernels), options["bias"])


class CpuEmbedding(VocabParallelEmbedding):
    """Megatron's vocabulary-parallel embedding, whose gradient is added to the rows of `main_grad` that were read:
    torch's is a tensor as large as the vocabulary."""

    def forward(self, tokens: Tensor) -> Tensor:
        inside = (tokens >= self.vocab_start_index) & (tokens < self.vocab_end_index)
        rows = torch.where(inside, tokens - self.vocab_start_index, 0)
        embedded = _Embedding.apply(self.weight, rows, inside)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(embedded.transpose(0, 1).contiguous())
        return reduce_from_tensor_model_parallel_region(embedded)


class _Embedding(torch.autograd.Function):
    """Rows of the weight, zero where they are another rank's."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, rows: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(rows, inside)
        ctx.shape, ctx.dtype, ctx.main_grad = weight_VH.shape, weight_VH.dtype, getattr(weight_VH, "main_grad", None)
        return weight_VH[rows] * inside[..., None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        rows, inside = ctx.saved_tensors
        total_VH = ctx.main_grad if ctx.main_grad is not None else torch.zeros(ctx.shape)
        # one after another, in the order of the tokens: the same bits every time
        total_VH.index_add_(0, rows[inside], grad[inside].float())
        return (total_VH.to(ctx.dtype) if ctx.main_grad is None else None), None, None


def cpu_linear(x_NK: Tensor, weight_MK: Tensor, products: Products, kernels: BlockKernels) -> Tensor:
    """x @ weight.T, where x may have more axes before its last; differentiable."""
    product: Tensor = _Linear.apply(x_NK, weight_MK, products, kernels)
    return product


class _Linear(torch.autograd.Function):
    """x @ weight.T; the gradient of a weight with a `main_grad` is added there and not returned. The input is kept for
    that gradient alone."""

    @staticmethod
    def forward(ctx: Any, x_NK: Tensor, weight_MK: Tensor, products: Products, kernels: BlockKernels) -> Tensor:
        ctx.save_for_backward(x_NK if ctx.needs_input_grad[1] else None, weight_MK)
        ctx.products, ctx.kernels, ctx.main_grad = products, kernels, getattr(weight_MK, "main_grad", None)
        return multiply(x_NK, weight_MK, products)

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_MK = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        weight_grad_MK = None
        if needs_weight and ctx.main_grad is None:
            weight_grad_MK = weight_gradient(grad_NM, x_NK, ctx.products)
        elif needs_weight:
            add_weight_gradient(ctx.main_grad, grad_NM, x_NK, ctx.products, ctx.kernels)
        return input_gradient(grad_NM, weight_MK, ctx.products) if needs_x else None, weight_grad_MK, None, None


def add_weight_gradient(
    total_MK: Tensor, grad_NM: Tensor, x_NK: Tensor, products: Products, kernels: BlockKernels
) -> None:
    """total += grad.T @ x, all rows of either flattened to one axis; total is float32."""
    if grad_NM.dtype == torch.float32 and products is Products.TORCH:
        total_MK.addmm_(grad_NM.flatten(0, -2).T, x_NK.flatten(0, -2))
    else:
        kernels.accumulate(total_MK, weight_gradient(grad_NM, x_NK, products))


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias
