"""Play a run on a virtual clock: its own graph, `Flow` and `Dispatch`, with predicted seconds in place of workers.

    Costs ──seconds of a node──┐
    Lengths ──response tokens──┤        ┌── submits, hand-overs ──┐
                               ▼        ▼                         │
      heap of (time, event) ──► the next event: a node is ready, a node ends, devices are free, a worker fails or is up
                                        │                         ▲
                                        └──► Dispatch.mark_done, Flow.on_node_done

The executor and this module carry out the same instructions of `Dispatch`. A real run whose nodes take the predicted
seconds would therefore have the same order of nodes, sample with the same versions, and use the same replicas. The
rules of the workers:

- A worker with n threads runs up to n nodes at once, the most urgent first. Ranks of a gang run their nodes in the
  order in which Dispatch numbered them.
- The worker of a gang of one rank computes its next node while it stores and commits the last one (`writeback_s`).
- A node can start `Costs.overhead` seconds after its last parent's commit, or after its own submission if that is
  later.
- The rows of all shards of a replica form one queue (`decode.RowQueue`). A shard's output is stored when its last row
  has ended.
- Before a shard of another version, the replica loads that version, which takes `Costs.refit_s`. The replica first
  waits until its current shards have ended, unless the engine updates in flight.
- A hand-over of shared devices takes the sum of both gangs' `hand_over_s`.
- Workers that share the cores of a host (`Scenario.cores`) run slower while they have more threads than there are
  cores, and while several cores are busy (`cores.SharedClock`). The driver shares these cores too: it works `driver_s`
  seconds after each commit.
- A worker that fails loses its nodes. It is back after `rebuild_s`. A trainer additionally repeats its updates since
  the last checkpoint.

All workers are up at time 0. Rows do not migrate between replicas, and no node is given up after too many losses. No
I/O, no real clock; the same scenario gives the same result.
"""

from __future__ import annotations

import gc
import heapq
import itertools
import math
import random
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache
from typing import Any, Protocol

import xxhash

from pipeline.graph.dispatch import Dispatch, Submit
from pipeline.graph.flow import Flow
from pipeline.graph.graph import UPDATE_STAGE, Gang, GraphSpec, Mode, Node
from pipeline.plan.calibration import ENGINE_STAGES
from pipeline.plan.cores import SharedClock
from pipeline.plan.decode import RowQueue
from pipeline.plan.lengths import Lengths
from stages.models.protocol import Role
from storage.address import Address


class NodeCosts(Protocol):
    """Predicted seconds of nodes. `pipeline.plan.cost.Costs` implements this protocol."""

    def seconds(self, node: Node) -> float:
        """Return the seconds for which a node keeps its gang, or one replica, busy."""
        ...

    def engine_queue(self) -> RowQueue[Any] | None:
        """Return an empty queue for the rows of a replica. Return None if the shards of a replica do not slow one
        another, so that each shard takes the time that `seconds()` returns."""
        ...

    def after_rows_s(self, *, beside: bool) -> float:
        """Return the seconds from the end of a shard's last row to the shard's commit. `beside`: True if its worker has
        other shards at the same time."""
        ...

    def overhead(self, node: Node) -> float:
        """Return the seconds from the commit of the node's last parent to the start of the node on an idle worker."""
        ...

    def writeback_s(self, gang: str, stage: str) -> float:
        """Return the last seconds of a node in which its worker already computes the gang's next node."""
        ...

    def refit_s(self) -> float:
        """Return the seconds in which a replica loads another version of the weights."""
        ...


@dataclass(frozen=True)
class Failures:
    """Random losses of workers. Every worker is equally likely to be lost."""

    per_hour: float
    """Mean number of losses per hour, all workers of the run together."""
    rebuild_s: float
    """Seconds until a lost worker is up again. A lost rank of an ordered gang takes the whole gang down for this time.
    """
    checkpoint_every: int
    """Number of updates from one checkpoint to the next."""


@dataclass(frozen=True)
class Stragglers:
    """Nodes that take longer than predicted."""

    share: float
    """Share of the nodes that are slow. `Scenario.seed` decides which nodes these are."""
    factor: float
    """Factor by which a slow node's seconds are multiplied."""


