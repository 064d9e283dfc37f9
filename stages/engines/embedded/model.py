"""The forward pass of Llama and its relatives for decoding: fused projections, a paged key/value cache, no autograd.

The forward pass takes a flat list of tokens, each with its position and row: prompts, single new tokens and guesses
share a batch. The residual stream, the attention and the logits are float32 for any dtype of the weights. With bfloat16
weights, fused kernels round only the operands of the matrix products. Other kernels also round the results of the
products inside a block.

On a CPU a row's results have the same bits in any batch (see `kernels`). `FusedKernels` compute half a block or more in
one call. For other kernels this module combines the single operations.

Shape letters: N tokens, H query heads, K key/value heads, D head dimension, C hidden size, V vocabulary.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int64

from stages.engines.embedded.kernels.packed import NotFiniteError, Packed, all_finite
from stages.engines.embedded.kernels.protocol import Angles, Block, FusedKernels, Kernels, PagedCache, Tokens
from stages.engines.protocol import WeightsError
from stages.models.layers import rotary_frequencies
from stages.models.spec import (
    DOWN_PROJ,
    EMBEDDING,
    FINAL_NORM,
    GATE_PROJ,
    INPUT_NORM,
    K_BIAS,
    K_NORM,
    K_PROJ,
    LM_HEAD,
    O_PROJ,
    POST_ATTENTION_NORM,
    Q_BIAS,
    Q_NORM,
    Q_PROJ,
    UP_PROJ,
    V_BIAS,
    V_PROJ,
    ModelSpec,
    layer_shapes,
    layer_tensor,
    tensor_shapes,
)

_FUSED = {
    "qkv": (Q_PROJ, K_PROJ, V_PROJ),
    "out": (O_PROJ,),
    "gate_up": (GATE_PROJ, UP_PROJ),
    "down": (DOWN_PROJ,),
}
"""Field of `Block` -> the layer's matrices that are stacked in the field, in this order."""
_VECTORS = {
    "attention_norm": (INPUT_NORM,),
    "mlp_norm": (POST_ATTENTION_NORM,),
    "qkv_bias": (Q_BIAS, K_BIAS, V_BIAS),
    "q_norm": (Q_NORM,),
    "k_norm": (K_NORM,),
}
"""Field of `Block` -> the layer's vectors that are joined in the field, in this order. A model may lack the last three
fields."""


@dataclass(frozen=True)
class LlamaWeights:
    """The weights of a model, or of a rank's part of it, in the form that kernels use. A refit replaces the record,
    with one exception: `LocalRunner` on a CUDA device copies the new tensors into the old ones, between two batches."""

    embedding: Float[torch.Tensor, "V C"]
    blocks: tuple[Block, ...]
    norm: Float[torch.Tensor, " C"]
    head: Packed
    """The output layer, in the weights' dtype. It is packed with `wide` (see `Kernels.pack`), so the logits are not
    rounded."""
    angles: Angles


def build_weights(
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    max_seq: int,
    kernels: Kernels,
) -> LlamaWeights:
    """Return the weights of a model, made from a complete set of tensors whose names and shapes were checked. Raises
    WeightsError, naming the first tensor that is not finite."""
    place, pack = _placer(tensors, dtype, device), _packer(spec, tensors, dtype, device, kernels)
    angles = torch.arange(max_seq, dtype=torch.float32)[:, None] * rotary_frequencies(spec)
    vectors = _vectors(spec)

    def block(layer: int) -> Block:
        made: dict[str, Any] = {
            field: torch.cat([place(layer_tensor(layer, part)) for part in parts]) for field, parts in vectors.items()
        }
        for field, parts in _FUSED.items():
            made[field] = pack([layer_tensor(layer, part) for part in parts], None)
        return Block(**made)

    return LlamaWeights(
        embedding=place(EMBEDDING),
        blocks=tuple(map(block, range(spec.num_layers))),
        norm=place(FINAL_NORM),
        head=pack([spec.output_tensor], None),
        angles=Angles(cos=angles.cos().to(device), sin=angles.sin().to(device)),
    )


def refit_weights(
    spec: ModelSpec, old: LlamaWeights, tensors: Mapping[str, torch.Tensor], kernels: Kernels
) -> LlamaWeights:
    """Return a copy of `old` in which each of `tensors` replaces the old tensor of the same name. The caller has
    checked the names and shapes of `tensors`. The copy shares the unchanged fields with `old`, so only the changed
    fields need memory. Raises WeightsError, naming the first tensor that is not finite."""
    dtype, device = old.embedding.dtype, old.embedding.device
    place, pack = _placer(tensors, dtype, device), _packer(spec, tensors, dtype, device, kernels)
    vectors, sizes = _vectors(spec), {part: shape[0] for part, shape in layer_shapes(spec).items()}
    blocks = []
    for layer, block in enumerate(old.blocks):
        changed: dict[str, Any] = {}
        for field, parts in vectors.items():
            names = [layer_tensor(layer, part) for part in parts]
            if any(name in tensors for name in names):
                kept = getattr(block, field).split([sizes[part] for part in parts])
                both = zip(names, kept, strict=True)
                changed[field] = torch.cat([place(name) if name in tensors else part for name, part in both])
        for field, parts in _FUSED.items():
            names = [layer_tensor(layer, part) for part in parts]
            if any(name in tensors for name in names):
                changed[field] = pack(names, getattr(block, field))
        blocks.append(replace(block, **changed) if changed else block)
    new = replace(old, blocks=tuple(blocks))
    if EMBEDDING in tensors:
        new = replace(new, embedding=place(EMBEDDING))
    if FINAL_NORM in tensors:
        new = replace(new, norm=place(FINAL_NORM))
    if spec.output_tensor in tensors:
        new = replace(new, head=pack([spec.output_tensor], old.head))
    return new


