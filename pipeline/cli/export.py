"""`stageline export RUN [--version V|best] [--to DIR]`: write a version of the policy in Hugging Face layout. A version
whose weights were deleted is rebuilt from checkpoints and stored rollouts.

`stageline export RUN --rollouts FILE.parquet`: write every row of the run as a table.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Literal

from pipeline.cli.answers import SUCCESS, checked_output_path, print_line, read_saved_config, read_trusted_config
from pipeline.cli.opened_run import open_configured_run, write_rows
from pipeline.config.loading import config_hash
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError
from pipeline.observe.evaluations import best_evaluation
from pipeline.observe.history import History
from pipeline.workers.exports import describe_export
from pipeline.workers.parts import require_part
from pipeline.workers.runtime import local_config, runtime_for
from stages.models.protocol import Role
from storage.errors import MissingOutput, StoreError
from storage.exports import Exports, export_faults, has_sums


def command(options: argparse.Namespace) -> int:
    if options.rollouts is not None:
        if options.version is not None or options.to is not None:
            raise ConfigError("--rollouts", "writes rows, and no version of the weights: leave --version and --to out")
        written = export_rollouts(read_saved_config(options.run_dir), Path(options.rollouts))
        print_line(f"wrote {options.rollouts}: {written} rows")
        return SUCCESS
    to = None if options.to is None else Path(options.to)
    print_line(f"wrote {export_version(read_trusted_config(options.run_dir), options.version, to)}")
    return SUCCESS


def export_rollouts(config: RunConfig, path: Path) -> int:
    """Write every row of a run, with text and numbers, to a Parquet file. Return the number of rows.

    Raises:
        ConfigError: the file exists, does not end in .parquet, or its directory does not exist.
        MissingOutput: the run has no rows.
    """
    checked_output_path("--rollouts", str(path), ".parquet")
    run = open_configured_run(config)
    if not run.steps:
        raise MissingOutput(f"{config.run_dir} has no rollouts yet, or none any more (storage.keep.rollouts)")
    return write_rows(path, run.history, run.steps, run.decode)


def export_version(config: RunConfig, version: int | Literal["best"] | None, to: Path | None) -> Path:
    """Write a version of the policy to a directory and return the directory.

    Args:
        config: the config of the run.
        version: number of the version. None: the newest version. "best": the best version by the run's evaluations so
            far.
        to: directory to write. None: the directory of that version inside the run's directory.

    Raises:
        ConfigError: there is no such version, or `to` exists.
        StoreError: the run's directory has an export of that version, and it is damaged.
    """
    history = open_history(config)
    newest = history.newest_version()
    version = newest if version is None else _best_version(config, history) if version == "best" else version
    if not 0 <= version <= newest:
        raise ConfigError("--version", f"given {version}; the run has versions 0 to {newest}")
    exports = config.stored.exports()
    stored, target = exports.fetch(version), exports.place(version) if to is None else to
    if stored is not None and has_sums(stored):
        _check(exports, version, config)
    if stored is not None and target == stored:
        return stored
    if target.exists():
        raise ConfigError("--to", f"given {str(target)!r}; it exists already")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".export-", dir=target.parent) as scratch:
        staged = Path(scratch) / "weights"
        if stored is not None:
            shutil.copytree(stored, staged)
        else:
            staged.mkdir()
            with runtime_for(local_config(config, Path(scratch)), Role.POLICY) as runtime:
                require_part(runtime.parts.updates).model_at(Role.POLICY, version).export(runtime.parts.board, staged)()
            describe_export(staged, config, version, config_hash(config))
        return exports.finish(version, staged) if to is None else staged.rename(target)


def _check(exports: Exports, version: int, config: RunConfig) -> None:
    place = exports.place(version)
    for fault in export_faults(place):
        again = f"`stageline export {config.run_dir} --version {version}`"
        copy = "" if config.storage.url is None else f", and its copy {config.stored.place}/weights/{place.name}"
        raise StoreError(f"{fault}. Remove the directory {place}{copy}; {again} then writes it anew from checkpoints")


def _best_version(config: RunConfig, history: History) -> int:
    """Return the best version by the run's evaluations. Raises ConfigError if there is none."""
    evaluations, budget = history.read_evaluations(), config.evaluate.select.max_kl
    best = best_evaluation(evaluations, budget)
    if best is not None:
        return best.version
    if not evaluations:
        raise ConfigError("--version", "given 'best'; the run has no evaluation (evaluate.every)")
    evaluated = ", ".join(f"v{e.version}: {'unknown' if e.kl is None else f'{e.kl:.3g}'}" for e in evaluations)
    need = f"no evaluated version has a KL of at most {budget:g} (evaluate.select.max_kl); they have {evaluated}"
    raise ConfigError("--version", f"given 'best'; {need}")
