"""Where each tensor that a rank trains lies in the whole model, in any layout, as Megatron's ShardedTensors.

    weights.blocks.3.self_attention.linear_qkv.weight       what the layers multiply with
    masters.…                                               the float32 copy that AdamW updates, of weights that are not
    exp_avg.…, exp_avg_sq.…                                 its moments

What is frozen is not among them: it comes from `model.path`.
A block has its number in the whole model, so that pipeline stages do not show. Tensor parallelism cuts a tensor into
rectangles; the two halves of `linear_fc1`, gate and up, are cut separately and have names of their own. The distributed
optimizer gives a data-parallel rank a run of a parameter's elements, which is up to three rectangles: the end of a row,
whole rows, the beginning of a row. (Megatron's own formats of its state gather each parameter on one rank before it is
saved, or load in the same layout only.)

May import torch, megatron.core and this folder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import DistributedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

from stages.models.build import Blueprint
from stages.models.hf_conversion import SPLIT_AXES, named_by_block
from stages.models.spec import ModelSpec

MOMENTS = ("exp_avg", "exp_avg_sq")
_OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_GATE_AND_UP = "mlp.linear_fc1."


@dataclass(frozen=True)
class Master:
    """What AdamW updates of a parameter on this rank: the parameter itself, its float32 copy, or a run of either's
    elements."""

    parameter: Parameter
    tensor: Tensor
    """The optimizer's own object: the key of its state."""
    start: int
    """Of the run, among the parameter's elements in C order."""


@dataclass(frozen=True)
class Piece:
    """Some rows of this rank's part of a parameter, and where they lie in the whole model's tensor."""

    key: str
    first_row: int
    num_rows: int
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """In the whole tensor, of the first of the rows."""
    num_columns: int
    """Of each row, from its first on."""


def masters_of(optimizer: MegatronOptimizer) -> Iterator[Master]:
    """What one of Megatron's optimizers (not a chain of them) updates on this rank."""
    if isinstance(optimizer, DistributedOptimizer):
        models = [*optimizer.model_float16_groups, *optimizer.model_fp32_groups]
        shards = [*optimizer.shard_fp32_from_float16_groups, *optimizer.shard_fp32_groups]
        for parameters, tensors in zip(models, shards, strict=True):
            for parameter, tensor in zip(parameters, tensors, strict=True):
                held = optimizer._get_model_param_range_map(parameter)["param"]
                yield Master(parameter, tensor, held.start)
        return
    copies: dict[Tensor, Parameter] = {}
    if isinstance(optimizer, Float16OptimizerWithFloat16Params):
        for parameters, tensors in zip(optimizer.float16_groups, optimizer.fp32_from_float16_groups, strict=True):
            copies |= dict(zip(tensors, parameters, strict=True))
    for tensor in optimizer.get_parameters():
        yield Master(copies.get(tensor, tensor), tensor, 0)


def sharded_state(model: GPTModel, optimizer: MegatronOptimizer, blueprint: Blueprint) -> list[ShardedTensor]:
    """Everything tensor-shaped that a checkpoint of a model holds of this rank, as views: weights, masters, and moments
    where the optimizer has any. What several ranks hold alike is marked on one of them as the one to be written, in
    turn, so that each writes its share."""
    rank = blueprint.parallel_rank
    named = {p: (i, name, block) for i, (name, block, p) in enumerate(_named(model, blueprint))}
    shards: list[ShardedTensor] = []

    def add(kind: str, parameter: Parameter, tensor: Tensor, start: int, *, is_run: bool) -> None:
        number, name, block = named[parameter]
        data_rank, data_size = (0, 1) if is_run else (rank.data_rank, rank.data_size)
        tensor_rank, tensor_size = (rank.tensor_rank, rank.tensor_size) if _axis(name, parameter) is None else (0, 1)
        replica = tensor_rank * data_size + data_rank
        written_here = number % (tensor_size * data_size) == replica and not getattr(parameter, "shared", False)
        for piece in pieces_of(name, block, parameter, blueprint):
            shards.extend(_cut(kind, piece, parameter, tensor.detach(), start, 0 if written_here else 1))

    for parameter in named:
        add("weights", parameter, parameter, 0, is_run=False)
    state = torch_optimizer(optimizer).state
    is_run = isinstance(optimizer, DistributedOptimizer)
    for master in masters_of(optimizer):
        if master.parameter.dtype is not torch.float32:
            add("masters", master.parameter, master.tensor, master.start, is_run=is_run)
        for moment in MOMENTS if master.tensor in state else ():
            add(moment, master.parameter, state[master.tensor][moment], master.start, is_run=is_run)
    return shards


