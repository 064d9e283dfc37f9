"""Attempts at nodes: submit nodes with their Dask dependencies, judge results, and run nodes again.

    submit ──► running
                 │ ├─ rank 0 reported ──► done: its future is kept as a result, until `release`
                 │ └─ its worker is a suspect ──► abandoned: the node also runs elsewhere;
                 │                                the first commit counts
                 ├─── lost with its worker, or overdue ──► waits again in Dispatch
                 ├─── raised a transient error (store out of reach) ──► runs again
                 └─── raised any other error ──► the run ends

The run also ends if a node was lost or raised a transient error `cluster.attempts` times.

A node's Dask key names its stage, step and shard (`graph_markers.task_key`). The key of a later attempt also has the
attempt's name. Otherwise Dask would return the error of the earlier attempt, as long as any process still holds its
future.

On an ordered gang, whose ranks act together (`Gang.is_ordered`), a node is one task. Rank 0 passes the call on to its
peers (`pipeline.workers.entry`), and reports when all ranks have finished. A rank that raises reports its error at
once, by itself.

A parent's future becomes a Dask dependency of its child in two cases:

- The parent is still running. A node of mode FREE (`graph.Mode`) is submitted before its parents are done.
- The parent's result lies in the process that runs the child.

In all other cases Dask would have to fetch the result from another process. If that process is stopped or does not
release its interpreter lock, Dask would wait for ever. If the result is lost, Dask would compute it again with all its
ancestors. The run needs no dependencies in Dask: Dispatch keeps the order, and the output is in the store.

Dask keeps all ancestors of a task that it keeps. So dependencies between steps would make Dask hold every task of the
run. To prevent this, a node in every `MAX_LINEAGE`-th step depends only on results of its own step, or on parents that
are still running.

If a parent raises, Dask raises the same error in a dependent child, before the child begins.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from distributed import Future

from pipeline.driver.context import Context, WorkerKey
from pipeline.driver.graph_markers import task_key
from pipeline.driver.supervision import (
    LOSS_ERRORS,
    PEER_GRACE_S,
    AttemptState,
    Supervision,
    attempt_state,
    back_off_s,
    error_text,
    future_error,
    is_retryable,
    rank_error,
    repeat_hints,
    restart_unit,
)
from pipeline.errors import StageFailed
from pipeline.graph.dispatch import Submit
from pipeline.graph.graph import Mode, Node
from pipeline.observe.journal import Event, EventKind
from pipeline.workers.entry import run_node_task
from pipeline.workers.messages import Call, Outcome, RankFailure, pin_resource, slot_resource, worker_name
from stages.models.protocol import RanksMissing
from stages.rewards.protocol import BudgetSpent
from storage.address import Address

MAX_LINEAGE = 8
"""Number of steps after which the chain of tasks in Dask is cut. In a step whose number is a multiple of MAX_LINEAGE,
results of other steps do not become dependencies. Without these cuts Dask would hold every task of the run, because it
keeps all ancestors of a task that it keeps."""
_WITHOUT_RESULT = ("error", "cancelled", "lost")


@dataclass
class Attempt:
    """One submission of a node, to rank 0 of a gang or to a replica."""

    submit: Submit
    name: str
    future: Future
    is_submitted_early: bool
    """True if the attempt was submitted before the node's parents were done. Then it depends on the parents'
    futures."""
    ready_at: float | None
    """Time at which all parents of the node were done; None until then."""
    num_ranks: int = 1
    """Number of ranks that run the node together. Rank 0 has the future and reports for all of them."""
    fails_at: float = math.inf
    """Time from which the attempt's errors count as the stage's own. Until then, a peer's death may be their cause."""
    retry_at: float = math.inf
    """Time at which the node is submitted again after a transient error. Until then the attempt holds its slot."""
    outcome: Outcome | None = None
    errors: dict[int, BaseException] = field(default_factory=dict)
    """Rank, or index of the replica -> its error."""

    @property
    def worker(self) -> WorkerKey:
        """The worker that runs the attempt's future: rank 0 or a replica."""
        return self.submit.gang, self.submit.replica


