"""Hands a run, or several of one kind, to Slurm.

    config ──► job/config.yaml (resolved, as the run will have it) ──► job/run.sbatch ──► sbatch ──► job/job.json

May import pipeline.config, pipeline.launch.{commands, records, script, shape} and storage.files.
"""

from __future__ import annotations

import fcntl
import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.errors import ConfigError
from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.launch.commands import job_state, submit
from pipeline.launch.records import JobRecord, read_record, write_record
from pipeline.launch.script import JobPlace, render
from pipeline.launch.shape import NodeGroup, job_shape
from storage import files

_SCRIPT, _RUNS = "run.sbatch", "runs.txt"
_LOCK = "submitting"
"""Of whoever submits a run."""


@dataclass(frozen=True)
class Submitted:
    """A job that Slurm has taken."""

    job_id: str
    output: Path
    script: Path


def run_script(config: RunConfig) -> str:
    """The script of a run's own job."""
    paths = RunPaths(config.run_dir.absolute())
    return render(
        config,
        JobPlace(
            title=f"The run {config.name} of Stageline.",
            name=config.name,
            run=shlex.quote(str(paths.root)),
            folder=Path.cwd(),
            output=_pattern(paths.job, "slurm-%j.out"),
        ),
    )


def submit_run(config: RunConfig) -> Submitted:
    """Has Slurm run a config as a job of its own.

    Raises:
        ConfigError: a job of the run is under way, or Slurm refuses this one.
    """
    paths = RunPaths(config.run_dir.absolute())
    with _only_submitter([paths]):
        refuse_second_job(paths)
        _keep_config(config)
        script = _write(paths.job, _SCRIPT, run_script(config))
        job_id = _submit(script, config)
        output = paths.job / f"slurm-{job_id}.out"
        write_record(paths.job, JobRecord(job_id, str(output), time.time()))
    return Submitted(job_id, output, script)


def array_script(configs: Sequence[RunConfig], folder: Path) -> str | None:
    """The script of runs that are the tasks of one array, kept in `folder`; None where they cannot be: Slurm has no
    arrays of heterogeneous jobs, and tasks are alike."""
    at_once = configs[0].slurm.array_at_once
    place = JobPlace(
        title=f"The runs in {folder / _RUNS}, one for each task.",
        name=folder.name,
        run=f'$(sed -n "$((SLURM_ARRAY_TASK_ID + 1))p" {shlex.quote(str(folder / _RUNS))})',
        folder=Path.cwd(),
        output=_pattern(folder, "slurm-%A_%a.out"),
        array=f"0-{len(configs) - 1}" + (f"%{at_once}" if at_once else ""),
    )
    scripts = {render(config, place) for config in configs}
    if len(scripts) > 1 or job_shape(configs[0]).heterogeneous:
        return None
    return scripts.pop()


def submit_array(configs: Sequence[RunConfig], folder: Path, text: str) -> Submitted:
    """Has Slurm run configs as the tasks of one array, with the script that `array_script` made of them.

    Raises:
        ConfigError: as `submit_run`.
    """
    roots = [RunPaths(config.run_dir.absolute()) for config in configs]
    with _only_submitter(roots):
        for paths in roots:
            refuse_second_job(paths)
        for config in configs:
            _keep_config(config)
        _write(folder, _RUNS, "".join(f"{paths.root}\n" for paths in roots))
        script = _write(folder, _SCRIPT, text)
        job_id = _submit(script, configs[0])
        for task, paths in enumerate(roots):
            output = folder / f"slurm-{job_id}_{task}.out"
            write_record(paths.job, JobRecord(f"{job_id}_{task}", str(output), time.time()))
    return Submitted(job_id, folder / f"slurm-{job_id}_N.out", script)


@contextmanager
def _only_submitter(runs: Sequence[RunPaths]) -> Iterator[None]:
    """From the look for a job of these runs until theirs is written down. Raises ConfigError where another process is
    submitting one of them at this moment."""
    with ExitStack() as stack:
        for paths in runs:
            paths.job.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context((paths.job / _LOCK).open("a"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                need = f"another process is submitting {paths.root} now; another name=... starts a new run"
                raise ConfigError("name", f"given {paths.root.name!r}; {need}") from error
        yield


def refuse_second_job(paths: RunPaths) -> None:
    """Raises ConfigError where a job of the run waits or runs."""
    record = read_record(paths.job)
    state = None if record is None else job_state(record.job_id)
    if record is not None and state is not None and not state.over:
        raise ConfigError(
            "name",
            f"given {paths.root.name!r}; job {record.job_id} of {paths.root} is {state.state.lower()} already: "
            f"`stageline cancel {paths.root}` ends it, another name=... starts a new run",
        )


def asked_for(config: RunConfig) -> str:
    """The nodes that a run asks for, for a person."""
    shape = job_shape(config)
    return ", ".join(_described(group, config.slurm.gres) for group in shape.groups)


def _described(group: NodeGroup, gres: str) -> str:
    gpus = f" and {gres}:{group.gpus}" if group.gpus else ""
    number = f"{group.nodes} nodes with" if group.nodes > 1 else "a node with"
    each = " each" if group.nodes > 1 else ""
    return f"{number} {group.cpus} CPUs{gpus}{each} for {', '.join(step.gang for step in group.steps)}"


def _pattern(folder: Path, name: str) -> Path:
    """A file's name as sbatch reads it, to whom a % of the folder would mean something."""
    return Path(str(folder).replace("%", "%%")) / name


def _submit(script: Path, config: RunConfig) -> str:
    try:
        return submit(script)
    except ConfigError as error:
        raise ConfigError(error.key, f"{error.args[0].partition(': ')[2]}; asked for: {asked_for(config)}") from error


def _keep_config(config: RunConfig) -> None:
    _write(RunPaths(config.run_dir.absolute()).job, "config.yaml", to_yaml(config))


def _write(folder: Path, name: str, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    files.write(files.open_root(str(folder)), name, text.encode())
    return folder / name
