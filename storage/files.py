"""The few file operations that the ledger and the rollout store are built from, on a local path or any fsspec URL.

Local files are written to a temporary name, synced and then given their name (rename or hard link), so that a name
always means the whole content, also after SIGKILL or a power cut (the latter unless `Durability.fsync` is off). Those
of a directory that nobody looks into yet are written and synced all together. On an object store a PUT has that
property already. Errors that may pass are tried again (`storage/retries.py`).

May import fsspec, storage.{config, retries} and the standard library.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec

from storage.config import Durability
from storage.retries import patiently

DEFAULT = Durability()


@dataclass(frozen=True)
class Root:
    """A directory, local or remote; `key`s are "/"-separated paths below it."""

    fs: Any
    """fsspec filesystem of a remote root; None for a local one, which is served by `os` alone."""
    path: str
    durability: Durability = DEFAULT

    @property
    def url(self) -> str:
        """What another library needs to open this directory."""
        return self.path if self.fs is None else str(self.fs.unstrip_protocol(self.path))

    def at(self, key: str) -> str:
        return f"{self.path}/{key}"

    def below(self, key: str) -> Root:
        return Root(self.fs, self.at(key), self.durability)


def open_root(url: str, durability: Durability = DEFAULT) -> Root:
    """`url` is a path, `file://...`, or the URL of any fsspec filesystem; nothing is created yet."""
    fs, path = fsspec.core.url_to_fs(url)
    if "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
        return Root(None, str(Path(path).absolute()), durability)
    return Root(fs, path.rstrip("/"), durability)


def read(root: Root, key: str) -> bytes | None:
    """The whole content, or None where there is no such file."""
    path = root.at(key)
    try:
        if root.fs is None:
            return patiently(lambda: Path(path).read_bytes(), path, root.durability.patience_s)
        return patiently(lambda: bytes(root.fs.cat_file(path)), path, root.durability.patience_s)
    except (FileNotFoundError, NotADirectoryError):
        return None


def exists(root: Root, key: str) -> bool:
    return os.path.exists(root.at(key)) if root.fs is None else bool(root.fs.exists(root.at(key)))


def look_again(root: Root, key: str) -> None:
    """Has the system forget that it saw no such file: a network filesystem asks its server again once the file's
    directory has been listed."""
    if root.fs is None:
        with suppress(OSError):
            os.listdir(os.path.dirname(root.at(key)))
    else:
        root.fs.invalidate_cache()


def write(root: Root, key: str, data: bytes) -> None:
    """Creates or replaces, whole or not at all."""
    path = root.at(key)

    def act() -> None:
        if root.fs is None:
            temporary = _temporary(root, path, data)
            os.replace(temporary, path)
            _sync_directory_of(root, path)
        else:
            root.fs.makedirs(os.path.dirname(path), exist_ok=True)
            root.fs.pipe_file(path, data)

    patiently(act, path, root.durability.patience_s)


def write_together(root: Root, directory: str, contents: Mapping[str, bytes]) -> None:
    """Creates or replaces files in one directory that nobody looks into before this returns: by then all are whole and
    synced. The disk is waited for once, not once for each file and each name."""
    path = root.at(directory)

    def act() -> None:
        if root.fs is None:
            _fill_together(root, path, contents)
            return
        root.fs.makedirs(path, exist_ok=True)
        for name, data in contents.items():
            root.fs.pipe_file(f"{path}/{name}", data)

    patiently(act, path, root.durability.patience_s)


def write_new(root: Root, key: str, data: bytes, before: Callable[[], None] | None = None) -> bool:
    """Creates the file if, and only if, it does not exist; of several racing callers one gets True. `before`: is over
    when the file gets its name, and runs while its content is synced; where it raises, there is no file.

    Locally a hard link of a complete, synced file, which is atomic also on NFS and Lustre; remotely fsspec's
    `mode="create"` (a conditional PUT on S3 and GCS).
    """
    path = root.at(key)
    patience_s = root.durability.patience_s
    if root.fs is None:
        with ExitStack() as undo:

            def draft() -> str:
                made = patiently(lambda: _temporary(root, path, data), path, patience_s)
                undo.callback(_unlink_if_there, made)
                return made

            temporary = draft() if before is None else _beside(before, draft)
            return patiently(lambda: _link(root, temporary, path), path, patience_s)

    def create() -> bool:
        root.fs.makedirs(os.path.dirname(path), exist_ok=True)
        try:
            root.fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        return True

    if before is not None:
        before()
    return patiently(create, path, patience_s)


def move(root: Root, source: str, target: str) -> bool:
    """Renames a file, replacing `target`; False where `source` is gone (another process moved it first)."""

    def act() -> bool:
        try:
            if root.fs is None:
                os.makedirs(os.path.dirname(root.at(target)), exist_ok=True)
                os.replace(root.at(source), root.at(target))
            else:
                root.fs.makedirs(os.path.dirname(root.at(target)), exist_ok=True)
                root.fs.mv(root.at(source), root.at(target))
        except FileNotFoundError:
            return False
        return True

    return patiently(act, root.at(target), root.durability.patience_s)


def remove(root: Root, key: str) -> None:
    """Removes a file; nothing if it is gone."""

    def act() -> None:
        try:
            os.unlink(root.at(key)) if root.fs is None else root.fs.rm_file(root.at(key))
        except FileNotFoundError:
            return

    patiently(act, root.at(key), root.durability.patience_s)


def remove_tree(root: Root, key: str) -> None:
    """Removes a directory and all below it; nothing if it is gone."""
    if root.fs is None:
        shutil.rmtree(root.at(key), ignore_errors=True)
        return
    try:
        root.fs.rm(root.at(key), recursive=True)
    except FileNotFoundError:
        return


def remove_empty(root: Root, keys: Iterable[str]) -> None:
    """Removes directories that are empty, and leaves those that are not. (Object stores have none.)"""
    for key in keys if root.fs is None else ():
        with suppress(OSError):
            os.rmdir(root.at(key))


def keys(root: Root) -> Iterator[str]:
    """Keys of all files below the root, sorted; temporaries of `write` and `write_new` left out."""
    if root.fs is None:
        paths = [os.path.join(d, name) for d, _, names in os.walk(root.path) for name in names]
    else:
        root.fs.invalidate_cache()
        paths = list(root.fs.find(root.path))
    for path in sorted(paths):
        if not os.path.basename(path).startswith("."):
            yield path[len(root.path) + 1 :].replace(os.sep, "/")


def names(root: Root) -> list[str]:
    """Names of the files and directories right below the root, sorted; none where there is no such directory."""
    try:
        if root.fs is None:
            return sorted(os.listdir(root.path))
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in root.fs.ls(root.path, detail=False, refresh=True))
    except (FileNotFoundError, NotADirectoryError):
        return []


def remove_temporaries(root: Root) -> int:
    """Removes what processes that died in `write` or `write_new` left below a local root; returns how many. Only for a
    root that nobody writes to."""
    if root.fs is not None:
        return 0
    left = [f"{d}/{name}" for d, _, names in os.walk(root.path) for name in names if _TEMPORARY.fullmatch(name)]
    for path in left:
        with suppress(FileNotFoundError):
            os.unlink(path)
    return len(left)


def sync_directory(path: str) -> None:
    """Makes the names inside a local directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
