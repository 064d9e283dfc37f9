"""Cores that the workers of a host share: a clock that runs slower while more threads work than there are cores.

Linux gives every runnable thread the same share of the cores (its fair scheduler, Documentation/scheduler/
sched-design-CFS.rst and sched-eevdf.rst: an ideal processor runs n tasks at 1/n of its speed each). While the running
nodes have T > C threads on C cores and each node has one, each node therefore advances at the rate

    r = C / T

This is egalitarian processor sharing (Kleinrock 1976, Queueing Systems II, section 4.4). Threads and ranks of
the same node wait for one another after every operation, so a node of two threads or more is as fast as its slowest
thread, which is on a core with ceil(T / C) threads. While the widest node counts as w threads, the rate is

    1 / r = T / C + min(1, w - 1) (ceil(T / C) - T / C)

The rate is the same for all nodes, so one clock, the clock of work, shows the progress of all nodes: it advances by r
seconds in a second. A node that takes s seconds alone ends when this clock has advanced by s.

Threads that wait for each other use no core. If t threads of a node divide the share f of its work, the speedup over
one thread is

    speedup(t) = 1 / (1 - f + f / t)        (Amdahl 1967)

The node then counts as speedup(t) threads. f is calibrated (`Calibration.thread_share`).

Nodes on different cores slow each other down, too: they share memory bandwidth, caches and the processor's power. A
node loses the share q of its speed while nodes on all other cores work, and less while fewer cores are busy. If the
nodes have T effective threads together and the widest has w, the rate of all nodes is also multiplied by

    1 - q max(0, min(T, C) - w) / (C - 1)

This is what the widest node feels; a narrow node beside it is slowed too little. q is calibrated
(`Calibration.crowding`).

Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.config.hardware import HardwareCluster
from pipeline.config.memory import PlannedRun
from pipeline.config.run import RunConfig
from pipeline.observe.timeline import Box, Interval, merge_intervals
from stages.models.protocol import MODEL_ROLES, Role


def thread_speedup(threads: int, share: float) -> float:
    """Return the speedup of `threads` threads over one thread. They divide the fraction `share` of the work among
    themselves, and one thread does the rest."""
    return 1.0 / (1.0 - share + share / threads)


@dataclass(frozen=True)
class WorkDone:
    """Work of the nodes of a host, in the seconds that they would have needed on cores of their own."""

    work: float = 0.0
    crowded: float = 0.0
    """The part of `work` that was done beside nodes on other cores, weighted by the share of the other cores that were
    busy."""

    def __add__(self, more: WorkDone) -> WorkDone:
        return WorkDone(self.work + more.work, self.crowded + more.crowded)

    def __sub__(self, earlier: WorkDone) -> WorkDone:
        return WorkDone(self.work - earlier.work, self.crowded - earlier.crowded)

    def part(self, share: float) -> WorkDone:
        return WorkDone(self.work * share, self.crowded * share)

    def alone_s(self, crowding: float) -> float:
        """Return the seconds that this work would take alone if nodes lose the share `crowding` of their speed
        while all other cores work."""
        return self.work - crowding * self.crowded


class SharedClock:
    """A clock that shows how far the running nodes of one host have come, in seconds of work. A node that would take s
    seconds alone ends when the clock has advanced by s.

    It runs slower than the time while more threads work than there are cores (`shared_rate`), and while nodes work on
    several cores (`crowding`). Times must not decrease from call to call.
    """

    def __init__(self, cores: int, now: float = 0.0, crowding: float = 0.0) -> None:
        self._cores, self._crowding = cores, crowding
        self._rate, self._crowded_rate = 1.0, 0.0
        self._nodes: list[float] = []
        """Effective number of threads of each working node."""
        self._now = now
        self.crowded = 0.0
        """See `WorkDone.crowded`. It is a part of `work` only if the clock has no `crowding`."""
        self.work = 0.0
        """Reading of the clock at the last call of `advance` or `add`. If a node has run since the clock's start, its
        work so far would have taken this many seconds without other nodes."""

    def advance(self, now: float) -> float:
        """Move on to the time `now`, in seconds. Return the new reading (`work`): the progress of the nodes, in seconds
        that they would need alone."""
        self.work += (now - self._now) * self._rate
        self.crowded += (now - self._now) * self._crowded_rate
        self._now = now
        return self.work

    def add(self, threads: float, now: float) -> None:
        """Count a node of `threads` effective threads from the time `now` on. A negative number: a node of that many
        threads works no more."""
        self.advance(now)
        if threads > 0:
            self._nodes.append(threads)
        elif threads < 0:
            self._nodes.remove(-threads)
        rate, crowd = shared_rate(self._nodes, self._cores), busy_others(self._nodes, self._cores)
        self._rate, self._crowded_rate = rate * (1 - self._crowding * crowd), rate * crowd

    def time_of(self, work: float) -> float:
        """Return the time, in seconds, at which this clock will read `work` seconds of work. The number of working
        threads is assumed to stay the same until then."""
        return self._now + (work - self.work) / self._rate


def shared_rate(nodes: Sequence[float], cores: int) -> float:
    """Return the rate at which nodes of so many effective threads advance on these cores, 1 if they do not share a core
    (the formula is above)."""
    crowd = sum(nodes) / cores
    if crowd <= 1:
        return 1.0
    waits = min(1.0, max(nodes) - 1)
    return 1 / (crowd + waits * (math.ceil(crowd - 1e-9) - crowd))


def busy_others(nodes: Sequence[float], cores: int) -> float:
    """Return the share of the cores beside the widest node's that other nodes keep busy, from 0 to 1. `nodes`: the
    effective number of threads of each working node."""
    others = min(sum(nodes), cores) - max(nodes, default=0.0)
    return max(0.0, others) / (cores - 1) if cores > 1 else 0.0


def shared_cores(run: PlannedRun, cluster: HardwareCluster) -> int | None:
    """Return the number of cores that all workers of a run share. None if the workers compute on GPUs or on several
    hosts: they are then assumed to have enough cores."""
    return None if run.on_gpus or cluster.nodes > 1 else cluster.cores


def working_threads(config: RunConfig, share: float) -> dict[str, float]:
    """Return gang's name -> effective number of threads while the gang works. If the workers of the gang are replicas,
    the number is for one replica. If they are ranks, it is for all ranks together.

    A process with t threads counts as `thread_speedup(t, share)` threads. `share` is the fraction of the work that the
    threads divide among themselves (Amdahl's law). Gangs that compute no models are left out, because they mostly wait.
    """
    threads_of = {}
    for gang in config.gangs():
        if gang.roles & {Role.GENERATE, *MODEL_ROLES} or (Role.SCORE in gang.roles and config.scoring_models()):
            processes = config.replica_ranks if Role.GENERATE in gang.roles else 1
            ranks = gang.workers if gang.is_ordered else 1
            threads = thread_speedup(config.placement.gangs[gang.name].threads, share)
            threads_of[gang.name] = threads * processes * ranks
    return threads_of


def work_at(
    boxes: Sequence[Box], threads: Mapping[str, float], cores: int, driver_s: float = 0.0
) -> dict[float, WorkDone]:
    """Return time -> progress until then of a node that has run since the beginning: the readings of a `SharedClock`
    without crowding, which runs slower while more threads work than there are cores.

    The keys are the times at which an execution of a node (one of `boxes`) starts or ends, and the times at which the
    driver starts or ends its work after an execution.

    Args:
        threads: gang's name -> effective number of threads (`working_threads`). A gang that is not listed needs no
            cores.
        driver_s: seconds that the driver works with one thread after each execution.
    """
    periods: dict[tuple[str, str], list[Interval]] = {}
    for box in boxes:
        periods.setdefault((box.gang, box.worker), []).append((box.start_s, box.end_s))
    changes = [(time, 0.0) for box in boxes for time in (box.start_s, box.end_s)]
    for (gang, _), intervals in periods.items():
        number = threads.get(gang, 0)
        for start, end in merge_intervals(intervals):
            changes += [(start, number), (end, -number)]
    until = -math.inf
    for end in sorted(box.end_s for box in boxes):
        start, until = max(end, until), max(end, until) + driver_s
        changes += [(start, 1.0), (until, -1.0)]
    changes.sort(key=lambda change: (change[0], -change[1]))  # a node begins before it ends
    clock, work_by_time = SharedClock(cores, changes[0][0] if changes else 0.0), dict[float, WorkDone]()
    for time, change in changes:
        clock.add(change, time)
        work_by_time[time] = WorkDone(clock.work, clock.crowded)
    return work_by_time
