"""Commands about a run's Slurm job.

stageline submit CONFIG... [key=value...] [--dry-run]                have Slurm run a config; a requeue resumes the run
stageline logs RUN [--gang NAME] [--index I] [--lines N] [--follow]  print the output of the job or of a gang's workers
stageline cancel RUN                                                 end the job
stageline may-requeue RUN --job ID --restart N --because TEXT ...    tell a job's script if the job may be requeued
"""

from __future__ import annotations

import argparse
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.cli.answers import (
    RESUMABLE,
    SUCCESS,
    config_from_sources,
    has_begun,
    print_line,
    print_note,
    read_submitted_config,
)
from pipeline.config.paths import RunPaths, refuse_foreign
from pipeline.config.preflight import check_run
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError
from pipeline.launch import commands
from pipeline.launch.commands import read_record, require_slurm
from pipeline.launch.requeues import JobEnd, count_committed, record_end, requeue_refusal
from pipeline.launch.submission import requested_nodes_text, run_script, submit_run
from pipeline.observe.journal import is_finished, journal_exists, read_events
from pipeline.workers.messages import worker_name


def submit(options: argparse.Namespace) -> int:
    config = cluster_config(options.sources)
    if options.dry_run:
        print_line(run_script(config).rstrip("\n"))
        return SUCCESS
    if has_all_steps(config):
        print_line(f"nothing to submit: {config.run_dir} is done, {config.steps} of {config.steps} steps")
        return SUCCESS
    require_slurm()
    check_for_cluster(config)
    submitted = submit_run(config)
    print_line(f"submitted job {submitted.job_id}: {requested_nodes_text(config)}")
    print_line(f"  stageline status {config.run_dir}    its state and progress")
    print_line(f"  stageline logs {config.run_dir} --follow    its output ({submitted.output})")
    print_line(f"  stageline cancel {config.run_dir}    ends it; a new submission continues the run")
    return SUCCESS


def has_all_steps(config: RunConfig) -> bool:
    """Return True if the run has ended and has done all steps of the config."""
    paths = RunPaths(config.run_dir)
    if not journal_exists(paths.events):
        return False
    return is_finished(read_events(paths.events)) and len(open_history(config).finished_steps()) >= config.steps


def cluster_config(sources: Sequence[str]) -> RunConfig:
    """Return the config with which a job runs. It has `cluster.kind=attached`, and the path of the run's directory is
    absolute. Raises ConfigError if a setting is wrong."""
    config = config_from_sources([*sources, "cluster.kind=attached"])
    config.runs_dir = str(config.run_dir.absolute().parent)
    return config


def check_for_cluster(config: RunConfig) -> None:
    """Raise ConfigError if the job would be refused. The error lists all reasons that this host can find."""
    refuse_foreign(config.run_dir)  # a job may continue a run that exists there
    check_run(config, resume=has_begun(config))


def cancel(options: argparse.Namespace) -> int:
    """End the run's job, or remove it from the queue. Committed outputs stay."""
    read_submitted_config(options.run_dir)
    record = commands.read_record(RunPaths(Path(options.run_dir)).job)
    if record is None:
        raise ConfigError(options.run_dir, "was not submitted as a job; a run on this host is ended by Ctrl-C")
    state = commands.job_state(record.job_id)
    if state is not None and state.is_over:
        print_line(f"job {record.job_id} has ended already: {state.state}")
        return SUCCESS
    commands.cancel(record.job_id)
    print_line(f"cancelled job {record.job_id}; `stageline submit {options.run_dir}/job/config.yaml` continues the run")
    return SUCCESS


