"""Replacements of Megatron's own modules in its transformer layer, and the layer's specification. The rotary
frequencies, which trainer and engines share, and the packing of rows are here too.

Shape suffixes of modules: N tokens of all rows, one after another; B rows of one length, T tokens of each; K heads, G
groups of them that share keys and values, D head dimension, H hidden size, F features.

With kernels for CPUs the parallel linears and the embedding are replaced too. Megatron's linears compute a weight's
gradient as a tensor of the weight's dtype, and a hook adds it to the parameter's `main_grad`. That takes three passes
over memory as large as the model for every micro-batch. Here the product adds to `main_grad` directly. (bfloat16 takes
one more pass, since torch rounds bfloat16 products to bfloat16.) Shape suffixes of linears: N rows, K inputs, M
outputs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float32
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
)
from megatron.core.tensor_parallel.mappings import (
    all_gather_last_dim_from_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as BlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention.varlen import varlen_attn

from stages.models.kernels.blocks import BlockKernels, HeadSizes, RotaryAngles, rotate
from stages.models.numerics import Products, add_product, input_gradient, multiply, weight_gradient
from stages.models.spec import ModelSpec

_SHARES_KEYS = "enable_gqa" in inspect.signature(varlen_attn).parameters
"""True if query heads can share keys in torch's attention for rows of different lengths. Older versions of torch need a
key for every query head."""
_AddToResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm that reads the float32 residual stream and returns its result in the dtype of the linear layers. It can
    run on a sequence-parallel shard, which Megatron's torch norm refuses."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, kernels: BlockKernels, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.epsilon = eps
        self.kernels = kernels
        # each rank has only a part of the sequence, so finalize_model_grads adds up the marked gradients over TP. (It
        # finds q_layernorm and k_layernorm, whose input is only the rank's heads, by their names.)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self.weight, self.epsilon, self.weight.dtype)


class UnroundedRMSNorm(RMSNorm):
    """RMSNorm that keeps its input's dtype. It is used before the output layer or the head, which multiply in float32,
    and for queries and keys."""

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self.weight, self.epsilon, x.dtype)


class Gate(torch.nn.Module):
    """The activation module of Megatron's MLP. It gets gate and up together and computes silu(gate) * up."""

    def __init__(self, config: TransformerConfig, *, kernels: BlockKernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, gate_up_N1F: Tensor) -> Tensor:
        return self.kernels.gate(gate_up_N1F)


