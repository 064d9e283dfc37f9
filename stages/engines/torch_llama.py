"""Llama's forward pass for decoding: fused projections, a paged key/value cache, no autograd.

The forward works on a flat list of tokens, each with its position and its row: prompts, single new tokens and drafts
run in one pass. The residual stream, the attention and the logits are float32 whatever the dtype of the weights: with
bfloat16 weights the operands of the matrix products are the only roundings.

On a CPU every row's numbers are the same bits in any pass: linear layers by `packed`, everything else by `kernels`.

Shape letters: N tokens, H query heads, K key/value heads, D head dimension, C hidden size, V vocabulary.
May import torch, stages.engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64

from stages.engines.kernels import Angles, Kernels, Tokens
from stages.engines.kv_cache import KVCache
from stages.engines.packed import linear, pack, unpack
from stages.engines.protocol import WeightsError
from stages.hf_files import rope_theta

ATTENTION_DTYPE = torch.float32
"""Of keys, values and attention scores. On CPUs its batched product is also faster than bfloat16's."""

_FUSED = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "out": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Field of `Block` -> the Hugging Face linears stacked in it, in this order."""
_NORMS = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_EMBEDDING, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"


@dataclass(frozen=True)
class LlamaShape:
    """Sizes of a model, from its config.json."""

    num_layers: int
    hidden: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    max_positions: int
    norm_eps: float
    theta: float
    tied: bool


@dataclass(frozen=True)
class Block:
    """One transformer block; linears packed and fused."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    out: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class LlamaWeights:
    """A whole model, ready to run; replaced as a whole, never changed."""

    embedding: Float[torch.Tensor, "V C"]
    blocks: tuple[Block, ...]
    norm: Float[torch.Tensor, " C"]
    head: torch.Tensor
    """Packed, float32."""
    angles: Angles


