"""What a config.json says of a model, and the tensors that it has: against transformers."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from stages.models.hf_config import RANDOM_TINY, read_config
from stages.models.spec import (
    EMBEDDING,
    LM_HEAD,
    ModelSpec,
    layer_and_part,
    layer_tensor,
    read_spec,
    rope_theta,
    spec_of,
    tensor_shapes,
)


def test_random_tiny_in_numbers() -> None:
    assert read_spec(RANDOM_TINY) == ModelSpec(
        num_layers=4,
        hidden_size=64,
        intermediate_size=176,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=256,
        max_positions=256,
        norm_eps=1e-5,
        rope_theta=10000.0,
        tied_embeddings=True,
    )


def test_what_a_config_leaves_out() -> None:
    """As transformers fills it in: a key/value head for each head, heads that share the hidden size, no tie."""
    config = read_config(RANDOM_TINY)
    for key in ("num_key_value_heads", "head_dim", "tie_word_embeddings", "attention_bias", "mlp_bias", "hidden_act"):
        del config[key]
    spec = spec_of(config | {"attention_bias": None, "hidden_size": 96})
    assert (spec.num_kv_heads, spec.head_dim, spec.tied_embeddings) == (4, 24, False)


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_are_those_of_transformers(tied: bool) -> None:
    config = read_config(RANDOM_TINY) | {"tie_word_embeddings": tied, "head_dim": 24}
    with torch.device("meta"):
        expected = LlamaForCausalLM(LlamaConfig(**config)).state_dict()
    if tied:
        assert expected.pop(LM_HEAD).shape == expected[EMBEDDING].shape
    spec = spec_of(config)
    assert tensor_shapes(spec) == {name: tuple(tensor.shape) for name, tensor in expected.items()}
    assert spec.output_tensor == (EMBEDDING if tied else LM_HEAD)


def test_names_of_parts_and_back() -> None:
    names = tensor_shapes(read_spec(RANDOM_TINY))
    of_layers = {name: found for name in names if (found := layer_and_part(name)) is not None}
    assert len(of_layers) == 4 * 9
    assert all(layer_tensor(*found) == name for name, found in of_layers.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not supported, only 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for 'llama', only 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* only None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported, only 'default'"),
    ],
)
def test_what_is_not_supported_is_refused_by_its_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"config.json: {message}"):
        spec_of(read_config(RANDOM_TINY) | changes)


@pytest.mark.parametrize("key", ["hidden_size", "vocab_size", "rms_norm_eps"])
def test_a_missing_size_is_named(key: str) -> None:
    config = read_config(RANDOM_TINY)
    del config[key]
    with pytest.raises(ValueError, match=rf"config\.json has no {key}"):
        spec_of(config)


def test_rope_theta_in_both_layouts() -> None:
    assert rope_theta({"rope_theta": 5e5}) == 5e5
    assert rope_theta({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}) == 1e5
    with pytest.raises(ValueError, match="'llama3' is not supported"):
        rope_theta({"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8}})


def test_reading_a_spec_waits_for_no_heavy_import() -> None:
    code = "import sys, stages.models.spec; sys.exit(bool({'torch', 'megatron', 'transformers'} & {*sys.modules}))"
    subprocess.run([sys.executable, "-c", code], check=True)
