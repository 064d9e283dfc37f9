"""LoRA (Hu et al. 2021): low-rank adapters on a block's parallel linears, over weights that no one trains.

    y = x W^T + (alpha / rank) (x A^T) B^T      W frozen; at version 0 A [rank, inputs] normal, B [outputs, rank] zero

Policy, critic and reference are the same W: the reference has no adapters, the policy and the critic each their own.
Megatron fuses queries, keys and values, and gate and up. Each of them has an A of its own, as in peft, whose users'
ranks and learning rates carry over and which reads what is exported; one A for all of a fused linear would be fewer
numbers under the same rank. The As lie one below the other, so that x is multiplied once; B lies as W does, row by row,
and is cut, padded, saved and named by what does that for W.

    tensor parallelism      A                                       B                                    exchanged
    rows of W (qkv, fc1)    whole on each rank                      cut                                  x A^T: rank
    columns (proj, fc2)     cut                                     whole on each rank                   x A^T: rank

May import numpy, torch, megatron.core and this folder.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.tensor_parallel.mappings import reduce_scatter_to_sequence_parallel_region
from torch import Tensor
from torch.nn import Module, Parameter

from stages.models.adapter_shapes import SIDES, SPLIT_BY_ROWS, TARGET_PARTS, adapter_shapes
from stages.models.config import LoraConfig
from stages.models.hf_conversion import PARTS, SPLIT_AXES, from_hf, named_by_block
from stages.models.kernels.protocol import BlockKernels
from stages.models.linears import cpu_linear
from stages.models.parallel import ParallelRank
from stages.models.products import Products
from stages.models.protocol import Role
from stages.models.spec import ModelSpec, layer_shapes, layer_tensor

LINEARS = {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
"""Megatron's linear, within a block, by its name in `model.lora.targets`."""

FrozenWeights = dict[tuple[str, int | None], Parameter]
"""A rank's frozen parameters by (name within the block or model, block), which the roles' models share."""

_Multiply = Callable[[Tensor, Tensor], Tensor]


class Adapter(Module):
    """What LoRA adds to a linear's output. Holds A [parts * rank, inputs], of which this rank has some inputs where
    tensor parallelism cuts them, and B [outputs, rank], of which it has some outputs where it cuts those."""

    def __init__(
        self,
        weight_MK: Parameter,
        part_M: Tensor,
        parts: int,
        lora: LoraConfig,
        multiply: _Multiply,
        *,
        by_rows: bool,
        sharded: bool,
    ) -> None:
        """`part_M`: which of the weight's `parts` each of its rows belongs to; `by_rows`: tensor parallelism cuts
        outputs; `sharded`: each rank sees a part of the sequence."""
        super().__init__()
        outputs, inputs = weight_MK.shape
        self.scale, self.parts = lora.alpha / lora.rank, parts
        self.by_rows, self.sharded, self.multiply = by_rows, sharded, multiply
        self.A = Parameter(weight_MK.new_empty(parts * lora.rank, inputs))
        self.B = Parameter(weight_MK.new_empty(outputs, lora.rank))
        # of B repeated once for every part's A, what belongs to another part
        other_MR = part_M[:, None] != torch.arange(parts).repeat_interleave(lora.rank)
        self.other_MR = other_MR.to(weight_MK.device)
        # of the side that is whole on each rank, which sees a part of the sequence only, Megatron adds the gradients up
        (self.A if by_rows else self.B).sequence_parallel = sharded  # type: ignore[attr-defined]

    def forward(self, x_N1K: Tensor) -> Tensor:
        inner_N1R = self.multiply(x_N1K, self.A)
        if self.by_rows:
            # back to this rank's outputs; in the backward pass the ranks' gradients are added up
            exchange = gather_from_sequence_parallel_region if self.sharded else copy_to_tensor_model_parallel_region
        else:
            exchange = (
                reduce_scatter_to_sequence_parallel_region if self.sharded else reduce_from_tensor_model_parallel_region
            )
        wide_MR = self.B if self.parts == 1 else self.B.repeat(1, self.parts).masked_fill(self.other_MR, 0)
        return self.multiply(exchange(inner_N1R) * self.scale, wide_MR)


