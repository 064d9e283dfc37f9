"""Prompt sources: reading their files, holding some prompts out, and choosing a step's prompts.

Files of rows (JSONL, CSV, Parquet, columns of text) are read by fsspec URL. Human judgements are read with the same
functions. Each row comes with its URL and line, for error messages.

The prompts of a step are a pure function of (seed, step), so a resumed run needs no cursor:

    position   0 1 2 3 | 4 5 6 7 | ...        rows of step s: positions s·rows .. (s+1)·rows − 1
    epoch      0 0 0 0   0 1 1 1              epoch = position // n, n training prompts (here 5)
    prompt     permutation(seed, epoch)[position mod n]
"""

from __future__ import annotations

import codecs
import csv
import importlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import fsspec
import numpy as np

from storage.config import PromptsConfig

Row = tuple[str, dict[str, Any]]
"""(place, fields). The place is the URL with the line (from 1) or row (from 0). The fields are: name or column number
-> value."""


class RowsError(ValueError):
    """An error for a file or a line that cannot be read. The message names the file or line, and the reason."""


def read_rows(url: str) -> Iterator[Row]:
    """Return an iterator over the rows of a file, in the order of the file and without blank lines. The ending of the
    file's name decides how the file is read. Raises RowsError if the ending is not in `READERS`, or if the file or a
    line cannot be read."""
    suffix = PurePosixPath(url).suffix
    if suffix not in READERS:
        need = f"a file with an ending of {', '.join(READERS)}"
        export = 'datasets.load_dataset(NAME, split="train").to_json("prompts.jsonl")'
        raise RowsError(f"{url!r} ends in {suffix!r}; must be {need}. A data set of a hub is not fetched: {export}")
    return READERS[suffix](url)


def has_columns(url: str) -> bool:
    """Return True if the fields of a file's rows are named by 0-based column numbers."""
    return READERS.get(PurePosixPath(url).suffix) is _columns


def _jsonl(url: str) -> Iterator[Row]:
    for where, line in _lines(url):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise RowsError(f"{where}: not JSON ({error})") from error
        if not isinstance(row, dict):
            raise RowsError(f"{where}: a line must hold an object, given {line!r:.80}")
        yield where, row


def _columns(url: str) -> Iterator[Row]:
    for where, line in _lines(url):
        yield where, {str(number): cell for number, cell in enumerate(line.split("\t"))}


def _csv(url: str) -> Iterator[Row]:
    """Yield the rows of a file of comma-separated values. Cells may be quoted as in spreadsheets: a quoted cell may
    hold commas and line ends. The first line names the fields."""
    reader = csv.reader(io.StringIO(_text(url), newline=""), strict=True)
    names: list[str] = []
    try:
        for cells in reader:
            where = f"{url} line {reader.line_num}"
            if not cells:  # a blank line; a line of blank cells is a row, which is refused where its text is needed
                continue
            if not names:
                names = _field_names(cells, where)
            elif len(cells) != len(names):
                raise RowsError(f"{where}: {len(cells)} cells, but the first line names {len(names)} fields")
            else:
                yield where, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise RowsError(f"{url} line {reader.line_num}: not CSV ({error})") from error


def _field_names(cells: list[str], where: str) -> list[str]:
    names = [cell.strip() for cell in cells]
    if "" in names or len({*names}) < len(names):
        raise RowsError(f"{where}: the first line must have a different name for each field: given {', '.join(names)}")
    return names


def _parquet(url: str) -> Iterator[Row]:
    pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))  # only Parquet files need pyarrow
    try:
        with fsspec.open(url, "rb") as stream:
            rows = parquet.read_table(stream).to_pylist()
    except (OSError, ValueError, ImportError, pyarrow.ArrowException) as error:
        raise RowsError(f"cannot read {url}: {_reason(error, url)}") from error
    for number, row in enumerate(rows):
        yield f"{url} row {number}", row


def _reason(error: Exception, url: str) -> str:
    """Return an error's message, or its cause's if it is only the URL (fsspec's errors about web pages)."""
    return str(error.__cause__ or error) if str(error) == url else str(error)


