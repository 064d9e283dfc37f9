"""Ends what an engine's server has started when the process that started the server is gone, however that went.

    python guard.py GROUP FOLDER    GROUP: the server's process group; FOLDER: what is removed then

The server cannot do that itself: it may be stopped, or stuck, and what it started does not end with it. Standard input
is a pipe from the process that is watched, which nobody writes to; it ends with that process, not with one of its
threads. Run as a file by `process.py`, in a session of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress


def main(group: int, folder: str) -> None:
    sys.stdin.buffer.read()
    with suppress(ProcessLookupError, PermissionError):  # nothing of it is left
        os.killpg(group, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