def add_adapters(
    model: GPTModel,
    lora: LoraConfig,
    spec: ModelSpec,
    rank: ParallelRank,
    *,
    products: Products,
    kernels: BlockKernels,
) -> None:
    """Gives the target linears of every block of a model an adapter each, whose weights are not yet set."""

    def multiply(x: Tensor, weight: Tensor) -> Tensor:
        return F.linear(x, weight) if x.is_cuda else cpu_linear(x, weight, products, kernels)

    for target in lora.targets:
        name, by_rows = LINEARS[target], target in SPLIT_BY_ROWS
        parts = len(TARGET_PARTS[target])
        part_M = _part_of_rows(f"{name}.weight", spec, rank) if by_rows else torch.zeros(spec.hidden_size)
        for layer in model.decoder.layers:
            linear = layer.get_submodule(name)
            adapter = Adapter(
                linear.weight, part_M, parts, lora, multiply, by_rows=by_rows, sharded=model.config.sequence_parallel
            )
            for side, parameter in (("A", adapter.A), ("B", adapter.B)):
                if f"{name}.lora.{side}" in SPLIT_AXES:
                    axis = SPLIT_AXES[f"{name}.lora.{side}"]
                    set_tensor_model_parallel_attributes(parameter, True, axis, 1)
            linear.lora = adapter
            linear.register_forward_hook(_add_adapter)


def freeze(model: GPTModel, role: Role) -> None:
    """Leaves adapters and a critic's head to be trained."""
    for name, parameter in model.named_parameters():
        is_head = role is Role.CRITIC and name.startswith("output_layer.")
        parameter.requires_grad_(".lora." in name or is_head)


def share_frozen(model: GPTModel, first_block: int, shared: FrozenWeights) -> None:
    """Puts the frozen parameters that another model has already in place of the model's own; `shared` gets those that
    none had."""
    keys = {p: (name, block) for name, block, p in named_by_block(model, first_block) if not p.requires_grad}
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter in keys:
                setattr(module, attribute, shared.setdefault(keys[parameter], parameter))


def let_gradients_pass(model: GPTModel) -> None:
    """Has the embedding's output ask for a gradient while one is computed: Megatron's recomputation gives none to what
    lies inside where nothing that comes in asks for it."""

    def ask(_: Module, __: object, hidden: Tensor) -> Tensor:
        return hidden.requires_grad_() if torch.is_grad_enabled() else hidden

    if model.pre_process:
        model.embedding.register_forward_hook(ask)


def initial_adapters(spec: ModelSpec, lora: LoraConfig, layer: int, seed: int) -> dict[str, Tensor]:
    """A layer's adapters of version 0 by Hugging Face name, whole: B zero, A normal with the variance of peft's uniform
    numbers, 1 / (3 inputs). A function of seed and name, whatever the layout."""
    return {
        name: _drawn(f"{seed} {name}", shape) if f".{SIDES[0]}." in name else torch.zeros(shape)
        for name, shape in adapter_shapes(spec, lora, layer).items()
    }


def merge(weight_MK: Tensor, name: str, adapters: Mapping[str, Tensor], lora: LoraConfig) -> Tensor:
    """W + (alpha / rank) B A of a whole Hugging Face tensor, computed in float32 and rounded once to W's dtype. Whole,
    so that its bits are the same in every layout."""
    part = name.removesuffix(".weight")
    a_RK, b_MR = (adapters[f"{part}.{side}.weight"].float() for side in SIDES)
    return torch.addmm(weight_MK.float(), b_MR, a_RK, alpha=lora.alpha / lora.rank).to(weight_MK.dtype)


def _add_adapter(
    linear: Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    product, bias = output
    adapter: Module = linear.get_submodule("lora")
    return product + adapter(inputs[0]), bias


def _part_of_rows(name: str, spec: ModelSpec, rank: ParallelRank) -> Tensor:
    """Which of a fused weight's parts each of this rank's rows belongs to, found by cutting the parts' numbers as the
    weight itself is cut."""
    shapes = layer_shapes(spec)
    numbers = {
        layer_tensor(0, part): torch.full((shapes[part][0], 1), number, dtype=torch.int64)
        for number, part in enumerate(PARTS[name])
    }
    return from_hf(name, 0, numbers, spec, rank.tensor_rank, rank.tensor_size)[:, 0]


def _drawn(key: str, shape: tuple[int, int]) -> Tensor:
    """[rank, inputs], by numpy's generator, whose numbers are the same on every processor."""
    generator = np.random.default_rng(list(hashlib.blake2b(key.encode(), digest_size=16).digest()))
    return torch.from_numpy(generator.standard_normal(shape, np.float32)) / math.sqrt(3 * shape[1])
