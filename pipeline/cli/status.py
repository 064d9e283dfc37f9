"""`stageline status [RUN] [--runs-dir DIR]`: show the progress of a run and the state of its job. Without RUN, show
every run of a directory.

The command reads the run's directory and asks Slurm, if the host has Slurm. It only reads: it starts nothing and
changes nothing.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from pipeline.cli.answers import SUCCESS, has_begun, output_console, print_line, read_submitted_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, OtherProgramsConfig
from pipeline.graph.graph import finished_steps
from pipeline.launch.commands import JobRecord, JobState, job_state, read_record
from pipeline.observe.text import escape_control_characters
from storage.errors import StoreError
from storage.ledger import read_dropped
from storage.locks import holder


@dataclass(frozen=True)
class RunState:
    """The state of a run, as another process can read it."""

    name: str
    finished_steps: int
    """Number of finished steps."""
    steps: int
    """Number of steps that the config asks for."""
    driver: str | None
    """Description of the driver's process. None if no driver is running."""
    has_begun: bool
    record: JobRecord | None
    job: JobState | None
    """State of the run's job. None if there is no job or no Slurm, if Slurm has forgotten the job, or if Slurm did not
    answer."""
    unknown_reason: str | None
    """Reason why Slurm did not answer. None if it answered or was not asked."""


def command(options: argparse.Namespace) -> int:
    if options.run_dir is not None:
        state, paths = run_state(options.run_dir), RunPaths(Path(options.run_dir))
        for label, text in _lines(state, paths):
            print_line(f"{label:<8}{text}")
        return SUCCESS
    folder = Path(options.runs_dir)
    slurm = _Slurm()
    rows = [_row(path, slurm) for path in sorted(folder.iterdir()) if _is_run(path)] if folder.is_dir() else []
    table = Table("run", "steps", "job", "state", box=None, pad_edge=False)
    for row in filter(None, rows):
        table.add_row(*row)
    if not table.rows:
        raise ConfigError("--runs-dir", f"given {options.runs_dir!r}; there is no run in it")
    output_console().print(table)
    return SUCCESS


class _Slurm:
    """A client that asks Slurm about many jobs. After one failure it raises the same error without asking again,
    because each further question might wait until its time limit."""

    def __init__(self) -> None:
        self._error: ConfigError | None = None

    def job_state(self, job_id: str) -> JobState | None:
        if self._error is not None:
            raise self._error
        try:
            return job_state(job_id)
        except ConfigError as error:
            self._error = error
            raise


def run_state(run_dir: str, ask: Callable[[str], JobState | None] = job_state) -> RunState:
    """Return the state of the run in a directory. `ask` is a function that returns the state of a job. Raises
    ConfigError if the directory holds no run."""
    config, paths = read_submitted_config(run_dir), RunPaths(Path(run_dir))
    done = len(_read_finished_steps(config)) if has_begun(config) else 0
    record, job, unknown = read_record(paths.job), None, None
    if record is not None:
        try:
            job = ask(record.job_id)
        except ConfigError as error:
            unknown = error.message
    return RunState(config.name, done, config.steps, holder(paths.lock), has_begun(config), record, job, unknown)


def _read_finished_steps(config: RunConfig) -> list[int]:
    """Return the finished steps. Only the ledger is read: importing Zarr would take longer than the rest of the
    command."""
    ledger = config.stored.ledger()
    over = max(ledger.closed_until(), read_dropped(config.stored.root))
    return finished_steps(config.graph(), over, ledger.addresses(from_step=over))


def _is_run(path: Path) -> bool:
    paths = RunPaths(path)
    return (paths.config.exists() or (paths.job / "config.yaml").exists()) and not paths.variant.exists()


def _lines(state: RunState, paths: RunPaths) -> list[tuple[str, str]]:
    lines = [
        ("run", f"{paths.root}: {state.finished_steps} of {state.steps} steps"),
        ("driver", state.driver or "none"),
    ]
    if state.record is not None:
        job = state.unknown_reason or _job_text(state.job)
        lines += [("job", f"{state.record.job_id} {job}"), ("output", state.record.output)]
    may_run = state.driver or state.unknown_reason or (state.job is not None and not state.job.is_over)
    if not may_run and state.finished_steps < state.steps:
        resumes = state.has_begun and state.record is None
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
    """Return a run's row of the table, or None for a directory of another program. The row of a damaged run shows the
    error, so that the other runs can still be shown."""
    try:
        state = run_state(str(path), slurm.job_state)
    except OtherProgramsConfig:
        return None
    except (ConfigError, StoreError) as error:
        return path.name, "", "", f"damaged: {escape(escape_control_characters(str(error)))}"
    number = "" if state.record is None else state.record.job_id
    here = "running" if state.driver else "done" if state.finished_steps == state.steps else "stopped"
    job = None if state.job is None else _job_text(state.job)
    return state.name, f"{state.finished_steps}/{state.steps}", number, state.unknown_reason or job or here
