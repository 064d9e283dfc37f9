"""Boards of published weights on a host that attached workers share, and who removes them: the last worker of the run
there.

    stageline-NAME-HASH            the board (storage/weights.py)
    stageline-NAME-HASH.workers    locked by every worker of the run on this host, as long as it lives

The system lets go of a lock when its owner dies, however that goes. What a last worker leaves that is killed, the run's
next one on this host finds, or its last one removes. Nobody else does: that no worker of a run lives here does not mean
that the run is over. May import storage.weights.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from storage.weights import WeightBoard


@contextmanager
def board_of_host(board: Path) -> Iterator[None]:
    """Around a worker: the board is there until the last worker of its run on this host ends."""
    board.parent.mkdir(parents=True, exist_ok=True)
    path = board.with_name(f"{board.name}.workers")
    with _shared_lock(path) as shared:
        try:
            yield
        finally:
            fcntl.flock(shared, fcntl.LOCK_UN)  # of two that end at once, one must find the other gone
            with suppress(BlockingIOError):
                fcntl.flock(shared, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_still(shared, path):  # else another was the last, and the board is theirs who came after it
                    WeightBoard(board).close()
                    path.unlink(missing_ok=True)


def _shared_lock(path: Path) -> IO[str]:
    """A file of that name that this process and others hold a lock on."""
    while True:
        held = path.open("a")
        fcntl.flock(held, fcntl.LOCK_SH)
        if _is_still(held, path):
            return held
        held.close()  # whoever was the last had removed it in the meantime


def _is_still(file: IO[str], path: Path) -> bool:
    """Whether an open file is the one of that name."""
    with suppress(FileNotFoundError):
        return os.fstat(file.fileno()).st_ino == path.stat().st_ino
    return False
