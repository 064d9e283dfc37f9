"""Adafactor and Muon: optimizers in which the step of one weight depends on the whole matrix.

    adafactor    all tensors      no first moment; the second moment of a matrix is computed from
                                  the means of its rows and of its columns (Shazeer & Stern 2018)
    muon         matrices of      one moment; the step is the orthogonal matrix nearest to the
                 the blocks       moment, by five Newton-Schulz iterations in bfloat16 (Jordan et
                                  al. 2024)
                 other tensors    AdamW

The arithmetic is torch's (`torch.optim.Adafactor`, `torch.optim.Muon`). The matrices are Hugging Face's. Megatron fuses
queries, keys and values into one matrix, and gate and up into another. So a step updates the rows of one Hugging Face
matrix at a time. A rank must have whole matrices. The function `layouts.layout_problems` refuses other layouts.

A learning rate means about the same for AdamW, Muon and Adafactor:

- Muon's step of an A x B matrix is multiplied by 0.2 sqrt(max(A, B)). Its root mean square is then about the same as
  the root mean square of AdamW's steps (Liu et al. 2025: Muon is Scalable for LLM Training).
- torch's Adafactor multiplies its step by lr * max(eps2, root mean square of the tensor). eps2 is 1 here, not 0.001.
  With 0.001, tensors that begin at 0 (a critic's head, LoRA's B) would hardly move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from stages.models.adamw import BlockAdamW
from stages.models.build import DTYPES, Blueprint
from stages.models.checkpoints import Master, moments_of
from stages.models.config import OptimizerConfig
from stages.models.hf_conversion import PARTS, adapted_weight, named_by_block, part_of_rows

Rows = slice | Tensor
"""Rows of a tensor that form one Hugging Face tensor: a slice if they are consecutive, otherwise their indices."""

MUON_MOMENTUM = 0.95
ADAFACTOR_EPS = (1e-15, 1.0)
"""Adafactor's eps1 and eps2. eps1 is a lower bound on the mean square of a matrix's gradients. torch's default is about
1e-7, which is too high for a model with billions of parameters: if the global norm of the gradients is 1, their mean
square is below 1e-9. An eps1 far below 1e-15 is not possible either: torch also uses eps1 squared, as a lower bound on
each second moment, and it would be 0 in float32."""


class MatrixOptimizer(BlockAdamW):
    """Adafactor or Muon for the tensors in `parts`, and AdamW for the others."""

    def __init__(
        self, replaced: torch.optim.Optimizer, config: OptimizerConfig, parts: Mapping[Tensor, Sequence[Rows]]
    ) -> None:
        """`replaced`: torch's AdamW, whose tensors and settings this optimizer takes over. `parts`: result of
        `parts_of`."""
        super().__init__(replaced, DTYPES[config.moments_dtype])
        self._parts = parts
        nothing = [torch.empty(1, 1)]
        self._factored = config.optimizer == "adafactor"
        self._of_part: torch.optim.Optimizer = (
            torch.optim.Adafactor(nothing, eps=ADAFACTOR_EPS)
            if self._factored
            else torch.optim.Muon(nothing, momentum=MUON_MOMENTUM, adjust_lr_fn="match_rms_adamw")
        )

    def new_state(self, master: Tensor, steps: float) -> dict[str, Tensor]:
        if master not in self._parts:
            return super().new_state(master, steps)
        step = torch.tensor(steps, dtype=torch.float32, device=master.device)
        if not self._factored:
            return {"step": step, "momentum_buffer": torch.zeros_like(master, dtype=self.moments_dtype)}
        if master.dim() == 1:
            return {"step": step, "variance": torch.zeros_like(master)}
        rows, columns = master.shape
        return {
            "step": step,
            "row_var": master.new_zeros(rows, 1),
            "col_var": master.new_zeros(len(self._parts[master]), columns),
        }

    def _update(self, master: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if master not in self._parts:
            super()._update(master, gradient, group)
            return
        if master not in self.state:
            self.state[master] = self.new_state(master, 0)
        state = self.state[master]
        (settings,) = self._of_part.param_groups
        settings |= {"lr": group["lr"], "weight_decay": group["weight_decay"]}
        for number, rows in enumerate(self._parts[master]):
            places = {name: slice(number, number + 1) if name == "col_var" else rows for name in moments_of(state)}
            part = master.detach()[rows]
            moments = {name: state[name][place].float() for name, place in places.items()}
            part.grad = gradient[rows].float() * self.factor
            settings["params"] = [part]
            self._of_part.state[part] = moments | {"step": state["step"].clone()}
            self._of_part.step()
            self._of_part.state.clear()
            if isinstance(rows, Tensor):  # otherwise the part is a view
                master.detach()[rows] = part
            for name, place in places.items():
                if isinstance(place, Tensor) or moments[name].dtype is not state[name].dtype:
                    state[name][place] = moments[name].to(state[name].dtype)
        settings["params"] = []
        state["step"] += 1


def parts_of(masters: Sequence[Master], model: Any, blueprint: Blueprint, optimizer: str) -> dict[Tensor, list[Rows]]:
    """Return tensor -> rows of each Hugging Face tensor that is fused into it. The keys are the tensors that Adafactor
    or Muon updates."""
    names = {p: (name, block) for name, block, p in named_by_block(model, blueprint.model.frozen_blocks)}
    found: dict[Tensor, list[Rows]] = {}
    for master in masters:
        name, block = names[master.parameter]
        if optimizer == "adafactor" or (block is not None and master.tensor.dim() == 2):
            found[master.tensor] = list(_rows_of_parts(name, master.tensor, blueprint))
    return found


def _rows_of_parts(name: str, master: Tensor, blueprint: Blueprint) -> list[Rows]:
    weight, suffix = adapted_weight(name)
    weight = weight.replace(".bias", ".weight")
    count = len(PARTS.get(weight, ()))
    if count < 2:
        return [slice(None)]
    if suffix.endswith("A"):
        part_M = torch.arange(count).repeat_interleave(len(master) // count)
    else:
        part_M = part_of_rows(weight, blueprint.spec, 0, 1)
    indices = [(part_M == number).nonzero()[:, 0] for number in range(count)]
    return [
        slice(int(rows[0]), int(rows[-1]) + 1) if len(rows) == rows[-1] - rows[0] + 1 else rows.to(master.device)
        for rows in indices
    ]
