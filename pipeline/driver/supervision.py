"""Supervise the worker processes (builds, losses, suspects, deadlines), and classify the errors of attempts. A build
makes a worker process ready: it loads the models or the engine.

    awaited ──its process joins──► building

                  built              overdue, and others can do its work
    building ───────────────► up ─────────────────────────────────────────► suspect (gets no work)
     ▲ │ its build failed      │ ▲                                            │ │ another deadline
     │ │                       │ └────────── all its old attempts ended ──────┘ │
     │ ▼                       ▼ died; or overdue, and no other can do it       ▼
    left out, or the       lost: killed, and built again ◄──────────────────────┘
    run ends

A build fails for one of three reasons: it raises an error, it does not end in time, or the worker's numerics differ
from those of its gang. Numerics are the facts on which the exact bits of its results depend, such as the processor. A
worker whose heartbeats stop during its build is lost.

A restart unit is lost as a whole. It is one replica, or all ranks of an ordered gang, since no rank can go on without
the others.

A unit is given up if its build fails, or if it is lost `cluster.attempts` times without finishing a node. This ends the
run, with one exception: a replica is left out if another replica of its pool is up or still being built. The pool goes
on without this replica. Its process is killed, and the driver builds the replica again later. If the replica did not
join or was not built in time, it is built again as soon as a new process joins in its place. Otherwise it is built
again after `cluster.start_timeout_s`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from distributed import Future
from distributed.comm import CommClosedError
from distributed.scheduler import KilledWorker, NoValidWorkerError, NoWorkerError

from pipeline.config.identity import fingerprint
from pipeline.driver.cluster import kill_workers, last_heartbeats, workers_by_address
from pipeline.driver.context import Context, WorkerKey
from pipeline.driver.graph_markers import build_key
from pipeline.errors import ConfigError, StageFailed, WorkersMissing
from pipeline.graph.graph import Gang, Node
from pipeline.observe.journal import EventKind
from pipeline.workers.attached import JoinRefused, with_exit_reason
from pipeline.workers.entry import build_worker, open_rendezvous
from pipeline.workers.messages import (
    PEER_ERRORS,
    Built,
    FailureKind,
    MirrorSpec,
    RankFailure,
    WorkerLost,
    WorkerSpec,
    pin_resource,
    worker_name,
)
from stages.models.protocol import RanksMissing
from storage.files import is_transient

LOSS_ERRORS = (
    KilledWorker,
    WorkerLost,
    RanksMissing,
    CancelledError,
    CommClosedError,
    NoWorkerError,
    NoValidWorkerError,
)
"""Classes of errors which mean that a worker process was lost. It is the process that computed the future, or the
process of another rank of the same gang. The stage itself did not fail, so its node runs again."""
_MAX_BACK_OFF_S = 60.0
PEER_GRACE_S = 5.0
"""Seconds to wait after a rank raised one of `PEER_ERRORS`. The cause may be the death of another rank's process. If no
such death is reported within this time, the error counts as the rank's own."""


class RankError(Exception):
    """An error of a rank other than 0. Only its class name and text reach the driver."""

    def __init__(self, name: str, text: str, transient: bool = False) -> None:
        super().__init__(name, text)
        self.name = name
        self.text = text
        self.transient = transient
        """True if a later attempt may succeed."""


class PeerLossSuspected(RankError, RuntimeError):
    """An error whose cause is not known yet, raised by a rank other than 0. The rank itself may have failed, or the
    process of another rank may have died."""


class AttemptState(StrEnum):
    """State of an attempt, from the reports and errors of its ranks."""

    OPEN = "open"
    """Ranks are still running, and none has failed."""
    UNCLEAR = "unclear"
    """A rank raised an error that it would also raise if a peer had died. News of a death may still arrive."""
    DONE = "done"
    FAILED = "failed"


def attempt_state(num_ranks: int, reported: bool, errors: Collection[BaseException]) -> AttemptState:
    """Return the state of an attempt on `num_ranks` ranks. `reported`: rank 0 reported that all ranks did their part.
    `errors`: one for each rank that raised."""
    if reported:
        return AttemptState.DONE
    if not errors:
        return AttemptState.OPEN
    own = any(isinstance(error, LOSS_ERRORS) or not isinstance(error, PEER_ERRORS) for error in errors)
    return AttemptState.FAILED if own or len(errors) == num_ranks else AttemptState.UNCLEAR


