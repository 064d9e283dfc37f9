"""Directories that nobody but this user can look into or put anything into.

May import the standard library and storage.errors.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from storage.errors import StoreError

_MODE = 0o700


def private_directory(path: Path) -> None:
    """Makes a directory, and those above it, that this user alone can enter (mode 0700); one that others could enter is
    closed to them. So what is read from it is what this user wrote, however easily its name can be guessed.

    Raises:
        StoreError: the path is a link or a file, or another user's directory.
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=_MODE)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise StoreError(f"{path} is not a directory but a link or a file: remove it")
    if found.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {found.st_uid}, and this process to {os.geteuid()}: it is not opened, since its "
            "owner decides what would be read from it"
        )
    if stat.S_IMODE(found.st_mode) & ~_MODE:
        path.chmod(_MODE)
