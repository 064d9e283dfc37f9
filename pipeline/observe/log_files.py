"""What workers have printed, for who looks at a run in a browser. Standard library only."""

from __future__ import annotations

import os
from pathlib import Path

_SHOWN_BYTES = 64 << 10


def log_names(directory: Path) -> tuple[str, ...]:
    """The log files of a run."""
    return tuple(sorted(path.name for path in directory.glob("*.log"))) if directory.is_dir() else ()


def log_end(directory: Path, name: str) -> str | None:
    """The last 64 KiB of one of them as text; None where none has that name."""
    if name not in log_names(directory):
        return None
    with (directory / name).open("rb") as log:
        log.seek(max(0, log.seek(0, os.SEEK_END) - _SHOWN_BYTES))
        return log.read().decode("utf8", "replace")