def read_shape(config: Mapping[str, Any]) -> LlamaShape:
    """Raises ValueError for what is no plain Llama (another architecture, biases, another activation)."""
    unsupported = {
        "model_type": config.get("model_type") != "llama",
        "hidden_act": config.get("hidden_act", "silu") != "silu",
        "attention_bias": bool(config.get("attention_bias", False)),
        "mlp_bias": bool(config.get("mlp_bias", False)),
    }
    for key, wrong in unsupported.items():
        if wrong:
            raise ValueError(f"the engine runs Llama models without biases; config.json has {key}: {config.get(key)!r}")
    heads = config["num_attention_heads"]
    return LlamaShape(
        num_layers=config["num_hidden_layers"],
        hidden=config["hidden_size"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        ffn=config["intermediate_size"],
        vocab=config["vocab_size"],
        max_positions=config["max_position_embeddings"],
        norm_eps=config["rms_norm_eps"],
        theta=rope_theta(config),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


def tensor_shapes(shape: LlamaShape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by Hugging Face name; without `lm_head.weight` where it is tied."""
    queries, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block = {
        "input_layernorm": (shape.hidden,),
        "self_attn.q_proj": (queries, shape.hidden),
        "self_attn.k_proj": (keys, shape.hidden),
        "self_attn.v_proj": (keys, shape.hidden),
        "self_attn.o_proj": (shape.hidden, queries),
        "post_attention_layernorm": (shape.hidden,),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
        "mlp.down_proj": (shape.hidden, shape.ffn),
    }
    shapes: dict[str, tuple[int, ...]] = {_EMBEDDING: (shape.vocab, shape.hidden)}
    for layer in range(shape.num_layers):
        shapes |= {_name(layer, part): size for part, size in block.items()}
    shapes[_FINAL_NORM] = (shape.hidden,)
    if not shape.tied:
        shapes[_HEAD] = (shape.vocab, shape.hidden)
    return shapes


def check_tensors(shape: LlamaShape, tensors: Mapping[str, torch.Tensor], *, complete: bool) -> None:
    """Raises WeightsError naming the first tensor that is unknown, misshapen or not finite, or (`complete`) missing.
    A tied `lm_head.weight` may come along if it is the embedding that also comes."""
    expected = tensor_shapes(shape)
    for name, tensor in tensors.items():
        if name == _HEAD and shape.tied:
            if _EMBEDDING not in tensors or not torch.equal(tensor, tensors[_EMBEDDING]):
                raise WeightsError(f"{_HEAD} is tied to {_EMBEDDING} in this model and must come with it, equal to it")
        elif name not in expected:
            raise WeightsError(f"{name} is no tensor of this model ({shape.num_layers} blocks)")
        elif tuple(tensor.shape) != expected[name]:
            raise WeightsError(f"{name} has shape {tuple(tensor.shape)}, this model's is {expected[name]}")
        elif not tensor.is_floating_point():
            raise WeightsError(f"{name} is {tensor.dtype}, not a floating-point tensor")
        elif not _all_finite(tensor):
            raise WeightsError(f"{name} holds NaN or infinity")
    missing = [name for name in expected if name not in tensors]
    if complete and missing:
        raise WeightsError(f"{missing[0]} is missing (and {len(missing) - 1} more)")


def _all_finite(tensor: torch.Tensor) -> bool:
    """NaN and infinity survive every sum: a finite one proves the rest at a tenth of the cost of looking at each."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


def build_weights(
    shape: LlamaShape, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device, max_seq: int
) -> LlamaWeights:
    """The model from a complete, checked set of tensors."""
    place, convert = _placer(tensors, dtype, device), _converter(tensors, dtype, device)
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(max_seq, dtype=torch.float32)[:, None] * (1.0 / shape.theta**exponents)
    return LlamaWeights(
        embedding=place(_EMBEDDING),
        blocks=tuple(
            Block(
                **{field: place(_name(layer, part)) for field, part in _NORMS.items()},
                **{
                    field: pack(torch.cat([convert(_name(layer, part)) for part in parts]))
                    for field, parts in _FUSED.items()
                },
            )
            for layer in range(shape.num_layers)
        ),
        norm=place(_FINAL_NORM),
        head=_pack_head(tensors[_EMBEDDING if shape.tied else _HEAD], dtype, device),
        angles=Angles(angles.cos().to(device), angles.sin().to(device)),
    )


def refit_weights(shape: LlamaShape, old: LlamaWeights, tensors: Mapping[str, torch.Tensor]) -> LlamaWeights:
    """`old` with some (checked) tensors replaced; everything else is shared. Costs the memory of what is replaced."""
    dtype, device = old.embedding.dtype, old.embedding.device
    place, convert = _placer(tensors, dtype, device), _converter(tensors, dtype, device)
    blocks = []
    for layer, block in enumerate(old.blocks):
        changed = {f: place(_name(layer, part)) for f, part in _NORMS.items() if _name(layer, part) in tensors}
        for field, parts in _FUSED.items():
            names = [_name(layer, part) for part in parts]
            if not any(name in tensors for name in names):
                continue
            sizes = [tensor_shape[0] for tensor_shape in _part_shapes(shape, parts)]
            stacked = unpack(getattr(block, field)).split(sizes) if any(n not in tensors for n in names) else None
            changed[field] = pack(
                torch.cat([convert(n) if stacked is None or n in tensors else stacked[i] for i, n in enumerate(names)])
            )
        blocks.append(replace(block, **changed) if changed else block)
    new = replace(old, blocks=tuple(blocks))
    if _EMBEDDING in tensors:
        new = replace(new, embedding=place(_EMBEDDING))
    if _FINAL_NORM in tensors:
        new = replace(new, norm=place(_FINAL_NORM))
    head = _EMBEDDING if shape.tied else _HEAD
    if head in tensors:
        new = replace(new, head=_pack_head(tensors[head], dtype, device))
    return new


def forward(
    weights: LlamaWeights, shape: LlamaShape, kernels: Kernels, tokens: Tokens, cache: KVCache
) -> Float[torch.Tensor, "N C"]:
    """Hidden states after the last block, before the final norm; float32. Writes the tokens' keys and values."""
    dtype = weights.embedding.dtype
    x_NC = weights.embedding[tokens.ids].float()
    delta = None
    for block, (keys, values) in zip(weights.blocks, cache.layers, strict=True):
        h_NC = kernels.add_norm(x_NC, delta, block.attention_norm, shape.norm_eps, dtype)
        read = kernels.attend(linear(h_NC, block.qkv), weights.angles, tokens, keys, values)
        h_NC = kernels.add_norm(x_NC, linear(read, block.out), block.mlp_norm, shape.norm_eps, dtype)
        delta = linear(kernels.gate(linear(h_NC, block.gate_up)), block.down)
    assert delta is not None, "a model without blocks"
    return x_NC.add_(delta)


def logits(
    weights: LlamaWeights,
    shape: LlamaShape,
    kernels: Kernels,
    hidden: Float[torch.Tensor, "N C"],
    wanted: Int64[torch.Tensor, " M"],
) -> Float[torch.Tensor, "M V"]:
    """float32 logits of the tokens after some of `forward`'s hidden states."""
    return linear(kernels.add_norm(hidden[wanted], None, weights.norm, shape.norm_eps, torch.float32), weights.head)


def _pack_head(weight: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Rounded like all weights, multiplied in float32: logits rounded to bfloat16 would be another distribution."""
    return pack(weight.to(device, dtype).float())


def _placer(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> Callable[[str], torch.Tensor]:
    """name -> the tensor as the engine keeps it, never the caller's own memory; norms stay float32."""

    def place(name: str) -> torch.Tensor:
        tensor = tensors[name].detach()
        return tensor.to(device, torch.float32 if tensor.ndim == 1 else dtype, copy=True)

    return place


def _converter(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> Callable[[str], torch.Tensor]:
    """name -> the tensor to be stacked and packed (which copies): the caller's own memory where it fits."""

    def convert(name: str) -> torch.Tensor:
        return tensors[name].detach().to(device, dtype)

    return convert


def _part_shapes(shape: LlamaShape, parts: tuple[str, ...]) -> list[tuple[int, ...]]:
    shapes = tensor_shapes(shape)
    return [shapes[_name(0, part)] for part in parts]


def _name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"
