"""File operations for the ledger and the rollout store, on a local path or an object store (S3, GCS).

A local file is written under a temporary name, synced, and then renamed or hard-linked. So a file under its final name
is always complete, even after SIGKILL. With `Durability.fsync` it is complete after a power cut too. The files of a new
directory are written and synced all together. An object store's PUT is atomic already. An object store has no
directories. Its bucket must exist, because this module creates none.

Errors of the filesystem:

    ESTALE, EIO, EAGAIN, ETIMEDOUT, ...   retried after 0.05 s to 2 s until `retry_s` is spent; reported on stderr
    500, 503, no answer of a bucket       the same, after the few retries that its client makes by itself
    ENOSPC, EDQUOT, EROFS, EACCES, ...    StoreRefused, naming the path: waiting does not help
    403, no bucket, no credentials        the same
    file not found, file exists           answers, not faults: passed on

Every retried operation must be harmless when repeated, even if the first try succeeded and only its answer was lost.

`Writeback` runs work in a thread, one piece after another. `Closing` is the base of objects for `with` blocks.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import shutil
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, Self, TypeVar

import fsspec

from storage.config import BUCKETS, Durability
from storage.errors import StoreError, StoreRefused, StoreUnavailable
from storage.redaction import redacted_text

DEFAULT = Durability()
Item = TypeVar("Item")
Answer = TypeVar("Answer")

EXCLUSIVE = (*BUCKETS, "memory")
"""Protocols of the fsspec filesystems whose `mode="create"` is atomic. For other filesystems fsspec first checks
whether the file exists and then writes it, so that two processes could both commit an output. (`memory` is for one
process.)"""


@dataclass(frozen=True)
class Root:
    """A directory, local or remote. A `key` is a "/"-separated path below it."""

    fs: Any
    """fsspec filesystem of a remote root; None for a local root, which only needs `os`."""
    path: str
    durability: Durability = DEFAULT

    @property
    def url(self) -> str:
        """URL, or local path, with which another library opens this directory."""
        return self.path if self.fs is None else str(self.fs.unstrip_protocol(self.path))

    def at(self, key: str) -> str:
        return f"{self.path}/{key}"

    def below(self, key: str) -> Root:
        return Root(self.fs, self.at(key), self.durability)


def open_root(url: str, durability: Durability = DEFAULT) -> Root:
    """Return the root at `url`: a path, `file://...`, or a URL with a protocol of `EXCLUSIVE`. Creates nothing yet.
    Raises StoreRefused if the URL has another protocol, or if the package of an object store is missing."""
    protocol = fsspec.core.split_protocol(url)[0] or "file"
    if protocol not in ("file", "local", *EXCLUSIVE):
        raise StoreRefused(
            f"{redacted_text(url)}: {protocol} cannot create a file only if there is none, so that two processes could "
            "commit the same output; give a directory, or a URL of s3:// or gs://"
        )
    # A cached listing would hide what other processes have written since. With a concurrency above 1 s3fs asks for the
    # size of a file before each read, to fetch a large one in pieces; ours are small.
    try:
        options = {"max_concurrency": 1, "session": _s3_session()} if protocol in ("s3", "s3a") else {}
        fs, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **options)
    except ImportError as error:  # it names the package that this protocol needs
        raise StoreRefused(f"{redacted_text(url)}: {error}") from error
    if protocol in ("file", "local"):
        return Root(None, str(Path(path).absolute()), durability)
    return Root(fs, path.rstrip("/"), durability)


@cache
def _s3_session() -> Any:
    """Return the session of all S3 clients of this process. It does not ask servers to agree before they get the body
    of an upload (`Expect: 100-continue`): aiohttp would wait for that without a time-out, so a server that takes the
    connection and never answers would hold up its client for ever."""
    handlers = importlib.import_module("botocore.handlers")
    session = importlib.import_module("aiobotocore.session").AioSession()
    session.unregister("before-call.s3", handlers.add_expect_header)
    return session


def read(root: Root, key: str) -> bytes | None:
    """Return the whole content of a file, or None if there is no such file."""
    path = root.at(key)
    try:
        if root.fs is None:
            return retried(lambda: Path(path).read_bytes(), path, root.durability.retry_s)
        return retried(lambda: bytes(root.fs.cat_file(path)), path, root.durability.retry_s)
    except (FileNotFoundError, NotADirectoryError):
        return None


_MOST_REQUESTS = 8
"""Maximum number of requests that `map_items` makes at the same time. An object store's client keeps some ten
connections open."""


def map_items(root: Root, act: Callable[[Item], Answer], items: Iterable[Item]) -> list[Answer]:
    """Return `act(item)` for every item, in order. Requests to an object store are made at the same time, because
    each takes a round trip. In a local directory the calls are made one after the other."""
    listed = list(items)
    if root.fs is None or len(listed) < 2:
        return [act(item) for item in listed]
    with ThreadPoolExecutor(min(len(listed), _MOST_REQUESTS)) as threads:
        return list(threads.map(act, listed))


def look_again(root: Root, key: str) -> None:
    """List a file's directory. A network filesystem that remembers a file as missing then asks its server again."""
    if root.fs is None:
        with suppress(OSError):
            os.listdir(os.path.dirname(root.at(key)))