@dataclass(frozen=True)
class Scenario:
    """A run to simulate."""

    spec: GraphSpec
    gangs: Sequence[Gang]
    costs: NodeCosts
    lengths: Lengths
    rows_per_shard: int
    eval_rows_per_shard: int = 0
    in_flight: bool = False
    """True if engines load new weights while rows are in flight (`rollout.versions: inflight`)."""
    device_sharing: Sequence[Sequence[str]] = ()
    cores: int | None = None
    """Number of cores that all workers share. None: each worker has cores or devices of its own."""
    threads: Mapping[str, float] = field(default_factory=dict)
    """Gang's name -> number of working threads: of one replica of a pool, or of all ranks of an ordered gang together.
    A gang that is not listed needs no cores."""
    crowding: float = 0.0
    """Share of its speed that a node loses while nodes on all other cores work. Not simulated if `cores` is None."""
    driver_s: float = 0.0
    """Seconds that the driver works after each node, on the cores that it shares with the workers. Not simulated if
    `cores` is None."""
    hand_over_s: Mapping[str, float] = field(default_factory=dict)
    """Gang's name -> seconds in which its workers free their devices, or take them again. 0 for a gang that is not
    listed."""
    stragglers: Stragglers | None = None
    failures: Failures | None = None
    seed: int = 0
    """Seed of stragglers and failures."""


class Gap(IntEnum):
    """The reason why time passes between the end of one node of the critical path and the start of the next node."""

    BOOKKEEPING = 0
    """The commit, the driver and the scheduler."""
    HAND_OVER = 1
    """Shared devices moved from one gang to another."""
    REBUILD = 2
    """A lost worker was built again."""


@dataclass(slots=True, eq=False)
class Execution:
    """One attempt at a node."""

    submit: Submit
    submitted_s: float
    lengths: Sequence[int]
    """Response tokens of the rows that the node generates. Empty for a node that generates none."""
    cause: Execution | None
    """The execution whose end let this attempt start. None for the first executions."""
    gap: Gap
    """The kind of delay before the start of this attempt. The delay begins when the attempt in the field `cause` ends.
    """
    parents_left: int = 0
    """Number of parents whose end this attempt still waits for."""
    is_ready: bool = False
    """True once the attempt waits only for a free place at its worker."""
    started_s: float = math.nan
    finished_s: float = math.nan
    is_lost: bool = False
    """True if the attempt was lost with its worker. Its events in the heap are then ignored."""
    has_computed: bool = False
    """True once the attempt's worker may compute its next node."""
    beside: bool = False
    """True if the attempt's worker has an engine and ran other nodes at the same time."""
    followers: list[Execution] = field(default_factory=list)
    """Attempts at child nodes that were submitted before this attempt ended. They wait for its end."""


@dataclass(frozen=True)
class SimulationResult:
    """The result of a simulation. Times are in seconds since the run's start."""

    wall_s: float
    published_s: Sequence[float]
    """Time at which each version became readable, version 0 first."""
    busy_s: Mapping[str, float]
    """Gang's name -> seconds in which a worker ran at least one node: the mean over the gang's replicas. In an ordered
    gang (`Gang.is_ordered`) the ranks act together, and count as one worker."""
    stage_s: Mapping[str, float]
    """Stage -> sum of the seconds of its nodes."""
    staleness: Mapping[int, int]
    """Staleness -> number of rows. A row's staleness is its step minus the version that sampled it."""
    critical_path: Sequence[Execution]
    """The executions from the first node to the last commit. The end of each execution allowed the next execution to
    start."""
    failures: int
    """Number of workers that were lost."""
    replayed_s: float
    """Seconds in which trainers, after a failure, repeated the updates since their last checkpoint."""

    @property
    def step_s(self) -> list[float]:
        """Seconds of each step. Step i lasts from the publication of version i to the publication of version i + 1, but
        step 0 begins with the run."""
        times = [0.0, *self.published_s[1:]]
        return [after - before for before, after in itertools.pairwise(times)]

    @property
    def steady_s(self) -> float:
        """Seconds of a step once the pipeline is full: the median of all steps after the first."""
        steps = self.step_s
        return statistics.median(steps[1:] or steps)

    @property
    def mean_s(self) -> float:
        """Seconds of the whole run divided by its number of steps. Use it for the throughput: with shared devices and
        staleness several steps end at about the same time, so the median misleads."""
        return self.wall_s / len(self.step_s)

    @property
    def mean_staleness(self) -> float:
        """Mean staleness of the rows."""
        return sum(age * count for age, count in self.staleness.items()) / sum(self.staleness.values())

    @property
    def path_s(self) -> dict[str, float]:
        """Stage, or kind of gap (`Gap`) -> its seconds on the critical path. The largest number comes first."""
        seconds: defaultdict[str, float] = defaultdict(float)
        before = 0.0
        path = self.critical_path
        for one, after in itertools.zip_longest(path, path[1:]):
            end = one.finished_s if after is None else min(one.finished_s, after.started_s)
            seconds[one.gap.name.lower().replace("_", " ")] += one.started_s - before
            seconds[one.submit.node.stage] += end - one.started_s
            before = end
        return {name: s for name, s in _largest_first(seconds).items() if s > 0}


