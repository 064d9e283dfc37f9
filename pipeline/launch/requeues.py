"""Decide whether a job may be requeued again. The decision depends on how each of its starts ended
(`job/attempts.json`).

    a job ends ────────► its script, or another node, asks ────► its end is recorded ─────► requeue, or end the job
    it starts again ───► its script asks about the last end ────► recorded if missing ────► continue, or end the job

The second line is for a job that Slurm itself requeued, after a preemption or the failure of its only node. Then no
process was left to ask when the job ended. The file is in the run's directory, so it survives the failure of a node.
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
"""Maximum number of starts of a job that may lose their driver, workers or batch node. If one more start loses them,
the job ends, because nodes that fail so often need the attention of a person. Starts that end by a time limit or by
preemption do not count."""
MAX_REQUEUES_WITHOUT_PROGRESS = 3
"""Number of requeues in a row without a new commit after which a job ends. The reasons of the requeues do not matter.
One such requeue may be bad luck, for example if a node fails early. After three, the job would probably be requeued
forever."""


@dataclass(frozen=True)
class JobEnd:
    """The end of one start of a job."""

    restart: int
    """Number of times that the job was requeued before this start (SLURM_RESTART_COUNT)."""
    committed: tuple[int, int]
    """Result of `count_committed` at the end of this start."""
    because: str
    """Reason why the start ended, as text for users."""
    lost: bool
    """True if the driver, workers or batch node were lost. False after a time limit, or if Slurm itself requeued the
    job."""


@dataclass(frozen=True)
class _StoredEnds:
    """The content of `job/attempts.json`. The names of the fields must not change, because files with them exist."""

    job_id: str
    attempts: tuple[JobEnd, ...]


def requeue_refusal(ends: Sequence[JobEnd], *, restarts: int, requeues_without_progress: int) -> str | None:
    """Return the reason why a job must not be requeued, or None if it may be requeued.

    The end of a start may be missing from `ends`. Such a start counts as a requeue without progress if no commit was
    added between the ends before and after it.

    Args:
        ends: ends of the job's starts, oldest first; at least one.
        restarts: maximum number of starts whose end may be `lost`.
        requeues_without_progress: number of requeues in a row without a new commit after which the job ends.
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
    """Record the end of a start in a run's directory `job/`. Return the ends of all recorded starts of this job, oldest
    first.

    If the end of this start is recorded already, it is not changed. Ends of an earlier job are dropped, because the
    counts begin again with each submission.

    Raises:
        StoreError: the file is damaged.
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
