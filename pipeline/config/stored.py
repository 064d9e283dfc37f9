"""The place of a run's stored data: its directory, or an object store (`storage.url`). Every process of a run, and
every command that reads a run, gets the place from `RunConfig.stored`.

    run's directory                    config.yaml, identity.json, prompts, journal, logs, results
    run's directory or `storage.url`   ledger/, rollouts.zarr/, attempts/, damaged/, archive/, dropped.json
    both places                        checkpoints/, weights/ (exports): written to the directory, then uploaded

The configs in two directories can name the same object store. For example, a driver was killed or seems to be dead, and
another driver continues the run from another directory. So each driver writes a claim below `storage.url` when it
starts, and ends when it finds a later claim.

    drivers/000002.json   {"host": "node7", "directory": "/data/runs/demo", "time": 1767225600.0}
"""

from __future__ import annotations

import json
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.errors import ConfigError
from storage import files
from storage.checkpoints import MANIFEST, Checkpoints, version_of
from storage.config import Durability
from storage.errors import StoreError
from storage.exports import RECORD, Exports
from storage.ledger import Ledger

KEY = "storage.url"
_CLAIMS = "drivers"
_PROBE_S = 5.0
"""Seconds for which `check_stored` repeats a failed request. The time is short, so that a wrong address is refused
soon."""


@dataclass(frozen=True)
class RunStorage:
    """The place of a run's stored data."""

    directory: Path
    """The run's directory."""
    url: str | None = None
    """URL of the object store with the run's data (`storage.url`). None: all data is in the run's directory."""
    durability: Durability = files.DEFAULT

    @property
    def place(self) -> str:
        """The path or URL below which the ledger and the rollouts are stored."""
        return str(self.directory) if self.url is None else self.url

    @property
    def root(self) -> files.Root:
        return files.open_root(self.place, self.durability)

    @property
    def ledger_url(self) -> str:
        return f"{self.place}/ledger"

    @property
    def damaged(self) -> str:
        """Place to which damaged commit records are moved when the run is resumed."""
        return f"{self.place}/damaged"

    @property
    def rollouts(self) -> str:
        """Path or URL of the Zarr hierarchy that holds all arrays."""
        return f"{self.place}/rollouts.zarr"

    def ledger(self) -> Ledger:
        return Ledger(self.ledger_url, self.durability)

    def checkpoints(self) -> Checkpoints:
        """Return the checkpoints in the directory. If `url` is given, each checkpoint is also uploaded below it."""
        store = None if self.url is None else self.root.below("checkpoints")
        return Checkpoints(self.directory / "checkpoints", self.durability, store)

    def exports(self) -> Exports:
        """Return the exported versions of the weights in the directory. If `url` is given, each export is also uploaded
        below it."""
        return Exports(self.directory / "weights", None if self.url is None else self.root.below("weights"))

    def copied_after(self, version: int) -> list[str]:
        """Return the keys of the uploaded files of all checkpoints and exports that have a version above `version`. The
        keys of checkpoint manifests and of export records come first. The list is empty without an object store."""
        keys = []
        for kind in ("checkpoints", "weights") if self.url is not None else ():
            for key in files.keys(self.root.below(kind)):
                versions = (version_of(Path(part)) for part in key.split("/"))
                if any(one is not None and one > version for one in versions):
                    keys.append(f"{kind}/{key}")
        return sorted(keys, key=lambda key: key.rpartition("/")[2] not in (MANIFEST, RECORD))

    @contextmanager
    def downloaded(self) -> Iterator[RunStorage]:
        """Yield a copy of this storage with a temporary directory. A checkpoint or export is downloaded into this
        directory when it is read. The directory is removed after the `with` block. Without an object store, yield this
        storage."""
        if self.url is None:
            yield self
            return
        with tempfile.TemporaryDirectory(prefix="stageline-") as folder:
            yield replace(self, directory=Path(folder))

    def replace_places(self, text: str) -> str:
        """Replace the path of the run's directory in a text by the URL of the object store. Without an object store,
        return the text unchanged."""
        return text if self.url is None else text.replace(str(self.directory), self.url)


