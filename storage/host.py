"""Functions about this host: private directories, accounts that can change a path, processes that end with their
parent, and connections that stay on the host. Standard library only."""

from __future__ import annotations

import ctypes
import grp
import os
import pwd
import signal
import socket
import stat
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from storage.errors import StoreError

_MODE = 0o700


def private_directory(path: Path) -> None:
    """Make a directory that only this user can enter (mode 0700), and its missing parents. An existing directory of
    this user that others can enter gets this mode. From then on only this user can write in it, even if others can
    guess its name.

    Raises:
        StoreError: the path is a link or a file, or another user's directory.
        OSError: it cannot be made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        path.mkdir(mode=_MODE)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise StoreError(f"{path} is not a directory but a link or a file: remove it")
    if status.st_uid != os.geteuid():
        raise StoreError(
            f"{path} belongs to user {status.st_uid}, and this process to {os.geteuid()}: it is not opened, since its "
            "owner decides what would be read from it"
        )
    if stat.S_IMODE(status.st_mode) & ~_MODE:
        path.chmod(_MODE)


def who_else_can_change(path: Path, *, all_below: bool) -> str | None:
    """Return a text that says how another account can change the file or directory at a path, or None if no other
    account can. Other accounts are all except this user's and root's. The text names the file or directory that allows
    the change.

    Checks the path and its parent directories, both as written and with links followed. With `all_below`, also checks
    everything below the path. Paths that do not exist, or that this process may not look at, are skipped.
    """
    places = [path.absolute(), path.resolve()]
    below = set(path.resolve().rglob("*")) if all_below else set()
    for one in sorted({*places, *(above for place in places for above in place.parents), *below}):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):  # what cannot be seen cannot be read
            why = _foreign(one, is_above=one not in below and one not in places)
            if why is not None:
                return f"{one} {why}"
    return None


def _foreign(path: Path, *, is_above: bool) -> str | None:
    status = path.lstat()
    if status.st_uid not in (0, os.geteuid()):
        return f"belongs to user {_name(status.st_uid)}"
    if stat.S_ISLNK(status.st_mode):
        return None  # its mode means nothing
    if is_above and status.st_mode & stat.S_ISVTX:
        return None  # as in /tmp: others can add entries, but not replace this user's
    if status.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if status.st_mode & stat.S_IWGRP and (others := next(_shared_group(status.st_gid), None)) is not None:
        return f"can be written by {others}"
    return None


def _shared_group(group: int) -> Iterator[str]:
    """Yield the group's name if accounts other than this user and root may be in it. A group with this user's name and
    no other members is the user's own: Linux makes such a group for each account."""
    try:
        entry, me = grp.getgrgid(group), pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        entry, me = None, ""
    if entry is None:
        yield f"group {group}"
    elif {*entry.gr_mem} - {me, "root"} or entry.gr_name not in (me, "root"):
        yield f"group {entry.gr_name}"


def _name(user: int) -> str:
    try:
        return pwd.getpwuid(user).pw_name
    except KeyError:
        return str(user)


# ---- processes -------------------------------------------------------------------------------------------


def process_alive(pid: int) -> bool:
    """Return True if a process with this id exists, running or not yet reaped. An id can be reused, so the result may
    be about a newer process. A caller that cleans up after dead processes then removes their files later, but never too
    early."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Ask Linux to send a signal to this process when the thread that started it ends. The default signal is SIGKILL,
    which works even if this process is stopped or stuck in a native call. On systems other than Linux this does
    nothing.

    `parent`: id of the expected parent; if it has ended already, this process ends at once. `by`: the signal. A process
    that must clean up before it ends gives a signal that it can handle.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def loopback_only() -> dict[str, str]:
    """Return the environment under which gloo and NCCL listen on the loopback interface alone. Without it, gloo listens
    on the address that the host's name resolves to, and NCCL on the first interface. Neither library checks who
    connects."""
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}


def route_address(host: str) -> str:
    """Return this host's address on the route to `host`, an IP address. Raises OSError if there is no route."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing, only finds the route
        return str(probe.getsockname()[0])


def family_of(host: str) -> socket.AddressFamily:
    """Return the family of an IP address, for a socket."""
    return socket.AF_INET6 if ":" in host else socket.AF_INET
