"""Slurm's commands, and the record of a run's newest job (`job/job.json`).

The commands are called as a user would call them on the command line. Errors contain Slurm's own messages.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ConfigError
from storage import codec, files
from storage.errors import StoreError

_TIMEOUT_S = 60.0
"""Time limit of a command, in seconds. A busy Slurm controller may answer late."""
_ENDED_STATES = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)
"""Final states of a job. A job that Slurm is about to requeue is in none of these states: it is COMPLETING until it is
PENDING."""
_UNKNOWN_JOB_ERRORS = ("Invalid job id", "not found")
"""Texts in scontrol's error message if Slurm no longer knows a job or a task of an array."""
_KEYS = {
    "account": "slurm.account",
    "partition": "slurm.partition",
    "qos": "slurm.sbatch",
    "feature": "slurm.sbatch",
    "node configuration": "slurm.gangs",
    "time limit": "slurm.time_limit",
    "gres": "slurm.gres",
    "array": "--at-once",
}
"""Words in an error message of Slurm -> setting that the error concerns."""


@dataclass(frozen=True)
class JobState:
    """The state of a job as reported by Slurm."""

    state: str
    """PENDING, RUNNING, COMPLETED, …"""
    reason: str
    """Slurm's reason why the job waits. It is the text "None" if the job does not wait."""
    nodes: str
    restarts: int
    run_time: str
    time_limit: str
    start: str

    @property
    def is_over(self) -> bool:
        """Return True if the job has ended and Slurm will not run it again."""
        return self.state in _ENDED_STATES


def has_slurm() -> bool:
    """Return True if this host has Slurm's commands."""
    return shutil.which("sbatch") is not None


def require_slurm() -> None:
    """Raise ConfigError if this host lacks Slurm's commands."""
    if not has_slurm():
        raise ConfigError(
            "submit",
            "no sbatch on the path: submit on a login node of the cluster (--dry-run prints the script without it)",
        )


def submit(script: Path) -> str:
    """Submit a script and return the id of the job.

    Raises:
        ConfigError: Slurm refuses the job. The message contains Slurm's reason, and the key names the setting to
            change.
    """
    done = _call("sbatch", "--parsable", str(script))
    if done.returncode:
        raise ConfigError(_key_of(done.stderr), f"Slurm refuses the job: {_one_line_error(done.stderr)}")
    return done.stdout.strip().partition(";")[0]


def job_state(job_id: str) -> JobState | None:
    """Return the state of a job, or None if Slurm no longer knows the job or this host has no Slurm.

    Raises:
        ConfigError: Slurm does not answer, so the state is unknown.
    """
    if not has_slurm():
        return None
    done = _call("scontrol", "--oneliner", "show", "job", job_id)
    shown = [_fields(line) for line in done.stdout.splitlines() if line.startswith("JobId=")]
    if not shown:
        if any(words in f"{done.stdout}{done.stderr}" for words in _UNKNOWN_JOB_ERRORS):
            return None
        raise ConfigError("slurm", f"Slurm does not answer: {_one_line_error(done.stderr)}")
    first = shown[0]
    nodes = [one["NodeList"] for one in shown if one.get("NodeList", "(null)") not in ("(null)", "")]
    return JobState(
        state=first["JobState"],
        reason=first.get("Reason", "None"),
        nodes=",".join(nodes),
        restarts=int(first.get("Restarts", "0")),
        run_time=first.get("RunTime", ""),
        time_limit=first.get("TimeLimit", ""),
        start=first.get("StartTime", ""),
    )


def cancel(job_id: str) -> None:
    """Cancel a job, which may be running or in the queue.

    Raises:
        ConfigError: Slurm refuses, or this host has no Slurm.
    """
    if not has_slurm():
        raise ConfigError("cancel", "no scancel on the path: cancel on a login node of the cluster")
    done = _call("scancel", job_id)
    if done.returncode:
        raise ConfigError("cancel", f"Slurm refuses to cancel the job: {_one_line_error(done.stderr)}")


def _call(*command: str) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"{command[0]} did not answer in {_TIMEOUT_S:g} s")


def _fields(line: str) -> Mapping[str, str]:
    """Return the fields NAME=VALUE of a line of scontrol's output."""
    return dict(part.split("=", 1) for part in line.split() if "=" in part)


def _one_line_error(complaint: str) -> str:
    """Return an error message of Slurm as one line. The name of the command at the start of each line is removed."""
    lines: Sequence[str] = [re.sub(r"^(?:.*?\b(?:error|fatal)|\w+): ", "", line) for line in complaint.splitlines()]
    return "; ".join(line.strip() for line in lines if line.strip()) or "it does not say why"


def _key_of(complaint: str) -> str:
    """Return the setting that Slurm's complaint is about, judged by its words."""
    return next((key for word, key in _KEYS.items() if word in complaint.lower()), "slurm")


# ---- records ---------------------------------------------------------------------------------------------

_FILE = "job.json"


@dataclass(frozen=True)
class JobRecord:
    """The newest job of a run."""

    job_id: str
    """Id of the job. For a task of an array: the array's id and the number of the task, such as 12_3."""
    output: str
    """Path of the file with the job's output."""


def write_record(folder: Path, record: JobRecord) -> None:
    """Write the record of a run's newest job atomically. Raises OSError if the file cannot be written."""
    folder.mkdir(parents=True, exist_ok=True)
    files.write_local(folder / _FILE, (codec.encode(record, indent=1) + "\n").encode())


def read_record(folder: Path) -> JobRecord | None:
    """Return the record of the run's newest submitted job. `folder`: the directory `job/` of the run. Return None if no
    job was submitted.

    Raises:
        StoreError: the record is damaged.
    """
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text("utf8"))
        return JobRecord(content["job_id"], content["output"])
    except (ValueError, TypeError, KeyError) as error:
        raise StoreError(f"{path} is not what was written: {error}") from error
