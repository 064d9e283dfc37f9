"""Run the graph on Dask: one loop that submits nodes, waits for them, and submits lost nodes again.

    driver thread, one loop:
      consumes         notices: a worker's report, a future that ended, a process that ended
      waits for        the next notice, or until the next check of the deadlines
      is unblocked by  Dask's client thread, which only puts notices into a queue
      carries out      the instructions of Dispatch, which decides what runs next
      reports to       Dispatch, the journal, and the run's callbacks

    Executor ──► Attempts ──────────┬──► Supervision
      │          nodes' futures     │    worker builds, losses, suspects
      ├────────► EarlyRowOrders ────┤      │
      ├────────► WeightOrders ──────┤      │
      ├────────► DeviceOrders ──────┤      │
      └────────► MigrationOrders ───┘      └── a worker is down ──► Attempts, MigrationOrders, DeviceOrders

When a worker dies, its unfinished nodes are lost and run again. The run ends when a node was lost `cluster.attempts`
times. An exception that a stage raises ends the run, unless it is transient: then the node runs again (`attempts.py`).
A rank of a gang may raise because a peer died. So the driver waits `PEER_GRACE_S` for news of a peer's death before it
counts the exception as the stage's own.

A worker that is overdue (stopped, hung) is killed if no other worker can do its work. Otherwise it becomes a *suspect*:
its shards run elsewhere at once. If a node has several attempts, the first one to commit counts. The suspect gets work
again when all its old attempts have ended. If the old attempts do not end within another deadline, the suspect is
killed.

The driver's clock stops while the driver is suspended. So deadlines do not expire while a job is suspended.
"""

from __future__ import annotations

import queue
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from distributed import Client, Future

from pipeline.driver.attempts import Attempts
from pipeline.driver.context import Context, ExecutorEvents, ExecutorSettings, WorkerKey
from pipeline.driver.orders import DeviceOrders, EarlyRowOrders, MigrationOrders, WeightOrders, mirror_spec
from pipeline.driver.supervision import Supervision
from pipeline.graph.dispatch import Dispatch
from pipeline.observe.journal import Journal
from pipeline.workers.attached import REFUSALS, JoinRefused
from pipeline.workers.messages import (
    REPORTS,
    MigrationDone,
    Outcome,
    RankFailure,
    Report,
    RowsReport,
    SleepReport,
)
from storage import codec
from storage.address import Address

_MAX_CHECK_INTERVAL_S = 5.0
"""Maximum number of seconds by which the driver's clock advances in one iteration of its loop. If the driver is
suspended for longer, the rest of this time does not count against deadlines."""
_PROCESSES = "all"
"""Topic on which Dask's scheduler reports the end of processes."""


@dataclass(frozen=True)
class _FutureEnded:
    """The end of a Dask future. `address`: the node that the future ran, or None if the future built a worker."""

    future: Future
    worker: WorkerKey
    address: Address | None


@dataclass(frozen=True)
class _ProcessEnded:
    """The notice that the worker process at the Dask address `process` has ended."""

    process: str


_Notice = _FutureEnded | _ProcessEnded | JoinRefused | Report