def may_requeue(options: argparse.Namespace) -> int:
    """Record how a start of a job ended (its first start, or a start after a requeue), and decide whether the job may
    be requeued. The job's script calls this command.

    Return exit code 0 if the job may be requeued. Otherwise print the reason and return 75."""
    paths = RunPaths(Path(options.run_dir))
    committed = count_committed(read_submitted_config(options.run_dir).stored.ledger())
    end = JobEnd(options.restart, committed, options.because, options.lost)
    ends = record_end(paths.job, options.job, end)
    why = requeue_refusal(ends, restarts=options.restarts, requeues_without_progress=options.without_progress)
    if why is None:
        return SUCCESS
    here = f", or `stageline resume {paths.root} cluster.kind=local` on one machine" * paths.config.exists()
    print_line(
        f"not requeued: {why}. The last start (restart {ends[-1].restart}) ended: {ends[-1].because}. What the "
        f"driver printed is above, what workers printed is in {paths.logs}. When that is repaired, "
        f"`stageline submit {paths.job}/config.yaml` continues the run{here}"
    )
    return RESUMABLE


# ---- logs ------------------------------------------------------------------------------------------------


_POLL_S = 0.5


def logs(options: argparse.Namespace) -> int:
    if options.lines < 0:
        raise ConfigError("--lines", f"given {options.lines}; must be 0 or more")
    files = _log_files(options.run_dir, options.gang, options.index)
    for name, file in files.items():
        if not file.exists() or file.stat().st_size == 0:
            say_so = "waiting for it" if options.follow else "--follow waits for it"
            print_note(f"{name} has printed nothing yet ({file}); {say_so}")
    offsets = {name: _print_end(name, file, options.lines, len(files) > 1) for name, file in files.items()}
    try:
        while options.follow:
            time.sleep(_POLL_S)
            for name, file in files.items():
                offsets[name] = _print_from(name, file, offsets[name], len(files) > 1)
    except KeyboardInterrupt:
        return SUCCESS
    return SUCCESS


def _log_files(run_dir: str, gang: str | None, index: int | None) -> Mapping[str, Path]:
    """Return label -> log file of a gang's workers, or of the one with `index`. Without a gang, return only the output
    of the run's job. Raises ConfigError if there is no such gang, worker or job."""
    config, paths = read_submitted_config(run_dir), RunPaths(Path(run_dir))
    if gang is None:
        if index is not None:
            raise ConfigError("--index", f"given {index}; needs --gang NAME, since a job has a single output file")
        record = read_record(paths.job)
        if record is None:
            raise ConfigError(run_dir, "was not submitted as a job; --gang NAME shows what a gang's workers print")
        return {"job": Path(record.output)}
    if gang not in config.placement.gangs:
        raise ConfigError("--gang", f"given {gang!r}; the run has {', '.join(config.placement.gangs)}")
    workers = range(config.placement.gangs[gang].workers)
    if index is not None and index not in workers:
        raise ConfigError("--index", f"given {index}; {gang} has workers 0 to {workers[-1]}")
    names = [worker_name(gang, number) for number in workers if index in (None, number)]
    return {name: paths.logs / f"{name}.log" for name in names}


def _print_end(name: str, file: Path, lines: int, several: bool) -> int:
    """Print the last complete lines of a file. Return the offset after them, or 0 if the file does not exist. `name`:
    the file's label, printed before each line if `several` files are printed. `lines`: maximum number of lines."""
    if not file.exists():
        return 0
    last: deque[bytes] = deque(maxlen=lines)
    end = 0
    with file.open("rb") as content:
        for line in content:
            if not line.endswith(b"\n"):
                break  # the line is still being written: a later call prints it
            last.append(line)
            end += len(line)
    for line in last:
        _print(name, line, several)
    return end


def _print_from(name: str, file: Path, offset: int, several: bool) -> int:
    """Print the complete lines of a file from an offset on. Return the offset after them, or 0 if the file does not
    exist. A file that became shorter is read from its beginning. `name` and `several`: as in `_print_end`."""
    if not file.exists():
        return 0
    with file.open("rb") as content:
        content.seek(offset if file.stat().st_size >= offset else 0)
        for line in content:
            if not line.endswith(b"\n"):
                return content.tell() - len(line)
            _print(name, line, several)
        return content.tell()


def _print(name: str, line: bytes, several: bool) -> None:
    text = line.decode(errors="replace").rstrip("\n")
    print_line(f"{name} | {text}" if several else text)