def future_error(future: Future) -> BaseException:
    """Return the error of a future that ended without a result."""
    if future.status == "error":
        return future.exception()
    return CancelledError(f"{future.key} was {future.status}")


def rank_error(failure: RankFailure) -> BaseException:
    """Return an exception for the failure that a rank other than 0 reported. The class of the exception
    says what happened:
    - WorkerLost or RanksMissing: a process was lost
    - PeerLossSuspected: the rank failed, or the process of another rank died
    - RankError: the rank itself failed
    """
    match failure.kind:
        case FailureKind.LOST:
            return WorkerLost(failure.worker, failure.incarnation)
        case FailureKind.MISSING:
            return RanksMissing(str(failure.address), failure.missing, failure.text)
        case FailureKind.PEER:
            return PeerLossSuspected(failure.error, failure.text, failure.transient)
        case FailureKind.OWN:
            return RankError(failure.error, failure.text, failure.transient)


def is_retryable(error: BaseException) -> bool:
    """Return True if the error is transient, so that a later attempt may succeed."""
    return error.transient if isinstance(error, RankError) else is_transient(error)


def back_off_s(times: int) -> float:
    """Return the seconds to wait after the `times`-th transient error of a node."""
    return min(_MAX_BACK_OFF_S, 2.0**times)


def error_text(error: BaseException) -> str:
    """Return the class name and the text of an error. For a `RankError`, return the class name and the text of the
    error that the rank raised."""
    if isinstance(error, RankError):
        return f"{error.name}: {error.text}"
    return f"{type(error).__name__}: {error}"


def repeat_hints(node: Node, run_dir: Path) -> dict[str, str]:
    """Return label -> text to show about a failed node: the node's inputs and, except for `publish`, the command that
    runs the node alone."""
    address, inputs = node.address, ", ".join(map(str, node.inputs)) or "none but the prompts"
    made_from = {"inputs": f"{inputs}; weights v{node.version}"}
    if address.stage == "publish":
        return made_from
    shard = f" --shard {address.shard}" if address.shard else ""
    command = f"stageline replay {run_dir} --step {address.step} --stage {address.stage}{shard}"
    return {**made_from, "run it alone": command}


# ---- Heartbeats ------------------------------------------------------------------------------------------

_MIN_WITHOUT_HEARTBEAT_S = 20.0
"""Shortest time without heartbeats after which a process counts as stopped. Imports and other native code that holds
Python's lock can delay heartbeats."""


class HeartbeatWatch:
    """Measures for how long each process has sent no heartbeat. Keeps each process's last heartbeat, and the driver's
    time at which this heartbeat was first seen. The time in a heartbeat comes from the scheduler's clock, so it is only
    compared with other heartbeats of the process."""

    def __init__(self) -> None:
        self._last_heartbeats: dict[str, tuple[float, float]] = {}

    def seconds_without_heartbeat(self, heartbeats: Mapping[str, float], now: float) -> dict[str, float]:
        """Return name of a process -> seconds since its latest heartbeat was first seen. `heartbeats`: name of a
        process -> time of its latest heartbeat."""
        before = self._last_heartbeats
        self._last_heartbeats = {
            name: before[name] if name in before and before[name][0] == heartbeat else (heartbeat, now)
            for name, heartbeat in heartbeats.items()
        }
        return {name: now - since for name, (_, since) in self._last_heartbeats.items()}


def counts_as_stopped(without_heartbeat_s: float, start_timeout_s: float) -> bool:
    """Return True if a process counts as stopped during its build, because it has sent no heartbeat for longer than a
    limit. The limit is a third of the start timeout, but at least `_MIN_WITHOUT_HEARTBEAT_S`. A slow process still
    sends heartbeats."""
    return without_heartbeat_s > max(start_timeout_s / 3, _MIN_WITHOUT_HEARTBEAT_S)


# ---- Supervision -----------------------------------------------------------------------------------------

_ANSWER_S = 10.0
_FIRST = 1
"""Dask priority of the tasks that build a worker. It is higher than the priority of every node except `publish[0]`.
That node delays no build, because it is submitted only when the workers of its gang are built."""


