"""`stageline export`: a version of the policy in Hugging Face layout, rebuilt from stored rollouts if need be."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from pipeline.cli.replay import alone, runtime_for
from pipeline.config.paths import RunPaths
from pipeline.config.schema import ConfigError, RunConfig
from pipeline.driver.results import open_history
from stages.models.protocol import Role


def export_version(config: RunConfig, version: int | None, to: Path | None) -> Path:
    """Writes a version (default: the newest that an update has made) to a directory; returns it.

    Raises:
        ConfigError: no such version, or the directory exists.
    """
    newest = len(open_history(config).ledger.list("update_policy"))
    version = newest if version is None else version
    if not 0 <= version <= newest:
        raise ConfigError("--version", f"given {version}; the run has versions 0 to {newest}")
    stored = RunPaths(config.run_dir).weights(version)
    target = stored if to is None else to
    if stored.is_dir() and target == stored:
        return stored
    if target.exists():
        raise ConfigError("--to", f"given {str(target)!r}; it exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as scratch:
        staged = Path(scratch) / "weights"
        if stored.is_dir():
            shutil.copytree(stored, staged)
        else:
            staged.mkdir()
            with runtime_for(alone(config, Path(scratch)), Role.POLICY, Path(scratch)) as runtime:
                runtime.trainer.at(Role.POLICY, version).export(staged)
        staged.rename(target)
    return target
