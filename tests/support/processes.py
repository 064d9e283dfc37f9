"""Other interpreters, with the modules of this one."""

from __future__ import annotations

import os
import subprocess
import sys


def start_python(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Its input and its output are pipes."""
    return subprocess.Popen(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def exit_status(script: str, *arguments: object) -> int:
    """Negative: the signal that ended it."""
    with start_python(script, *arguments) as process:
        process.communicate()
    return process.returncode
