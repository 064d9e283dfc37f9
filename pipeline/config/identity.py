"""A run's identity: written to `identity.json` when the run starts, and compared whenever it is resumed.

    recorded      content                                                   required on resume
    config        every setting, and the digest that its commits carry      only the changes that `changes.py` allows
    model files   digests of weights, config and tokenizer, by role         the same files, in any place
    reward models their files' digests, by the key of their arguments       the same files, in the same place
    prompts       digest of the tokens and of the rewards' fields           the same
    software      versions of the software that decides bits                the same, or `cluster.same_numerics: warn`
    numerics      of each gang's workers: processor, compiler, kernels      likewise, whenever a gang is built

A driver that finds an allowed difference appends a statement; nothing is ever removed. So the file tells under which
configs and on which numerics each commit was made.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config.changes import Change, changes
from storage import codec, files
from storage.commits import Commit
from storage.errors import StoreError
from storage.redaction import redacted

FORMAT = 1
FILE = "identity.json"
_WAY_ON = "Put it back, or remove it: a run whose commits are all of its config goes on without"


@dataclass(frozen=True)
class Statement:
    """A driver's record of the run: the first at its start, a later one after each change."""

    time: float
    """Seconds since the epoch."""
    why: str
    config: Mapping[str, Any]
    """Resolved, as sections and keys; written and compared without secrets."""
    config_hash: str
    """Digest of the config, as commits made under it carry it."""
    software: Mapping[str, str]
    """Name -> version of the software that decides bits."""
    changed: tuple[str, ...] = ()
    """Differences from the statement before, for people."""
    anew: bool = False
    """True if the commits after a checkpoint were archived. Workers are then no longer compared with the numerics
    recorded before."""


@dataclass(frozen=True)
class GangNumerics:
    """The numeric fingerprint of a gang's workers."""

    gang: str
    fingerprint: str
    """Short form, as commits carry it."""
    items: Mapping[str, str]
    """Items that the fingerprint is the digest of."""
    worker: str
    """First worker with this fingerprint."""
    time: float
    statement: int
    """Number of the statement under which the fingerprint was first seen."""


@dataclass(frozen=True)
class Identity:
    """The constant part of a run's identity and its statements in order."""

    models: Mapping[str, Mapping[str, str]]
    """{name of a file: its digest} by role (policy, reference, critic), by the key of a reward model's arguments, or by
    the key of a rubric's file."""
    prompts: str
    statements: tuple[Statement, ...]
    numerics: tuple[GangNumerics, ...] = field(default=())

    @property
    def latest(self) -> Statement:
        return self.statements[-1]

    @property
    def config_hashes(self) -> frozenset[str]:
        """Digests of all configs that the run has had."""
        return frozenset(statement.config_hash for statement in self.statements)

    def stated(self, statement: Statement) -> Identity:
        """Return the identity with one more statement."""
        return replace(self, statements=(*self.statements, statement))

    def numerics_of(self, gang: str) -> list[GangNumerics]:
        """Return the numerics of a gang's workers since the last statement with `anew`, oldest first."""
        since = max((number for number, statement in enumerate(self.statements) if statement.anew), default=0)
        return [known for known in self.numerics if known.gang == gang and known.statement >= since]


def read_identity(run_dir: Path) -> Identity | None:
    """Return the identity of a run, or None if there is no file. Raises StoreError if the file is damaged."""
    path = run_dir / FILE
    data = files.read(files.open_root(str(run_dir)), FILE)
    if data is None:
        return None
    try:
        document = codec.document(data, FORMAT, str(path))
        if document.pop("digest", None) != _digest({"format": FORMAT, **document}):
            raise StoreError(f"{path}: is not what was written (its digest differs)")
        return codec.from_document(Identity, document)
    except (codec.NotARecord, StoreError) as error:
        raise StoreError(f"{error}. {_WAY_ON}") from error


def write_identity(run_dir: Path, identity: Identity) -> None:
    """Write the file atomically and without secrets, since others may read it. Raises OSError."""
    stated = tuple(replace(one, config=redacted(one.config)) for one in identity.statements)
    document = {"format": FORMAT, **asdict(replace(identity, statements=stated))}
    document["digest"] = _digest(json.loads(json.dumps(document)))
    files.write(files.open_root(str(run_dir)), FILE, (json.dumps(document, indent=1) + "\n").encode())


def edited(identity: Identity, saved: Mapping[str, Any]) -> list[Change]:
    """Return the differences of the saved config from the last statement. The config of the statement before is allowed
    too: a driver may die between writing the statement and the config."""
    found = [changes(statement.config, saved) for statement in identity.statements[-2:]]
    return [] if [] in found else found[-1]


def differences(stated: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Return the items in which two mappings differ, each with both values."""
    names = sorted(stated.keys() | found.keys())
    return [
        f"{name}: {found.get(name, 'none')} (was {stated.get(name, 'none')})"
        for name in names
        if stated.get(name) != found.get(name)
    ]


def fingerprint(items: Mapping[str, str]) -> str:
    """Return the short form of numerics."""
    return hashlib.sha256(json.dumps(dict(items), sort_keys=True).encode()).hexdigest()[:12]


def identity_faults(identity: Identity | None, saved: Mapping[str, Any], commits: Iterable[Commit]) -> Iterator[str]:
    """Yield the contradictions between a run's directory and its identity. `saved`: its config, as sections."""
    if identity is None:
        yield f"{FILE} is missing: nothing says which config, models and prompts the commits were made with"
        return
    for change in edited(identity, saved):
        yield f"config.yaml is not what was stated: {change}"
    fingerprints = {known.fingerprint for known in identity.numerics}
    for commit in commits:
        made = commit.provenance
        if made.config_hash not in identity.config_hashes:
            yield f"{commit.address}: made under config {made.config_hash or 'unknown'}, which {FILE} does not list"
        if made.numerics not in fingerprints:
            yield f"{commit.address}: made on numerics {made.numerics or 'unknown'}, which {FILE} does not list"


def _digest(document: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
