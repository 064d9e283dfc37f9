"""Locks between this user's processes: flock on files that no other account can open.

Whoever can open a file for reading can lock it and make everybody wait, so every lock file has mode 0600. The system
releases a lock when the last process that shares it ends.

`held` also works between hosts, for a run's driver:

    driver.lock   {"process": 4711, "host": "n1", "boot": "5c0b…", "since": 1790000000.0}     empty: nobody holds it

On some shared filesystems flock works only within a host, so two hosts could both have the lock. Therefore the holder
writes its identity into the file, and sets the file's modification time every `BEAT_S` seconds. A process that finds
another host's name in the file watches the file. If the file's time changes, that holder is alive, and the process
gives up. The holder counts as silent when the time has not changed for `HOLDER_TIMEOUT_S`, or is `STALE_S` old by the
file server's clock. Then the process may take the lock.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import platform
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from storage.errors import StoreError

_LOOK_S = 0.01


def open_lock(path: Path) -> IO[str]:
    """Open a lock file, creating it if it does not exist. From then on only this user can open it (mode 0600).

    Raises:
        StoreError: the path is a link, or the file of another user, who could lock it at any time.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.ELOOP) or not os.path.lexists(path):
            raise
        raise StoreError(f"{path}, a lock, is a link or another user's: {error.strerror}. Have it removed") from error
    file = os.fdopen(descriptor, "r+")
    status, me = os.fstat(descriptor), os.geteuid()
    if status.st_uid != me and me != 0:
        file.close()
        raise StoreError(f"{path}, a lock, belongs to user {status.st_uid}, and this process to {me}. Have it removed")
    if stat.S_IMODE(status.st_mode) != 0o600:
        os.fchmod(descriptor, 0o600)
    return file


def take_lock(
    file: IO[str], path: Path, wait_s: float, *, shared: bool = False, progress: Callable[[], int] = lambda: 0
) -> None:
    """Lock an open file. Wait at most `wait_s` seconds for the present holder. The wait begins anew whenever `progress`
    returns another number than before.

    Raises:
        StoreError: another process still has the lock after the wait. The message names that process.
    """
    done, give_up = progress(), time.monotonic() + wait_s
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        if time.monotonic() > give_up:
            if (now := progress()) == done:
                raise StoreError(
                    f"{path} is locked by {lock_holder(path) or 'another process'}, for more than {wait_s:g} s: wait "
                    "for that process, or end it"
                )
            done, give_up = now, time.monotonic() + wait_s
        time.sleep(_LOOK_S)


def is_named(file: IO[str], path: Path) -> bool:
    """Return True if `path` still names this open file. Return False if a former holder has removed the file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def lock_holder(path: Path) -> str | None:
    """Return a text with the id and command of the process that has locked a file. Return None if no process has locked
    the file, or if the system does not list that process."""
    with suppress(OSError):
        inode = path.stat().st_ino
        for line in Path("/proc/locks").read_text().splitlines():
            # "1: FLOCK  ADVISORY  WRITE 1234 00:19:5678 0 EOF"; for a process that waits, "->" follows the number
            fields = line.split()
            if fields[1] == "FLOCK" and fields[5].rpartition(":")[2] == str(inode):
                return _described(int(fields[4]))
    return None


def _described(pid: int) -> str:
    """Return a process's id and the first words of its command. Later words are left out, since they may hold a
    secret."""
    words: list[bytes] = []
    with suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:3]
    command = " ".join(b" ".join(words).decode("utf8", "replace").split())
    return f"process {pid} ({command[:120]})" if command else f"process {pid}"


BEAT_S = 2.0
HOLDER_TIMEOUT_S = 30.0
STALE_S = 300.0
_LOOKS, _PAUSE_S = 3, 0.05
"""Number of attempts to lock a file that another process of this host has locked, and the seconds between them. The
first attempt may fail although nobody holds the file: the function `holder`, which only names the holder, locks the
file for an instant."""
_WATCH_S = 0.5
"""Seconds between attempts to lock a file whose last holder was on another host."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a file (see `held`)."""

    process: int
    host: str
    boot: str
    """Identity of the host's running kernel. Containers of one host share it, and see each other's locks."""
    since: float
    """Time at which the process took the file, in seconds since the epoch, by the clock of the process's host."""

    def __str__(self) -> str:
        return f"process {self.process} on {self.host}"


