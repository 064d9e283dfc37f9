"""Describe a model's architecture once for all users: sizes, features, and tensors by Hugging Face name.

    config.json ──spec_of──► ModelSpec ──┬─► the trainer: build, layers, hf_conversion
                                         ├─► the embedded engine: model, ranks/rank_model
                                         └─► the checks before a run: pipeline/config/preflight

To add a family of models:

- A family that is computed like Llama needs only an entry in `FAMILIES`. It may also have the two features that are
  supported already: biases of queries, keys and values, and norms of queries and keys.
- A feature that is not supported yet also needs a field of `ModelSpec`, its tensors in `layer_shapes`, and code in both
  implementations: Megatron's blocks and the engine.

The function `spec_of` refuses models of other families, and models with features that are not supported.

The file also has the padding that makes a model divide over tensor-parallel ranks (`padded`) and the readers of a
Hugging Face directory's small JSON files. It defines the random models (`random:tiny`, …), which are Llamas without
files.

Standard library only, so that no command has to wait for torch or transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Family:
    """The properties of one `model_type` in which families differ."""

    only: Mapping[str, Any]
    """Key of config.json -> its only supported value. These keys decide how the model is computed. A missing or null
    key counts as the supported value."""
    needs: tuple[str, ...] = ()
    """Keys that config.json must have. If such a key were missing, transformers would use a default that fits only one
    model of the family."""
    windowed: bool = False
    """True if models of the family may have sliding-window attention. The key `sliding_window` of config.json is the
    length of the window, and null means no window. Rows longer than the window are not supported."""
    qkv_bias: bool = False
    qk_norm: bool = False
    """See `ModelSpec.qk_norm`."""


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
"""`model_type` -> family. llama is Llama 2 and 3.x, qwen2 is Qwen 2 and 2.5."""

EMBEDDING = "model.embed_tokens.weight"
"""[vocab_size, hidden_size]"""
FINAL_NORM = "model.norm.weight"
LM_HEAD = "lm_head.weight"
"""[vocab_size, hidden_size]. A model with tied embeddings has none, or a copy of the embedding."""
VALUE_HEAD_WEIGHT = "value_head.weight"
"""[1, hidden_size]: the critic's head, for which Hugging Face's causal models have no name."""
VALUE_HEAD_BIAS = "value_head.bias"
SCORE_WEIGHT = "score.weight"
"""Name of the weight of a reward model's head, a tensor [1, hidden_size]. Hugging Face's models for sequence
classification use the same name."""
SCORE_BIAS = "score.bias"
"""[1]: the head's bias, which Hugging Face's classifiers lack. It is stored in config.json (`REWARD_BIAS`) and read
like a tensor."""

INPUT_NORM = "input_layernorm"
Q_PROJ, K_PROJ, V_PROJ = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"
Q_BIAS, K_BIAS, V_BIAS = "self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"
Q_NORM, K_NORM = "self_attn.q_norm", "self_attn.k_norm"
O_PROJ = "self_attn.o_proj"
POST_ATTENTION_NORM = "post_attention_layernorm"
GATE_PROJ, UP_PROJ = "mlp.gate_proj", "mlp.up_proj"
DOWN_PROJ = "mlp.down_proj"
"""Name of the last tensor in a layer. All names from `INPUT_NORM` to this one are names of tensors within a layer, in
the order of computation. The function `layer_tensor` adds the number of the layer."""

_LAYERS = "model.layers."


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's change of the rotary frequencies (rope type `llama3`), see `stages.models.layers`.

    Wavelengths above `original_max_positions` / `low_freq_factor` tokens become `factor` times as long. Wavelengths
    below `original_max_positions` / `high_freq_factor` stay the same. Between the two limits the factor rises gradually
    from 1 to `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelSpec:
    """The sizes and features of a decoder with RMS norms, rotary positions, grouped-query attention and a gated MLP."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    """Width of the MLP."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    """Maximum number of tokens of a sequence: not more than the sliding window if there is one."""
    norm_eps: float
    rope_theta: float
    tied_embeddings: bool
    """True if the output layer is the embedding."""
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    """True if the projections to queries, keys and values have biases."""
    qk_norm: bool = False
    """True if every query and key head goes through an RMS norm before the rotary embedding. The heads of a layer share
    one weight for queries and one for keys."""

    @property
    def q_size(self) -> int:
        """Width of all queries of a token together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all keys, or of all values, of a token together."""
        return self.num_kv_heads * self.head_dim

    @property
    def output_tensor(self) -> str:
        """Name of the tensor that turns hidden states into logits."""
        return EMBEDDING if self.tied_embeddings else LM_HEAD


_SIZES = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
"""Keys of config.json that are sizes of the model."""


def read_spec(path: str) -> ModelSpec:
    """Return the architecture of the model in a directory. Raises what `read_config` and `spec_of` raise."""
    return spec_of(read_config(path))


def spec_of(config: Mapping[str, Any]) -> ModelSpec:
    """Return the architecture that a config.json describes. Raises ValueError, naming the key, for a missing key or an
    unsupported value."""
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
    for key in _SIZES:
        if key in config and int(config[key]) < 1:
            raise ValueError(f"config.json: {key} = {config[key]!r}, must be at least 1")
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
    """Return the longest supported row: at most the sliding window, because attention is computed without one."""
    positions = int(config["max_position_embeddings"])
    window = config["sliding_window"] if family.windowed else None
    return positions if window is None else min(positions, int(window))


def _rope(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return config.json's settings of the rotary embedding, under either of their two names."""
    rope: Mapping[str, Any] = config.get("rope_scaling") or config.get("rope_parameters") or {}
    return rope


