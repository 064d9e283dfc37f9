"""Attempts at nodes: how they are submitted, what they depend on, what became of them, and when they run again.

    submit ──► under way ──all ranks reported──► done: its futures are a result, until `release`
                  │ │
                  │ └─ its worker is a suspect ──► abandoned: it runs elsewhere too; whichever commits first counts
                  └─── lost with its worker, or overdue ──► waits again in Dispatch, up to `cluster.attempts` times
                       raised ──► the run ends

A node's Dask key is (stage, step, shard[, rank]), so that the dashboard groups by stage; a later attempt adds its
number, because a key whose old future is still held anywhere returns its old error.

A parent's future is passed as an argument if it is still under way (a FREE node runs ahead of it), or if its result
lies in the very process that the child runs in. Not otherwise: Dask would fetch the result, and wait for ever for a
process that is stopped or does not let go of its interpreter; and whatever died would be computed again with all its
ancestors. Dispatch has seen to the order, and the output is in the store. Lineage is cut every `LINEAGE` turns, too:
Dask remembers all ancestors of a task that it remembers, and would hold the whole run.

May import distributed, pipeline.driver.{context, supervision}, pipeline.workers and below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from distributed import Future

from pipeline.driver.context import Context, StageFailed, WorkerKey, let_go
from pipeline.driver.supervision import LOST, PEER_ERRORS, PEER_GRACE_S, Supervision, error_of, restart_unit
from pipeline.graph.dispatch import Mode, Submit
from pipeline.graph.graph import Node
from pipeline.observe.journal import Event, EventKind
from pipeline.workers.entry import run_node_task
from pipeline.workers.messages import Call, Outcome, pin_resource, slot_resource, worker_name
from stages.models.errors import RanksMissing
from stages.models.protocol import MODEL_ROLES
from storage.address import Address

LINEAGE = 8
"""Turns after which no result is an edge to the next turn."""
_WITHOUT_RESULT = ("error", "cancelled", "lost")


class Verdict(StrEnum):
    """What becomes of an attempt, from what its ranks have come to."""

    OPEN = "open"
    """Ranks are still running, and none has failed."""
    UNCLEAR = "unclear"
    """A rank raised what it would also raise if a peer had died: the news of a death may be on its way."""
    DONE = "done"
    FAILED = "failed"


@dataclass
class Attempt:
    """One submission of a node: a future for each rank (or for the one replica), by index."""

    submit: Submit
    name: str
    futures: dict[int, Future]
    ran_ahead: bool
    """Of its parents: it depends on their futures."""
    ready: float | None
    """When all its parents were done; None while they are not."""
    verdict_at: float = math.inf
    """When the errors it has are taken for its own, and no longer for a peer's death."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    @property
    def first(self) -> Future:
        """The future that holds the reference: rank 0's."""
        return self.futures[min(self.futures)]

    @property
    def worker(self) -> WorkerKey:
        """SLOT, FREE: where it runs."""
        return self.submit.gang, self.submit.replica


@dataclass(frozen=True)
class Result:
    """Of a finished node: its futures by rank or replica, the gang and the turn it ran in."""

    futures: Mapping[int, Future]
    gang: str
    turn: int


def verdict(num_ranks: int, num_outcomes: int, errors: Collection[BaseException]) -> Verdict:
    """What becomes of an attempt at a node on `num_ranks` ranks, of which some finished and some raised."""
    ended = num_outcomes + len(errors) == num_ranks
    if not errors:
        return Verdict.DONE if ended else Verdict.OPEN
    own = any(isinstance(error, LOST) or not isinstance(error, PEER_ERRORS) for error in errors)
    return Verdict.FAILED if ended or own else Verdict.UNCLEAR


