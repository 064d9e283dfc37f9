"""What a command is given: config files with key=value changes, or the directory of a run.

May import pipeline.config.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.errors import ConfigError
from pipeline.config.loading import load_config, load_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig


def config_of(sources: Sequence[str]) -> RunConfig:
    """The config that files and key=value changes make, each kind in the order given. Raises ConfigError."""
    files = [source for source in sources if "=" not in source]
    return load_config(files, [source for source in sources if "=" in source])


def saved_config(run_dir: str) -> RunConfig:
    """The config that a run's directory holds. Raises ConfigError where there is none."""
    paths = RunPaths(Path(run_dir))
    if not paths.config.is_file():
        raise ConfigError(run_dir, "holds no run (no config.yaml in it); give a run's directory, for example runs/demo")
    config = load_yaml(paths.config.read_text("utf8"))
    config.runs_dir = str(paths.root.resolve().parent)  # the directory may have been moved or be seen from elsewhere
    config.name = paths.root.resolve().name
    return config
