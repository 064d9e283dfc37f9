"""Small random models of every family that is supported, made by transformers."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

EOS = 2
SIZES: dict[str, Any] = {
    "vocab_size": 259,
    "hidden_size": 48,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": 0,
}
_SCALED = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
"""Waves of 6, 20, 63 and 199 tokens at a head_dim of 8: one is kept, one changed by degrees, two are long."""
_ROPE = {"rope_type": "default", "rope_theta": 500.0}

FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Llama 2": (LlamaConfig, {"num_key_value_heads": 6, "rope_parameters": _ROPE}),
    "Llama 3.1": (LlamaConfig, {"rope_parameters": _SCALED}),
    "Llama 3.2": (LlamaConfig, {"rope_parameters": _SCALED | {"factor": 32.0}, "tie_word_embeddings": True}),
    "Mistral": (MistralConfig, {"rope_parameters": _ROPE, "sliding_window": None, "head_dim": 12}),
    "Mistral, with a window": (MistralConfig, {"rope_parameters": _ROPE, "sliding_window": 64}),
    "Qwen 2.5": (Qwen2Config, {"rope_parameters": _ROPE, "tie_word_embeddings": True}),
    "Qwen 3": (Qwen3Config, {"rope_parameters": _ROPE, "head_dim": 16}),
}
"""By name: transformers' class of its config, and what its models have of their own."""


def random_model(family: str, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """float32. Norms and biases are random too: transformers starts them at 1 and 0, which would hide one that is left
    out."""
    config_class, own = FAMILIES[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config_class(**(SIZES | own | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name.endswith(".bias"):
                parameter.normal_(std=0.5)
    found: PreTrainedModel = model
    return found
