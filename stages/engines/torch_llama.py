"""Llama's forward pass for decoding, in plain torch: fused projections, a key/value cache, no autograd.

The forward works on a flat list of tokens, each with its position; which earlier tokens a token attends to is the
business of the `Attention` function that is passed in: `decode_attention` (one new token per row of the cache) or
`prefill_attention` (whole prompts). The residual stream, the attention and the logits are float32 whatever the dtype
of the weights: with bfloat16 weights the products of the linear layers are the only roundings.

On a CPU every row's numbers are the same bits in any batch, in any slot and with any number of threads: linear layers
by `packed`, attention as a batched product whose shape depends on the row alone.

Shape letters: N tokens, H query heads, K key/value heads, D head dimension, C hidden size, V vocabulary.
May import torch, stages.engines.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64

from stages.engines.kv_cache import KVCache, round_up
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

Attention = Callable[
    [int, Float[torch.Tensor, "N H D"], Float[torch.Tensor, "N K D"], Float[torch.Tensor, "N K D"]],
    Float[torch.Tensor, "N H*D"],
]
"""(layer, queries, keys, values) of the new tokens -> what each token read."""


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
    cos: Float[torch.Tensor, "positions 1 1 D//2"]
    sin: Float[torch.Tensor, "positions 1 2 D//2"]
    """The first of the two halves negated: see `_rotate`."""


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
        elif not bool(torch.isfinite(tensor).all()):
            raise WeightsError(f"{name} holds NaN or infinity")
    missing = [name for name in expected if name not in tensors]
    if complete and missing:
        raise WeightsError(f"{missing[0]} is missing (and {len(missing) - 1} more)")


def build_weights(
    shape: LlamaShape, tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device, max_seq: int
) -> LlamaWeights:
    """The model from a complete, checked set of tensors."""
    place = _placer(tensors, dtype, device)
    exponents = torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim
    angles = torch.arange(round_up(max_seq), dtype=torch.float32)[:, None] * (1.0 / shape.theta**exponents)
    sin = angles.sin()
    return LlamaWeights(
        embedding=place(_EMBEDDING),
        blocks=tuple(
            Block(
                **{field: place(_name(layer, part)) for field, part in _NORMS.items()},
                **{
                    field: pack(torch.cat([place(_name(layer, part)) for part in parts]))
                    for field, parts in _FUSED.items()
                },
            )
            for layer in range(shape.num_layers)
        ),
        norm=place(_FINAL_NORM),
        head=_pack_head(tensors[_EMBEDDING if shape.tied else _HEAD], dtype, device),
        cos=angles.cos()[:, None, None].to(device),
        sin=torch.stack([-sin, sin], dim=1)[:, None].to(device),
    )


def refit_weights(shape: LlamaShape, old: LlamaWeights, tensors: Mapping[str, torch.Tensor]) -> LlamaWeights:
    """`old` with some (checked) tensors replaced; everything else is shared. Costs the memory of what is replaced."""
    place = _placer(tensors, old.embedding.dtype, old.embedding.device)
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
                torch.cat([place(n) if stacked is None or n in tensors else stacked[i] for i, n in enumerate(names)])
            )
        blocks.append(replace(block, **changed) if changed else block)
    new = replace(old, blocks=tuple(blocks))
    if _EMBEDDING in tensors:
        new = replace(new, embedding=place(_EMBEDDING))
    if _FINAL_NORM in tensors:
        new = replace(new, norm=place(_FINAL_NORM))
    head = _EMBEDDING if shape.tied else _HEAD
    if head in tensors:
        new = replace(new, head=_pack_head(tensors[head], old.embedding.dtype, old.embedding.device))
    return new


def forward(
    weights: LlamaWeights,
    shape: LlamaShape,
    tokens: Int64[torch.Tensor, " N"],
    positions: Int64[torch.Tensor, " N"],
    attention: Attention,
) -> Float[torch.Tensor, "N C"]:
    """Hidden states after the last block, before the final norm; float32."""
    dtype = weights.embedding.dtype
    x_NC = weights.embedding[tokens].float()
    cos, sin = weights.cos[positions], weights.sin[positions]
    heads, rotated = shape.num_heads, shape.num_heads + shape.num_kv_heads
    num = tokens.shape[0]
    for layer, block in enumerate(weights.blocks):
        h_NC = _norm(x_NC, block.attention_norm, shape.norm_eps).to(dtype)
        qkv = linear(h_NC, block.qkv).to(ATTENTION_DTYPE).view(num, rotated + shape.num_kv_heads, shape.head_dim)
        qk = _rotate(qkv[:, :rotated], cos, sin)
        read = attention(layer, qk[:, :heads], qk[:, heads:], qkv[:, rotated:])
        x_NC.add_(linear(read.to(dtype), block.out))
        h_NC = _norm(x_NC, block.mlp_norm, shape.norm_eps).to(dtype)
        gate, up = linear(h_NC, block.gate_up).chunk(2, dim=-1)
        x_NC.add_(linear(F.silu(gate).mul_(up), block.down))
    return x_NC


def logits(weights: LlamaWeights, shape: LlamaShape, hidden: Float[torch.Tensor, "N C"]) -> Float[torch.Tensor, "N V"]:
    """float32 logits of the tokens after `forward`'s hidden states."""
    return linear(_norm(hidden, weights.norm, shape.norm_eps), weights.head)


def decode_attention(cache: KVCache, shape: LlamaShape, positions: Int64[torch.Tensor, " N"], span: int) -> Attention:
    """Token i belongs to slot i, at positions[i]: writes it, and reads positions 0..positions[i]. `span` covers the
    largest position."""
    num = positions.shape[0]
    index = cache.index(torch.arange(num, device=positions.device), positions)
    hidden = torch.arange(span, device=positions.device) > positions[:, None]
    mask = torch.zeros(num, 1, 1, span, dtype=ATTENTION_DTYPE, device=positions.device)
    mask.masked_fill_(hidden[:, None, None], float("-inf"))
    mask = mask.expand(num, shape.num_kv_heads, 1, span).reshape(-1, 1, span)

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache.write(layer, index, keys, values)
        all_keys, all_values = cache.read(layer, num, span)
        grouped = queries.reshape(num * shape.num_kv_heads, -1, shape.head_dim)
        return _attend(grouped, all_keys, all_values, mask).view(num, -1)

    return attend


def prefill_attention(cache: KVCache, shape: LlamaShape, slots: list[int], lengths: list[int]) -> Attention:
    """The tokens are whole prompts one after another: writes them to their slots, and reads causally within each.
    Prompts of equal length that are neighbours are attended to in one product."""
    device = cache.device
    token_slots = torch.repeat_interleave(torch.tensor(slots), torch.tensor(lengths)).to(device)
    token_positions = torch.cat([torch.arange(n) for n in lengths]).to(device)
    index = cache.index(token_slots, token_positions)
    kv_heads, head_dim = shape.num_kv_heads, shape.head_dim
    group = shape.num_heads // kv_heads
    runs = [(length, count, _causal_mask(length, group, device)) for length, count in _runs(lengths)]

    def attend(layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        cache.write(layer, index, keys, values)
        read = torch.empty_like(queries)
        start = 0
        for length, count, mask in runs:
            part = slice(start, start + length * count)
            start = part.stop
            q = queries[part].reshape(count, length, kv_heads, group, head_dim).permute(0, 2, 3, 1, 4)
            k, v = (
                t[part].reshape(count, length, kv_heads, head_dim).transpose(1, 2).reshape(-1, length, head_dim)
                for t in (keys, values)
            )
            out = _attend(q.reshape(-1, group * length, head_dim), k, v, mask)
            out = out.view(count, kv_heads, group, length, head_dim).permute(0, 3, 1, 2, 4)
            read[part] = out.reshape(-1, shape.num_heads, head_dim)
        return read.view(read.shape[0], -1)

    return attend


def _attend(
    queries: Float[torch.Tensor, "B Q D"],
    keys: Float[torch.Tensor, "B T D"],
    values: Float[torch.Tensor, "B T D"],
    mask: Float[torch.Tensor, "*B Q T"],
) -> Float[torch.Tensor, "B Q D"]:
    """softmax(Q K^T / sqrt(D) + mask) V. As two batched products, not as `scaled_dot_product_attention`: that one's
    result depends on the number of threads on a CPU."""
    scores = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=queries.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), values)


def _causal_mask(length: int, group: int, device: torch.device) -> Float[torch.Tensor, "Q T"]:
    """0 where a query may look, -inf where not; for the `group` query heads of a key head, one after another."""
    later = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
    return (
        torch.zeros(length, length, dtype=ATTENTION_DTYPE, device=device)
        .masked_fill_(later, float("-inf"))
        .repeat(group, 1)
    )


def _runs(lengths: list[int]) -> list[tuple[int, int]]:
    """[4, 4, 7] -> [(4, 2), (7, 1)]."""
    return [(length, len(list(same))) for length, same in itertools.groupby(lengths)]


def _norm(x: Float[torch.Tensor, "N C"], weight: Float[torch.Tensor, " C"], eps: float) -> Float[torch.Tensor, "N C"]:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _rotate(
    x: Float[torch.Tensor, "N heads D"], cos: torch.Tensor, sin: torch.Tensor
) -> Float[torch.Tensor, "N heads D"]:
    """Rotary embedding with the halves of a head as the pairs' coordinates (Hugging Face's order of rows):
    (a, b) -> (a cos - b sin, b cos + a sin)."""
    halves = x.view(x.shape[0], x.shape[1], 2, -1)
    return torch.addcmul(halves * cos, halves.flip(2), sin).view(x.shape)


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


def _part_shapes(shape: LlamaShape, parts: tuple[str, ...]) -> list[tuple[int, ...]]:
    shapes = tensor_shapes(shape)
    return [shapes[_name(0, part)] for part in parts]


def _name(layer: int, part: str) -> str:
    return f"model.layers.{layer}.{part}.weight"