def outliers(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Of the ranks' outcomes of one node the first, and those that began or ended at another time, by more than a tenth
    of its seconds (and 0.1 s): hundreds of ranks that act together have one thing to say."""
    first, *others = outcomes
    apart_s = max(0.1, 0.1 * (first.finished - first.started))
    return [
        first,
        *(
            other
            for other in others
            if abs(other.started - first.started) > apart_s or abs(other.finished - first.finished) > apart_s
        ),
    ]


def edges(
    child: Node, worker: WorkerKey, attempts: Mapping[Address, Attempt], results: Mapping[Address, Result]
) -> list[Future]:
    """The parents' futures that a child on this worker depends on (see the module's docstring for which, and why)."""
    gang, index = worker
    found = []
    for parent in child.parents:
        result = results.get(parent)
        if parent in attempts:
            found.append(attempts[parent].first)
        elif result is not None and result.gang == gang and (child.turn % LINEAGE or result.turn == child.turn):
            own = result.futures.get(index)
            found += [own] if own is not None and own.status not in _WITHOUT_RESULT else []
    return found


class Attempts:
    """Owns the futures of nodes: under way, abandoned on a suspect worker, and of results that later nodes are run
    beside."""

    def __init__(self, context: Context, supervision: Supervision, on_done: Callable[[Node, Outcome], None]) -> None:
        """`on_done(node, outcome)` is called once for each node that has its commit, with rank 0's outcome."""
        self._context = context
        self._supervision = supervision
        self._on_done = on_done
        self._attempts: dict[Address, Attempt] = {}
        self._abandoned: dict[WorkerKey, dict[Address, Attempt]] = {}
        """By suspect worker: attempts that were given up and have not come back."""
        self._results: dict[Address, Result] = {}

    # ---- out -------------------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """Carries out an instruction of Dispatch.

        Raises:
            StageFailed: the node was lost too often.
        """
        context, node, gang = self._context, submit.node, self._context.gangs[submit.gang]
        address = node.address
        if context.dispatch.losses(address) >= context.settings.attempts:
            raise StageFailed(
                f"{address} was lost with its worker {context.settings.attempts} times (cluster.attempts)"
            )
        if submit.mode is not Mode.ORDERED:
            indices: Iterable[int] = (submit.replica,)
        else:
            indices = range(gang.workers) if node.role in MODEL_ROLES else (0,)
        name = f"a{submit.attempt}-{context.name}"
        futures = {index: self._submit_to(index, submit, name) for index in indices}
        ahead = not self._parents_done(node)
        self._attempts[address] = Attempt(submit, name, futures, ahead, None if ahead else context.now())
        # A FREE node may wait there for its parents: nothing that the worker is doing.
        at = None if submit.mode is Mode.FREE else worker_name(submit.gang, min(futures))
        context.journal.now(EventKind.SUBMITTED, **_event_fields(address), gang=submit.gang, worker=at, attempt=name)
        for index, future in futures.items():
            context.watch(future, (submit.gang, index), address)

    def _submit_to(self, index: int, submit: Submit, name: str) -> Future:
        """Submits an attempt to one rank or replica."""
        node, gang = submit.node, self._context.gangs[submit.gang]
        key: tuple[object, ...] = (node.address.stage, node.address.step, node.address.shard)
        key += (index,) if gang.ordered and gang.workers > 1 else ()
        key += (name,) if submit.attempt else ()
        worker = self._supervision.spec((submit.gang, index))
        call = Call(
            address=node.address,
            attempt=name,
            version=node.version,
            inputs=node.inputs,
            gang=submit.gang,
            worker=worker.name,
            incarnation=worker.incarnation,
            sequence=submit.sequence,
            ledger=self._context.settings.ledger,
        )
        pin = pin_resource if submit.mode is Mode.FREE else slot_resource
        return self._context.client.submit(
            run_node_task,
            call,
            *edges(node, (submit.gang, index), self._attempts, self._results),
            key=key,
            resources={pin(submit.gang, index): 1},
            priority=-(100 * node.turn + node.priority[1]),
            retries=0,
            pure=False,
        )

    def _parents_done(self, node: Node) -> bool:
        return all(self._context.dispatch.is_done(parent) for parent in node.parents)

    # ---- what happened ---------------------------------------------------------------------------------------------

    def reported(self, name: str, outcome: Outcome) -> None:
        """A worker reported that it finished its part of the attempt called `name`."""
        attempt = self._attempts.get(outcome.address)
        if attempt is not None and attempt.name == name:
            attempt.outcomes[outcome.index] = outcome
            self._judge(attempt)
            return
        for worker, abandoned in self._abandoned.items():
            attempt = abandoned.get(outcome.address)
            if attempt is not None and attempt.name == name:
                self._came_back(worker, attempt, outcome)
                return

    def future_ended(self, worker: WorkerKey, address: Address, future: Future) -> None:
        """A node's future ended: with an error, or else its outcome has been reported.

        Raises:
            StageFailed: with an error of the stage's own.
        """
        if future.status == "finished":
            return
        error, index = error_of(future), worker[1]
        attempt = self._attempts.get(address)
        if attempt is not None and attempt.futures.get(index) is future:
            if index not in attempt.outcomes:
                attempt.errors[index] = error
                self._judge(attempt)
            return
        abandoned = self._abandoned.get(worker, {}).get(address)
        if abandoned is not None and abandoned.futures[index] is future and not isinstance(error, LOST):
            self._came_back(worker, abandoned, None)

    def worker_down(self, worker: WorkerKey, suspect: bool) -> None:
        """A worker gets no more work. What it had runs again; a suspect's attempts are abandoned, but listened to. One
        that is lost takes all that its restart unit had with it, results too."""
        reset = self._context.dispatch.worker_down(*worker)
        if suspect:
            self._reset(reset, abandon_on=worker)
            return
        self._reset(reset)
        unit = restart_unit(self._context.gangs[worker[0]], worker[1])
        for one in unit:
            for attempt in self._abandoned.pop(one, {}).values():
                let_go(attempt.futures)
        indices = [index for _, index in unit]
        held = [a for a, r in self._results.items() if r.gang == worker[0] and not r.futures.keys().isdisjoint(indices)]
        self.release(held)

    def release_slots(self, worker: WorkerKey, addresses: Iterable[Address]) -> None:
        """These nodes do nothing any more but wait on that worker, if they are still there."""
        for address in addresses:
            attempt = self._attempts.get(address)
            if attempt is not None and attempt.worker == worker:
                self._context.dispatch.release_slot(address)

    def check_deadlines(self) -> None:
        """Decides on attempts whose errors stayed unclear, and on those that are overdue.

        Raises:
            StageFailed: an error is taken for the stage's own.
        """
        for address, attempt in list(self._attempts.items()):
            if self._attempts.get(address) is not attempt:
                continue
            if attempt.verdict_at <= self._context.now():
                self._failed(attempt)
            elif self._due(attempt) <= self._context.now():
                self._overdue(address, attempt)

    def release(self, addresses: Iterable[Address]) -> None:
        """Lets go of the results of nodes that no later node depends on."""
        for address in addresses:
            if address in self._results:
                let_go(self._results.pop(address).futures)

    def close(self) -> None:
        """Lets go of everything that is out; what a stage is in the middle of ends with its process."""
        abandoned = [attempt for of_worker in self._abandoned.values() for attempt in of_worker.values()]
        for attempt in [*self._attempts.values(), *abandoned]:
            let_go(attempt.futures)
        self._attempts.clear()
        self._abandoned.clear()
        self.release(list(self._results))

    # ---- how -------------------------------------------------------------------------------------------------------

    def _judge(self, attempt: Attempt) -> None:
        match verdict(len(attempt.futures), len(attempt.outcomes), attempt.errors.values()):
            case Verdict.DONE:
                self._done(attempt)
            case Verdict.FAILED:
                self._failed(attempt)
            case Verdict.UNCLEAR:
                attempt.verdict_at = min(attempt.verdict_at, self._context.now() + PEER_GRACE_S)

    def _done(self, attempt: Attempt) -> None:
        node, gang, journal = attempt.submit.node, attempt.submit.gang, self._context.journal
        other = self._attempts.pop(node.address, attempt)
        if other is not attempt:  # `attempt` had been given up, and was the first to finish after all
            let_go(other.futures)
        self._results[node.address] = Result(attempt.futures, gang, node.turn)
        self._context.dispatch.done(node.address)
        outcomes = [attempt.outcomes[index] for index in sorted(attempt.outcomes)]
        for outcome in outcomes:
            self._supervision.made_progress((gang, outcome.index))
        for outcome in outliers(outcomes):
            where = {**_event_fields(node.address), "rank": outcome.index, "gang": gang, "worker": outcome.worker}
            seconds = outcome.finished - outcome.started
            journal.append(Event(outcome.started, EventKind.STARTED, **where))
            journal.append(
                Event(outcome.finished, EventKind.FINISHED, **where, seconds=seconds, store_s=outcome.store_s)
            )
            for warning in outcome.warnings:
                journal.append(Event(outcome.finished, EventKind.WARNED, **where, detail=warning))
        if node.stage == "publish":
            journal.now(EventKind.PUBLISHED, **_event_fields(node.address))
        self._on_done(node, outcomes[0])

    def _failed(self, attempt: Attempt) -> None:
        """Has what was lost run again; raises StageFailed for what is wrong."""
        address, gang = attempt.submit.node.address, attempt.submit.gang
        for index, error in attempt.errors.items():
            detail = f"{type(error).__name__}: {error}"[:500]
            self._context.journal.now(EventKind.FAILED, **_event_fields(address), rank=index, gang=gang, detail=detail)
        lost = [error for error in attempt.errors.values() if isinstance(error, LOST)]
        if not lost:
            raise self._supervision.failure(f"{address} raised", gang, attempt.errors)
        for dead in filter(None, map(self._supervision.worker_of, lost)):
            self._supervision.lost(dead, f"{address}: {type(lost[0]).__name__}")
        if self._attempts.get(address) is not attempt:
            return  # it was among what its worker had
        missing = next((error for error in lost if isinstance(error, RanksMissing)), None)
        if missing is not None:
            self._supervision.lost((gang, missing.ranks[0]), str(missing))
        elif len(attempt.futures) > 1:  # its workers are well, but some may have begun, and wait for the rest
            self._supervision.lost((gang, 0), f"{address}: {type(lost[0]).__name__} on a part of its ranks")
        else:
            self._reset(self._context.dispatch.lost([address]))

    def _came_back(self, worker: WorkerKey, attempt: Attempt, outcome: Outcome | None) -> None:
        """An abandoned attempt ended, well (then the node is done, whichever attempt committed first) or not. Its
        worker is alive after all, and gets work again when it owes nothing more."""
        node, abandoned = attempt.submit.node, self._abandoned[worker]
        del abandoned[node.address]
        if not abandoned:
            del self._abandoned[worker]
            self._supervision.trust(worker)
        if outcome is not None and not self._context.dispatch.is_done(node.address):
            attempt.outcomes[outcome.index] = outcome
            self._done(attempt)
        else:
            let_go(attempt.futures)

    def _reset(self, addresses: Iterable[Address], abandon_on: WorkerKey | None = None) -> None:
        """Lets go of attempts that were given up; those on the worker `abandon_on` are listened to all the same."""
        for address in addresses:
            attempt = self._attempts.pop(address)
            if attempt.worker == abandon_on:
                self._abandoned.setdefault(abandon_on, {})[address] = attempt
            else:
                let_go(attempt.futures)

    def _due(self, attempt: Attempt) -> float:
        """When an attempt is overdue. A node in a slot begins when it is submitted; others wait for their parents, and
        behind the nodes before them on the same worker, so they are overdue when it finishes nothing."""
        if attempt.ready is None:
            if not self._parents_done(attempt.submit.node):
                return math.inf
            attempt.ready = self._context.now()
        since = attempt.ready
        if attempt.submit.mode is not Mode.SLOT:
            gang = attempt.submit.gang
            since = max(since, *(self._supervision.last_progress((gang, index)) for index in attempt.futures))
        return since + self._context.settings.deadline_s

    def _overdue(self, address: Address, attempt: Attempt) -> None:
        dispatch, worker = self._context.dispatch, attempt.worker
        detail = f"overdue: cluster.deadline_s = {self._context.settings.deadline_s:g}"
        self._context.journal.now(
            EventKind.FAILED, **_event_fields(address), gang=worker[0], attempt=attempt.name, detail=detail
        )
        if attempt.ran_ahead:  # it waits for a parent's result, in a process that hangs: the store has it, too
            self._reset(dispatch.lost([address]))
        elif attempt.submit.mode is not Mode.ORDERED and dispatch.others_up(*worker):
            self._supervision.suspect(worker)
        else:
            self._supervision.lost(worker, detail)


def _event_fields(address: Address) -> dict[str, Any]:
    return {"stage": address.stage, "step": address.step, "shard": address.shard}
