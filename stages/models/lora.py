"""LoRA (Hu et al. 2021): low-rank adapters on a block's parallel linears, whose own weights are frozen.

    y = x W^T + (alpha / rank) (x A^T) B^T      W frozen; at version 0 A [rank, inputs] normal, B [outputs, rank] zero

Policy, critic and reference share W. Policy and critic have adapters of their own, the reference has none.

Megatron fuses queries, keys and values into one linear, and gate and up into another. Each of these projections (a part
of the linear) has its own A, as in peft. So ranks and learning rates known from peft apply, and peft can read the
exported files. (One A per fused linear would have fewer parameters at the same rank.) The As are stacked, so that x is
multiplied once. B has its rows in the order of W's rows, and the code that cuts, pads, saves and names W does the same
for B.

    tensor parallelism      A                       B                       exchanged
    rows of W (qkv, fc1)    whole on each rank      cut                     x A^T is gathered (sequence parallelism),
                                                                            or only its gradient is added up
    columns (proj, fc2)     cut                     whole on each rank      x A^T is added up

x A^T has only `rank` numbers per token and part.

`write_adapters` writes a policy's adapters as a directory. Hugging Face's peft can add these adapters to the start
model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import torch
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

from stages.models.config import LoraConfig, ModelConfig
from stages.models.hf_conversion import SPLIT_AXES, named_by_block, part_of_rows
from stages.models.hf_weights import write_tensors
from stages.models.kernels.blocks import BlockKernels
from stages.models.layers import cpu_linear
from stages.models.layouts import SIDES, SPLIT_BY_ROWS, TARGET_PARTS, adapter_shapes, target_parts
from stages.models.numerics import Products
from stages.models.parallel import ParallelRank
from stages.models.protocol import Role
from stages.models.spec import ModelSpec

LINEARS = {
    "qkv": "self_attention.linear_qkv",
    "proj": "self_attention.linear_proj",
    "fc1": "mlp.linear_fc1",
    "fc2": "mlp.linear_fc2",
}
"""Target of `model.lora.targets` -> name of Megatron's linear within a block."""

FrozenWeights = dict[tuple[str, int | None], Parameter]
"""(Name within the block or model, block) -> frozen parameter. The models of a rank's roles share these parameters."""

_Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""A function (x, weight, total) -> total + x @ weight.T. A `total` of None counts as zero. The function may change
`total` in place."""


class Adapter(Module):
    """The low-rank product that LoRA adds to a linear's output, with A [parts * rank, inputs] and B [outputs, rank]. If
    tensor parallelism cuts the linear's inputs, A is cut in the same way, and B is whole. If it cuts the linear's
    outputs, B is cut, and A is whole."""

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
        """Create the adapter. Its weights are not initialised.

        Args:
            part_M: for each row of the weight, the index of its projection (below `parts`). A fused linear has several
                projections: queries, keys and values, or gate and up.
            by_rows: True if tensor parallelism cuts the linear's outputs, False if it cuts the inputs.
            sharded: True if each rank has only a slice of the sequence (sequence parallelism).
        """
        super().__init__()
        outputs, inputs = weight_MK.shape
        self.scale, self.parts = lora.alpha / lora.rank, parts
        self.by_rows, self.sharded, self.multiply = by_rows, sharded, multiply
        self.A = Parameter(weight_MK.new_empty(parts * lora.rank, inputs))
        self.B = Parameter(weight_MK.new_empty(outputs, lora.rank))
        # B is repeated once per part's A; this marks the entries that belong to another part
        other_MR = part_M[:, None] != torch.arange(parts).repeat_interleave(lora.rank)
        self.other_MR = other_MR.to(weight_MK.device)
        # the side that is whole on each rank; if ranks have only parts of the sequence, Megatron adds up its gradients
        (self.A if by_rows else self.B).sequence_parallel = sharded  # type: ignore[attr-defined]

    def forward(self, x_N1K: Tensor, product_N1M: Tensor) -> Tensor:
        """Return the linear's product (`product_N1M`) plus the adapter's product. The adapter's last matrix product
        adds to `product_N1M` directly, in place if possible. A separate addition would read and write `product_N1M`
        once more, which takes longer than the adapter's narrow products."""
        inner_N1R = self.multiply(x_N1K, self.A, None)
        if self.by_rows:
            # A is whole on each rank, B has the rank's outputs; the backward pass adds the ranks' gradients up
            exchange = gather_from_sequence_parallel_region if self.sharded else copy_to_tensor_model_parallel_region
        else:
            exchange = (
                reduce_scatter_to_sequence_parallel_region if self.sharded else reduce_from_tensor_model_parallel_region
            )
        wide_MR = self.B if self.parts == 1 else self.B.repeat(1, self.parts).masked_fill(self.other_MR, 0)
        return self.multiply(exchange(inner_N1R) * self.scale, wide_MR, product_N1M)


