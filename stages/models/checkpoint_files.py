"""A checkpoint's files, written and read by megatron's dist_checkpointing: a directory that loads in any layout.

    snapshot            on every rank, while nothing trains: a copy in memory of what this rank is to write
    write_snapshot      in any thread: copy ──► files; the ranks meet over a process group of their own
    read_state          whatever layout wrote the files, each rank reads its own part into the tensors that it has

Megatron's own asynchronous save forks processes, which a worker with CUDA and threads must not do.

May import torch, megatron.core, storage and this folder.
"""

from __future__ import annotations

import dataclasses
import io
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingConfig, maybe_load_config, save_config
from megatron.core.dist_checkpointing.mapping import is_main_replica
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import MCoreSavePlanner, mcore_to_pyt_state_dict

from stages.models import gather
from stages.models.errors import StateError
from storage.checkpoints import FileSum, sum_file
from storage.errors import StoreError
from storage.retries import REFUSING, patiently, refusal

_FORMAT = CheckpointingConfig("torch_dist", 1)
_SHARDED_STATE = "sharded"
_COMMON_KEYS = {"architecture", "version", "adam_steps", "skipped_in_a_row", "loss_scale"}


@dataclass(frozen=True)
class Snapshot:
    """What a rank is to write, in memory of its own."""

    tensors: Mapping[str, Sequence[ShardedTensor]]
    """By key, those that this rank is the one to write."""
    common: Mapping[str, Any]
    """The same on every rank, and for any layout."""


def snapshot(state: Sequence[ShardedTensor], common: Mapping[str, Any], spent: Snapshot | None = None) -> Snapshot:
    """Copies what this rank is to write of a trained model's state. `spent`: an earlier one, written by now, whose
    memory is used again: asking the system for it anew takes longer than the copy."""
    assert set(common) == _COMMON_KEYS
    buffers = {_place(shard): shard.data for shards in (spent.tensors.values() if spent else ()) for shard in shards}
    tensors: dict[str, list[ShardedTensor]] = {}
    for shard in state:
        if is_main_replica(shard.replica_id):
            copy = buffers.get(_place(shard))
            if copy is None:
                copy = torch.empty(shard.data.shape, dtype=shard.dtype, pin_memory=shard.data.is_cuda)
            copy.copy_(shard.data, non_blocking=True)
            tensors.setdefault(shard.key, []).append(dataclasses.replace(shard, data=copy))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return Snapshot(tensors, common)


def write_snapshot(
    taken: Snapshot, directory: Path, group: dist.ProcessGroup, threads: int, *, fsync: bool = True
) -> dict[str, FileSum] | None:
    """Writes this rank's part into an existing, empty directory; returns once all ranks have. On rank 0 the sums of all
    files by their names, None elsewhere. `fsync`: they are on the disk then.

    Collective over `group`, of all ranks, which nothing else may use meanwhile. Raises, on every rank, StoreRefused
    where the disk of one is full or cannot be written, torch's CheckpointException where a rank could not write for
    another reason, and OSError where one could not read what it wrote.
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
    return {name: found for part in parts for name, found in part.items()} if rank == 0 else None


def _write_common(common: Mapping[str, Any], directory: Path) -> None:
    """Raises StoreRefused where the disk is full: torch's own writing to a file would be a RuntimeError then."""
    content = io.BytesIO()
    torch.save(dict(common), content)
    file = directory / COMMON_STATE_FNAME
    patiently(lambda: file.write_bytes(content.getvalue()), str(file), patience_s=0.0)
    patiently(lambda: save_config(_FORMAT, str(directory)), str(directory), patience_s=0.0)


def _place(shard: ShardedTensor) -> tuple[object, ...]:
    return shard.key, shard.global_offset, shard.local_shape, shard.dtype


def read_common(directory: Path, architecture: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint says of the model as a whole. Raises StateError where it is none of this program's, or one of
    another architecture, which the message compares with `architecture`."""
    config = maybe_load_config(str(directory)) if directory.is_dir() else None
    if config != _FORMAT or not (directory / COMMON_STATE_FNAME).is_file():
        raise StateError(f"{directory} holds no checkpoint of Megatron's format {_FORMAT.sharded_backend}")
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(directory))
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
    """Fills the tensors that `state` has views of. A collective call. Raises StateError, on every rank and before
    anything was changed, where one is missing in the checkpoint, or has another shape or dtype there."""
    saved = dist_checkpointing.load_tensors_metadata(str(directory))
    faults = []
    for shard in state:
        there = saved.get(shard.key)
        if there is None or (there.global_shape, there.dtype) != (shard.global_shape, shard.dtype):
            found = "is missing" if there is None else f"is {there.dtype} {there.global_shape}"
            faults.append(f"{shard.key} {found}, needed is {shard.dtype} {shard.global_shape}")
    everywhere = sorted({fault for part in gather.from_all_ranks(faults) for fault in part})
    if everywhere:
        raise StateError(f"{directory} does not fit: {'; '.join(everywhere[:3])} ({len(everywhere)} tensors in all)")
    with warnings.catch_warnings():
        # Megatron reads through a function that torch has given another name
        warnings.filterwarnings("ignore", category=FutureWarning)
        dist_checkpointing.load({_SHARDED_STATE: list(state)}, str(directory), validate_access_integrity=False)
