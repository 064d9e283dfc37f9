"""`stageline export RUN [--version V] [--to DIR]`: a version of the policy in Hugging Face layout.

A version whose weights are nowhere any more is rebuilt from checkpoints and stored rollouts.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path

from pipeline.cli.answers import print_line
from pipeline.cli.exit_codes import DONE
from pipeline.cli.one_process import alone, runtime_for
from pipeline.cli.sources import saved_config
from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.workers.parts import required
from stages.models.protocol import Role


def command(options: argparse.Namespace) -> int:
    to = None if options.to is None else Path(options.to)
    print_line(f"wrote {export_version(saved_config(options.run_dir), options.version, to)}")
    return DONE


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
            with runtime_for(alone(config, Path(scratch)), Role.POLICY) as runtime:
                required(runtime.parts.updates).at(Role.POLICY, version).export(staged)()
        staged.rename(target)
    return target
