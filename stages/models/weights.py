"""Gather the parts that the ranks of a gang hold: trained tensors by Hugging Face name, results per row, stats of
losses. These calls are collective: every rank of the gang makes the same call.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from stages.models.build import Blueprint
from stages.models.hf_conversion import PARTS, HFPart, adapted_weight, hf_parts, named_by_block, to_hf
from stages.models.lora import merge
from stages.models.memory import BLOCK_BYTES
from stages.models.parallel import ParallelRank
from stages.ppo.losses import LossStats, merge_stats, summarise_stats


def stage_parts(model: GPTModel, blueprint: Blueprint) -> Iterator[HFPart]:
    """Yield this rank's slices of the trained tensors of its pipeline stage. Adapters have the names that peft gives
    them. A tied embedding is yielded by the first stage only."""
    rank = blueprint.parallel_rank.tensor_rank
    for name, block, parameter in _trained(model, blueprint):
        yield from hf_parts(name, block, parameter, blueprint.spec, rank)


def _trained(model: GPTModel, blueprint: Blueprint) -> Iterator[tuple[str, int | None, Tensor]]:
    """Yield (name, block or None, data) of each trained parameter, without the last stage's copy of a tied
    embedding."""
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if parameter.requires_grad and not getattr(parameter, "shared", False):
            yield name, block, parameter.detach()


def stage_tensors(model: GPTModel, blueprint: Blueprint) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole Hugging Face tensor) of the pipeline stage's trained tensors, on every rank of the stage."""
    for name, block, parameter in _trained(model, blueprint):
        yield from to_hf(name, block, parameter, blueprint.spec, _tensor_parallel_parts)


def merged_tensors(model: GPTModel, blueprint: Blueprint) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, weight) of this pipeline stage's weights that training changes. Without LoRA, these are the trained
    weights, on every rank of the stage. With LoRA, they are copies of the adapted weights with the adapters merged in.
    Only the rank with TP and DP rank 0 makes and yields these copies. But every rank of the stage yields a critic's
    trained head."""
    trained, rank, lora = stage_tensors(model, blueprint), blueprint.parallel_rank, blueprint.model.lora
    if not lora.rank:
        yield from trained
        return
    adapters = dict(trained)
    yield from ((name, tensor) for name, tensor in adapters.items() if ".lora_" not in name)  # a head
    adapted = {adapted_weight(name)[0] for name, _, p in named_by_block(model, 0) if p.requires_grad} & PARTS.keys()
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if name in adapted:
            whole = to_hf(name, block, parameter.detach(), blueprint.spec, _tensor_parallel_parts)
            for part, weight in whole:
                if rank.tensor_rank == rank.data_rank == 0:
                    yield part, merge(weight, part, adapters, lora)


def trained_tensors(model: GPTModel, blueprint: Blueprint, *, merged: bool) -> dict[str, Tensor] | None:
    """Return copies of the trained tensors of all pipeline stages on rank 0, in the host's memory. Return None on the
    other ranks. This is for adapters and reward models; a policy's weights are published instead.

    Args:
        merged: with LoRA, True returns the adapted weights with the adapters merged in, False the adapters.

    The ranks of a stage gather one tensor at a time, and only one rank keeps it, in the host's memory. So a device
    needs memory for one or two whole tensors only, however large the model is."""
    of_stage, rank = merged_tensors if merged else stage_tensors, blueprint.parallel_rank
    sends = rank.tensor_rank == rank.data_rank == 0
    tensors = {name: tensor.to("cpu", copy=True) for name, tensor in of_stage(model, blueprint) if sends}
    if rank.pipeline_size > 1:
        tensors = _from_all_stages(rank, tensors)
    return tensors if dist.get_rank() == 0 else None


def _from_all_stages(rank: ParallelRank, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all stages on rank 0, and `tensors` unchanged on the others. The first rank of each stage
    sends its tensors one after another. A single collective would pad every rank's part to the largest, and collect all
    parts on the device."""
    sends = rank.tensor_rank == rank.data_rank == 0
    listed = [(name, t.shape, t.dtype) for name, t in tensors.items()] if sends and not rank.first_stage else []
    expected: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(listed, expected)
    for source, of_rank in enumerate(expected or []):
        for name, shape, dtype in of_rank:
            received = torch.empty(shape, dtype=dtype, device=rank.device)
            dist.recv(received, src=source)
            tensors[name] = received.cpu()
    for name, _, _ in listed:
        dist.send(tensors[name].to(rank.device).contiguous(), dst=0)
    return tensors


