"""Convert between Hugging Face's and Megatron's models: configuration, tensor names, and tensor-parallel parts.

Megatron fuses tensors that Hugging Face keeps separate. Its `linear_qkv` holds, for each group of queries that share a
key, the group's queries, the key and the value. Its `linear_fc1` holds, on each tensor-parallel rank, the rank's part
of gate and then the rank's part of up. The B of an adapter has the rows of the fused weight. The A of an adapter stacks
the A matrices that Hugging Face keeps for the separate tensors.

Sizes that do not divide over the ranks are padded with zeros (see `spec.padded`). Hugging Face tensors have no padding.
*Blocks* are numbered like Hugging Face's layers, from 0 at the bottom of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.models.spec import (
    DOWN_PROJ,
    EMBEDDING,
    FINAL_NORM,
    GATE_PROJ,
    INPUT_NORM,
    K_BIAS,
    K_NORM,
    K_PROJ,
    O_PROJ,
    POST_ATTENTION_NORM,
    Q_BIAS,
    Q_NORM,
    Q_PROJ,
    UP_PROJ,
    V_BIAS,
    V_PROJ,
    VALUE_HEAD_BIAS,
    VALUE_HEAD_WEIGHT,
    ModelSpec,
    layer_shapes,
    layer_tensor,
    padded,
)

Gather = Callable[[Tensor], list[Tensor]]
"""A function that gets this rank's part of a tensor and returns the parts of all tensor-parallel ranks, in rank
order."""

_QKV = {
    "self_attention.linear_qkv.weight": (Q_PROJ, K_PROJ, V_PROJ),
    "self_attention.linear_qkv.bias": (Q_BIAS, K_BIAS, V_BIAS),
}
"""Megatron's name -> Hugging Face's projections. Each query group of `linear_qkv` has the rows of these projections in
this order."""
PARTS = {
    "self_attention.linear_qkv.weight": _QKV["self_attention.linear_qkv.weight"],
    "self_attention.linear_proj.weight": (O_PROJ,),
    "mlp.linear_fc1.weight": (GATE_PROJ, UP_PROJ),
    "mlp.linear_fc2.weight": (DOWN_PROJ,),
}
"""Megatron's name of a linear's weight -> the parts of a layer (by Hugging Face's names) that the weight holds, in this
order."""
_NORMS = {
    "input_layernorm.weight": INPUT_NORM,
    "self_attention.q_layernorm.weight": Q_NORM,
    "self_attention.k_layernorm.weight": K_NORM,
    "pre_mlp_layernorm.weight": POST_ATTENTION_NORM,
}
"""Megatron's name of a norm's weight -> Hugging Face's name of the norm within a layer. Every tensor-parallel rank has
the whole norm."""


def transformer_kwargs(spec: ModelSpec) -> dict[str, Any]:
    """Return the settings of Megatron's TransformerConfig that follow from the architecture. The number of layers is
    left out, since a model may have only some of the blocks. `kernels/fused.py` says why most of Megatron's fusions are
    off."""
    return {
        "hidden_size": spec.hidden_size,
        "ffn_hidden_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_query_groups": spec.num_kv_heads,
        "kv_channels": spec.head_dim,
        "normalization": "RMSNorm",
        "layernorm_epsilon": spec.norm_eps,
        "activation_func": F.silu,
        "gated_linear_unit": True,
        "use_te_activation_func": True,  # not Transformer Engine's: layers.block_spec sets it
        "add_bias_linear": False,
        "add_qkv_bias": spec.qkv_bias,
        "qk_layernorm": spec.qk_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "cross_entropy_loss_fusion": False,
    }


def named_by_block(model: GPTModel, first_block: int) -> Iterator[tuple[str, int | None, torch.nn.Parameter]]:
    """Yield (name within its block or model, block, parameter) for every parameter of a pipeline stage. The block is
    None for parameters outside the blocks. `first_block`: index, in the whole model, of the first stage's lowest
    block."""
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
    "self_attention.linear_qkv.bias": 0,
    "self_attention.linear_proj.weight": 1,
    "mlp.linear_fc1.weight": 0,
    "mlp.linear_fc2.weight": 1,
    "self_attention.linear_qkv.lora.B": 0,
    "self_attention.linear_proj.lora.A": 1,
    "mlp.linear_fc1.lora.B": 0,
    "mlp.linear_fc2.lora.A": 1,
}
"""Megatron's name of a parameter -> axis along which tensor parallelism cuts it. Other parameters are whole on each
rank."""


def adapted_weight(name: str) -> tuple[str, str]:
    """Return (name of the weight that an adapter's A or B belongs to, suffix ".lora_A" or ".lora_B"). The adapter's
    Hugging Face names have this suffix after the projection's name. For names of other parameters return (name, "")."""
    linear, separator, side = name.partition(".lora.")
    return (f"{linear}.weight", f".lora_{side}") if separator else (name, "")


def from_hf(
    name: str, block: int | None, tensors: Mapping[str, Tensor], spec: ModelSpec, tp_rank: int, tp_size: int
) -> Tensor:
    """Return this tensor-parallel rank's part of a Megatron parameter, cut from whole Hugging Face tensors. Raises
    KeyError with the Hugging Face name of a missing tensor."""
    wide = padded(spec, tp_size)
    more_neurons = wide.intermediate_size - spec.intermediate_size
    weight, suffix = adapted_weight(name)

    def cut(tensor: Tensor, axis: int, zeros: int) -> Tensor:
        return _with_zeros(tensor, axis, zeros).chunk(tp_size, axis)[tp_rank]

    def of_block(part: str) -> Tensor:
        assert block is not None
        return tensors[layer_tensor(block, part + suffix)]

    if suffix and name not in SPLIT_AXES:
        return torch.cat([of_block(part) for part in PARTS[weight]])
    match weight:
        case "embedding.word_embeddings.weight":
            return cut(tensors[EMBEDDING], 0, wide.vocab_size - spec.vocab_size)
        case "decoder.final_layernorm.weight":
            return tensors[FINAL_NORM]
        case "output_layer.weight":
            return cut(tensors[spec.output_tensor], 0, wide.vocab_size - spec.vocab_size)
        case _ if weight in _NORMS:
            return of_block(_NORMS[weight])
        case _ if weight in _QKV:
            groups = [of_block(part).unflatten(0, (spec.num_kv_heads, -1)) for part in _QKV[weight]]
            fused = _with_zeros(torch.cat(groups, 1), 0, wide.num_kv_heads - spec.num_kv_heads)
            return cut(fused.flatten(0, 1), 0, 0)
        case "self_attention.linear_proj.weight":
            return cut(of_block(O_PROJ), 1, wide.q_size - spec.q_size)
        case "mlp.linear_fc1.weight":
            return torch.cat([cut(of_block(part), 0, more_neurons) for part in (GATE_PROJ, UP_PROJ)])
        case "mlp.linear_fc2.weight":
            return cut(of_block(DOWN_PROJ), 1, more_neurons)
        case _:
            raise KeyError(f"Megatron's {name} has no counterpart among Hugging Face's tensors")


def part_of_rows(name: str, spec: ModelSpec, tp_rank: int, tp_size: int) -> Tensor:
    """Return one index per row of a fused weight on this tensor-parallel rank: int64 [rows]. The index says which
    Hugging Face weight in `PARTS[name]` the row belongs to. For example, in `linear_qkv` 0 stands for queries, 1 for
    keys and 2 for values. `name`: Megatron's name of the weight."""
    shapes = layer_shapes(spec)
    numbers = {
        layer_tensor(0, part): torch.full((shapes[part][0], 1), number, dtype=torch.int64)
        for number, part in enumerate(PARTS[name])
    }
    return from_hf(name, 0, numbers, spec, tp_rank, tp_size)[:, 0]


@dataclass(frozen=True)
class HFPart:
    """This tensor-parallel rank's part of a Hugging Face tensor: a view of a Megatron parameter."""

    name: str
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: Tensor
    """A view of a Megatron parameter. Its axes are usually the axes of the Hugging Face tensor. But if it holds
    queries, keys or values, and `spans` is empty, two axes, [query groups, rows of a group], take the place of the
    first axis."""
    axis: int | None
    """Axis of `tensor` along which the ranks' parts lie; None: each rank has the whole tensor."""
    size: int
    """Length of `axis` in the whole tensor. Rows or columns of the ranks' parts beyond this length are padding."""
    spans: tuple[tuple[int, int], ...] = ()
    """(Index of the first element along `axis` in the whole tensor, number of elements) of each rank's part, if the
    parts differ in length. Empty if the parts of all ranks are as long as `tensor`. The last elements of a part may
    then be padding."""

    def gather_tensor(self, gather: Gather) -> Tensor:
        """Return the whole tensor, joined from the parts of all tensor-parallel ranks. It is a view of the parameter if
        possible. Call this only if `spans` is empty: then all parts have the same length. For other parts use `to_hf`.
        """
        assert not self.spans
        if self.axis is None:
            return self.tensor
        return _join(gather(self.tensor), self.axis).narrow(self.axis, 0, self.size).reshape(self.shape)

    def local_part(self, tp_rank: int) -> tuple[int, Tensor]:
        """Return (index of this rank's first element along `axis` in the whole tensor, this rank's part without
        padding)."""
        if self.axis is None:
            return 0, self.tensor
        first, length = self.span(tp_rank)
        return first, self.tensor.narrow(self.axis, 0, length)

    def span(self, tp_rank: int) -> tuple[int, int]:
        """Return (index of a rank's first element along `axis` in the whole tensor, number of the rank's elements along
        `axis`). Padding does not count."""
        if self.spans:
            return self.spans[tp_rank]
        length = self.tensor.shape[self.axis or 0]
        first = min(tp_rank * length, self.size)
        return first, min(length, self.size - first)


def hf_parts(name: str, block: int | None, parameter: Tensor, spec: ModelSpec, tp_rank: int) -> Iterator[HFPart]:
    """Yield the parts of Hugging Face tensors that `parameter` contains. `parameter` is a Megatron parameter on
    tensor-parallel rank `tp_rank`."""
    weight, suffix = adapted_weight(name)

    def of_block(part: str) -> str:
        assert block is not None
        return layer_tensor(block, part + suffix)

    def same(of_hf: str, tensor: Tensor) -> HFPart:
        return HFPart(of_hf, tuple(tensor.shape), tensor, None, 0)

    def cut(of_hf: str, tensor: Tensor, axis: int, size: int) -> HFPart:
        shape = (*tensor.shape[:axis], size, *tensor.shape[axis + 1 :])
        return HFPart(of_hf, shape, tensor, axis, size)

    if suffix and name not in SPLIT_AXES:
        parts = PARTS[weight]
        yield from map(same, map(of_block, parts), parameter.chunk(len(parts)))
        return
    match weight:
        case "embedding.word_embeddings.weight":
            yield cut(EMBEDDING, parameter, 0, spec.vocab_size)
        case "decoder.final_layernorm.weight":
            yield same(FINAL_NORM, parameter)
        case "output_layer.weight" if parameter.shape[0] == 1:
            yield same(VALUE_HEAD_WEIGHT, parameter)
        case "output_layer.bias":
            yield same(VALUE_HEAD_BIAS, parameter)
        case "output_layer.weight":
            yield cut(spec.output_tensor, parameter, 0, spec.vocab_size)
        case _ if weight in _NORMS:
            yield same(of_block(_NORMS[weight]), parameter)
        case _ if weight in _QKV:
            queries = spec.num_heads // spec.num_kv_heads * spec.head_dim
            rows = [queries, spec.head_dim, spec.head_dim]
            if parameter.shape[0] % sum(rows):
                yield from _parts_of_a_group([*map(of_block, _QKV[weight])], rows, parameter, spec, tp_rank)
                return
            groups = parameter.unflatten(0, (-1, sum(rows)))
            for projection, number, part in zip(_QKV[weight], rows, groups.split(rows, 1), strict=True):
                shape = (spec.num_kv_heads * number, *part.shape[2:])
                yield HFPart(of_block(projection), shape, part, 0, spec.num_kv_heads)
        case "self_attention.linear_proj.weight":
            yield cut(of_block(O_PROJ), parameter, 1, spec.q_size)
        case "mlp.linear_fc1.weight":
            for projection, half in zip((GATE_PROJ, UP_PROJ), parameter.chunk(2), strict=True):
                yield cut(of_block(projection), half, 0, spec.intermediate_size)
        case "mlp.linear_fc2.weight":
            yield cut(of_block(DOWN_PROJ), parameter, 1, spec.intermediate_size)
        case _:
            raise KeyError(f"Megatron's {name} has no counterpart among Hugging Face's tensors")


def to_hf(
    name: str, block: int | None, parameter: Tensor, spec: ModelSpec, gather: Gather
) -> Iterator[tuple[str, Tensor]]:
    """Gather a Megatron parameter from all tensor-parallel ranks, and yield (name, tensor) for each whole Hugging Face
    tensor that is fused into it. `parameter`: this rank's part. The tensors are views of the parameter if possible."""
    if adapted_weight(name)[0] in _QKV and name in SPLIT_AXES:  # parts may differ in length: the fused weight's do not
        parameter = _join(gather(parameter), 0)
        yield from (
            (part.name, part.gather_tensor(lambda own: [own])) for part in hf_parts(name, block, parameter, spec, 0)
        )
        return
    yield from ((part.name, part.gather_tensor(gather)) for part in hf_parts(name, block, parameter, spec, 0))


def _parts_of_a_group(
    names: Sequence[str], rows: Sequence[int], parameter: Tensor, spec: ModelSpec, tp_rank: int
) -> Iterator[HFPart]:
    """Yield the parts of queries, keys and values on a rank that holds some rows of one group, because there are more
    ranks than groups. `rows`: numbers of rows of a group's queries, of its key and of its value."""
    length, of_group = parameter.shape[0], sum(rows)
    num_ranks = spec.num_kv_heads * of_group // length
    offset = 0
    for name, number in zip(names, rows, strict=True):
        spans = []
        for rank in range(num_ranks):
            group, first = divmod(rank * length, of_group)
            low, high = (min(max(edge - offset, 0), number) for edge in (first, first + length))
            spans.append((group * number + low, high - low))
        start = offset - tp_rank * length % of_group
        own = parameter[max(start, 0) : max(start + number, 0)]
        shape = (spec.num_kv_heads * number, *parameter.shape[1:])
        yield HFPart(name, shape, own, 0, shape[0], tuple(spans))
        offset += number


def _with_zeros(tensor: Tensor, axis: int, count: int) -> Tensor:
    """Return the tensor with `count` zeros appended along an axis."""
    if count == 0:
        return tensor
    shape = [*tensor.shape]
    shape[axis] = count
    return torch.cat([tensor, tensor.new_zeros(shape)], axis)


def _join(parts: Sequence[Tensor], axis: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), axis)