def forward(
    weights: LlamaWeights,
    spec: ModelSpec,
    kernels: Kernels,
    tokens: Tokens,
    cache: PagedCache,
    hidden: Float[torch.Tensor, "N C"] | None = None,
    total: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> Float[torch.Tensor, "N C"]:
    """Return the hidden states after the last block, before the final norm, in float32. Also write the tokens' keys and
    values to the cache.

    Args:
        weights: weights of the model, or of this rank's part of it.
        spec: sizes of the model, or of this rank's part of it.
        kernels: the kernels to compute with.
        tokens: the batch.
        cache: keys and values of the rows.
        hidden: hidden states from the previous pipeline stage; they are overwritten. None: begin with the
            embeddings.
        total: all-reduce (sum) over the tensor-parallel ranks; None if there is only one.
    """
    x_NC = weights.embedding[tokens.ids].float() if hidden is None else hidden
    if isinstance(kernels, FusedKernels):
        eps, angles = spec.norm_eps, weights.angles
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
        h_NC = kernels.add_norm(x_NC, delta, block.attention_norm, spec.norm_eps, dtype)
        qkv = _add_bias_and_norm(kernels.linear(h_NC, block.qkv, dtype), block, spec)
        read = kernels.attend(qkv, weights.angles, tokens, keys, values)
        delta = kernels.linear(read, block.out, dtype)
        h_NC = kernels.add_norm(x_NC, total(delta) if total else delta, block.mlp_norm, spec.norm_eps, dtype)
        delta = kernels.linear(kernels.gate(kernels.linear(h_NC, block.gate_up, dtype)), block.down, dtype)
        delta = total(delta) if total else delta
    assert delta is not None, "a model without blocks"
    return x_NC.add_(delta)


def logits(
    weights: LlamaWeights,
    spec: ModelSpec,
    kernels: Kernels,
    hidden: Float[torch.Tensor, "N C"],
    wanted: Int64[torch.Tensor, " M"],
) -> Float[torch.Tensor, "M V"]:
    """Return the float32 logits of the next token after each wanted token. `wanted`: indices of these tokens in
    `hidden`, the result of `forward`. With bfloat16 weights the logits are sums of products of bfloat16 numbers. The
    sums are not rounded, since rounding would change the distribution."""
    h_MC = kernels.add_norm(hidden[wanted], None, weights.norm, spec.norm_eps, weights.embedding.dtype)
    return kernels.linear(h_MC, weights.head, torch.float32)


def _add_bias_and_norm(
    qkv: Float[torch.Tensor, "N (H+2K)*D"], block: Block, spec: ModelSpec
) -> Float[torch.Tensor, "N (H+2K)*D"]:
    """Return `qkv` with the block's biases added and its query and key heads normalised, if the block has biases or
    norms. Otherwise return `qkv` itself."""
    if block.qkv_bias is None and block.q_norm is None:
        return qkv
    whole = qkv.float() if block.qkv_bias is None else qkv.float() + block.qkv_bias
    if block.q_norm is not None:
        heads = whole.view(len(qkv), -1, spec.head_dim).split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        queries, keys = (
            F.rms_norm(part, (spec.head_dim,), norm, spec.norm_eps)
            for part, norm in zip(heads[:2], (block.q_norm, block.k_norm), strict=True)
        )
        whole = torch.cat([queries, keys, heads[2]], 1).flatten(1)
    return whole.to(qkv.dtype)


def _vectors(spec: ModelSpec) -> dict[str, tuple[str, ...]]:
    """Return the entries of `_VECTORS` that the model has."""
    shapes = layer_shapes(spec)
    return {field: parts for field, parts in _VECTORS.items() if parts[0] in shapes}


def _placer(
    tensors: Mapping[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> Callable[[str], torch.Tensor]:
    """Return a function that takes a tensor's name and returns a copy of the tensor on `device`. Matrices are converted
    to `dtype`, and norms and biases to float32. The function raises WeightsError if a number is not finite."""

    def place(name: str) -> torch.Tensor:
        tensor = tensors[name].detach()
        placed = tensor.to(device, torch.float32 if tensor.ndim == 1 else dtype, copy=True)
        if not all_finite(placed):
            raise WeightsError(f"{name} holds NaN or infinity")
        return placed

    return place


def _packer(
    spec: ModelSpec,
    tensors: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
    device: torch.device,
    kernels: Kernels,
) -> Callable[[list[str], Packed | None], Packed]:
    """Return a function that takes names of tensors and the old packed weight, and returns the stacked tensors as a new
    packed weight. Tensors that are not in `tensors` are copied from the old weight. The function raises WeightsError if
    a number is not finite after rounding."""
    shapes = tensor_shapes(spec)

    def pack(names: list[str], old: Packed | None) -> Packed:
        starts = itertools.accumulate((shapes[name][0] for name in names), initial=0)
        places = {start: name for start, name in zip(starts, names, strict=False) if name in tensors}
        parts = {start: tensors[name].detach().to(device) for start, name in places.items()}
        wide = names[0] in (EMBEDDING, LM_HEAD)
        try:
            return kernels.pack(parts, dtype, old=None if len(parts) == len(names) else old, wide=wide)
        except NotFiniteError as error:
            raise WeightsError(f"{places[error.start]} holds NaN or infinity") from error

    return pack