"""At once: a filesystem with a journal writes down together what is asked for together."""


def _sync_together(descriptors: Sequence[int]) -> None:
    if len(descriptors) == 1:
        os.fsync(descriptors[0])
        return
    with ThreadPoolExecutor(min(len(descriptors), _MOST_SYNCS)) as threads:
        for _ in threads.map(os.fsync, descriptors):
            pass  # an error of any is raised here


def _beside(one: Callable[[], None], other: Callable[[], str]) -> str:
    """Does both at once; what `other` gives. Raises what either did, once both are over."""
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(other)
        one()
    return made.result()


def _unlink_if_there(path: str) -> None:
    with suppress(OSError):  # one that stays is no file of the store, and is removed at the run's end
        os.unlink(path)


_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}")


def _temporary(root: Root, path: str, data: bytes) -> str:
    """A complete, synced file beside `path`, under a name that no other call uses."""
    directory, name = os.path.split(path)
    os.makedirs(directory, exist_ok=True)
    temporary = f"{directory}/.{name}.{uuid.uuid4().hex[:12]}"
    try:
        with open(temporary, "xb") as stream:
            _fill(stream, data)
            if root.durability.fsync:
                os.fsync(stream.fileno())
    except OSError:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    return temporary


def _link(root: Root, temporary: str, path: str) -> bool:
    """Gives a temporary file its name, unless another file has it."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        # A server may have linked it, and its answer been lost: then the file of that name is ours.
        if not os.path.samefile(temporary, path):
            return False
    _sync_directory_of(root, path)
    return True
