"""What the ranks of a gang hold in parts, put together: trained tensors under their Hugging Face names, what was
computed of each row, the stats of losses. All of it is collective: every rank of the gang makes the same call.

May import numpy, torch, xxhash, megatron.core, stages.ppo and this folder.
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
from stages.models.hf_conversion import PARTS, adapted_weight, named_by_block, to_hf
from stages.models.lora import merge
from stages.models.parallel import ParallelRank
from stages.ppo.stats import LossStats, merge_stats, summarise_stats


def stage_tensors(model: GPTModel, blueprint: Blueprint) -> Iterator[tuple[str, Tensor]]:
    """This pipeline stage's trained parameters as whole Hugging Face tensors, by name, on every rank of the stage;
    adapters by peft's. The last stage's copy of a tied embedding is left out: the first stage has it."""
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if parameter.requires_grad and not getattr(parameter, "shared", False):
            yield from to_hf(name, block, parameter.detach(), blueprint.spec, _tensor_parallel_parts)


def merged_tensors(model: GPTModel, blueprint: Blueprint) -> Iterator[tuple[str, Tensor]]:
    """This pipeline stage's weights that differ from those of `model.path`: the trained ones, or copies of those that
    have adapters, with these merged in, on the ranks that hand them on (TP and DP rank 0; nothing on the others)."""
    trained, rank, given = stage_tensors(model, blueprint), blueprint.parallel_rank, blueprint.model.lora
    if not given.rank:
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
                    yield part, merge(weight, part, adapters, given)


def trained_tensors(model: GPTModel, blueprint: Blueprint, *, merged: bool = True) -> dict[str, Tensor] | None:
    """Those of all pipeline stages, on rank 0; None on the others. `merged`: as an engine reads them, by
    `merged_tensors`; otherwise adapters by themselves."""
    of_stage, rank = merged_tensors if merged else stage_tensors, blueprint.parallel_rank
    tensors = dict(of_stage(model, blueprint))
    if rank.pipeline_size > 1:
        sent = {name: t.cpu() for name, t in tensors.items()} if rank.tensor_rank == rank.data_rank == 0 else {}
        parts: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(sent, parts)
        tensors = {name: tensor for part in parts or [] for name, tensor in part.items()}
    return tensors if dist.get_rank() == 0 else None


def digest_of(model: GPTModel, blueprint: Blueprint) -> str:
    """Digest of all trained tensors and their names, the same whatever the layout; on every rank.

    XXH3-128 of each whole tensor's bytes, at 15 GB/s a core: it tells any change but a forged one, which nobody
    here makes. The ranks of a stage hold the same whole tensors, and take turns at them.
    """
    rank = blueprint.parallel_rank
    turn, turns = rank.tensor_rank * rank.data_size + rank.data_rank, rank.tensor_size * rank.data_size
    own = {
        name: xxhash.xxh3_128_hexdigest(as_numpy(tensor).reshape(-1).view(np.uint8).data)
        for number, (name, tensor) in enumerate(stage_tensors(model, blueprint))
        if number % turns == turn
    }
    named = {name: digest for part in from_all_ranks(own) for name, digest in part.items()}
    return f"xxh3-{xxhash.xxh3_128_hexdigest(json.dumps(named, sort_keys=True).encode())}"


def _tensor_parallel_parts(tensor: Tensor) -> list[Tensor]:
    """All tensor-parallel ranks' parts of a tensor, in rank order."""
    group = parallel_state.get_tensor_model_parallel_group()
    if group.size() == 1:
        return [tensor]
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return parts


def collect_rows(rank: ParallelRank, *arrays: np.ndarray) -> tuple[np.ndarray, ...] | None:
    """Arrays [all rows, ...] on rank 0, of which each rank has filled the rows that it computed, the others being zero;
    None on the other ranks."""
    if dist.get_world_size() == 1:
        return arrays
    summed = []
    for array in arrays:
        tensor = torch.from_numpy(array if rank.is_output_rank else np.zeros_like(array)).to(rank.device)
        dist.all_reduce(tensor)
        summed.append(tensor.cpu().numpy())
    return tuple(summed) if dist.get_rank() == 0 else None


def summarise_over_ranks(rank: ParallelRank, stats: Sequence[Sequence[LossStats]]) -> dict[str, float]:
    """An update's metrics from the stats of this rank's micro-batches by minibatch, and the other ranks'; on every
    rank. None without a minibatch."""
    own = [[(_floats(s.sums), _floats(s.maxima)) for s in minibatch] for minibatch in stats]
    parts = [part for part in from_all_ranks(own if rank.is_output_rank else []) if part]
    merged = [
        merge_stats([LossStats(_tensors(sums), _tensors(maxima)) for part in parts for sums, maxima in part[number]])
        for number in range(len(parts[0]) if parts else 0)
    ]
    return summarise_stats(merged) if merged else {}


def sum_over_ranks(rank: ParallelRank, shares: Sequence[float]) -> float:
    """The sum of all ranks' shares, the same on every rank to the last bit."""
    return math.fsum(share for part in from_all_ranks(shares if rank.is_output_rank else []) for share in part)


def as_numpy(tensor: Tensor) -> np.ndarray:
    """The tensor's numbers; bfloat16, which numpy lacks, as its bit pattern in uint16."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype is torch.bfloat16:
        tensor = tensor.view(torch.uint16)
    return tensor.cpu().numpy()


def from_all_ranks(own: Any) -> list[Any]:
    """What every rank of the gang has, in rank order."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


def _floats(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    return {name: float(tensor) for name, tensor in tensors.items()}


def _tensors(numbers: Mapping[str, float]) -> dict[str, Tensor]:
    return {name: torch.tensor(number, dtype=torch.float64) for name, number in numbers.items()}
