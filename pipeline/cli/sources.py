"""What a command is given: config files with key=value changes, or the directory of a run.

May import pipeline.config.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.errors import ConfigError
from pipeline.config.identity import FILE, read_identity
from pipeline.config.keys import is_setting
from pipeline.config.loading import load_config, load_yaml, read_saved
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig


def config_of(sources: Sequence[str]) -> RunConfig:
    """The config that files and key=value changes make, each kind in the order given. Raises ConfigError."""
    files = [source for source in sources if "=" not in source]
    _refuse_settings_as_files(files)
    return load_config(files, [source for source in sources if "=" in source])


def _refuse_settings_as_files(files: Sequence[str]) -> None:
    """`staleness 2` was meant as `staleness=2`. Raises ConfigError."""
    for name, after in zip(files, [*files[1:], None], strict=True):
        if not Path(name).exists() and is_setting(name, RunConfig):
            value = after if after is not None and not Path(after).exists() else "..."
            raise ConfigError(name, f"is a setting, and no file of that name is there; did you mean {name}={value}?")


def submitted_config(run_dir: str) -> RunConfig:
    """The config of a run that has begun, or that was submitted as a job and has not. Raises ConfigError, StoreError as
    `saved_config`."""
    paths = RunPaths(Path(run_dir))
    submitted = paths.job / "config.yaml"
    begun = paths.config.exists() or read_identity(paths.root) is not None
    return load_config([submitted]) if submitted.exists() and not begun else saved_config(run_dir)


def saved_config(run_dir: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The config that a run's directory holds, with key=value changes. Raises ConfigError where there is none, or it is
    damaged; StoreError where only identity.json could say it, and is damaged too."""
    paths = RunPaths(Path(run_dir))
    if paths.variant.exists():
        raise ConfigError(
            run_dir,
            f"holds a variant, trained on the rollouts that another run recorded ({paths.variant}): it has no ledger "
            f"and no rollouts of its own. What it came to is in {paths.summary}",
        )
    identity = None if paths.config.exists() else read_identity(paths.root)
    if identity is not None:  # config.yaml is lost, and need not be there: what it held is stated
        config = load_yaml(json.dumps(identity.latest.config), overrides, where=f"{paths.root}/{FILE}")
    elif paths.config.is_file():
        config = read_saved(paths.config, overrides)
    else:
        raise ConfigError(run_dir, "holds no run (no config.yaml in it); give a run's directory, for example runs/demo")
    config.runs_dir = str(paths.root.resolve().parent)  # the directory may have been moved or be seen from elsewhere
    config.name = paths.root.resolve().name
    return config
