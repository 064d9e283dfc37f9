"""A model directory in Hugging Face layout, read and written without building a model: weights and tokenizer. What its
config.json says is read by `hf_config` and understood by `spec`.

May import torch, safetensors, xxhash, transformers (for its tokenizers only), stages.models.hf_config,
stages.models.spec and stages.models.tensor_files.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import xxhash
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoTokenizer

from stages.models.hf_config import RANDOM_TINY, REWARD_BIAS, read_config, read_eos_ids
from stages.models.spec import EMBEDDING, LM_HEAD, SCORE_BIAS, SCORE_WEIGHT, read_spec, tensor_shapes
from stages.models.tensor_files import write_tensors

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                 "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model")  # fmt: skip
"""Beside config.json, what a written model takes over from the one it started as, where it is there."""
_INDEX = "model.safetensors.index.json"
_BLOCK_BYTES = 1 << 22
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
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

    def token_bytes(self) -> list[bytes] | None:
        """The bytes that each token stands for, none for special tokens: joined, they are the text. None where what a
        token stands for depends on its place (SentencePiece)."""
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

    def token_bytes(self) -> list[bytes] | None:
        return [b"" if self._special(token) else bytes([token]) for token in range(self.vocab_size)]

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

    def token_bytes(self) -> list[bytes] | None:
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is None or json.loads(backend.to_str())["decoder"].get("type") != "ByteLevel":
            return None
        byte_of = _bytes_of_characters()
        added = self.inner.added_tokens_decoder
        names = self.inner.convert_ids_to_tokens(list(range(self.vocab_size)))
        return [
            (b"" if added[token].special else added[token].content.encode())
            if token in added
            else bytes(byte_of[character] for character in name)
            for token, name in enumerate(names)
        ]


def _bytes_of_characters() -> dict[str, int]:
    """How byte-level BPE writes a byte as one character that can be seen (GPT-2): itself where it is printable Latin-1,
    else the next of the characters from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def read_weights(path: str) -> dict[str, torch.Tensor]:
    """All tensors by Hugging Face name, in the dtype they are stored in; a tied `lm_head.weight` is usually not among
    them. Of a reward model `SCORE_BIAS` is, which its config.json holds. Raises FileNotFoundError with what was looked
    for."""
    if path == RANDOM_TINY:
        return _random_weights()
    weights: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        weights |= load_file(file)
    if SCORE_WEIGHT in weights:
        weights[SCORE_BIAS] = torch.tensor([read_config(path).get(REWARD_BIAS, 0.0)])
    return weights


def tensor_shape(path: str, name: str) -> tuple[int, ...] | None:
    """Shape of one of a model's tensors, without reading it; None where there is none of this name."""
    for file in weight_files(path) if path != RANDOM_TINY else ():
        with safe_open(file, framework="pt") as tensors:
            if name in set(tensors.keys()):
                return tuple(tensors.get_slice(name).get_shape())
    return None


def weight_files(path: str) -> list[Path]:
    """The safetensors files of a model directory. Raises FileNotFoundError with what was looked for."""
    directory = Path(path)
    whole, index = directory / "model.safetensors", directory / _INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"no weights at {path!r}: neither {whole.name} nor {index.name} is there")
    return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def file_digests(path: str) -> dict[str, str]:
    """XXH3 of every file that a model is read from, by name: weights, config and tokenizer. It tells accidents, not
    forgers. Raises what `read_weights` raises."""
    if path == RANDOM_TINY:
        return {RANDOM_TINY: "built in"}
    weights = weight_files(path)
    others = (weights[0].parent / name for name in ("config.json", _INDEX, *COPIED_FILES))
    return {file.name: _digest(file) for file in sorted({*weights, *(file for file in others if file.is_file())})}


def _digest(file: Path) -> str:
    found = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            found.update(block)
    return found.hexdigest()


def read_some_weights(path: str, names: Collection[str]) -> dict[str, torch.Tensor]:
    """Those of a model's tensors that have these names, in the order of the names; no others are read. Raises what
    `read_weights` raises."""
    if path == RANDOM_TINY:
        weights = _random_weights()
        return {name: weights[name] for name in names if name in weights}
    found: dict[str, torch.Tensor] = {}
    for file in weight_files(path):
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tensors.get_tensor(name) for name in set(names) & set(tensors.keys())}
    return {name: found[name] for name in names if name in found}


def read_vocabulary(path: str) -> dict[str, int] | None:
    """Token -> id of a model's tokenizer; None where its directory has none."""
    if path == RANDOM_TINY:
        return {f"<0x{byte:02X}>": byte for byte in range(256)}
    if not any((Path(path) / name).is_file() for name in _VOCABULARY_FILES):
        return None
    return dict(AutoTokenizer.from_pretrained(path).get_vocab())


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


def write_model(directory: Path, source: str, changed: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Writes the model of `source`, a path that can be read from, with some of its tensors changed and all of the dtype
    named: config, weights, tokenizer. It loads with `AutoModelForCausalLM.from_pretrained`. Makes the directory."""
    weights = {name: tensor.to(getattr(torch, dtype)) for name, tensor in read_weights(source).items()} | dict(changed)
    if read_spec(source).tied_embeddings:
        weights.pop(LM_HEAD, None)
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", weights)
    config = read_config(source) | {"dtype": dtype}
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in COPIED_FILES if source != RANDOM_TINY else ():
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, directory / name)


def _random_weights() -> dict[str, torch.Tensor]:
    """The same float32 numbers on every call: linears and embeddings normal, norms 1."""
    generator = torch.Generator().manual_seed(_TINY_SEED)

    def made(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape)
        std = _TINY_EMBEDDING_STD if name == EMBEDDING else _TINY_LINEAR_STD
        return torch.randn(shape, generator=generator) * std

    return {name: made(name, shape) for name, shape in tensor_shapes(read_spec(RANDOM_TINY)).items()}
