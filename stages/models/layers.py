"""The pieces that replace Megatron's own in its transformer layer, and the layer specification made of them.

Suffixes: N tokens of all rows, one after another; B rows of one length, T tokens of each; K heads, G groups of them
that share keys and values, D head dimension, H hidden, F features.

May import torch, megatron.core and this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.parallel_state import get_tensor_model_parallel_rank
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules as BlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from stages.models.kernels.composed import rotate
from stages.models.kernels.protocol import BlockKernels, HeadSizes
from stages.models.linears import CpuColumnLinear, CpuRowLinear
from stages.models.packing import Packing
from stages.models.products import Products

_AddToResidual = Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm from the float32 residual stream to the dtype of the linear layers. It may run on a sequence-parallel
    shard, which Megatron's torch norm refuses."""

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, *, kernels: BlockKernels, **_: Any
    ) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.epsilon = eps
        self.kernels = kernels
        # each rank sees a part of the sequence only: finalize_model_grads adds up the marked gradients over TP (and
        # those of q_layernorm and k_layernorm, of which each rank sees its heads only, by their names)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self.weight, self.epsilon, self.weight.dtype)


class UnroundedRMSNorm(RMSNorm):
    """The norm before the output layer or the head, which are multiplied in float32, and of queries and keys, which
    attention takes as they come."""

    def forward(self, x: Tensor) -> Tensor:
        return self.kernels.norm(x, self.weight, self.epsilon, x.dtype)


class Gate(torch.nn.Module):
    """silu(gate) * up, where Megatron's MLP lets a module take both."""

    def __init__(self, config: TransformerConfig, *, kernels: BlockKernels) -> None:
        super().__init__()
        self.kernels = kernels

    def forward(self, gate_up_N1F: Tensor) -> Tensor:
        return self.kernels.gate(gate_up_N1F)


class PackedAttention(SelfAttention):
    """Megatron's self-attention over packed rows: heads are taken apart and turned in one kernel."""

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
        if sharing > 1:  # ranks of a group of queries split them and all have its key and value
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
    """Causal attention by torch's fused kernel, grouped queries included. Rows of one length, which packing puts beside
    one another, are computed together; no mask is needed, since no token is padding."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query_NKD: Tensor, key_NGD: Tensor, value_NGD: Tensor, packing: Packing) -> Tensor:
        """[N, all heads' dimensions]."""
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
    """Stands where GPTModel has its output layer and hands the hidden states on, the sequence made whole: `forward.py`
    picks the few positions that are asked for before it multiplies with the vocabulary. Holds the output layer's own
    parameters, if it has any: `weight` [vocab / TP, H] of an output layer that is not the embedding, or `weight`
    [1, H] and `bias` [1] of a critic's head."""

    def __init__(self, *, sequence_parallel: bool, weight: Parameter | None, bias: Parameter | None = None) -> None:
        super().__init__()
        self.sequence_parallel = sequence_parallel
        self.weight = weight
        self.bias = bias

    def forward(self, hidden_N1H: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            # every TP rank goes on with the whole sequence alike, so that its gradient is already the full one
            hidden_N1H = gather_from_sequence_parallel_region(hidden_N1H, tensor_parallel_output_grad=False)
        return hidden_N1H, None


def residual_add(kernels: BlockKernels) -> Callable[[bool, bool], _AddToResidual]:
    """Megatron's bias-dropout-add without bias and dropout, and with the residual stream kept in its own dtype.

    Under bfloat16 the stream stays float32 (Megatron's own would round it to bfloat16): rounding it in every block is
    most of the error of the log-probs.
    """

    def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return kernels.add(residual, output_and_bias[0])

    return lambda training, fused: add


def block_spec(
    num_blocks: int, products: Products, kernels: BlockKernels, device: torch.device, *, qk_norm: bool = False
) -> BlockSubmodules:
    """Specification of `num_blocks` Llama blocks and a final norm, computed by `kernels`, whose linears multiply by
    `products` on a CPU and are Megatron's own on CUDA. `qk_norm`: see `ModelSpec`."""
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
    if device.type == "cpu":
        given: dict[str, Any] = {"products": products, "kernels": kernels}
        # Megatron calls this one, and builds the others from specifications
        attention.submodules.linear_qkv = partial(CpuColumnLinear, **given)
        attention.submodules.linear_proj = mlp.submodules.linear_fc2 = ModuleSpec(CpuRowLinear, params=given)
        mlp.submodules.linear_fc1 = ModuleSpec(CpuColumnLinear, params=given)
    return BlockSubmodules(layer_specs=[layer] * num_blocks, layer_norm=ModuleSpec(UnroundedRMSNorm, params=by_kernels))
