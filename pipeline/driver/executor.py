"""Runs the graph on Dask: the one loop that submits, waits, loses and submits again.

    driver thread, one loop:
      consumes         notices: a worker reported an outcome, a replica its rows, a future ended, a process ended
      waits for        the next notice, but only until somebody should look at the deadlines
      is unblocked by  Dask's client thread, which puts notices into a queue and does nothing else
      carries out      the instructions of Dispatch, which decides what runs next
      reports to       Dispatch, the journal, and the run's own callback

    Executor ──► Attempts ──────────┬──► Supervision
      │          nodes' futures     │    builds of processes; losses, suspects
      ├────────► WeightOrders ──────┤      │
      ├────────► TurnOrders ────────┤      │
      └────────► MigrationOrders ───┘      └── a worker is down ──► Attempts, MigrationOrders, TurnOrders

What is lost and what is wrong: a worker that dies loses its unfinished nodes and they run again, up to
`cluster.attempts` times; an exception that a stage raises is wrong, and ends the run. In a gang, a rank may raise
because a peer died: then the verdict waits for `PEER_GRACE_S` for the news of a death.

A worker that is overdue (stopped, hung) is killed, if nobody else can do its work. Otherwise it is *suspect*: its
shards run elsewhere at once. When all that it had come back, finding commits and discarding their own, it gets work
again; if they do not within another deadline, it is killed.

Time is counted by a clock that stands still while the driver does (a suspended job must not find every deadline past).

May import distributed, pipeline.driver.{attempts, context, orders, supervision}, pipeline.workers and below.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client, Future

from pipeline.driver.attempts import Attempts
from pipeline.driver.context import Context, ExecutorSettings, WorkerKey
from pipeline.driver.orders import MigrationOrders, TurnOrders, WeightOrders, mirror_spec
from pipeline.driver.supervision import Supervision
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.gangs import Gang
from pipeline.graph.graph import Node
from pipeline.observe.journal import Journal
from pipeline.workers.joining import REFUSALS, JoinRefused
from pipeline.workers.messages import (
    FAILURES,
    OUTCOMES,
    RESTED,
    TAILS,
    MoveOver,
    Outcome,
    RankFailure,
    Rested,
    RowsNews,
)
from pipeline.workers.reports import failure_from_json, outcome_from_json, rested_from_json, rows_from_json
from storage.address import Address

_LONGEST_LOOK_S = 5.0
"""The most that the driver's clock advances from one look to the next."""
_PROCESSES = "all"
"""Dask's topic on which the scheduler reports processes that ended."""


@dataclass(frozen=True)
class _Ended:
    """A future ended; `address` is None for a build."""

    future: Future
    worker: WorkerKey
    address: Address | None


@dataclass(frozen=True)
class _Reported:
    """A worker finished a call."""

    attempt: str
    outcome: Outcome


@dataclass(frozen=True)
class _Removed:
    """A worker process ended, by its Dask address."""

    process: str


@dataclass(frozen=True)
class _RowsReported:
    """A replica reported its rows."""

    report: RowsNews | MoveOver


@dataclass(frozen=True)
class _RestReported:
    """A worker has left its devices, or could not."""

    report: Rested


@dataclass(frozen=True)
class _RankFailed:
    """A rank other than 0 reported what it raised."""

    failure: RankFailure


@dataclass(frozen=True)
class _Refused:
    """A worker wanted to join, and was refused."""

    refusal: JoinRefused


_Notice = _Ended | _Reported | _Removed | _RowsReported | _RestReported | _RankFailed | _Refused


