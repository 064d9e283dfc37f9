"""This process's rank in each of Megatron's parallel groups: layouts are checked here, groups made and unmade.

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
from stages.models.config import LayoutConfig, ModelConfig
from stages.models.errors import StateError
from stages.models.protocol import Rank
from stages.models.roll_call import RollCall
from stages.models.spec import ModelSpec


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


def check_layout(model: ModelConfig, spec: ModelSpec, layout: LayoutConfig, num_ranks: int) -> None:
    """Raises ValueError, naming the key, for a layout that cannot hold the model or does not fit the gang."""
    cut = layout.tensor * layout.pipeline
    if min(layout.tensor, layout.pipeline) < 1 or num_ranks % cut:
        raise ValueError(
            f"layout.tensor * layout.pipeline = {layout.tensor} * {layout.pipeline} must divide the gang's"
            f" {num_ranks} ranks"
        )
    if layout.tensor > spec.num_heads:
        raise ValueError(f"layout.tensor = {layout.tensor}: at most {spec.num_heads}, the model's query heads")
    if layout.sequence_parallel and layout.tensor == 1:
        raise ValueError("layout.sequence_parallel needs layout.tensor > 1")
    if not 0 <= model.frozen_blocks < spec.num_layers:
        raise ValueError(
            f"model.frozen_blocks = {model.frozen_blocks} must lie in 0..{spec.num_layers - 1}: the model has"
            f" {spec.num_layers} blocks"
        )
    trained = spec.num_layers - model.frozen_blocks
    critic = trained if model.critic_blocks is None else model.critic_blocks
    if not 1 <= critic <= trained:
        raise ValueError(f"model.critic_blocks = {critic} must lie in 1..{trained}, the blocks above the frozen ones")
    if layout.pipeline > 1:
        if model.frozen_blocks:
            raise ValueError(
                f"model.frozen_blocks = {model.frozen_blocks} needs layout.pipeline = 1: the frozen blocks are computed"
                " once and kept on the rank that trains the others"
            )
        for key, blocks in (("layers of the model", spec.num_layers), ("model.critic_blocks", critic)):
            if blocks % layout.pipeline:
                raise ValueError(f"layout.pipeline = {layout.pipeline} must divide {key} = {blocks}")


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