def play(scenario: Scenario, watch: Callable[[Execution], None] | None = None) -> SimulationResult:
    """Simulate a scenario to its last node and return the result. `watch` is called with each execution that ended with
    a commit, in order of time."""
    with _no_cycle_search():
        return _Simulation(scenario, watch).run()


@contextmanager
def _no_cycle_search() -> Iterator[None]:
    """Stop Python's search for reference cycles. A simulation makes no cycles, and the search would take a third of its
    time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _Kind(IntEnum):
    READY = 0
    END = 1
    HANDED_OVER = 2
    UP = 3
    FAILURE = 4
    ROWS_ENDED = 5
    BOOKED = 6
    COMPUTED = 7


_READY, _END, _HANDED_OVER, _UP, _FAILURE, _ROWS_ENDED, _BOOKED, _COMPUTED = _Kind
_ORDERED, _SLOT, _FREE = Mode
_BOOKKEEPING = Gap.BOOKKEEPING
# Python finds a module's names faster than members of an enum, and the simulation looks them up for every node.


class _Worker:
    """The queues and the running nodes of a worker. A worker is a replica of a pool, or a whole ordered gang, whose
    ranks run the same node together."""

    __slots__ = ("busy_s", "busy_since", "cores", "engine", "queue", "running", "shards", "stamp", "threads", "version")

    def __init__(self, threads: int, cores: float, engine: RowQueue[Execution] | None) -> None:
        self.threads, self.cores, self.engine = threads, cores, engine
        """`threads`: maximum number of nodes at once. `cores`: number of cores that the worker uses while it runs
        nodes. `engine`: queue of a replica's rows, None for other workers."""
        self.queue: list[tuple[float, int, Execution]] = []
        self.shards: list[tuple[float, int, Execution]] = []
        """A heap of nodes that have a slot of the replica and wait for its engine."""
        self.running: list[Execution] = []
        self.busy_since = 0.0
        self.busy_s = 0.0
        self.stamp = 0
        """Number that a ROWS_ENDED event in the heap must have to be valid. Each new prediction increments it, which
        makes older events invalid."""
        self.version: int | None = None
        """Version of the weights in the worker's engine. None before the first node, and after a loss of the worker."""


