"""The commands that run a config to its last step.

    stageline run CONFIG... [key=value...]      start a run; an earlier one of that name with no update is moved aside
    stageline resume RUN [key=value...]         continue an interrupted run
    stageline job CONFIG... [key=value...]      start or continue a run: the command of a cluster's job

A cluster manager that wants a job's nodes back sends SIGTERM, SIGINT, SIGHUP or SIGUSR1. Then `job` ends at once with
exit code 75, without summary and plots.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Collection

from pipeline.cli.answers import (
    DONE,
    INTERRUPTED,
    RESUMABLE,
    STAGE_FAILED,
    begun,
    complain,
    config_of,
    note,
    output,
    print_line,
    trusted_config,
)
from pipeline.config.loading import read_saved
from pipeline.config.paths import RunPaths, refuse_foreign
from pipeline.config.preflight import holds_run, preflight
from pipeline.config.run import RunConfig
from pipeline.driver.run import run
from pipeline.driver.session import EndedEarly, only_driver
from pipeline.errors import ConfigError, OtherProgramsConfig, StageFailed, StoredWrongly, WorkersMissing
from pipeline.graph.graph import UPDATE_STAGE
from pipeline.observe.journal import AppendFailed, journal_exists
from pipeline.workers.worker_process import ending_signals
from storage.errors import StoreRefused
from storage.files import REFUSING, TRANSIENT, refusal


def command(options: argparse.Namespace) -> int:
    """Start a run."""
    config = config_of(options.sources)
    _make_way(config, overwrite=options.overwrite, agreed=options.yes)
    return execute(config, resume=False, json_lines=options.json_lines)


def resume(options: argparse.Namespace) -> int:
    """Continue a run from its directory."""
    config = trusted_config(options.run_dir, options.changes)
    return execute(config, resume=True, from_checkpoint=options.from_checkpoint, json_lines=options.json_lines)


def job(options: argparse.Namespace) -> int:
    """Start a run, or continue it if it has begun."""
    config = config_of(options.sources)
    goes_on = begun(config)
    if goes_on:
        refuse_foreign(config.run_dir)
    return execute(config, resume=goes_on, at_once=ending_signals() | {signal.SIGUSR1})


def execute(
    config: RunConfig,
    *,
    resume: bool,
    from_checkpoint: bool = False,
    at_once: Collection[signal.Signals] = (),
    json_lines: bool = False,
) -> int:
    """Run a config to its end, and return the exit code. If the run stops earlier, print how to continue. `at_once`:
    signals that end the run at once, with exit code 75. If any are given, missing workers also give that code."""
    paths = RunPaths(config.run_dir)
    try:
        run(config, output(), resume=resume, from_checkpoint=from_checkpoint, at_once=at_once, json_lines=json_lines)
    except EndedEarly:
        return complain(
            "ended early", f"{paths.root}: committed outputs stay, and the same command continues the run", RESUMABLE
        )
    except KeyboardInterrupt:
        print_line(f"interrupted; {_how_to_go_on(paths)}")
        return INTERRUPTED
    except (StoreRefused, AppendFailed) as error:
        return complain("failed", f"{error}. {_how_to_go_on(paths)}", STAGE_FAILED)
    except OSError as error:
        if error.errno not in REFUSING | TRANSIENT:
            raise
        said = refusal(error, str(error.filename or paths.root))
        return complain("failed", f"{said}. {_how_to_go_on(paths)}", STAGE_FAILED)
    except StoredWrongly as error:
        return complain("failed", f"{error}. {_how_to_go_on(paths)}", STAGE_FAILED)
    except StageFailed as error:
        further = {"logs": str(paths.logs)} | error.further
        if journal_exists(paths.events):
            further["continue"] = f"stageline resume {paths.root}"
        lines = (f"  {label:<12}  {what}" for label, what in further.items())
        may_come = bool(at_once) and isinstance(error, WorkersMissing)
        return complain("failed", "\n".join([str(error), *lines]), RESUMABLE if may_come else STAGE_FAILED)
    return DONE


def _make_way(config: RunConfig, *, overwrite: bool, agreed: bool) -> None:
    """Move an earlier run of this name aside if no update of it was committed, or if `overwrite` is True and the user
    agrees. Otherwise do nothing: the start of the run refuses a directory that holds a run.

    Raises:
        ConfigError: the new run cannot work (then nothing is moved), the user does not agree, or the earlier run cannot
            be moved.
    """
    paths = RunPaths(config.run_dir)
    if not (holds_run(paths) or paths.config.exists()) or paths.variant.exists() or _is_another_programs(paths):
        return
    if paths.root.is_symlink() or paths.job.exists():  # a Slurm job may start it again at any time
        if overwrite:
            need = f"{paths.root} is a link, or belongs to a Slurm job: choose another name=..., or remove it"
            raise ConfigError("--overwrite", f"given; {need}")
        return
    if config.storage.url is not None:  # what is there cannot be moved aside; the start of the run refuses it
        if overwrite:
            need = f"the run's data at {config.storage.url} is not moved: choose another storage.url, and name"
            raise ConfigError("--overwrite", f"given; {need}")
        return
    refuse_foreign(paths.root)
    stages = {address.stage for address in config.stored.ledger().addresses()}
    updated = bool(stages.intersection(UPDATE_STAGE.values()))
    if updated and not overwrite:
        return
    preflight(config)
    if updated and not agreed:
        _ask(f"{paths.root} holds a run with updates. Move it aside, and start a new run of that name?")
    with only_driver(paths):
        names = (f"{paths.root.name}-replaced-{number}" for number in itertools.count(1))
        aside = next(paths.root.with_name(name) for name in names if not paths.root.with_name(name).exists())
        try:
            paths.root.rename(aside)
        except OSError as error:
            need = f"{paths.root} cannot be moved to {aside} ({error.strerror}): choose another name=..."
            raise ConfigError("name", f"given {config.name!r}; {need}") from error
    why = "" if updated else ", of which no update was committed"
    note(f"the earlier run of this name{why} is in {aside} now")


def _is_another_programs(paths: RunPaths) -> bool:
    """Return True if the directory holds a reward model's training or a labelling."""
    try:
        if paths.config.exists():
            read_saved(paths.config)
    except OtherProgramsConfig:
        return True
    except ConfigError:
        pass  # the config of a run, damaged or of another version
    return False


def _ask(question: str) -> None:
    """Raise ConfigError unless a person at the terminal says yes."""
    if not sys.stdin.isatty():
        raise ConfigError("--overwrite", "given, and nobody is at a terminal to be asked: add --yes")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("--overwrite", "given, and the answer was no: nothing was changed")


def _how_to_go_on(paths: RunPaths) -> str:
    return (
        f"`stageline resume {paths.root}` continues this run" if journal_exists(paths.events) else "nothing had started"
    )
