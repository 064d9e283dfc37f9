"""Whether every worker process is what it should be: builds, losses, suspects, deadlines.

    awaited ──its process is there──► building

                  built              overdue, and others can do its work
    building ───────────────► up ─────────────────────────────────────────► suspect (gets no work)
     ▲ │ raised, not in time,  │ ▲                                            │ │ another deadline
     │ │ or other numerics     │ └────────── all that it had came back ───────┘ │
     │ ▼                       ▼ died; or overdue, and nobody else can          ▼
    left out, or the       lost: killed, and built anew ◄───────────────────────┘
    run ends

What is lost together is a restart unit: one replica, or all ranks of an ordered gang, since none can go on without the
others. A unit that is lost `cluster.attempts` times without finishing anything is given up, like one that cannot be
built. That ends the run, unless it is a replica of a pool and another one is there or on its way: then the pool goes on
without it, and it is tried again every `cluster.start_timeout_s`. One whose heartbeats end while it is built is lost.

May import distributed, pipeline.config, pipeline.driver.{cluster, context, silence, task_keys, verdict},
pipeline.workers and below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass

from distributed import Future
from distributed.scheduler import KilledWorker

from pipeline.config.errors import ConfigError
from pipeline.config.identity import fingerprint
from pipeline.driver.cluster import heartbeats, kill_workers, workers_by_address
from pipeline.driver.context import Context, StageFailed, WorkerKey, WorkersMissing
from pipeline.driver.silence import Silences, stopped
from pipeline.driver.task_keys import build_key
from pipeline.driver.verdict import LOST, PEER_GRACE_S, describe, error_of
from pipeline.graph.gangs import Gang
from pipeline.observe.journal import EventKind
from pipeline.workers.entry import build_worker, open_meeting
from pipeline.workers.joining import JoinRefused
from pipeline.workers.last_words import with_last_words
from pipeline.workers.messages import PEER_ERRORS, Built, MirrorSpec, WorkerLost, WorkerSpec, pin_resource, worker_name

_ANSWER_S = 10.0
_FIRST = 1
"""Dask priority of a build: nodes have negative ones."""


@dataclass
class _Worker:
    """One incarnation of a worker process as the driver knows it."""

    spec: WorkerSpec
    building: Future | None
    """None: it is left out, and not being tried again yet."""
    deadline: float
    """Until its process is there: when that is overdue; while it is built: when that is; where it is left out: when it
    is tried again. Once it is up: when a suspect is given up."""
    here: bool = False
    """Its process is there: the scheduler knows it."""
    left_out: bool = False
    """Its pool goes on without it, until it is up."""
    up: bool = False
    address: str | None = None
    """Dask's; known once it is built."""
    host: str = ""
    """Where it is; known likewise."""
    progress: float = 0.0
    """When it last finished something."""
    error: BaseException | None = None
    """Of a build that may have failed because a peer died."""


def restart_unit(gang: Gang, index: int) -> list[WorkerKey]:
    """The workers that are lost, and built anew, together with this one: all ranks of an ordered gang."""
    return [(gang.name, i) for i in (range(gang.workers) if gang.ordered else (index,))]


