"""What one rank does of a step's work: which rows, in which micro-batches, and how much that is.

May import numpy, torch, stages.ppo, storage and this folder.
"""

from __future__ import annotations

import math

import numpy as np

from stages.models.adapter_shapes import adapter_parameters
from stages.models.build import Blueprint
from stages.models.config import OptimizerConfig
from stages.models.forward import MicroBatch, cut_micro_batches, row_lengths
from stages.models.products import rows_multiple
from stages.models.protocol import Role
from stages.models.work import UpdateWork, measured_peak, update_flops
from stages.ppo.micro_batches import balanced
from storage.records import Rollout


def rank_micro_batches(
    rollout: Rollout, rows: np.ndarray, config: OptimizerConfig, blueprint: Blueprint, *, never_empty: bool = False
) -> list[MicroBatch]:
    """This rank's share of some rows. With frozen blocks a row always goes to the same rank, which keeps its hidden
    states; without, every data-parallel rank gets nearly as many tokens. With `never_empty` a rank without a row gets
    one that nothing of the loss depends on, since every rank takes part in the reduction of gradients."""
    rank, mask = blueprint.parallel_rank, rollout.response_mask
    rows = np.sort(rows)  # a set of rows is cut alike in whatever order an epoch has them
    if blueprint.model.frozen_blocks:
        share = rows[rollout.row[rows] % rank.data_size == rank.data_rank]
    else:
        share = rows[balanced(row_lengths(mask[rows]), rank.data_size)[rank.data_rank]]
    if never_empty and not len(share):
        share, mask = rows[:1], np.zeros_like(mask)
    if not len(share):
        return []
    return cut_micro_batches(
        rollout.tokens,
        mask,
        share,
        rank.device,
        max_tokens=config.micro_batch_tokens,
        max_rows=config.micro_batch_rows,
        multiple=math.lcm(
            rank.tensor_size if blueprint.layout.sequence_parallel else 1,
            rows_multiple(blueprint.dtype, rank.device),
        ),
    )


def work_of(blueprint: Blueprint, role: Role, mask: np.ndarray, seconds: float, peak_flops: float) -> UpdateWork:
    """What training a role on rows with this response_mask took; `peak_flops`: per second, of all ranks."""
    lengths, spec, is_critic = row_lengths(mask), blueprint.spec, role is Role.CRITIC
    model = blueprint.model
    flops = update_flops(
        spec,
        blueprint.num_blocks(role),
        lengths,
        outputs=1 if is_critic else spec.vocab_size,
        num_outputs=int(lengths.sum() if is_critic else mask.sum()),
        output_trained=is_critic or not (model.lora.rank or (spec.tied_embeddings and model.frozen_blocks)),
        adapters=adapter_parameters(spec, model.lora, tensor=1) if model.lora.rank else None,
    )
    return UpdateWork(int(lengths.sum()), flops, seconds, peak_flops)


def peak_of_a_rank(blueprint: Blueprint) -> float:
    """Operations per second that this rank can do: `model.peak_tflops`, or measured."""
    if blueprint.model.peak_tflops is not None:
        return blueprint.model.peak_tflops * 1e12
    return measured_peak(blueprint.dtype, blueprint.parallel_rank.device, blueprint.products)
