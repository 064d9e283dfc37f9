"""Runs the graph on Dask: the one place that submits, waits, loses and submits again.

    driver thread, one loop:
      consumes     notices: a worker told of a node's outcome, a future failed, a build ended, a process ended; or
                   nothing; and looks at deadlines
      tells        Dispatch (which decides what runs next), the journal, and the run's own callback
      carries out  Dispatch's instructions, as `client.submit` with the parents' futures

A node's Dask key is (stage, step, shard[, rank]), so that the dashboard groups by stage; a later attempt adds its
number, because a key whose old future is still held anywhere returns its old error.

A parent's future is passed as an argument if it is still out (a FREE node runs ahead of it), or if its result lies in
the very process that the child runs in. Not otherwise: Dask would fetch the result, and wait for ever for a process
that is stopped or does not let go of its interpreter; and whatever died would be computed again with all its ancestors.
Dispatch has seen to the order, and the output is in the store. Lineage is cut every `_LINEAGE` turns, too: Dask
remembers all ancestors of a task that it remembers, and would hold the whole run.

What is lost and what is wrong: a worker that dies loses its unfinished nodes and they run again, up to
`cluster.attempts` times; an exception that a stage raises is wrong, and ends the run. In a gang, a rank may raise
because a peer died: then the verdict waits for `_PEER_GRACE_S` for the news of a death.

A worker that is overdue (stopped, hung) is killed, if nobody else can do its work. Otherwise it is *suspect*: its
shards run elsewhere at once. When all that it had come back, finding commits and discarding their own, it gets work
again; if they do not within another deadline, it is killed.

Time is counted by a clock that stands still while the driver does (a suspended job must not find every deadline past).

When few rows are left in a pool's replicas, they tell of them; `Tails` decides which go where, and the sources are
told. A shard whose rows are all elsewhere gives its slot up.

May import distributed and the pipeline's own plain modules.
"""

from __future__ import annotations

import math
import pickle
import queue
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distributed import Client, Future
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

from pipeline.driver.cluster import kill_workers, workers_by_address
from pipeline.graph.dispatch import Dispatch, Gang, Mode, Submit
from pipeline.graph.graph import Node
from pipeline.graph.tails import Tails
from pipeline.observe.journal import Event, EventKind, Journal
from pipeline.workers.entry import build_worker, run_node_task
from pipeline.workers.messages import (
    OUTCOMES,
    TAILS,
    Call,
    MirrorSpec,
    MoveOrder,
    MoveOver,
    Outcome,
    RowsNews,
    WorkerLost,
    WorkerSpec,
    pin_resource,
    slot_resource,
    worker_name,
)
from pipeline.workers.row_transfer import order_move
from pipeline.workers.weight_transfer import order_fetch, order_release, remove_boards
from stages.models.protocol import MODEL_ROLES, Role
from storage.address import Address

_LOST = (KilledWorker, WorkerLost, CancelledError, CommClosedError, NoWorkerError, NoValidWorkerError)
_PEER_ERRORS = (RuntimeError, OSError)
"""What a collective raises when a peer is gone; also what much else raises."""
_PEER_GRACE_S = 5.0
_LONGEST_LOOK_S = 5.0
"""The most that the driver's clock advances from one look to the next."""
_ANSWER_S = 10.0
_GONE = ("error", "cancelled", "lost")
_LINEAGE = 8
_LONGEST_SILENCE_S = 30.0
"""Of a worker that sends weights; less under a short `deadline_s`."""
_FIRST = 1
"""Dask priority of a build: nodes have negative ones."""


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
    ledger: str | None = None
    """URL of the ledger, from which a call that Dask runs again is answered; None: it fails, and is submitted again."""
    log_dir: Path | None = None
    """Where workers write what they print; None: to the driver's terminal."""
    move_rows_below: int = 0
    """When fewer rows are left on all replicas that generate, they move to fewer replicas; 0: never."""
    boards: Mapping[str, str] = field(default_factory=dict)
    """Directory of published weights on each gang's hosts; empty: there are none."""


