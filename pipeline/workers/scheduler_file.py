"""The scheduler file of an attached run. In this file a driver gives its workers the scheduler's address, the run's
certificate with its key, and the run's config.

    RUN/attached/                   mode 0700
      scheduler-000001.json         mode 0600; one for each driver; workers read the newest
      shared-000001                 a random text, the nonce, which the scheduler file contains too

The second file shows whether a worker's host sees the driver's directory. The worker compares the nonces of both files.
If they differ, the driver refuses the worker.

Everybody who can read the scheduler file can join, and can make every worker run any code. A driver removes its file
when it ends normally. If a driver was killed, the next driver removes the file.
"""

from __future__ import annotations

import json
import os
import re
import socket
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from pipeline.config.paths import RunPaths
from storage import codec
from storage.errors import StoreError

_NAME = re.compile(r"scheduler-(\d+)\.json")
_FORMAT = 2


@dataclass(frozen=True)
class SchedulerFile:
    """The content of a scheduler file: one driver's message to its workers."""

    driver: int
    """Number of this driver among the drivers of the run, from 1."""
    address: str
    """Address of the scheduler."""
    host: str
    """Name of the driver's host."""
    process: int
    """Process id of the driver on its host."""
    run_dir: str
    working_dir: str
    """Working directory of the driver, where relative paths of the config begin."""
    nonce: str
    """Unique text that the driver also writes to `attached/shared-NNNNNN` in the run's directory. A worker joins only
    if it reads the same text there. This shows that its host sees the driver's directory."""
    certificate: str = field(repr=False)
    key: str = field(repr=False)
    config: str = field(repr=False)
    """The resolved config, as YAML."""

    @property
    def stem(self) -> str:
        return f"{self.driver:06d}"

    @property
    def shared(self) -> Path:
        """Path of a file that the driver wrote into the run's directory. The file contains `nonce`. If a worker reads
        the same nonce there, its host and the driver's host share the directory."""
        return RunPaths(Path(self.run_dir)).attached / f"shared-{self.stem}"


def host_name() -> str:
    """Return this host's name, for people to read."""
    return socket.gethostname()


def file_of_driver(run_dir: Path, driver: int) -> Path:
    return RunPaths(run_dir).attached / f"scheduler-{driver:06d}.json"


def newest_driver(run_dir: Path) -> int:
    """Return the number of a run's newest scheduler file; 0 if there is none."""
    try:
        names = os.listdir(
            RunPaths(run_dir).attached
        )  # a listing asks the server of a network filesystem again; the look-up of one name may not
    except OSError:
        return 0
    return max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=0)


def write_scheduler_file(path: Path, content: SchedulerFile) -> None:
    """Write a scheduler file that only this user can read. The file appears under its name only when it is complete.

    Raises FileExistsError if the name is taken. Raises another OSError if the file cannot be written. The content
    includes the private key of the run's certificate. So after an error no temporary file is left.
    """
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.unlink(missing_ok=True)
    descriptor = os.open(staged, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            stream.write(json.dumps({"format": _FORMAT, **asdict(content)}))
            stream.flush()
            os.fsync(stream.fileno())
        _link(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def _link(staged: Path, path: Path) -> None:
    try:
        os.link(staged, path)
    except FileExistsError:
        if not staged.samefile(path):  # it is the same file if a server made the link and only its answer was lost
            raise


def remove_scheduler_file(path: Path, nonce: str) -> None:
    """Remove the scheduler file if it holds this nonce. Another driver's file under the same name stays, and so does an
    invalid file. Raises OSError if the file cannot be read or removed."""
    with suppress(FileNotFoundError, StoreError):
        if read_scheduler_file(path).nonce == nonce:
            path.unlink()


def read_scheduler_file(path: Path) -> SchedulerFile:
    """Read a scheduler file. Raises FileNotFoundError if there is no file (yet). Raises StoreError if the file is
    invalid or unreadable, or if it belongs to another user. (The writer of the file decides what this process will
    run.)"""
    try:
        with path.open("rb") as stream:
            _check_owner(path, os.fstat(stream.fileno()))
            text = stream.read()
    except (PermissionError, IsADirectoryError, NotADirectoryError) as error:
        if isinstance(error, PermissionError):
            _check_owner(*_nearest_visible(path))
        raise StoreError(f"{path} cannot be read: {error.strerror}") from error
    try:
        return codec.from_document(SchedulerFile, codec.document(text, _FORMAT, "the file"))
    except (codec.NotARecord, StoreError) as error:
        raise StoreError(f"{path} is no scheduler file: {error}") from error


def _check_owner(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.geteuid():
        raise StoreError(f"{path} belongs to user {status.st_uid}, and this process to {os.geteuid()}: it is not used")


def _nearest_visible(path: Path) -> tuple[Path, os.stat_result]:
    """Return path and status of the file, or of the nearest directory above it that this user may look at."""
    for above in (path, *path.parents):
        with suppress(PermissionError):
            return above, above.stat()
    raise PermissionError(path)