class HeldByAnother(Exception):
    """An error for a file that another process holds. The message names that process."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Hold a file while the block runs. Waits up to `HOLDER_TIMEOUT_S` if the last holder was on another host.

    Raises:
        HeldByAnother: another process holds the file.
        StoreError: the file belongs to another user, or is a link.
    """
    with open_lock(path) as lock:
        _take(lock, path)
        us = Holder(os.getpid(), platform.node(), boot_identity(), time.time())
        with suppress(OSError):  # the disk may be full: the lock holds without a name in the file
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), json.dumps(asdict(us)).encode(), 0)
        over = threading.Event()
        beats = threading.Thread(target=_beat, args=(lock, over), name="held-file", daemon=True)
        beats.start()
        try:
            yield
        finally:
            over.set()
            beats.join()
            with suppress(OSError):  # the disk is gone: the next holder waits until our time-out
                os.ftruncate(lock.fileno(), 0)


def holder(path: Path) -> str | None:
    """Return a text that names the current holder of the file, or None if no process holds the file. Changes
    nothing."""
    try:
        with path.open() as lock:
            last = _last_holder(lock)
            if last is not None and last.boot != boot_identity():
                return str(last) if time.time() - os.fstat(lock.fileno()).st_mtime < STALE_S else None
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return str(last or "another process")
    except FileNotFoundError:
        return None
    except PermissionError:  # another user's file: it is not empty until its holder ends normally
        status = path.stat()
        is_held = status.st_size > 0 and time.time() - status.st_mtime < STALE_S
        return (lock_holder(path) or "another user's process") if is_held else None
    return None


def boot_identity() -> str:
    """Return the identity of this host's running kernel."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return platform.node()


def _take(lock: IO[str], path: Path) -> None:
    """Take the lock. Its file names its last holder. The system's lock decides if that was on this host, but may not
    reach another one. A living holder keeps changing the file's modification time. So if the last holder was on another
    host, the time is watched for up to `HOLDER_TIMEOUT_S` seconds, unless it is `STALE_S` seconds old. Raises
    HeldByAnother."""
    began, first, looks, age_s = time.monotonic(), _time(path), 0, None
    while True:
        locked = _try_lock(lock)
        last = _last_holder(lock)
        if last is None or last.boot == boot_identity():
            if locked:
                return
            looks += 1
            if looks == _LOOKS:
                raise HeldByAnother(str(last or "another process"))
            time.sleep(_PAUSE_S)
            continue
        if _time(path) != first:
            raise HeldByAnother(f"{last}, which is alive,")
        age_s = _age_s(path) if age_s is None else age_s
        if age_s > STALE_S or time.monotonic() - began > HOLDER_TIMEOUT_S:
            if locked:
                return
            # A file server keeps the lock of a failed host until it notices the failure.
            raise HeldByAnother(
                f"{last}, silent for {HOLDER_TIMEOUT_S:g} s, whose lock the filesystem has not released,"
            )
        time.sleep(_WATCH_S)


def _try_lock(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _last_holder(lock: IO[str]) -> Holder | None:
    """Return the last holder, as written in the lock's file. Return None if the file is empty, because this holder
    ended normally, or if another version of this program wrote it."""
    lock.seek(0)
    try:
        return Holder(**json.loads(lock.read()))
    except (ValueError, TypeError):
        return None


def _time(path: Path) -> int:
    """Return a file's modification time. Opening it makes a network filesystem ask its server."""
    with path.open() as file:
        return os.fstat(file.fileno()).st_mtime_ns


def _age_s(path: Path) -> float:
    """Return the number of seconds since the file was modified, by the clock of the filesystem. To read this clock, a
    new file is created and removed."""
    probe = path.with_name(f"{path.name}.{uuid.uuid4().hex[:8]}")
    probe.touch(exist_ok=False)
    try:
        return probe.stat().st_mtime - _time(path) / 1e9
    finally:
        probe.unlink()


def _beat(lock: IO[str], over: threading.Event) -> None:
    while not over.wait(BEAT_S):
        with suppress(OSError):  # the filesystem does not answer: the next heartbeat may succeed
            os.utime(lock.fileno())
