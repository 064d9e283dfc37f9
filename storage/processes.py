"""Whether a process of this host lives, for files that carry their owner's pid. Standard library only."""

from __future__ import annotations

import os


def process_alive(pid: int) -> bool:
    """False once the process has ended and been reaped. A pid that was given to a new process counts as alive, which
    makes callers keep a file for longer and never remove one too early."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