def write(root: Root, key: str, data: bytes, *, private: bool = False) -> None:
    """Create or replace a file atomically. `private`: only this user may read the local file (mode 0600)."""
    path = root.at(key)

    def act() -> None:
        if root.fs is None:
            temporary = _temporary(root, path, data, private=private)
            os.replace(temporary, path)
            _sync_directory_of(root, path)
        else:
            _put(root.fs, {path: data})

    retried(act, path, root.durability.retry_s)


def write_local(path: Path, data: bytes, durability: Durability = DEFAULT, *, private: bool = False) -> None:
    """Do what `write` does, for a local file given by its path."""
    write(Root(None, str(path.absolute().parent), durability), path.name, data, private=private)


def write_together(root: Root, directory: str, contents: Mapping[str, bytes]) -> None:
    """Create or replace files of one directory. All files are complete when this call returns. Nobody may read them
    before. Local files are synced at the same time and not one after the other."""
    path = root.at(directory)

    def act() -> None:
        if root.fs is None:
            _fill_together(root, path, contents)
        else:
            _put(root.fs, {f"{path}/{name}": data for name, data in contents.items()})

    retried(act, path, root.durability.retry_s)


def write_new(root: Root, key: str, data: bytes, before: Callable[[], None] | None = None) -> bool:
    """Create the file only if it does not exist, and return True if this call created it. Of several racing callers at
    most one gets True.

    `before` is a function that must end before the file exists. For a local file, it runs while a temporary file is
    written and synced. For a remote file, it runs before the upload. If `before` raises, no file is created.

    A local file gets its name by a hard link, which is atomic on NFS and Lustre too. A remote file is created by
    fsspec's `mode="create"` (a conditional PUT on S3 and GCS). If the answer to that PUT is lost, the PUT is repeated
    and finds its own file. Then nobody gets True, and the file's content tells who created it.
    """
    path = root.at(key)
    retry_s = root.durability.retry_s
    if root.fs is None:
        with ExitStack() as undo:

            def draft() -> str:
                made = retried(lambda: _temporary(root, path, data), path, retry_s)
                undo.callback(_unlink_if_there, made)
                return made

            temporary = draft() if before is None else _beside(before, draft)
            return retried(lambda: _link(root, temporary, path), path, retry_s)

    def create() -> bool:
        try:
            _put(root.fs, {path: data}, mode="create")
        except FileExistsError:
            return False
        except OSError as error:  # a server need not say which condition failed; s3fs then raises EINVAL
            if "PreconditionFailed" not in str(error.__cause__):
                raise
            return False
        return True

    if before is not None:
        before()
    return retried(create, path, retry_s)


def move(root: Root, source: str, target: str) -> bool:
    """Rename a file, replacing `target`. Return False if another process has already moved `source`."""

    def act() -> bool:
        try:
            if root.fs is None:
                os.makedirs(os.path.dirname(root.at(target)), exist_ok=True)
                os.replace(root.at(source), root.at(target))
            else:
                root.fs.cp_file(root.at(source), root.at(target))
                root.fs.rm_file(root.at(source))
        except FileNotFoundError:
            return False
        return True

    return retried(act, root.at(target), root.durability.retry_s)


