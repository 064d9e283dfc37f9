"""`stageline status [RUN] [--runs-dir DIR]`: how far a run is and what becomes of its job; without RUN, of every run.

Reads the run's directory and asks Slurm, where there is one; starts and changes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from pipeline.cli.answers import output, print_line
from pipeline.cli.exit_codes import DONE
from pipeline.cli.job import begun
from pipeline.cli.sources import submitted_config
from pipeline.config.errors import ConfigError, OtherProgramsConfig
from pipeline.config.paths import RunPaths
from pipeline.driver.lock import last_driver
from pipeline.driver.results import open_history
from pipeline.launch.commands import JobState, job_state
from pipeline.launch.records import JobRecord, read_record
from pipeline.observe.visible import visible
from storage.errors import StoreError


@dataclass(frozen=True)
class RunState:
    """What is known of a run, from outside."""

    name: str
    done: int
    """Steps."""
    steps: int
    driver: str | None
    """Who runs it now, in its own words; None: nobody."""
    begun: bool
    record: JobRecord | None
    job: JobState | None
    """None: Slurm does not know it any more, or there is none here; or `unknown`."""
    unknown: str | None
    """Why nobody knows what becomes of the job."""


def command(options: argparse.Namespace) -> int:
    if options.run_dir is not None:
        state, paths = run_state(options.run_dir), RunPaths(Path(options.run_dir))
        for label, text in _lines(state, paths):
            print_line(f"{label:<8}{text}")
        return DONE
    folder = Path(options.runs_dir)
    slurm = _Slurm()
    rows = [_row(path, slurm) for path in sorted(folder.iterdir()) if _is_run(path)] if folder.is_dir() else []
    table = Table("run", "steps", "job", "state", box=None, pad_edge=False)
    for row in filter(None, rows):
        table.add_row(*row)
    if not table.rows:
        raise ConfigError("--runs-dir", f"given {options.runs_dir!r}; there is no run in it")
    output().print(table)
    return DONE


class _Slurm:
    """Slurm, asked of many jobs: once it does not answer it is not asked again, each time of which would be waited for
    as long."""

    def __init__(self) -> None:
        self._silent: ConfigError | None = None

    def job_state(self, job_id: str) -> JobState | None:
        if self._silent is not None:
            raise self._silent
        try:
            return job_state(job_id)
        except ConfigError as error:
            self._silent = error
            raise


def run_state(run_dir: str, ask: Callable[[str], JobState | None] = job_state) -> RunState:
    """Of the run in a directory; `ask` tells what becomes of its job. Raises ConfigError where there is no run."""
    config, paths = submitted_config(run_dir), RunPaths(Path(run_dir))
    done = len(open_history(config).steps_done()) if paths.ledger.exists() else 0
    record, job, unknown = read_record(paths.job), None, None
    if record is not None:
        try:
            job = ask(record.job_id)
        except ConfigError as error:
            unknown = error.message
    driver = last_driver(paths, elsewhere=unknown is not None or (job is not None and job.state == "RUNNING"))
    return RunState(config.name, done, config.steps, driver, begun(config), record, job, unknown)


def _is_run(path: Path) -> bool:
    paths = RunPaths(path)
    return (paths.config.exists() or (paths.job / "config.yaml").exists()) and not paths.variant.exists()


def _lines(state: RunState, paths: RunPaths) -> list[tuple[str, str]]:
    lines = [("run", f"{paths.root}: {state.done} of {state.steps} steps"), ("driver", state.driver or "none")]
    if state.record is not None:
        job = state.unknown or _job_text(state.job)
        lines += [("job", f"{state.record.job_id} {job}"), ("output", state.record.output)]
    may_run = state.driver or state.unknown or (state.job is not None and not state.job.over)
    if not may_run and state.done < state.steps:
        resumes = state.begun and state.record is None
        how = f"stageline resume {paths.root}" if resumes else f"stageline submit {paths.job}/config.yaml"
        lines.append(("goes on", f"with `{how}`"))
    return lines


def _job_text(job: JobState | None) -> str:
    if job is None:
        return "is not known to Slurm (any more)"
    parts = [job.state]
    if job.reason != "None":
        parts.append(f"({job.reason})")
    if job.nodes:
        parts.append(f"on {job.nodes}")
    if job.state == "RUNNING":
        parts.append(f"for {job.run_time} of {job.time_limit}")
    elif job.state == "PENDING" and job.start not in ("", "Unknown"):
        parts.append(f"not before {job.start}")
    return " ".join(parts) + (f", requeued {job.restarts} times" if job.restarts else "")


def _row(path: Path, slurm: _Slurm) -> tuple[str, str, str, str] | None:
    """Of the table; None for the directory of another program. One that is damaged says nothing of the others."""
    try:
        state = run_state(str(path), slurm.job_state)
    except OtherProgramsConfig:
        return None
    except (ConfigError, StoreError) as error:
        return path.name, "", "", f"damaged: {escape(visible(str(error)))}"
    number = "" if state.record is None else state.record.job_id
    here = "running" if state.driver else "done" if state.done == state.steps else "stopped"
    job = None if state.job is None else _job_text(state.job)
    return state.name, f"{state.done}/{state.steps}", number, state.unknown or job or here
