"""Kill an engine's server and all its children when the process that started the server ends, for whatever reason.

    python guard.py GROUP FOLDER    GROUP: the server's process group; FOLDER: a folder to remove afterwards

The server cannot do this itself: it may be stopped or stuck, and its children would outlive it. Standard input is a
pipe from the watched process. That process writes nothing to it, and the pipe closes when the process ends.
`process.py` runs this file by its path, in a session of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SHARED_MEMORY = Path("/dev/shm")
_OWN_NAMES = ("psm_", "sem.mp-", "vllm_")
"""Prefixes of the names that multiprocessing and vLLM give to the shared memory between an engine's ranks."""


def main(group: int, folder: str) -> None:
    sys.stdin.buffer.read()
    end_group(group)
    shutil.rmtree(folder, ignore_errors=True)


def end_group(group: int) -> None:
    """Kill a process group, and remove the shared memory between its processes. Usually a tracker process removes it,
    but the tracker is in the group and is killed too."""
    left = set(_shared_memory(group))
    with suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(group, signal.SIGKILL)
    for path in left:
        path.unlink(missing_ok=True)


def _shared_memory(group: int) -> Iterator[Path]:
    """Yield the shared-memory files of the process group: the files that one of its processes has mapped, and whose
    names begin with one of `_OWN_NAMES`. Mappings are matched to files by inode, since a semaphore is mapped before it
    gets its final name."""
    mapped = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended, or is another user's
            if os.getpgid(int(process.name)) == group:
                lines = (process / "maps").read_text("utf8", errors="replace").splitlines()
                mapped |= {int(line.split()[4]) for line in lines if str(_SHARED_MEMORY) in line}
    for path in _SHARED_MEMORY.glob("*"):
        with suppress(FileNotFoundError):
            if path.name.startswith(_OWN_NAMES) and path.stat().st_ino in mapped:
                yield path


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
