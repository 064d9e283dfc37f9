"""The pieces that replace Megatron's own in its transformer layer, and the layer specification made of them.

Suffixes: T tokens of the padded row, B rows, N heads, D head dimension, H hidden.

May import torch, megatron.core and this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import Parameter

from stages.models.products import OneDnnColumnLinear, OneDnnRowLinear, Products


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm from the float32 residual stream to the dtype of the linear layers, or of the heads of queries or keys
    in that dtype. It may run on a sequence-parallel shard, which Megatron's torch norm refuses."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # each rank sees a part of the sequence only: finalize_model_grads adds up the marked gradients over TP (and
        # those of q_layernorm and k_layernorm, of which each rank sees its heads only, by their names)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps).to(self.weight.dtype)


class FinalRMSNorm(RMSNorm):
    """The norm before the output layer or the head, which are multiplied in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class CausalAttention(MegatronModule):
    """Causal attention by torch's fused kernel, grouped queries included; rows are padded on the right, so that no
    token sees padding and no mask is needed."""

    def __init__(self, config: TransformerConfig, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__(config)
        self.scale = softmax_scale

    def forward(self, query_TBND: Tensor, key_TBND: Tensor, value_TBND: Tensor, *_: Any, **__: Any) -> Tensor:
        q_BNTD, k_BNTD, v_BNTD = (x.permute(1, 2, 0, 3) for x in (query_TBND, key_TBND, value_TBND))
        out_BNTD = F.scaled_dot_product_attention(
            q_BNTD, k_BNTD, v_BNTD, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return out_BNTD.permute(2, 0, 1, 3).flatten(2)


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

    def forward(self, hidden_TBH: Tensor, weight: Tensor | None = None, **_: Any) -> tuple[Tensor, None]:
        if self.sequence_parallel:
            # every TP rank goes on with the whole sequence alike, so that its gradient is already the full one
            hidden_TBH = gather_from_sequence_parallel_region(hidden_TBH, tensor_parallel_output_grad=False)
        return hidden_TBH, None


def add_residual(training: bool, fused: bool) -> Callable[[tuple[Tensor, Tensor | None], Tensor, float], Tensor]:
    """Megatron's bias-dropout-add without bias and dropout, and with the residual stream kept in its own dtype.

    Under bfloat16 the stream stays float32 (Megatron's own would round it to bfloat16): rounding it in every block is
    most of the error of the log-probs.
    """

    def add(output_and_bias: tuple[Tensor, Tensor | None], residual: Tensor, dropout: float) -> Tensor:
        return residual + output_and_bias[0]

    return add


def block_spec(
    num_blocks: int, products: Products = Products.TORCH, *, qk_norm: bool = False
) -> TransformerBlockSubmodules:
    """Specification of `num_blocks` Llama blocks and a final norm, whose linears multiply by `products`. `qk_norm`: see
    `ModelSpec`."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm")
    if qk_norm:
        heads = layer.submodules.self_attention.submodules
        heads.q_layernorm = heads.k_layernorm = RMSNorm
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    layer.submodules.self_attention.submodules.core_attention = CausalAttention
    layer.submodules.self_attn_bda = add_residual
    layer.submodules.mlp_bda = add_residual
    if products is Products.ONEDNN:
        attention, mlp = layer.submodules.self_attention.submodules, layer.submodules.mlp.submodules
        attention.linear_qkv = mlp.linear_fc1 = OneDnnColumnLinear
        attention.linear_proj = mlp.linear_fc2 = OneDnnRowLinear
    return TransformerBlockSubmodules(layer_specs=[layer] * num_blocks, layer_norm=FinalRMSNorm)