def torch_optimizer(optimizer: MegatronOptimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside one of Megatron's."""
    inner: torch.optim.Optimizer = optimizer.optimizer
    return inner


def pieces_of(name: str, block: int | None, parameter: Tensor, blueprint: Blueprint) -> Iterator[Piece]:
    """A parameter's rows by where they lie. What fills tensor-parallel parts up to equal sizes (`padding`) lies past
    the whole tensor's end, and is nowhere."""
    rank, axis, shape = blueprint.parallel_rank, _axis(name, parameter), tuple(parameter.shape)
    key = name if block is None else f"blocks.{block}.{name}"
    halves = ("gate", "up") if name.startswith(_GATE_AND_UP) else ("",)
    rows = shape[0] // len(halves)
    for i, half in enumerate(halves):
        whole, offset = [rows, *shape[1:]], [0] * len(shape)
        if axis is not None:
            whole[axis] *= rank.tensor_size
            offset[axis] = (rows, *shape[1:])[axis] * rank.tensor_rank
        if axis is not None:
            whole[axis] = min(whole[axis], _unpadded(name, blueprint.spec))
        kept = [max(0, min(size, end - at)) for size, end, at in zip((rows, *shape[1:]), whole, offset, strict=True)]
        named = f"{key}.{half}" if half else key
        yield Piece(named, i * rows, kept[0], tuple(whole), tuple(offset), math.prod(kept[1:]))


def _unpadded(name: str, spec: ModelSpec) -> int:
    """Length of the axis that tensor parallelism cuts, without padding; of gate and up, each."""
    if name in _OF_VOCABULARY:
        return spec.vocab_size
    if name.startswith("mlp."):
        return spec.intermediate_size
    return spec.q_size if name.startswith("self_attention.linear_proj.") else spec.q_size + 2 * spec.kv_size


def rectangles(start: int, end: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """(first row, first column, rows, columns) of the rectangles that make up elements [start, end) of a matrix in C
    order, in their order."""
    row, column = divmod(start, columns)
    if column and start < end:
        until = min(end, (row + 1) * columns)
        yield row, column, 1, until - start
        start, row = until, row + 1
    whole = (end - start) // columns
    if whole > 0:
        yield row, 0, whole, columns
        start, row = start + whole * columns, row + whole
    if start < end:
        yield row, 0, 1, end - start


def _named(model: GPTModel, blueprint: Blueprint) -> Iterator[tuple[str, int | None, Parameter]]:
    """The trained parameters; the last stage's copy of a tied embedding has the embedding's name."""
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if not parameter.requires_grad:
            continue
        yield (_OF_VOCABULARY[0] if getattr(parameter, "shared", False) else name), block, parameter


def _axis(name: str, parameter: Tensor) -> int | None:
    """The axis that tensor parallelism cuts; none of a critic's head."""
    is_head = name.startswith("output_layer.") and parameter.shape[0] == 1
    return None if is_head else SPLIT_AXES.get(name)


def _cut(
    kind: str, piece: Piece, parameter: Tensor, tensor: Tensor, start: int, replica: int
) -> Iterator[ShardedTensor]:
    """What elements [start, start + size) of a parameter have in common with a piece of it."""
    columns, flat = parameter.numel() // parameter.shape[0], tensor.view(-1)
    first = max(start, piece.first_row * columns)
    last = min(start + flat.numel(), (piece.first_row + piece.num_rows) * columns)
    for row, column, height, width in rectangles(first, last, columns):
        begin, kept = row * columns + column - start, min(width, piece.num_columns - column)
        if kept <= 0:
            continue
        corner, shape = (row - piece.first_row, column), (height, kept)
        axes = len(piece.global_shape)
        yield ShardedTensor(
            key=f"{kind}.{piece.key}",
            data=flat[begin : begin + height * width].view(height, width)[:, :kept].view(shape[:axes]),
            dtype=tensor.dtype,
            local_shape=shape[:axes],
            global_shape=piece.global_shape,
            global_offset=tuple(o + c for o, c in zip(piece.offset, corner, strict=False)),
            axis_fragmentations=None,
            replica_id=replica,
        )
