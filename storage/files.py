"""The few file operations that the ledger and the rollout store are built from, on a local path or any fsspec URL.

Local files are written to a temporary name, synced and then given their name (rename or hard link), so that a name
always means the whole content, also after SIGKILL or a power cut. On an object store a PUT has that property already.

May import fsspec and the standard library.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec


@dataclass(frozen=True)
class Root:
    """A directory, local or remote; `key`s are "/"-separated paths below it."""

    fs: Any
    """fsspec filesystem of a remote root; None for a local one, which is served by `os` alone."""
    path: str

    @property
    def url(self) -> str:
        """What another library needs to open this directory."""
        return self.path if self.fs is None else str(self.fs.unstrip_protocol(self.path))

    def at(self, key: str) -> str:
        return f"{self.path}/{key}"

    def below(self, key: str) -> Root:
        return Root(self.fs, self.at(key))


def open_root(url: str) -> Root:
    """`url` is a path, `file://...`, or the URL of any fsspec filesystem; nothing is created yet."""
    fs, path = fsspec.core.url_to_fs(url)
    if "file" in ((fs.protocol,) if isinstance(fs.protocol, str) else fs.protocol):
        return Root(None, str(Path(path).absolute()))
    return Root(fs, path.rstrip("/"))


def read(root: Root, key: str) -> bytes | None:
    """The whole content, or None where there is no such file."""
    try:
        if root.fs is None:
            return Path(root.at(key)).read_bytes()
        return bytes(root.fs.cat_file(root.at(key)))
    except FileNotFoundError:
        return None


def exists(root: Root, key: str) -> bool:
    return os.path.exists(root.at(key)) if root.fs is None else bool(root.fs.exists(root.at(key)))


def write(root: Root, key: str, data: bytes) -> None:
    """Creates or replaces, whole or not at all."""
    path = root.at(key)
    if root.fs is None:
        temporary = _synced_temporary(path, data)
        os.replace(temporary, path)
        sync_directory(os.path.dirname(path))
    else:
        root.fs.makedirs(os.path.dirname(path), exist_ok=True)
        root.fs.pipe_file(path, data)


def write_new(root: Root, key: str, data: bytes) -> bool:
    """Creates the file if, and only if, it does not exist; of several racing callers one gets True.

    Locally a hard link of a complete, synced file, which is atomic also on NFS and Lustre; remotely fsspec's
    `mode="create"` (a conditional PUT on S3 and GCS).
    """
    path = root.at(key)
    if root.fs is None:
        temporary = _synced_temporary(path, data)
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        finally:
            os.unlink(temporary)
        sync_directory(os.path.dirname(path))
        return True
    root.fs.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        root.fs.pipe_file(path, data, mode="create")
    except FileExistsError:
        return False
    return True


def move(root: Root, source: str, target: str) -> bool:
    """Renames a file, replacing `target`; False where `source` is gone (another process moved it first)."""
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


def remove_tree(root: Root, key: str) -> None:
    """Removes a directory and all below it; nothing if it is gone."""
    if root.fs is None:
        shutil.rmtree(root.at(key), ignore_errors=True)
        return
    try:
        root.fs.rm(root.at(key), recursive=True)
    except FileNotFoundError:
        return


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


def sync_directory(path: str) -> None:
    """Makes the names inside a local directory survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _synced_temporary(path: str, data: bytes) -> str:
    """A complete, synced file beside `path`, under a name that no other call uses."""
    directory, name = os.path.split(path)
    os.makedirs(directory, exist_ok=True)
    temporary = f"{directory}/.{name}.{uuid.uuid4().hex[:12]}"
    with open(temporary, "xb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    return temporary
