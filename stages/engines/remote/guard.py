"""Kill an engine's server with all its children when the process that started it ends, however it ends.

    python guard.py GROUP FOLDER    GROUP: the server's process group; FOLDER: a folder to remove then

The server cannot do this itself: it may be stopped or stuck, and its children would outlive it. Standard input is a
pipe from the watched process. Nobody writes to it, and it closes when that process ends. `process.py` runs this file by
its path, in a session of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from contextlib import suppress


def main(group: int, folder: str) -> None:
    sys.stdin.buffer.read()
    with suppress(ProcessLookupError, PermissionError):  # the group has ended
        os.killpg(group, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