class Executor:
    """Owns the futures of a run, through its parts, from `start` to `close`."""

    def __init__(
        self,
        client: Client,
        gangs: Iterable[Gang],
        dispatch: Dispatch,
        journal: Journal,
        settings: ExecutorSettings,
        on_done: Callable[[Node, Outcome], None],
        on_replaced: Callable[[], None] = lambda: None,
        on_built: Callable[[WorkerKey, Mapping[str, str]], None] = lambda worker, numerics: None,
        on_look: Callable[[float], None] = lambda now: None,
    ) -> None:
        """`on_done(node, outcome)` is called when a node has its commit, with rank 0's outcome; `on_replaced()` when a
        worker's process was lost, and the next one is built; `on_built(worker, numerics)` when a worker is built, with
        what the last bits of its results depend on; `on_look(now)` about once a second, with the executor's clock. What
        these raise ends the run."""
        self._client = client
        self._dispatch = dispatch
        self._on_replaced = on_replaced
        self._on_look = on_look
        self._notices: queue.SimpleQueue[_Notice] = queue.SimpleQueue()
        self._longest_wait_s = min(1.0, settings.deadline_s / 4)
        self._looked = time.monotonic()
        self._now = self._look_again = 0.0
        self._started = False
        context = Context(
            client=client,
            gangs={gang.name: gang for gang in gangs},
            dispatch=dispatch,
            journal=journal,
            settings=settings,
            name=uuid.uuid4().hex[:8],
            now=lambda: self._now,
            watch=self._watch,
        )
        self._supervision = Supervision(context, partial(mirror_spec, context), self._worker_down, on_built)
        self._attempts = Attempts(context, self._supervision, on_done)
        self._weights = WeightOrders(context, self._supervision)
        self._migration = MigrationOrders(context, self._supervision)
        self._turns = TurnOrders(context, self._supervision)

    def start(self) -> None:
        """Begins to build every worker; each is given nodes as soon as it is up."""
        self._client.subscribe_topic(_PROCESSES, self._on_process)
        self._client.subscribe_topic(OUTCOMES, self._on_outcome)
        self._client.subscribe_topic(FAILURES, self._on_failure)
        self._client.subscribe_topic(TAILS, self._on_rows)
        self._client.subscribe_topic(RESTED, self._on_rest)
        self._client.subscribe_topic(REFUSALS, self._on_refusal)
        self._started = True
        self._supervision.start()

    def run(self, finished: Callable[[], bool]) -> None:
        """Hands out nodes until `finished()`.

        Raises:
            StageFailed: a stage raised, or a node or a worker was lost too often.
        """
        while not finished():
            for submit in self._dispatch.next_submits():
                self._attempts.submit(submit)
            if self._turns.pass_on():
                continue
            self._migration.order_moves()
            match self._next_notice():
                case _Reported(attempt, outcome):
                    self._attempts.reported(attempt, outcome)
                case _Ended(future, worker, address) if address is not None:
                    self._attempts.future_ended(worker, address, future)
                case _Ended(future, worker):
                    if self._supervision.build_ended(worker, future):
                        self._weights.worker_built(worker)
                        if self._supervision.spec(worker).incarnation:
                            self._on_replaced()
                case _Removed(process):
                    self._supervision.process_ended(process)
                case _Refused(refusal):
                    self._supervision.refused(refusal)
                case _RankFailed(failure):
                    self._attempts.rank_failed(failure)
                case _RowsReported(report):
                    self._attempts.release_slots((report.gang, report.index), self._migration.reported(report))
                case _RestReported(rested):
                    self._turns.reported(rested)
            if self._now >= self._look_again:
                self._look_again = self._now + self._longest_wait_s
                self._supervision.check_deadlines()
                self._attempts.check_deadlines()
                self._turns.check_deadlines()
                self._on_look(self._now)

    def release(self, addresses: Iterable[Address]) -> None:
        """Lets go of the results of nodes that no later node depends on."""
        self._attempts.release(addresses)

    def fetch_weights(self, version: int) -> None:
        """Has a version brought to the hosts that will read it, before they need it."""
        self._weights.fetch(version)

    def take_weights(self, version: int) -> None:
        """Has replicas take a version now, for the rows that they have in flight."""
        self._weights.take(version)

    def release_weights(self, version: int) -> None:
        """Has the copies of a version removed that other hosts have."""
        self._weights.release(version)

    def close(self) -> None:
        """Lets go of everything that is out; what a stage is in the middle of ends with its process. Other hosts remove
        their copies of weights."""
        if not self._started:
            return
        self._weights.remove()
        self._attempts.close()
        self._supervision.close()
        for topic in (_PROCESSES, OUTCOMES, FAILURES, TAILS, RESTED, REFUSALS):
            self._client.unsubscribe_topic(topic)
        self._started = False

    def _worker_down(self, worker: WorkerKey, suspect: bool) -> None:
        self._attempts.worker_down(worker, suspect)
        self._migration.worker_down(worker)
        self._turns.worker_down(worker)

    # ---- notices ---------------------------------------------------------------------------------------------------

    def _next_notice(self) -> _Notice | None:
        """What happened next; None if nothing does before somebody should look at the deadlines."""
        try:
            notice = self._notices.get(timeout=self._longest_wait_s)
        except queue.Empty:
            notice = None
        now = time.monotonic()
        self._now += min(now - self._looked, _LONGEST_LOOK_S)
        self._looked = now
        return notice

    def _watch(self, future: Future, worker: WorkerKey, address: Address | None) -> None:
        notice = _Ended(future, worker, address)
        future.add_done_callback(lambda _: self._notices.put(notice))

    def _on_outcome(self, event: tuple[float, str]) -> None:
        """Takes a worker's report (called in the client's thread)."""
        self._notices.put(_Reported(*outcome_from_json(event[1])))

    def _on_failure(self, event: tuple[float, str]) -> None:
        """Takes a rank's report (called in the client's thread)."""
        self._notices.put(_RankFailed(failure_from_json(event[1])))

    def _on_refusal(self, event: tuple[float, dict[str, Any]]) -> None:
        """Takes the scheduler's report of a worker that it refused (called in the client's thread)."""
        self._notices.put(_Refused(JoinRefused(**event[1])))

    def _on_rows(self, event: tuple[float, str]) -> None:
        """Takes a replica's report (called in the client's thread)."""
        self._notices.put(_RowsReported(rows_from_json(event[1])))

    def _on_rest(self, event: tuple[float, str]) -> None:
        """Takes a worker's report (called in the client's thread)."""
        self._notices.put(_RestReported(rested_from_json(event[1])))

    def _on_process(self, event: tuple[float, object]) -> None:
        """Takes the scheduler's report of a process that ended (called in the client's thread)."""
        message = event[1]
        if isinstance(message, dict) and message.get("action") == "remove-worker":
            self._notices.put(_Removed(str(message["worker"])))