@dataclass
class _Worker:
    """One incarnation (process) of a worker, as the driver sees it."""

    spec: WorkerSpec
    build: Future | None
    """Future of the worker's build. None while the worker is left out of its pool and waits for the next try."""
    deadline: float
    """Time at which the driver must act, on the driver's clock. What it does then depends on the worker's
    state:
    - its process has not joined, or the worker is being built: the worker is too late and is given up
    - its build failed with `error`: the run ends with this error
    - it is left out of its pool: the worker is built again
    - it is a suspect: the worker is treated as lost
    - it is up and no suspect: nothing, and the time is infinite
    """
    has_joined: bool = False
    """True if the scheduler knows the worker's process."""
    is_left_out: bool = False
    """True while the pool goes on without this replica, because the replica could not be built or was lost too often.
    It stays True while the driver builds the replica again."""
    is_up: bool = False
    address: str | None = None
    """The worker's Dask address; None until the worker is built."""
    host: str = ""
    """The worker's host; empty until the worker is built."""
    last_progress_s: float = 0.0
    """Time at which the worker's process last finished a node; 0 if it has finished none."""
    error: BaseException | None = None
    """Error that this worker's build raised and whose cause is not known yet: a failure of the worker itself, or the
    death of another rank. None if there is no such error."""


def restart_unit(gang: Gang, index: int) -> list[WorkerKey]:
    """Return the workers that are killed and built again together: all ranks of an ordered gang, or one replica."""
    return [(gang.name, i) for i in (range(gang.workers) if gang.is_ordered else (index,))]


