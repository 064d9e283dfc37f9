"""Runs the graph on Dask: the one place that submits, waits, loses and submits again.

    driver thread, one loop:
      consumes     notices: a node's future ended, a worker's build ended; or nothing, and then deadlines are looked at
      tells        Dispatch (which decides what runs next), the journal, and the run's own callback
      carries out  Dispatch's instructions, as `client.submit` with the parents' futures

A node's Dask key is (stage, step, shard[, rank]), so that the dashboard groups by stage; a later attempt adds its
number, because a key whose old future is still held anywhere returns its old error.

What is lost and what is wrong: a worker that dies loses its unfinished nodes and they run again, up to
`cluster.attempts` times; an exception that a stage raises is wrong, and ends the run. In a gang, a rank may raise
because a peer died: the verdict waits for the peers' futures, at most `_PEER_GRACE_S`.

A replica that is overdue (stopped, hung) is *suspect*: its shards run elsewhere at once, and if it comes back it finds
their commits and discards its own; if it does not, it is killed after another deadline.

May import distributed and the pipeline's own plain modules.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path

from distributed import Client, Future
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

from pipeline.calls import Call, Outcome, WorkerLost, WorkerSpec, pin_resource, slot_resource, worker_name
from pipeline.cluster import kill_worker
from pipeline.dispatch import Dispatch, Gang, Mode, Submit
from pipeline.events import Event, EventKind, Journal
from pipeline.graph import Node
from pipeline.worker import build_worker, run_node
from stages.models.protocol import Role
from storage.address import Address

_LOST = (KilledWorker, WorkerLost, CancelledError, CommClosedError, NoWorkerError, NoValidWorkerError)
_PEER_GRACE_S = 20.0
_COLLECTIVE = frozenset({Role.POLICY, Role.VALUE, Role.REFERENCE})


class StageFailed(RuntimeError):
    """A stage raised, or a node or worker was lost too often; the run ends with exit code 3."""


@dataclass(frozen=True)
class ExecutorSettings:
    """What of the config the executor needs."""

    runtime: str
    config_yaml: str
    rendezvous_dir: Path
    start_timeout_s: float
    deadline_s: float
    attempts: int


@dataclass
class _Attempt:
    """One submission of a node: a future for each rank (or for the one replica), by index."""

    submit: Submit
    name: str
    futures: dict[int, Future]
    deadline: float
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    @property
    def first(self) -> Future:
        """The future that holds the reference: rank 0's."""
        return self.futures[min(self.futures)]


@dataclass
class _Worker:
    """One worker process as the driver knows it."""

    spec: WorkerSpec
    building: Future | None = None
    build_deadline: float = float("inf")
    suspect_until: float | None = None


@dataclass(frozen=True)
class _Notice:
    """A future ended; `address` is None for a build."""

    future: Future
    address: Address | None
    gang: str
    index: int


