"""Split a step's rows over ranks and micro-batches, and compute the loss of each micro-batch.

Each loss calls the formulas of stages.ppo.losses with the model's outputs for some rows and with the stored data of
these rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stages.models.build import Blueprint
from stages.models.config import OptimizerConfig
from stages.models.flops import update_flops
from stages.models.forward import MicroBatch, cut_micro_batches, row_lengths
from stages.models.layouts import adapter_parameters
from stages.models.numerics import rows_multiple
from stages.models.protocol import CriticBatch, PolicyBatch, Role
from stages.models.trainer import Loss
from stages.models.work import UpdateWork, measured_peak
from stages.ppo.config import PPOConfig
from stages.ppo.losses import LossStats, PolicyLossInputs, ValueLossInputs, policy_loss, value_loss
from stages.ppo.masks import state_values, token_weights
from stages.ppo.micro_batches import split_balanced
from storage.records import Rollout


def rank_micro_batches(
    rollout: Rollout, rows: np.ndarray, config: OptimizerConfig, blueprint: Blueprint, *, never_empty: bool = False
) -> list[MicroBatch]:
    """Return the micro-batches of this rank's share of some rows.

    With frozen blocks a row always goes to the same data-parallel rank, which keeps the row's hidden states. Without
    frozen blocks every data-parallel rank gets nearly the same number of tokens. With `never_empty`, a rank without
    rows gets a masked row, on which the loss does not depend. The rank needs a row, because every rank takes part in
    the reduction of gradients.
    """
    rank, mask = blueprint.parallel_rank, rollout.response_mask
    rows = np.sort(rows)  # the same set of rows is cut the same way, whatever its order in an epoch
    if blueprint.model.frozen_blocks:
        share = rows[rollout.row[rows] % rank.data_size == rank.data_rank]
    else:
        share = rows[split_balanced(row_lengths(mask[rows]), rank.data_size)[rank.data_rank]]
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
    """Return the work of an update: the number of tokens, the operations and the time. `mask`: response_mask of the
    rows that the role was trained on; `seconds`: time of the update; `peak_flops`: peak operations per second of all
    ranks together."""
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
    """Return this rank's peak operations per second: from `model.peak_tflops`, or measured if that setting is null."""
    if blueprint.model.peak_tflops is not None:
        return blueprint.model.peak_tflops * 1e12
    return measured_peak(blueprint.dtype, blueprint.parallel_rank.device, blueprint.products)


# ---- losses ----------------------------------------------------------------------------------------------

MinibatchLoss = Callable[[np.ndarray, int], Loss]
"""Function that gets a minibatch's rows and the number of optimizer steps that the update has made before it. It
returns the function that computes the loss of each of the minibatch's micro-batches."""

RATIO_DEVIATION = "policy/ratio_deviation_first"
"""Metric: largest |pi / pi_prox - 1| before the first optimizer step of an update. It should be 0 up to rounding. A
larger number shows that `logprob` and the update compute log-probs differently."""


def policy_loss_of(
    batch: PolicyBatch,
    config: PPOConfig,
    *,
    step: int,
    device: torch.device,
    logprobs: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]],
) -> MinibatchLoss:
    """Return a function that makes the policy loss of each minibatch of a step. `logprobs` returns (new log-probs,
    entropies) [B, T] of a micro-batch, given its hidden states."""
    rollout, advantages = batch.rollout, batch.advantages
    steps_per_update = config.epochs * config.minibatches
    # all versions up to the end of the critic's warm-up have the same weights
    versions = np.maximum(rollout.token_versions, min(config.critic_warmup_steps, step))
    arrays = {
        "mask": advantages.loss_mask,
        "advantages": advantages.advantages,
        "sampler_logprobs": rollout.sampler_logprobs,
        "stale_optimizer_steps": np.where(rollout.response_mask, (step - versions) * steps_per_update, 0).astype(
            np.int64
        ),
    }
    if batch.policy is not None:
        arrays["policy_logprobs"] = batch.policy.policy_logprobs
    if config.kl.where == "loss":
        arrays["ref_logprobs"] = batch.reference.ref_logprobs

    def of_minibatch(rows: np.ndarray, steps_taken: int) -> Loss:
        weights = _weights(advantages.loss_mask, rows, config)

        def loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossStats]:
            new_logprobs, entropy = logprobs(micro, hidden)
            inputs = {name: _cut(array, micro, device) for name, array in arrays.items()}
            inputs["mask"] &= micro.mask
            value, stats = policy_loss(
                new_logprobs,
                entropy,
                PolicyLossInputs(
                    weights=_cut(weights, micro, device),
                    policy_logprobs=inputs.pop("policy_logprobs", None),
                    ref_logprobs=inputs.pop("ref_logprobs", None),
                    optimizer_steps_taken=steps_taken,
                    **inputs,
                ),
                config,
                batch.kl_coef,
            )
            if batch.policy is not None:
                deviation = torch.zeros((), device=device)
                if steps_taken == 0:
                    drift = new_logprobs.detach() - _cut(batch.policy.policy_logprobs, micro, device)
                    deviation = torch.where(inputs["mask"], drift.expm1().abs(), 0).max()
                stats = replace(stats, maxima={**stats.maxima, RATIO_DEVIATION: deviation})
            return value, stats

        return loss

    return of_minibatch


def value_loss_of(
    batch: CriticBatch, config: PPOConfig, *, device: torch.device, head: Callable[[MicroBatch, Tensor], Tensor]
) -> MinibatchLoss:
    """Return a function that makes the value loss of each minibatch of a step. `head` returns the critic's output at
    every position [B, T] of a micro-batch, given its hidden states."""
    loss_mask = batch.advantages.loss_mask
    arrays = {"mask": loss_mask, "old_values": batch.values.values, "returns": batch.advantages.returns}

    def of_minibatch(rows: np.ndarray, steps_taken: int) -> Loss:
        weights = _weights(loss_mask, rows, config)

        def loss(micro: MicroBatch, hidden: Tensor) -> tuple[Tensor, LossStats]:
            new_values, _ = state_values(head(micro, hidden), micro.mask)
            inputs = {name: _cut(array, micro, device) for name, array in arrays.items()}
            inputs["mask"] &= micro.mask
            return value_loss(
                new_values, ValueLossInputs(weights=_cut(weights, micro, device), **inputs), config.value_clip
            )

        return loss

    return of_minibatch


def _weights(loss_mask: np.ndarray, rows: np.ndarray, config: PPOConfig) -> np.ndarray:
    """Return the `token_weights` of a minibatch's rows in an array [all rows, seq], with 0 in all other rows."""
    weights = np.zeros(loss_mask.shape, np.float32)
    weights[rows] = token_weights(torch.from_numpy(loss_mask[rows]), config.aggregation).numpy()
    return weights


def _cut(array: np.ndarray, micro: MicroBatch, device: torch.device) -> Tensor:
    """Return the micro-batch's part [B, T] of an array [all rows, seq]."""
    return torch.from_numpy(array[micro.rows, : micro.mask.shape[1]]).to(device)
