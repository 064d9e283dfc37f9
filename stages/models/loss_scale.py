"""The loss scale under float16, whose smallest number is 6e-8: the loss is multiplied by it before the backward pass,
so that small gradients are not rounded to 0, and the gradients are divided by it in float32 before anything reads them.

    gradients finite    step; after `growth_interval` of them in a row   scale' = 2 scale
    not finite          no step                                          scale' = max(scale / 2, minimum)

(Micikevicius et al. 2018, as Megatron's DynamicGradScaler computes it.) A gradient that is not finite is the scale's
doing, until the scale is at its minimum. What Megatron holds of it is read and put back here: it decides the bits of
the next update, so that it belongs to a model's state.

May import torch, megatron.core and stages.models.config.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.optimizer.grad_scaler import DynamicGradScaler
from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

from stages.models.config import LossScaleConfig


def scaler_options(config: LossScaleConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Megatron's settings of its optimizer for a model of this dtype."""
    if dtype is not torch.float16:
        return {}
    return {
        "fp16": True,
        "initial_loss_scale": config.initial,
        "min_loss_scale": config.minimum,
        "loss_scale_window": config.growth_interval,
        "hysteresis": 1,  # every overflow lowers the scale: one more at the same scale would cost a minibatch
    }


def scaler_of(optimizer: MegatronOptimizer) -> DynamicGradScaler | None:
    """That of one of Megatron's optimizers (not a chain of them); None but under float16."""
    scaler = optimizer.grad_scaler if isinstance(optimizer, MixedPrecisionOptimizer) else None
    assert scaler is None or isinstance(scaler, DynamicGradScaler)
    return scaler


def at_minimum(scaler: DynamicGradScaler) -> bool:
    """Whether the scale cannot be lowered any more."""
    return bool(scaler.scale <= scaler.min_scale)


def scale_state(scaler: DynamicGradScaler) -> dict[str, float]:
    """What decides how the next steps are scaled, as plain numbers."""
    return {name: float(value) for name, value in scaler.state_dict().items()}


def set_scale_state(scaler: DynamicGradScaler, state: Mapping[str, float]) -> None:
    """Puts back what `scale_state` gave."""
    scaler.load_state_dict(
        {
            "scale": torch.full_like(scaler.scale, state["scale"]),
            "growth_tracker": int(state["growth_tracker"]),
            "hysteresis_tracker": int(state["hysteresis_tracker"]),
        }
    )
