"""The scheduler file of an attached run: what a worker on any host needs to join, and the run's certificate with it.

    RUN/attached/                   mode 0700
      scheduler-000001.json         mode 0600; one for each attempt of a driver at the run, the newest counts
      shared-000001                 in which every worker must read what the file says

Whoever can read it can join, and have every worker run anything. The driver removes it when it ends in order; what a
killed driver left, the next one removes. May import the standard library, pipeline.config.paths and storage.
"""

from __future__ import annotations

import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.config.paths import RunPaths
from storage.errors import StoreError

_NAME = re.compile(r"scheduler-(\d+)\.json")
_FORMAT = 1


@dataclass(frozen=True)
class SchedulerFile:
    """What one attempt of a driver tells its workers."""

    attempt: int
    """Of drivers at this run, from 1."""
    address: str
    """Of the scheduler."""
    host: str
    """The driver's."""
    process: int
    """The driver's, on its host."""
    run_dir: str
    working_dir: str
    """The driver's, which relative paths of the config begin at."""
    nonce: str
    """What `shared-NNNNNN` in the run's directory holds."""
    certificate: str
    key: str
    config: str
    """The resolved config, as YAML."""

    @property
    def stem(self) -> str:
        return f"{self.attempt:06d}"

    @property
    def shared(self) -> Path:
        """The file by which a host is known to see the driver's directory."""
        return RunPaths(Path(self.run_dir)).attached / f"shared-{self.stem}"


def host_name() -> str:
    """What this host is called where people read it."""
    return socket.gethostname()


def file_of_attempt(run_dir: Path, attempt: int) -> Path:
    return RunPaths(run_dir).attached / f"scheduler-{attempt:06d}.json"


def newest_attempt(run_dir: Path) -> int:
    """Number of the newest scheduler file of a run; 0 where there is none."""
    try:
        names = os.listdir(RunPaths(run_dir).attached)  # asks a network filesystem anew, as a look for one name may not
    except OSError:
        return 0
    return max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=0)


def write_scheduler_file(path: Path, content: SchedulerFile) -> None:
    """Under its name from the moment on when all of it is there; for this user's eyes alone. Raises OSError."""
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(json.dumps({"format": _FORMAT, **asdict(content)}))
        stream.flush()
        os.fsync(stream.fileno())
    staged.replace(path)


def read_scheduler_file(path: Path) -> SchedulerFile:
    """Raises FileNotFoundError where there is none (yet), and StoreError where it is no scheduler file, or another
    user's: whoever wrote it decides what this process will run."""
    with path.open() as stream:
        owner = os.fstat(stream.fileno()).st_uid
        if owner != os.geteuid():
            raise StoreError(f"{path} belongs to user {owner}, and this process to {os.geteuid()}: it is not used")
        text = stream.read()
    try:
        document = json.loads(text)
        if document.pop("format", None) != _FORMAT:
            raise StoreError(f"{path} is no scheduler file of this version of Stageline (format {_FORMAT})")
        return SchedulerFile(**document)
    except (ValueError, TypeError, AttributeError) as error:
        raise StoreError(f"{path} is no scheduler file: {error}") from error
