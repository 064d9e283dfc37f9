"""Decide whether a Slurm job may be started again by a requeue. A start is one execution of the job: its first one, or
one after a requeue. The decision depends on how each of its starts ended.

    a start ends ─────► (1) may-requeue ──► its end is recorded ──► requeue, or give up the job
    the next begins ──► (2) may-requeue ──► recorded if missing ──► continue, or give up the job

(1) The job's script calls the command `stageline may-requeue`. If the script's own node failed,
another node of the job calls it.

(2) The script calls the command again, about the end of the previous start. The record is missing
if Slurm itself requeued the job, after a preemption or the failure of its only node. Then no process was left to call
the command.

The ends are recorded in `job/attempts.json`. This file is in the run's directory, so it survives the failure of a node.
The progress of a start is measured by the commits in the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

from storage import codec, files
from storage.errors import StoreError
from storage.ledger import Ledger

_FILE = "attempts.json"
MAX_LOST_STARTS = 20
"""Maximum number of a job's starts that may end because the driver, workers or the batch node were lost. With one more
such end the job is given up, because nodes that fail so often need the attention of a person. Starts that end by a time
limit or by preemption do not count."""
MAX_REQUEUES_WITHOUT_PROGRESS = 3
"""Limit of successive requeues without a new commit. A job that reaches it is given up, whatever the reasons of the
requeues were. One such requeue may be bad luck, for example if a node fails early. After three, the job would probably
be requeued forever."""


@dataclass(frozen=True)
class JobEnd:
    """The record of how one start of a job ended. A start is one execution of the job: its first one, or one after a
    requeue."""

    restart: int
    """Number of times that the job was requeued before this start (SLURM_RESTART_COUNT)."""
    committed: tuple[int, int]
    """Number of closed steps and number of commits in later steps, counted when this record was made (see
    `count_committed`)."""
    because: str
    """Reason why the start ended, as text for users."""
    lost: bool
    """True if the driver, workers or batch node were lost. False after a time limit, or if Slurm itself requeued the
    job."""


@dataclass(frozen=True)
class _StoredEnds:
    """The content of `job/attempts.json`: the id of a job, and the recorded ends of its starts, oldest first. The names
    of the fields must not change, because existing files contain them."""

    job_id: str
    attempts: tuple[JobEnd, ...]


def requeue_refusal(ends: Sequence[JobEnd], *, restarts: int, requeues_without_progress: int) -> str | None:
    """Return the reason why a job must not be requeued, or None if it may be requeued. There are two possible reasons:
    too many successive requeues without a new commit, or too many starts that ended with `JobEnd.lost`.

    Some starts may have no record in `ends`. Such a start counts as a requeue without progress if the recorded starts
    before and after it have the same number of commits.

    Args:
        ends: records of how the job's starts ended, oldest first; at least one.
        restarts: maximum number of records with `lost` = True.
        requeues_without_progress: limit of successive requeues without a new commit. A job that reaches it is given up.
    """
    last = ends[-1]
    unchanged = list(takewhile(lambda end: end.committed == last.committed, reversed(ends)))
    idle = last.restart - unchanged[-1].restart
    if idle >= requeues_without_progress:
        return f"{_count_text(idle, 'requeue')} in a row committed nothing new (at most {requeues_without_progress})"
    lost = sum(end.lost for end in ends)
    if lost > restarts:
        return f"{_count_text(lost, 'start')} lost their driver, workers or batch node (at most {restarts})"
    return None


def _count_text(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def count_committed(ledger: Ledger) -> tuple[int, int]:
    """Return the number of closed steps, and the number of commits in later steps.

    Every new commit changes one of the two numbers. No commit is read. The call is therefore fast even for a long run,
    and it works if commits are damaged."""
    closed = ledger.closed_until()
    return closed, sum(address.step >= closed for address in ledger.open_addresses())


def record_end(folder: Path, job_id: str, end: JobEnd) -> Sequence[JobEnd]:
    """Record how one start of a job ended. Return the recorded ends of the same job, oldest first.

    Slurm starts a job again after each requeue, so a job can have several ends. They are kept in `folder`, the
    directory `job/` of the run. If this start already has a recorded end, that end is kept. Ends of an earlier job of
    the run are deleted, because a new submission begins with new counts of lost starts and of requeues.

    Raises:
        StoreError: the file with the ends is damaged.
        OSError: the file cannot be written.
    """
    ends = _ends(folder / _FILE, job_id)
    if end.restart not in {one.restart for one in ends}:
        ends = [*ends, end]
        text = codec.encode(_StoredEnds(job_id, tuple(ends)), indent=1) + "\n"
        files.write_local(folder / _FILE, text.encode())
    return ends


def _ends(path: Path, job_id: str) -> list[JobEnd]:
    if not path.is_file():
        return []
    try:
        noted = codec.decode(_StoredEnds, path.read_bytes())
    except codec.NotARecord as error:
        raise StoreError(f"{path} is not what was written: {error}") from error
    return list(noted.attempts) if noted.job_id == job_id else []
