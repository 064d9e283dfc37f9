"""A process that does not outlive the one that started it. May import the standard library."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PARENT = "STAGELINE_PARENT"
"""Variable of the environment: the process that started this one, as a number."""
_SET_PARENT_DEATH_SIGNAL = 1


def end_with_parent() -> None:
    """From here on this process ends when the thread that started it does, whatever it is in the middle of (Linux;
    elsewhere when it next looks at its connection). Raises SystemExit where that has happened already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != int(os.environ[PARENT]):
        raise SystemExit("the process that started this one is gone")
