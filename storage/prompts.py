"""Prompt sources: reading them, holding some out, and which prompts a step trains on.

Which prompts belong to a step is a pure function of (seed, step), so that a resumed run needs no cursor:

    position   0 1 2 3 | 4 5 6 7 | ...        rows of step s: positions s·rows .. (s+1)·rows − 1
    epoch      0 0 0 0   0 1 1 1              epoch = position // n, n training prompts (here 5)
    prompt     permutation(seed, epoch)[position mod n]

May import numpy, fsspec, pyarrow and storage only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet

from storage.config import PromptsConfig

_SPLIT, _EPOCH = 1, 2
"""Keep the two uses of one seed apart."""


class PromptsError(ValueError):
    """A prompt source or setting that cannot work; names the key path, what was given and what would work."""


@dataclass(frozen=True)
class PromptItem:
    """One prompt of a source: a text (`format: plain`) or chat messages (`format: chat`)."""

    text: str | None
    messages: list[dict[str, str]] | None
    extra: dict[str, Any] = field(default_factory=dict)
    """The row's other fields, by name or column number: what a reward may need (an answer, a rating)."""


def load_texts(config: PromptsConfig) -> list[PromptItem]:
    """All prompts of a source, in its order; blank lines do not count. Raises PromptsError, naming URL, line (from 1)
    or row (from 0) and field."""
    suffix = PurePosixPath(config.url).suffix
    if suffix not in _READERS:
        raise PromptsError(f"prompts.url: {config.url!r} ends in {suffix!r}, available: {', '.join(_READERS)}")
    items = [_item(config, where, row) for where, row in _READERS[suffix](config)]
    if not items:
        raise PromptsError(f"prompts.url: {config.url} holds no prompts")
    return items


def split(num: int, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training, held-out) prompt numbers, int64, disjoint and each ascending. Raises PromptsError where nothing would
    be left to train on."""
    if not 0 <= held_out < num:
        raise PromptsError(f"prompts.held_out: given {held_out}, the source has {num} prompts: 0..{num - 1} would work")
    order = np.random.default_rng([seed, _SPLIT]).permutation(num)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def batch_indices(train_indices: np.ndarray, seed: int, step: int, rows: int) -> np.ndarray:
    """Prompt numbers of the rows of a step, int64 [rows]. Every prompt comes once per epoch; a step may end one epoch
    and begin the next, or span several."""
    num = len(train_indices)
    epochs, offsets = np.divmod(np.arange(step * rows, (step + 1) * rows), num)
    chosen = np.empty(rows, np.int64)
    for epoch in np.unique(epochs):
        order = np.random.default_rng([seed, _EPOCH, int(epoch)]).permutation(num)
        chosen[epochs == epoch] = train_indices[order[offsets[epochs == epoch]]]
    return chosen


def _item(config: PromptsConfig, where: str, row: dict[str, Any]) -> PromptItem:
    if config.field not in row:
        raise PromptsError(f"prompts.field: {where}: given {config.field!r}, available: {', '.join(row)}")
    value = row[config.field]
    extra = {name: other for name, other in row.items() if name != config.field}
    if config.format == "chat":
        if not _is_chat(value):
            raise PromptsError(
                f"prompts.format: {where}: chat needs {config.field!r} to be a list of objects with the texts role and "
                f"content, given {value!r:.80}"
            )
        return PromptItem(None, [{"role": m["role"], "content": m["content"]} for m in value], extra)
    if not isinstance(value, str) or not value.strip():
        raise PromptsError(
            f"prompts.field: {where}: {config.field!r} must be a text that is not blank, given {value!r:.80}"
        )
    return PromptItem(value, None, extra)


def _is_chat(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )


def _jsonl(config: PromptsConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    for where, line in _lines(config):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise PromptsError(f"prompts.url: {where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise PromptsError(f"prompts.url: {where}: a line must hold an object, given {line!r:.80}")
        yield where, row


def _tsv(config: PromptsConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    if not config.field.isdecimal():
        raise PromptsError(f"prompts.field: {config.url}: must be a 0-based column number, given {config.field!r}")
    for where, line in _lines(config):
        yield where, {str(number): cell for number, cell in enumerate(line.split("\t"))}


def _parquet(config: PromptsConfig) -> Iterator[tuple[str, dict[str, Any]]]:
    try:
        with fsspec.open(config.url, "rb") as stream:
            rows = pyarrow.parquet.read_table(stream).to_pylist()
    except (OSError, ValueError, ImportError, pyarrow.ArrowException) as error:
        raise PromptsError(f"prompts.url: cannot read {config.url}: {error}") from error
    for number, row in enumerate(rows):
        yield f"{config.url} row {number}", row


def _lines(config: PromptsConfig) -> Iterator[tuple[str, str]]:
    """(URL and line number, line) of the lines that are not blank."""
    try:
        with fsspec.open(config.url, "rb") as stream:
            content: bytes = stream.read()
    except (OSError, ValueError, ImportError) as error:
        raise PromptsError(f"prompts.url: cannot read {config.url}: {error}") from error
    # Split at newlines alone: str.splitlines would also split at characters that may stand inside a text.
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{config.url} line {number}"
        try:
            text = line.rstrip(b"\r").decode()
        except UnicodeDecodeError as error:
            raise PromptsError(f"prompts.url: {where}: not UTF-8 ({error.reason})") from error
        if text.strip():
            yield where, text


_READERS = {
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".tsv": _tsv,
    ".txt": _tsv,
}
"""Ending of a source's name -> what reads it."""