# ---- Claims ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """A driver's claim on the stored data of its run."""

    stored: RunStorage
    number: int | None
    """Number of this claim among the claims that drivers have made on the run's data in the object store, counted from
    1. The driver with the highest number owns the data. None if the data is in the run's directory. A lock then keeps
    other drivers away."""

    def later(self) -> str | None:
        """Return the description of a driver that has claimed the data after this claim, or None."""
        data = None if self.number is None else files.read(self.stored.root, _claim_key(self.number + 1))
        if data is None:
            return None
        owner = json.loads(data)
        return f"the driver in {owner['directory']} on {owner['host']}"


def claim(stored: RunStorage) -> Claim:
    """Claim the stored data for this process, and return the claim. A driver with another directory ends when it finds
    this claim. Raises StoreError if the store cannot be read or written."""
    if stored.url is None:
        return Claim(stored, None)
    owner = {"host": socket.gethostname(), "directory": str(stored.directory.resolve()), "time": time.time()}
    data = json.dumps(owner | {"id": uuid.uuid4().hex}).encode()
    number = len(_claims(stored)) + 1
    # If the store's answer was lost, the request is repeated, and finds the file that this process wrote.
    while not files.write_new(stored.root, _claim_key(number), data) and _read(stored, number) != data:
        number += 1
    return Claim(stored, number)


def _claims(stored: RunStorage) -> list[str]:
    return files.names(stored.root.below(_CLAIMS))


def _read(stored: RunStorage, number: int) -> bytes | None:
    return files.read(stored.root, _claim_key(number))


def _claim_key(number: int) -> str:
    return f"{_CLAIMS}/{number:06d}.json"


# ---- Checks ----------------------------------------------------------------------------------------------


def check_stored(stored: RunStorage, *, resume: bool, had_url: bool) -> None:
    """Check the place of a run's data before the run starts or is resumed (`resume`). The check leaves no file behind.
    `had_url`: True if a resumed run had a `storage.url` before.

    Raises:
        ConfigError: with an object store: the store cannot be used, a new run finds the data of a run there, or a
            resumed run finds no trace of an earlier driver there. Without an object store: the resumed run had a
            `storage.url` before, and its ledger is not in the run's directory.
    """
    if stored.url is None:
        if resume and had_url and not any(Path(stored.ledger_url).glob("*")):
            raise _refused(
                None, f"the run's data is not in {stored.directory}: copy it there, or give the URL that it has"
            )
        return
    stored = replace(stored, durability=replace(stored.durability, retry_s=_PROBE_S))
    try:
        _probe(stored.root)
        claimed = bool(_claims(stored))
        taken = claimed or bool(files.names(stored.root.below("ledger")))
    except (StoreError, OSError, ValueError) as error:
        raise _refused(stored.url, f"cannot be used: {error}") from error
    if resume and not claimed:
        raise _refused(stored.url, "there is no data of this run: copy it there, or give the URL that has it")
    if not resume and taken:
        need = (
            "holds a run already: `stageline resume` continues it, from its directory; for a new run choose another "
            "URL (with ${name} in it each run has its own)"
        )
        raise _refused(stored.url, need)


def _probe(root: files.Root) -> None:
    """Write an object, read it and remove it. Raises StoreError if it cannot be written or read. Also raises StoreError
    if the store overwrites an existing object although it was asked only to create a new one. With such a store, two
    workers could commit the same output."""
    key = f"probe-{uuid.uuid4().hex}"
    try:
        files.write_new(root, key, b"1")
        files.write_new(root, key, b"2")
        if files.read(root, key) != b"1":
            raise StoreError("it replaces an object that was to be created only if there is none (If-None-Match)")
    finally:
        with suppress(StoreError, OSError):
            files.remove(root, key)


def _refused(url: str | None, need: str) -> ConfigError:
    return ConfigError(KEY, f"given {'null' if url is None else repr(url)}; {need}")
