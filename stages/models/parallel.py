"""This process's rank in each of Megatron's parallel groups, which are made and unmade here.

Megatron keeps its groups in globals of the process, so that a process has one layout at a time.

May import torch, megatron.core and this folder.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from stages.models import megatron_cpu
from stages.models.config import LayoutConfig
from stages.models.errors import StateError
from stages.models.protocol import Rank
from stages.models.roll_call import RollCall


@dataclass(frozen=True)
class ParallelRank:
    """A rank of a gang by its numbers in the tensor (TP), pipeline (PP) and data-parallel (DP) groups."""

    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    device: torch.device
    roll_call: RollCall

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_output_rank(self) -> bool:
        """Of the ranks that compute the same outputs (the tensor-parallel ones), the one that hands them on."""
        return self.last_stage and self.tensor_rank == 0


def join(rank: Rank, layout: LayoutConfig, seed: int) -> ParallelRank:
    """Joins the gang's process group and makes Megatron's groups. Blocks until all ranks have come.

    Raises StateError if this process already belongs to a gang.
    """
    if dist.is_initialized():
        raise StateError("this process already belongs to a gang: close its model host first")
    megatron_cpu.install()
    torch.set_num_threads(rank.threads)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank.device)
    roll_call = RollCall(rank)
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        store=roll_call.store,
        rank=rank.index,
        world_size=rank.size,
        timeout=roll_call.timeout,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        distributed_timeout_minutes=roll_call.timeout / timedelta(minutes=1),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)  # sequence parallelism asks for its generators
    return ParallelRank(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=layout.tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=layout.pipeline,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        device=torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu"),
        roll_call=roll_call,
    )


def leave() -> None:
    """Unmakes the groups, so that the process can join another gang."""
    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()