class PackedAttention(SelfAttention):
    """Megatron's self-attention over packed rows. One kernel splits the heads. It also applies the rotary embedding,
    unless queries and keys are normed first."""

    def __init__(self, *args: Any, kernels: BlockKernels, **options: Any) -> None:
        super().__init__(*args, **options)
        self.kernels = kernels

    def forward(
        self,
        hidden_N1H: Tensor,
        *_: Any,
        rotary_pos_emb: Tensor,
        packed_seq_params: Packing,
        **__: Any,
    ) -> tuple[Tensor, Tensor | None]:
        qkv_N1F, _ = self.linear_qkv(hidden_N1H)
        angles, dtype = packed_seq_params.angles(rotary_pos_emb), qkv_N1F.dtype
        normed = not isinstance(self.q_layernorm, IdentityOp)
        groups = self.num_query_groups_per_partition
        sizes = HeadSizes(groups, self.num_attention_heads_per_partition // groups, self.hidden_size_per_attention_head)
        sharing = max(1, self.world_size // self.config.num_query_groups)
        if sharing > 1:  # the ranks of one group split its queries, and each has its key and value
            tensor_rank = get_tensor_model_parallel_rank()
            qkv_N1F = all_gather_last_dim_from_tensor_parallel_region(qkv_N1F)
            qkv_N1F = qkv_N1F.chunk(self.config.num_query_groups, -1)[tensor_rank // sharing]
        query, key, value = self.kernels.split_heads(qkv_N1F[:, 0], sizes, None if normed else angles)
        if sharing > 1:
            query = query.chunk(sharing, 1)[tensor_rank % sharing].contiguous()
        if normed:
            query, key = (rotate(norm(x), angles) for norm, x in ((self.q_layernorm, query), (self.k_layernorm, key)))

        def attend(query_NKD: Tensor, key_NGD: Tensor, value_NGD: Tensor) -> Tensor:
            return self.core_attention(query_NKD, key_NGD, value_NGD, packed_seq_params)

        if self.checkpoint_core_attention:
            context_NF = tensor_parallel.checkpoint(attend, False, query, key, value)
        else:
            context_NF = attend(query, key, value)
        return self.linear_proj(context_NF.to(dtype)[:, None])


class CausalAttention(MegatronModule):
    """Causal attention by torch's fused kernels, with grouped queries. No mask is needed, since no token is padding.

    On a GPU one call computes all rows if three conditions hold: the heads are 16-bit, torch lets query heads share
    keys (`_SHARES_KEYS`), and the run need not be deterministic. (The backward pass of this call adds numbers up in an
    order that varies.) Otherwise there is one call for each group of adjacent rows of the same length."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query_NKD: Tensor, key_NGD: Tensor, value_NGD: Tensor, packing: Packing) -> Tensor:
        """Return the output of the attention, [N, K * D]."""
        if _SHARES_KEYS and not (self.config.deterministic_mode or query_NKD.is_cpu or query_NKD.dtype.itemsize > 2):
            starts, longest = packing.cu_seqlens_q, packing.max_seqlen_q
            options: Any = {"window_size": (-1, 0), "scale": self.scale, "enable_gqa": True}  # causal, without a window
            attended = varlen_attn(query_NKD, key_NGD, value_NGD, starts, starts, longest, longest, **options)
            assert isinstance(attended, Tensor)  # it returns more only if asked to
            return attended.flatten(1)
        parts = []
        for start, rows, length in packing.runs:
            q_BKTD, k_BGTD, v_BGTD = (
                x[start : start + rows * length].unflatten(0, (rows, length)).transpose(1, 2)
                for x in (query_NKD, key_NGD, value_NGD)
            )
            out_BKTD = F.scaled_dot_product_attention(
                q_BKTD, k_BGTD, v_BGTD, is_causal=True, scale=self.scale, enable_gqa=True
            )
            parts.append(out_BKTD.transpose(1, 2).flatten(0, 1).flatten(1))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


class HiddenOutput(torch.nn.Module):
    """Replacement of GPTModel's output layer. It returns the hidden states of the whole sequence, so that `forward.py`
    can select the few positions that it needs before the product with the vocabulary.

    The parameters depend on the model:

    - Critic: `weight` [1, H] and `bias` [1] are the head.
    - Output layer with memory of its own: `weight` is [vocab / TP, H], and `bias` is None. This includes a tied output
      layer whose embedding is on another pipeline stage.
    - Output layer that is the embedding of this rank: `weight` and `bias` are None.
    """

    def __init__(self, *, sequence_parallel: bool, weight: Parameter | None, bias: Parameter | None = None) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.weight = weight
        self.bias = bias

    def forward(self, hidden_N1H: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            # every TP rank computes the same loss from the whole sequence, so each already has the full gradient
            hidden_N1H = gather_from_sequence_parallel_region(hidden_N1H, tensor_parallel_output_grad=False)
        return hidden_N1H, None


def residual_add(kernels: BlockKernels) -> Callable[[bool, bool], _AddToResidual]:
    """Return the replacement of Megatron's bias-dropout-add: no bias, no dropout, and the residual stream keeps its
    dtype.

    Under bfloat16 the stream stays float32. Megatron's own addition would round it to bfloat16 in every block, which
    would cause most of the error of the log-probs.
    """

    def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return kernels.add(residual, output_and_bias[0])

    return lambda training, fused: add


def block_spec(num_blocks: int, products: Products, kernels: BlockKernels, *, qk_norm: bool = False) -> BlockSubmodules:
    """Return the specification of `num_blocks` Llama blocks and a final norm, computed by `kernels`. If
    `kernels.portable` is True, the linears are Megatron's own, and `products` is not used. Otherwise they are linears
    for CPUs, which multiply with the library `products`. `qk_norm`: see `ModelSpec`."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    parts = layer.submodules
    by_kernels = {"kernels": kernels}
    parts.input_layernorm = parts.pre_mlp_layernorm = ModuleSpec(RMSNorm, params=by_kernels)
    parts.self_attn_bda = parts.mlp_bda = residual_add(kernels)
    attention, mlp = parts.self_attention, parts.mlp
    attention.module, attention.params = PackedAttention, attention.params | by_kernels
    attention.submodules.core_attention = CausalAttention
    if qk_norm:
        attention.submodules.q_layernorm = ModuleSpec(UnroundedRMSNorm, params=by_kernels)
        attention.submodules.k_layernorm = ModuleSpec(UnroundedRMSNorm, params=by_kernels)
    mlp.submodules.activation_func = ModuleSpec(Gate, params=by_kernels)
    column, row = (PortableColumnLinear, PortableRowLinear) if kernels.portable else (CpuColumnLinear, CpuRowLinear)
    arguments: dict[str, Any] = {} if kernels.portable else {"products": products, "kernels": kernels}
    # Megatron calls linear_qkv, but builds the others from specifications
    attention.submodules.linear_qkv = partial(column, **arguments)
    attention.submodules.linear_proj = mlp.submodules.linear_fc2 = ModuleSpec(row, params=arguments)
    mlp.submodules.linear_fc1 = ModuleSpec(column, params=arguments)
    return BlockSubmodules(layer_specs=[layer] * num_blocks, layer_norm=ModuleSpec(UnroundedRMSNorm, params=by_kernels))


# ---- linears and embedding -------------------------------------------------------------------------------


class PortableColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear with its input flattened to one matrix [N, K].

    Without this, policy and reference would differ in their last bits even with the same weights. For an input with
    more axes, torch has two ways to compute the product. It uses one for a trained weight and the other for a frozen
    weight.
    """

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        product: Tensor = super()._forward_impl(input.flatten(0, -2), weight, **options)
        return product[:, None]


class PortableRowLinear(RowParallelLinear):
    """Megatron's row-parallel linear with its input flattened to one matrix [N, K]: see `PortableColumnLinear`."""

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        product: Tensor = super()._forward_impl(input.flatten(0, -2), weight, **options)
        return product[:, None]


class CpuColumnLinear(ColumnParallelLinear):
    """Megatron's column-parallel linear with `cpu_linear` as its product. Under sequence parallelism it keeps the
    gathered input for the backward pass, where Megatron's own gathers it again."""

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
    """Megatron's row-parallel linear with `cpu_linear` as its product."""

    def __init__(self, *args: Any, products: Products, kernels: BlockKernels, **options: Any) -> None:
        super().__init__(*args, **options)
        self.products, self.kernels = products, kernels

    def _forward_impl(self, input: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return _with_bias(cpu_linear(input, weight, self.products, self.kernels), options["bias"])


class CpuEmbedding(VocabParallelEmbedding):
    """Megatron's vocabulary-parallel embedding. Its gradient is added only to the used rows of `main_grad`. (torch's
    own gradient would be a tensor as large as the embedding.)"""

    def forward(self, tokens: Tensor) -> Tensor:
        inside = (tokens >= self.vocab_start_index) & (tokens < self.vocab_end_index)
        rows = torch.where(inside, tokens - self.vocab_start_index, 0)
        embedded = _Embedding.apply(self.weight, rows, inside)
        if self.reduce_scatter_embeddings:
            return reduce_scatter_to_sequence_parallel_region(embedded.transpose(0, 1).contiguous())
        return reduce_from_tensor_model_parallel_region(embedded)


class _Embedding(torch.autograd.Function):
    """The embeddings of tokens: rows of the weight, and zeros for tokens in other ranks' parts of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, weight_VH: Tensor, rows: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(rows, inside)
        ctx.shape, ctx.dtype, ctx.main_grad = weight_VH.shape, weight_VH.dtype, getattr(weight_VH, "main_grad", None)
        return weight_VH[rows] * inside[..., None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        rows, inside = ctx.saved_tensors
        total_VH = ctx.main_grad if ctx.main_grad is not None else torch.zeros(ctx.shape)
        # sequential, in the order of the tokens, so the bits are the same every time
        if total_VH.dtype == torch.float32:
            total_VH.index_add_(0, rows[inside], grad[inside].float())
        else:  # rounded once for each row, not once for each token
            used, number = torch.unique(rows[inside], return_inverse=True)
            sums_UH = torch.zeros(len(used), ctx.shape[1]).index_add_(0, number, grad[inside].float())
            total_VH[used] += sums_UH
        return (total_VH.to(ctx.dtype) if ctx.main_grad is None else None), None, None


def cpu_linear(
    x_NK: Tensor, weight_MK: Tensor, products: Products, kernels: BlockKernels, total_NM: Tensor | None = None
) -> Tensor:
    """Return x @ weight.T, or total + x @ weight.T if `total` is given. Differentiable. x may have more axes before its
    last. `total` is changed in place if autograd allows it."""
    if total_NM is not None and total_NM._is_view():  # an all-reduce returns its input, of which autograd makes a view
        return total_NM + cpu_linear(x_NK, weight_MK, products, kernels)
    product: Tensor = _Linear.apply(x_NK, weight_MK, products, kernels, total_NM)
    return product


class _Linear(torch.autograd.Function):
    """The differentiable function x @ weight.T, or total + x @ weight.T if `total` is given. `total` is changed in
    place. If the weight has an attribute `main_grad`, the weight's gradient is added to that tensor and is not
    returned. x is kept for the backward pass only if the weight needs a gradient."""

    @staticmethod
    def forward(
        ctx: Any, x_NK: Tensor, weight_MK: Tensor, products: Products, kernels: BlockKernels, total_NM: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x_NK if ctx.needs_input_grad[1] else None, weight_MK)
        ctx.products, ctx.kernels, ctx.main_grad = products, kernels, getattr(weight_MK, "main_grad", None)
        if total_NM is None:
            return multiply(x_NK, weight_MK, products)
        add_product(total_NM, x_NK, weight_MK, products)
        ctx.mark_dirty(total_NM)
        return total_NM

    @staticmethod
    def backward(ctx: Any, grad_NM: Tensor) -> tuple[Tensor | None, ...]:
        x_NK, weight_MK = ctx.saved_tensors
        needs_x, needs_weight, *_, needs_total = ctx.needs_input_grad
        weight_grad_MK = None
        if needs_weight and ctx.main_grad is None:
            weight_grad_MK = weight_gradient(grad_NM, x_NK, ctx.products)
        elif needs_weight:
            add_weight_gradient(ctx.main_grad, grad_NM, x_NK, ctx.products, ctx.kernels)
        x_grad_NK = input_gradient(grad_NM, weight_MK, ctx.products) if needs_x else None
        return x_grad_NK, weight_grad_MK, None, None, grad_NM if needs_total else None


def add_weight_gradient(
    total_MK: Tensor, grad_NM: Tensor, x_NK: Tensor, products: Products, kernels: BlockKernels
) -> None:
    """Add grad.T @ x to `total`. All rows of grad and x are flattened to one axis."""
    if grad_NM.dtype == torch.float32 and products is Products.TORCH:
        total_MK.addmm_(grad_NM.flatten(0, -2).T, x_NK.flatten(0, -2))
    else:
        kernels.accumulate(total_MK, weight_gradient(grad_NM, x_NK, products))


def _with_bias(product: Tensor, bias: Tensor | None) -> Tensor:
    return product if bias is None else product + bias


# ---- rotary embedding ------------------------------------------------------------------------------------


def rotary_frequencies(spec: ModelSpec) -> Float32[torch.Tensor, " D//2"]:
    """Return the radians per token by which each pair of a head's numbers is rotated, as a tensor on the CPU. With d =
    head_dim and i < d/2:

        f_i = theta^(-2i / d)                                                       (Su et al. 2021)

    and under `rope_scaling` (Llama 3.1), where L is `original_max_positions` and lo, hi are the low and high factors,

        s_i = clip((L f_i / 2 pi - lo) / (hi - lo), 0, 1)            f'_i = f_i (s_i + (1 - s_i) / factor)
    """
    exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float32) / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    waves = scaling.original_max_positions * frequencies / (2 * math.pi)
    kept = ((waves - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / scaling.factor)


# ---- packed rows ----------------------------------------------------------------------------------------


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of packed rows, with additional fields. Megatron passes it to every block. See `pack`."""

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64: the position of each token within its row."""
    runs: tuple[tuple[int, int, int], ...] = ()
    """(first token, number of rows, length) of each sequence of adjacent rows of the same length."""
    _of_frequencies: Tensor | None = None
    _angles: RotaryAngles | None = None

    def angles(self, frequencies_P11D: Tensor) -> RotaryAngles:
        """Return cosines and sines of Megatron's rotary frequencies [positions, 1, 1, head dimension]. They are
        computed once, since they are the same for every block of a model."""
        if self._angles is None or self._of_frequencies is not frequencies_P11D:
            half_PD = frequencies_P11D[:, 0, 0].chunk(2, -1)[0].float()
            self._angles = RotaryAngles(half_PD.cos(), half_PD.sin(), self.positions)
            self._of_frequencies = frequencies_P11D
        return self._angles


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """Return the packing of rows of these lengths, in this order. Rows of the same length should be adjacent."""
    runs, start = [], 0
    for length, alike in groupby(lengths):
        rows = len(list(alike))
        runs.append((start, rows, length))
        start += rows * length
    positions = torch.cat([torch.arange(length).repeat(rows) for _, rows, length in runs])
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions.to(device),
        runs=tuple(runs),
    )
