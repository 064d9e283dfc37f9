"""One process at a time in a directory of `runs_dir`: a run's driver, the training of a reward model, a labelling.

May import pipeline.config and storage.processes.
"""

from __future__ import annotations

import fcntl
import os
import platform
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from storage.processes import process_alive


@contextmanager
def only_driver(paths: RunPaths) -> Iterator[None]:
    """Keeps a second driver out of the run's directory. The system lets go of the lock when this process ends, however
    it ends.

    Raises:
        ConfigError: another process is running the run.
    """
    with paths.lock.open("a+") as lock:
        try:
            _take(lock)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise ConfigError("name", f"given {paths.root.name!r}; {owner} is running {paths.root} now") from error
        with suppress(OSError):  # for people only; a full disk has other ways to show itself
            os.ftruncate(lock.fileno(), 0)
            os.write(lock.fileno(), f"process {os.getpid()} on {platform.node()}".encode())
        yield


def last_driver(paths: RunPaths, *, elsewhere: bool) -> str | None:
    """Who runs the run now, by what the last driver wrote into its lock, which is not touched: a driver that starts
    must find it free. None where that process is gone. `elsewhere`: what to believe of a process on another host."""
    said = paths.lock.read_text("utf8").strip() if paths.lock.exists() else ""
    match = re.fullmatch(r"process (\d+) on (.*)", said)
    if match is None:
        return None
    there = process_alive(int(match[1])) if match[2] == platform.node() else elsewhere
    return said if there else None


def is_driven(paths: RunPaths) -> bool:
    """Whether a process is at work in the directory now."""
    if not paths.lock.exists():
        return False
    with paths.lock.open() as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def _take(lock: IO[str], looks: int = 3, pause_s: float = 0.05) -> None:
    """Raises BlockingIOError where another process has it; one that only looks (`is_driven`) has it for an instant."""
    for _ in range(looks - 1):
        with suppress(BlockingIOError):
            return fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(pause_s)
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
