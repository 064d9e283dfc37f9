"""A model's architecture: sizes, features, and the tensors by Hugging Face name. One description for all who need one.

    config.json ──spec_of──► ModelSpec ──┬─► the trainer: build, layers, hf_conversion (Megatron's blocks)
                                         ├─► the embedded engine: model/llama, ranks/sharding
                                         └─► the checks before a run: pipeline/config/preflight

A family whose models are computed as Llama's are, or with features that others here have (biases of queries, keys and
values; norms of queries and keys), is added by an entry of `FAMILIES`. One with a feature of its own needs three things
more: a field of `ModelSpec` for the feature, its tensors in `layer_shapes`, and code in the two implementations,
Megatron's blocks and the engine's. Until then `spec_of` refuses it.

May import stages.models.hf_config and the standard library: no torch, no Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from stages.models.hf_config import read_config


@dataclass(frozen=True)
class Family:
    """How the models of one `model_type` are computed, where families differ."""

    only: Mapping[str, Any]
    """Keys of a config.json that decide how the model is computed, and the one value of each that is supported; where
    the key is missing or null it has that value."""
    needs: tuple[str, ...] = ()
    """Keys that must be there: transformers would fill them in with the numbers of one model of the family."""
    windowed: bool = False
    """`sliding_window`, unless it is null, bounds how far back a token sees: rows up to that length are seen whole."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """See `ModelSpec`."""


_SAME = {"hidden_act": "silu", "quantization_config": None}

FAMILIES: Mapping[str, Family] = {
    "llama": Family({**_SAME, "attention_bias": False, "mlp_bias": False}),
    "mistral": Family(_SAME, needs=("num_key_value_heads", "sliding_window"), windowed=True),
    "qwen2": Family({**_SAME, "use_sliding_window": False}, needs=("num_key_value_heads",), qkv_bias=True),
    "qwen3": Family(
        {**_SAME, "use_sliding_window": False, "attention_bias": False},
        needs=("num_key_value_heads", "head_dim"),
        qk_norm=True,
    ),
}
"""By `model_type`: llama is Llama 2 and 3.x, qwen2 is Qwen 2 and 2.5."""

EMBEDDING = "model.embed_tokens.weight"
"""[vocab_size, hidden_size]"""
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
"""[vocab_size, hidden_size]; in a model with tied embeddings there is none, or a copy of the embedding."""
VALUE_HEAD_WEIGHT = "value_head.weight"
"""[1, hidden_size]: the critic's, for which Hugging Face's causal models have no name."""
VALUE_HEAD_BIAS = "value_head.bias"
SCORE_WEIGHT = "score.weight"
"""[1, hidden_size]: a reward model's head, as Hugging Face's models for sequence classification have it."""
SCORE_BIAS = "score.bias"
"""[1]: what those lack. It is kept in config.json (`hf_config.REWARD_BIAS`), and read as if it were a tensor."""

INPUT_NORM = "input_layernorm"
Q_PROJ, K_PROJ, V_PROJ = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
Q_BIAS, K_BIAS, V_BIAS = "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"
O_PROJ = "self_attn.o_proj"
POST_ATTENTION_NORM = "post_attention_layernorm"
GATE_PROJ, UP_PROJ = "mlp.gate_proj", "mlp.up_proj"
DOWN_PROJ = "mlp.down_proj"
"""The parts of a layer, bottom to top: see `layer_tensor`."""

_LAYERS = "model.layers."


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's change of the rotary frequencies (rope type `llama3`): waves longer than `original_max_positions` /
    `low_freq_factor` tokens become `factor` times as long, those shorter than `original_max_positions` /
    `high_freq_factor` stay, and those between change by degrees. See `stages.models.rotary`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


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
    """Tokens of the longest sequence; where a token sees only so many before it, no more than those."""
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    """The output layer is the embedding."""
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    """The projections to queries, keys and values have biases."""
    qk_norm: bool = False
    """Every query and key head goes through an RMS norm before it is turned; all heads of a layer share two weights."""

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
    name: str = config.get("model_type", "")
    if name not in FAMILIES:
        known = ", ".join(map(repr, sorted(FAMILIES)))
        raise ValueError(f"config.json: model_type = {name!r} is not supported, only {known}")
    family = FAMILIES[name]
    for key, wanted in family.only.items():
        given = config.get(key)
        if given is not None and given != wanted:
            raise ValueError(f"config.json: {key} = {given!r} is not supported for {name!r}, only {wanted!r}")
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            raise ValueError(f"config.json: layer_types has {kind!r}, which is not supported, only 'full_attention'")
    for key in family.needs:
        if key not in config:
            raise ValueError(f"config.json has no {key}")
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
            max_positions=_max_positions(config, family),
            norm_eps=float(config["rms_norm_eps"]),
            rope_theta=float(_rope(config).get("rope_theta", config.get("rope_theta", 10000.0))),
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            rope_scaling=_rope_scaling(_rope(config)),
            qkv_bias=family.qkv_bias,
            qk_norm=family.qk_norm,
        )
    except KeyError as error:
        raise ValueError(f"config.json has no {error.args[0]}") from error


def _max_positions(config: Mapping[str, Any], family: Family) -> int:
    """In a row no longer than the sliding window every token sees all before it, as if there were none."""
    positions = int(config["max_position_embeddings"])
    window = config["sliding_window"] if family.windowed else None
    return positions if window is None else min(positions, int(window))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What a config.json says of the rotary embedding, under the key of today or the older one."""
    found: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return found


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    """Raises ValueError for another rotary embedding (yarn, linear, ...), and for one of a part of each head."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        given = rope["partial_rotary_factor"]
        raise ValueError(f"config.json: partial_rotary_factor = {given} is not supported, only 1.0")
    if kind == "default":
        return None
    if kind != "llama3":
        raise ValueError(f"config.json: rope type {kind!r} is not supported, only 'default' and 'llama3'")
    return RopeScaling(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )


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
    shapes: dict[str, tuple[int, ...]] = {
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
    if spec.qkv_bias:
        shapes |= {Q_BIAS: (spec.q_size,), K_BIAS: (spec.kv_size,), V_BIAS: (spec.kv_size,)}
    if spec.qk_norm:
        shapes |= {Q_NORM: (spec.head_dim,), K_NORM: (spec.head_dim,)}
    return shapes


def layer_tensor(layer: int, part: str) -> str:
    """Hugging Face's name of a part of a layer; layers count from 0 at the bottom. A part is a weight unless it says
    that it is a bias."""
    return f"{_LAYERS}{layer}.{part}" if part.endswith(".bias") else f"{_LAYERS}{layer}.{part}.weight"


def layer_and_part(name: str) -> tuple[int, str] | None:
    """The reverse; None for a tensor that is of no layer."""
    if not name.startswith(_LAYERS):
        return None
    layer, _, part = name.removeprefix(_LAYERS).partition(".")
    return int(layer), part.removesuffix(".weight")
