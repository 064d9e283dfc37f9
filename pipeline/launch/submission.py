"""Submission of runs to Slurm: one run as a job, or several runs as a job array.

config ──► job/config.yaml (resolved, as the run will have it) ──► job/run.sbatch ──► sbatch ──► job/job.json
"""

from __future__ import annotations

import fcntl
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError
from pipeline.launch.commands import JobRecord, job_state, read_record, submit, write_record
from pipeline.launch.script import NodeGroup, ScriptValues, job_shape, render, render_doctor
from storage import files
from storage.locks import lock_holder, open_lock

_SCRIPT, _CONFIG = "run.sbatch", "config.yaml"
_LOCK = "submitting"
"""Name of the lock file that a process holds while it submits a run."""


@dataclass(frozen=True)
class SubmittedJob:
    """A job that Slurm has accepted."""

    job_id: str
    output: Path
    script: Path


def run_script(config: RunConfig) -> str:
    """Return the script of a job for one run."""
    paths = RunPaths(config.run_dir.absolute())
    return render(
        config,
        ScriptValues(
            title=f"The run {config.name} of Stageline.",
            name=config.name,
            run=shlex.quote(str(paths.root)),
            folder=Path.cwd(),
            output=_sbatch_pattern(paths.job, "slurm-%j.out"),
        ),
    )


def submit_run(config: RunConfig) -> SubmittedJob:
    """Submit one run as a job.

    Raises:
        ConfigError: a job of the run is waiting or running, another process is submitting the run, or Slurm refuses the
            new job.
        StoreError: the record of the run's newest job is damaged.
    """
    paths = RunPaths(config.run_dir.absolute())
    with _hold_submission_locks([paths]):
        _refuse_second_job(config)
        script = paths.job / _SCRIPT
        job_id = _submit({paths.job / _CONFIG: to_yaml(config), script: run_script(config)}, script, config)
        output = paths.job / f"slurm-{job_id}.out"
        write_record(paths.job, JobRecord(job_id, str(output)))
    return SubmittedJob(job_id, output, script)


def doctor_script(config: RunConfig, folder: Path, arguments: Sequence[str]) -> str:
    """Return the script of a job that runs `stageline doctor` on every node that a run requests. `arguments` are passed
    to the command. The output goes into `folder`."""
    place = ScriptValues(
        title=f"Tests of the nodes that the run {config.name} of Stageline asks for.",
        name=f"doctor-{config.name}",
        run="",
        folder=Path.cwd(),
        output=_sbatch_pattern(folder, "slurm-%j.out"),
    )
    return render_doctor(config, place, arguments)


def submit_doctor(config: RunConfig, folder: Path, arguments: Sequence[str]) -> SubmittedJob:
    """Submit a job with the script of `doctor_script`. Raises ConfigError if Slurm refuses the job."""
    script = folder / "doctor.sbatch"
    job_id = _submit({script: doctor_script(config, folder, arguments)}, script, config)
    return SubmittedJob(job_id, folder / f"slurm-{job_id}.out", script)


def array_script(configs: Sequence[RunConfig], folder: Path, max_running: int | None = None) -> str | None:
    """Return the script of a job array in which each task is one of these runs. The output of the tasks goes into
    `folder`.

    Return None if the runs cannot form one array. All tasks of an array use the same script and resources, and Slurm
    has no arrays of heterogeneous jobs.

    The list of runs is part of the script. If it were in a file, another submission of the same sweep could replace the
    file before a waiting task starts.

    Args:
        max_running: maximum number of tasks that run at the same time. None means no limit.
    """
    runs = "".join(f"    {shlex.quote(str(config.run_dir.absolute()))}\n" for config in configs)
    place = ScriptValues(
        title=f"The runs of {folder.parent.name} of Stageline, one for each task.",
        name=folder.parent.name,
        run=f'$(runs=(\n{runs}); echo "${{runs[SLURM_ARRAY_TASK_ID]}}")',
        folder=Path.cwd(),
        output=_sbatch_pattern(folder, "slurm-%A_%a.out"),
        array=f"0-{len(configs) - 1}" + (f"%{max_running}" if max_running else ""),
    )
    scripts = {render(config, place) for config in configs}
    if len(scripts) > 1 or job_shape(configs[0]).heterogeneous:
        return None
    return scripts.pop()


