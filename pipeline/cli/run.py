"""The commands that run a config to its last step.

    stageline run CONFIG... [key=value...]    start a run
    stageline resume RUN [key=value...]       continue an interrupted run
    stageline job CONFIG... [key=value...]    start or continue a run, as the job of a cluster

If an earlier run has the same name and committed no update, `run` moves its directory aside. With `--overwrite`, `run`
also moves an earlier run with updates.

A cluster manager that wants a job's nodes back sends SIGTERM, SIGINT, SIGHUP or SIGUSR1. Then `job` ends at once with
exit code 75, and writes no summary and no plots.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Collection, Sequence

from pipeline.cli.answers import (
    INTERRUPTED,
    RESUMABLE,
    STAGE_FAILED,
    SUCCESS,
    config_from_sources,
    has_begun,
    output_console,
    print_error,
    print_line,
    print_note,
    read_trusted_config,
)
from pipeline.config.paths import RunPaths, refuse_foreign
from pipeline.config.preflight import (
    check_run_directory,
    has_updates,
    holds_earlier_run,
    preflight,
    reason_to_stay,
)
from pipeline.config.run import RunConfig
from pipeline.driver.run import run
from pipeline.driver.session import TerminatedEarly, hold_driver_lock
from pipeline.errors import ConfigError, StageFailed, StoredWrongly, WorkersMissing, join_errors, refusals, refuse
from pipeline.observe.journal import AppendFailed, journal_exists
from pipeline.workers.worker_process import ending_signals
from storage.errors import StoreRefused
from storage.files import REFUSING, TRANSIENT, refusal
from storage.problems import Problem


def command(options: argparse.Namespace) -> int:
    """Start a run."""
    config = config_from_sources(options.sources)
    moved = move_earlier_run_aside(config, overwrite=options.overwrite, user_agreed=options.yes)
    if moved is not None:
        print_note(moved)
    return execute(config, resume=False, json_lines=options.json_lines)


def resume(options: argparse.Namespace) -> int:
    """Continue a run from its directory."""
    config = _resumed_config(options.run_dir, options.changes)
    return execute(config, resume=True, from_checkpoint=options.from_checkpoint, json_lines=options.json_lines)


def _resumed_config(run_dir: str, changes: Sequence[str]) -> RunConfig:
    """Return the config of a run with key=value changes. Raises ConfigError, which lists the wrong changes, and with
    them those that a resumed run must not have."""
    need = f"a resumed run is named by its directory, {run_dir}: leave it out (the directory may be moved or renamed)"
    given = {change.partition("=")[0]: change.partition("=")[2] for change in changes}
    try:
        refuse(Problem(key, value, need) for key, value in given.items() if key in ("name", "runs_dir"))
        return read_trusted_config(run_dir, changes)
    except ConfigError as error:
        others = [change for change in changes if change.partition("=")[0] not in error.keys]
        if len(others) == len(changes):
            raise
        further = refusals(lambda: check_run_directory(_resumed_config(run_dir, others), resume=True))
        raise join_errors([error, *further]) from error


def job(options: argparse.Namespace) -> int:
    """Start a run, or continue it if it has begun."""
    config = config_from_sources(options.sources)
    goes_on = has_begun(config)
    if goes_on:
        refuse_foreign(config.run_dir)
    return execute(config, resume=goes_on, immediate_signals=ending_signals() | {signal.SIGUSR1})


def execute(
    config: RunConfig,
    *,
    resume: bool,
    from_checkpoint: bool = False,
    immediate_signals: Collection[signal.Signals] = (),
    json_lines: bool = False,
) -> int:
    """Run a config to its end, and return the exit code. If the run stops earlier, print how to continue.

    `immediate_signals` are signals that end the run at once, with exit code 75. If any are given, a run that ends
    because workers are missing also has exit code 75."""
    paths = RunPaths(config.run_dir)
    try:
        run(
            config,
            output_console(),
            resume=resume,
            from_checkpoint=from_checkpoint,
            immediate_signals=immediate_signals,
            json_lines=json_lines,
        )
    except TerminatedEarly:
        return print_error(
            "ended early", f"{paths.root}: committed outputs stay, and the same command continues the run", RESUMABLE
        )
    except KeyboardInterrupt:
        print_line(f"interrupted; {_resume_hint(paths)}")
        return INTERRUPTED
    except (StoreRefused, AppendFailed) as error:
        return print_error("failed", f"{error}. {_resume_hint(paths)}", STAGE_FAILED)
    except OSError as error:
        if error.errno not in REFUSING | TRANSIENT:
            raise
        reason = refusal(error, str(error.filename or paths.root))
        return print_error("failed", f"{reason}. {_resume_hint(paths)}", STAGE_FAILED)
    except StoredWrongly as error:
        return print_error("failed", f"{error}. {_resume_hint(paths)}", STAGE_FAILED)
    except StageFailed as error:
        further = {"logs": str(paths.logs)} | error.further
        if journal_exists(paths.events):
            further["continue"] = f"stageline resume {paths.root}"
        lines = (f"  {label:<12}  {what}" for label, what in further.items())
        may_come = bool(immediate_signals) and isinstance(error, WorkersMissing)
        return print_error("failed", "\n".join([str(error), *lines]), RESUMABLE if may_come else STAGE_FAILED)
    return SUCCESS


def move_earlier_run_aside(config: RunConfig, *, overwrite: bool, user_agreed: bool) -> str | None:
    """Rename the directory of an earlier run that has the name of this new run. Return a sentence that says where the
    earlier run is now, or None if nothing was moved.

    - If the earlier run has no committed update, it is moved.
    - If it has a committed update, it is moved only with `overwrite=True` and the user's consent. With
      `user_agreed=True` the user has consented already. Otherwise the user is asked at the terminal.
    - If the directory belongs to a variant, to the training of a reward model or to a labelling, nothing is moved.
    - If it is a link, or has a Slurm job, nothing is moved, and `overwrite=True` raises ConfigError. The same is true
      if the config has a `storage.url`.

    If the earlier run is not moved, the new run fails when it starts: its directory, or its `storage.url`, is taken.

    Raises:
        ConfigError: the user does not agree, the new run would fail its checks, a driver still runs the earlier run,
            another account can change the directory, the renaming fails, or `overwrite=True` is not possible (see
            above). Nothing is moved then.
    """
    paths = RunPaths(config.run_dir)
    if not holds_earlier_run(paths):
        return None
    stays = reason_to_stay(config)
    if stays is not None:
        if overwrite:
            raise ConfigError("--overwrite", f"given; {stays}")
        return None
    refuse_foreign(paths.root)
    updated = has_updates(config)
    if updated and not overwrite:
        return None
    preflight(config)
    if updated and not user_agreed:
        _require_confirmation(
            f"{paths.root} holds a run with updates. Move it aside, and start a new run of that name?"
        )
    with hold_driver_lock(paths):
        names = (f"{paths.root.name}-replaced-{number}" for number in itertools.count(1))
        aside = next(paths.root.with_name(name) for name in names if not paths.root.with_name(name).exists())
        try:
            paths.root.rename(aside)
        except OSError as error:
            need = f"{paths.root} cannot be moved to {aside} ({error.strerror}): choose another name=..."
            raise ConfigError("name", f"given {config.name!r}; {need}") from error
    why = "" if updated else ", which committed no update,"
    return f"the earlier run of this name{why} is in {aside} now"


def _require_confirmation(question: str) -> None:
    """Raise ConfigError unless a person at the terminal says yes."""
    if not sys.stdin.isatty():
        raise ConfigError("--overwrite", "given, and nobody is at a terminal to be asked: add --yes")
    if input(f"{question} [y/N] ").strip().lower() not in ("y", "yes"):
        raise ConfigError("--overwrite", "given, and the answer was no: nothing was changed")


def _resume_hint(paths: RunPaths) -> str:
    return (
        f"`stageline resume {paths.root}` continues this run" if journal_exists(paths.events) else "nothing had started"
    )
