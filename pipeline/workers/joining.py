"""How a worker on any host joins an attached run: what it says of itself and its host, and what it is answered.

    `stageline worker`                                        the driver's scheduler
      looks at its host ──JoinRequest──────────────────────►  judges it (driver/roster.py)
                        ◄──{"devices": ...} or {"refused": why}──
      starts its nanny  ◄════ the connection stays open ════► whoever's end goes, goes for the other, too
                        ◄──{"over": why}──────────────────    the run has ended

May import the standard library, pipeline.config.paths, this folder's messages and scheduler_file, and storage.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
import uuid
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pipeline.config.paths import RunPaths
from pipeline.workers.scheduler_file import SchedulerFile, host_name
from storage import files
from storage.errors import StoreError

JOIN = "stageline_join"
"""Name of the scheduler's handler."""
REFUSALS = "stageline-refusals"
"""Dask topic on which the scheduler reports workers that it refused: `JoinRefused` as a dict."""
_MUST_AGREE = ("stageline", "dask", "distributed", "msgpack", "cloudpickle")
"""Packages that two processes which exchange objects must have in one version, beside Python's."""
_GPU_IDENTITIES = (
    "import torch; [print(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]"
)


@dataclass(frozen=True)
class JoinRequest:
    """What a worker says when it joins."""

    gang: str
    index: int
    host: str
    process: int
    """Of `stageline worker`, on its host."""
    clock: float
    """Seconds since the epoch, on its host."""
    versions: dict[str, str]
    gpus: list[str]
    """Identities of those that it sees, in its order."""
    shared: str
    """What is wrong with the run's directory as its host sees it; empty: nothing."""
    wrote: str
    """Name of the file that it wrote there, for the driver to read."""
    board_free: int
    """Bytes that are free, or the run's own already, where its host has published weights."""

    def message(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, message: dict[str, Any]) -> JoinRequest:
        """What `message` gave. Raises TypeError where something of it is missing."""
        missing = [field.name for field in fields(cls) if field.name not in message]
        if missing:
            raise TypeError(f"it does not say {', '.join(missing)}")
        return cls(**{field.name: message[field.name] for field in fields(cls)})


@dataclass(frozen=True)
class JoinRefused:
    """A worker was refused."""

    gang: str
    index: int
    text: str
    """Why, with the host's name."""
    fatal: bool
    """It would be the run's worker, and its host is not fit; otherwise nobody misses it."""


def versions_here() -> dict[str, str]:
    """Of what two processes that exchange objects must have alike."""
    found = {"python": platform.python_version()}
    for package in _MUST_AGREE:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def look_at_host(file: SchedulerFile, gang: str, index: int, board: Path) -> JoinRequest:
    """What this host is, for a worker that joins from it. `board`: where it has published weights."""
    wrote = f"from-{gang}-{index}-{uuid.uuid4().hex[:8]}"
    return JoinRequest(
        gang=gang,
        index=index,
        host=host_name(),
        process=os.getpid(),
        versions=versions_here(),
        gpus=gpu_identities(),
        shared=_look_at_directory(file, wrote),
        wrote=wrote,
        board_free=_free_bytes(board),
        # Last: what is above may take longer than clocks may differ by, and the driver compares when it hears of it.
        clock=time.time(),
    )


def gpu_identities() -> list[str]:
    """Of the GPUs that this process may see, in its order. Asked in a process of its own: this one holds no device."""
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        return []
    done = subprocess.run([sys.executable, "-c", _GPU_IDENTITIES], capture_output=True, text=True, check=False)
    if done.returncode:
        raise StoreError(f"host {host_name()}: its GPUs cannot be asked for: {done.stderr.strip()[-500:]}")
    return done.stdout.split()


def _look_at_directory(file: SchedulerFile, wrote: str) -> str:
    """Whether this host sees the driver's directory: reads there, writes there, and an exclusive create is one."""
    folder = RunPaths(Path(file.run_dir)).attached
    root = files.open_root(str(folder))
    try:
        found = files.read(root, file.shared.name)
        if found is None or found.decode() != file.nonce:
            return (
                f"{file.shared} is not what the driver wrote: is {file.run_dir} on a filesystem that both hosts mount?"
            )
        if files.write_new(root, file.shared.name, b""):
            return f"an exclusive create of {file.shared} succeeded, and the file was there: commits need it to fail"
        files.write(root, wrote, file.nonce.encode())
    except (OSError, StoreError) as error:
        return f"{folder} cannot be read and written: {error}"
    return ""


def _free_bytes(board: Path) -> int:
    existing = next(path for path in (board, *board.parents) if path.exists())
    space = os.statvfs(existing)
    own = sum(path.stat().st_size for path in board.glob("v*.bin")) if board.is_dir() else 0
    return space.f_bavail * space.f_frsize + own
