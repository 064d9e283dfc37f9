"""Check whether a parallel layout can hold a model, and compute the shapes of a model's LoRA adapters. The ranks use
this module. The checks before a run use it too, also to propose other layouts when memory is short. Loads no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, recompute_problems
from stages.models.protocol import Role
from stages.models.spec import (
    DOWN_PROJ,
    GATE_PROJ,
    K_PROJ,
    O_PROJ,
    Q_PROJ,
    UP_PROJ,
    V_PROJ,
    ModelSpec,
    layer_shapes,
    layer_tensor,
)
from storage.problems import Problem


def gang_problems(layout: LayoutConfig, num_ranks: int, prefix: str = "") -> Iterator[Problem]:
    """Yield the problems that a layout has on `num_ranks` ranks, whatever the model. `prefix`: config key of the gang,
    put before the keys of the problems."""
    group = layout.tensor * layout.pipeline
    if group >= 1 and num_ranks % group:
        need = f"must be a multiple of layout.tensor x layout.pipeline = {group}"
        yield Problem(f"{prefix}workers", num_ranks, need)
    yield from recompute_problems(f"{prefix}layout", layout)
    if layout.sequence_parallel and layout.tensor <= 1:
        yield Problem(f"{prefix}layout.sequence_parallel", True, "needs layout.tensor of 2 or more")


def blocks_problems(model: ModelConfig, role: Role, spec: ModelSpec) -> Iterator[Problem]:
    """Yield a problem if a role's model has too few blocks for `model.frozen_blocks` or `model.critic_blocks`."""
    frozen, above = model.frozen_blocks, spec.num_layers - model.frozen_blocks
    if not 0 <= frozen < spec.num_layers:
        need = f"the {_whose(role)} has {spec.num_layers} blocks: at most {spec.num_layers - 1}"
        yield Problem("model.frozen_blocks", frozen, need)
        above = spec.num_layers
    if role is Role.CRITIC and model.critic_blocks is not None and not 1 <= model.critic_blocks <= above:
        yield Problem("model.critic_blocks", model.critic_blocks, f"must be from 1 to {above}")


def adapter_problems(lora: LoraConfig, role: Role, spec: ModelSpec) -> Iterator[Problem]:
    """Yield a problem if `model.lora.rank` is above the smaller side of a weight that has adapters."""
    shapes = layer_shapes(spec)
    sizes = {part: min(shapes[part]) for part in target_parts(lora)}
    part = min(sizes, key=sizes.__getitem__, default=None)
    if role is Role.REFERENCE or part is None or lora.rank <= sizes[part]:
        return
    outputs, inputs = shapes[part]
    need = (
        f"the {_whose(role)}'s {part} is {outputs} x {inputs}: at most {sizes[part]}, or without it in "
        "model.lora.targets"
    )
    yield Problem("model.lora.rank", lora.rank, need)


def layout_problems(
    model: ModelConfig, role: Role, spec: ModelSpec, layout: LayoutConfig, prefix: str = ""
) -> Iterator[Problem]:
    """Yield the problems of a layout that cannot divide a role's model over the ranks. The caller has checked the model
    with `blocks_problems`."""
    heads, key = spec.num_heads, f"{prefix}layout.pipeline"
    if layout.tensor > heads:
        need = f"the {_whose(role)} has {heads} query heads: at most {heads}"
        yield Problem(f"{prefix}layout.tensor", layout.tensor, need)
    if layout.pipeline > 1 and model.frozen_blocks:
        need = f"a shared frozen trunk, computed once and kept on the rank that trains what is above, needs {key}=1"
        yield Problem("model.frozen_blocks", model.frozen_blocks, need)
        return
    is_critic = role is Role.CRITIC
    optimizer = "adamw" if role is Role.REFERENCE else model.optimizer_of(role).optimizer
    divided = {"tensor": (layout.tensor, 1), "distributed_optimizer": (layout.distributed_optimizer, False)}
    for name, (given, wanted) in divided.items() if optimizer != "adamw" else ():
        if given != wanted:
            need = (
                f"model.{role}.optimizer={optimizer} needs whole matrices on each rank: {str(wanted).lower()} (data "
                f"and pipeline parallelism keep them whole), or model.{role}.optimizer=adamw"
            )
            yield Problem(f"{prefix}layout.{name}", given, need)
    blocks = model.own_blocks(spec.num_layers, is_critic=is_critic)
    if blocks % layout.pipeline:
        name = "model.critic_blocks" if is_critic and model.critic_blocks is not None else "num_hidden_layers"
        yield Problem(key, layout.pipeline, f"must divide the {_whose(role)}'s {name} = {blocks}")


def check_layout(model: ModelConfig, specs: Mapping[Role, ModelSpec], layout: LayoutConfig, num_ranks: int) -> None:
    """Raise ValueError, naming the key, if a layout does not fit `num_ranks` ranks, or cannot hold the models in
    `specs`."""
    of_roles = (
        chain(blocks_problems(model, role, spec), layout_problems(model, role, spec, layout))
        for role, spec in specs.items()
    )
    for problem in chain(gang_problems(layout, num_ranks), *of_roles):
        raise ValueError(f"{problem.key} = {problem.given}: {problem.need}")


def _whose(role: Role) -> str:
    return "model" if role is Role.POLICY else role


# ---- shapes of LoRA's adapters --------------------------------------------------------------------------


TARGET_PARTS = {
    "qkv": (Q_PROJ, K_PROJ, V_PROJ),
    "proj": (O_PROJ,),
    "fc1": (GATE_PROJ, UP_PROJ),
    "fc2": (DOWN_PROJ,),
}
"""Target of `model.lora.targets` -> projections of a layer that it stands for."""
SPLIT_BY_ROWS = ("qkv", "fc1")
"""Targets whose weights are divided by rows (outputs) among tensor-parallel ranks. Of their adapters, B is divided in
the same way, and A is whole. The other targets are divided by columns (inputs): of their adapters, A is divided, and B
is whole."""
SIDES = ("lora_A", "lora_B")


def target_parts(lora: LoraConfig) -> Iterator[str]:
    """Yield the projections of a layer that have adapters, none without LoRA."""
    for target in lora.targets if lora.rank else ():
        yield from TARGET_PARTS[target]


def adapter_shapes(spec: ModelSpec, lora: LoraConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return name -> (rows, columns) for the A and the B of each adapter in a layer. The names are peft's, without the
    prefix `base_model.model.`."""
    shapes: dict[str, tuple[int, int]] = {}
    for part in target_parts(lora):
        outputs, inputs = layer_shapes(spec)[part]
        sizes = (lora.rank, inputs), (outputs, lora.rank)
        shapes |= {layer_tensor(layer, f"{part}.{side}"): size for side, size in zip(SIDES, sizes, strict=True)}
    return shapes


def adapter_parameters(spec: ModelSpec, lora: LoraConfig, tensor: int) -> int:
    """Return the number of parameters in one block's adapters on one of `tensor` ranks. The sizes of `spec` must divide
    over the ranks (`spec.padded`)."""
    shapes, total = layer_shapes(spec), 0
    for target in lora.targets if lora.rank else ():
        for part in TARGET_PARTS[target]:
            outputs, inputs = shapes[part]
            outputs, inputs = (outputs // tensor, inputs) if target in SPLIT_BY_ROWS else (outputs, inputs // tensor)
            total += lora.rank * (outputs + inputs)
    return total
