"""A random model with hardly any arithmetic, in the place of the demo's, to try a benchmark without measuring."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM


def small_model(folder: Path, like: Path, blocks: int | None = None) -> Path:
    """Write a random model with the tokenizer of another one, and as many blocks or `blocks`. Return the folder."""
    shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = AutoConfig.from_pretrained(like, **sizes, head_dim=64)
    config.num_hidden_layers = blocks or config.num_hidden_layers
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder
