"""Write and read a checkpoint's files in the format of Megatron's dist_checkpointing. The files load in any layout.

    snapshot            on every rank, between updates: copies this rank's part in memory
    write_snapshot      in any thread: writes the copy to files, over a process group that is used for nothing else
    read_state          on every rank: reads its own part into its tensors, whatever layout wrote the files

Megatron's own asynchronous save forks processes, which a worker with CUDA and threads must not do.

The second part of this module maps each trained tensor of a rank to its position in the whole model, as Megatron's
ShardedTensors:

    weights.blocks.3.self_attention.linear_qkv.weight       the weights that the layers multiply with
    masters.…                                               the optimizer's float32 copies of 16-bit weights
    exp_avg.…, exp_avg_sq.…                                 AdamW's moments
    momentum_buffer.…                                       Muon's moment
    row_var.…, col_var.…, variance.…                        Adafactor's moments: of rows, of columns, of vectors

Frozen weights are not saved, since they are read from `model.path`. Blocks are numbered in the whole model, whatever
the pipeline stages. Tensor parallelism cuts a tensor into rectangles. The two halves of `linear_fc1`, gate and up, are
cut separately and have names of their own. The distributed optimizer gives a data-parallel rank consecutive elements of
a parameter. These elements form up to three rectangles: the end of a row, whole rows, the beginning of a row.
(Megatron's own formats gather each parameter on one rank before it is saved, or load in the same layout only.)
"""

from __future__ import annotations

import dataclasses
import io
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreLoadPlanner,
    MCoreSavePlanner,
    mcore_to_pyt_state_dict,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import DistributedOptimizer, Float16OptimizerWithFloat16Params, MegatronOptimizer
from torch import Tensor
from torch.nn import Parameter

from stages.models import checkpoint_metadata
from stages.models import weights as gather
from stages.models.build import Blueprint
from stages.models.checkpoint_metadata import COMMON, MetadataReader
from stages.models.hf_conversion import SPLIT_AXES, named_by_block
from stages.models.protocol import StateError
from stages.models.spec import ModelSpec
from storage.checkpoints import FileSum, sum_file
from storage.errors import StoreError
from storage.files import REFUSING, refusal, retried

_FORMAT = CheckpointingConfig("torch_dist", 1)
_COMMON_KEYS = {"architecture", "version", "adam_steps", "skipped_in_a_row", "loss_scale"}


@dataclass(frozen=True)
class Snapshot:
    """A copy of the state that a rank writes."""

    tensors: Mapping[str, Sequence[ShardedTensor]]
    """Key of a tensor -> the shards of it that this rank writes."""
    common: Mapping[str, Any]
    """Values that are the same on every rank and in every layout."""


def snapshot(state: Sequence[ShardedTensor], common: Mapping[str, Any], spent: Snapshot | None = None) -> Snapshot:
    """Return `common`, and copies of the shards in `state` (a trained model's state) that this rank writes. `spent`: an
    earlier snapshot that has been written. Its memory is used again, since a new allocation takes longer than the
    copy."""
    assert set(common) == _COMMON_KEYS
    buffers = {_place(shard): shard.data for shards in (spent.tensors.values() if spent else ()) for shard in shards}
    tensors: dict[str, list[ShardedTensor]] = {}
    for shard in state:
        if is_main_replica(shard.replica_id):
            copy = buffers.get(_place(shard))
            if copy is None:
                copy = torch.empty(shard.data.shape, dtype=shard.dtype, pin_memory=not shard.data.is_cpu)
            copy.copy_(shard.data, non_blocking=True)
            tensors.setdefault(shard.key, []).append(dataclasses.replace(shard, data=copy))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Snapshot(tensors, common)


def write_snapshot(
    taken: Snapshot, directory: Path, group: dist.ProcessGroup, threads: int, *, fsync: bool = True
) -> dict[str, FileSum] | None:
    """Write this rank's part into an existing, empty directory, and wait until all ranks have written theirs. Return
    the checksums of all files by name on rank 0, None elsewhere. `fsync`: True if the files must be synced to the disk.

    This is a collective call over `group`. The group has all ranks, and nothing else uses it during the call. Errors
    are raised on every rank.

    Raises:
        StoreRefused: a rank could not write its shards, because its disk is full or cannot be written.
        CheckpointException: (torch's) a rank could not write for another reason.
        OSError: a rank could not read its files back, or rank 0 could not write the common values.
    """
    rank = dist.get_rank()
    tensors = mcore_to_pyt_state_dict({key: list(shards) for key, shards in taken.tensors.items()})
    planner = MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
    writer = torch_checkpoint.FileSystemWriter(directory, thread_count=threads, sync_files=fsync)
    try:
        torch_checkpoint.save(tensors, storage_writer=writer, planner=planner, process_group=group)
    except torch_checkpoint.CheckpointException as error:
        for fault, _ in error.failures.values():
            if isinstance(fault, OSError) and fault.errno in REFUSING:
                raise refusal(fault, str(directory)) from fault
        raise
    own = sorted(directory.glob(f"__{rank}_*"))
    try:
        if rank == 0:
            _write_common(taken.common, directory)
            own = [file for file in directory.iterdir() if file in own or not file.name.startswith("__")]
        sums: dict[str, FileSum] | str = {file.name: sum_file(file, fsync=fsync) for file in own}
    except (OSError, StoreError) as error:
        sums = str(error)
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, sums, group=group)
    faults = [part for part in parts if isinstance(part, str)]
    if faults:
        raise OSError(f"{directory}: {'; '.join(faults)}")
    return {name: file_sum for part in parts for name, file_sum in part.items()} if rank == 0 else None


