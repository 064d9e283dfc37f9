"""What became of an attempt, from what its ranks raised: whether a process was lost, or something is wrong.

May import distributed, pipeline.graph.graph, pipeline.workers.messages, stages.models.errors and storage.retries.
"""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import CancelledError
from enum import StrEnum
from pathlib import Path

from distributed import Future
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

from pipeline.graph.graph import Node
from pipeline.workers.messages import PEER_ERRORS, FailureKind, RankFailure, WorkerLost
from stages.models.errors import RanksMissing
from storage.retries import may_pass

LOST = (KilledWorker, WorkerLost, RanksMissing, CancelledError, CommClosedError, NoWorkerError, NoValidWorkerError)
"""What a future raises whose process, or that of a peer, is lost: nothing is wrong with the stage."""
_LONGEST_BACK_OFF_S = 60.0
PEER_GRACE_S = 5.0
"""For the news of a peer's death, before such an error is taken for the process's own."""


class RankError(Exception):
    """What a rank other than 0 raised, of which only name and text came here."""

    def __init__(self, name: str, text: str, passing: bool = False) -> None:
        super().__init__(name, text)
        self.name = name
        self.text = text
        self.passing = passing
        """Whether a later attempt may succeed."""


class DisturbedRank(RankError, RuntimeError):
    """One that it would also have raised if a peer had died."""


class Verdict(StrEnum):
    """What becomes of an attempt, from what its ranks have come to."""

    OPEN = "open"
    """Ranks are still running, and none has failed."""
    UNCLEAR = "unclear"
    """A rank raised what it would also raise if a peer had died: the news of a death may be on its way."""
    DONE = "done"
    FAILED = "failed"


def verdict(num_ranks: int, reported: bool, errors: Collection[BaseException]) -> Verdict:
    """What becomes of an attempt at a node on `num_ranks` ranks, of which some raised; `reported`: rank 0 has said that
    all of them did their part."""
    if reported:
        return Verdict.DONE
    if not errors:
        return Verdict.OPEN
    own = any(isinstance(error, LOST) or not isinstance(error, PEER_ERRORS) for error in errors)
    return Verdict.FAILED if own or len(errors) == num_ranks else Verdict.UNCLEAR


def error_of(future: Future) -> BaseException:
    """Why a future that has ended has no result."""
    if future.status == "error":
        return future.exception()
    return CancelledError(f"{future.key} was {future.status}")


def error_of_rank(failure: RankFailure) -> BaseException:
    """The error that a rank reported, of a class that `verdict` knows."""
    match failure.kind:
        case FailureKind.LOST:
            return WorkerLost(failure.worker, failure.incarnation)
        case FailureKind.MISSING:
            return RanksMissing(str(failure.address), failure.missing, failure.text)
        case FailureKind.PEER:
            return DisturbedRank(failure.error, failure.text, failure.passing)
        case FailureKind.OWN:
            return RankError(failure.error, failure.text, failure.passing)


def passes(error: BaseException) -> bool:
    """Whether what raised this may succeed when it is tried again later: nothing is wrong with the stage."""
    return error.passing if isinstance(error, RankError) else may_pass(error)


def back_off_s(times: int) -> float:
    """Seconds to wait after such an error, the `times`-th of a node."""
    return min(_LONGEST_BACK_OFF_S, 2.0**times)


def describe(error: BaseException) -> str:
    """Its class and what it says, in one line, whichever rank raised it."""
    if isinstance(error, RankError):
        return f"{error.name}: {error.text}"
    return f"{type(error).__name__}: {error}"


def how_to_repeat(node: Node, run_dir: Path | None) -> str:
    """For a person: what a node that failed is made from, and how to run it alone."""
    address, inputs = node.address, ", ".join(map(str, node.inputs)) or "none but the prompts"
    made_from = f"Its inputs: {inputs}; weights v{node.version}"
    if run_dir is None or address.stage == "publish":
        return made_from
    shard = f" --shard {address.shard}" if address.shard else ""
    command = f"stageline replay {run_dir} --step {address.step} --stage {address.stage}{shard}"
    return f"{made_from}. To run it alone: `{command}`"