def remove(root: Root, key: str) -> None:
    """Remove a file if it exists."""

    def act() -> None:
        try:
            os.unlink(root.at(key)) if root.fs is None else root.fs.rm_file(root.at(key))
        except FileNotFoundError:
            return

    retried(act, root.at(key), root.durability.retry_s)


def remove_all(root: Root, keys: Sequence[str]) -> None:
    """Remove objects of an object store, with one request if there are at most 1000. Keys without an object are
    skipped, and an object that could not be removed stays."""
    paths = [root.at(key) for key in keys]
    if paths:
        with suppress(FileNotFoundError):
            retried(lambda: root.fs.rm(paths), paths[0], root.durability.retry_s)


def remove_tree(root: Root, key: str) -> None:
    """Remove a directory and everything below it, if it exists."""
    if root.fs is None:
        shutil.rmtree(root.at(key), ignore_errors=True)
        return
    with suppress(FileNotFoundError):
        retried(lambda: root.fs.rm(root.at(key), recursive=True), root.at(key), root.durability.retry_s)


def remove_empty(root: Root, keys: Iterable[str]) -> None:
    """Remove each of these directories that is empty. Does nothing in an object store, which has no directories."""
    for key in keys if root.fs is None else ():
        with suppress(OSError):
            os.rmdir(root.at(key))


def keys(root: Root) -> Iterator[str]:
    """Yield the keys of all files below the root, sorted, without files whose name begins with a dot (such
    as temporary files)."""
    if root.fs is None:
        paths = [os.path.join(d, name) for d, _, names in os.walk(root.path) for name in names]
    else:
        paths = list(retried(lambda: root.fs.find(root.path), root.path, root.durability.retry_s))
    for path in sorted(paths):
        if not os.path.basename(path).startswith("."):
            yield path[len(root.path) + 1 :].replace(os.sep, "/")


def sizes(root: Root) -> dict[str, int]:
    """Return key -> size in bytes, for every object below the root of an object store."""
    try:
        files = retried(lambda: root.fs.find(root.path, detail=True), root.path, root.durability.retry_s)
    except FileNotFoundError:
        return {}
    return {path[len(root.path) + 1 :]: int(files[path]["size"]) for path in sorted(files)}


def upload(root: Root, key: str, file: Path) -> None:
    """Upload a local file, in pieces if it is large. An object at `key` is replaced."""
    path = root.at(key)
    retried(lambda: root.fs.put_file(str(file), path), path, root.durability.retry_s)


def download(root: Root, key: str, file: Path) -> None:
    """Download an object to a local file, whose directory is created if needed. A file there is replaced. Raises
    StoreError if there is no such object."""
    path = root.at(key)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        retried(lambda: root.fs.get_file(path, str(file)), path, root.durability.retry_s)
    except FileNotFoundError as error:
        raise StoreError(f"{path}: is missing") from error


def names(root: Root) -> list[str]:
    """Return the names of the files and directories directly below the root, sorted; empty if there is no such
    directory."""
    try:
        if root.fs is None:
            return sorted(os.listdir(root.path))
        paths = retried(lambda: root.fs.ls(root.path, detail=False), root.path, root.durability.retry_s)
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in paths)
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_temporaries(root: Root) -> int:
    """Remove the temporary files of processes that died in `write` or `write_new`, below a local root. Return the
    number of these files. The caller must ensure that no process is writing below this root."""
    if root.fs is not None:
        return 0
    left = [f"{d}/{name}" for d, _, names in os.walk(root.path) for name in names if _TEMPORARY.fullmatch(name)]
    for path in left:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return len(left)


