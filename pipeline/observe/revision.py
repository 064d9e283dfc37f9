"""Which code runs. Standard library only."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path


def git_commit() -> str:
    """The commit of the code that runs, with "+changes" if the tree differs from it; empty outside a repository and
    without git."""
    if shutil.which("git") is None:
        return ""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False, env={**os.environ}
        )
        return answer.stdout.strip() if answer.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    return commit + ("+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else "")
