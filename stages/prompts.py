"""Turn a prompt source into the prompts of each shard. The source is tokenised once. Then a pure function of (seed,
step) draws the prompts of each step."""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stages.models.hf_files import ChatTemplateError, Tokenizer
from stages.rewards import reasoning
from stages.rewards.config import REASONING_SCHEME
from storage.config import PromptsConfig
from storage.errors import StoreError
from storage.prompts import PromptItem, PromptsError, batch_indices, held_out_by_default, load_texts, split
from storage.records import PromptBatch

EVALUATION_STEP = 2**31 - 1
"""Step number that seeds the sampling of evaluations, in place of a real step. It is the same for all versions of the
weights, so the responses of two versions can be compared prompt by prompt."""


@dataclass(frozen=True)
class PromptTable:
    """A source's prompts as tokens, divided into training and held-out prompts."""

    tokens: np.ndarray
    """int32 [prompts prompt_seq], right-padded."""
    lengths: np.ndarray
    """int32 [prompts]: number of tokens of each prompt."""
    train: np.ndarray
    """int64: indices of the training prompts in `tokens`."""
    held_out: np.ndarray
    """int64: indices of the prompts that are set aside for evaluation."""
    pad_id: int
    extra: list[dict[str, Any]]
    """Fields of each prompt in the source besides the prompt itself, for the reward."""
    messages: list[list[dict[str, str]]] | None = None
    """Messages of each prompt of a chat source, for the reward. Empty for a plain prompt in a table that also has
    chats. None without a chat source."""

    def save(self, path: Path) -> None:
        """Write the table to `path` (.npz), and the extra fields to a .jsonl file beside it. For a chat source also
        write the messages to a .chat.jsonl file. `path` is written last and atomically, so it exists only if all files
        are complete."""
        path.with_suffix(".jsonl").write_text("".join(json.dumps(e, default=str) + "\n" for e in self.extra), "utf8")
        if self.messages is not None:
            path.with_suffix(".chat.jsonl").write_text("".join(json.dumps(m) + "\n" for m in self.messages), "utf8")
        staged = path.with_name(f".{path.name}")
        with staged.open("wb") as stream:
            np.savez(
                stream,
                tokens=self.tokens,
                lengths=self.lengths,
                train=self.train,
                held_out=self.held_out,
                pad_id=np.int64(self.pad_id),
                chat=np.bool_(self.messages is not None),
            )
        os.replace(staged, path)

    @staticmethod
    def load(path: Path) -> PromptTable:
        """Return the table that `save` wrote. Raises StoreError if a file is missing or damaged, or if the files have
        different numbers of prompts. The error names the file."""
        extras = path.with_suffix(".jsonl")
        extra = _read_lines(extras)
        try:
            with np.load(path) as saved:
                arrays = {name: saved[name] for name in ("tokens", "lengths", "train", "held_out", "pad_id", "chat")}
            chat = _read_lines(path.with_suffix(".chat.jsonl")) if bool(arrays.pop("chat")) else None
            table = PromptTable(**arrays | {"pad_id": int(arrays["pad_id"])}, extra=extra, messages=chat)
        except FileNotFoundError as error:
            raise StoreError(f"{path} is missing") from error
        except (ValueError, KeyError, TypeError, EOFError, OSError, zipfile.BadZipFile) as error:
            raise StoreError(f"{path} is damaged: {type(error).__name__}: {error}") from error
        if not len(table.tokens) == len(table.lengths) == len(extra) == len(extra if chat is None else chat):
            raise StoreError(f"{extras} has {len(extra)} lines for the {len(table.tokens)} prompts of {path}")
        return table

    def for_reward(self, numbers: Iterable[int]) -> tuple[list[dict[str, Any]], list[list[dict[str, str]]] | None]:
        """Return two inputs of the stage `score` for the prompts with the indices `numbers`: their extra fields and
        their messages. The messages are None if the table has none."""
        chosen = [*numbers]
        chats = None if self.messages is None else [self.messages[i] for i in chosen]
        return [self.extra[i] for i in chosen], chats

    def evaluated_on(self, other: PromptTable) -> PromptTable:
        """Return a table with the prompts of both tables. All prompts of this table become training prompts. All
        prompts of `other` become held-out prompts. The indices of the held-out prompts follow the indices of the
        training prompts."""
        first, num = len(self.lengths), len(other.lengths)
        chats = [chat for table in (self, other) for chat in table.messages or [[]] * len(table.lengths)]
        return PromptTable(
            np.concatenate([self.tokens, other.tokens]),
            np.concatenate([self.lengths, other.lengths]),
            np.arange(first, dtype=np.int64),
            np.arange(first, first + num, dtype=np.int64),
            self.pad_id,
            [*self.extra, *other.extra],
            chats if any(chats) else None,
        )

    def beginning(self, num: int) -> PromptTable:
        """Return a table of the first `num` prompts, all of them held out."""
        chats = None if self.messages is None else self.messages[:num]
        train, held_out = np.arange(0, dtype=np.int64), np.arange(num, dtype=np.int64)
        return PromptTable(self.tokens[:num], self.lengths[:num], train, held_out, self.pad_id, self.extra[:num], chats)

    def digest(self) -> str:
        """Return a shortened SHA-256 of the whole table. If a source is read twice, equal digests show that both tables
        are the same."""
        digest = hashlib.sha256(json.dumps([self.pad_id, self.extra], default=str, sort_keys=True).encode())
        if self.messages is not None:
            digest.update(json.dumps(self.messages, sort_keys=True).encode())
        for array in (self.tokens, self.lengths, self.train, self.held_out):
            digest.update(f"{array.dtype} {array.shape}".encode() + np.ascontiguousarray(array).tobytes())
        return digest.hexdigest()[:32]


