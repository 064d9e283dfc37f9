"""Train one model, policy or critic: Megatron's gradient buffers and optimizer, the minibatches of one PPO step, and
the state that a checkpoint saves.

Under float16, whose smallest number is 6e-8, the loss is multiplied by a loss scale before the backward pass, so that
small gradients are not rounded to 0. The gradients are divided by the scale, in float32, before anything reads them.

    gradients finite    a step; after GROWTH_INTERVAL such steps in a row    scale' = 2 scale
    not finite          no step                                              scale' = max(scale / 2, minimum)

scale' is the next scale. (Micikevicius et al. 2018, as in Megatron's DynamicGradScaler.) While the scale is above its
minimum, a gradient that is not finite is assumed to be an overflow caused by the scale. The bits of the next update
depend on the scale, so a checkpoint includes the scaler's state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import megatron.core.optimizer
import numpy as np
import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer
from torch import Tensor

from stages.models import weights as gather
from stages.models.adamw import BlockAdamW, attach_gradients, gradient_norm, initial_state
from stages.models.build import DTYPES, Blueprint
from stages.models.checkpoints import (
    Snapshot,
    masters_of,
    moments_of,
    read_common,
    read_state,
    sharded_state,
    snapshot,
    torch_optimizer,
)
from stages.models.config import Offload, OptimizerConfig
from stages.models.forward import KeptForwards, MicroBatch, Trunk, run_backward
from stages.models.gradient_buffers import Loss, complete_weights, in_buffers, registering, settle, unbind
from stages.models.matrix_optimizers import MatrixOptimizer, parts_of
from stages.models.offload import OffloadableTensors, allocate, release, storages
from stages.models.protocol import NonFiniteGradientsError, Role
from stages.ppo.losses import LossStats


@dataclass(frozen=True)
class Minibatch:
    """The rows of one optimizer step. Every rank of the gang has the same number of minibatches in the same order."""

    rows: np.ndarray
    """Rows of all ranks, as indices into the arrays of the step."""
    row_numbers: np.ndarray
    """Number within the step (`Rollout.row`) of every row of the step's arrays. Error messages name rows by this
    number."""
    micro_batches: list[MicroBatch]
    """This rank's share: at least one, unless the minibatch is empty."""
    loss: Callable[[int], Loss]
    """Function that returns the loss, given the number of optimizer steps that the update has made so far."""
    empty: bool
    """True if no token of any rank's rows counts in the loss."""


