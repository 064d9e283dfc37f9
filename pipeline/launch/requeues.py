"""Decide whether a job may be requeued again, from the ends of its attempts (`job/attempts.json`).

An attempt is one start of the job by Slurm.

    an attempt ends ────► its script, or another node, asks ────► its end is recorded ─────► requeue, or end the job
    an attempt starts ──► its script asks about the one before ──► recorded if it is not ──► continue, or end the job

The second question is for attempts that Slurm itself requeued: a preempted job, or one whose only node failed. Nothing
ran that could ask when they ended. The file is in the run's directory, so it survives a node's failure. Progress is
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
"""Number of attempts at a job that may lose their driver, workers or batch node. The job ends after one more: nodes
that fail so often need somebody to look. Time limits and preemption do not count."""
MOST_IDLE = 3
"""Number of requeues in a row, for any reason, without a new commit, after which a job ends. Once may be bad luck, as
when a node fails early; after three times it would go on for ever."""


@dataclass(frozen=True)
class AttemptEnd:
    """End of one attempt at a job."""

    restart: int
    """Requeues of the job before this attempt (SLURM_RESTART_COUNT)."""
    committed: tuple[int, int]
    """`committed_so_far` when the attempt had ended."""
    because: str
    """Reason why it ended, for people."""
    lost: bool
    """True if its driver, workers or batch node were lost. False after a time limit or a requeue by Slurm itself."""


@dataclass(frozen=True)
class _Attempts:
    """The content of the file."""

    job_id: str
    attempts: tuple[AttemptEnd, ...]


def refusal(ends: Sequence[AttemptEnd], *, restarts: int, requeues_without_progress: int) -> str | None:
    """Return why a job must not be requeued, or None if it may be.

    A restart that nobody noted counts as well: its end is between two others that found the same ledger.

    Args:
        ends: the job's attempts, oldest first; at least one.
        restarts: most attempts after which the job is requeued although they were lost.
        requeues_without_progress: requeues in a row that commit nothing, after which the job ends.
    """
    last = ends[-1]
    unchanged = list(takewhile(lambda end: end.committed == last.committed, reversed(ends)))
    idle = last.restart - unchanged[-1].restart
    if idle >= requeues_without_progress:
        return f"{_number(idle, 'requeue')} in a row committed nothing new (at most {requeues_without_progress})"
    lost = sum(end.lost for end in ends)
    if lost > restarts:
        return f"{_number(lost, 'attempt')} lost their driver, workers or batch node (at most {restarts})"
    return None


def _number(count: int, thing: str) -> str:
    return f"{count} {thing}{'s' * (count != 1)}"


def committed_so_far(ledger: Ledger) -> tuple[int, int]:
    """Return the number of closed steps, and of commits in later steps. Every commit changes one of them. No commit is
    opened, so a long run takes no longer, and damaged commits do no harm."""
    closed = ledger.closed_until()
    return closed, sum(address.step >= closed for address in ledger.open_addresses())


def note_end(folder: Path, job_id: str, end: AttemptEnd) -> Sequence[AttemptEnd]:
    """Record the end of an attempt in a run's `job/`, and return the ends of all attempts of this job, oldest first. An
    end that is recorded already stays. Ends of an earlier job are dropped, because a new submission starts afresh.

    Raises:
        StoreError: the file is damaged.
        OSError: it cannot be written.
    """
    ends = _ends(folder / _FILE, job_id)
    if end.restart not in {one.restart for one in ends}:
        ends = [*ends, end]
        text = codec.encode(_Attempts(job_id, tuple(ends)), indent=1) + "\n"
        files.write(files.open_root(str(folder)), _FILE, text.encode())
    return ends


def _ends(path: Path, job_id: str) -> list[AttemptEnd]:
    if not path.is_file():
        return []
    try:
        noted = codec.decode(_Attempts, path.read_bytes())
    except codec.NotARecord as error:
        raise StoreError(f"{path} is not what was written: {error}") from error
    return list(noted.attempts) if noted.job_id == job_id else []