def submit_array(configs: Sequence[RunConfig], folder: Path, text: str) -> SubmittedJob:
    """Submit runs as the tasks of one array. `text` is the script that `array_script` returned for them.

    Raises:
        ConfigError: a job of one of the runs is waiting or running, another process is submitting one of the runs, or
            Slurm refuses the array.
        StoreError: the record of the newest job of one of the runs is damaged.
    """
    roots = [RunPaths(config.run_dir.absolute()) for config in configs]
    with _hold_submission_locks(roots):
        for config in configs:
            _refuse_second_job(config)
        script = folder / _SCRIPT
        kept = {paths.job / _CONFIG: to_yaml(config) for paths, config in zip(roots, configs, strict=True)}
        job_id = _submit(kept | {script: text}, script, configs[0])
        for task, paths in enumerate(roots):
            output = folder / f"slurm-{job_id}_{task}.out"
            write_record(paths.job, JobRecord(f"{job_id}_{task}", str(output)))
    return SubmittedJob(job_id, folder / f"slurm-{job_id}_N.out", script)


@contextmanager
def _hold_submission_locks(runs: Sequence[RunPaths]) -> Iterator[None]:
    """Hold each run's submission lock, while the caller looks for its jobs, submits one and records it. Raises
    ConfigError if another process is submitting one of the runs."""
    with ExitStack() as stack:
        for paths in runs:
            paths.job.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(open_lock(paths.job / _LOCK))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                who = lock_holder(paths.job / _LOCK) or "another process"
                need = f"{who} is submitting {paths.root} now; another name=... starts a new run"
                raise ConfigError("name", f"given {paths.root.name!r}; {need}") from error
        yield


def unfinished_job_text(config: RunConfig) -> str | None:
    """Return a text about the state of the run's job. Return None if no job of the run is waiting or running.

    Raises:
        ConfigError: Slurm does not answer.
        StoreError: the job's record is damaged.
    """
    record = read_record(RunPaths(config.run_dir).job)
    state = None if record is None else job_state(record.job_id)
    return None if record is None or state is None or state.is_over else f"job {record.job_id} is {state.state.lower()}"


def _refuse_second_job(config: RunConfig) -> None:
    """Raise ConfigError if a job of the run is waiting or running. Errors of `unfinished_job_text` are passed on."""
    job, root = unfinished_job_text(config), config.run_dir.absolute()
    if job is not None:
        need = f"`stageline cancel {root}` ends it, another name=... starts a new run"
        raise ConfigError("name", f"given {root.name!r}; of {root} {job} already: {need}")


def requested_nodes_text(config: RunConfig) -> str:
    """Return a text that lists the groups of nodes of a job, for messages to the user. For example: `2 nodes with 32
    CPUs and gpu:8 each for train, a node with 16 CPUs for score`.
    """
    shape = job_shape(config)
    return ", ".join(_node_group_text(group, config.slurm.gres) for group in shape.groups)


def _node_group_text(group: NodeGroup, gres: str | None) -> str:
    gpus = f" and {gres}:{group.gpus}" if group.gpus else ""
    number = f"{group.nodes} nodes with" if group.nodes > 1 else "a node with"
    each = " each" if group.nodes > 1 else ""
    return f"{number} {group.cpus} CPUs{gpus}{each} for {', '.join(step.gang for step in group.steps)}"


def _sbatch_pattern(folder: Path, name: str) -> Path:
    """Return a path as a filename pattern of sbatch. Raises ConfigError for a path that sbatch does not support."""
    if re.search(r"[\\\n\r]", str(folder)):
        need = "Slurm writes no output below a directory with a \\ or the end of a line in its name"
        raise ConfigError("runs_dir", f"given {str(folder)!r}; {need}")
    return Path(str(folder).replace("%", "%%")) / name


def _submit(files: Mapping[Path, str], script: Path, config: RunConfig) -> str:
    """Write `files`, which are the script and the files that the job reads when it starts. Then submit the
    script and return the job's id."""
    with _restore_on_failure(list(files)):
        for path, text in files.items():
            _write(path, text.encode())
        try:
            return submit(script)
        except ConfigError as error:
            raise ConfigError(error.key, f"{error.message}; asked for: {requested_nodes_text(config)}") from error


@contextmanager
def _restore_on_failure(paths: Sequence[Path]) -> Iterator[None]:
    """Restore the previous content of these files if the `with` block fails. Otherwise a run could use files of a
    refused submission."""
    before = {path: path.read_bytes() if path.exists() else None for path in paths}
    try:
        yield
    except BaseException:
        for path, content in before.items():
            if content is None:
                path.unlink(missing_ok=True)
            else:
                _write(path, content)
        raise


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    files.write_local(path, content, private=True)  # the script may hold keys
