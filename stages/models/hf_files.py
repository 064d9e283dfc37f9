"""Read the files of a model directory in Hugging Face layout: tokenizer, digests, shapes of tensors. This module loads
no torch, so that commands that only check a model answer at once. `spec` reads config.json, and `hf_weights` reads and
writes weights.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import xxhash
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer as FastBackend

from stages.models.spec import LM_HEAD, SCORE_WEIGHT, ModelSpec, is_random, read_config, read_eos_ids, tensor_shapes

COPIED_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja",
                 "generation_config.json", "vocab.json", "merges.txt", "tokenizer.model")  # fmt: skip
"""Files that a written model's directory gets from the directory of the start model, if they exist there."""
WEIGHTS_INDEX = "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9
"""Largest size of a written weights file, unless one tensor is larger. It is the usual size on the Hugging Face hub."""
_BLOCK_BYTES = 1 << 22
_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_GENERIC = ("TokenizersBackend", "PreTrainedTokenizerFast")
"""Values of `tokenizer_class` that name a generic class, for which tokenizer.json is the whole tokenizer."""
_UNCHANGED_FAMILIES = ("llama", "qwen3")
"""Values of `model_type` for which transformers uses the generic tokenizer class (`_GENERIC`) that
tokenizer_config.json names. For qwen2 it uses Qwen2Tokenizer instead. For mistral it may replace the pre-tokenizer."""
_CHANGES = ("auto_map", "add_bos_token", "add_eos_token", "split_special_tokens", "add_prefix_space")
"""Keys of tokenizer_config.json that make transformers change the tokenizer of tokenizer.json."""


class PadTokenError(ValueError):
    """The pad token that the config names cannot be used with a tokenizer, or a tokenizer has no token to pad with."""


class ChatTemplateError(ValueError):
    """A tokenizer has no chat template, or its template cannot express the messages."""


class Tokenizer(Protocol):
    """The part of a tokenizer that the stages use."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    @property
    def pad_id(self) -> int:
        """Id of the padding token, which is never one of `eos_ids`. Raises PadTokenError if there is none."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str: ...

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of the conversation, up to the start of the assistant's next message. Raises
        ChatTemplateError if there is no template for these messages."""
        ...

    def token_bytes(self) -> list[bytes] | None:
        """Return the bytes of each token; b"" for special tokens. The joined bytes of a text's tokens are the text.
        Return None if a token's text depends on its position (SentencePiece)."""
        ...


@dataclass(frozen=True)
class ByteTokenizer:
    """The tokenizer of random models: one token per UTF-8 byte. NUL and STX, which text does not contain, are pad and
    EOS. Tokens above 255 (of larger vocabularies) are decoded as the byte 255, which is not valid UTF-8."""

    vocab_size: int = 256
    eos_ids: tuple[int, ...] = (2,)
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        return [byte for byte in text.encode() if not self._special(byte)]

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        kept = [int(i) for i in ids if not (skip_special and self._special(int(i)))]
        return bytes(min(i, 255) for i in kept).decode(errors="replace")

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self.encode("".join(f"{m['role']}: {m['content']}\n" for m in messages) + "assistant: ")

    def token_bytes(self) -> list[bytes] | None:
        return [b"" if self._special(token) else bytes([min(token, 255)]) for token in range(self.vocab_size)]

    def _special(self, token: int) -> bool:
        return token == self.pad_id or token in self.eos_ids


@dataclass(frozen=True)
class FastTokenizer:
    """A tokenizer that tokenizer.json alone defines, behind the `Tokenizer` protocol. It gives the same tokens and
    texts as transformers' AutoTokenizer. It loads the library transformers only to apply a chat template."""

    backend: FastBackend
    path: str
    eos_ids: tuple[int, ...]
    pad: int | None
    """The padding token, if there is one."""

    @property
    def pad_id(self) -> int:
        return _require_pad(self.pad)

    @property
    def vocab_size(self) -> int:
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        return self._with_template.apply_chat_template(messages)

    def token_bytes(self) -> list[bytes] | None:
        return _token_bytes(self.backend)

    @cached_property
    def _with_template(self) -> HubTokenizer:
        return HubTokenizer(_load_tokenizer(self.path), self.eos_ids, self.pad)


