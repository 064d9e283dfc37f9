"""From a step's batch to the loss of each of its micro-batches: the formulas of stages.ppo.losses fed with the model's
outputs and the rows they belong to.

May import numpy, torch, stages.ppo and this folder.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from stages.models.forward import MicroBatch
from stages.models.protocol import CriticBatch, PolicyBatch
from stages.models.trainer import Loss
from stages.ppo.config import PPOConfig
from stages.ppo.losses import PolicyLossInputs, ValueLossInputs, policy_loss, value_loss
from stages.ppo.masks import state_values, token_weights
from stages.ppo.stats import LossStats

MinibatchLoss = Callable[[np.ndarray, int], Loss]
"""The loss of a minibatch's micro-batches, from the minibatch's rows and the optimizer steps taken before it."""

RATIO_DEVIATION = "policy/ratio_deviation_first"
"""Largest |pi / pi_prox - 1| before the first optimizer step, where it is 0 but for rounding: what is above tells that
log-probs are not computed alike in `logprob` and in the update."""


def policy_loss_of(
    batch: PolicyBatch,
    config: PPOConfig,
    *,
    step: int,
    device: torch.device,
    logprobs: Callable[[MicroBatch, Tensor], tuple[Tensor, Tensor]],
) -> MinibatchLoss:
    """`logprobs` gives (new log-probs, entropies) [B, T] of a micro-batch from its hidden states."""
    rollout, advantages = batch.rollout, batch.advantages
    steps_per_update = config.epochs * config.minibatches
    # versions up to the one that the critic's warm-up ends at are the same weights
    versions = np.maximum(rollout.token_versions, min(config.critic_warmup_steps, step))
    arrays = {
        "mask": advantages.loss_mask,
        "advantages": advantages.advantages,
        "sampler_logprobs": rollout.sampler_logprobs,
        "optimizer_steps_behind": np.where(rollout.response_mask, (step - versions) * steps_per_update, 0).astype(
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
    """`head` gives the critic's output at every position [B, T] of a micro-batch from its hidden states."""
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
    """token_weights of a minibatch, in an array [all rows, seq]."""
    weights = np.zeros(loss_mask.shape, np.float32)
    weights[rows] = token_weights(torch.from_numpy(loss_mask[rows]), config.aggregation).numpy()
    return weights


def _cut(array: np.ndarray, micro: MicroBatch, device: torch.device) -> Tensor:
    """The micro-batch's part [B, T] of an array [all rows, seq]."""
    return torch.from_numpy(array[micro.rows, : micro.mask.shape[1]]).to(device)