def sync_directory(path: str) -> None:
    """Make the names in a local directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _put(fs: Any, contents: Mapping[str, bytes], **options: str) -> None:
    """Upload objects (path -> content) at the same time. Raises StoreRefused if there is no such bucket."""
    try:
        fs.pipe(contents, **options)
    except FileNotFoundError as error:
        raise refusal(error, next(iter(contents))) from error


def _sync_directory_of(root: Root, path: str) -> None:
    if root.durability.fsync:
        sync_directory(os.path.dirname(path))


def _fill_together(root: Root, path: str, contents: Mapping[str, bytes]) -> None:
    os.makedirs(path, exist_ok=True)
    with ExitStack() as opened:
        streams = [opened.enter_context(open(f"{path}/{name}", "wb")) for name in contents]
        for stream, data in zip(streams, contents.values(), strict=True):
            _fill(stream, data)
        if root.durability.fsync:
            _sync_together([stream.fileno() for stream in streams])
            sync_directory(path)


def _fill(stream: IO[bytes], data: bytes) -> None:
    stream.write(data)
    stream.flush()


_MOST_SYNCS = 8
"""Maximum number of syncs at once. A journalling filesystem combines syncs that run at the same time."""


def _sync_together(descriptors: Sequence[int]) -> None:
    if len(descriptors) == 1:
        os.fsync(descriptors[0])
        return
    with ThreadPoolExecutor(min(len(descriptors), _MOST_SYNCS)) as threads:
        for _ in threads.map(os.fsync, descriptors):
            pass  # an error of any sync is raised here


def _beside(one: Callable[[], None], other: Callable[[], str]) -> str:
    """Run both at the same time, and return the result of `other`. Errors are raised after both have ended."""
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(other)
        one()
    return made.result()


def _unlink_if_there(path: str) -> None:
    with suppress(OSError):  # a leftover is no file of the store, and is removed at the run's end
        os.unlink(path)


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}")


def _temporary(root: Root, path: str, data: bytes, *, private: bool = False) -> str:
    """Write a file with this content beside `path`, under a unique name, and return its path. With `Durability.fsync`
    the file is synced."""
    directory, name = os.path.split(path)
    os.makedirs(directory, exist_ok=True)
    temporary = f"{directory}/.{name}.{uuid.uuid4().hex[:12]}"
    try:
        with open(temporary, "xb", opener=_open_private if private else None) as stream:
            _fill(stream, data)
            if root.durability.fsync:
                os.fsync(stream.fileno())
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _link(root: Root, temporary: str, path: str) -> bool:
    """Give a temporary file its final name. Return False if another file already has this name."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A server may have made the link although its answer was lost. Then the file of that name is ours.
        if not os.path.samefile(temporary, path):
            return False
    _sync_directory_of(root, path)
    return True


# ---- retries ---------------------------------------------------------------------------------------------

TRANSIENT = frozenset(
    {
        errno.EAGAIN, errno.EBUSY, errno.EINTR, errno.EIO, errno.ENOLCK, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT,
        errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENOTCONN,
        errno.EPIPE, errno.ESHUTDOWN,
    }
)  # fmt: skip
"""Transient errors of a network filesystem, or of a disk behind it."""
REFUSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EMFILE})
"""Permanent errors of a filesystem: they stay until a person acts."""

_SHORTEST_S, _LONGEST_S = 0.05, 2.0


def retried(act: Callable[[], Answer], path: str, retry_s: float) -> Answer:
    """Return the result of `act()`. While it raises transient errors, call it again. `path`: what `act` works on, for
    the messages.

    Raises:
        StoreRefused: `act` raised an error that stays until a person acts. It is in `REFUSING`, or the object store
            denied the access, or there were no credentials.
        StoreUnavailable: `act` raised transient errors for longer than `retry_s` seconds.
        OSError: `act` raised any other error.
    """
    give_up: float | None = None
    pause_s = _SHORTEST_S
    while True:
        try:
            return act()
        except _store_errors() as error:
            if is_transient(error):
                pass
            elif _refuses(error):
                raise refusal(error, path) from error
            else:
                raise
            now = time.monotonic()
            give_up = now + retry_s if give_up is None else give_up
            if now + pause_s > give_up:
                raise StoreUnavailable(f"{path}: {_reason(error)}, still so after {retry_s:g} s of trying") from error
            print(f"{path}: {_reason(error)}; trying again in {pause_s:g} s", file=sys.stderr, flush=True)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_S)


