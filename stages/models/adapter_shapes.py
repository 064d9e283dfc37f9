"""Names and shapes of LoRA's adapters as in Hugging Face's peft: an A [rank, inputs] and a B [outputs, rank] for every
projection. Queries, keys, values, gate and up are separate projections.
"""

from __future__ import annotations

from collections.abc import Iterator

from stages.models.config import LoraConfig
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

TARGET_PARTS = {
    "qkv": (Q_PROJ, K_PROJ, V_PROJ),
    "proj": (O_PROJ,),
    "fc1": (GATE_PROJ, UP_PROJ),
    "fc2": (DOWN_PROJ,),
}
"""Projections of a layer by target of `model.lora.targets`."""
SPLIT_BY_ROWS = ("qkv", "fc1")
"""Targets whose outputs, and so B, tensor parallelism cuts. For the others it cuts the inputs and A."""
SIDES = ("lora_A", "lora_B")


def target_parts(lora: LoraConfig) -> Iterator[str]:
    """Yield the projections of a layer that have adapters, none without LoRA."""
    for target in lora.targets if lora.rank else ():
        yield from TARGET_PARTS[target]


def adapter_shapes(spec: ModelSpec, lora: LoraConfig, layer: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of A and B of a layer's adapters by peft's name (without its `base_model.model.`)."""
    found: dict[str, tuple[int, int]] = {}
    for part in target_parts(lora):
        outputs, inputs = layer_shapes(spec)[part]
        sizes = (lora.rank, inputs), (outputs, lora.rank)
        found |= {layer_tensor(layer, f"{part}.{side}"): size for side, size in zip(SIDES, sizes, strict=True)}
    return found


def adapter_parameters(spec: ModelSpec, lora: LoraConfig, tensor: int) -> int:
    """Return the number of parameters in one block's adapters on one of `tensor` ranks. `spec` has sizes that divide
    over the ranks (`spec.padded`)."""
    shapes, total = layer_shapes(spec), 0
    for target in lora.targets if lora.rank else ():
        for part in TARGET_PARTS[target]:
            outputs, inputs = shapes[part]
            outputs, inputs = (outputs // tensor, inputs) if target in SPLIT_BY_ROWS else (outputs, inputs // tensor)
            total += lora.rank * (outputs + inputs)
    return total