def _write_common(common: Mapping[str, Any], directory: Path) -> None:
    """Write a checkpoint's common values, which are the same on all ranks. Raises StoreRefused if the disk is full.
    (torch.save to a file would raise a RuntimeError.)"""
    content = io.BytesIO()
    torch.save(dict(common), content)
    file = directory / COMMON
    retried(lambda: file.write_bytes(content.getvalue()), str(file), retry_s=0.0)
    retried(lambda: save_config(_FORMAT, str(directory)), str(directory), retry_s=0.0)


def _place(shard: ShardedTensor) -> tuple[object, ...]:
    return shard.key, shard.global_offset, shard.local_shape, shard.dtype


def read_common(directory: Path, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of a checkpoint that are the same on every rank and in every layout: architecture, version,
    number of optimizer steps, number of steps skipped in a row, and loss scale. Raises StateError if this program did
    not write the checkpoint, or, listing the differences, if the checkpoint's architecture is not `architecture`."""
    config = maybe_load_config(str(directory)) if directory.is_dir() else None
    if config != _FORMAT or not (directory / COMMON).is_file():
        raise StateError(f"{directory} holds no checkpoint of Megatron's format {_FORMAT.sharded_backend}")
    common = checkpoint_metadata.read_common(directory)
    if set(common) != _COMMON_KEYS:
        raise StateError(f"{directory} was not saved by this program: it holds {sorted(common)}")
    saved = common["architecture"]
    differences = [
        f"{key} {saved.get(key)!r} there and {architecture.get(key)!r} here"
        for key in sorted({*saved, *architecture})
        if saved.get(key) != architecture.get(key)
    ]
    if differences:
        raise StateError(f"{directory} holds another architecture: {', '.join(differences)}")
    return common


def read_state(state: Sequence[ShardedTensor], directory: Path) -> None:
    """Read a checkpoint into the tensors that `state` views. A collective call.

    Raises StateError on every rank, before any change, if the metadata cannot be read. Likewise if a tensor is missing
    in the checkpoint, or has another shape or dtype there. Also raises StateError if a shard cannot be read or does not
    match its metadata; some tensors may then have changed.
    """
    faults = []
    try:
        reader = MetadataReader(directory)
    except (OSError, StateError) as error:
        faults.append(str(error))
    else:
        misfits = list(_misfits(state, reader.metadata.state_dict_metadata))
        if misfits:
            faults.append(f"{directory} does not fit: {'; '.join(misfits[:3])} ({len(misfits)} tensors in all)")
    everywhere = sorted({fault for part in gather.from_all_ranks(faults) for fault in part})
    if everywhere:
        raise StateError("; ".join(everywhere[:3]))
    by_key: dict[str, list[ShardedTensor]] = {}
    for shard in state:
        by_key.setdefault(shard.key, []).append(shard)
    planner = MCoreLoadPlanner(shapes_validation_sharded_tensors=state)
    try:
        torch_checkpoint.load(mcore_to_pyt_state_dict(by_key, is_loading=True), storage_reader=reader, planner=planner)
    except torch_checkpoint.CheckpointException as error:
        fault = str(next(iter(error.failures.values()))[0]).partition("\n")[0]
        raise StateError(f"{directory}: a shard cannot be read: {fault}") from error


def _misfits(state: Sequence[ShardedTensor], saved: Mapping[str, Any]) -> Iterator[str]:
    for shard in state:
        stored = saved.get(shard.key)
        if stored is None or (stored.size, stored.properties.dtype) != (shard.global_shape, shard.dtype):
            problem = "is missing" if stored is None else f"is {stored.properties.dtype} {tuple(stored.size)}"
            yield f"{shard.key} {problem}, needed is {shard.dtype} {shard.global_shape}"


# ---- shards ----------------------------------------------------------------------------------------------

_OF_VOCABULARY = ("embedding.word_embeddings.weight", "output_layer.weight")
_GATE_AND_UP = "mlp.linear_fc1."


@dataclass(frozen=True)
class Master:
    """The tensor that the optimizer updates for a parameter on this rank: the parameter itself, its float32 copy, or
    consecutive elements of one of these."""

    parameter: Parameter
    tensor: Tensor
    """The optimizer's own object, which is the key of its state."""
    start: int
    """Index of the tensor's first element among the parameter's elements in C order."""


@dataclass(frozen=True)
class Piece:
    """Some rows of this rank's part of a parameter, and their position in the whole model's tensor."""

    key: str
    first_row: int
    num_rows: int
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    """Index of the first row's first element in the whole tensor."""
    num_columns: int
    """Number of columns in each row, without padding."""


def masters_of(optimizer: MegatronOptimizer) -> Iterator[Master]:
    """Yield the tensors that a Megatron optimizer updates on this rank. `optimizer`: a single optimizer, not a chain of
    them."""
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
    """Return views of this rank's checkpoint tensors: weights, masters, and moments if the optimizer has any. If
    several ranks hold the same tensor, one of these ranks is marked as the writer of the tensor. The ranks take turns
    from tensor to tensor, so that each rank writes a share."""
    rank = blueprint.parallel_rank
    named = {p: (i, name, block) for i, (name, block, p) in enumerate(_trained_parameters(model, blueprint))}
    shards: list[ShardedTensor] = []

    def add(kind: str, parameter: Parameter, tensor: Tensor, start: int, *, is_run: bool, whole: bool = False) -> None:
        number, name, block = named[parameter]
        data_rank, data_size = (0, 1) if is_run else (rank.data_rank, rank.data_size)
        tensor_rank, tensor_size = (rank.tensor_rank, rank.tensor_size) if _axis(name, parameter) is None else (0, 1)
        replica = tensor_rank * data_size + data_rank
        written_here = number % (tensor_size * data_size) == replica and not getattr(parameter, "shared", False)
        if whole:  # tensor parallelism and the distributed optimizer, which cut tensors, are refused
            key = f"{kind}.{name if block is None else f'blocks.{block}.{name}'}"
            replica = 0 if written_here else 1
            shards.append(ShardedTensor.from_rank_offsets(key, tensor.detach(), replica_id=replica))
            return
        for piece in pieces_of(name, block, parameter, blueprint):
            shards.extend(_cut(kind, piece, parameter, tensor.detach(), start, 0 if written_here else 1))

    for parameter in named:
        add("weights", parameter, parameter, 0, is_run=False)
    state = torch_optimizer(optimizer).state
    is_run = isinstance(optimizer, DistributedOptimizer)
    for master in masters_of(optimizer):
        if master.parameter.dtype is not torch.float32:
            add("masters", master.parameter, master.tensor, master.start, is_run=is_run)
        for name, moment in moments_of(state[master.tensor]).items() if master.tensor in state else ():
            factored = moment.shape != master.tensor.shape
            add(name, master.parameter, moment, master.start, is_run=is_run, whole=factored)
    return shards


def moments_of(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return name -> moment from the optimizer's state of one tensor. The state's entry `step`, the number of steps
    made, is left out."""
    return {name: tensor for name, tensor in state.items() if name != "step"}


def torch_optimizer(optimizer: MegatronOptimizer) -> torch.optim.Optimizer:
    """Return the torch optimizer inside a Megatron optimizer."""
    inner: torch.optim.Optimizer = optimizer.optimizer
    return inner


def pieces_of(name: str, block: int | None, parameter: Tensor, blueprint: Blueprint) -> Iterator[Piece]:
    """Yield the pieces of a parameter with their positions in the whole tensor. The padding of `spec.padded` is left
    out: the whole tensor has none."""
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
    """Return the length, without padding, of the axis that tensor parallelism cuts. For the fused gate and up, it is
    the length of one of the two."""
    if name in _OF_VOCABULARY:
        return spec.vocab_size
    if name.startswith("mlp."):
        return spec.intermediate_size
    return spec.q_size if name.startswith("self_attention.linear_proj.") else spec.q_size + 2 * spec.kv_size


def rectangles(start: int, end: int, columns: int) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first row, first column, number of rows, number of columns) of the rectangles that make up the elements
    [start, end) of a matrix, counted in C order. The rectangles come in the order of their elements."""
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


def _trained_parameters(model: GPTModel, blueprint: Blueprint) -> Iterator[tuple[str, int | None, Parameter]]:
    """Yield (name, block, parameter). The last stage's copy of a tied embedding gets the embedding's name."""
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if not parameter.requires_grad:
            continue
        yield (_OF_VOCABULARY[0] if getattr(parameter, "shared", False) else name), block, parameter


def _axis(name: str, parameter: Tensor) -> int | None:
    """Return the axis that tensor parallelism cuts, or None for a whole parameter such as a critic's head."""
    is_head = name.startswith("output_layer.") and parameter.shape[0] == 1
    return None if is_head else SPLIT_AXES.get(name)


def _cut(
    kind: str, piece: Piece, parameter: Tensor, tensor: Tensor, start: int, replica: int
) -> Iterator[ShardedTensor]:
    """Yield the elements of `piece` that this rank holds, cut into rectangles. Padding columns are left out.

    Args:
        kind: first part of the ShardedTensors' key, such as "masters".
        parameter: this tensor-parallel rank's part, for its shape.
        tensor: consecutive elements of the flattened parameter, from index `start` on.
        replica: number of this copy of the elements. Only copy 0 is written.
    """
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
