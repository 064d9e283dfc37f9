"""What a model directory in Hugging Face layout says of itself in its small JSON files; and `random:tiny`, a small
random Llama that every test and smoke run can use without any file.

Standard library only: nothing here waits for torch or transformers to load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANDOM_TINY = "random:tiny"
"""Stands for a path wherever a model directory is read."""

REWARD_BIAS = "reward_bias"
"""Key of a reward model's config.json: what is added to the output of its head, which has no bias of its own."""

_TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 176,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def read_config(path: str) -> dict[str, Any]:
    """The contents of `config.json`, as Hugging Face writes it. Raises FileNotFoundError with what was looked for."""
    if path == RANDOM_TINY:
        return json.loads(json.dumps(_TINY_CONFIG))  # a copy that the caller may change
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no model at {path!r}: no {file} (give a Hugging Face directory, or {RANDOM_TINY!r})")
    return dict(json.loads(file.read_text()))


def read_eos_ids(path: str) -> tuple[int, ...]:
    """The model's own end-of-sequence tokens: generation_config.json's where it names some, else config.json's."""
    generation = Path(path) / "generation_config.json"
    found = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = read_config(path).get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(i) for i in (found if isinstance(found, list) else [found]))