MAX_SKIPPED_STEPS = 8
"""Training fails after this many consecutive optimizer steps with a gradient that is not finite. The count continues
across PPO steps. Overflows at a loss scale above its minimum are not counted. One counted step may be an accident. If a
whole update (such as 2 epochs of 4 minibatches) consists of counted steps, weights or data are broken."""


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Return the learning rate of PPO step `step` (from 0). The rate depends on the step only, so a resumed or replayed
    step needs no history.

    The first `warmup_steps` steps are the warm-up. For later steps, x is the share of the decay that is done. It is 0
    at the first step after the warm-up. It would be 1 at step `total_steps`, the step after the last one.

    x = (step - warmup_steps) / (total_steps - warmup_steps)

    warm-up:    lr * (step + 1) / warmup_steps
    linear:     min_lr + (lr - min_lr) * (1 - x)
    cosine:     min_lr + (lr - min_lr) * (1 + cos(pi * x)) / 2        (Loshchilov & Hutter 2017, without restarts)
    constant:   lr
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
        self.kept = KeptForwards() if role in blueprint.model.reuse_forward else None
        self._skipped_in_a_row = 0
        self._snapshot: Snapshot | None = None
        self._blueprint = blueprint
        self._rank = blueprint.parallel_rank
        sharded = blueprint.layout.distributed_optimizer
        bf16 = blueprint.dtype is torch.bfloat16
        model.config.finalize_model_grads_func = finalize_model_grads
        self._moments_dtype = DTYPES[config.moments_dtype]
        self._gradients_in_fp32 = config.gradients_dtype == "float32"
        self._ddp = in_buffers(model, blueprint, in_fp32=self._gradients_in_fp32)
        # Megatron would prefer the FusedAdam of Transformer Engine or Apex. Checkpoints cannot hold its state.
        megatron.core.optimizer.USING_PYTORCH_OPTIMIZER = True
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
                **scaler_options(blueprint.dtype),
            ),
            [self._ddp],
            use_gloo_process_groups=False,
        )
        (inner,) = self._optimizer.chained_optimizers
        self._scaler = scaler_of(inner)
        if self._scaler is not None:
            model.config.grad_scale_func = self._optimizer.scale_loss
            self._first_scale = scale_state(self._scaler)
        if config.optimizer != "adamw":
            parts = parts_of([*masters_of(inner)], model, blueprint, config.optimizer)
            inner.optimizer = MatrixOptimizer(self._adam, config, parts)
        elif self._moments_dtype is torch.float32 and self._gradients_in_fp32:
            for group in self._adam.param_groups:
                # fused: one pass over memory instead of a dozen; Megatron does not pass the flag on
                group["foreach"], group["fused"] = False, True
        else:
            inner.optimizer = BlockAdamW(self._adam, self._moments_dtype)
        self.weights = OffloadableTensors(model.parameters)
        self.optimizer_state = OffloadableTensors(self._beside_weights)
        """Master weights and moments, which `sleep` offloads separately from the weights."""
        self._keeps_gradients = offload == "none"
        self._release_gradients()

    def close(self) -> None:
        """Drop Megatron's cyclic references to the model, so that the gang's connections can close."""
        unbind(self._ddp)

    def train(
        self,
        step: int,
        lr: float,
        trunk: Trunk | None,
        minibatches: Sequence[Minibatch],
        target_kl: float | None = None,
    ) -> tuple[list[list[LossStats]], dict[str, float]]:
        """Run one PPO step: one optimizer step per minibatch, in order. The weights of version `step` become version
        `step + 1`.

        - An empty minibatch makes no optimizer step: AdamW's momentum and decay would move the weights without a
          gradient.
        - A minibatch whose gradient is not finite makes no optimizer step.
        - A minibatch whose approx_kl is above `target_kl` ends the update before its optimizer step.

        All ranks decide the same, since every rank knows all rows, and the gradient norm and the approx_kl are taken
        over all ranks. `trunk` has the frozen blocks below the trained model; None if no block is frozen.

        Returns:
            The stats of this rank's micro-batches, one list per computed minibatch; the lists are empty except on the
            last pipeline stage.
            The optimizer's metrics: lr; grad_norm and grad_norm_max (mean and maximum over the steps taken);
            optimizer_steps; skipped_steps (gradient not finite); empty_steps; stopped_steps (the minibatch above
            `target_kl` and those after it, without empty ones). Under float16 also overflow_steps (gradient not finite
            while the loss scale could still be lowered; not counted as skipped) and the loss_scale at the end.

        Raises:
            NonFiniteGradientsError: MAX_SKIPPED_STEPS in a row had a gradient that is not finite; raised on every rank.
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
            loss = registering(self._ddp, self.role, minibatch.loss(len(norms)))
            stats.append(run_backward(self._ddp, trunk, minibatch.micro_batches, loss, self.kept))
            self._forget_forwards()  # the weights change
            self.dirty = True
            if target_kl is not None and self._approx_kl(stats[-1]) > target_kl:
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
            if self._skipped_in_a_row == MAX_SKIPPED_STEPS:
                where = f"{self.role}, step {step}, minibatch {number + 1} of {len(minibatches)}"
                raise NonFiniteGradientsError(f"{where}: {self._not_finite(minibatch, stats[-1], norm)}")
        complete_weights(self._ddp)
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
        """Turn version `step` into `step + 1` without training, and return the metrics. Weights and optimizer state
        stay as they are."""
        self._reach(step + 1)
        return {"lr": 0.0, "optimizer_steps": 0.0}

    def snapshot(self) -> Snapshot:
        """Return a copy of this rank's part of a checkpoint: weights, master weights, moments, counters. The copy
        reuses the memory of the previous snapshot. The previous snapshot must therefore be completely written before
        the call."""
        (inner,) = self._optimizer.chained_optimizers
        steps = {float(state["step"]) for state in self._adam.state.values()}
        assert len(steps) <= 1, f"the optimizer has made {steps} steps with different parameters"
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
        """Restore a checkpoint bit for bit. It may have been saved in another layout.

        Raises StateError if the checkpoint has another architecture or was written by another program; the model is
        then unchanged. Also raises StateError if a tensor does not fit or cannot be read; the model is then dirty."""
        common = read_common(directory, self._architecture)
        (inner,) = self._optimizer.chained_optimizers
        self.dirty = True  # until everything is loaded
        settle(self._ddp)
        self._forget_forwards()
        self._adam.state.clear()
        own = self._adam.new_state if isinstance(self._adam, BlockAdamW) else None
        new_state = own or partial(initial_state, moments_dtype=torch.float32)
        for master in masters_of(inner) if common["adam_steps"] is not None else ():
            self._adam.state[master.tensor] = new_state(master.tensor, common["adam_steps"])
        read_state(sharded_state(self.model, inner, self._blueprint), directory)
        self.version, self.dirty = common["version"], False
        self._skipped_in_a_row = common["skipped_in_a_row"]
        if self._scaler is not None:
            set_scale_state(self._scaler, common["loss_scale"])

    def restart(self) -> None:
        """Go back to version 0: fresh master weights and an empty optimizer state. The caller has already put back the
        model's weights."""
        settle(self._ddp)
        self._optimizer.reload_model_params()
        self._forget_forwards()
        self._adam.state.clear()
        self.version, self.dirty, self._skipped_in_a_row = 0, False, 0
        if self._scaler is not None:
            set_scale_state(self._scaler, self._first_scale)

    def drop_work(self) -> None:
        """Free the gradient buffers and the hidden states kept from forward passes."""
        self._forget_forwards()
        self._optimizer.zero_grad()  # drops its references to the buffers
        release(self._gradient_buffers())

    def sleep(self) -> None:
        """Move weights and optimizer state to the host's memory, to free the device for another role. `weights` and
        `optimizer_state` are brought back separately, since a forward pass needs no master weights or moments. Gradient
        buffers are freed if `offload` is not "none"."""
        self._release_gradients()
        self.optimizer_state.sleep()  # before the weights, since it compares addresses with those of the weights
        self.weights.sleep()

    def _reach(self, version: int) -> None:
        """Set the version, not committed yet (`dirty`). Forget forward passes of the previous version, which an update
        without minibatches, or of an untrained role, has not used."""
        self._forget_forwards()
        self.version, self.dirty = version, True

    def _forget_forwards(self) -> None:
        if self.kept is not None:
            self.kept.clear()

    @property
    def _adam(self) -> torch.optim.Optimizer:
        """Return the torch optimizer that Megatron's optimizer wraps."""
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
            self._optimizer.zero_grad()  # drops its references to the buffers
            release(self._gradient_buffers())

    def _beside_weights(self) -> Iterator[Tensor]:
        """Yield master weights and moments, except master weights that share memory with the model's weights. (In
        float32 the model's weights are also the master weights.)"""
        (inner,) = self._optimizer.chained_optimizers
        weights = {storage._cdata for storage in storages(self.model.parameters())}
        masters = [master.tensor for master in masters_of(inner)]
        moments = [moment for state in self._adam.state.values() for moment in moments_of(state).values()]
        return (tensor for tensor in masters + moments if tensor.untyped_storage()._cdata not in weights)

    def state_bytes(self) -> dict[str, int]:
        """Return the measured bytes of gradients, float32 masters and moments, under the names of
        `memory.state_bytes`. The moments exist after the first update."""
        moments = sum(m.nbytes for state in self._adam.state.values() for m in moments_of(state).values())
        beside = sum(tensor.nbytes for tensor in self._beside_weights())
        return {
            "gradients": sum(buffer.nbytes for buffer in self._gradient_buffers()),
            "float32 masters": beside - moments,
            "moments": moments,
        }

    @property
    def _architecture(self) -> dict[str, Any]:
        """The settings that decide which tensors exist. Settings of the parallel layout are left out."""
        blueprint = self._blueprint
        architecture = dataclasses.asdict(blueprint.spec) | {
            "role": str(self.role),
            "blocks": blueprint.num_blocks(self.role),
            "frozen_blocks": blueprint.model.frozen_blocks,
            "dtype": blueprint.model.dtype,
        }
        if self.config.optimizer != "adamw":
            architecture["optimizer"] = self.config.optimizer
        lora = blueprint.model.lora
        if lora.rank:
            adapters = {"rank": lora.rank, "alpha": lora.alpha, "targets": sorted(lora.targets)}
            architecture |= {f"model.lora.{key}": value for key, value in adapters.items()}
        return architecture

    def _set_learning_rate(self, lr: float) -> None:
        """Set learning rate and weight decay as Megatron's scheduler would. Norms and biases do not decay."""
        for group in self._adam.param_groups:
            group["lr"] = lr
            group["weight_decay"] = self.config.weight_decay * group["wd_mult"]

    def _step(self) -> tuple[float, bool]:
        """Clip the gradients to the global norm and make one optimizer step, unless the norm is not finite. Return the
        norm, and True if gradients overflowed at a loss scale that was then lowered. Both are the same on all ranks."""
        (inner,) = self._optimizer.chained_optimizers
        overflow = False
        if self._gradients_in_fp32:
            can_be_lowered = self._scaler is not None and not at_minimum(self._scaler)
            overflow = bool(self._optimizer.prepare_grads()) and can_be_lowered
            norm = float(self._optimizer.get_grad_norm())
        else:
            attach_gradients(inner)
            norm = gradient_norm(inner)
        if math.isfinite(norm):
            if self.config.max_grad_norm > 0:
                _scale_gradients(self._adam, min(1.0, self.config.max_grad_norm / (norm + 1e-6)))
            self._optimizer.step_with_ready_grads()
        return norm, overflow

    def _approx_kl(self, stats: list[LossStats]) -> float:
        """Return a minibatch's approx_kl in nats per token, over all ranks. A collective call."""
        return gather.sum_over_ranks(self._rank, [float(s.sums[f"{self.role}/approx_kl"]) for s in stats])

    def _not_finite(self, minibatch: Minibatch, stats: list[LossStats], norm: float) -> str:
        """Return a text about a minibatch whose gradient is not finite. It names the rows of the micro-batches whose
        loss is not finite, the parameters whose gradient is not finite, and all rows of the minibatch. The text is the
        same on every rank (a collective call)."""
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
            f"(a run ends at {MAX_SKIPPED_STEPS}). Not finite are {of_loss}the gradients of {len(names)} parameters "
            f"({_listed(names, 3)}), of norm {norm}. The minibatch's rows are "
            f"{_listed(sorted(minibatch.row_numbers[minibatch.rows].tolist()))}"
        )