@dataclass
class _Attempt:
    """One submission of a node: a future for each rank (or for the one replica), by index."""

    submit: Submit
    name: str
    futures: dict[int, Future]
    ran_ahead: bool
    """Of its parents: it depends on their futures."""
    ready: float | None
    """When all its parents were done; None while they are not."""
    verdict: float = math.inf
    """When the errors it has are taken for its own, and no longer for a peer's death."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    errors: dict[int, BaseException] = field(default_factory=dict)

    @property
    def first(self) -> Future:
        """The future that holds the reference: rank 0's."""
        return self.futures[min(self.futures)]


@dataclass(frozen=True)
class _Result:
    """Of a finished node: its futures by rank or replica, the gang and the turn it ran in."""

    futures: dict[int, Future]
    gang: str
    turn: int


@dataclass
class _Worker:
    """One incarnation of a worker process as the driver knows it."""

    spec: WorkerSpec
    building: Future
    deadline: float
    """While it is built: when that is overdue. Once it is up: when a suspect is given up."""
    up: bool = False
    address: str | None = None
    """Dask's; known once it is built."""
    progress: float = 0.0
    """When it last finished something."""
    error: BaseException | None = None
    """Of a build that may have failed because a peer died."""
    late: dict[Address, _Attempt] = field(default_factory=dict)
    """Of a suspect: attempts that were given up and have not come back."""


@dataclass(frozen=True)
class _Ended:
    """A future ended; `address` is None for a build."""

    future: Future
    address: Address | None
    gang: str
    index: int


@dataclass(frozen=True)
class _Told:
    """A worker finished a call."""

    attempt: str
    outcome: Outcome


@dataclass(frozen=True)
class _Removed:
    """A worker process ended, by its Dask address."""

    worker: str


@dataclass(frozen=True)
class _Rows:
    """A replica spoke of its rows."""

    news: RowsNews | MoveOver


