"""Which code runs. Standard library only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

SOFTWARE = ("stageline", "torch", "megatron-core", "transformers", "dask", "zarr", "mlflow-skinny", "omegaconf")
"""Packages whose versions a summary names."""


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


def software_versions() -> dict[str, str]:
    """Versions of `SOFTWARE` and of Python."""
    return {package: _installed(package) for package in SOFTWARE} | {"python": platform.python_version()}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # stageline itself, where it runs from a checkout
