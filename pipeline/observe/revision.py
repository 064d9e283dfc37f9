"""Which code runs. Standard library only."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
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


def started_by() -> dict[str, str]:
    """What a journal says of a driver that begins: its command line, its host, the code that runs."""
    program, *arguments = sys.argv or [""]
    named = "python -m pipeline.cli" if program.endswith("__main__.py") else Path(program).name
    found = {"command": f"{named} {shlex.join(arguments)}".strip(), "host": platform.node(), "code": git_commit()}
    return {key: value for key, value in found.items() if value}


def short_command() -> str:
    """What this process does, without a `/`, after which MLflow's page begins to show a source: `stageline run
    demo.yaml`, `stageline resume demo`."""
    program, *arguments = sys.argv or [""]
    words = (Path(word).name for word in arguments if "=" not in word and not word.startswith("-"))
    return " ".join(["stageline" if program.endswith("__main__.py") else Path(program).name, *words])


def software_versions() -> dict[str, str]:
    """Versions of `SOFTWARE` and of Python."""
    return {package: _installed(package) for package in SOFTWARE} | {"python": platform.python_version()}


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # stageline itself, where it runs from a checkout
