"""Turn a config into a scenario for `simulate`, and the executions of a simulation into a journal or a trace.

    config, Costs, Lengths ──scenario_of──► Scenario ──play──► executions ──► journal_events, trace_events

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pipeline.config.hardware import HardwareCluster
from pipeline.config.memory import PlannedRun, workers_memory
from pipeline.graph.graph import SHARDED, Node
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.timeline import run_timeline
from pipeline.plan.cores import shared_cores, working_threads
from pipeline.plan.cost import Costs
from pipeline.plan.lengths import Lengths
from pipeline.plan.simulate import Execution, Failures, Scenario, Stragglers
from pipeline.workers.messages import worker_name

_BY_SHARD = frozenset(SHARDED) - {"generate"}
"""Stages whose seconds are computed for all shards of a step together."""
_MOST_KEPT = 64
"""Maximum number of (stage, step) pairs whose seconds are kept."""


def scenario_of(
    costs: Costs,
    lengths: Lengths,
    *,
    stragglers: Stragglers | None = None,
    failures: Failures | None = None,
    seed: int = 0,
) -> Scenario:
    """Return the scenario that simulates the config of `costs` with responses of these lengths."""
    config = costs.run.config
    return Scenario(
        spec=config.graph(),
        gangs=config.gangs(),
        costs=_RememberedCosts(costs, lengths),
        lengths=lengths,
        rows_per_shard=config.rows_per_shard,
        eval_rows_per_shard=config.eval_rows_per_shard,
        in_flight=config.in_flight,
        device_sharing=config.placement.device_sharing,
        cores=shared_cores(costs.run, costs.cluster),
        threads=working_threads(config, costs.calibration.thread_share),
        driver_s=costs.calibration.driver_s,
        hand_over_s=hand_over_s(costs.run, costs.cluster),
        stragglers=stragglers,
        failures=failures,
        seed=seed,
    )


def hand_over_s(run: PlannedRun, cluster: HardwareCluster) -> dict[str, float]:
    """Return gang's name -> seconds in which the gang moves its data from the GPUs to the host's memory, or back. Only
    gangs that share devices are listed. The worker with the most bytes per GPU decides. Empty without GPUs."""
    sharing = {name for group in run.config.placement.device_sharing for name in group}
    if not run.on_gpus or not sharing:
        return {}
    gangs = {gang.name: gang for gang in run.config.gangs()}
    seconds = dict.fromkeys(sorted(sharing), 0.0)
    for worker in workers_memory(run):
        name = worker.worker[0]
        if name in sharing:
            gpus = max(1, gangs[name].gpus)
            seconds[name] = max(seconds[name], worker.resting / gpus / cluster.hardware.pcie_bytes_per_s)
    return seconds


class _RememberedCosts:
    """Costs of a run's nodes, kept after they are computed. The costs of forward passes and scores are computed for all
    shards of a step together. If all steps have the same lengths, the costs of one step are used for all steps."""

    def __init__(self, costs: Costs, lengths: Lengths) -> None:
        self._costs, self._lengths = costs, lengths
        self._of_shards: dict[tuple[str, int], list[float]] = {}
        """(stage, step) -> seconds of each shard. The step is always 0 if all steps have the same lengths."""
        self._of_nodes: dict[tuple[str, int], float] = {}
        """(stage, shard) -> seconds of a node of any other stage. Empty if steps have different lengths."""
        self.engine_queue, self.after_rows_s = costs.engine_queue, costs.after_rows_s
        self.overhead, self.refit_s = costs.overhead, costs.refit_s

    def seconds(self, node: Node, lengths: Sequence[int]) -> float:
        address, same = node.address, self._lengths.same_every_step
        if address.stage in _BY_SHARD:
            key = address.stage, 0 if same else address.step
            if key not in self._of_shards:
                if len(self._of_shards) >= _MOST_KEPT:
                    del self._of_shards[next(iter(self._of_shards))]  # the oldest, of a step that is over
                self._of_shards[key] = self._seconds_of_shards(node)
            return self._of_shards[key][address.shard]
        if not same:
            return self._costs.seconds(node, lengths)
        key = address.stage, address.shard
        if key not in self._of_nodes:
            self._of_nodes[key] = self._costs.seconds(node, lengths)
        return self._of_nodes[key]

    def _seconds_of_shards(self, node: Node) -> list[float]:
        config, step = self._costs.run.config, node.address.step
        rows = [self._lengths.rows(step, shard, config.rows_per_shard) for shard in range(config.rollout.shards)]
        return self._costs.seconds_of_shards(node, rows)


def journal_events(executions: Iterable[Execution]) -> Iterator[Event]:
    """Yield the events that a run's journal would have after these executions, so that reports and timelines can read
    them. Times count from the run's start."""
    yield Event(0.0, EventKind.RUN_STARTED)
    for one in executions:
        submit, address = one.submit, one.submit.node.address
        at: dict[str, Any] = {
            "stage": address.stage,
            "step": address.step,
            "shard": address.shard,
            "gang": submit.gang,
            "worker": worker_name(submit.gang, submit.replica),
        }
        yield Event(one.submitted_s, EventKind.SUBMITTED, **at, version=submit.node.chosen_version)
        at["rank"] = submit.replica
        yield Event(one.started_s, EventKind.STARTED, **at)
        yield Event(one.finished_s, EventKind.FINISHED, **at, seconds=one.finished_s - one.started_s)
        if address.stage == "publish":
            yield Event(one.finished_s, EventKind.PUBLISHED, stage="publish", step=address.step, shard=0)


def trace_events(executions: Sequence[Execution], critical: Iterable[Execution] = ()) -> list[dict[str, Any]]:
    """Return the executions as events of the Chrome trace format, which Perfetto and chrome://tracing show: a process
    per gang, a thread per lane of the timeline. `critical`: executions to mark as part of the critical path."""
    marked = {one.submit.node.address for one in critical}
    version_of = {one.submit.node.address: one.submit.node.version for one in executions}
    drawn = run_timeline(journal_events(executions))
    events: list[dict[str, Any]] = []
    gangs: dict[str, int] = {}
    for number, lane in enumerate(drawn.lanes if drawn is not None else ()):
        process = gangs.setdefault(lane.gang, len(gangs))
        where = {"pid": process, "tid": number}
        events.append({"name": "process_name", "ph": "M", **where, "args": {"name": lane.gang}})
        events.append({"name": "thread_name", "ph": "M", **where, "args": {"name": lane.worker}})
        for box in lane.boxes:
            address = box.address
            what = {
                "name": f"{address.stage} {address.step}",
                "cat": address.stage,
                "ph": "X",
                "ts": box.start_s * 1e6,
                "dur": (box.end_s - box.start_s) * 1e6,
                "args": {
                    "step": address.step,
                    "shard": address.shard,
                    "version": version_of[address],
                    "critical path": address in marked,
                },
            }
            events.append({**what, **where})
    return events