class Supervision:
    """Owns the builds of all worker processes, and what is known of each process."""

    def __init__(
        self,
        context: Context,
        mirror: Callable[[str], MirrorSpec | None],
        on_down: Callable[[WorkerKey, bool], None],
        on_built: Callable[[WorkerKey, Mapping[str, str]], None],
    ) -> None:
        """`mirror(gang)` says what its workers must know of weights on other hosts. `on_down(worker, suspect)` is
        called when a worker is to get no more work: it is a suspect, or its restart unit is about to be killed.
        `on_built(worker, numerics)`: before it gets any; a worker that it refuses (ConfigError) is one that cannot be
        built."""
        self._context = context
        self._on_built = on_built
        self._mirror = mirror
        self._on_down = on_down
        self._workers: dict[WorkerKey, _Worker] = {}
        self._silences = Silences()
        self._losses: dict[WorkerKey, int] = {}
        """How often each restart unit, by its first worker, was lost since it last finished a node."""

    # ---- what is known ---------------------------------------------------------------------------------------------

    def spec(self, worker: WorkerKey) -> WorkerSpec:
        """Of its present incarnation."""
        return self._workers[worker].spec

    def address(self, worker: WorkerKey) -> str:
        """Dask address of a worker that is up."""
        address = self._workers[worker].address
        assert address is not None, f"{worker} is not up"
        return address

    def addresses(self) -> dict[str, str]:
        """Of the workers that are built, by name."""
        return {w.spec.name: w.address for w in self._workers.values() if w.address is not None}

    def is_present(self, worker: WorkerKey, incarnation: int) -> bool:
        """Whether this incarnation is the worker's present one: what an earlier one reports does not count."""
        known = self._workers.get(worker)
        return known is not None and known.spec.incarnation == incarnation

    def last_progress(self, worker: WorkerKey) -> float:
        """When its process last finished a node; 0 if it has not."""
        return self._workers[worker].progress

    def worker_of(self, error: BaseException) -> WorkerKey | None:
        """The worker that an error of `LOST` says is lost, if it is not being replaced already."""
        for key, worker in self._workers.items():
            if worker.building is None:
                continue
            if isinstance(error, KilledWorker) and worker.address == error.last_worker.address:
                return key
            if isinstance(error, WorkerLost) and (worker.spec.name, worker.spec.incarnation) == error.args:
                return key
        return None

    def failure(self, what: str, gang: str, errors: Mapping[int, BaseException], hint: str = "") -> StageFailed:
        """The end of the run, with the error that a collective did not raise, if there is one, and a hint of what to do
        about it. `errors`: by index."""
        index = next((i for i, e in errors.items() if not isinstance(e, PEER_ERRORS)), min(errors))
        error = errors[index]
        said = f"{what} {describe(error)}{_see_log(self._workers[gang, index])}"
        failed = StageFailed(f"{said}. {hint}" if hint else said)
        failed.__cause__ = error
        return failed

    # ---- what happened ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to build every worker."""
        for gang in self._context.gangs.values():
            for unit in dict.fromkeys(tuple(restart_unit(gang, index)) for index in range(gang.workers)):
                self._build(unit, incarnation=0)

    def build_ended(self, key: WorkerKey, future: Future) -> bool:
        """A build ended. Returns whether the process is built.

        Raises:
            StageFailed: it cannot be, and nobody else can do its work.
            ConfigError: likewise, by `on_built`.
        """
        worker = self._workers[key]
        if worker.building is None or worker.building is not future:
            return False
        built = _build_result(future)
        future.release()  # a result still wanted would be computed again in a process that came back
        if isinstance(built, LOST):
            self.lost(key, f"while it was built: {type(built).__name__}")
        elif isinstance(built, BaseException):
            if worker.spec.size == 1 or not isinstance(built, PEER_ERRORS):
                self._give_up(key, self._not_built(key, built))
            else:
                worker.error, worker.deadline = built, self._context.now() + PEER_GRACE_S
        else:
            try:
                self._on_built(key, built.numerics)
            except ConfigError as refused:
                self._give_up(key, ConfigError(refused.key, f"{refused.message} (host {built.host})"))
                return False
            worker.here = True
            worker.left_out, worker.up, worker.address, worker.deadline = False, True, built.address, math.inf
            worker.host = built.host
            unit = restart_unit(self._context.gangs[key[0]], key[1])
            if all(self._workers[one].up for one in unit):
                self._context.dispatch.worker_up(*unit[0])
                hosts = sorted({self._workers[one].host for one in unit})
                detail = f"numerics {fingerprint(built.numerics)} on host {', '.join(hosts)}"
                self._context.journal.now(EventKind.GANG_BUILT, gang=key[0], worker=worker.spec.name, detail=detail)
            return True
        return False

    def process_ended(self, address: str) -> None:
        """The scheduler lost sight of a process, by its Dask address."""
        key = next((key for key, worker in self._workers.items() if worker.address == address), None)
        if key is not None:
            self.lost(key, "its process ended")

    def refused(self, refusal: JoinRefused) -> None:
        """A worker wanted to join an attached run, and was refused.

        Raises:
            ConfigError: its host is not fit, and nobody else can do its work.
        """
        key = refusal.gang, refusal.index
        worker = self._workers.get(key)
        name = worker_name(*key)
        if refusal.fatal and worker is not None and not worker.here and worker.building is not None:
            self._give_up(key, ConfigError("cluster.kind", f"given 'attached'; worker {name}: {refusal.text}"))
            return
        detail = f"a worker {name} was refused: {refusal.text}"
        self._context.journal.now(EventKind.WARNED, gang=refusal.gang, worker=name, detail=detail)

    def made_progress(self, key: WorkerKey) -> None:
        """A worker finished a node."""
        self._workers[key].progress = self._context.now()
        self._losses.pop((key[0], 0) if self._context.gangs[key[0]].ordered else key, None)

    def suspect(self, key: WorkerKey) -> None:
        """A worker is overdue, and others do its work. Until `trust` it gets none; it has another deadline for that."""
        self._workers[key].deadline = self._context.now() + self._context.settings.deadline_s
        self._on_down(key, True)

    def trust(self, key: WorkerKey) -> None:
        """All that a suspect had came back: it gets work again."""
        self._workers[key].deadline = math.inf
        self._context.dispatch.worker_up(*key)

    def lost(self, key: WorkerKey, why: str) -> None:
        """A process died, or must: what it had is reset, and its restart unit is built anew.

        Raises:
            StageFailed: that has happened too often, and nobody else can do its work.
        """
        gang, worker = self._context.gangs[key[0]], self._workers[key]
        unit = restart_unit(gang, key[1])
        if worker.host and self._context.settings.arrival_timeout_s is not None:  # it need not be the driver's
            why = f"{why} (host {worker.host})"
        why = with_last_words(why, worker.spec.log)
        losses = self._losses[unit[0]] = self._losses.get(unit[0], 0) + 1
        self._context.journal.now(EventKind.GANG_LOST, gang=gang.name, worker=worker.spec.name, detail=why)
        if losses >= self._context.settings.attempts:
            failed = StageFailed(
                f"worker {worker.spec.name} was lost {losses} times (cluster.attempts) without finishing "
                f"anything; last: {why}{_see_log(worker)}"
            )
            self._give_up(key, failed)
            return
        self._on_down(key, False)
        self._end([self._workers[one] for one in unit])
        self._build(unit, worker.spec.incarnation + 1, left_out=worker.left_out)

    def check_deadlines(self) -> None:
        """Gives up a worker that does not come, or come up, and a suspect that does not come back; tries one again that
        was left out.

        Raises:
            StageFailed: nobody else can do its work.
        """
        self._look_for_processes()
        for key, worker in list(self._workers.items()):
            if worker.deadline > self._context.now() or self._workers[key] is not worker:
                continue
            if worker.building is None:
                self._build([key], worker.spec.incarnation + 1, left_out=True)
            elif worker.error is not None:
                raise self._not_built(key, worker.error)
            elif not worker.up:
                self._give_up(key, self._overdue(worker), at_once=True)
            else:
                self.lost(key, "did not come back")

    def close(self) -> None:
        """Lets go of builds; processes are ended by whoever started them."""
        for worker in self._workers.values():
            if worker.building is not None:
                worker.building.release()
        self._workers.clear()

    # ---- how -------------------------------------------------------------------------------------------------------

    def _look_for_processes(self) -> None:
        """Gives the workers whose processes have come in the meantime their time to be built; one that is stopped while
        it is built is lost (which may raise StageFailed)."""
        awaited = {key: one for key, one in self._workers.items() if one.building is not None and not one.up}
        now, start_s = self._context.now(), self._context.settings.start_timeout_s
        silences = self._silences.look(heartbeats(self._context.client), now) if awaited else {}
        for key, worker in awaited.items():
            silent_s = silences.get(worker.spec.name)
            if silent_s is None or worker.error is not None or self._workers[key] is not worker:
                continue
            if not worker.here:
                worker.here, worker.deadline = True, now + start_s
            elif stopped(silent_s, start_s):
                self.lost(key, f"it said nothing for {silent_s:.0f} s while it was built")

    def _overdue(self, worker: _Worker) -> WorkersMissing:
        settings, name = self._context.settings, worker.spec.name
        if worker.here or settings.arrival_timeout_s is None:
            limit = f"cluster.start_timeout_s = {settings.start_timeout_s:g}"
            return WorkersMissing(f"worker {name} did not come up within {limit}{_see_log(worker)}")
        command = f"stageline worker {settings.run_dir} --gang {worker.spec.gang} --index {worker.spec.index}"
        limit = f"cluster.arrival_timeout_s = {settings.arrival_timeout_s:g}"
        return WorkersMissing(f"worker {name} did not join within {limit}: `{command}` starts it, on any host")

    def _give_up(self, key: WorkerKey, why: Exception, *, at_once: bool = False) -> None:
        """A worker cannot be had. Its pool goes on without it, if another replica is there or on its way; it is tried
        again after `cluster.start_timeout_s`, or at once: that build begins when its process is there.

        Raises:
            Exception: `why`, where nobody else can do its work.
        """
        gang, worker, again_s = self._context.gangs[key[0]], self._workers[key], self._context.settings.start_timeout_s
        others = [self._workers[gang.name, i] for i in range(gang.workers) if i != key[1]]
        if gang.ordered or all(other.left_out for other in others):
            raise why
        detail = f"{worker.spec.name} is left out, the rest of {gang.name} goes on: {why}"
        detail += "" if at_once else f"; it is tried again in {again_s:g} s"
        self._context.journal.now(EventKind.WARNED, gang=gang.name, worker=worker.spec.name, detail=detail)
        self._on_down(key, False)
        self._end([worker])
        if at_once:
            self._build([key], worker.spec.incarnation + 1, left_out=True)
        else:
            self._workers[key] = _Worker(worker.spec, None, self._context.now() + again_s, left_out=True)

    def _end(self, lost: Sequence[_Worker]) -> None:
        """Lets go of these workers' builds and kills their processes."""
        for one in lost:
            if one.building is not None:
                one.building.release()
        client = self._context.client
        names, addresses = {one.spec.name for one in lost if one.address is None}, {one.address for one in lost}
        known = workers_by_address(client)
        kill_workers(client, [address for address, name in known.items() if name in names or address in addresses])

    def _build(self, unit: Sequence[WorkerKey], incarnation: int, *, left_out: bool = False) -> None:
        """Has workers built that are lost together, as soon as their processes are there. Of a gang of several ranks,
        rank 0 first says where they meet."""
        gang = self._context.gangs[unit[0][0]]
        specs = [self._spec(gang, index, incarnation) for _, index in unit]
        meeting = self._submit("meet", open_meeting, specs[0]) if len(unit) > 1 else None
        settings = self._context.settings
        limit_s = settings.start_timeout_s if settings.arrival_timeout_s is None else settings.arrival_timeout_s
        for key, spec in zip(unit, specs, strict=True):
            future = self._submit("build", build_worker, spec, *([] if meeting is None else [meeting]))
            self._workers[key] = _Worker(spec, future, self._context.now() + limit_s, left_out=left_out)
            self._context.watch(future, key, None)

    def _spec(self, gang: Gang, index: int, incarnation: int) -> WorkerSpec:
        settings, name = self._context.settings, worker_name(gang.name, index)
        return WorkerSpec(
            gang=gang.name,
            index=index,
            size=gang.workers if gang.ordered else 1,
            incarnation=incarnation,
            runtime=settings.runtime,
            config_yaml=settings.config_yaml,
            log=str((settings.log_dir / f"{name}.log").resolve()) if settings.log_dir is not None else None,
            mirror=self._mirror(gang.name),
        )

    def _submit(self, what: str, work: Callable[..., object], spec: WorkerSpec, *more: Future) -> Future:
        """To the worker itself, ahead of nodes."""
        return self._context.client.submit(
            work,
            spec,
            *more,
            key=build_key(spec.name, spec.incarnation, self._context.name, what),
            resources={pin_resource(spec.gang, spec.index): 1},
            priority=_FIRST,
            retries=0,
            pure=False,
        )

    def _not_built(self, key: WorkerKey, error: BaseException) -> StageFailed:
        return self.failure(f"worker {self._workers[key].spec.name} could not be built:", key[0], {key[1]: error})


def _see_log(worker: _Worker) -> str:
    return f" (see {worker.spec.log})" if worker.spec.log is not None else ""


def _build_result(future: Future) -> Built | BaseException:
    """The process that was built, or why there is none."""
    if future.status != "finished":
        return error_of(future)
    try:
        built: Built = future.result(timeout=_ANSWER_S)
        return built
    except LOST as error:
        return error
    except TimeoutError:
        return CancelledError(f"{future.key} was built, but does not answer")
