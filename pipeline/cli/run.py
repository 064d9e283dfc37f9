"""The commands that run a config to its last step.

    stageline run CONFIG... [key=value...]      start a run
    stageline resume RUN [key=value...]         continue an interrupted run
    stageline job CONFIG... [key=value...]      start or continue a run: the command of a cluster's job

A cluster manager that wants a job's nodes back sends SIGTERM, SIGINT, SIGHUP or SIGUSR1. Then `job` ends at once with
exit code 75, without summary and plots.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Collection

from pipeline.cli.answers import (
    DONE,
    INTERRUPTED,
    RESUMABLE,
    STAGE_FAILED,
    begun,
    complain,
    config_of,
    output,
    print_line,
    trusted_config,
)
from pipeline.config.paths import RunPaths, refuse_foreign
from pipeline.config.run import RunConfig
from pipeline.driver.run import run
from pipeline.driver.session import EndedEarly
from pipeline.errors import StageFailed, StoredWrongly, WorkersMissing
from pipeline.observe.journal import AppendFailed, journal_exists
from pipeline.workers.worker_process import ending_signals
from storage.errors import StoreRefused
from storage.files import REFUSING, TRANSIENT, refusal


def command(options: argparse.Namespace) -> int:
    """Start a run."""
    return execute(config_of(options.sources), resume=False, json_lines=options.json_lines)


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
    """Run a config to its end. If it stops earlier, print how to go on. `at_once`: signals that end it with exit code
    75, which it then also returns if workers are missing."""
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


def _how_to_go_on(paths: RunPaths) -> str:
    return (
        f"`stageline resume {paths.root}` continues this run" if journal_exists(paths.events) else "nothing had started"
    )
