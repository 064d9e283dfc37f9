"""Llama's forward pass for decoding: fused projections, a paged key/value cache, no autograd.

The forward works on a flat list of tokens, each with its position and its row: prompts, single new tokens and drafts
run in one batch. The residual stream, the attention and the logits are float32 whatever the dtype of the weights: with
bfloat16 weights the operands of the matrix products are the only roundings.

On a CPU every row's numbers are the same bits in any batch; see `kernels`. Kernels that compute half a block in one
call (`FusedKernels`) do so; the others are put together here, operation by operation.

Shape letters: N tokens, H query heads, K key/value heads, D head dimension, C hidden size, V vocabulary.
May import torch, stages.engines.protocol, stages.engines.embedded.kernels, stages.models.hf_files.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64

from stages.engines.embedded.kernels.packed import NotFiniteError, Packed, all_finite
from stages.engines.embedded.kernels.protocol import Angles, Block, FusedKernels, Kernels, PagedCache, Tokens
from stages.engines.protocol import WeightsError
from stages.models.hf_files import rope_theta

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
class LlamaWeights:
    """A whole model, ready to run; replaced as a whole, or (on a CUDA device, between two batches) overwritten."""

    embedding: Float[torch.Tensor, "V C"]
    blocks: tuple[Block, ...]
    norm: Float[torch.Tensor, " C"]
    head: Packed
    """Of the weights' dtype and packed wide: its operands are rounded as those of all products, its logits are not."""
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
    """Raises WeightsError naming the first tensor that is unknown or misshapen, or (`complete`) missing. That all
    numbers are finite is seen when they are packed, so that they are read once. A tied `lm_head.weight` may come along
    if it is the embedding that also comes."""
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
    missing = [name for name in expected if name not in tensors]
    if complete and missing:
        raise WeightsError(f"{missing[0]} is missing (and {len(missing) - 1} more)")


def build_weights(
    shape: LlamaShape,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    max_seq: int,
    kernels: Kernels,
) -> LlamaWeights:
    """The model from a complete, checked set of tensors. Raises WeightsError for the first that is not finite."""
    place, pack = _placer(tensors, dtype, device), _packer(shape, tensors, dtype, device, kernels)
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(max_seq, dtype=torch.float32)[:, None] * (1.0 / shape.theta**exponents)

    def block(layer: int) -> Block:
        norms = {field: place(_name(layer, part)) for field, part in _NORMS.items()}
        linears: dict[str, Any] = {
            field: pack([_name(layer, part) for part in parts], None) for field, parts in _FUSED.items()
        }
        return Block(**norms, **linears)

    return LlamaWeights(
        embedding=place(_EMBEDDING),
        blocks=tuple(map(block, range(shape.num_layers))),
        norm=place(_FINAL_NORM),
        head=pack([_EMBEDDING if shape.tied else _HEAD], None),
        angles=Angles(angles.cos().to(device), angles.sin().to(device)),
    )


def refit_weights(
    shape: LlamaShape, old: LlamaWeights, tensors: Mapping[str, torch.Tensor], kernels: Kernels
) -> LlamaWeights:
    """`old` with some (checked) tensors replaced; everything else is shared. Costs the memory of what is replaced.
    Raises WeightsError for the first that is not finite."""
    dtype, device = old.embedding.dtype, old.embedding.device
    place, pack = _placer(tensors, dtype, device), _packer(shape, tensors, dtype, device, kernels)
    blocks = []
    for layer, block in enumerate(old.blocks):
        changed: dict[str, Any] = {
            f: place(_name(layer, part)) for f, part in _NORMS.items() if _name(layer, part) in tensors
        }
        for field, parts in _FUSED.items():
            names = [_name(layer, part) for part in parts]
            if any(name in tensors for name in names):
                changed[field] = pack(names, getattr(block, field))
        blocks.append(replace(block, **changed) if changed else block)
    new = replace(old, blocks=tuple(blocks))
    if _EMBEDDING in tensors:
        new = replace(new, embedding=place(_EMBEDDING))
    if _FINAL_NORM in tensors:
        new = replace(new, norm=place(_FINAL_NORM))
    head = _EMBEDDING if shape.tied else _HEAD
    if head in tensors:
        new = replace(new, head=pack([head], old.head))
    return new


