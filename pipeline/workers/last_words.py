"""Why a worker's process has ended itself, in a file beside its log: Dask tells the driver that it did, and not why.

Standard library only.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

_LONGEST = 500
"""Characters: it becomes part of an event."""


def leave_last_words(log: str | None, words: str) -> None:
    """`log`: the process's; None: it has none, and leaves nothing."""
    if log is not None:
        with suppress(OSError):  # a full disk does not keep it from ending
            _beside(log).write_text(" ".join(words.split())[:_LONGEST], "utf8")


def with_last_words(why: str, log: str | None) -> str:
    """What the driver knows of an end, with what was left, which goes; or as it is, where nothing was."""
    words = "" if log is None else _take(_beside(log))
    return f"{why}: {words}" if words else why


def forget_last_words(log: str | None) -> None:
    """Of an earlier process, which no driver has read: they are not the next one's."""
    if log is not None:
        _take(_beside(log))


def _take(file: Path) -> str:
    try:
        words = file.read_text("utf8")
        file.unlink()
    except (OSError, UnicodeDecodeError):
        return ""
    return words


def _beside(log: str) -> Path:
    return Path(f"{log}.last_words")