class Supervision:
    """Owns the builds and the state of all worker processes."""

    def __init__(
        self,
        context: Context,
        mirror: Callable[[str], MirrorSpec | None],
        on_down: Callable[[WorkerKey, bool], None],
        on_built: Callable[[WorkerKey, Mapping[str, str]], None],
    ) -> None:
        """Start with no workers.

        Args:
            mirror: takes the name of a gang, and returns how the gang's workers exchange weights with other hosts.
                Returns None if these workers exchange no weights.
            on_down: called with (worker, suspect) when a worker must get no more work, because it is a suspect or its
                restart unit is about to be killed.
            on_built: called with (worker, numerics) before a worker gets work. If it raises ConfigError, the worker
                counts as one that cannot be built.
        """
        self._context = context
        self._on_built = on_built
        self._mirror = mirror
        self._on_down = on_down
        self._workers: dict[WorkerKey, _Worker] = {}
        self._heartbeats = HeartbeatWatch()
        self._losses: dict[WorkerKey, int] = {}
        """First worker of a restart unit -> number of the unit's losses since it last finished a node."""

    # ---- Queries ---------------------------------------------------------------------------------------------------

    def spec(self, worker: WorkerKey) -> WorkerSpec:
        """Return the spec of the worker's present incarnation."""
        return self._workers[worker].spec

    def address(self, worker: WorkerKey) -> str:
        """Return the Dask address of a worker that is up."""
        address = self._workers[worker].address
        assert address is not None, f"{worker} is not up"
        return address

    def addresses(self) -> dict[str, str]:
        """Return name of a worker -> its Dask address, for all workers that are built."""
        return {w.spec.name: w.address for w in self._workers.values() if w.address is not None}

    def is_present(self, worker: WorkerKey, incarnation: int) -> bool:
        """Return True if the worker's present incarnation has this number. Reports of earlier incarnations do not
        count."""
        known = self._workers.get(worker)
        return known is not None and known.spec.incarnation == incarnation

    def last_progress(self, worker: WorkerKey) -> float:
        """Return the time at which the worker's process last finished a node, or 0 if it has finished none."""
        return self._workers[worker].last_progress_s

    def worker_of(self, error: BaseException) -> WorkerKey | None:
        """Return the worker that an error of `LOSS_ERRORS` names. Return None if the error names no worker. Also return
        None if it names an earlier process of a worker that has been restarted since."""
        for key, worker in self._workers.items():
            if worker.build is None:
                continue
            if isinstance(error, KilledWorker) and worker.address == error.last_worker.address:
                return key
            if isinstance(error, WorkerLost) and (worker.spec.name, worker.spec.incarnation) == error.args:
                return key
        return None

    def failure(
        self,
        subject: str,
        gang: str,
        errors: Mapping[int, BaseException],
        further: Mapping[str, str] = MappingProxyType({}),
    ) -> StageFailed:
        """Return the StageFailed that ends the run. Its text is `subject`, followed by the text of one of `errors`. An
        error outside `PEER_ERRORS` is preferred, because the death of another rank cannot explain it. `errors`: rank or
        index of the replica -> its error. `further`: label -> further text to show."""
        index = next((i for i, e in errors.items() if not isinstance(e, PEER_ERRORS)), min(errors))
        error = errors[index]
        failed = StageFailed(
            f"{subject} {error_text(error)}", {**_log_of_worker(self._workers[gang, index]), **further}
        )
        failed.__cause__ = error
        return failed

    # ---- Events ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to build every worker."""
        for gang in self._context.gangs.values():
            for unit in dict.fromkeys(tuple(restart_unit(gang, index)) for index in range(gang.workers)):
                self._build(unit, incarnation=0)

    def on_build_end(self, key: WorkerKey, future: Future) -> bool:
        """Handle the end of a worker's set-up, in which the worker builds its models or engine. Return True if the
        worker is ready for nodes.

        Raises:
            StageFailed: the worker cannot be set up, and no other can do its work.
            ConfigError: `on_built` refused the worker, and no other can do its work.
        """
        worker = self._workers[key]
        if worker.build is None or worker.build is not future:
            return False
        built = _build_result(future)
        future.release()  # otherwise Dask would compute it again in a process that comes back
        if isinstance(built, LOSS_ERRORS):
            self.restart_lost(key, f"while it was built: {type(built).__name__}")
        elif isinstance(built, BaseException):
            if worker.spec.size == 1 or not isinstance(built, PEER_ERRORS):
                self._leave_out(key, self._build_failure(key, built))
            else:
                worker.error, worker.deadline = built, self._context.now() + PEER_GRACE_S
        else:
            try:
                self._on_built(key, built.numerics)
            except ConfigError as refused:
                self._leave_out(key, ConfigError(refused.key, f"{refused.message} (host {built.host})"))
                return False
            worker.has_joined = True
            worker.is_left_out, worker.is_up, worker.address, worker.deadline = False, True, built.address, math.inf
            worker.host = built.host
            unit = restart_unit(self._context.gangs[key[0]], key[1])
            if all(self._workers[one].is_up for one in unit):
                self._context.dispatch.on_worker_up(*unit[0])
                hosts = sorted({self._workers[one].host for one in unit})
                detail = f"numerics {fingerprint(built.numerics)} on host {', '.join(hosts)}"
                self._context.journal.append_now(
                    EventKind.GANG_BUILT, gang=key[0], worker=worker.spec.name, detail=detail
                )
            return True
        return False

    def on_process_end(self, address: str) -> None:
        """Handle the end of the process at a Dask address: the process's worker is lost."""
        key = next((key for key, worker in self._workers.items() if worker.address == address), None)
        if key is not None:
            self.restart_lost(key, "its process ended")

    def on_join_refused(self, refusal: JoinRefused) -> None:
        """Handle the refusal of a worker that asked to join an attached run.

        Raises:
            ConfigError: the worker's host is unfit, and no other worker can do its work.
        """
        key = refusal.gang, refusal.index
        worker = self._workers.get(key)
        name = worker_name(*key)
        if refusal.fatal and worker is not None and not worker.has_joined and worker.build is not None:
            self._leave_out(key, ConfigError("cluster.kind", f"given 'attached'; worker {name}: {refusal.text}"))
            return
        detail = f"a worker {name} was refused: {refusal.text}"
        self._context.journal.append_now(EventKind.WARNED, gang=refusal.gang, worker=name, detail=detail)

    def record_progress(self, key: WorkerKey) -> None:
        """Record that a worker finished a node. The count of how often its restart unit was lost goes back to
        0. The unit is one replica, or all ranks of an ordered gang."""
        self._workers[key].last_progress_s = self._context.now()
        self._losses.pop((key[0], 0) if self._context.gangs[key[0]].is_ordered else key, None)

    def suspect(self, key: WorkerKey) -> None:
        """Treat an overdue worker as a suspect. Its nodes run again on other workers, and it gets no new nodes until
        the method `trust` is called. If `trust` is not called within another `cluster.deadline_s`, the worker counts as
        lost."""
        self._workers[key].deadline = self._context.now() + self._context.cluster.deadline_s
        self._on_down(key, True)

    def trust(self, key: WorkerKey) -> None:
        """Hand out new nodes to a suspect again. Call this when all its old attempts have ended."""
        self._workers[key].deadline = math.inf
        self._context.dispatch.on_worker_up(*key)

    def restart_lost(self, key: WorkerKey, reason: str) -> None:
        """Restart a worker whose process has died, or must be killed. The whole restart unit is killed and built again:
        one replica, or all ranks of an ordered gang. The unit's nodes are reset. After `cluster.attempts` losses
        without a finished node, a replica is left out of its pool instead.

        Raises:
            StageFailed: the unit was lost too often, and no other worker can do its work.
        """
        gang, worker = self._context.gangs[key[0]], self._workers[key]
        unit = restart_unit(gang, key[1])
        if worker.host and self._context.settings.has_attached_workers:  # may differ from the driver's
            reason = f"{reason} (host {worker.host})"
        reason = with_exit_reason(reason, worker.spec.log)
        losses = self._losses[unit[0]] = self._losses.get(unit[0], 0) + 1
        self._context.journal.append_now(EventKind.GANG_LOST, gang=gang.name, worker=worker.spec.name, detail=reason)
        if losses >= self._context.cluster.attempts:
            failed = StageFailed(
                f"worker {worker.spec.name} was lost {losses} times (cluster.attempts) without finishing "
                f"anything; last: {reason}",
                _log_of_worker(worker),
            )
            self._leave_out(key, failed)
            return
        self._on_down(key, False)
        self._kill([self._workers[one] for one in unit])
        self._build(unit, worker.spec.incarnation + 1, left_out=worker.is_left_out)

    def check_deadlines(self) -> None:
        """Act on the workers whose deadline has passed:
        - A worker that has not joined, or is not built in time, is given up: its pool goes on without it, or the run
          ends.
        - A suspect is treated as lost.
        - A replica that was left out of its pool is built again.

        Also check which processes have joined, and whose heartbeats have stopped during a build.

        Raises:
            StageFailed: a worker is given up, and no other can do its work. Or a build failed with an error that the
                death of another rank could explain, and no such death was reported.
        """
        self._check_joined_processes()
        for key, worker in list(self._workers.items()):
            if worker.deadline > self._context.now() or self._workers[key] is not worker:
                continue
            if worker.build is None:
                self._build([key], worker.spec.incarnation + 1, left_out=True)
            elif worker.error is not None:
                raise self._build_failure(key, worker.error)
            elif not worker.is_up:
                self._leave_out(key, self._overdue_error(worker), retry_at_join=True)
            else:
                self.restart_lost(key, "it was a suspect, and did not finish its old attempts within another deadline")

    def close(self) -> None:
        """Release the Dask futures of all builds of workers. The worker processes go on. The cluster that started them
        ends them."""
        for worker in self._workers.values():
            if worker.build is not None:
                worker.build.release()
        self._workers.clear()

    def _check_joined_processes(self) -> None:
        """Start the build deadline of each worker whose process has joined. Treat a worker as lost if its heartbeats
        stop during its build. Raises StageFailed if a worker was lost too often."""
        awaited = {key: one for key, one in self._workers.items() if one.build is not None and not one.is_up}
        now, start_s = self._context.now(), self._context.settings.start_timeout_s
        since_heartbeat_s = (
            self._heartbeats.seconds_without_heartbeat(last_heartbeats(self._context.client), now) if awaited else {}
        )
        for key, worker in awaited.items():
            without_heartbeat_s = since_heartbeat_s.get(worker.spec.name)
            if without_heartbeat_s is None or worker.error is not None or self._workers[key] is not worker:
                continue
            if not worker.has_joined:
                worker.has_joined, worker.deadline = True, now + start_s
            elif counts_as_stopped(without_heartbeat_s, start_s):
                self.restart_lost(key, f"it sent no heartbeat for {without_heartbeat_s:.0f} s while it was built")

    def _overdue_error(self, worker: _Worker) -> WorkersMissing:
        settings, name = self._context.settings, worker.spec.name
        if worker.has_joined or not settings.has_attached_workers:
            limit = f"cluster.start_timeout_s = {settings.start_timeout_s:g}"
            return WorkersMissing(f"worker {name} did not come up within {limit}", _log_of_worker(worker))
        command = f"stageline worker {settings.paths.root} --gang {worker.spec.gang} --index {worker.spec.index}"
        limit = f"cluster.arrival_timeout_s = {settings.cluster.arrival_timeout_s:g}"
        return WorkersMissing(f"worker {name} did not join within {limit}: `{command}` starts it, on any host")

    def _leave_out(self, key: WorkerKey, error: Exception, *, retry_at_join: bool = False) -> None:
        """Leave a worker out, if another replica of its pool is up or being built; else raise `error`. It is built
        again after `cluster.start_timeout_s`, or with `retry_at_join` as soon as its process joins."""
        gang, worker = self._context.gangs[key[0]], self._workers[key]
        again_s = self._context.settings.start_timeout_s
        others = [self._workers[gang.name, i] for i in range(gang.workers) if i != key[1]]
        if gang.is_ordered or all(other.is_left_out for other in others):
            raise error
        detail = f"{worker.spec.name} is left out, and the rest of {gang.name} continues: {error}"
        detail += f" (see {worker.spec.log})" if worker.spec.log is not None else ""
        detail += "" if retry_at_join else f"; it is tried again in {again_s:g} s"
        self._context.journal.append_now(EventKind.WARNED, gang=gang.name, worker=worker.spec.name, detail=detail)
        self._on_down(key, False)
        self._kill([worker])
        if retry_at_join:
            self._build([key], worker.spec.incarnation + 1, left_out=True)
        else:
            self._workers[key] = _Worker(worker.spec, None, self._context.now() + again_s, is_left_out=True)

    def _kill(self, lost: Sequence[_Worker]) -> None:
        """Release the Dask futures of these workers' builds, and kill the workers' processes."""
        for one in lost:
            if one.build is not None:
                one.build.release()
        client = self._context.client
        names, addresses = {one.spec.name for one in lost if one.address is None}, {one.address for one in lost}
        known = workers_by_address(client)
        kill_workers(client, [address for address, name in known.items() if name in names or address in addresses])

    def _build(self, unit: Sequence[WorkerKey], incarnation: int, *, left_out: bool = False) -> None:
        """Submit the Dask tasks that build the workers of a restart unit: one replica, or all ranks of an ordered gang.
        A task runs as soon as its worker's process has joined. In a gang of several ranks, rank 0 first opens the
        rendezvous. `left_out`: True if the pool goes on without this replica until it is built."""
        gang = self._context.gangs[unit[0][0]]
        specs = [self._spec(gang, index, incarnation) for _, index in unit]
        rendezvous = [self._submit("rendezvous", open_rendezvous, specs[0])] if len(unit) > 1 else []
        settings = self._context.settings
        limit_s = settings.cluster.arrival_timeout_s if settings.has_attached_workers else settings.start_timeout_s
        for key, spec in zip(unit, specs, strict=True):
            future = self._submit("build", build_worker, spec, *rendezvous)
            self._workers[key] = _Worker(spec, future, self._context.now() + limit_s, is_left_out=left_out)
            self._context.watch_future(future, key, None)

    def _spec(self, gang: Gang, index: int, incarnation: int) -> WorkerSpec:
        settings, name = self._context.settings, worker_name(gang.name, index)
        return WorkerSpec(
            gang=gang.name,
            index=index,
            size=gang.workers if gang.is_ordered else 1,
            incarnation=incarnation,
            runtime=settings.runtime,
            config_yaml=settings.config_yaml,
            log=str((settings.paths.logs / f"{name}.log").resolve()),
            mirror=self._mirror(gang.name),
        )

    def _submit(self, task: str, work: Callable[..., object], spec: WorkerSpec, *more: Future) -> Future:
        """Submit the `task` of a build to one worker, with a higher priority than nodes have (see `_FIRST`)."""
        return self._context.client.submit(
            work,
            spec,
            *more,
            key=build_key(spec.name, spec.incarnation, self._context.name, task),
            resources={pin_resource(spec.gang, spec.index): 1},
            priority=_FIRST,
            retries=0,
            pure=False,
        )

    def _build_failure(self, key: WorkerKey, error: BaseException) -> StageFailed:
        return self.failure(f"worker {self._workers[key].spec.name} could not be built:", key[0], {key[1]: error})


def _log_of_worker(worker: _Worker) -> dict[str, str]:
    return {} if worker.spec.log is None else {"log": str(worker.spec.log)}


def _build_result(future: Future) -> Built | BaseException:
    """Return the report of a worker that is built, or the error of its build."""
    if future.status != "finished":
        return future_error(future)
    try:
        built: Built = future.result(timeout=_ANSWER_S)
        return built
    except LOSS_ERRORS as error:
        return error
    except TimeoutError:
        return CancelledError(f"{future.key} was built, but does not answer")