class Executor:
    """Owns the futures of a run."""

    def __init__(
        self,
        client: Client,
        gangs: Iterable[Gang],
        dispatch: Dispatch,
        journal: Journal,
        settings: ExecutorSettings,
        on_done: Callable[[Node, Outcome], None],
    ) -> None:
        self._client = client
        self._gangs = {gang.name: gang for gang in gangs}
        self._dispatch = dispatch
        self._journal = journal
        self._settings = settings
        self._on_done = on_done
        self._notices: queue.SimpleQueue[_Notice] = queue.SimpleQueue()
        self._attempts: dict[Address, _Attempt] = {}
        self._results: dict[Address, tuple[Future, str]] = {}
        self._late: dict[object, tuple[Node, Future]] = {}
        self._workers: dict[tuple[str, int], _Worker] = {}
        self._name = uuid.uuid4().hex[:8]

    # ---- the loop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to build every worker; each is given nodes as soon as it is up."""
        for gang in self._gangs.values():
            self._build(gang, range(gang.workers), incarnation=0)

    def run(self, finished: Callable[[], bool]) -> None:
        """Hands out nodes until `finished()`.

        Raises:
            StageFailed: a stage raised, or a node or a worker was lost too often.
        """
        while not finished():
            for submit in self._dispatch.next_submits():
                self._submit(submit)
            try:
                notice = self._notices.get(timeout=self._patience())
            except queue.Empty:
                self._check_deadlines()
                continue
            if notice.address is None:
                self._build_ended(notice)
            else:
                self._node_ended(notice)

    def release(self, addresses: Iterable[Address]) -> None:
        """Lets go of the results of nodes that no later node depends on."""
        for address in addresses:
            if address in self._results:
                self._results.pop(address)[0].release()

    def close(self) -> None:
        """Cancels what is out; what a stage is in the middle of ends with its process."""
        for attempt in self._attempts.values():
            for future in attempt.futures.values():
                future.release()
        for _, future in self._late.values():
            future.release()
        self._attempts.clear()
        self._late.clear()
        self.release(list(self._results))

    def _patience(self) -> float:
        """Seconds to wait for a notice: until the next deadline, and at most one."""
        deadlines = [a.deadline for a in self._attempts.values()]
        deadlines += [w.build_deadline for w in self._workers.values()]
        deadlines += [w.suspect_until for w in self._workers.values() if w.suspect_until is not None]
        return min(1.0, max(0.001, min(deadlines, default=float("inf")) - time.monotonic()))

    def _watch(self, future: Future, address: Address | None, gang: str, index: int) -> None:
        notice = _Notice(future, address, gang, index)
        future.add_done_callback(lambda _: self._notices.put(notice))

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit) -> None:
        node, gang = submit.node, self._gangs[submit.gang]
        address = node.address
        if submit.attempt >= self._settings.attempts:
            raise StageFailed(f"{address} was lost with its worker {submit.attempt} times (cluster.attempts)")
        if submit.mode is not Mode.ORDERED:
            indices: Iterable[int] = (submit.replica,)
        else:
            indices = range(gang.workers) if node.role in _COLLECTIVE else (0,)
        name = f"a{submit.attempt}-{self._name}"
        parents = [f for f in map(self._future_of, node.parents) if f is not None]
        futures = {}
        for index in indices:
            pin = pin_resource if submit.mode is Mode.FREE else slot_resource
            key: tuple[object, ...] = (address.stage, address.step, address.shard)
            key += (index,) if gang.ordered and gang.workers > 1 else ()
            key += (name,) if submit.attempt else ()
            call = Call(
                address=address,
                attempt=name,
                version=node.version,
                inputs=node.inputs,
                gang=submit.gang,
                worker=worker_name(submit.gang, index),
                incarnation=self._workers[submit.gang, index].spec.incarnation,
                sequence=submit.sequence,
            )
            futures[index] = self._client.submit(
                run_node,
                call,
                *parents,
                key=key,
                resources={pin(submit.gang, index): 1},
                priority=-node.priority[0],
                retries=0,
                pure=False,
            )
        self._attempts[address] = _Attempt(submit, name, futures, time.monotonic() + self._settings.deadline_s)
        self._journal.now(EventKind.SUBMITTED, **_where(address), gang=submit.gang, attempt=name)
        for index, future in futures.items():
            self._watch(future, address, submit.gang, index)

    def _future_of(self, address: Address) -> Future | None:
        """The future that a child depends on, so that the dashboard draws the edge; None for a parent whose commit was
        found or whose step is long over."""
        if address in self._results:
            return self._results[address][0]
        return self._attempts[address].first if address in self._attempts else None

    def _node_ended(self, notice: _Notice) -> None:
        assert notice.address is not None
        attempt = self._attempts.get(notice.address)
        if attempt is None or attempt.futures.get(notice.index) is not notice.future:
            self._late_node_ended(notice)
            return
        error = _error_of(notice.future)
        if error is None:
            attempt.outcomes[notice.index] = notice.future.result()
        else:
            attempt.errors[notice.index] = error
        ended = len(attempt.outcomes) + len(attempt.errors) == len(attempt.futures)
        if ended and not attempt.errors:
            self._done(attempt.submit.node, list(attempt.outcomes.values()), attempt.first)
        elif ended or isinstance(error, _LOST):
            self._failed(notice.address, attempt)
        elif attempt.errors:
            attempt.deadline = min(attempt.deadline, time.monotonic() + _PEER_GRACE_S)

    def _done(self, node: Node, outcomes: list[Outcome], first: Future) -> None:
        attempt = self._attempts.pop(node.address, None)
        if attempt is not None:
            for future in attempt.futures.values():
                if future is not first:
                    future.release()
        self._results[node.address] = first, outcomes[0].worker
        self._dispatch.done(node.address)
        gang = next(g.name for g in self._gangs.values() if node.role in g.roles)
        for outcome in outcomes:
            where = {**_where(node.address), "rank": outcome.index, "gang": gang, "worker": outcome.worker}
            seconds = outcome.finished - outcome.started
            self._journal.append(Event(outcome.started, EventKind.STARTED, **where))
            self._journal.append(
                Event(outcome.finished, EventKind.FINISHED, **where, seconds=seconds, store_s=outcome.store_s)
            )
        if node.stage == "publish":
            self._journal.now(EventKind.PUBLISHED, **_where(node.address))
        self._on_done(node, outcomes[0])

    def _failed(self, address: Address, attempt: _Attempt) -> None:
        gang = attempt.submit.gang
        for index, error in attempt.errors.items():
            detail = f"{type(error).__name__}: {error}"[:500]
            self._journal.now(EventKind.FAILED, **_where(address), rank=index, gang=gang, detail=detail)
        lost = [index for index, error in attempt.errors.items() if isinstance(error, _LOST)]
        if not lost:
            error = next(iter(attempt.errors.values()))
            raise StageFailed(f"{address} raised {type(error).__name__}: {error}") from error
        error = attempt.errors[lost[0]]
        culprit = _lost_worker(error)
        if culprit in (None, self._workers[gang, lost[0]].spec.name):
            self._worker_lost(gang, lost[0], f"{address}: {type(error).__name__}")
        else:  # what died is the holder of a parent's result: this worker is well, and the parent is in the store
            self.release(attempt.submit.node.parents)
            self._reset(self._dispatch.lost([address]))

    def _late_node_ended(self, notice: _Notice) -> None:
        """An attempt that had been given up came back. Its worker is alive after all; and whichever attempt committed
        first, the node is done."""
        known = self._late.pop(notice.future.key, None)
        if known is None:
            return
        node, future = known
        if _error_of(future) is not None:
            return  # killed in the meantime: its build is under way
        worker = self._workers[notice.gang, notice.index]
        if worker.suspect_until is not None:
            worker.suspect_until = None
            self._dispatch.worker_up(notice.gang, notice.index)
        if not self._dispatch.is_done(node.address):
            self._done(node, [future.result()], future)
        else:
            future.release()

    # ---- workers -------------------------------------------------------------------------------------------------

    def _build(self, gang: Gang, indices: Iterable[int], incarnation: int) -> None:
        rendezvous = self._settings.rendezvous_dir / f"{gang.name}-{self._name}-{incarnation}"
        for index in indices:
            spec = WorkerSpec(
                gang=gang.name,
                index=index,
                size=gang.workers if gang.ordered else 1,
                incarnation=incarnation,
                rendezvous=f"file://{rendezvous}" if gang.ordered else f"file://{rendezvous}-{index}",
                runtime=self._settings.runtime,
                config_yaml=self._settings.config_yaml,
            )
            future = self._client.submit(
                build_worker,
                spec,
                key=("build", spec.name, incarnation, self._name),
                resources={pin_resource(gang.name, index): 1},
                priority=1_000_000,
                retries=0,
                pure=False,
            )
            deadline = time.monotonic() + self._settings.start_timeout_s
            self._workers[gang.name, index] = _Worker(spec, future, deadline)
            self._watch(future, None, gang.name, index)

    def _build_ended(self, notice: _Notice) -> None:
        worker = self._workers[notice.gang, notice.index]
        if worker.building is not notice.future:
            return
        worker.building, worker.build_deadline = None, float("inf")
        error = _error_of(notice.future)
        notice.future.release()
        if isinstance(error, _LOST):
            self._worker_lost(notice.gang, notice.index, f"while it was built: {type(error).__name__}")
            return
        if error is not None:
            raise StageFailed(f"worker {worker.spec.name} could not be built: {type(error).__name__}: {error}") from error
        gang = self._gangs[notice.gang]
        if not gang.ordered:
            self._dispatch.worker_up(gang.name, notice.index)
        elif all(self._workers[gang.name, r].building is None for r in range(gang.workers)):
            self._dispatch.worker_up(gang.name, 0)
        else:
            return
        self._journal.now(EventKind.GANG_BUILT, gang=gang.name, worker=worker.spec.name)

    def _worker_lost(self, gang_name: str, index: int, why: str) -> None:
        """A process died, or must: what it had is reset, and it (for an ordered gang: every rank) is built anew."""
        gang = self._gangs[gang_name]
        worker = self._workers[gang_name, index]
        if worker.spec.incarnation + 1 >= self._settings.attempts * 4:
            raise StageFailed(f"worker {worker.spec.name} was lost {worker.spec.incarnation + 1} times; last: {why}")
        self._journal.now(EventKind.GANG_LOST, gang=gang_name, worker=worker.spec.name, detail=why)
        self._reset(self._dispatch.worker_down(gang_name, index))
        indices = range(gang.workers) if gang.ordered else (index,)
        for i in indices:
            self._forget_results_of(self._workers[gang_name, i].spec.name)
            kill_worker(self._client, self._workers[gang_name, i].spec.name)
        self._build(gang, indices, worker.spec.incarnation + 1)

    def _reset(self, addresses: Iterable[Address], keep_late: tuple[str, int] | None = None) -> None:
        """Lets go of attempts that were given up; those on the worker `keep_late` are listened to all the same."""
        for address in addresses:
            attempt = self._attempts.pop(address)
            for index, future in attempt.futures.items():
                if keep_late == (attempt.submit.gang, index):
                    self._late[future.key] = (attempt.submit.node, future)
                else:
                    future.release()

    def _forget_results_of(self, worker: str) -> None:
        """Releases results that lived in a process that is gone, lest Dask run those nodes again to recover them."""
        self.release([address for address, (_, holder) in self._results.items() if holder == worker])

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        for (gang, index), worker in list(self._workers.items()):
            if worker.build_deadline <= now:
                raise StageFailed(
                    f"worker {worker.spec.name} did not come up within cluster.start_timeout_s = "
                    f"{self._settings.start_timeout_s:g}"
                )
            if worker.suspect_until is not None and worker.suspect_until <= now:
                self._worker_lost(gang, index, "did not come back")
        for address, attempt in list(self._attempts.items()):
            if attempt.deadline > now or address not in self._attempts:
                continue
            if attempt.errors:
                self._failed(address, attempt)
                continue
            gang, index = attempt.submit.gang, attempt.submit.replica
            detail = f"overdue: cluster.deadline_s = {self._settings.deadline_s:g}"
            self._journal.now(EventKind.FAILED, **_where(address), gang=gang, attempt=attempt.name, detail=detail)
            if attempt.submit.mode is not Mode.ORDERED and self._dispatch.others_up(gang, index):
                self._workers[gang, index].suspect_until = now + self._settings.deadline_s
                self._reset(self._dispatch.worker_down(gang, index), keep_late=(gang, index))
            else:
                self._worker_lost(gang, index, detail)


def _where(address: Address) -> dict[str, object]:
    return {"stage": address.stage, "step": address.step, "shard": address.shard}


def _lost_worker(error: BaseException) -> str | None:
    """Name of the worker that an error of `_LOST` says is gone, where it says so."""
    if isinstance(error, KilledWorker):
        return str(error.last_worker.name)
    return str(error.args[0]) if isinstance(error, WorkerLost) else None


def _error_of(future: Future) -> BaseException | None:
    """Why a future that has ended has no result, or None if it has one."""
    if future.status == "finished":
        return None
    if future.status == "error":
        return future.exception()
    return CancelledError(f"{future.key} was {future.status}")
