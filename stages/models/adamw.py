"""AdamW with gradients and moments in bfloat16, and float32 arithmetic.

In torch's AdamW, gradients and moments have the dtype of the updated tensor. Here this tensor is a master: the
optimizer's float32 tensor for a parameter. Megatron's own optimizer with smaller gradients and moments
(`use_precision_aware_optimizer`) needs Transformer Engine. Here a step converts one block of a tensor at a time to
float32, so nothing as large as a tensor is allocated:

    g = factor · gradient                m = β1 m + (1 − β1) g                v = β2 v + (1 − β2) g²
    θ = (1 − lr · decay) θ − lr (m / (1 − β1ᵗ)) / (sqrt(v / (1 − β2ᵗ)) + eps)         (Loshchilov & Hutter 2019)

θ is updated with the unrounded m and v of the block. m and v are rounded to nearest only when they are stored.

A bfloat16 number has 8 significant bits, so a stored moment stays the same if a step would change it by less than 2⁻⁸
of its value. With β ≤ 1 − 2⁻⁸ (`MOST_BETA` in `config`) a moment still decays when gradients vanish. The relative error
at which a moment comes to rest is at most 2⁻⁸ / (1 − β): 8 % for a β of 0.95.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import MegatronOptimizer
from torch import Tensor

from stages.models.checkpoints import masters_of

MOMENTS = ("exp_avg", "exp_avg_sq")
_BLOCK = {"cpu": 1 << 18, "cuda": 1 << 24}
"""Device -> number of elements of a block: on a CPU few enough for its cache, on a GPU enough to keep it busy."""


class BlockAdamW(torch.optim.Optimizer):
    """AdamW whose gradients may be bfloat16, and whose moments have `moments_dtype`."""

    def __init__(self, replaced: torch.optim.Optimizer, moments_dtype: torch.dtype) -> None:
        """`replaced`: torch's AdamW, whose tensors and settings this optimizer gets."""
        super().__init__([torch.empty(0)], {})
        # not by the constructor: Megatron's shards of float32 weights are views, which it would refuse
        self.param_groups = replaced.param_groups
        self.moments_dtype = moments_dtype
        self.factor = 1.0
        """Factor that the next step multiplies gradients by, in float32."""

    def new_state(self, master: Tensor, steps: float) -> dict[str, Tensor]:
        """Return a new optimizer state for a tensor. Its step count is `steps`, and its moments are 0. When a
        checkpoint is loaded, the saved moments are then read into this state."""
        return initial_state(master, steps, self.moments_dtype)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for master in group["params"]:
                if master.grad is not None:
                    self._update(master, master.grad, group)

    def _update(self, master: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if master not in self.state:
            self.state[master] = self.new_state(master, 0)
        state, lr, (beta1, beta2) = self.state[master], group["lr"], group["betas"]
        number = state["step"].item() + 1
        state["step"] += 1
        unbiased1, unbiased2 = 1 - beta1**number, 1 - beta2**number
        for block, of_gradient, *moments in _blocks(master, gradient, *(state[name] for name in MOMENTS)):
            g, (m, v) = of_gradient.float(), (moment.float() for moment in moments)
            g = g * self.factor if self.factor != 1 else g
            m.lerp_(g, 1 - beta1)
            v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            block.mul_(1 - lr * group["weight_decay"])
            block.addcdiv_(m, v.div(unbiased2).sqrt_().add_(group["eps"]), value=-lr / unbiased1)
            if self.moments_dtype is not torch.float32:  # otherwise m and v are the moments themselves
                for moment, value in zip(moments, (m, v), strict=True):
                    moment.copy_(value)


def initial_state(master: Tensor, steps: float, moments_dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a new AdamW state for a tensor: moments of 0, and `steps` as the number of steps made. For a new optimizer
    `steps` is 0. When a checkpoint is loaded, `steps` is the number in the checkpoint, and the moments are overwritten
    afterwards."""
    step = torch.tensor(steps, dtype=torch.float32, device=master.device)
    return {"step": step, **{name: torch.zeros_like(master, dtype=moments_dtype) for name in MOMENTS}}


def attach_gradients(optimizer: MegatronOptimizer) -> None:
    """Set the gradient of every master (the optimizer's tensor for a parameter) to a view of Megatron's gradient
    buffer, in the buffer's dtype. (Megatron's `prepare_grads` would copy all gradients to float32.)"""
    for master in masters_of(optimizer):
        whole: Tensor = master.parameter.main_grad  # type: ignore[attr-defined]
        buffer = whole.view(-1)[master.start : master.start + master.tensor.numel()]
        if buffer.dtype is not master.tensor.dtype:
            master.tensor.grad_dtype = buffer.dtype
        master.tensor.grad = buffer.view_as(master.tensor)


@torch.no_grad()
def gradient_norm(optimizer: MegatronOptimizer) -> float:
    """Return the norm of the masters' gradients over all ranks. Squares are float32. (Megatron's own function rounds
    the norm of each tensor to the gradients' dtype.) A collective call."""
    group = optimizer.get_grad_stats_parallel_group()
    gradients = optimizer.get_main_grads_for_grad_norm()
    device = optimizer.get_parameters()[0].device
    total = torch.zeros((), dtype=torch.float64, device=device)
    for gradient in gradients:
        for (block,) in _blocks(gradient):
            total += block.float().square().sum()
    dist.all_reduce(total, group=group)
    return float(total.sqrt().item())


def _blocks(*tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield views of the same elements of each tensor, block by block. All are contiguous and equally large."""
    size = _BLOCK["cpu" if tensors[0].is_cpu else "cuda"]
    flat = [tensor.detach().view(-1) for tensor in tensors]
    for start in range(0, flat[0].numel(), size):
        yield [tensor[start : start + size] for tensor in flat]