class _Simulation:
    """A simulation in progress: its clock, its heap of events and the state of all workers."""

    def __init__(self, scenario: Scenario, watch: Callable[[Execution], None] | None) -> None:
        self._scenario, self._watch = scenario, watch
        self._costs = scenario.costs
        self._writeback_s = cache(scenario.costs.writeback_s)
        self._gangs = {gang.name: gang for gang in scenario.gangs}
        self._dispatch = Dispatch(scenario.gangs, scenario.device_sharing)
        self._flow = Flow(scenario.spec, self._dispatch, on_step=lambda *_: None, on_unread=lambda _: None)
        self._now = self._done = 0.0
        """`_now`: the time. `_done`: reading of the clock of work (explained in `cores`), which differs from the time
        only if workers share cores."""
        self._sequence = 0
        self._heap: list[tuple[float, int, _Kind, Any, int]] = []
        cores = scenario.cores
        self._shared = None if cores is None else SharedClock(cores, crowding=scenario.crowding)
        self._unbooked = 0
        """Number of commits that the driver has not handled yet. Always 0 if the driver's work is not simulated."""
        self._work = self._heap if self._shared is None else []
        """A heap of events at readings of the clock of work: ends of nodes, of rows, and of the driver's work. The same
        heap as `_heap` if workers share no cores."""
        self._workers = {
            (gang.name, index): _Worker(
                gang.max_running_nodes, scenario.threads.get(gang.name, 0), self._engine_of(gang)
            )
            for gang in scenario.gangs
            for index in range(1 if gang.is_ordered else gang.workers)
        }
        self._changed: list[_Worker] = []
        """Workers that got a shard at this time. The next end of a row is predicted once the clock moves on, since
        several shards may come at the same time."""
        self._down: set[tuple[str, int]] = set()
        self._out: dict[Address, Execution] = {}
        """Node's address -> its attempt that has not ended."""
        self._cause: Execution | None = None
        """The execution whose end led to the event that is being handled."""
        self._gap = Gap.BOOKKEEPING
        self._last_of: dict[str, Execution] = {}
        """Gang's name -> its execution that ended last."""
        self._replayable: dict[str, deque[float]] = {}
        self._published: list[float] = []
        self._stage_s: defaultdict[str, float] = defaultdict(float)
        self._staleness: Counter[int] = Counter()
        self._last: Execution | None = None
        self._random = random.Random(scenario.seed)
        slow = scenario.stragglers or Stragglers(0.0, 1.0)
        self._slow_factor, self._slow_below = slow.factor, math.ceil(slow.share * 2**64)
        """A node is a straggler if the hash of its address is below `_slow_below`."""
        self._failures = 0
        self._replayed_s = 0.0
        if scenario.failures is not None:
            self._checkpoint_every = scenario.failures.checkpoint_every
            self._replayable = {stage: deque(maxlen=self._checkpoint_every) for stage in UPDATE_STAGE.values()}
            self._push_failure(scenario.failures)

    def _engine_of(self, gang: Gang) -> RowQueue[Any] | None:
        return self._costs.engine_queue() if Role.GENERATE in gang.roles else None

    def run(self) -> SimulationResult:
        dispatch, flow, heap, shared, changed = self._dispatch, self._flow, self._heap, self._shared, self._changed
        for gang, index in self._workers:
            dispatch.on_worker_up(gang, index)
        flow.advance()
        shares = bool(self._scenario.device_sharing)
        asks = True
        while True:
            if asks:
                if flow.is_finished:
                    return self._result()
                for submit in dispatch.next_submits():
                    self._submitted(submit)
                for one in dispatch.next_handovers() if shares else ():
                    hand_over = self._scenario.hand_over_s
                    seconds = hand_over.get(one.giver, 0.0) + hand_over.get(one.taker, 0.0)
                    self._push(self._now + seconds, _HANDED_OVER, one.giver)
            if changed and not (heap and heap[0][0] <= self._now):
                for worker in changed:
                    self._predict_rows(worker)
                changed.clear()
            if shared is None:
                assert heap, "nothing runs, and the run is not finished"
                self._now, _, kind, subject, stamp = heapq.heappop(heap)
                self._done = self._now
            else:
                kind, subject, stamp = self._next_of_both(shared)
            self._gap = _BOOKKEEPING
            asks = True
            if kind is _END:
                if not subject.is_lost:
                    self._ended(subject)
            elif kind is _ROWS_ENDED:
                asks = False  # Dispatch is not told of such an event, so it has no new instructions after it
                if subject.stamp == stamp:
                    self._rows_ended(subject)
            elif kind is _COMPUTED:
                asks = False
                if not subject.is_lost:
                    self._computed(subject)
            elif kind is _READY:
                asks = False
                if not subject.is_lost:
                    self._cause = subject.cause
                    self._enqueue(subject)
            elif kind is _BOOKED:
                asks = False
                self._booked()
            elif kind is _HANDED_OVER:
                self._cause, self._gap = self._last_of.get(subject), Gap.HAND_OVER
                dispatch.on_handed_over(subject)
            elif kind is _UP:
                self._down.discard(subject)
                self._cause, self._gap = self._last_of.get(subject[0]), Gap.REBUILD
                dispatch.on_worker_up(*subject)
            else:
                self._fail()

    def _next_of_both(self, clock: SharedClock) -> tuple[_Kind, Any, int]:
        """Take the next event from the two heaps, and advance time and `clock` to it. Return its kind, subject and
        stamp, which shows if it is outdated. `_work` is ordered by the reading of `clock`, which runs slower while
        threads wait for cores."""
        assert self._heap or self._work, "nothing runs, and the run is not finished"
        ends = clock.time_of(self._work[0][0]) if self._work else math.inf
        if self._heap and self._heap[0][0] <= ends:
            self._now, _, kind, subject, stamp = heapq.heappop(self._heap)
            self._done = clock.advance(self._now)
        else:
            done, _, kind, subject, stamp = heapq.heappop(self._work)
            self._now = max(self._now, ends)
            clock.advance(self._now)
            self._done = clock.work = done  # exactly, without the rounding error of `time_of`
        return kind, subject, stamp

    # ---- Nodes -------------------------------------------------------------------------------------------------------

    def _submitted(self, submit: Submit) -> None:
        node = submit.node
        one = Execution(submit, self._now, self._generated(node.address), self._cause, self._gap)
        self._out[node.address] = one
        if submit.mode is _ORDERED:
            self._sequence += 1
            heapq.heappush(self._workers[submit.gang, 0].queue, (submit.sequence or 0, self._sequence, one))
        elif submit.mode is _FREE:
            for address in node.parents:  # Dispatch submits a node only when each parent is done or submitted
                parent = self._out.get(address)
                if parent is not None:
                    parent.followers.append(one)
                    one.parents_left += 1
        if not one.parents_left:
            self._is_ready(one)

    def _generated(self, address: Address) -> Sequence[int]:
        """Return the response length, in tokens, of each row that a node samples. Held-out shards are numbered after
        the training shards."""
        scenario, stage = self._scenario, address.stage
        if stage == "generate":
            return scenario.lengths.rows(address.step, address.shard, scenario.rows_per_shard)
        if stage == "evaluate":
            shard = scenario.spec.shards + address.shard
            return scenario.lengths.rows(address.step, shard, scenario.eval_rows_per_shard)
        return ()

    def _is_ready(self, one: Execution) -> None:
        """Put an attempt whose parents have all ended into the queue of its worker, after a delay of
        `NodeCosts.overhead` seconds."""
        one.cause, one.gap = self._cause, self._gap
        overhead = self._costs.overhead(one.submit.node)
        if overhead > 0:
            self._push(self._now + overhead, _READY, one)
        else:
            self._enqueue(one)

    def _enqueue(self, one: Execution) -> None:
        """Put an attempt into its worker's queue. The attempt starts as soon as the worker has room."""
        submit, node = one.submit, one.submit.node
        worker = self._workers[submit.gang, submit.replica]
        one.is_ready = True
        if submit.mode is not _ORDERED:  # the same priority as the driver gives to Dask
            urgency = 100 * node.priority[0] + node.priority[1] + node.address.shard / 2**20
            self._sequence += 1
            queue = worker.shards if submit.mode is _SLOT else worker.queue
            heapq.heappush(queue, (urgency, self._sequence, one))
        self._begin(worker)

    def _begin(self, worker: _Worker, after: Execution | None = None) -> None:
        """Start all waiting nodes of a worker that can start now. `after`: the node whose end made room."""
        while worker.shards:
            one = worker.shards[0][-1]
            if one.is_lost:
                heapq.heappop(worker.shards)
                continue
            version = one.submit.node.version
            if version != worker.version and not self._scenario.in_flight and _shards(worker):
                break
            heapq.heappop(worker.shards)
            self._start(one, worker, after)
        while worker.queue and len(worker.running) + len(worker.shards) < worker.threads:
            one = worker.queue[0][-1]
            if not (one.is_ready or one.is_lost):
                break
            heapq.heappop(worker.queue)
            if not one.is_lost:
                self._start(one, worker, after)

    def _start(self, one: Execution, worker: _Worker, after: Execution | None) -> None:
        node = one.submit.node
        stage = node.address.stage
        one.started_s = self._now
        if after is not None:
            one.cause, one.gap = after, _BOOKKEEPING
        refit_s = 0.0
        if stage in ENGINE_STAGES and node.version != worker.version:
            refit_s = self._costs.refit_s() if worker.version is not None else 0.0
            worker.version = node.version
        if not worker.running:
            worker.busy_since = self._now
            if self._shared is not None:
                self._shared.add(worker.cores, self._now)
        elif worker.engine is not None:
            for other in (one, *worker.running):
                other.beside = True
        worker.running.append(one)
        if worker.engine is None or not one.lengths:
            seconds = refit_s + self._costs.seconds(node) * self._straggling(node.address)
            behind = self._writeback_s(one.submit.gang, stage)
            kind = _COMPUTED if behind else _END
            if worker.cores:
                self._push_work(self._done + max(0.0, seconds - behind), kind, one)
            else:
                self._push(self._now + max(0.0, seconds - behind), kind, one)
            return
        if refit_s:
            worker.engine.pause(refit_s, self._done)
        worker.engine.add(one, one.lengths, self._done)
        if worker not in self._changed:
            self._changed.append(worker)

    def _straggling(self, address: Address) -> float:
        if not self._slow_below:
            return 1.0
        digest = xxhash.xxh64_intdigest(f"{self._scenario.seed} {address}".encode())
        return self._slow_factor if digest < self._slow_below else 1.0

    def _computed(self, one: Execution) -> None:
        """Handle the moment at which an attempt has computed its output, and only has to store and commit it. Its
        worker computes the next node meanwhile."""
        worker = self._workers[one.submit.gang, one.submit.replica]
        one.has_computed = True
        self._leave(one, worker)
        self._begin(worker, one)
        self._push(self._now + self._writeback_s(one.submit.gang, one.submit.node.stage), _END, one)

    def _ended(self, one: Execution) -> None:
        """Handle the end of an attempt at a node: its output is committed. Free its place on the worker, let waiting
        attempts start, and update the statistics, Dispatch and Flow."""
        submit, now = one.submit, self._now
        node, worker = submit.node, self._workers[submit.gang, submit.replica]
        address, stage = node.address, node.address.stage
        one.finished_s = now
        self._cause = self._last = self._last_of[submit.gang] = one
        del self._out[address]
        if not one.has_computed:
            self._leave(one, worker)
            if worker.queue or worker.shards:
                self._begin(worker, one)
        for child in one.followers:
            child.parents_left -= 1
            if not child.parents_left and not child.is_lost:
                self._is_ready(child)
        one.followers = []  # frees memory: later executions keep this one alive as their `cause`
        seconds = now - one.started_s
        self._stage_s[stage] += seconds
        if stage == "publish":
            self._published.append(now)
        elif stage == "generate":
            self._staleness[address.step - node.version] += len(one.lengths)
        elif stage in self._replayable:
            self._replayable[stage].append(seconds)
            if (address.step + 1) % self._checkpoint_every == 0:
                self._replayable[stage].clear()
        if self._watch is not None:
            self._watch(one)
        self._dispatch.mark_done(address)
        self._flow.on_node_done(node)
        if self._shared is not None and self._scenario.driver_s:
            self._unbooked += 1
            if self._unbooked == 1:
                self._shared.add(1, now)
                self._push_work(self._done + self._scenario.driver_s, _BOOKED, None)

    def _booked(self) -> None:
        """Handle the end of the driver's work for one commit. The driver continues with the next commit, if any."""
        assert self._shared is not None
        self._unbooked -= 1
        if self._unbooked:
            self._push_work(self._done + self._scenario.driver_s, _BOOKED, None)
        else:
            self._shared.add(-1, self._now)

    # ---- Rows of the shards that share a replica -----------------------------------------------------------------

    def _predict_rows(self, worker: _Worker) -> None:
        """Push an event for the next end of a row on a replica. Its time is predicted anew, because the rows of the
        replica have changed. Earlier events of this kind for the replica become outdated."""
        assert worker.engine is not None
        worker.stamp += 1
        at = worker.engine.next_end()
        if at is not None:
            self._push_work(at, _ROWS_ENDED, worker, worker.stamp)

    def _rows_ended(self, worker: _Worker) -> None:
        """Handle the end of a row. If it was the last row of its shard, the shard's output is stored next."""
        assert worker.engine is not None
        for one, _ in worker.engine.finish():
            after = self._costs.after_rows_s(beside=one.beside)
            late = (self._straggling(one.submit.node.address) - 1) * (self._now - one.started_s + after)
            behind = self._writeback_s(one.submit.gang, one.submit.node.stage)
            self._push_work(self._done + after + late - behind, _COMPUTED if behind else _END, one)
        self._predict_rows(worker)

    def _leave(self, one: Execution, worker: _Worker) -> None:
        """Remove a running node from its worker."""
        worker.running.remove(one)
        if not worker.running:
            worker.busy_s += self._now - worker.busy_since
            if self._shared is not None:
                self._shared.add(-worker.cores, self._now)

    # ---- Failures ------------------------------------------------------------------------------------------------

    def _push_failure(self, failures: Failures) -> None:
        if failures.per_hour > 0:
            self._push(self._now + self._random.expovariate(failures.per_hour / 3600), _FAILURE, None)

    def _fail(self) -> None:
        """Lose a random worker, unless it is down already."""
        failures = self._scenario.failures
        assert failures is not None
        self._push_failure(failures)
        every = [(gang.name, index) for gang in self._scenario.gangs for index in range(gang.workers)]
        name, index = every[self._random.randrange(len(every))]
        gang = self._gangs[name]
        where = name, 0 if gang.is_ordered else index
        if where in self._down:
            return
        self._down.add(where)
        self._failures += 1
        for address in self._dispatch.on_worker_down(*where):
            one = self._out.pop(address)
            one.is_lost = True
            if not (math.isnan(one.started_s) or one.has_computed):
                self._leave(one, self._workers[one.submit.gang, one.submit.replica])
        lost = self._workers[where]
        lost.version, lost.engine = None, self._engine_of(gang)
        lost.stamp += 1
        replayed_s = sum(
            math.fsum(self._replayable[stage]) for role, stage in UPDATE_STAGE.items() if role in gang.roles
        )
        self._replayed_s += replayed_s
        self._push(self._now + failures.rebuild_s + replayed_s, _UP, where)

    # ---- The heap and the result -------------------------------------------------------------------------------------

    def _push(self, at: float, kind: _Kind, subject: object, stamp: int = 0) -> None:
        self._sequence += 1
        heapq.heappush(self._heap, (at, self._sequence, kind, subject, stamp))

    def _push_work(self, reading: float, kind: _Kind, subject: object, stamp: int = 0) -> None:
        """Push an event for a reading of the clock of work, which runs slower than time while cores are short
        (`cores`)."""
        self._sequence += 1
        heapq.heappush(self._work, (reading, self._sequence, kind, subject, stamp))

    def _result(self) -> SimulationResult:
        path: list[Execution] = []
        one = self._last
        while one is not None:
            path.append(one)
            one = one.cause
        busy: defaultdict[str, float] = defaultdict(float)
        for (gang, _), worker in self._workers.items():
            replicas = 1 if self._gangs[gang].is_ordered else self._gangs[gang].workers
            busy[gang] += worker.busy_s / replicas
        return SimulationResult(
            wall_s=self._now,
            published_s=self._published,
            busy_s=dict(busy),
            stage_s=_largest_first(self._stage_s),
            staleness=dict(sorted(self._staleness.items())),
            critical_path=path[::-1],
            failures=self._failures,
            replayed_s=self._replayed_s,
        )


def _largest_first(seconds: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(seconds.items(), key=lambda item: item[1], reverse=True))


def _shards(worker: _Worker) -> list[Execution]:
    """Return the running nodes of a replica that have a slot, and so share the replica's engine."""
    return [one for one in worker.running if one.submit.mode is _SLOT]
