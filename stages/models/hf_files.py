"""A model directory in Hugging Face layout, read without building a model: configuration, weights and tokenizer; and
`random:tiny`, a small random Llama that every test and smoke run can use without any file.

May import torch, safetensors and transformers (for its tokenizers only).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

RANDOM_TINY = "random:tiny"
"""Stands for a path wherever a model directory is read."""

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
_TINY_SEED = 20_24
_TINY_LINEAR_STD = 0.1
_TINY_EMBEDDING_STD = 0.2
"""The final norm makes the hidden state's RMS 1, so logits have a standard deviation of about 0.2 * sqrt(64) = 1.6."""


class Tokenizer(Protocol):
    """What the stages use of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int:
        """Never one of `eos_ids`."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Tokens of the conversation up to where the assistant is to speak."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """`random:tiny`'s: one token per UTF-8 byte. NUL and STX, which text does not hold, are pad and EOS."""

    vocab_size: int = 256
    eos_ids: tuple[int, ...] = (2,)
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        return [byte for byte in text.encode() if not self._special(byte)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [int(i) for i in ids if not (skip_special and self._special(int(i)))]
        return bytes(kept).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")

    def _special(self, token: int) -> bool:
        return token == self.pad_id or token in self.eos_ids


@dataclass(frozen=True)
class HubTokenizer:
    """A transformers tokenizer behind the small protocol."""

    inner: Any
    eos_ids: tuple[int, ...]
    pad_id: int

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        return list(self.inner(text)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return list(
            self.inner.apply_chat_template(
                [dict(m) for m in messages], tokenize=True, add_generation_prompt=True, return_dict=False
            )
        )


def read_config(path: str) -> dict[str, Any]:
    """The contents of `config.json`, as Hugging Face writes it. Raises FileNotFoundError with what was looked for."""
    if path == RANDOM_TINY:
        return json.loads(json.dumps(_TINY_CONFIG))  # a copy that the caller may change
    file = Path(path) / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"no model at {path!r}: no {file} (give a Hugging Face directory, or {RANDOM_TINY!r})")
    return dict(json.loads(file.read_text()))


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """All tensors by Hugging Face name, in the dtype they are stored in; a tied `lm_head.weight` is usually not among
    them. Raises FileNotFoundError with what was looked for."""
    if path == RANDOM_TINY:
        return _random_weights(_TINY_CONFIG)
    directory = Path(path)
    whole, index = directory / "model.safetensors", directory / "model.safetensors.index.json"
    if whole.is_file():
        return dict(load_file(whole))
    if not index.is_file():
        raise FileNotFoundError(f"no weights at {path!r}: neither {whole.name} nor {index.name} is there")
    files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
    weights: dict[str, torch.Tensor] = {}
    for name in files:
        weights |= load_file(directory / name)
    return weights


def read_tokenizer(path: str) -> Tokenizer:
    """The tokenizer of a model. Raises ValueError where pad is missing or is an EOS: padding must be recognisable."""
    if path == RANDOM_TINY:
        return ByteTokenizer()
    eos_ids = read_eos_ids(path)
    inner = AutoTokenizer.from_pretrained(path)
    if not eos_ids:
        eos_ids = (int(inner.eos_token_id),)
    if inner.pad_token_id is None or int(inner.pad_token_id) in eos_ids:
        raise ValueError(
            f"the tokenizer of {path!r} has pad_token_id {inner.pad_token_id} and EOS {eos_ids}: "
            "name a pad token that is no EOS in its tokenizer_config.json"
        )
    return HubTokenizer(inner, eos_ids, int(inner.pad_token_id))


def read_eos_ids(path: str) -> tuple[int, ...]:
    """The model's own end-of-sequence tokens: generation_config.json's where it names some, else config.json's."""
    generation = Path(path) / "generation_config.json"
    found = json.loads(generation.read_text()).get("eos_token_id") if generation.is_file() else None
    if found is None:
        found = read_config(path).get("eos_token_id")
    if found is None:
        return ()
    return tuple(int(i) for i in (found if isinstance(found, list) else [found]))


def rope_theta(config: Mapping[str, Any]) -> float:
    """Base of the rotary embedding. Raises ValueError for a scaled one (yarn, llama3, ...), which is not supported."""
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = parameters.get("rope_type", parameters.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope type {kind!r} is not supported, only 'default'")
    return float(parameters.get("rope_theta", config.get("rope_theta", 10000.0)))


def _random_weights(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The same float32 numbers on every call: linears and embeddings normal, norms 1."""
    hidden, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_dim, ffn = config["head_dim"], config["intermediate_size"]
    linears = {
        "self_attn.q_proj": (heads * head_dim, hidden),
        "self_attn.k_proj": (kv_heads * head_dim, hidden),
        "self_attn.v_proj": (kv_heads * head_dim, hidden),
        "self_attn.o_proj": (hidden, heads * head_dim),
        "mlp.gate_proj": (ffn, hidden),
        "mlp.up_proj": (ffn, hidden),
        "mlp.down_proj": (hidden, ffn),
    }
    generator = torch.Generator().manual_seed(_TINY_SEED)

    def normal(shape: tuple[int, ...], std: float) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * std

    weights = {"model.embed_tokens.weight": normal((config["vocab_size"], hidden), _TINY_EMBEDDING_STD)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, shape in linears.items():
            weights[f"{prefix}{name}.weight"] = normal(shape, _TINY_LINEAR_STD)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{prefix}{name}.weight"] = torch.ones(hidden)
    weights["model.norm.weight"] = torch.ones(hidden)
    return weights