def add_adapters(
    model: GPTModel,
    lora: LoraConfig,
    spec: ModelSpec,
    rank: ParallelRank,
    *,
    products: Products,
    kernels: BlockKernels,
) -> None:
    """Add an adapter, whose weights are not initialised, to each target linear of every block."""

    def multiply(x: Tensor, weight: Tensor, total: Tensor | None) -> Tensor:
        if not kernels.portable:
            return cpu_linear(x, weight, products, kernels, total)
        rows = x.flatten(0, -2)
        product = rows @ weight.T if total is None else torch.addmm(total.flatten(0, -2), rows, weight.T)
        return product.view(*x.shape[:-1], len(weight))

    for target in lora.targets:
        name, by_rows = LINEARS[target], target in SPLIT_BY_ROWS
        parts = len(TARGET_PARTS[target])
        own = (spec, rank.tensor_rank, rank.tensor_size)
        part_M = part_of_rows(f"{name}.weight", *own) if by_rows else torch.zeros(spec.hidden_size)
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
    """Freeze everything but adapters and a critic's head."""
    for name, parameter in model.named_parameters():
        is_head = role is Role.CRITIC and name.startswith("output_layer.")
        parameter.requires_grad_(".lora." in name or is_head)


def share_frozen(model: GPTModel, first_block: int, shared: FrozenWeights) -> None:
    """Replace the model's frozen parameters by the same parameters in `shared`. Parameters that `shared` lacks are
    added to it."""
    keys = {p: (name, block) for name, block, p in named_by_block(model, first_block) if not p.requires_grad}
    for module in model.modules():
        for attribute, parameter in list(module.named_parameters(recurse=False)):
            if parameter in keys:
                setattr(module, attribute, shared.setdefault(keys[parameter], parameter))


def let_gradients_pass(model: GPTModel) -> None:
    """Make the embedding's output require a gradient in training. Otherwise no input of a recomputed block requires a
    gradient, and Megatron's recomputation gives no gradients to the adapters in the block."""

    def ask(_: Module, __: object, hidden: Tensor) -> Tensor:
        return hidden.requires_grad_() if torch.is_grad_enabled() else hidden

    if model.pre_process:
        model.embedding.register_forward_hook(ask)


def initial_adapters(spec: ModelSpec, lora: LoraConfig, layer: int, seed: int) -> dict[str, Tensor]:
    """Return name -> tensor for the adapters of a layer at version 0, with the names of `adapter_shapes`. Each tensor
    is whole, without tensor parallelism. B is zero. A is normal with variance 1 / (3 n), where n is the linear's number
    of inputs. peft draws A from a uniform distribution of the same variance. The numbers depend only on the seed and
    the tensor's name, not on the layout."""
    return {
        name: _drawn(f"{seed} {name}", shape) if f".{SIDES[0]}." in name else torch.zeros(shape)
        for name, shape in adapter_shapes(spec, lora, layer).items()
    }


def merge(weight_MK: Tensor, name: str, adapters: Mapping[str, Tensor], lora: LoraConfig) -> Tensor:
    """Return W + (alpha / rank) B A for a whole Hugging Face tensor W, computed in float32 and rounded once to W's
    dtype. The tensor is whole so that its bits are the same in every layout."""
    part = name.removesuffix(".weight")
    a_RK, b_MR = (adapters[f"{part}.{side}.weight"].float() for side in SIDES)
    return torch.addmm(weight_MK.float(), b_MR, a_RK, alpha=lora.alpha / lora.rank).to(weight_MK.dtype)


def _add_adapter(
    linear: Module, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor | None]
) -> tuple[Tensor, Tensor | None]:
    product, bias = output
    return linear.get_submodule("lora")(inputs[0], product), bias


def _drawn(key: str, shape: tuple[int, int]) -> Tensor:
    """Return normal numbers [rank, inputs] with variance 1 / (3 inputs), the same on every processor."""
    generator = np.random.default_rng(list(hashlib.blake2b(key.encode(), digest_size=16).digest()))
    return torch.from_numpy(generator.standard_normal(shape, np.float32)) / math.sqrt(3 * shape[1])


# ---- files for peft --------------------------------------------------------------------------------------

ADAPTERS = "adapter"
"""Subdirectory of a model's directory for the adapters. If they lay beside config.json, transformers would add them to
the model, whose weights contain them already."""
_PREFIX = "base_model.model."


def write_adapters(directory: Path, model: ModelConfig, spec: ModelSpec, adapters: Mapping[str, Tensor]) -> None:
    """Write adapters (by the names of `adapter_shapes`) so that `PeftModel.from_pretrained(start_model, directory)`
    returns the policy. Create the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": model.path,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_rslora": False,
        "target_modules": sorted(part.rpartition(".")[2] for part in target_parts(model.lora)),
        "layers_to_transform": [*range(model.frozen_blocks, spec.num_layers)] if model.frozen_blocks else None,
        "layers_pattern": "layers" if model.frozen_blocks else None,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    named = {_PREFIX + name: tensor for name, tensor in adapters.items()}
    write_tensors(directory / "adapter_model.safetensors", named)
