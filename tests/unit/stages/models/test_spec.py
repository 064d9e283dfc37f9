"""The model that a config.json describes, and its tensors, against transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from stages.models.layers import rotary_frequencies
from stages.models.spec import (
    EMBEDDING,
    LM_HEAD,
    RANDOM_1B,
    RANDOM_8B,
    RANDOM_70B,
    RANDOM_TINY,
    RopeScaling,
    cached_in_hub,
    layer_and_part,
    layer_tensor,
    read_config,
    read_spec,
    spec_of,
    tensor_shapes,
)
from tests.support.families import FAMILIES, SIZES


@pytest.mark.parametrize(
    ("path", "parameters", "factor"),
    [(RANDOM_1B, 1_235_814_400, 32.0), (RANDOM_8B, 8_030_261_248, 8.0), (RANDOM_70B, 70_553_706_496, 8.0)],
)
def test_large_random_models_have_the_sizes_of_llama_3(path: str, parameters: int, factor: float) -> None:
    """The numbers of parameters agree with Hugging Face's counts of the published checkpoints."""
    assert sum(math.prod(shape) for shape in tensor_shapes(read_spec(path)).values()) == parameters
    assert read_spec(path).rope_scaling == RopeScaling(factor, 1.0, 4.0, 8192)


def test_what_a_config_leaves_out() -> None:
    """transformers fills it in: a key/value head for each head, heads that share the hidden size, untied embeddings."""
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


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_every_family_are_those_of_transformers(family: str) -> None:
    config_class, own = FAMILIES[family]
    config = config_class(**(SIZES | own))
    with torch.device("meta"):
        expected = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    spec = spec_of(config.to_dict())
    assert tensor_shapes(spec) == {name: tuple(tensor.shape) for name, tensor in expected.items()}


@pytest.mark.parametrize(
    ("feature", "parts"), [("qkv_bias", 3), ("qk_norm", 2), ("rope_scaling", 0)], ids=lambda each: str(each)
)
def test_names_of_parts_and_back(feature: str, parts: int) -> None:
    names = tensor_shapes(replace(read_spec(RANDOM_TINY), **{feature: True}))
    of_layers = {name: found for name in names if (found := layer_and_part(name)) is not None}
    assert len(of_layers) == 4 * (9 + parts)
    assert all(layer_tensor(*found) == name for name, found in of_layers.items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not supported, only 'llama', 'mistral', 'qwen2', 'qwen3'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window = True is not supported for 'qwen2'"),
        ({"model_type": "qwen3", "attention_bias": True}, "attention_bias = True is not supported for 'qwen3'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported for 'llama', only 'silu'"),
        ({"attention_bias": True}, "attention_bias = True is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True is not supported"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0, must be at least 1"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = .* only None"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope type 'yarn' is not supported, only 'default' and 'llama3'"),
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


@pytest.mark.parametrize(
    ("model_type", "key"),
    [("mistral", "sliding_window"), ("qwen2", "num_key_value_heads"), ("qwen3", "head_dim"), ("llama", "factor")],
)
def test_a_number_that_transformers_would_fill_in_is_named(model_type: str, key: str) -> None:
    """The message has the number of one model of the family; other models of it may differ."""
    config = read_config(RANDOM_TINY) | {"model_type": model_type}
    config.pop(key, None)
    if key == "factor":
        config["rope_parameters"] = {"rope_type": "llama3"}
    with pytest.raises(ValueError, match=rf"config\.json has no {key}"):
        spec_of(config)


@pytest.mark.parametrize(("window", "positions"), [(None, 256), (1000, 256), (100, 100)])
def test_a_window_bounds_the_positions(window: int | None, positions: int) -> None:
    config = read_config(RANDOM_TINY) | {"sliding_window": window}
    assert spec_of(config | {"model_type": "mistral"}).max_positions == positions
    assert spec_of(config | {"model_type": "qwen2"}).max_positions == 256  # use_sliding_window is false


def test_the_rotary_embedding_in_both_layouts() -> None:
    tiny = read_config(RANDOM_TINY)
    del tiny["rope_parameters"]
    assert spec_of(tiny).rope_theta == 10000.0
    assert spec_of(tiny | {"rope_theta": 5e5}).rope_theta == 5e5
    assert spec_of(tiny | {"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}).rope_theta == 1e5
    scaled = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    for kind in ("rope_type", "type"):
        spec = spec_of(tiny | {"rope_theta": 5e5, "rope_scaling": {kind: "llama3", **scaled}})
        assert (spec.rope_theta, spec.rope_scaling) == (5e5, RopeScaling(32.0, 1.0, 4.0, 8192))
    spec = spec_of(tiny | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **scaled}})
    assert (spec.rope_theta, spec.rope_scaling) == (5e5, RopeScaling(32.0, 1.0, 4.0, 8192))


@pytest.mark.parametrize(("theta", "head_dim", "factor"), [(5e5, 128, 8.0), (5e5, 64, 32.0), (100.0, 8, 8.0)])
def test_frequencies_equal_transformers(theta: float, head_dim: int, factor: float) -> None:
    """Llama 3.1's, 3.2's, and some that are changed by degrees."""
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": factor, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192 if head_dim > 8 else 32}
    tiny = read_config(RANDOM_TINY) | {"head_dim": head_dim}
    for config in (tiny | {"rope_parameters": rope}, tiny):
        expected = LlamaRotaryEmbedding(LlamaConfig(**config)).inv_freq
        torch.testing.assert_close(rotary_frequencies(spec_of(config)), expected, rtol=1e-6, atol=0)


def test_a_models_name_is_its_newest_directory_in_the_hub_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    stored = tmp_path / "models--org--a-model.1"
    for version in ("abc", "def"):
        (stored / "snapshots" / version).mkdir(parents=True)
        (stored / "snapshots" / version / "config.json").touch()
    (stored / "refs").mkdir()
    (stored / "refs/main").write_text("def\n")
    assert cached_in_hub("org/a-model.1") == str(stored / "snapshots/def")
    assert cached_in_hub("org/another") == "org/another"
    assert cached_in_hub("random:tiny") == "random:tiny"
    with pytest.raises(FileNotFoundError, match=r"nor is its main revision in .* \(`hf download org/another`\)"):
        read_config("org/another")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/a-model.1").mkdir(parents=True)
    assert cached_in_hub("org/a-model.1") == "org/a-model.1", "a directory of that name comes first"
