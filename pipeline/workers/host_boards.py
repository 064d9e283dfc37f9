"""Boards of published weights on a host that attached workers share, and who removes them: the last worker of a run
there; or, where a signal ended that one, the next worker of any run of the same user.

    stageline-NAME-HASH            the board (storage/weights.py)
    stageline-NAME-HASH.workers    locked by every worker of the run on this host, as long as it lives

The system lets go of a lock when its owner dies, however that goes. May import pipeline.config.paths, storage.weights.
"""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from pipeline.config.paths import BOARD_PREFIX
from storage.weights import WeightBoard

_LOCK = ".workers"


@contextmanager
def board_of_host(board: Path) -> Iterator[None]:
    """Around a worker: the board is there until the last worker of its run on this host ends. Before, boards beside it
    are removed whose workers were all killed."""
    board.parent.mkdir(parents=True, exist_ok=True)
    remove_abandoned_boards(board.parent)
    with _shared_lock(board.with_name(f"{board.name}{_LOCK}")) as shared:
        try:
            yield
        finally:
            fcntl.flock(shared, fcntl.LOCK_UN)  # of two that end at once, one must find the other gone
            _remove_if_last(shared)


def remove_abandoned_boards(folder: Path) -> None:
    """Removes boards of this user in a folder that workers had, and none has any more. A board without a lock is a
    local run's, and stays."""
    for path in folder.glob(f"{BOARD_PREFIX}*{_LOCK}"):
        with suppress(FileNotFoundError):
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
                with path.open("r+") as lock:
                    _remove_if_last(lock)


def _remove_if_last(lock: IO[str]) -> None:
    """Removes a board and its lock, unless a worker holds that."""
    path = Path(lock.name)
    with suppress(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_still(lock, path):  # else another was the last, and the board is that of workers that came after it
            WeightBoard(path.with_name(path.name.removesuffix(_LOCK))).close()
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
