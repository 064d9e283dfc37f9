"""Trains one model, policy or critic: Megatron's gradient buffers and optimizer, the epochs and minibatches of one PPO
step, and what is saved of it.

May import numpy, torch, megatron.core, stages.ppo and this folder.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from torch import Tensor
from torch.nn import Parameter

from stages.models import gather
from stages.models.build import Blueprint
from stages.models.checkpoint_files import Snapshot, read_common, read_state, snapshot
from stages.models.checkpoint_shards import MOMENTS, masters_of, sharded_state, torch_optimizer
from stages.models.config import Offload, OptimizerConfig
from stages.models.errors import NonFiniteGradientsError
from stages.models.forward import KeptForwards, MicroBatch, run_backward
from stages.models.loss_scale import at_minimum, scale_state, scaler_of, scaler_options, set_scale_state
from stages.models.offload import Residence, allocate, release, storages
from stages.models.protocol import Role
from stages.models.trunk import Trunk
from stages.ppo.stats import LossStats

Loss = Callable[[MicroBatch, Tensor], tuple[Tensor, LossStats]]
"""(this micro-batch's share of the minibatch's loss, its stats) from a micro-batch and its hidden states [N, H]."""


@dataclass(frozen=True)
class Minibatch:
    """What one optimizer step trains on. Every rank of the gang has the same number of them, in the same order."""

    rows: np.ndarray
    """All ranks' rows, as indices into the arrays of the step."""
    row_numbers: np.ndarray
    """Of every row of the step: its number in the run (`Rollout.row`)."""
    micro_batches: list[MicroBatch]
    """This rank's share; at least one, unless the minibatch is empty."""
    loss: Callable[[int], Loss]
    """The loss, from the number of optimizer steps that the update made before."""
    empty: bool
    """Nothing of the loss depends on any row of any rank: not one of their tokens counts."""


