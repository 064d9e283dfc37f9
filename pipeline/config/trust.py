"""Refuse run directories that other accounts can change.

A run's directory decides which code its reader executes: its config names files of code (rewards, engines), and its
checkpoints become the weights. Commands that only show a run read it as data and need no check.
"""

from __future__ import annotations

import os
from pathlib import Path

from pipeline.config.errors import ConfigError
from pipeline.config.identity import FILE
from pipeline.config.paths import RunPaths
from storage.host import who_else_can_change

TRUSTED = "STAGELINE_TRUST"
"""Environment: directories, separated by colons. What others write there is taken as this user's own. It is no key of
the config, which lies in the directory that is to be trusted."""


def refuse_foreign(run_dir: Path) -> None:
    """Raises ConfigError, naming the file and what would work, if another account can change a run's directory (of one
    that is not there yet: the directories that it will be in) or what this process would run of it."""
    trusted = [Path(one).resolve() for one in os.environ.get(TRUSTED, "").split(os.pathsep) if one]
    if any(run_dir.resolve().is_relative_to(one) for one in trusted):
        return
    paths = RunPaths(run_dir)
    for place in (run_dir, paths.config, run_dir / FILE, paths.job, paths.checkpoints):
        why = who_else_can_change(place, all_below=place != run_dir)
        if why is not None:
            raise ConfigError(
                str(run_dir),
                f"{why}, so that another account decides what is run here. `chmod` or a copy of your own mends that; "
                f"if you trust whoever can write there, set {TRUSTED}={run_dir.resolve()} in the environment (a "
                "directory above it covers all that is below)",
            )