@dataclass(frozen=True)
class Result:
    """The result of a finished node: its future, the worker that holds it, and the step it was scheduled in."""

    future: Future
    worker: WorkerKey
    scheduled_step: int


def parent_futures(
    child: Node, worker: WorkerKey, attempts: Mapping[Address, Attempt], results: Mapping[Address, Result]
) -> list[Future]:
    """Return the parents' futures that become Dask dependencies of a child on this worker (module docstring)."""
    futures = []
    for parent in child.parents:
        result = results.get(parent)
        if parent in attempts:
            futures.append(attempts[parent].future)
        elif (
            result is not None
            and result.worker == worker
            and (child.scheduled_step % MAX_LINEAGE or result.scheduled_step == child.scheduled_step)
        ):
            futures += [result.future] if result.future.status not in _WITHOUT_RESULT else []
    return futures


def failed_with_parent(attempt: Attempt, attempts: Mapping[Address, Attempt]) -> bool:
    """Return True if `attempt` was submitted early, and the latest attempt at one of the node's parents raised an
    error. Dask then gave `attempt` the error of the parent. The node itself never began, and runs again together with
    the parent."""
    parents = (attempts.get(parent) for parent in attempt.submit.node.parents) if attempt.is_submitted_early else ()
    return any(p is not None and p.outcome is None and p.future.status == "error" for p in parents)