def _text(url: str) -> str:
    """Return a file's text, without a spreadsheet's byte order mark. Raises RowsError if it is not UTF-8."""
    try:
        return _content(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowsError(f"{url}: not UTF-8 ({error.reason} at byte {error.start})") from error


def _content(url: str) -> bytes:
    try:
        with fsspec.open(url, "rb") as stream:
            content: bytes = stream.read()
    except (OSError, ValueError, ImportError) as error:
        raise RowsError(f"cannot read {url}: {_reason(error, url)}") from error
    return content


def _lines(url: str) -> Iterator[tuple[str, str]]:
    """Yield (URL and line number, line) for the lines that are not blank."""
    content = _content(url).removeprefix(codecs.BOM_UTF8)  # which some editors write
    # Split at newlines alone: str.splitlines would also split at characters that may stand inside a text.
    for number, line in enumerate(content.split(b"\n"), start=1):
        where = f"{url} line {number}"
        try:
            text = line.rstrip(b"\r").decode()
        except UnicodeDecodeError as error:
            raise RowsError(f"{where}: not UTF-8 ({error.reason})") from error
        if text.strip():
            yield where, text


READERS: Mapping[str, Callable[[str], Iterator[Row]]] = {
    ".csv": _csv,
    ".jsonl": _jsonl,
    ".parquet": _parquet,
    ".tsv": _columns,
    ".txt": _columns,
}
"""Ending of a file's name -> function that reads the file's rows."""


_SPLIT, _EPOCH = 1, 2
"""Constants that keep the two uses of one seed apart."""


class PromptsError(ValueError):
    """An error for a prompt source or setting that cannot work. The message names the key path, what was given and what
    would work."""


@dataclass(frozen=True)
class PromptItem:
    """One prompt of a source: a text (`format: plain`) or chat messages (`format: chat`)."""

    text: str | None
    messages: list[dict[str, str]] | None
    extra: dict[str, Any] = field(default_factory=dict)
    """The row's other fields, by name or column number, for rewards that need them (an answer, a rating)."""


def load_texts(config: PromptsConfig) -> list[PromptItem]:
    """Return all prompts of a source, in the order of its file and without blank lines. With the default field
    (`prompt`), each line of a .txt file is a prompt.

    Raises PromptsError if the file cannot be read or has no prompts, or if a row has no valid prompt. The message names
    URL, line (from 1) or row (from 0) and field."""
    plain = PurePosixPath(config.url).suffix == ".txt" and config.field == "prompt"
    if has_columns(config.url) and not config.field.isdecimal() and not plain:
        need = "must be a 0-based column number"
        if PurePosixPath(config.url).suffix == ".txt":
            need = "give prompts.field=prompt if each line is a prompt, or the 0-based number of a column"
        raise PromptsError(f"prompts.field: given {config.field!r}; {config.url}: {need}")
    try:
        rows = ((where, {"prompt": line}) for where, line in _lines(config.url)) if plain else read_rows(config.url)
        items = [_item(config, where, row) for where, row in rows]
    except RowsError as error:
        raise PromptsError(f"prompts.url: {error}") from error
    if not items:
        raise PromptsError(f"prompts.url: {config.url} holds no prompts")
    return items


HELD_OUT = 64
"""Default number of prompts that are held out. Fewer are held out if a tenth of all prompts is less than this."""


def held_out_by_default(num: int, shards: int) -> int:
    """Return how many of `num` prompts to hold out if the config does not say. This is the smaller of `HELD_OUT` and a
    tenth of `num`, rounded down to a multiple of `shards`. It is at least 2 (rounded up to a multiple of `shards`),
    because an evaluation reports a spread."""
    most, least = min(HELD_OUT, num // 10), -(-2 // shards) * shards
    return max(most - most % shards, least)


def split(num: int, held_out: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return two int64 arrays: the indices of the training prompts in the source, and the indices of the held-out
    prompts. The two arrays are disjoint, and each is ascending. Raises PromptsError if `held_out` is negative, or if no
    training prompt would be left."""
    if not 0 <= held_out < num:
        raise PromptsError(
            f"prompts.held_out: evaluations would hold out {held_out} prompts, which leaves none to train on (usable "
            f"prompts: {num}): more prompts, fewer held out, or none (prompts.held_out=0 evaluate.every=0)"
        )
    order = np.random.default_rng([seed, _SPLIT]).permutation(num)
    return np.sort(order[held_out:]), np.sort(order[:held_out])


def batch_indices(train_indices: np.ndarray, seed: int, step: int, rows: int) -> np.ndarray:
    """Return the index in the source of each row's prompt in a step, int64 [rows]. Every training prompt comes once per
    epoch. A step may span two or more epochs."""
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
        if not is_chat(value):
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


def is_chat(value: object) -> bool:
    """Return True if a value is a non-empty list of messages: objects with the texts `role` and `content`."""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(
            isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in value
        )
    )
