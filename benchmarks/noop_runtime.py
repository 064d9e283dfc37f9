"""Stages that compute nothing: they commit at once, or after the seconds that the cost model says.

`NoopRuntime` makes a worker process commit at once. `serve` is a process with many of Dask's workers in it, one for
each rank and replica of a run on virtual devices, and their stages sleep:

    the driver's process                             the process of `serve`
    driver, Dask's client and scheduler ──TLS──► Dask's workers, hundreds, with a thread for each task
                                                   └─ a task sleeps its seconds, then commits to the run's ledger

Rank 0 of a gang sleeps and commits for all of its ranks. The other ranks are connected, send heartbeats and are built
by the driver as in any run. Rank 0 forwards no calls to them, since on real devices other hosts would do that work.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import dask
from distributed import Worker, get_worker

from pipeline.config.loading import load_yaml
from pipeline.config.run import RunConfig
from pipeline.plan.decode import RowQueue
from pipeline.workers import entry
from pipeline.workers.messages import REPORTS, Built, Call, Outcome, WorkerSpec
from pipeline.workers.worker_process import dask_settings
from storage import codec
from storage.address import Address, Ref
from storage.commits import Commit, new_attempt, provenance_here
from storage.ledger import Ledger

METRICS = {
    "generate": {"generate/tokens": 8.0, "staleness/fraction_1": 1.0},
    "advantage": {"reward/mean": 0.0, "kl/ref": 0.0},
}
"""Metrics that a run's summary asks for."""


def commit_nothing(ledger: Ledger, call: Call, started: float) -> Ref:
    """Return the reference to the call's commit, which is made without an output if there is none."""
    found = ledger.find(call.address)
    if found is None:
        provenance = provenance_here(
            weight_versions=[call.version], seed=0, config_hash="noop", worker=call.worker, started=started
        )
        metrics = METRICS.get(call.address.stage, {})
        found = ledger.commit(Commit(call.address, new_attempt(), None, 0, {}, provenance, time.time(), metrics))
    return found.ref()


class NoopRuntime(entry.Runtime):
    """Owns nothing: a rank of a gang neither meets its peers nor trains."""

    def __init__(self, spec: WorkerSpec) -> None:
        config: RunConfig = load_yaml(spec.config_yaml)
        self._spec = spec
        self._ledger = config.stored.ledger()

    def run(self, call: Call) -> Outcome:
        started = time.time()
        alone = self._spec.index == 0 or self._spec.size == 1
        ref = commit_nothing(self._ledger, call, started) if alone else None
        return Outcome(call.address, call.attempt, ref, self._spec.name, self._spec.index, started, time.time(), 0.0)


# ---- virtual devices -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimedStages:
    """The predicted seconds of a run's nodes."""

    seconds: Mapping[Address, float]
    """Seconds of each node, `generate` excepted."""
    rows: Mapping[Address, Sequence[int]]
    """Response tokens of each row of a `generate` node."""
    queue: RowQueue[Address]
    """Queue of a replica that has no rows."""
    refit_s: float
    """Seconds in which a replica loads another version of the weights."""
    after_rows_s: float
    """Seconds of a shard after its last row has ended."""
    factor: float
    """Number by which all of these seconds are divided."""


@dataclass(frozen=True)
class VirtualHost:
    """The input of `serve`."""

    scheduler: str
    """Address of Dask's scheduler."""
    workers: Sequence[Mapping[str, Any]]
    """Options of each of Dask's workers."""
    stages: TimedStages


class VirtualWorker:
    """Owns the rows in flight of one virtual replica. A rank has none."""

    def __init__(self, stages: TimedStages) -> None:
        self._stages = stages
        self._changed = threading.Condition()
        self._queue = deepcopy(stages.queue)
        self._version: int | None = None
        self._shards = 0
        """Shards of `_version` that are not finished."""
        self._ended: set[Address] = set()
        """Shards whose rows have all ended."""

    def run(self, call: Call) -> Outcome:
        started = time.time()
        if call.address in self._stages.rows:
            self._generate(call.address, call.version)
        else:
            self._sleep(self._stages.seconds[call.address])
        assert call.ledger is not None
        ref, index = commit_nothing(Ledger(call.ledger), call, started), int(call.worker.rpartition("-")[2])
        return Outcome(call.address, call.attempt, ref, call.worker, index, started, time.time(), 0.0)

    def _generate(self, shard: Address, version: int) -> None:
        """Return when the rows of a shard have ended beside those of the replica's other shards. The rules are the
        simulator's: a shard of another version waits until they have ended, and then the weights are loaded."""
        stages = self._stages
        with self._changed:
            self._changed.wait_for(lambda: not self._shards or self._version == version)
            if self._version not in (None, version):
                self._queue.pause(stages.refit_s, self._now())
            self._version = version
            self._shards += 1
            self._queue.add(shard, stages.rows[shard], self._now())
            self._changed.notify_all()  # the waiting shards end at other times now
            while shard not in self._ended:
                now = self._now()
                ended = self._finished_by(now)
                if ended:
                    self._ended |= ended
                    self._changed.notify_all()
                else:
                    self._changed.wait((self._next_shard_end() - now) / stages.factor)
        self._sleep(stages.after_rows_s)
        with self._changed:
            self._shards -= 1
            self._changed.notify_all()

    def _finished_by(self, now: float) -> set[Address]:
        """Advance the queue over all rows that end by `now`. Return the shards that end with them."""
        ended: set[Address] = set()
        while (at := self._queue.next_end()) is not None and at <= now:
            ended |= {shard for shard, _ in self._queue.finish()}
        return ended

    def _next_shard_end(self) -> float:
        """Return the time at which the next shard ends if no other shard comes. The queue must have a shard."""
        ahead = self._queue.copy()
        while True:
            at = ahead.next_end()
            assert at is not None, "the queue is empty"
            if ahead.finish():
                return at

    def _now(self) -> float:
        return time.monotonic() * self._stages.factor

    def _sleep(self, seconds: float) -> None:
        time.sleep(seconds / self._stages.factor)


_QUIET = {"distributed.admin.system-monitor.interval": "60s", "distributed.admin.tick.interval": "5s"}
"""Dask's settings for many workers in one process: what each measures of itself is the same for all."""


def serve() -> None:
    """Be the host of virtual workers until standard input ends. It begins with a pickled `VirtualHost`."""
    host: VirtualHost = pickle.load(sys.stdin.buffer)
    built: dict[str, VirtualWorker] = {}

    def build_worker(spec: WorkerSpec, rendezvous: str | None = None) -> Built:
        del rendezvous
        built[spec.name] = VirtualWorker(host.stages)
        return Built(str(get_worker().address), {}, "virtual")

    def run_node_task(call: Call, *parents: object) -> Ref | None:
        del parents
        outcome = built[call.worker].run(call)
        get_worker().log_event(REPORTS, codec.encode(outcome))
        return outcome.ref

    def open_rendezvous(spec: WorkerSpec) -> str:
        return f"tcp://{spec.name}:0"  # nobody connects to it

    async def work() -> None:
        with dask_settings(), dask.config.set(_QUIET):
            workers = [await Worker(host.scheduler, **options) for options in host.workers]
            await asyncio.to_thread(sys.stdin.buffer.read)
            del workers
        os._exit(0)  # closing each worker would take a second

    logging.getLogger("distributed").setLevel(logging.ERROR)
    # the driver's tasks name these functions
    vars(entry).update(build_worker=build_worker, run_node_task=run_node_task, open_rendezvous=open_rendezvous)
    asyncio.run(work())
