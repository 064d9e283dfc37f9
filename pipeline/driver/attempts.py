"""Attempts at nodes: how they are submitted, what they depend on, what became of them, and when they run again.

    submit ──► under way ──rank 0 reported─────► done: its future is a result, until `release`
                  │ │
                  │ └─ its worker is a suspect ──► abandoned: it runs elsewhere too; whichever commits first counts
                  ├─── lost with its worker, or overdue ──► waits again in Dispatch, up to `cluster.attempts` times
                  └─── raised ──► the run ends; for what may pass (the store was away) the same, 2 s to 60 s later

A node's Dask key names its stage, step and shard (`task_keys`); a later attempt adds its number, because a key whose
old future is still held anywhere returns its old error. On a gang it is one task: rank 0 passes the
call on to its peers (`pipeline.workers.gang_calls`), and reports when all have done their part; what one of them raised
is reported by itself, at once.

A parent's future is passed as an argument if it is still under way (a FREE node runs ahead of it), or if its result
lies in the very process that the child runs in. Not otherwise: Dask would fetch the result, and wait for ever for a
process that is stopped or does not let go of its interpreter; and whatever died would be computed again with all its
ancestors. Dispatch has seen to the order, and the output is in the store. Lineage is cut every `LINEAGE` turns, too:
Dask remembers all ancestors of a task that it remembers, and would hold the whole run.

May import distributed, pipeline.driver.{context, edges, supervision, task_keys, verdict}, pipeline.workers and below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

from distributed import Future

from pipeline.driver.context import Context, StageFailed, WorkerKey
from pipeline.driver.edges import Attempt, Result, edges, fell_with_a_parent
from pipeline.driver.supervision import Supervision, restart_unit
from pipeline.driver.task_keys import task_key
from pipeline.driver.verdict import (
    LOST,
    PEER_GRACE_S,
    Verdict,
    back_off_s,
    describe,
    error_of,
    error_of_rank,
    how_to_repeat,
    passes,
    verdict,
)
from pipeline.graph.dispatch import Submit
from pipeline.graph.gangs import Mode
from pipeline.graph.graph import Node
from pipeline.observe.journal import Event, EventKind
from pipeline.workers.entry import run_node_task
from pipeline.workers.messages import Call, Outcome, RankFailure, pin_resource, slot_resource, worker_name
from stages.models.errors import RanksMissing
from stages.models.protocol import MODEL_ROLES
from storage.address import Address


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
            times = f"{context.settings.attempts} times (cluster.attempts)"
            raise StageFailed(f"{address} was lost with its worker {times}")
        index = 0 if submit.mode is Mode.ORDERED else submit.replica
        num_ranks = gang.workers if submit.mode is Mode.ORDERED and node.role in MODEL_ROLES else 1
        name = f"a{submit.attempt}-{context.name}"
        future = self._submit_to(index, submit, name, num_ranks)
        ahead = not self._parents_done(node)
        self._attempts[address] = Attempt(submit, name, future, ahead, None if ahead else context.now(), num_ranks)
        at = worker_name(submit.gang, index)
        what = {"gang": submit.gang, "worker": at, "attempt": name, "version": node.chosen_version}
        context.journal.now(EventKind.SUBMITTED, **_event_fields(address), **what)
        context.watch(future, (submit.gang, index), address)

    def _submit_to(self, index: int, submit: Submit, name: str, num_ranks: int) -> Future:
        """Submits an attempt to one rank or replica."""
        node = submit.node
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
            peers=tuple(self._supervision.address((submit.gang, rank)) for rank in range(1, num_ranks)),
        )
        pin = pin_resource if submit.mode is Mode.FREE else slot_resource
        return self._context.client.submit(
            run_node_task,
            call,
            *edges(node, (submit.gang, index), self._attempts, self._results),
            key=task_key(node.address, name if submit.attempt else None),
            resources={pin(submit.gang, index): 1},
            # of equals Dask begins the last first; dispatch takes it that shards come in their order (`graph.queues`)
            priority=-(100 * node.turn + node.priority[1] + node.address.shard / 2**20),
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
            attempt.outcome = outcome
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
        error = error_of(future)
        attempt = self._attempts.get(address)
        if attempt is not None and attempt.future is future:
            if attempt.outcome is None and not fell_with_a_parent(attempt, self._attempts):
                attempt.errors[worker[1]] = error
                self._judge(attempt)
            return
        abandoned = self._abandoned.get(worker, {}).get(address)
        if abandoned is not None and abandoned.future is future and not isinstance(error, LOST):
            self._came_back(worker, abandoned, None)

    def rank_failed(self, failure: RankFailure) -> None:
        """A rank other than 0 raised, or is lost.

        Raises:
            StageFailed: with an error of the stage's own.
        """
        attempt = self._attempts.get(failure.address)
        if attempt is not None and attempt.name == failure.attempt:
            attempt.errors[failure.index] = error_of_rank(failure)
            self._judge(attempt)

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
                attempt.future.release()
        self.release([address for address, result in self._results.items() if result.worker in unit])

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
            if attempt.again_at <= self._context.now():
                self._reset(self._context.dispatch.lost([address]))
            elif attempt.verdict_at <= self._context.now():
                self._failed(attempt)
            elif self._due(attempt) <= self._context.now():
                self._overdue(address, attempt)

    def release(self, addresses: Iterable[Address]) -> None:
        """Lets go of the results of nodes that no later node depends on."""
        for address in addresses:
            if address in self._results:
                self._results.pop(address).future.release()

    def close(self) -> None:
        """Lets go of everything that is out; what a stage is in the middle of ends with its process."""
        abandoned = [attempt for of_worker in self._abandoned.values() for attempt in of_worker.values()]
        for attempt in [*self._attempts.values(), *abandoned]:
            attempt.future.release()
        self._attempts.clear()
        self._abandoned.clear()
        self.release(list(self._results))

    # ---- how -------------------------------------------------------------------------------------------------------

    def _judge(self, attempt: Attempt) -> None:
        match verdict(attempt.num_ranks, attempt.outcome is not None, attempt.errors.values()):
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
            other.future.release()
        self._results[node.address] = Result(attempt.future, attempt.worker, node.turn)
        self._context.dispatch.done(node.address)
        first, index = attempt.outcome, attempt.submit.replica
        assert first is not None, f"{node.address} is done, and nobody reported it"
        for rank in range(index, index + attempt.num_ranks):
            self._supervision.made_progress((gang, rank))
        for outcome in (first, *first.peers):
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
        self._on_done(node, first)

    def _failed(self, attempt: Attempt) -> None:
        """Has run again what was lost, or raised what may pass; raises StageFailed for what is wrong."""
        address, gang = attempt.submit.node.address, attempt.submit.gang
        for index, error in attempt.errors.items():
            detail = describe(error)[:500]
            self._context.journal.now(EventKind.FAILED, **_event_fields(address), rank=index, gang=gang, detail=detail)
        lost = [error for error in attempt.errors.values() if isinstance(error, LOST)]
        if not lost:
            return self._raised(attempt)
        for dead in filter(None, map(self._supervision.worker_of, lost)):
            self._supervision.lost(dead, f"{address}: {type(lost[0]).__name__}")
        if self._attempts.get(address) is not attempt:
            return  # it was among what its worker had
        missing = next((error for error in lost if isinstance(error, RanksMissing)), None)
        if missing is not None:
            self._supervision.lost((gang, missing.ranks[0]), str(missing))
        elif attempt.num_ranks > 1:  # its workers are well, but some may have begun, and wait for the rest
            self._supervision.lost((gang, 0), f"{address}: {type(lost[0]).__name__} on a part of its ranks")
        else:
            self._reset(self._context.dispatch.lost([address]))

    def _raised(self, attempt: Attempt) -> None:
        """A stage raised. What may pass is tried again: by a replica or a single rank after a while, by a gang when it
        is built anew, since its other ranks may be in the middle of a collective."""
        node, gang, dispatch = attempt.submit.node, attempt.submit.gang, self._context.dispatch
        times = dispatch.losses(node.address) + 1
        if times >= self._context.settings.attempts or not all(map(passes, attempt.errors.values())):
            repeat = how_to_repeat(node, self._context.settings.run_dir)
            raise self._supervision.failure(f"{node.address} raised", gang, attempt.errors, repeat)
        what = f"{node.address}: {describe(next(iter(attempt.errors.values())))[:500]}"
        if attempt.num_ranks > 1:
            return self._supervision.lost((gang, 0), what)
        attempt.again_at = self._context.now() + back_off_s(times)
        detail = f"{what}; tried again in {back_off_s(times):g} s"
        self._context.journal.now(EventKind.WARNED, **_event_fields(node.address), gang=gang, detail=detail)

    def _came_back(self, worker: WorkerKey, attempt: Attempt, outcome: Outcome | None) -> None:
        """An abandoned attempt ended, well (then the node is done, whichever attempt committed first) or not. Its
        worker is alive after all, and gets work again when it owes nothing more."""
        node, abandoned = attempt.submit.node, self._abandoned[worker]
        del abandoned[node.address]
        if not abandoned:
            del self._abandoned[worker]
            self._supervision.trust(worker)
        if outcome is not None and not self._context.dispatch.is_done(node.address):
            attempt.outcome = outcome
            self._done(attempt)
        else:
            attempt.future.release()

    def _reset(self, addresses: Iterable[Address], abandon_on: WorkerKey | None = None) -> None:
        """Lets go of attempts that were given up; those on the worker `abandon_on` are listened to all the same."""
        for address in addresses:
            attempt = self._attempts.pop(address)
            if attempt.worker == abandon_on:
                self._abandoned.setdefault(abandon_on, {})[address] = attempt
            else:
                attempt.future.release()

    def _due(self, attempt: Attempt) -> float:
        """When an attempt is overdue. A node in a slot begins when it is submitted; others wait for their parents, and
        behind the nodes before them on the same worker, so they are overdue when it finishes nothing."""
        if attempt.again_at < math.inf or (attempt.ready is None and not self._parents_done(attempt.submit.node)):
            return math.inf
        if attempt.ready is None:
            attempt.ready = self._context.now()
        since = attempt.ready
        if attempt.submit.mode is not Mode.SLOT:
            since = max(since, self._supervision.last_progress(attempt.worker))
        return since + self._context.settings.deadline_s

    def _overdue(self, address: Address, attempt: Attempt) -> None:
        dispatch, worker = self._context.dispatch, attempt.worker
        detail = f"overdue: cluster.deadline_s = {self._context.settings.deadline_s:g}"
        self._context.journal.now(
            EventKind.FAILED, **_event_fields(address), gang=worker[0], attempt=attempt.name, detail=detail
        )
        if attempt.ran_ahead:  # it waits for a parent's result, in a process that hangs: the store has it, too
            self._reset(dispatch.lost([address]))
        elif attempt.submit.mode is not Mode.ORDERED and dispatch.can_spare(*worker):
            self._supervision.suspect(worker)
        else:
            self._supervision.lost(worker, detail)


def _event_fields(address: Address) -> dict[str, Any]:
    return {"stage": address.stage, "step": address.step, "shard": address.shard}
