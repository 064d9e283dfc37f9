"""Hugging Face's Llama and Megatron's, told apart and translated: configuration, tensor names, tensor- and
pipeline-parallel cuts.

Megatron fuses what Hugging Face keeps apart. Its `linear_qkv` holds, for each group of queries that share a key, the
group's queries, the key and the value; `linear_fc1` holds gate and up, each cut over the tensor-parallel ranks first.
A *block* is numbered as Hugging Face numbers layers, from 0 at the bottom of the whole model.

May import torch, megatron.core and stages.models.hf_files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.models.hf_files import rope_theta

Gather = Callable[[Tensor], list[Tensor]]
"""All tensor-parallel ranks' parts of a tensor, in rank order."""

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
OUTPUT = "lm_head.weight"
HEAD_WEIGHT = "value_head.weight"
"""[1, hidden]: the critic's head, which Hugging Face's Llama has no name for."""
HEAD_BIAS = "value_head.bias"


@dataclass(frozen=True)
class LlamaShape:
    """The numbers that make a Llama."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_blocks: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_tokens: int
    norm_eps: float
    rope_theta: float
    tied: bool
    """The output layer is the embedding."""


def llama_shape(config: Mapping[str, Any]) -> LlamaShape:
    """The shape that a config.json describes. Raises ValueError, naming its key, for anything but a plain Llama."""
    for key, wanted in (
        ("model_type", "llama"),
        ("hidden_act", "silu"),
        ("attention_bias", False),
        ("mlp_bias", False),
        ("quantization_config", None),
    ):
        given = config.get(key, wanted)
        if given != wanted:
            raise ValueError(f"config.json: {key} = {given!r} is not supported, only {wanted!r} (Llama architecture)")
    heads = int(config["num_attention_heads"])
    return LlamaShape(
        vocab_size=int(config["vocab_size"]),
        hidden_size=int(config["hidden_size"]),
        intermediate_size=int(config["intermediate_size"]),
        num_blocks=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
        max_tokens=int(config["max_position_embeddings"]),
        norm_eps=float(config["rms_norm_eps"]),
        rope_theta=rope_theta(config),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def transformer_kwargs(shape: LlamaShape) -> dict[str, Any]:
    """The part of Megatron's TransformerConfig that the architecture decides (not the number of layers: a stage may
    hold a part of the blocks). Megatron's fusions stay off: they need kernels that a CPU lacks."""
    return {
        "hidden_size": shape.hidden_size,
        "ffn_hidden_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_query_groups": shape.num_kv_heads,
        "kv_channels": shape.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": shape.norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "add_bias_linear": False,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "gradient_accumulation_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
    }


def named_by_block(model: GPTModel, first_block: int) -> Iterator[tuple[str, int | None, torch.nn.Parameter]]:
    """(name within its block or model, block, parameter) of every parameter of a stage whose lowest block, on the
    first pipeline stage, is `first_block` of the whole model."""
    blocks = {str(i): first_block + layer.layer_number - 1 for i, layer in enumerate(model.decoder.layers)}
    for name, parameter in model.named_parameters():
        if name.startswith("decoder.layers."):
            _, _, index, rest = name.split(".", 3)
            yield rest, blocks[index], parameter
        else:
            yield name, None, parameter


SPLIT_AXES = {
    "embedding.word_embeddings.weight": 0,
    "output_layer.weight": 0,
    "self_attention.linear_qkv.weight": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc2.weight": 1,
}
"""Axis along which tensor-parallel ranks share a parameter; the others are whole on each."""


def from_hf(
    name: str, block: int | None, tensors: Mapping[str, Tensor], shape: LlamaShape, tp_rank: int, tp_size: int
) -> Tensor:
    """This tensor-parallel rank's part of a Megatron parameter, from whole Hugging Face tensors. Raises KeyError with
    the Hugging Face name where one is missing."""

    def cut(tensor: Tensor, axis: int) -> Tensor:
        return tensor.chunk(tp_size, axis)[tp_rank]

    prefix = f"model.layers.{block}."
    match name:
        case "embedding.word_embeddings.weight":
            return cut(tensors[EMBEDDING], 0)
        case "decoder.final_layernorm.weight":
            return tensors[FINAL_NORM]
        case "output_layer.weight":
            return cut(tensors[EMBEDDING if shape.tied else OUTPUT], 0)
        case "input_layernorm.weight":
            return tensors[f"{prefix}input_layernorm.weight"]
        case "pre_mlp_layernorm.weight":
            return tensors[f"{prefix}post_attention_layernorm.weight"]
        case "self_attention.linear_qkv.weight":
            q, k, v = (tensors[f"{prefix}self_attn.{x}_proj.weight"] for x in "qkv")
            groups, hidden = shape.num_kv_heads, q.shape[-1]
            fused = torch.cat([x.view(groups, -1, hidden) for x in (q, k, v)], 1)
            return cut(fused.flatten(0, 1), 0)
        case "self_attention.linear_proj.weight":
            return cut(tensors[f"{prefix}self_attn.o_proj.weight"], 1)
        case "mlp.linear_fc1.weight":
            return torch.cat([cut(tensors[f"{prefix}mlp.{x}_proj.weight"], 0) for x in ("gate", "up")])
        case "mlp.linear_fc2.weight":
            return cut(tensors[f"{prefix}mlp.down_proj.weight"], 1)
        case _:
            raise KeyError(f"Megatron's {name} has no counterpart in Hugging Face's Llama")


def to_hf(
    name: str, block: int | None, parameter: Tensor, shape: LlamaShape, gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """The whole Hugging Face tensors that a Megatron parameter holds; views of it where its memory allows."""
    prefix = f"model.layers.{block}."
    match name:
        case "embedding.word_embeddings.weight":
            yield EMBEDDING, _join(gather(parameter), 0)
        case "decoder.final_layernorm.weight":
            yield FINAL_NORM, parameter
        case "output_layer.weight" if parameter.shape[0] == 1:
            yield HEAD_WEIGHT, parameter
        case "output_layer.bias":
            yield HEAD_BIAS, parameter
        case "output_layer.weight":
            yield EMBEDDING if shape.tied else OUTPUT, _join(gather(parameter), 0)
        case "input_layernorm.weight":
            yield f"{prefix}input_layernorm.weight", parameter
        case "pre_mlp_layernorm.weight":
            yield f"{prefix}post_attention_layernorm.weight", parameter
        case "self_attention.linear_qkv.weight":
            fused = _join(gather(parameter), 0)
            fused = fused.view(shape.num_kv_heads, -1, fused.shape[-1])
            queries = shape.num_heads // shape.num_kv_heads * shape.head_dim
            for x, part in zip("qkv", fused.split([queries, shape.head_dim, shape.head_dim], 1), strict=True):
                yield f"{prefix}self_attn.{x}_proj.weight", part.flatten(0, 1)
        case "self_attention.linear_proj.weight":
            yield f"{prefix}self_attn.o_proj.weight", _join(gather(parameter), 1)
        case "mlp.linear_fc1.weight":
            halves = [part.chunk(2) for part in gather(parameter)]
            yield f"{prefix}mlp.gate_proj.weight", _join([gate for gate, _ in halves], 0)
            yield f"{prefix}mlp.up_proj.weight", _join([up for _, up in halves], 0)
        case "mlp.linear_fc2.weight":
            yield f"{prefix}mlp.down_proj.weight", _join(gather(parameter), 1)
        case _:
            raise KeyError(f"Megatron's {name} has no counterpart in Hugging Face's Llama")


def _join(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)
