"""Files of rows, read by fsspec URL: JSONL, CSV, Parquet and columns of text. Each row comes with its place, for error
messages."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePosixPath
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet

Row = tuple[str, dict[str, Any]]
"""(URL and line from 1 or row from 0, fields by name or column number)."""


class RowsError(ValueError):
    """A file or a line that cannot be read. The message names it and the reason."""


def read_rows(url: str) -> Iterator[Row]:
    """Yield all rows of a file in its order; blank lines do not count. Raises RowsError."""
    suffix = PurePosixPath(url).suffix
    if suffix not in READERS:
        raise RowsError(f"{url!r} ends in {suffix!r}, available: {', '.join(READERS)}")
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
    """Read comma-separated values, quoted as spreadsheets do (a quoted cell may hold commas and line ends). The first
    line names the fields."""
    reader = csv.reader(io.StringIO(_text(url), newline=""), strict=True)
    names: list[str] = []
    try:
        for cells in reader:
            where = f"{url} line {reader.line_num}"
            if not cells:  # a blank line; one of blank cells is a row, and refused as such where its text is needed
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
        raise RowsError(f"{where}: the first line names the fields, each another: given {', '.join(names)}")
    return names


def _parquet(url: str) -> Iterator[Row]:
    try:
        with fsspec.open(url, "rb") as stream:
            rows = pyarrow.parquet.read_table(stream).to_pylist()
    except (OSError, ValueError, ImportError, pyarrow.ArrowException) as error:
        raise RowsError(f"cannot read {url}: {error}") from error
    for number, row in enumerate(rows):
        yield f"{url} row {number}", row


def _text(url: str) -> str:
    """Return the whole file without the byte order mark that spreadsheets write."""
    try:
        return _content(url).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RowsError(f"{url}: not UTF-8 ({error.reason} at byte {error.start})") from error


def _content(url: str) -> bytes:
    try:
        with fsspec.open(url, "rb") as stream:
            content: bytes = stream.read()
    except (OSError, ValueError, ImportError) as error:
        raise RowsError(f"cannot read {url}: {error}") from error
    return content


def _lines(url: str) -> Iterator[tuple[str, str]]:
    """Yield (URL and line number, line) for the lines that are not blank."""
    content = _content(url)
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
"""Readers by the ending of the file's name."""