@dataclass(frozen=True)
class UpdateLimits:
    """What ends an update early."""

    max_skipped_steps: int | None
    """Optimizer steps in a row without a finite gradient, over PPO steps too, that are an error."""
    target_kl: float | None = None
    """The approx_kl of a minibatch above which the update ends before that minibatch's optimizer step."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Learning rate of PPO step `step` (from 0), a closed form, so that a resumed or replayed step needs no history.

    warm-up:  lr * (step + 1) / warmup_steps                        for step < warmup_steps; afterwards, with
              x = (step - warmup_steps) / (total_steps - warmup_steps) from 0 to 1 one step past the last:
    linear:   min_lr + (lr - min_lr) * (1 - x)
    cosine:   min_lr + (lr - min_lr) * (1 + cos(pi * x)) / 2        (Loshchilov & Hutter 2017, without restarts)
    constant: lr
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return config.lr
    left, decaying = max(0, total_steps - step), max(1, total_steps - config.warmup_steps)
    above = config.lr - config.min_lr
    if config.decay == "linear":
        return config.min_lr + above * left / decaying
    return config.min_lr + above * (1 - math.cos(math.pi * left / decaying)) / 2


class Trainer:
    """Owns a trained model's gradient buffers, optimizer state, version and dirty flag."""

    def __init__(
        self, role: Role, model: GPTModel, config: OptimizerConfig, blueprint: Blueprint, offload: Offload = "none"
    ) -> None:
        self.role = role
        self.model = model
        self.config = config
        self.version = 0
        self.dirty = False
        self.kept = KeptForwards() if config.reuse_forward else None
        self._skipped_in_a_row = 0
        self._snapshot: Snapshot | None = None
        self._blueprint = blueprint
        self._rank = blueprint.parallel_rank
        sharded = blueprint.layout.distributed_optimizer
        bf16 = blueprint.dtype is torch.bfloat16
        model.config.finalize_model_grads_func = finalize_model_grads
        self._ddp = DistributedDataParallel(
            model.config,
            DistributedDataParallelConfig(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True),
            model,
        )
        self._optimizer = get_megatron_optimizer(
            MegatronOptimizerConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.max_grad_norm,
                bf16=bf16,
                params_dtype=blueprint.dtype,
                use_distributed_optimizer=sharded,
                **scaler_options(blueprint.model.loss_scale, blueprint.dtype),
            ),
            [self._ddp],
        )
        (inner,) = self._optimizer.chained_optimizers
        self._scaler = scaler_of(inner)
        if self._scaler is not None:
            model.config.grad_scale_func = self._optimizer.scale_loss
            self._first_scale = scale_state(self._scaler)
        for group in self._adam.param_groups:
            # one pass over memory instead of a dozen; Megatron does not hand the flag on
            group["foreach"], group["fused"] = False, True
        self.weights = Residence(model.parameters)
        self.optimizer_state = Residence(self._beside_weights)
        """Masters and moments."""
        self._keeps_gradients = offload == "none"
        self._release_gradients()

    def train(
        self, step: int, lr: float, trunk: Trunk | None, minibatches: Sequence[Minibatch], limits: UpdateLimits
    ) -> tuple[list[list[LossStats]], dict[str, float]]:
        """One PPO step: an optimizer step per minibatch, in order, making version `step` into `step + 1`.

        An empty minibatch makes no step: AdamW's momentum and decay would move the weights without a gradient. Nor does
        one whose gradient is not finite; and one whose approx_kl is above `limits.target_kl` ends the update. Each is
        decided alike on all ranks: by the rows, which every rank knows, and by the gradient's norm and the approx_kl
        over all of them.

        Returns the stats of every micro-batch of this rank by minibatch that was computed (no micro-batches but on the
        last pipeline stage), and the optimizer's metrics: lr, mean and largest grad_norm of the steps taken, and what
        became of the minibatches: optimizer_steps, skipped_steps (not finite), empty_steps, stopped_steps (by
        `target_kl`: the one that was above it and those after it); under float16 overflow_steps (not finite, where the
        loss scale could still be lowered: no skipped_steps), and the loss_scale that is left.

        Raises NonFiniteGradientsError at `limits.max_skipped_steps`, on every rank.
        """
        self._set_learning_rate(lr)
        stats: list[list[LossStats]] = []
        norms: list[float] = []
        skipped = stopped = overflows = 0
        self._ddp.train()
        allocate(self._gradient_buffers())
        for number, minibatch in enumerate(minibatches):
            if minibatch.empty:
                continue
            self._ddp.zero_grad_buffer()
            self._optimizer.zero_grad()
            loss = minibatch.loss(len(norms))
            stats.append(run_backward(self._ddp, trunk, minibatch.micro_batches, loss, self.kept))
            self._forget_forwards()  # the weights change
            self.dirty = True
            if limits.target_kl is not None and self._approx_kl(stats[-1]) > limits.target_kl:
                stopped = sum(not left.empty for left in minibatches[number:])
                break
            norm, overflow = self._step()
            if math.isfinite(norm):
                norms.append(norm)
                self._skipped_in_a_row = 0
                continue
            if overflow:
                overflows += 1
                continue
            skipped += 1
            self._skipped_in_a_row += 1
            if self._skipped_in_a_row == limits.max_skipped_steps:
                where = f"{self.role}, step {step}, minibatch {number + 1} of {len(minibatches)}"
                raise NonFiniteGradientsError(f"{where}: {self._not_finite(minibatch, stats[-1], norm)}")
        self._ddp.eval()
        self._release_gradients()
        self._reach(step + 1)
        return stats, {
            "lr": lr,
            **_norm_metrics(norms),
            "skipped_steps": float(skipped),
            "empty_steps": float(sum(minibatch.empty for minibatch in minibatches)),
            "stopped_steps": float(stopped),
            **self._scale_metrics(overflows),
        }

    def advance(self, step: int) -> dict[str, float]:
        """Makes version `step` into `step + 1` with the same weights and optimizer state; the metrics of `train`."""
        self._reach(step + 1)
        return {"lr": 0.0, "optimizer_steps": 0.0}

    def snapshot(self) -> Snapshot:
        """A copy of what this rank is to write of a checkpoint: weights, masters, moments, counters. The one before
        it, whose memory it takes, must have been written."""
        (inner,) = self._optimizer.chained_optimizers
        steps = {float(state["step"]) for state in self._adam.state.values()}
        assert len(steps) <= 1, f"AdamW has made {steps} steps with different parameters"
        common = {
            "architecture": self._architecture,
            "version": self.version,
            "adam_steps": steps.pop() if steps else None,
            "skipped_in_a_row": self._skipped_in_a_row,
            "loss_scale": None if self._scaler is None else scale_state(self._scaler),
        }
        self._snapshot = snapshot(sharded_state(self.model, inner, self._blueprint), common, self._snapshot)
        return self._snapshot

    def load(self, directory: Path) -> None:
        """Restores what a snapshot held, bit for bit, whatever layout took it. Raises StateError, having changed
        nothing that counts, for a checkpoint of another architecture or of another program."""
        common = read_common(directory, self._architecture)
        (inner,) = self._optimizer.chained_optimizers
        self.dirty = True  # until all of it is there
        self._forget_forwards()
        self._adam.state.clear()
        for master in masters_of(inner) if common["adam_steps"] is not None else ():
            step = torch.tensor(common["adam_steps"], dtype=torch.float32, device=master.tensor.device)
            self._adam.state[master.tensor] = {
                "step": step,
                **{moment: torch.zeros_like(master.tensor) for moment in MOMENTS},
            }
        read_state(sharded_state(self.model, inner, self._blueprint), directory)
        self.version, self.dirty = common["version"], False
        self._skipped_in_a_row = common["skipped_in_a_row"]
        if self._scaler is not None:
            set_scale_state(self._scaler, common["loss_scale"])

    def restart(self) -> None:
        """Back to version 0 after the model's weights were put back: fresh master weights, empty optimizer state."""
        self._optimizer.reload_model_params()
        self._forget_forwards()
        self._adam.state.clear()
        self.version, self.dirty, self._skipped_in_a_row = 0, False, 0
        if self._scaler is not None:
            set_scale_state(self._scaler, self._first_scale)

    def drop_work(self) -> None:
        """Lets go of what only an update under way needs: gradient buffers, and forwards that were kept."""
        self._forget_forwards()
        self._optimizer.zero_grad()  # what refers to them
        release(self._gradient_buffers())

    def sleep(self) -> None:
        """Everything to the host's memory, so that another role has the device. `weights` and `optimizer_state` wake
        alone: a forward pass needs no masters or moments."""
        self._release_gradients()
        self.optimizer_state.sleep()  # while the weights are there to be told from it
        self.weights.sleep()

    def _reach(self, version: int) -> None:
        """The role has this version, which is not committed; forwards of the one before that no minibatch took (all
        were empty, or the role was not trained) would serve nothing any more."""
        self._forget_forwards()
        self.version, self.dirty = version, True

    def _forget_forwards(self) -> None:
        if self.kept is not None:
            self.kept.clear()

    @property
    def _adam(self) -> torch.optim.Optimizer:
        """The torch optimizer inside Megatron's."""
        (inner,) = self._optimizer.chained_optimizers
        return torch_optimizer(inner)

    def _scale_metrics(self, overflows: int) -> dict[str, float]:
        if self._scaler is None:
            return {}
        return {"overflow_steps": float(overflows), "loss_scale": float(self._scaler.scale)}

    def _gradient_buffers(self) -> Iterator[Tensor]:
        return (buffer.grad_data for buffer in self._ddp.buffers)

    def _release_gradients(self) -> None:
        if not self._keeps_gradients:
            self._optimizer.zero_grad()  # what refers to them
            release(self._gradient_buffers())

    def _beside_weights(self) -> Iterator[Tensor]:
        """What the optimizer holds and the model does not: in float32 the weights are their own masters."""
        (inner,) = self._optimizer.chained_optimizers
        weights = {storage.data_ptr() for storage in storages(self.model.parameters())}
        masters = [master.tensor for master in masters_of(inner)]
        moments = [state[moment] for state in self._adam.state.values() for moment in MOMENTS]
        return (tensor for tensor in masters + moments if tensor.untyped_storage().data_ptr() not in weights)

    @property
    def _architecture(self) -> dict[str, Any]:
        """All that decides which tensors there are, and none of what decides where they lie."""
        blueprint = self._blueprint
        found = dataclasses.asdict(blueprint.spec) | {
            "role": str(self.role),
            "blocks": blueprint.num_blocks(self.role),
            "frozen_blocks": blueprint.model.frozen_blocks,
            "dtype": blueprint.model.dtype,
        }
        lora = blueprint.model.lora
        if lora.rank:
            adapters = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
            found |= {f"model.lora.{key}": value for key, value in adapters.items()}
        return found

    def _set_learning_rate(self, lr: float) -> None:
        """And the weight decay, as Megatron's scheduler would: norms and biases do not decay."""
        for group in self._adam.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]

    def _step(self) -> tuple[float, bool]:
        """One optimizer step with the gradients in the buffers, unscaled and clipped to the global norm; without a step
        if that is not finite. (The norm, whether a loss scale that has been lowered now made it so): over all ranks
        alike."""
        can_be_lowered = self._scaler is not None and not at_minimum(self._scaler)
        overflow = bool(self._optimizer.prepare_grads()) and can_be_lowered
        norm = float(self._optimizer.get_grad_norm())
        if math.isfinite(norm):
            if self.config.max_grad_norm > 0:
                (inner,) = self._optimizer.chained_optimizers
                _scale_gradients(inner.get_parameters(), self.config.max_grad_norm / (norm + 1e-6))
            self._optimizer.step_with_ready_grads()
        return norm, overflow

    def _approx_kl(self, stats: list[LossStats]) -> float:
        """That of a minibatch from those of this rank's micro-batches and of the other ranks' (a collective call)."""
        return gather.sum_over_ranks(self._rank, [float(s.sums[f"{self.role}/approx_kl"]) for s in stats])

    def _not_finite(self, minibatch: Minibatch, stats: list[LossStats], norm: float) -> str:
        """What of a minibatch was not finite, the same on every rank (a collective call): the micro-batches' losses
        and the parameters' gradients that were not, and the minibatch's rows."""
        bad_rows = {
            int(row)
            for micro, of_micro in zip(minibatch.micro_batches if stats else [], stats, strict=True)
            if not of_micro.sums[f"{self.role}/loss"].isfinite()
            for row in minibatch.row_numbers[micro.rows]
        }
        trained = [(n, p) for n, p in self._ddp.module.named_parameters() if p.requires_grad]
        bad_parameters = {n for n, p in trained if not p.main_grad.isfinite().all()}
        of_ranks = gather.from_all_ranks((bad_rows, bad_parameters))
        rows, names = (sorted(set().union(*kind)) for kind in zip(*of_ranks, strict=True))
        of_loss = f"the loss of the micro-batches with rows {_listed(rows)}, and " if rows else ""
        return (
            f"{self._skipped_in_a_row} optimizer steps in a row had a gradient that is not finite "
            f"(ppo.max_skipped_steps). Not finite are {of_loss}the gradients of {len(names)} parameters "
            f"({_listed(names, 3)}), of norm {norm}. The minibatch's rows are "
            f"{_listed(sorted(minibatch.row_numbers[minibatch.rows].tolist()))}"
        )


def _norm_metrics(norms: Sequence[float]) -> dict[str, float]:
    """Of the optimizer steps that were made, one norm each."""
    return {
        "grad_norm": sum(norms) / max(1, len(norms)),
        "grad_norm_max": max(norms, default=0.0),
        "optimizer_steps": float(len(norms)),
    }


def _scale_gradients(parameters: Sequence[Parameter], factor: float) -> None:
    """Clips by the global norm: in place (Megatron's own makes new gradients where it has no CUDA kernel)."""
    if factor < 1:
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


def _listed(items: Sequence[object], most: int = 64) -> str:
    """At most so many of them, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more