def digest_of(model: GPTModel, blueprint: Blueprint) -> str:
    """Return a digest of all trained tensors and their names, on every rank. The digest does not depend on the layout.

    Each whole tensor's bytes are hashed with XXH3-128, at 15 GB/s per core. This hash does not protect against forgery,
    which is no threat here. The ranks of a stage gather a tensor block by block and share the hashing.
    """
    rank = blueprint.parallel_rank
    index, num_ranks = (
        rank.tensor_rank * rank.data_size + rank.data_rank,
        rank.tensor_size * rank.data_size,
    )
    own = {}
    for number, part in enumerate(stage_parts(model, blueprint)):
        seen = xxhash.xxh3_128()
        for block in _whole_blocks(part, rank.tensor_rank, rank.tensor_size):
            if number % num_ranks == index:
                seen.update(as_numpy(block).reshape(-1).view(np.uint8).data)
        if number % num_ranks == index:
            own[part.name] = seen.hexdigest()
    named = {name: digest for part in from_all_ranks(own) for name, digest in part.items()}
    return f"xxh3-{xxhash.xxh3_128_hexdigest(json.dumps(named, sort_keys=True).encode())}"


def row_blocks(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Yield the blocks of a tensor as consecutive slices of its rows. A block has at most `BLOCK_BYTES`, or is a single
    longer row."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    return (slice(first, min(num_rows, first + step)) for first in range(0, num_rows, step))


def _whole_blocks(part: HFPart, tp_rank: int, tp_size: int) -> Iterator[Tensor]:
    """Yield a whole tensor in consecutive blocks of rows, on every rank of the tensor-parallel group."""
    tensor = part.tensor
    row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize * (tp_size if part.axis == 1 else 1)
    if part.axis == 1:
        for rows in row_blocks(len(tensor), row_bytes):
            yield torch.cat(_tensor_parallel_parts(tensor[rows]), 1)[:, : part.size]
        return
    group = parallel_state.get_tensor_model_parallel_group()
    for source in range(tp_size if part.axis == 0 else 1):
        length = len(tensor) if part.axis is None else part.span(source)[1]
        for rows in row_blocks(length, row_bytes):
            if part.axis is None or tp_size == 1:
                yield tensor[rows]
                continue
            if source == tp_rank:
                block = tensor[rows].contiguous()
            else:
                block = tensor.new_empty((rows.stop - rows.start, *tensor.shape[1:]))
            dist.broadcast(block, dist.get_global_rank(group, source), group=group)
            yield block


def _tensor_parallel_parts(tensor: Tensor) -> list[Tensor]:
    """Return all tensor-parallel ranks' parts of a tensor, in rank order."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def collect_rows(rank: ParallelRank, *arrays: np.ndarray) -> tuple[np.ndarray, ...] | None:
    """Return the arrays with the rows of all ranks on rank 0, None on other ranks. In `arrays` [all rows, ...] each
    rank has filled in the rows that it computed, and has left zeros in all other rows. Only the arrays of output ranks
    are read (`ParallelRank.is_output_rank`)."""
    if dist.get_world_size() == 1:
        return arrays
    summed = []
    for array in arrays:
        tensor = torch.from_numpy(array if rank.is_output_rank else np.zeros_like(array)).to(rank.device)
        dist.all_reduce(tensor)
        summed.append(tensor.cpu().numpy())
    return tuple(summed) if dist.get_rank() == 0 else None


def summarise_over_ranks(rank: ParallelRank, stats: Sequence[Sequence[LossStats]]) -> dict[str, float]:
    """Return an update's metrics over all ranks, on every rank. `stats`: one list per minibatch with the stats of this
    rank's micro-batches. The result is empty if there was no minibatch."""
    own = [[(_floats(s.sums), _floats(s.maxima)) for s in minibatch] for minibatch in stats]
    parts = [part for part in from_all_ranks(own if rank.is_output_rank else []) if part]
    merged = [
        merge_stats([LossStats(_tensors(sums), _tensors(maxima)) for part in parts for sums, maxima in part[number]])
        for number in range(len(parts[0]) if parts else 0)
    ]
    return summarise_stats(merged) if merged else {}


def sum_over_ranks(rank: ParallelRank, shares: Sequence[float]) -> float:
    """Return the sum of `shares` over the output ranks, with the same bits on every rank. An output rank is a rank of
    the last pipeline stage with tensor-parallel rank 0. The `shares` of all other ranks are ignored. A collective call.
    """
    return math.fsum(share for part in from_all_ranks(shares if rank.is_output_rank else []) for share in part)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """Return the tensor as a numpy array. A bfloat16 tensor becomes its bit pattern in uint16, since numpy has no
    bfloat16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.cpu().numpy()


def from_all_ranks(own: Any) -> list[Any]:
    """Return every rank's `own`, in rank order."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in tensors.items()}


def _tensors(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