_Notice = _Ended | _Told | _Removed | _Rows


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
        self._results: dict[Address, _Result] = {}
        self._workers: dict[tuple[str, int], _Worker] = {}
        self._losses: dict[tuple[str, int], int] = {}
        """How often each replica or gang was lost since it last finished a node."""
        self._pool = next((gang.name for gang in self._gangs.values() if Role.GENERATE in gang.roles), "")
        self._tails = Tails(settings.move_rows_below)
        self._publisher = next((gang.name for gang in self._gangs.values() if Role.POLICY in gang.roles), ""), 0
        self._home: str | None = None
        """Host of the publisher, once it is known."""
        self._unread: set[int] = set()
        """Versions of the weights that nobody reads any more."""
        self._name = uuid.uuid4().hex[:8]
        self._looked = time.monotonic()
        self._now = 0.0

    # ---- the loop ------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to build every worker; each is given nodes as soon as it is up."""
        self._client.subscribe_topic("all", self._hear_of_workers)
        self._client.subscribe_topic(OUTCOMES, self._hear_outcome)
        self._client.subscribe_topic(TAILS, self._hear_of_rows)
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
            if self._settings.move_rows_below:
                self._order_moves()
            match self._next_notice():
                case _Told() as notice:
                    self._told(notice)
                case _Ended(address=None) as notice:
                    self._build_ended(notice)
                case _Ended() as notice:
                    self._node_ended(notice)
                case _Removed() as notice:
                    self._removed(notice)
                case _Rows(news):
                    self._rows_told(news)
            self._check_deadlines()

    def release(self, addresses: Iterable[Address]) -> None:
        """Lets go of the results of nodes that no later node depends on."""
        for address in addresses:
            if address in self._results:
                _let_go(self._results.pop(address).futures)

    def fetch_weights(self, version: int) -> None:
        """Has a version brought to the hosts that will read it, before they need it."""
        order_fetch(self._client, self._elsewhere(self._addresses()), version)

    def release_weights(self, version: int) -> None:
        """Has the copies of a version removed that other hosts have."""
        self._unread.add(version)
        order_release(self._client, self._elsewhere(self._addresses()), [version])

    def close(self) -> None:
        """Lets go of everything that is out; what a stage is in the middle of ends with its process. Other hosts remove
        their copies of weights."""
        if self._workers and self._settings.boards:  # also of workers that are just being built
            there = {name: address for address, name in workers_by_address(self._client).items()}
            remove_boards(self._client, self._elsewhere(there))
        for attempt in self._attempts.values():
            _let_go(attempt.futures)
        for worker in self._workers.values():
            worker.building.release()
            for attempt in worker.late.values():
                _let_go(attempt.futures)
        self._attempts.clear()
        if self._workers:
            self._client.unsubscribe_topic("all")
            self._client.unsubscribe_topic(OUTCOMES)
            self._client.unsubscribe_topic(TAILS)
        self._workers.clear()
        self.release(list(self._results))

    def _next_notice(self) -> _Notice | None:
        """What happened next; None if nothing does before somebody should look at the deadlines."""
        try:
            notice = self._notices.get(timeout=min(1.0, self._settings.deadline_s / 4))
        except queue.Empty:
            notice = None
        now = time.monotonic()
        self._now += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        return notice

    def _watch(self, future: Future, address: Address | None, gang: str, index: int) -> None:
        notice = _Ended(future, address, gang, index)
        future.add_done_callback(lambda _: self._notices.put(notice))

    def _hear_outcome(self, event: tuple[float, bytes]) -> None:
        """Takes a worker's news (called in the client's thread)."""
        self._notices.put(_Told(*pickle.loads(event[1])))

    def _hear_of_rows(self, event: tuple[float, bytes]) -> None:
        """Takes a replica's news (called in the client's thread)."""
        self._notices.put(_Rows(pickle.loads(event[1])))

    def _hear_of_workers(self, event: tuple[float, object]) -> None:
        """Takes the scheduler's news of a process that ended (called in the client's thread)."""
        message = event[1]
        if isinstance(message, dict) and message.get("action") == "remove-worker":
            self._notices.put(_Removed(str(message["worker"])))

    # ---- nodes ---------------------------------------------------------------------------------------------------

    def _submit(self, submit: Submit) -> None:
        node, gang = submit.node, self._gangs[submit.gang]
        address = node.address
        if self._dispatch.losses(address) >= self._settings.attempts:
            raise StageFailed(f"{address} was lost with its worker {self._settings.attempts} times (cluster.attempts)")
        if submit.mode is not Mode.ORDERED:
            indices: Iterable[int] = (submit.replica,)
        else:
            indices = range(gang.workers) if node.role in MODEL_ROLES else (0,)
        name = f"a{submit.attempt}-{self._name}"
        pin = pin_resource if submit.mode is Mode.FREE else slot_resource
        futures = {}
        for index in indices:
            key: tuple[object, ...] = (address.stage, address.step, address.shard)
            key += (index,) if gang.ordered and gang.workers > 1 else ()
            key += (name,) if submit.attempt else ()
            worker = self._workers[submit.gang, index].spec
            call = Call(
                address=address,
                attempt=name,
                version=node.version,
                inputs=node.inputs,
                gang=submit.gang,
                worker=worker.name,
                incarnation=worker.incarnation,
                sequence=submit.sequence,
                ledger=self._settings.ledger,
            )
            futures[index] = self._client.submit(
                run_node_task,
                call,
                *self._edges(node, submit.gang, index),
                key=key,
                resources={pin(submit.gang, index): 1},
                priority=-(100 * node.turn + node.priority[1]),
                retries=0,
                pure=False,
            )
        ahead = not self._parents_done(node)
        self._attempts[address] = _Attempt(submit, name, futures, ahead, None if ahead else self._now)
        ahead = submit.mode is Mode.FREE  # it may wait there for its parents: nothing that the worker is doing
        at = None if ahead else worker_name(submit.gang, min(futures))
        self._journal.now(EventKind.SUBMITTED, **_where(address), gang=submit.gang, worker=at, attempt=name)
        for index, future in futures.items():
            self._watch(future, address, submit.gang, index)

    def _edges(self, child: Node, gang: str, index: int) -> list[Future]:
        """The parents' futures that a child on this worker depends on."""
        edges = []
        for parent in child.parents:
            result = self._results.get(parent)
            if parent in self._attempts:
                edges.append(self._attempts[parent].first)
            elif result is not None and result.gang == gang and (child.turn % _LINEAGE or result.turn == child.turn):
                edges += [future for i, future in result.futures.items() if i == index and future.status not in _GONE]
        return edges

    def _parents_done(self, node: Node) -> bool:
        return all(self._dispatch.is_done(parent) for parent in node.parents)

    def _told(self, notice: _Told) -> None:
        outcome = notice.outcome
        attempt = self._attempts.get(outcome.address)
        if attempt is not None and attempt.name == notice.attempt:
            attempt.outcomes[outcome.index] = outcome
            self._judge(attempt)
        else:
            for where, worker in self._workers.items():
                late = worker.late.get(outcome.address)
                if late is not None and late.name == notice.attempt:
                    self._came_back(where, late, outcome)

    def _node_ended(self, notice: _Ended) -> None:
        """A node's future ended: with an error, or else its outcome has been told."""
        if notice.future.status == "finished":
            return
        assert notice.address is not None
        error = _error_of(notice.future)
        attempt = self._attempts.get(notice.address)
        if attempt is not None and attempt.futures.get(notice.index) is notice.future:
            if notice.index not in attempt.outcomes:
                attempt.errors[notice.index] = error
                self._judge(attempt)
            return
        where = notice.gang, notice.index
        late = self._workers[where].late.get(notice.address)
        if late is not None and late.futures[notice.index] is notice.future and not isinstance(error, _LOST):
            self._came_back(where, late, None)

    def _judge(self, attempt: _Attempt) -> None:
        """Decides whether an attempt is over."""
        ended = len(attempt.outcomes) + len(attempt.errors) == len(attempt.futures)
        if ended and not attempt.errors:
            self._done(attempt)
        elif ended or any(isinstance(e, _LOST) or not isinstance(e, _PEER_ERRORS) for e in attempt.errors.values()):
            self._failed(attempt)
        elif attempt.errors:
            attempt.verdict = min(attempt.verdict, self._now + _PEER_GRACE_S)

    def _done(self, attempt: _Attempt) -> None:
        node, gang = attempt.submit.node, attempt.submit.gang
        other = self._attempts.pop(node.address, attempt)
        if other is not attempt:  # `attempt` had been given up, and was the first to finish after all
            _let_go(other.futures)
        self._results[node.address] = _Result(attempt.futures, gang, node.turn)
        self._dispatch.done(node.address)
        outcomes = [attempt.outcomes[index] for index in sorted(attempt.outcomes)]
        for outcome in outcomes:
            self._workers[gang, outcome.index].progress = self._now
            self._losses.pop(self._lot(gang, outcome.index), None)
            where = {**_where(node.address), "rank": outcome.index, "gang": gang, "worker": outcome.worker}
            seconds = outcome.finished - outcome.started
            self._journal.append(Event(outcome.started, EventKind.STARTED, **where))
            self._journal.append(
                Event(outcome.finished, EventKind.FINISHED, **where, seconds=seconds, store_s=outcome.store_s)
            )
        if node.stage == "publish":
            self._journal.now(EventKind.PUBLISHED, **_where(node.address))
        self._on_done(node, outcomes[0])

    def _failed(self, attempt: _Attempt) -> None:
        address, gang = attempt.submit.node.address, attempt.submit.gang
        for index, error in attempt.errors.items():
            detail = f"{type(error).__name__}: {error}"[:500]
            self._journal.now(EventKind.FAILED, **_where(address), rank=index, gang=gang, detail=detail)
        lost = [error for error in attempt.errors.values() if isinstance(error, _LOST)]
        if not lost:
            raise self._wrong(f"{address} raised", gang, attempt.errors)
        for dead in filter(None, map(self._dead_worker, lost)):
            self._worker_lost(*dead, f"{address}: {type(lost[0]).__name__}")
        if self._attempts.get(address) is not attempt:
            return  # it was among what its worker had
        if len(attempt.futures) > 1:  # its workers are well, but some may have begun, and wait for the rest
            self._worker_lost(gang, 0, f"{address}: {type(lost[0]).__name__} on a part of its ranks")
        else:
            self._reset(self._dispatch.lost([address]))

    def _came_back(self, where: tuple[str, int], late: _Attempt, outcome: Outcome | None) -> None:
        """An attempt that had been given up ended, well (then the node is done, whichever attempt committed first) or
        not. Its worker is alive after all, and gets work again when it owes nothing more."""
        worker, node = self._workers[where], late.submit.node
        del worker.late[node.address]
        if not worker.late:
            worker.deadline = math.inf
            self._dispatch.worker_up(*where)
        if outcome is not None and not self._dispatch.is_done(node.address):
            late.outcomes[outcome.index] = outcome
            self._done(late)
        else:
            _let_go(late.futures)

    def _reset(self, addresses: Iterable[Address], keep_late: tuple[str, int] | None = None) -> None:
        """Lets go of attempts that were given up; those on the worker `keep_late` are listened to all the same."""
        for address in addresses:
            attempt = self._attempts.pop(address)
            if keep_late == (attempt.submit.gang, attempt.submit.replica):
                self._workers[keep_late].late[address] = attempt
                continue
            _let_go(attempt.futures)

    # ---- rows that move ------------------------------------------------------------------------------------------

    def _order_moves(self) -> None:
        """Tells sources which rows to send where."""
        usable, startable = self._dispatch.replicas_up(self._pool), self._dispatch.waiting_versions(self._pool)
        for number, move in self._tails.next_moves(usable, startable):
            source, target = (self._workers[self._pool, index] for index in (move.source, move.target))
            assert source.address is not None
            assert target.address is not None
            order = MoveOrder(number, self._pool, move.source, source.spec.incarnation, target.address, move.rows)
            order_move(self._client, source.address, order)

    def _rows_told(self, news: RowsNews | MoveOver) -> None:
        """What a replica says counts if it is the process that has this place now."""
        worker = self._workers.get((news.gang, news.index))
        if worker is None or worker.spec.incarnation != news.incarnation:
            return
        if isinstance(news, RowsNews):
            self._tails.told(news.index, news.here)
        else:
            self._tails.arrived(news.number, news.num_bytes, news.seconds)
            detail = f"{news.num_rows} rows, {news.num_bytes} bytes of keys and values, {news.seconds:.3f} s"
            detail += f"; refused: {news.refusal}" if news.refusal is not None else ""
            self._journal.now(EventKind.ROWS_MOVED, gang=news.gang, worker=worker.spec.name, detail=detail)
        for address in news.away:
            attempt = self._attempts.get(address)
            if attempt is not None and (attempt.submit.gang, attempt.submit.replica) == (news.gang, news.index):
                self._dispatch.vacate(address)

    # ---- weights on other hosts ----------------------------------------------------------------------------------

    def _mirror(self, gang: str) -> MirrorSpec | None:
        """What a worker of this gang is told of weights on other hosts."""
        settings = self._settings
        if not settings.boards or self._gangs[gang].roles.isdisjoint({Role.GENERATE, Role.POLICY}):
            return None
        return MirrorSpec(
            board=settings.boards[gang],
            publisher=worker_name(*self._publisher),
            patience_s=min(settings.start_timeout_s, settings.deadline_s / 3),  # well before the node is overdue
            silence_s=min(_LONGEST_SILENCE_S, settings.deadline_s / 4),
        )

    def _addresses(self) -> dict[str, str]:
        """Of the workers that are built, by name."""
        return {w.spec.name: w.address for w in self._workers.values() if w.address is not None}

    def _elsewhere(self, addresses: Mapping[str, str]) -> list[str]:
        """Of workers by name, the addresses of those that read weights from another board than the publisher's: on
        another host, or in another directory."""
        boards = self._settings.boards
        if not boards:
            return []
        publisher = addresses.get(worker_name(*self._publisher))
        self._home = _host(publisher) if publisher is not None else self._home
        names = [worker_name(self._pool, index) for index in range(self._gangs[self._pool].workers)]
        apart = boards[self._pool] != boards[self._publisher[0]]
        readers = [addresses[name] for name in names if name in addresses]
        return [address for address in readers if apart or self._home not in (None, _host(address))]

    # ---- workers -------------------------------------------------------------------------------------------------

    def _build(self, gang: Gang, indices: Iterable[int], incarnation: int) -> None:
        # Absolute: torch takes the first part of a relative path for a host, and waits for ever.
        rendezvous = self._settings.rendezvous_dir.resolve() / f"{gang.name}-{self._name}-{incarnation}"
        log_dir = self._settings.log_dir
        for index in indices:
            name = worker_name(gang.name, index)
            spec = WorkerSpec(
                gang=gang.name,
                index=index,
                size=gang.workers if gang.ordered else 1,
                incarnation=incarnation,
                rendezvous=f"file://{rendezvous}" if gang.ordered else f"file://{rendezvous}-{index}",
                runtime=self._settings.runtime,
                config_yaml=self._settings.config_yaml,
                log=str((log_dir / f"{name}.log").resolve()) if log_dir is not None else None,
                mirror=self._mirror(gang.name),
            )
            future = self._client.submit(
                build_worker,
                spec,
                key=("build", spec.name, incarnation, self._name),
                resources={pin_resource(gang.name, index): 1},
                priority=_FIRST,
                retries=0,
                pure=False,
            )
            self._workers[gang.name, index] = _Worker(spec, future, self._now + self._settings.start_timeout_s)
            self._watch(future, None, gang.name, index)

    def _build_ended(self, notice: _Ended) -> None:
        worker = self._workers[notice.gang, notice.index]
        if worker.building is not notice.future:
            return
        gang, name = self._gangs[notice.gang], worker.spec.name
        address = _build_result(notice.future)
        notice.future.release()  # a result still wanted would be computed again in a process that came back
        if isinstance(address, _LOST):
            self._worker_lost(gang.name, notice.index, f"while it was built: {type(address).__name__}")
        elif isinstance(address, BaseException):
            if worker.spec.size == 1 or not isinstance(address, _PEER_ERRORS):
                raise self._wrong(f"worker {name} could not be built:", gang.name, {notice.index: address})
            worker.error, worker.deadline = address, self._now + _PEER_GRACE_S
        else:
            worker.up, worker.address, worker.deadline = True, address, math.inf
            if gang.name == self._pool and self._unread:  # it has not heard of them
                order_release(self._client, self._elsewhere(self._addresses()), self._unread)
            if not gang.ordered:
                self._dispatch.worker_up(gang.name, notice.index)
            elif all(self._workers[gang.name, r].up for r in range(gang.workers)):
                self._dispatch.worker_up(gang.name, 0)
            else:
                return
            self._journal.now(EventKind.GANG_BUILT, gang=gang.name, worker=name)

    def _removed(self, notice: _Removed) -> None:
        for (gang, index), worker in list(self._workers.items()):
            if worker.address == notice.worker:
                self._worker_lost(gang, index, "its process ended")
                return

    def _worker_lost(self, gang_name: str, index: int, why: str) -> None:
        """A process died, or must: what it had is reset, and it (for an ordered gang: every rank) is built anew."""
        gang = self._gangs[gang_name]
        worker = self._workers[gang_name, index]
        lot = self._lot(gang_name, index)
        self._losses[lot] = self._losses.get(lot, 0) + 1
        self._journal.now(EventKind.GANG_LOST, gang=gang_name, worker=worker.spec.name, detail=why)
        if self._losses[lot] >= self._settings.attempts:
            raise StageFailed(
                f"worker {worker.spec.name} was lost {self._losses[lot]} times (cluster.attempts) without finishing "
                f"anything; last: {why}{self._see_log(worker)}"
            )
        self._reset(self._dispatch.worker_down(gang_name, index))
        if gang_name == self._pool:
            self._tails.gone(index)
        indices = range(gang.workers) if gang.ordered else (index,)
        lost = [self._workers[gang_name, i] for i in indices]
        for one in lost:
            for attempt in one.late.values():
                _let_go(attempt.futures)
            one.building.release()
        held = [a for a, r in self._results.items() if r.gang == gang_name and not r.futures.keys().isdisjoint(indices)]
        self.release(held)
        names = {one.spec.name for one in lost if one.address is None}
        known = workers_by_address(self._client)
        kill_workers(self._client, [a for a, n in known.items() if n in names or a in {one.address for one in lost}])
        self._build(gang, indices, worker.spec.incarnation + 1)

    def _lot(self, gang: str, index: int) -> tuple[str, int]:
        """What is lost together: a replica, or all ranks of an ordered gang."""
        return gang, 0 if self._gangs[gang].ordered else index

    def _dead_worker(self, error: BaseException) -> tuple[str, int] | None:
        """The worker that an error of `_LOST` says is gone, if it is not being replaced already."""
        for where, worker in self._workers.items():
            if isinstance(error, KilledWorker) and worker.address == error.last_worker.address:
                return where
            if isinstance(error, WorkerLost) and (worker.spec.name, worker.spec.incarnation) == error.args:
                return where
        return None

    def _wrong(self, what: str, gang: str, errors: dict[int, BaseException]) -> StageFailed:
        """The end of the run, with the error that a collective did not raise, if there is one."""
        index = next((i for i, e in errors.items() if not isinstance(e, _PEER_ERRORS)), min(errors))
        error = errors[index]
        failed = StageFailed(f"{what} {type(error).__name__}: {error}{self._see_log(self._workers[gang, index])}")
        failed.__cause__ = error
        return failed

    @staticmethod
    def _see_log(worker: _Worker) -> str:
        return f" (see {worker.spec.log})" if worker.spec.log is not None else ""

    def _check_deadlines(self) -> None:
        for (gang, index), worker in list(self._workers.items()):
            if worker.deadline > self._now or self._workers[gang, index] is not worker:
                continue
            if worker.error is not None:
                raise self._wrong(f"worker {worker.spec.name} could not be built:", gang, {index: worker.error})
            if not worker.up:
                raise StageFailed(
                    f"worker {worker.spec.name} did not come up within cluster.start_timeout_s = "
                    f"{self._settings.start_timeout_s:g}{self._see_log(worker)}"
                )
            self._worker_lost(gang, index, "did not come back")
        for address, attempt in list(self._attempts.items()):
            if self._attempts.get(address) is not attempt:
                continue
            if attempt.verdict <= self._now:
                self._failed(attempt)
            elif self._due(attempt) <= self._now:
                self._overdue(address, attempt)

    def _due(self, attempt: _Attempt) -> float:
        """When an attempt is overdue. A node in a slot begins when it is submitted; others wait for their parents, and
        behind the nodes before them on the same worker, so they are overdue when it finishes nothing."""
        if attempt.ready is None:
            if not self._parents_done(attempt.submit.node):
                return math.inf
            attempt.ready = self._now
        since = attempt.ready
        if attempt.submit.mode is not Mode.SLOT:
            since = max(since, *(self._workers[attempt.submit.gang, i].progress for i in attempt.futures))
        return since + self._settings.deadline_s

    def _overdue(self, address: Address, attempt: _Attempt) -> None:
        gang, index = attempt.submit.gang, attempt.submit.replica
        detail = f"overdue: cluster.deadline_s = {self._settings.deadline_s:g}"
        self._journal.now(EventKind.FAILED, **_where(address), gang=gang, attempt=attempt.name, detail=detail)
        if attempt.ran_ahead:  # it waits for a parent's result, in a process that hangs: the store has it, too
            self._reset(self._dispatch.lost([address]))
        elif attempt.submit.mode is not Mode.ORDERED and self._dispatch.others_up(gang, index):
            self._workers[gang, index].deadline = self._now + self._settings.deadline_s
            if gang == self._pool:
                self._tails.gone(index)
            self._reset(self._dispatch.worker_down(gang, index), keep_late=(gang, index))
        else:
            self._worker_lost(gang, index, detail)


def _where(address: Address) -> dict[str, Any]:
    return {"stage": address.stage, "step": address.step, "shard": address.shard}


def _host(address: str) -> str:
    """Of a Dask address."""
    return address.rpartition(":")[0]


def _let_go(futures: dict[int, Future]) -> None:
    for future in futures.values():
        future.release()


def _error_of(future: Future) -> BaseException:
    """Why a future that has ended has no result."""
    if future.status == "error":
        return future.exception()
    return CancelledError(f"{future.key} was {future.status}")


def _build_result(future: Future) -> str | BaseException:
    """The address of the process that was built, or why there is none."""
    if future.status != "finished":
        return _error_of(future)
    try:
        return future.result(timeout=_ANSWER_S)
    except _LOST as error:
        return error
    except TimeoutError:
        return CancelledError(f"{future.key} was built, but does not answer")