def is_transient(error: BaseException) -> bool:
    """Return True if the same work may succeed later. This holds for StoreUnavailable, and for the errors that
    `retried` retries, wherever they were raised."""
    if isinstance(error, (StoreUnavailable, TimeoutError, *_classes(*_NO_ANSWER))):
        return True
    return isinstance(error, OSError) and error.errno in TRANSIENT


# The clients of object stores raise an OSError for the server's error answers, and these errors if no answer comes.
_NO_ANSWER = (
    ("botocore.exceptions", "HTTPClientError"),
    ("botocore.exceptions", "ConnectionError"),
    ("botocore.exceptions", "IncompleteReadError"),
    ("aiohttp", "ClientError"),
)
_NO_REQUEST = (("botocore.exceptions", "BotoCoreError"),)
"""Base class of the errors that keep a client from sending a request, such as missing credentials."""


def _classes(*names: tuple[str, str]) -> tuple[type[Exception], ...]:
    """Return the classes of (module, class) pairs. A module that is not imported cannot have raised an error, and
    importing it would slow down every process without an object store."""
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def _store_errors() -> tuple[type[Exception], ...]:
    """Return the classes of the errors that a filesystem or an object store's client raises."""
    return (OSError, *_classes(*_NO_ANSWER, *_NO_REQUEST))


def _refuses(error: Exception) -> bool:
    """Return True for an error that stays until a person acts."""
    if isinstance(error, OSError):
        return error.errno in REFUSING or isinstance(error, PermissionError)
    return isinstance(error, _classes(*_NO_REQUEST))


def until_seen(look: Callable[[], Answer | None], retry_s: float) -> Answer | None:
    """Call `look()` until its result is not None, and return this result. Return None after `retry_s` seconds. A
    network filesystem may report a file of another host as missing for a while."""
    answer, pause_s, waited_s = look(), _SHORTEST_S, 0.0
    while answer is None and waited_s < retry_s:
        time.sleep(pause_s)
        waited_s += pause_s
        pause_s = min(2 * pause_s, _LONGEST_S)
        answer = look()
    return answer


def refusal(error: Exception, path: str) -> StoreRefused:
    """Return a permanent error as StoreRefused, with a message for the person who must act."""
    return StoreRefused(
        f"{path}: {_reason(error)}. What is committed is whole and stays; put this right, and the run can be resumed"
    )


def _reason(error: Exception) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number and not error.__cause__:  # an object store's client raises it from the server's answer, which says more
        return f"{os.strerror(number)} ({errno.errorcode.get(number, '')})"
    return f"{type(error).__name__}: {redacted_text(str(error))}"


# ---- in the background -----------------------------------------------------------------------------------


MOST_WAITING = 8
"""Maximum number of pieces of work in the queue. If more would wait, the disk is too slow, and a longer queue would not
help."""


class Writeback:
    """A thread that does pieces of work one after the other, in the order in which they were submitted. Any thread may
    submit. If a piece fails, a later `submit`, or `close`, raises its error."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="writeback")
        self._pending: deque[Future[object]] = deque()
        self._lock = threading.Lock()

    def submit(self, work: Callable[[], object]) -> None:
        """Submit a piece of work. If `MOST_WAITING` pieces are waiting, wait until the oldest piece is done. Raises the
        error of an earlier piece."""
        with self._lock:
            over = []
            while self._pending and (len(self._pending) >= MOST_WAITING or self._pending[0].done()):
                over.append(self._pending.popleft())
            self._pending.append(self._thread.submit(work))
        _raise_first(over)

    def close(self) -> None:
        """Wait for all work, and raise the first error that was not raised yet."""
        self._thread.shutdown()
        with self._lock:
            over = list(self._pending)
            self._pending.clear()
        _raise_first(over)


def _raise_first(futures: list[Future[object]]) -> None:
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise errors[0]


# ---- with blocks -----------------------------------------------------------------------------------------


class Closing:
    """Base of objects that are closed when the `with` block that holds them ends."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        raise NotImplementedError
