"""Attempts and results as the edges of Dask's graph: which futures a child depends on, and whose error is whose.

    parent's future ──edge──► child's future: Dask raises in the child what the parent raised, before the child begins

May import distributed, pipeline.driver.context, pipeline.workers.messages and pipeline.graph.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from distributed import Future

from pipeline.driver.context import WorkerKey
from pipeline.graph.dispatch import Submit
from pipeline.graph.graph import Node
from pipeline.workers.messages import Outcome
from storage.address import Address

LINEAGE = 8
"""Turns after which no result is an edge to the next turn."""
_WITHOUT_RESULT = ("error", "cancelled", "lost")


@dataclass
class Attempt:
    """One submission of a node, to rank 0 of a gang or to a replica."""

    submit: Submit
    name: str
    future: Future
    ran_ahead: bool
    """Of its parents: it depends on their futures."""
    ready: float | None
    """When all its parents were done; None while they are not."""
    num_ranks: int = 1
    """That do it together; rank 0 has the future and reports for all of them."""
    verdict_at: float = math.inf
    """When the errors it has are taken for its own, and no longer for a peer's death."""
    again_at: float = math.inf
    """When its node is submitted again, after an error that may pass; until then it holds its slot."""
    outcome: Outcome | None = None
    errors: dict[int, BaseException] = field(default_factory=dict)
    """By rank (or of the one replica, by its index)."""

    @property
    def worker(self) -> WorkerKey:
        """Whose future it is: rank 0's, or a replica's."""
        return self.submit.gang, self.submit.replica


@dataclass(frozen=True)
class Result:
    """Of a finished node: its future, the worker whose that is, and the turn it ran in."""

    future: Future
    worker: WorkerKey
    turn: int


def edges(
    child: Node, worker: WorkerKey, attempts: Mapping[Address, Attempt], results: Mapping[Address, Result]
) -> list[Future]:
    """The parents' futures that a child on this worker depends on (see the module's docstring for which, and why)."""
    found = []
    for parent in child.parents:
        result = results.get(parent)
        if parent in attempts:
            found.append(attempts[parent].future)
        elif result is not None and result.worker == worker and (child.turn % LINEAGE or result.turn == child.turn):
            found += [result.future] if result.future.status not in _WITHOUT_RESULT else []
    return found


def fell_with_a_parent(attempt: Attempt, attempts: Mapping[Address, Attempt]) -> bool:
    """Whether the error of an attempt that ran ahead is a parent's, which is not decided upon yet: then the node never
    began, and runs again when the parent does."""
    parents = (attempts.get(parent) for parent in attempt.submit.node.parents) if attempt.ran_ahead else ()
    return any(p is not None and p.outcome is None and p.future.status == "error" for p in parents)
