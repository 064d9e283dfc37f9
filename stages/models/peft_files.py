"""A policy's adapters as a directory that Hugging Face's peft loads over the start model.

May import torch, stages.models.{adapter_shapes, config, spec, tensor_files} and the standard library.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from stages.models.adapter_shapes import target_parts
from stages.models.config import ModelConfig
from stages.models.spec import ModelSpec
from stages.models.tensor_files import write_tensors

ADAPTERS = "adapter"
"""Where they lie in a model's directory: beside its config.json, transformers would take them for changes to it."""
_PREFIX = "base_model.model."


def write_adapters(directory: Path, model: ModelConfig, spec: ModelSpec, adapters: Mapping[str, Tensor]) -> None:
    """Writes adapters, by the names of `adapter_shapes`, so that `PeftModel.from_pretrained(start_model, directory)`
    is the policy. Makes the directory."""
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