@dataclass(frozen=True)
class HubTokenizer:
    """A transformers tokenizer behind the `Tokenizer` protocol."""

    inner: Any
    eos_ids: tuple[int, ...]
    pad: int | None
    """The padding token, if there is one."""

    @property
    def pad_id(self) -> int:
        return _require_pad(self.pad)

    @property
    def vocab_size(self) -> int:
        return len(self.inner)

    def encode(self, text: str) -> list[int]:
        return list(self.inner(text)["input_ids"])

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        return str(self.inner.decode([int(i) for i in ids], skip_special_tokens=skip_special))

    def apply_chat_template(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        if getattr(self.inner, "chat_template", None) is None:
            raise ChatTemplateError("the tokenizer has no chat template")
        given = [dict(message) for message in messages]
        template_error: type[Exception] = import_module("jinja2").TemplateError
        try:
            ids = self.inner.apply_chat_template(given, tokenize=True, add_generation_prompt=True, return_dict=False)
        except (ValueError, template_error) as error:
            raise ChatTemplateError(f"the tokenizer's chat template refuses these messages: {error}") from error
        return list(ids)

    def token_bytes(self) -> list[bytes] | None:
        backend: FastBackend | None = getattr(self.inner, "backend_tokenizer", None)
        return None if backend is None else _token_bytes(backend)


def _require_pad(pad: int | None) -> int:
    if pad is None:
        raise PadTokenError(
            "the tokenizer has no pad token that is no EOS, and no special token without another use: name a token "
            "that occurs in no text"
        )
    return pad


def _token_bytes(backend: FastBackend) -> list[bytes] | None:
    """Return the bytes of each token of a tokenizer of the library `tokenizers`; b"" for special tokens. Return None if
    the tokenizer is not byte-level BPE. See `Tokenizer.token_bytes`."""
    if type(backend.decoder).__name__ != "ByteLevel":
        return None
    byte_of = _bytes_of_characters()
    added = backend.get_added_tokens_decoder()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    names = sorted(vocabulary, key=lambda name: vocabulary[name])
    return [
        (b"" if added[token].special else added[token].content.encode())
        if token in added
        else bytes(byte_of[character] for character in name)
        for token, name in enumerate(names)
    ]


def _bytes_of_characters() -> dict[str, int]:
    """Return character -> byte of byte-level BPE: printable Latin-1 stands for itself, other bytes for 256 on, in
    order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def tensor_shape(path: str, name: str) -> tuple[int, ...] | None:
    """Return the shape of one of a model's tensors without reading the tensor. Return None if the model has no tensor
    of this name, or is a random model."""
    files = weight_files(path) if not is_random(path) else []
    return next((shapes[name] for shapes in map(_stored_shapes, files) if name in shapes), None)


def _stored_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Return name -> shape of the tensors in a safetensors file. Only its header is read."""
    with safe_open(file, framework="numpy") as tensors:
        names = tensors.keys()
        return {name: tuple(tensors.get_slice(name).get_shape()) for name in names}


def is_classifier(path: str) -> bool:
    """Return True if a model directory's config.json names a sequence classifier: a model with a head in place of the
    output layer."""
    return any(name.endswith("ForSequenceClassification") for name in read_config(path).get("architectures") or ())


def head_problem(path: str, spec: ModelSpec) -> str | None:
    """Return why a reward model cannot use the head in a model directory. Return None if it can use the head, or if
    there is no head."""
    shape, wanted = tensor_shape(path, SCORE_WEIGHT) if is_classifier(path) else None, (1, spec.hidden_size)
    if shape is None or shape == wanted:
        return None
    return f"its {SCORE_WEIGHT} is {shape}, and a reward model's head is {wanted}: one score for each row"


def weight_files(path: str) -> list[Path]:
    """Return the safetensors files of a model directory. Raises FileNotFoundError with the paths that were looked
    for."""
    directory = Path(path)
    whole, index = directory / "model.safetensors", directory / WEIGHTS_INDEX
    if whole.is_file():
        return [whole]
    if not index.is_file():
        raise FileNotFoundError(f"no weights at {path!r}: neither {whole.name} nor {index.name} is there")
    return [directory / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]


def weights_fault(path: str, spec: ModelSpec) -> str | None:
    """Return what is wrong with the stored weights of a model that `spec` describes, or None. Only the headers of the
    files are read: a file may be missing or cut short, a tensor may be missing or have another shape."""
    wanted = tensor_shapes(spec)
    if is_classifier(path):
        wanted.pop(LM_HEAD, None)
    stored: dict[str, tuple[int, ...]] = {}
    try:
        files = weight_files(path)
    except (OSError, ValueError) as error:
        return str(error)
    for file in files:
        try:
            stored |= _stored_shapes(file)
        except (OSError, SafetensorError) as error:
            return f"{file.name} is cut short, or no file of weights: {error}"
    for name, shape in wanted.items():
        if name not in stored:
            return f"its weights lack {name}"
        if stored[name] != shape:
            return f"its config.json says {list(shape)} for {name}, and its weights have {list(stored[name])}"
    return None


def file_digests(path: str) -> dict[str, str]:
    """Return file name -> XXH3 hash for every file that a model is read from: weights, config and tokenizer. The hashes
    detect accidental changes, not forgery. A random model has the one entry `path` -> "built in". Raises what
    `weight_files` raises."""
    if is_random(path):
        return {path: "built in"}
    weights = weight_files(path)
    others = (weights[0].parent / name for name in ("config.json", WEIGHTS_INDEX, *COPIED_FILES))
    return {file.name: _digest(file) for file in sorted({*weights, *(file for file in others if file.is_file())})}


def _digest(file: Path) -> str:
    digest = xxhash.xxh3_128()
    with file.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_vocabulary(path: str) -> dict[str, int] | None:
    """Return a tokenizer's vocabulary (token -> id), or None if the model's directory has no tokenizer."""
    if is_random(path):
        return {f"<0x{byte:02X}>": byte for byte in range(256)}
    if not has_tokenizer(path):
        return None
    plain = plain_tokenizer(path)
    return dict(_load_tokenizer(path).get_vocab() if plain is None else plain.backend.get_vocab())


def has_tokenizer(path: str) -> bool:
    """Return True if a model's directory has a tokenizer. Exports of random models have none."""
    return any((Path(path) / name).is_file() for name in _VOCABULARY_FILES)


def read_tokenizer(path: str, pad_token: str | None = None) -> Tokenizer:
    """Return the tokenizer of a model.

    `pad_token` is the token to pad with. None chooses the tokenizer's own pad token. If the tokenizer has none, or its
    pad token is an EOS, `_unused_special` chooses. If `_unused_special` finds no token either, reading `pad_id` of the
    returned tokenizer raises PadTokenError.

    Raises PadTokenError if `pad_token` is an EOS or not in the vocabulary, and ValueError if the model has no EOS."""
    if is_random(path):
        return ByteTokenizer(int(read_config(path)["vocab_size"]))
    eos_ids = read_eos_ids(path)
    plain = plain_tokenizer(path)
    inner: Any = _load_tokenizer(path) if plain is None else plain
    if not eos_ids:
        if inner.eos_token_id is None:
            raise ValueError(
                f"{path!r} has no token that ends a response: set eos_token_id in its config.json or "
                "generation_config.json, or eos_token in its tokenizer_config.json"
            )
        eos_ids = (int(inner.eos_token_id),)
    source = inner if plain is None else plain.backend
    pad_id = inner.pad_token_id if pad_token is None else source.get_vocab().get(pad_token)
    if pad_id is None or int(pad_id) in eos_ids:
        if pad_token is not None:
            why = "is no token of its vocabulary" if pad_id is None else "ends responses"
            raise PadTokenError(f"in the tokenizer of {path!r} {pad_token!r} {why}: name another token")
        added = inner.added_tokens_decoder if plain is None else source.get_added_tokens_decoder()
        special = {token.content: number for number, token in added.items() if token.special and number not in eos_ids}
        pad_id = _unused_special(Path(path), special)
    pad = None if pad_id is None else int(pad_id)
    if plain is None:
        return HubTokenizer(inner, eos_ids, pad)
    return FastTokenizer(plain.backend, path, eos_ids, pad)


def _unused_special(folder: Path, special: Mapping[str, int]) -> int | None:
    """Return the id of a special token that has no role (bos, unk, ...) and is not in the chat template. Prefer a token
    named for padding, then a reserved one, then the lowest id. Return None if there is no such token. `special`: the
    special tokens except EOS tokens."""
    files = [folder / name for name in ("tokenizer_config.json", "special_tokens_map.json")]
    configs = [json.loads(file.read_text("utf8")) for file in files if file.is_file()]
    roles = {_content(token) for config in configs for key, token in config.items() if key.endswith("_token") and token}
    template = folder / "chat_template.jinja"
    chat = [str(config.get("chat_template")) for config in configs]
    chat += [template.read_text("utf8")] if template.is_file() else []

    def rank(token: str) -> tuple[bool, bool, int]:
        name = token.lower()
        return "pad" not in name, "reserved" not in name and "unused" not in name, special[token]

    unused = [token for token in special if token not in roles and not any(token in text for text in chat)]
    return special[min(unused, key=rank)] if unused else None


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer as tokenizer.json defines it, and the EOS and pad tokens that tokenizer_config.json names."""

    backend: FastBackend
    eos_token_id: int | None
    pad_token_id: int | None


def plain_tokenizer(path: str) -> PlainTokenizer | None:
    """Return a directory's tokenizer if tokenizer.json alone defines it. Return None if tokenizer.json or
    tokenizer_config.json is missing. Also return None if transformers may change the tokenizer: it may use a family's
    own class, add tokens that only other files name, clean up spaces (unless the tokenizer is BPE), or read a key of
    `_CHANGES`."""
    folder = Path(path)
    whole, named, own = folder / "tokenizer.json", folder / "tokenizer_config.json", read_config(path)
    if not (whole.is_file() and named.is_file()) or (folder / "added_tokens.json").exists():
        return None
    config: dict[str, Any] = json.loads(named.read_text("utf8"))
    if config.get("tokenizer_class") not in _GENERIC or own.get("model_type") not in _UNCHANGED_FAMILIES:
        return None
    if any(key in config for key in _CHANGES):
        return None
    legacy = folder / "special_tokens_map.json"
    if legacy.exists() and not _same_tokens(config, json.loads(legacy.read_text("utf8"))):
        return None
    backend = FastBackend.from_file(str(whole))
    if type(backend.model).__name__ != "BPE":
        return None
    added = {str(number): _flags(token) for number, token in backend.get_added_tokens_decoder().items()}
    special = {token["content"] for token in added.values() if token["special"]}
    if not (
        special.issuperset(_named_tokens(config)) and config.get("added_tokens_decoder", {}).items() <= added.items()
    ):
        return None
    backend.no_truncation()
    backend.no_padding()
    named_ids = {
        key: backend.token_to_id(text) for key in ("eos_token", "pad_token") if (text := _content(config.get(key)))
    }
    return PlainTokenizer(backend, named_ids.get("eos_token"), named_ids.get("pad_token"))


def _flags(token: Any) -> dict[str, object]:
    """Return an added token of the library `tokenizers` in the form of tokenizer_config.json."""
    return {key: getattr(token, key) for key in ("content", "lstrip", "normalized", "rstrip", "single_word", "special")}


def _content(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json, where a token is its text or a dict of text and flags."""
    return token["content"] if isinstance(token, dict) else token


def _named_tokens(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the text of every special token that a tokenizer_config.json names."""
    for key, value in config.items():
        if key.endswith("special_tokens") and value:
            yield from filter(None, map(_content, value.values() if isinstance(value, dict) else value))
        elif key.endswith("_token") and value is not None:
            yield from filter(None, [_content(value)])


def _same_tokens(config: Mapping[str, Any], legacy: Mapping[str, Any]) -> bool:
    """Return True if tokenizer_config.json (`config`) has each token of special_tokens_map.json (`legacy`). Flags count
    only within lists."""
    return all(_content(value) == _content(config.get(key)) for key, value in legacy.items())


def _load_tokenizer(path: str) -> Any:
    transformers = import_module("transformers")  # here, since it loads torch, which not every tokenizer needs
    return transformers.AutoTokenizer.from_pretrained(path)
