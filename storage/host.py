"""Facts about this host and its accounts: private directories, who else can change a path, and whether a process lives.
Standard library only."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from storage.errors import StoreError

_MODE = 0o700


def private_directory(path: Path) -> None:
    """Make a directory, and its missing parents, that only this user can enter (mode 0700). Close an existing directory
    that others can enter. So everything in it was written by this user, even if its name can be guessed.

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


def who_else_can_change(path: Path, *, all_below: bool) -> str | None:
    """Return why another account (root excepted) can change what is at a path, naming the file or directory that allows
    it, or None. Checks the path, its parent directories both as written and with links followed, and, with `all_below`,
    everything below it. Paths that do not exist are skipped."""
    places = [path.absolute(), path.resolve()]
    below = set(path.resolve().rglob("*")) if all_below else set()
    for one in sorted({*places, *(above for place in places for above in place.parents), *below}):
        with suppress(FileNotFoundError, PermissionError):  # what cannot be looked at cannot be read either
            why = _foreign(one, is_above=one not in below and one not in places)
            if why is not None:
                return f"{one} {why}"
    return None


def _foreign(path: Path, *, is_above: bool) -> str | None:
    found = path.lstat()
    if found.st_uid not in (0, os.geteuid()):
        return f"belongs to user {_name(found.st_uid)}"
    if stat.S_ISLNK(found.st_mode):
        return None  # its mode means nothing
    if is_above and found.st_mode & stat.S_ISVTX:
        return None  # as in /tmp: others can add entries, but not replace this user's
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if found.st_mode & stat.S_IWGRP and (others := next(_others_in(found.st_gid), None)) is not None:
        return f"can be written by {others}"
    return None


def _others_in(group: int) -> Iterator[str]:
    """Yield the members of a group other than this user and root. A group with its only member's name is that user's
    own group, as Linux makes one for each account."""
    try:
        found, me = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        found, me = None, ""
    if found is None:
        yield f"group {group}"
    elif {*found.gr_mem} - {me, "root"} or found.gr_name not in (me, "root"):
        yield f"group {found.gr_name}"


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


# ---- processes -------------------------------------------------------------------------------------------


def process_alive(pid: int) -> bool:
    """Return False after the process has ended and was reaped. If its pid was given to a new process, return True:
    callers then keep a file too long, but never remove one too early."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
