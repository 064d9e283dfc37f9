"""A model's architecture: sizes, features, and the tensors by Hugging Face name. One description for all who need one.

    config.json ──spec_of──► ModelSpec ──┬─► the trainer: build, layers, hf_conversion (Megatron's blocks)
                                         ├─► the embedded engine: model/llama, ranks/sharding
                                         └─► the checks before a run: pipeline/config/preflight

A family whose models are computed as Llama's are is added by an entry of `FAMILIES`. One with a feature of its own
(biases of the projections, norms of queries and keys) needs three things more: a field of `ModelSpec` for the feature,
its tensors in `layer_shapes`, and code in the two implementations, Megatron's blocks and the engine's. Until then
`spec_of` refuses it.

May import stages.models.hf_config and the standard library: no torch, no Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.models.hf_config import read_config

FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "quantization_config": None},
}
"""`model_type` -> what else in a config.json decides how the model is computed, and the one value of it that is
supported; where the key is missing or null it has that value."""

EMBEDDING = "model.embed_tokens.weight"
"""[vocab_size, hidden_size]"""
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
"""[vocab_size, hidden_size]; in a model with tied embeddings there is none, or a copy of the embedding."""
VALUE_HEAD_WEIGHT = "value_head.weight"
"""[1, hidden_size]: the critic's, for which Hugging Face's causal models have no name."""
VALUE_HEAD_BIAS = "value_head.bias"

INPUT_NORM = "input_layernorm"
Q_PROJ, K_PROJ, V_PROJ = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
O_PROJ = "self_attn.o_proj"
POST_ATTENTION_NORM = "post_attention_layernorm"
GATE_PROJ, UP_PROJ = "mlp.gate_proj", "mlp.up_proj"
DOWN_PROJ = "mlp.down_proj"
"""The parts of a layer, bottom to top: see `layer_tensor`."""

_LAYERS = "model.layers."


@dataclass(frozen=True)
class ModelSpec:
    """The numbers that make a decoder with RMS norms, rotary positions, grouped-query attention and a gated MLP."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Of the MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Tokens of the longest sequence."""
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    """The output layer is the embedding."""

    @property
    def q_size(self) -> int:
        """Width of all queries of a token."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys, or values, of a token."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_tensor(self) -> str:
        """Name of the tensor that turns hidden states into logits."""
        return EMBEDDING if self.tied_embeddings else LM_HEAD


def read_spec(path: str) -> ModelSpec:
    """The architecture of the model in a directory. Raises what `read_config` and `spec_of` raise."""
    return spec_of(read_config(path))


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """The architecture that a config.json describes. Raises ValueError, naming its key, for what is not supported or is
    missing."""
    family: str = config.get("model_type", "")
    if family not in FAMILIES:
        known = ", ".join(map(repr, sorted(FAMILIES)))
        raise ValueError(f"config.json: model_type = {family!r} is not supported, only {known}")
    for key, wanted in FAMILIES[family].items():
        given = config.get(key)
        if given is not None and given != wanted:
            raise ValueError(f"config.json: {key} = {given!r} is not supported for {family!r}, only {wanted!r}")
    try:
        heads = int(config["num_attention_heads"])
        return ModelSpec(
            num_layers=int(config["num_hidden_layers"]),
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // heads),
            vocab_size=int(config["vocab_size"]),
            max_positions=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=rope_theta(config),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}") from error


def rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding. Raises ValueError for a scaled one (yarn, llama3, ...), which is not supported."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"config.json: rope type {kind!r} is not supported, only 'default'")
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of the model by Hugging Face name, from the bottom up; without `LM_HEAD` where it is tied."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        shapes |= {layer_tensor(layer, part): size for part, size in layer_shapes(spec).items()}
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Every tensor of a layer by the name of its part."""
    return {
        INPUT_NORM: (spec.hidden_size,),
        Q_PROJ: (spec.q_size, spec.hidden_size),
        K_PROJ: (spec.kv_size, spec.hidden_size),
        V_PROJ: (spec.kv_size, spec.hidden_size),
        O_PROJ: (spec.hidden_size, spec.q_size),
        POST_ATTENTION_NORM: (spec.hidden_size,),
        GATE_PROJ: (spec.intermediate_size, spec.hidden_size),
        UP_PROJ: (spec.intermediate_size, spec.hidden_size),
        DOWN_PROJ: (spec.hidden_size, spec.intermediate_size),
    }


def layer_tensor(layer: int, part: str) -> str:
    """Hugging Face's name of a part of a layer; layers count from 0 at the bottom."""
    return f"{_LAYERS}{layer}.{part}.weight"


def layer_and_part(name: str) -> tuple[int, str] | None:
    """The reverse; None for a tensor that is of no layer."""
    if not name.startswith(_LAYERS):
        return None
    layer, _, part = name.removeprefix(_LAYERS).partition(".")
    return int(layer), part.removesuffix(".weight")


def tensor_parallel_sizes(spec: ModelSpec) -> dict[str, int]:
    """What Megatron's tensor parallelism cuts into equal parts, by its key in config.json."""
    return {
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "intermediate_size": spec.intermediate_size,
        "vocab_size": spec.vocab_size,
    }