def last_questions(path: Path) -> list[str] | None:
    """Return the last user message of each prompt of a saved table, for people to read. For a prompt without user
    messages it is "".

    Return None if all prompts are plain text, or if the file of messages is missing or damaged. The caller then shows
    the decoded prompts."""
    try:
        chats = _read_lines(path.with_suffix(".chat.jsonl"))
    except StoreError:
        return None
    return [next((m["content"] for m in reversed(chat) if m["role"] == "user"), "") for chat in chats]


def _read_lines(path: Path) -> list[Any]:
    """Return the JSON value of each line of a file. Raises StoreError if the file is missing or damaged; the error
    names the file."""
    try:
        return [json.loads(line) for line in path.read_text("utf8").removesuffix("\n").split("\n")]
    except FileNotFoundError as error:
        raise StoreError(f"{path} is missing") from error
    except ValueError as error:
        raise StoreError(f"{path} is damaged: {error}") from error


def read_source(config: PromptsConfig) -> list[PromptItem]:
    """Return all prompts of a source. A source is a file, or problems that are generated from a seed. Raises
    PromptsError if the prompts cannot be read or generated."""
    return reasoning.load_problems(config) if config.url.startswith(REASONING_SCHEME) else load_texts(config)


def tokenise(
    items: list[PromptItem], tokenizer: Tokenizer, config: PromptsConfig, seed: int, eval_shards: int = 1
) -> PromptTable:
    """Return the prompts of a source as tokens. If `prompts.opening_tokens` is set, each prompt is cut to this number
    of tokens, and shorter prompts are left out. Empty prompts are left out too. If `prompts.too_long` is "skip",
    prompts longer than `prompts.max_tokens` are left out.

    Args:
        items: the prompts of the source.
        tokenizer: tokenizer of the policy.
        config: section `prompts` of the config.
        seed: seed of the split into training and held-out prompts.
        eval_shards: number of equal parts into which the held-out prompts are divided. If `prompts.held_out` is not
            set, the number of held-out prompts is a multiple of `eval_shards`.

    Raises:
        PromptsError: a prompt is longer than `prompts.max_tokens` and `too_long` is not "skip". Also raised if the
            tokenizer has no chat template for a prompt's messages, if no prompt is usable, or if no training prompt
            would be left.
    """
    kept: list[tuple[list[int], PromptItem]] = []
    too_long: dict[int, int] = {}  # index of a prompt -> its number of tokens
    sizes: list[int] = []  # number of tokens of each prompt
    for number, item in enumerate(items):
        if item.messages is not None:
            try:
                ids = tokenizer.apply_chat_template(item.messages)
            except ChatTemplateError as error:
                need = f"prompt {number} of {config.url}: {error}: plain, or the model's instruction-tuned sibling"
                raise PromptsError(f"prompts.format: given {config.format}; {need}") from error
        else:
            ids = tokenizer.encode(item.text or "")
        sizes.append(len(ids))
        if config.opening_tokens is not None:
            if len(ids) < config.opening_tokens:
                continue
            ids = ids[: config.opening_tokens]
        if len(ids) > config.max_tokens:
            if config.too_long != "skip":
                too_long[number] = len(ids)
        elif ids:
            kept.append((ids, item))
    if too_long:
        raise PromptsError(
            f"prompts.max_tokens: given {config.max_tokens}; {len(too_long)} of {len(items)} prompts of {config.url} "
            f"are longer (the first is prompt {min(too_long)}, the longest has {max(too_long.values())} tokens): raise "
            "it, or set prompts.too_long=skip or prompts.opening_tokens"
        )
    if not kept:
        raise PromptsError(_unusable_text(config, sizes))
    tokens = np.full((len(kept), config.max_tokens), tokenizer.pad_id, np.int32)
    for row, (ids, _) in enumerate(kept):
        tokens[row, : len(ids)] = ids
    aside = held_out_by_default(len(kept), eval_shards) if config.held_out is None else config.held_out
    train, held_out = split(len(kept), aside, seed)
    lengths = np.array([len(ids) for ids, _ in kept], np.int32)
    chat = [item.messages or [] for _, item in kept] if config.format == "chat" else None
    return PromptTable(tokens, lengths, train, held_out, tokenizer.pad_id, [item.extra for _, item in kept], chat)


