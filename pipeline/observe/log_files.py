"""The log files of the workers, read for the page of a run. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

_SHOWN_BYTES = 64 << 10


def log_names(directory: Path) -> tuple[str, ...]:
    """Return the names of a run's log files."""
    return tuple(sorted(path.name for path in directory.glob("*.log"))) if directory.is_dir() else ()


def log_end(directory: Path, name: str) -> str | None:
    """Return the last 64 KiB of a log file as text, or None if no log file has that name."""
    if name not in log_names(directory):
        return None
    with (directory / name).open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        return log.read().decode("utf8", "replace")