def _rope_scaling(rope: Mapping[str, Any]) -> RopeScaling | None:
    """Return the scaling of the rotary frequencies, or None for plain rotary embedding. Raises ValueError for other
    kinds (yarn, linear, ...) and for rotary embedding of a part of each head."""
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
    """Return Hugging Face name -> shape for every tensor of a model, from the bottom up. A tied `LM_HEAD` is left
    out."""
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for layer in range(spec.num_layers):
        shapes |= {layer_tensor(layer, part): size for part, size in layer_shapes(spec).items()}
    shapes[FINAL_NORM] = (spec.hidden_size,)
    if not spec.tied_embeddings:
        shapes[LM_HEAD] = (spec.vocab_size, spec.hidden_size)
    return shapes


def layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Return part -> shape for every tensor of a layer."""
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
    """Return Hugging Face's name of a part of a layer. Layers count from 0 at the bottom. A part is a weight unless its
    name ends in `.bias`."""
    return f"{_LAYERS}{layer}.{part}" if part.endswith(".bias") else f"{_LAYERS}{layer}.{part}.weight"


def layer_and_part(name: str) -> tuple[int, str] | None:
    """Return (layer, part) for a tensor's name, the reverse of `layer_tensor`. Return None for a tensor outside the
    layers."""
    if not name.startswith(_LAYERS):
        return None
    layer, _, part = name.removeprefix(_LAYERS).partition(".")
    return int(layer), part.removesuffix(".weight")


# ---- padding ---------------------------------------------------------------------------------------------


def padded(spec: ModelSpec, tensor: int) -> ModelSpec:
    """Return the spec with larger sizes, so that `tensor` ranks hold equal parts. The added weights are zeros. A size
    that `tensor` ranks can share without padding is not changed.

        vocabulary   rows of embedding and output layer; their logits are excluded from every softmax
        MLP          rows of gate and up, columns of down
        attention    whole groups of queries with their key and value: rows of q, k, v, columns of o

    The added weights stay exactly zero in training, without a mask:

    - Take an added unit, and call the weights that read its output its readers. The unit outputs zero, so its readers
      have a zero gradient. The readers are zero, so the unit's own weights have a zero gradient.
    - AdamW keeps a zero weight with a zero gradient at zero. The gradient norm does not change.
    - This is why whole groups are added. Queries added to a group of real queries would read the group's values, and
      the gradient of their columns of o would not be zero.

    Padding exists only within a rank: `hf_conversion` adds it on reading and removes it on writing.
    """
    groups = spec.num_kv_heads if _divides(spec, tensor) else _multiple(spec.num_kv_heads, tensor)
    return replace(
        spec,
        num_heads=spec.num_heads // spec.num_kv_heads * groups,
        num_kv_heads=groups,
        intermediate_size=_multiple(spec.intermediate_size, tensor),
        vocab_size=_multiple(spec.vocab_size, tensor),
    )


def _divides(spec: ModelSpec, tensor: int) -> bool:
    """Return True if `tensor` ranks can divide the heads without padding: each has whole groups (a key-value head with
    its query heads), or several ranks share a group, and divide the query heads and the rows of the fused
    projection."""
    if spec.num_kv_heads % tensor == 0:
        return True
    fused = spec.q_size + 2 * spec.kv_size
    return tensor % spec.num_kv_heads == spec.num_heads % tensor == fused % tensor == 0


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of


# ---- JSON files of a model directory ---------------------------------------------------------------------

RANDOM_TINY = "random:tiny"
"""Name of the small random Llama. It can be given wherever a model directory is read."""
RANDOM_1B, RANDOM_8B, RANDOM_70B = "random:1b-shape", "random:8b-shape", "random:70b-shape"
"""Names of random Llamas with the shapes of Llama-3.2-1B, Llama-3.1-8B and 70B, in bfloat16, for measurements and
checks. Their tokens are bytes, like those of `random:tiny`."""

REWARD_BIAS = "reward_bias"
"""Key of a reward model's config.json. Its value is added to the output of the head, since the stored head has no
bias."""

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

_LLAMA_3_1: dict[str, Any] = _TINY_CONFIG | {
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131072,
    "rope_parameters": {
        "rope_theta": 500000.0,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
_1B_SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32}
_LLAMA_3_2_1B = _LLAMA_3_1 | _1B_SIZES | {"head_dim": 64, "tie_word_embeddings": True}
_LLAMA_3_2_1B["rope_parameters"] = _LLAMA_3_1["rope_parameters"] | {"factor": 32.0}
_8B_SIZES = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
_70B_SIZES = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
_RANDOM: Mapping[str, Mapping[str, Any]] = {
    RANDOM_TINY: _TINY_CONFIG,
    RANDOM_1B: _LLAMA_3_2_1B,
    RANDOM_8B: _LLAMA_3_1 | _8B_SIZES,
    RANDOM_70B: _LLAMA_3_1 | _70B_SIZES,
}
"""Name of a random model -> content of its config.json."""


def is_random(path: str) -> bool:
    """Return True for the name of a random model, which has no files."""
    return path in _RANDOM


def cached_in_hub(path: str) -> str:
    """Return the directory of a model in this account's Hugging Face cache if `path` is the name of a cached model
    (`org/model`, `gpt2`). Return `path` itself if it is anything else, or if a file or directory of this path exists.
    Nothing is downloaded."""
    if not _HUB_NAME.fullmatch(path) or Path(path).exists():
        return path
    stored = _hub_cache() / f"models--{path.replace('/', '--')}"
    newest = stored / "refs/main"
    snapshot = stored / "snapshots" / newest.read_text("utf8").strip() if newest.is_file() else stored
    return str(snapshot) if (snapshot / "config.json").is_file() else path


_HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")


def _hub_cache() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = Path(os.environ.get("HF_HOME", f"{caches}/huggingface"))
    return Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser()


def stored_bytes(path: str) -> int:
    """Return the bytes of a model's weights on disk; 0 for a random model, and for a directory without weights."""
    return 0 if is_random(path) else sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def read_config(path: str) -> dict[str, Any]:
    """Return the contents of `config.json`. Raises FileNotFoundError with the path that was looked for."""
    if is_random(path):
        return dict(json.loads(json.dumps(_RANDOM[path])))  # a copy that the caller may change
    file = Path(path) / "config.json"
    if not file.is_file():
        known = ", ".join(_RANDOM)
        is_name = _HUB_NAME.fullmatch(path) is not None
        cache = f", nor is its main revision in {_hub_cache()} (`hf download {path}`)" if is_name else ""
        need = f"give a Hugging Face directory, or one of {known}"
        raise FileNotFoundError(f"no model: there is no {file}{cache}: {need}")
    return dict(json.loads(file.read_text()))


def read_eos_ids(path: str) -> tuple[int, ...]:
    """Return the model's end-of-sequence tokens, from generation_config.json if it has the key `eos_token_id`, else
    from config.json. Return an empty tuple if they name none."""
    generation = Path(path) / "generation_config.json"
    eos_ids = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    if eos_ids is None:
        eos_ids = read_config(path).get("eos_token_id")
    if eos_ids is None:
        return ()
    return tuple(int(i) for i in (eos_ids if isinstance(eos_ids, list) else [eos_ids]))