def _unusable_text(config: PromptsConfig, sizes: Sequence[int]) -> str:
    """Return the error for a source of which no prompt can be used. `sizes`: number of tokens of each prompt."""
    opening, longest = config.opening_tokens, max(sizes)
    if opening is not None and longest < opening:
        return f"prompts.opening_tokens: given {opening}; the longest prompt of {config.url} has {longest} tokens"
    if longest:
        need = f"the shortest prompt of {config.url} has {min(filter(None, sizes))} tokens: this number or more"
        return f"prompts.max_tokens: given {config.max_tokens}; {need}"
    return f"prompts.url: all prompts of {config.url} are empty"


def training_prompts(
    table: PromptTable, *, seed: int, step: int, shard: int, rows: int, shards: int, responses_per_prompt: int
) -> PromptBatch:
    """Return the prompts of one shard of a step. A step has `rows` rows in `shards` shards of equal size. Each prompt
    of the step has `responses_per_prompt` consecutive rows."""
    chosen = np.repeat(batch_indices(table.train, seed, step, rows // responses_per_prompt), responses_per_prompt)
    size = rows // shards
    return _batch(table, chosen, slice(shard * size, (shard + 1) * size))


def held_out_prompts(table: PromptTable, *, shard: int, shards: int) -> PromptBatch:
    """Return the held-out prompts of one shard of an evaluation, in a fixed order."""
    size = len(table.held_out) // shards
    return _batch(table, table.held_out, slice(shard * size, (shard + 1) * size))


def _batch(table: PromptTable, chosen: np.ndarray, part: slice) -> PromptBatch:
    indices = chosen[part]
    rows = np.arange(part.start, part.stop, dtype=np.int64)
    return PromptBatch(rows, indices.astype(np.int64), table.tokens[indices], table.lengths[indices])