def _norm_metrics(norms: Sequence[float]) -> dict[str, float]:
    """Return the gradient metrics, given one norm per optimizer step."""
    return {
        "grad_norm": sum(norms) / max(1, len(norms)),
        "grad_norm_max": max(norms, default=0.0),
        "optimizer_steps": float(len(norms)),
    }


def _scale_gradients(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Multiply the gradients of the next step by `factor`. Megatron's own clipping is not used, because without a CUDA
    kernel it allocates new gradients."""
    if isinstance(optimizer, BlockAdamW):
        optimizer.factor = factor
    elif factor < 1:
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], factor)


def _listed(items: Sequence[object], most: int = 64) -> str:
    """Return a text that lists the first `most` items and the number of the others."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


# ---- loss scale ------------------------------------------------------------------------------------------


INITIAL_SCALE = 65536.0
"""Loss scale at the start. It only has to be high enough, since every gradient that is not finite halves it."""
MINIMUM_SCALE = 1.0
"""Lowest loss scale. Above it, a gradient that is not finite counts as an overflow, and the scale is halved. At the
lowest scale, the scale is not the cause, so the step counts as skipped (`MAX_SKIPPED_STEPS`)."""
GROWTH_INTERVAL = 1000
"""Number of consecutive optimizer steps with finite gradients after which the loss scale is doubled. This is Megatron's
own default. If every doubling makes gradients overflow, one step in a thousand is lost."""


def scaler_options(dtype: torch.dtype) -> dict[str, Any]:
    """Return the loss-scale settings of Megatron's optimizer for a model of this dtype."""
    if dtype is not torch.float16:
        return {}
    return {
        "fp16": True,
        "initial_loss_scale": INITIAL_SCALE,
        "min_loss_scale": MINIMUM_SCALE,
        "loss_scale_window": GROWTH_INTERVAL,
        "hysteresis": 1,  # every overflow lowers the scale, since a second try at the same scale would lose a minibatch
    }


def scaler_of(optimizer: MegatronOptimizer) -> DynamicGradScaler | None:
    """Return the gradient scaler of one Megatron optimizer (not of a chain). Return None for a dtype other than
    float16."""
    scaler = optimizer.grad_scaler if isinstance(optimizer, MixedPrecisionOptimizer) else None
    assert scaler is None or isinstance(scaler, DynamicGradScaler)
    return scaler


def at_minimum(scaler: DynamicGradScaler) -> bool:
    """Return True if the scale cannot be lowered further."""
    return bool(scaler.scale <= scaler.min_scale)


def scale_state(scaler: DynamicGradScaler) -> dict[str, float]:
    """Return the scaler's state as plain numbers."""
    return {name: float(value) for name, value in scaler.state_dict().items()}


def set_scale_state(scaler: DynamicGradScaler, state: Mapping[str, float]) -> None:
    """Restore the state that `scale_state` returned."""
    scaler.load_state_dict(
        {
            "scale": torch.full_like(scaler.scale, state["scale"]),
            "growth_tracker": int(state["growth_tracker"]),
            "hysteresis_tracker": int(state["hysteresis_tracker"]),
        }
    )
