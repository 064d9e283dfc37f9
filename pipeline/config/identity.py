"""What a run is: stated once when it starts, in `identity.json` of its directory, and compared ever after.

    config        every setting, and the digest that its commits carry      resume: what may change is in `changes`
    model files   digests of weights, config and tokenizer, by role         the same, wherever they are now
    reward models their files' digests, by the key of their arguments       the same, in the same place
    prompts       digest of the tokens and of what rewards are given        the same
    software      versions of what decides bits                             the same, or `cluster.same_numerics: warn`
    numerics      of each gang's workers: processor, compiler, kernels      likewise, whenever a gang is built

A driver that finds something else, and may go on, adds a statement; nothing is ever taken out. So the file says under
which configs, and on what, each commit of the run was made.

May import this folder, storage and the standard library.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.config.changes import Change, changes
from storage import files
from storage.commits import Commit
from storage.errors import StoreError

FORMAT = 1
FILE = "identity.json"
_WAY_ON = "Put it back, or remove it: a run whose commits are all of its config goes on without"


@dataclass(frozen=True)
class Statement:
    """What a driver stated: the first, when the run started; a later one, when something had changed."""

    time: float
    """Seconds since the epoch."""
    why: str
    config: Mapping[str, Any]
    """Resolved, as sections and keys."""
    config_hash: str
    """What commits carry that were made under it."""
    software: Mapping[str, str]
    """Name -> version, of what decides bits."""
    changed: tuple[str, ...] = ()
    """Against the statement before, for people."""
    anew: bool = False
    """What was committed after a checkpoint was archived: what computed it is no measure for what comes."""


@dataclass(frozen=True)
class GangNumerics:
    """The numeric fingerprint of a gang's workers."""

    gang: str
    fingerprint: str
    """The short form: what commits carry."""
    items: Mapping[str, str]
    """What it is the digest of."""
    worker: str
    """The first that had it."""
    time: float
    statement: int
    """Number of the statement under which it was seen first."""


@dataclass(frozen=True)
class Identity:
    """Of a run: what never changes, and what was stated in turn."""

    models: Mapping[str, Mapping[str, str]]
    """By role (policy, reference, critic), of reward models by the key of their arguments, of rubrics in files by their
    own key: name of a file -> its digest."""
    prompts: str
    statements: tuple[Statement, ...]
    numerics: tuple[GangNumerics, ...] = field(default=())

    @property
    def latest(self) -> Statement:
        return self.statements[-1]

    @property
    def config_hashes(self) -> frozenset[str]:
        """Of all configs that the run has had."""
        return frozenset(statement.config_hash for statement in self.statements)

    def stated(self, statement: Statement) -> Identity:
        """With one more statement."""
        return replace(self, statements=(*self.statements, statement))

    def numerics_of(self, gang: str) -> list[GangNumerics]:
        """What a gang's workers have had since the run was last begun anew, oldest first."""
        since = max((number for number, statement in enumerate(self.statements) if statement.anew), default=0)
        return [known for known in self.numerics if known.gang == gang and known.statement >= since]


def read_identity(run_dir: Path) -> Identity | None:
    """None where there is none. Raises StoreError for a file that is not what was written."""
    path = run_dir / FILE
    where = f"{path} is not what was written"
    data = files.read(files.open_root(str(run_dir)), FILE)
    if data is None:
        return None
    try:
        document = json.loads(data)
        if document.get("format") != FORMAT:
            raise StoreError(f"{path}: format {document.get('format')!r}, this version reads {FORMAT}")
        if document.pop("digest", None) != _digest(document):
            raise StoreError(f"{where} (its digest differs). {_WAY_ON}")
        statements = tuple(Statement(**one | {"changed": tuple(one["changed"])}) for one in document["statements"])
        numerics = tuple(GangNumerics(**one) for one in document["numerics"])
        return Identity(document["models"], document["prompts"], statements, numerics)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StoreError(f"{where}: {type(error).__name__}: {error}. {_WAY_ON}") from error


def write_identity(run_dir: Path, identity: Identity) -> None:
    """Whole or not at all. Raises OSError."""
    document = {"format": FORMAT, **asdict(identity)}
    document["digest"] = _digest(json.loads(json.dumps(document)))
    files.write(files.open_root(str(run_dir)), FILE, (json.dumps(document, indent=1) + "\n").encode())


def edited(identity: Identity, saved: Mapping[str, Any]) -> list[Change]:
    """What the config in a run's directory has otherwise than was stated. A driver that dies between stating a change
    and writing the config leaves the one before."""
    found = [changes(statement.config, saved) for statement in identity.statements[-2:]]
    return [] if [] in found else found[-1]


def differences(stated: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """The items in which two mappings differ, each with both values."""
    names = sorted(stated.keys() | found.keys())
    return [
        f"{name}: {found.get(name, 'none')} (was {stated.get(name, 'none')})"
        for name in names
        if stated.get(name) != found.get(name)
    ]


def fingerprint(items: Mapping[str, str]) -> str:
    """The short form of numerics."""
    return hashlib.sha256(json.dumps(dict(items), sort_keys=True).encode()).hexdigest()[:12]


def identity_faults(identity: Identity | None, saved: Mapping[str, Any], commits: Iterable[Commit]) -> Iterator[str]:
    """What of a run's directory is not of the run that was stated. `saved`: its config, as sections."""
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