class Attempts:
    """Owns the futures of nodes: running attempts, attempts abandoned on a suspect worker, and results that later nodes
    may depend on."""

    def __init__(self, context: Context, supervision: Supervision, on_done: Callable[[Node, Outcome], None]) -> None:
        """`on_done(node, outcome)` is called once for each node, after its commit. `outcome`: the report of rank 0 or
        of the replica."""
        self._context = context
        self._supervision = supervision
        self._on_done = on_done
        self._attempts: dict[Address, Attempt] = {}
        self._abandoned: dict[WorkerKey, dict[Address, Attempt]] = {}
        """Suspect worker -> its attempts that were given up and have not ended."""
        self._results: dict[Address, Result] = {}

    def submit(self, submit: Submit) -> None:
        """Submit a node to Dask, for the worker that Dispatch chose.

        Raises:
            StageFailed: the node was lost too often.
        """
        context, node, gang = self._context, submit.node, self._context.gangs[submit.gang]
        address = node.address
        if context.dispatch.times_lost(address) >= context.cluster.attempts:
            times = f"{context.cluster.attempts} times (cluster.attempts)"
            raise StageFailed(f"{address} was lost with its worker {times}")
        index = 0 if submit.mode is Mode.ORDERED else submit.replica
        num_ranks = gang.ranks_of(node.role) if submit.mode is Mode.ORDERED else 1
        name = f"a{submit.attempt}-{context.name}"
        future = self._submit_to(index, submit, name, num_ranks)
        ahead = not self._parents_done(node)
        self._attempts[address] = Attempt(submit, name, future, ahead, None if ahead else context.now(), num_ranks)
        at = worker_name(submit.gang, index)
        what = {"gang": submit.gang, "worker": at, "attempt": name, "version": node.chosen_version}
        context.journal.append_now(EventKind.SUBMITTED, **_event_fields(address), **what)
        context.watch_future(future, (submit.gang, index), address)

    def _submit_to(self, index: int, submit: Submit, name: str, num_ranks: int) -> Future:
        """Submit an attempt to the rank or replica `index`, and return its future. `name`: name of the attempt.
        `num_ranks`: number of ranks that run the node together."""
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
            ledger=self._context.settings.ledger_url,
            peers=tuple(self._supervision.address((submit.gang, rank)) for rank in range(1, num_ranks)),
            is_first=not submit.attempt,
        )
        pin = pin_resource if submit.mode is Mode.FREE else slot_resource
        return self._context.client.submit(
            run_node_task,
            call,
            *parent_futures(node, (submit.gang, index), self._attempts, self._results),
            key=task_key(node.address, name if submit.attempt else None),
            resources={pin(submit.gang, index): 1},
            # Dask runs the last of equal priority first; Dispatch expects shards in order (`graph.display`)
            priority=-(100 * node.scheduled_step + node.priority[1] + node.address.shard / 2**20),
            retries=0,
            pure=False,
        )

    def _parents_done(self, node: Node) -> bool:
        return all(self._context.dispatch.is_done(parent) for parent in node.parents)

    # ---- Events ----------------------------------------------------------------------------------------------------

    def on_report(self, outcome: Outcome) -> None:
        """Handle a worker's report that it finished an attempt."""
        attempt = self._attempts.get(outcome.address)
        if attempt is not None and attempt.name == outcome.attempt:
            attempt.outcome = outcome
            self._settle_attempt(attempt)
            return
        for worker, abandoned in self._abandoned.items():
            attempt = abandoned.get(outcome.address)
            if attempt is not None and attempt.name == outcome.attempt:
                self._on_abandoned_end(worker, attempt, outcome)
                return

    def on_future_end(self, worker: WorkerKey, address: Address, future: Future) -> None:
        """Handle the end of a node's future. Without an error do nothing, since the outcome is reported separately.

        Raises:
            StageFailed: the stage itself failed, or a worker was lost too often.
        """
        if future.status == "finished":
            return
        error = future_error(future)
        attempt = self._attempts.get(address)
        if attempt is not None and attempt.future is future:
            if attempt.outcome is None and not failed_with_parent(attempt, self._attempts):
                attempt.errors[worker[1]] = error
                self._settle_attempt(attempt)
            return
        abandoned = self._abandoned.get(worker, {}).get(address)
        if abandoned is not None and abandoned.future is future and not isinstance(error, LOSS_ERRORS):
            self._on_abandoned_end(worker, abandoned, None)

    def on_rank_failure(self, failure: RankFailure) -> None:
        """Handle the error or loss of a rank other than 0.

        Raises:
            StageFailed: the stage itself failed, or a worker was lost too often.
        """
        attempt = self._attempts.get(failure.address)
        if attempt is not None and attempt.name == failure.attempt:
            attempt.errors[failure.index] = rank_error(failure)
            self._settle_attempt(attempt)

    def on_worker_down(self, worker: WorkerKey, suspect: bool) -> None:
        """Run the nodes of a suspect or lost worker again.

        An attempt on a suspect goes on, and its node is done as soon as any of its attempts has committed. A lost
        worker is restarted together with others (`restart_unit`). The attempts and results of all these workers are
        lost."""
        reset = self._context.dispatch.on_worker_down(*worker)
        if suspect:
            self._reset_nodes(reset, abandon_on=worker)
            return
        self._reset_nodes(reset)
        unit = restart_unit(self._context.gangs[worker[0]], worker[1])
        for one in unit:
            for attempt in self._abandoned.pop(one, {}).values():
                attempt.future.release()
        self.release([address for address, result in self._results.items() if result.worker in unit])

    def release_slots(self, worker: WorkerKey, addresses: Iterable[Address]) -> None:
        """Release the slots of the nodes in `addresses` that still run on `worker`. These nodes only wait for rows that
        have migrated to other replicas."""
        for address in addresses:
            attempt = self._attempts.get(address)
            if attempt is not None and attempt.worker == worker:
                self._context.dispatch.release_slot(address)

    def check_deadlines(self) -> None:
        """Find the attempts for which one of three times has come, and handle them:

        - `retry_at`: the attempt had a transient error. The node is submitted again.
        - `fails_at`: some ranks raised errors that the death of another rank may have caused. No death was reported
          until this time, so the errors now count as the stage's own.
        - The attempt's deadline: the attempt is overdue.

        Raises:
            StageFailed: the stage itself failed, or a worker was lost too often.
        """
        for address, attempt in list(self._attempts.items()):
            if self._attempts.get(address) is not attempt:
                continue
            if attempt.retry_at <= self._context.now():
                self._reset_nodes(self._context.dispatch.reset_lost([address]))
            elif attempt.fails_at <= self._context.now():
                self._handle_failure(attempt)
            elif self._deadline_of(attempt) <= self._context.now():
                self._on_overdue(address, attempt)

    def release(self, addresses: Iterable[Address]) -> None:
        """Release the results of nodes that no later node depends on."""
        for address in addresses:
            if address in self._results:
                self._results.pop(address).future.release()

    def close(self) -> None:
        """Release all futures. A running stage ends with its process."""
        abandoned = [attempt for of_worker in self._abandoned.values() for attempt in of_worker.values()]
        for attempt in [*self._attempts.values(), *abandoned]:
            attempt.future.release()
        self._attempts.clear()
        self._abandoned.clear()
        self.release(list(self._results))

    def _settle_attempt(self, attempt: Attempt) -> None:
        match attempt_state(attempt.num_ranks, attempt.outcome is not None, attempt.errors.values()):
            case AttemptState.DONE:
                self._finish_attempt(attempt)
            case AttemptState.FAILED:
                self._handle_failure(attempt)
            case AttemptState.UNCLEAR:
                attempt.fails_at = min(attempt.fails_at, self._context.now() + PEER_GRACE_S)

    def _finish_attempt(self, attempt: Attempt) -> None:
        node, gang, journal = attempt.submit.node, attempt.submit.gang, self._context.journal
        other = self._attempts.pop(node.address, attempt)
        if other is not attempt:  # `attempt` was abandoned, but finished first
            other.future.release()
        self._results[node.address] = Result(attempt.future, attempt.worker, node.scheduled_step)
        self._context.dispatch.mark_done(node.address)
        first, index = attempt.outcome, attempt.submit.replica
        assert first is not None, f"{node.address} is done, and nobody reported it"
        for rank in range(index, index + attempt.num_ranks):
            self._supervision.record_progress((gang, rank))
        for outcome in (first, *first.peers):
            place = {**_event_fields(node.address), "rank": outcome.index, "gang": gang, "worker": outcome.worker}
            seconds = outcome.finished - outcome.started
            journal.append(Event(outcome.started, EventKind.STARTED, **place))
            journal.append(
                Event(outcome.finished, EventKind.FINISHED, **place, seconds=seconds, store_s=outcome.store_s)
            )
            for warning in outcome.warnings:
                journal.append(Event(outcome.finished, EventKind.WARNED, **place, detail=warning))
        if node.stage == "publish":
            journal.append_now(EventKind.PUBLISHED, **_event_fields(node.address), cpu_s=time.process_time())
        self._on_done(node, first)

    def _handle_failure(self, attempt: Attempt) -> None:
        """Run the attempt's node again if it was lost or raised a transient error. Raise StageFailed for any other
        error."""
        address, gang = attempt.submit.node.address, attempt.submit.gang
        for index, error in attempt.errors.items():
            detail = error_text(error)[:500]
            self._context.journal.append_now(
                EventKind.FAILED, **_event_fields(address), rank=index, gang=gang, detail=detail
            )
        lost = [error for error in attempt.errors.values() if isinstance(error, LOSS_ERRORS)]
        if not lost:
            return self._handle_stage_error(attempt)
        for dead in filter(None, map(self._supervision.worker_of, lost)):
            self._supervision.restart_lost(dead, f"{address}: {type(lost[0]).__name__}")
        if self._attempts.get(address) is not attempt:
            return  # reset together with its worker
        missing = next((error for error in lost if isinstance(error, RanksMissing)), None)
        if missing is not None:
            self._supervision.restart_lost((gang, missing.ranks[0]), str(missing))
        elif attempt.num_ranks > 1:  # live ranks may have begun, and wait for the others
            self._supervision.restart_lost((gang, 0), f"{address}: {type(lost[0]).__name__} on a part of its ranks")
        else:
            self._reset_nodes(self._context.dispatch.reset_lost([address]))

    def _handle_stage_error(self, attempt: Attempt) -> None:
        """Run a node again after a transient error: after a back-off, or if it has several ranks, which may be in a
        collective, once its gang is built again. Raises StageFailed for other errors, after `cluster.attempts`
        attempts, or if a judge's budget is spent."""
        node, gang, dispatch = attempt.submit.node, attempt.submit.gang, self._context.dispatch
        spent = next((error for error in attempt.errors.values() if isinstance(error, BudgetSpent)), None)
        if spent is not None:
            raise StageFailed(f"{node.address}: {spent}. That ends the run; a larger budget lets it go on") from spent
        times = dispatch.times_lost(node.address) + 1
        if times >= self._context.cluster.attempts or not all(map(is_retryable, attempt.errors.values())):
            repeat = repeat_hints(node, self._context.settings.paths.root)
            raise self._supervision.failure(f"{node.address} raised", gang, attempt.errors, repeat)
        what = f"{node.address}: {error_text(next(iter(attempt.errors.values())))[:500]}"
        if attempt.num_ranks > 1:
            return self._supervision.restart_lost((gang, 0), what)
        attempt.retry_at = self._context.now() + back_off_s(times)
        detail = f"{what}; tried again in {back_off_s(times):g} s"
        self._context.journal.append_now(EventKind.WARNED, **_event_fields(node.address), gang=gang, detail=detail)

    def _on_abandoned_end(self, worker: WorkerKey, attempt: Attempt, outcome: Outcome | None) -> None:
        """Handle the end of an attempt that was overdue, so that its node was given to another worker too. The first of
        the two with an outcome counts. The overdue worker gets work again once all its abandoned attempts have
        ended."""
        node, abandoned = attempt.submit.node, self._abandoned[worker]
        del abandoned[node.address]
        if not abandoned:
            del self._abandoned[worker]
            self._supervision.trust(worker)
        if outcome is not None and not self._context.dispatch.is_done(node.address):
            attempt.outcome = outcome
            self._finish_attempt(attempt)
        else:
            attempt.future.release()

    def _reset_nodes(self, addresses: Iterable[Address], abandon_on: WorkerKey | None = None) -> None:
        """Remove the attempts at these nodes, so that they can be submitted again. Attempts on the worker `abandon_on`
        go on beside the new ones: the first that commits counts."""
        for address in addresses:
            attempt = self._attempts.pop(address)
            if attempt.worker == abandon_on:
                self._abandoned.setdefault(abandon_on, {})[address] = attempt
            else:
                attempt.future.release()

    def _deadline_of(self, attempt: Attempt) -> float:
        """Return the time at which an attempt is overdue; infinity until its parents are done, and before its next try.
        In mode SLOT it begins when submitted. Others queue on their worker, so their time counts from its last
        progress."""
        if attempt.retry_at < math.inf or (attempt.ready_at is None and not self._parents_done(attempt.submit.node)):
            return math.inf
        if attempt.ready_at is None:
            attempt.ready_at = self._context.now()
        since = attempt.ready_at
        if attempt.submit.mode is not Mode.SLOT:
            since = max(since, self._supervision.last_progress(attempt.worker))
        return since + self._context.cluster.deadline_s

    def _on_overdue(self, address: Address, attempt: Attempt) -> None:
        dispatch, worker = self._context.dispatch, attempt.worker
        detail = f"overdue: cluster.deadline_s = {self._context.cluster.deadline_s:g}"
        self._context.journal.append_now(
            EventKind.FAILED, **_event_fields(address), gang=worker[0], attempt=attempt.name, detail=detail
        )
        if attempt.is_submitted_early:  # it may wait for a result in a hung process; the store has it too
            self._reset_nodes(dispatch.reset_lost([address]))
        elif attempt.submit.mode is not Mode.ORDERED and dispatch.can_run_without(*worker):
            self._supervision.suspect(worker)
        else:
            self._supervision.restart_lost(worker, detail)


def _event_fields(address: Address) -> dict[str, Any]:
    return {"stage": address.stage, "step": address.step, "shard": address.shard}
