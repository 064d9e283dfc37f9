"""End an engine's server and everything that it started when the process that started it is gone, however that went.

    python guard.py GROUP FOLDER    GROUP: the server's process group; FOLDER: is removed then

The server cannot do this itself: it may be stopped or stuck, and its children outlive it. Standard input is a pipe from
the watched process. Nobody writes to it, and it ends with that process and not with one of its threads. `process.py`
runs this file by its path, in a session of its own.
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
