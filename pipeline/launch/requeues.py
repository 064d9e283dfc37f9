"""Decide whether a job may be requeued again, from how each of its starts ended (`job/attempts.json`).

    a job ends ────────► its script, or another node, asks ────► its end is recorded ─────► requeue, or end the job
    it starts again ───► its script asks about the last end ────► recorded if it is not ──► continue, or end the job

The second question is for a job that Slurm itself requeued after a preemption or the failure of its only node: no
process was left to ask the first one. The file is in the run's directory, so it survives a node's failure. Progress is
measured by the ledger's commits.
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
MOST_LOST = 20
"""Number of starts of a job that may lose their driver, workers or batch node. The job ends after one more,
because nodes that fail so often need a person's attention. Time limits and preemption do not count."""
MOST_IDLE = 3
"""Number of requeues in a row, for any reason, without a new commit, after which a job ends. One may be bad luck, as
when a node fails early. After three, the job would probably be requeued for ever."""


@dataclass(frozen=True)
class JobEnd:
    """End of one start of a job."""

    restart: int
    """Requeues of the job before this start (SLURM_RESTART_COUNT)."""
    committed: tuple[int, int]
    """Result of `committed_so_far` after the start had ended."""
    because: str
    """Reason why it ended, for people."""
    lost: bool
    """True if its driver, workers or batch node were lost. False after a time limit or a requeue by Slurm itself."""


@dataclass(frozen=True)
class _StoredEnds:
    """The content of the file. The names of its fields are those of stored files."""

    job_id: str
    attempts: tuple[JobEnd, ...]


def refusal(ends: Sequence[JobEnd], *, restarts: int, requeues_without_progress: int) -> str | None:
    """Return why a job must not be requeued, or None if it may be.

    A start whose end was not recorded counts as a requeue without progress if the ends before and after it found the
    same ledger.

    Args:
        ends: the job's starts, oldest first; at least one.
        restarts: most lost starts of a job that may be requeued.
        requeues_without_progress: requeues in a row that commit nothing, after which the job ends.
    """
    last = ends[-1]
    unchanged = list(takewhile(lambda end: end.committed == last.committed, reversed(ends)))
    idle = last.restart - unchanged[-1].restart
    if idle >= requeues_without_progress:
        return f"{_number(idle, 'requeue')} in a row committed nothing new (at most {requeues_without_progress})"
    lost = sum(end.lost for end in ends)
    if lost > restarts:
        return f"{_number(lost, 'start')} lost their driver, workers or batch node (at most {restarts})"
    return None


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def committed_so_far(ledger: Ledger) -> tuple[int, int]:
    """Return the number of closed steps, and of commits in later steps. Every commit changes one of them. No commit is
    read, so the call is as fast for a long run, and damaged commits do not matter."""
    closed = ledger.closed_until()
    return closed, sum(address.step >= closed for address in ledger.open_addresses())


def note_end(folder: Path, job_id: str, end: JobEnd) -> Sequence[JobEnd]:
    """Record the end of a start in a run's `job/`, and return the ends of all starts of this job, oldest first. An
    end that is recorded already stays. Ends of an earlier job are dropped, because a new submission starts afresh.

    Raises:
        StoreError: the file is damaged.
        OSError: it cannot be written.
    """
    ends = _ends(folder / _FILE, job_id)
    if end.restart not in {one.restart for one in ends}:
        ends = [*ends, end]
        text = codec.encode(_StoredEnds(job_id, tuple(ends)), indent=1) + "\n"
        files.write(files.open_root(str(folder)), _FILE, text.encode())
    return ends


def _ends(path: Path, job_id: str) -> list[JobEnd]:
    if not path.is_file():
        return []
    try:
        noted = codec.decode(_StoredEnds, path.read_bytes())
    except codec.NotARecord as error:
        raise StoreError(f"{path} is not what was written: {error}") from error
    return list(noted.attempts) if noted.job_id == job_id else []