class Executor:
    """Runs on Dask workers the nodes that `Dispatch` hands out, and handles the workers' reports. The components
    `Supervision` and `Attempts` hold the Dask futures: one per build of a worker, and one per attempt at a node. The
    method `close` releases all of them."""

    def __init__(
        self,
        client: Client,
        dispatch: Dispatch,
        journal: Journal,
        settings: ExecutorSettings,
        events: ExecutorEvents,
    ) -> None:
        self._client = client
        self._dispatch = dispatch
        self._events = events
        self._notices: queue.SimpleQueue[_Notice] = queue.SimpleQueue()
        self._max_wait_s = min(1.0, settings.cluster.deadline_s / 4)
        self._last_check_at = time.monotonic()
        self._now = self._checks_again = 0.0
        self._started = False
        context = Context(
            client=client,
            gangs={gang.name: gang for gang in dispatch.gangs},
            dispatch=dispatch,
            journal=journal,
            settings=settings,
            name=uuid.uuid4().hex[:8],
            now=lambda: self._now,
            watch_future=self._watch,
        )
        self._supervision = Supervision(
            context, partial(mirror_spec, context), self._worker_down, events.on_worker_built
        )
        self._attempts = Attempts(context, self._supervision, events.on_node_done)
        self._early_rows = EarlyRowOrders(context, self._supervision)
        self._weights = WeightOrders(context, self._supervision)
        self._migration = MigrationOrders(context, self._supervision)
        self._device_sharing = DeviceOrders(context, self._supervision)

    def start(self) -> None:
        """Begin to build every worker. Each worker gets nodes as soon as it is built."""
        self._client.subscribe_topic(_PROCESSES, self._on_process)
        self._client.subscribe_topic(REPORTS, self._on_report)
        self._client.subscribe_topic(REFUSALS, self._on_refusal)
        self._started = True
        self._supervision.start()

    def run(self, is_finished: Callable[[], bool]) -> None:
        """Hand out nodes until `is_finished()` is true.

        Raises:
            StageFailed: a stage raised, or a node or worker was lost too often.
            ConfigError: a worker was refused because of its numerics or its host, and no other worker can do its work.
        """
        while not is_finished():
            for submit in self._dispatch.next_submits():
                self._attempts.submit(submit)
                self._early_rows.on_submit(submit)
            if self._device_sharing.start_handovers():
                continue
            self._migration.order_migrations()
            match self._next_notice():
                case Outcome() as outcome:
                    self._attempts.on_report(outcome)
                    self._migration.on_node_done(outcome)
                case _FutureEnded(future, worker, address) if address is not None:
                    self._attempts.on_future_end(worker, address, future)
                case _FutureEnded(future, worker):
                    if self._supervision.on_build_end(worker, future):
                        self._weights.on_worker_built(worker)
                        if self._supervision.spec(worker).incarnation:
                            self._events.on_worker_replaced()
                case _ProcessEnded(process):
                    self._supervision.on_process_end(process)
                case JoinRefused() as refusal:
                    self._supervision.on_join_refused(refusal)
                case RankFailure() as failure:
                    self._attempts.on_rank_failure(failure)
                case RowsReport() | MigrationDone() as report:
                    self._attempts.release_slots((report.gang, report.index), self._migration.on_report(report))
                case SleepReport() as report:
                    self._device_sharing.on_report(report)
            if self._now >= self._checks_again:
                self._checks_again = self._now + self._max_wait_s
                self._supervision.check_deadlines()
                self._attempts.check_deadlines()
                self._device_sharing.check_deadlines()
                self._events.on_tick(self._now)

    def release(self, addresses: Iterable[Address]) -> None:
        """Release the results of nodes that no later node depends on."""
        self._attempts.release(addresses)

    def fetch_weights(self, version: int) -> None:
        """Tell the hosts that will read a version of the weights to copy it now. Does not wait for the copies."""
        self._weights.order_fetch(version)

    def order_load(self, version: int) -> None:
        """Tell replicas to load a version of the weights now, for the rows that they have in flight. Does not wait."""
        self._weights.order_load(version)

    def release_weights(self, version: int) -> None:
        """Tell other hosts to remove their copies of a version of the weights. Does not wait."""
        self._weights.order_release(version)

    def close(self) -> None:
        """Release all Dask futures, and make the workers on other hosts remove their copies of weights. Running stages
        are not interrupted. They stop when their worker processes end."""
        if not self._started:
            return
        self._weights.remove_boards()
        self._attempts.close()
        self._supervision.close()
        for topic in (_PROCESSES, REPORTS, REFUSALS):
            self._client.unsubscribe_topic(topic)
        self._started = False

    def _worker_down(self, worker: WorkerKey, suspect: bool) -> None:
        self._attempts.on_worker_down(worker, suspect)
        self._migration.on_worker_down(worker)
        self._device_sharing.on_worker_down(worker)

    # ---- Notices ---------------------------------------------------------------------------------------------------

    def _next_notice(self) -> _Notice | None:
        """Return the next notice, or None if there is none before the next deadline check. Advance the field `_now` by
        the seconds since the last call, up to a limit."""
        try:
            notice = self._notices.get(timeout=self._max_wait_s)
        except queue.Empty:
            notice = None
        now = time.monotonic()
        self._now += min(now - self._last_check_at, _MAX_CHECK_INTERVAL_S)
        self._last_check_at = now
        return notice

    def _watch(self, future: Future, worker: WorkerKey, address: Address | None) -> None:
        notice = _FutureEnded(future, worker, address)
        future.add_done_callback(lambda _: self._notices.put(notice))

    def _on_report(self, event: tuple[float, str]) -> None:
        """Queue a worker's report (called in the client's thread)."""
        self._notices.put(codec.decode(Report, event[1]))

    def _on_refusal(self, event: tuple[float, dict[str, Any]]) -> None:
        """Queue the scheduler's report of a worker that it refused (called in the client's thread)."""
        self._notices.put(codec.from_document(JoinRefused, event[1]))

    def _on_process(self, event: tuple[float, object]) -> None:
        """Queue the scheduler's report of a process that ended (called in the client's thread)."""
        message = event[1]
        if isinstance(message, dict) and message.get("action") == "remove-worker":
            self._notices.put(_ProcessEnded(str(message["worker"])))