def forward(
    weights: LlamaWeights,
    shape: LlamaShape,
    kernels: Kernels,
    tokens: Tokens,
    cache: PagedCache,
    hidden: Float[torch.Tensor, "N C"] | None = None,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Float[torch.Tensor, "N C"]:
    """Hidden states after the last block, before the final norm; float32. Writes the tokens' keys and values. `hidden`:
    what the blocks before these made, instead of the embeddings (overwritten). `total`: makes the sum over the ranks
    that split heads and MLP, of what this rank's part gives."""
    x_NC = weights.embedding[tokens.ids].float() if hidden is None else hidden
    if isinstance(kernels, FusedKernels):
        eps, angles = shape.norm_eps, weights.angles
        if total is None:
            kernels.run_blocks(x_NC, weights.blocks, eps, angles, tokens, cache.layers)
            return x_NC
        for block, (keys, values) in zip(weights.blocks, cache.layers, strict=True):
            into = torch.zeros_like(x_NC)
            kernels.attention(x_NC, block, eps, angles, tokens, keys, values, into)
            x_NC += total(into)
            into.zero_()
            kernels.mlp(x_NC, block, eps, into)
            x_NC += total(into)
        return x_NC
    dtype = weights.embedding.dtype
    delta = None
    for block, (keys, values) in zip(weights.blocks, cache.layers, strict=True):
        h_NC = kernels.add_norm(x_NC, delta, block.attention_norm, shape.norm_eps, dtype)
        read = kernels.attend(kernels.linear(h_NC, block.qkv, dtype), weights.angles, tokens, keys, values)
        delta = kernels.linear(read, block.out, dtype)
        h_NC = kernels.add_norm(x_NC, total(delta) if total else delta, block.mlp_norm, shape.norm_eps, dtype)
        delta = kernels.linear(kernels.gate(kernels.linear(h_NC, block.gate_up, dtype)), block.down, dtype)
        delta = total(delta) if total else delta
    assert delta is not None, "a model without blocks"
    return x_NC.add_(delta)


def logits(
    weights: LlamaWeights,
    shape: LlamaShape,
    kernels: Kernels,
    hidden: Float[torch.Tensor, "N C"],
    wanted: Int64[torch.Tensor, " M"],
) -> Float[torch.Tensor, "M V"]:
    """float32 logits of the tokens after some of `forward`'s hidden states. Under bfloat16 they are sums of products of
    bfloat16 numbers, hidden states and weights, and not rounded: rounded they would be another distribution."""
    h_MC = kernels.add_norm(hidden[wanted], None, weights.norm, shape.norm_eps, weights.embedding.dtype)
    return kernels.linear(h_MC, weights.head, torch.float32)


def _placer(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> Callable[[str], torch.Tensor]:
    """name -> the tensor as the engine keeps it, never the caller's own memory; norms stay float32."""

    def place(name: str) -> torch.Tensor:
        tensor = tensors[name].detach()
        placed = tensor.to(device, torch.float32 if tensor.ndim == 1 else dtype, copy=True)
        if not all_finite(placed):
            raise WeightsError(f"{name} holds NaN or infinity")
        return placed

    return place


def _packer(
    shape: LlamaShape,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> Callable[[list[str], Packed | None], Packed]:
    """(names, old) -> the tensors of those names stacked and packed; those that are not there stay as in `old`. Packing
    is where they are rounded and seen to be finite."""
    shapes = tensor_shapes(shape)

    def pack(names: list[str], old: Packed | None) -> Packed:
        starts = itertools.accumulate((shapes[name][0] for name in names), initial=0)
        places = {start: name for start, name in zip(starts, names, strict=False) if name in tensors}
        parts = {start: tensors[name].detach().to(device) for start, name in places.items()}
        wide = names[0] in (_EMBEDDING, _HEAD)
        try:
            return kernels.pack(parts, dtype, old=None if len(parts) == len(names) else old, wide=wide)
        except NotFiniteError as error:
            raise WeightsError(f"{places[error.start]} holds NaN or infinity") from error

    return pack


def _name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"
