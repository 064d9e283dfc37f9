"""`stageline status [RUN] [--runs-dir DIR]`: how far a run is and what becomes of its job; without RUN, of every run.

Reads the run's directory and asks Slurm, where there is one; starts and changes nothing.
"""

from __future__ import annotations

import argparse
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from pipeline.cli.answers import output, print_line
from pipeline.cli.exit_codes import DONE
from pipeline.cli.sources import submitted_config
from pipeline.config.errors import ConfigError
from pipeline.config.paths import RunPaths
from pipeline.driver.results import open_history
from pipeline.launch.commands import JobState, job_state
from pipeline.launch.records import JobRecord, read_record
from storage.processes import process_alive


@dataclass(frozen=True)
class RunState:
    """What is known of a run, from outside."""

    name: str
    done: int
    """Steps."""
    steps: int
    driver: str | None
    """Who runs it now, in its own words; None: nobody."""
    record: JobRecord | None
    job: JobState | None


def command(options: argparse.Namespace) -> int:
    if options.run_dir is not None:
        state, paths = run_state(options.run_dir), RunPaths(Path(options.run_dir))
        for label, text in _lines(state, paths):
            print_line(f"{label:<8}{text}")
        return DONE
    folder = Path(options.runs_dir)
    found = sorted(path for path in folder.iterdir() if _is_run(path)) if folder.is_dir() else []
    if not found:
        raise ConfigError("--runs-dir", f"given {options.runs_dir!r}; there is no run in it")
    output().print(_table([run_state(str(path)) for path in found]))
    return DONE


def run_state(run_dir: str) -> RunState:
    """Of the run in a directory. Raises ConfigError where there is none."""
    config, paths = submitted_config(run_dir), RunPaths(Path(run_dir))
    done = len(open_history(config).steps_done()) if paths.ledger.exists() else 0
    record = read_record(paths.job)
    job = None if record is None else job_state(record.job_id)
    driver = _driver(paths.lock, running=job is not None and job.state == "RUNNING")
    return RunState(config.name, done, config.steps, driver, record, job)


def _is_run(path: Path) -> bool:
    paths = RunPaths(path)
    return (paths.config.exists() or (paths.job / "config.yaml").exists()) and not paths.variant.exists()


def _driver(lock: Path, *, running: bool) -> str | None:
    """Who runs the run now, by what the last driver wrote into its lock (which is not touched: a driver that starts
    must find it free). `running`: whether Slurm says that its job is; of another host nothing else tells."""
    said = lock.read_text("utf8").strip() if lock.exists() else ""
    match = re.fullmatch(r"process (\d+) on (.*)", said)
    if match is None:
        return None
    there = process_alive(int(match[1])) if match[2] == platform.node() else running
    return said if there else None


def _lines(state: RunState, paths: RunPaths) -> list[tuple[str, str]]:
    lines = [("run", f"{paths.root}: {state.done} of {state.steps} steps"), ("driver", state.driver or "none")]
    if state.record is not None:
        lines += [("job", f"{state.record.job_id} {_job_text(state.job)}"), ("output", state.record.output)]
    if state.driver is None and state.done < state.steps and (state.job is None or state.job.over):
        how = f"stageline submit {paths.job}/config.yaml" if state.record else f"stageline resume {paths.root}"
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


def _table(states: list[RunState]) -> Table:
    table = Table("run", "steps", "job", "state", box=None, pad_edge=False)
    for state in states:
        number = "" if state.record is None else state.record.job_id
        running = "running" if state.driver else "done" if state.done == state.steps else "stopped"
        table.add_row(state.name, f"{state.done}/{state.steps}", number, _job_text(state.job) if state.job else running)
    return table
