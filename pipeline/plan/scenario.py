"""Turn a config into a scenario for `simulate`, and the executions of a simulation into a journal or a trace.

    config, Costs, Lengths ──scenario_of──► Scenario ──play──► executions ──► journal_events, trace_events

Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from pipeline.config.hardware import HardwareCluster
from pipeline.config.memory import PlannedRun, workers_memory
from pipeline.graph.graph import ADVANTAGE, SHARDED, UPDATE_STAGE, Node
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.timeline import run_timeline
from pipeline.plan.cores import shared_cores, working_threads
from pipeline.plan.cost import Costs
from pipeline.plan.lengths import Lengths
from pipeline.plan.simulate import Execution, Failures, Scenario, Stragglers
from pipeline.workers.messages import worker_name

_BY_SHARD = frozenset(SHARDED) - {"generate"}
"""Stages whose nodes work on one shard each, except `generate`. Decoding needs a call for each shard."""
_BY_BLOCK = _BY_SHARD | {ADVANTAGE, *UPDATE_STAGE.values()}
"""Stages whose seconds are computed for all nodes of several steps together."""
_BLOCK = 16
"""Number of steps whose seconds are computed together."""
_MOST_KEPT = 64
"""Maximum number of (stage, block of steps) pairs whose seconds are kept."""


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
        crowding=costs.calibration.crowding,
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
            seconds[name] = max(seconds[name], worker.offloaded_bytes / gpus / cluster.hardware.pcie_bytes_per_s)
    return seconds


class _RememberedCosts:
    """Costs of a run's nodes, kept after they are computed. The costs of most stages are computed for a block of steps
    together. If all steps have the same lengths, the costs of one step are used for all steps."""

    def __init__(self, costs: Costs, lengths: Lengths) -> None:
        self._costs, self._lengths, self._config = costs, lengths, costs.run.config
        self._is_same = lengths.same_every_step
        self._blocks: dict[tuple[str, int], list[list[float]]] = {}
        """(stage of `_BY_BLOCK`, block) -> step of the block -> seconds of each shard."""
        self._of_nodes: dict[tuple[str, int], float] = {}
        """(stage, shard) -> seconds of a node of another stage, if it takes the same seconds in every step."""
        self.engine_queue, self.after_rows_s = costs.engine_queue, costs.after_rows_s
        self.overhead, self.writeback_s, self.refit_s = costs.overhead, costs.writeback_s, costs.refit_s
        self._rows_of_block = lru_cache(maxsize=4)(self._drawn)

    def seconds(self, node: Node) -> float:
        stage, step, shard = node.address.stage, node.address.step, node.address.shard
        if stage in _BY_BLOCK:
            block, place = divmod(0 if self._is_same else step, _BLOCK)
            found = self._blocks.get((stage, block))
            if found is None:
                found = self._add_block(stage, block)
            return found[place][shard]
        if not (self._is_same or stage == "publish"):
            return self._costs.seconds(node, self._rows_of(node))
        if (stage, shard) not in self._of_nodes:
            self._of_nodes[stage, shard] = self._costs.seconds(node, self._rows_of(node))
        return self._of_nodes[stage, shard]

    def _add_block(self, stage: str, block: int) -> list[list[float]]:
        """Compute the seconds of a stage's nodes in a block of steps, keep them and return them."""
        if len(self._blocks) >= _MOST_KEPT:
            del self._blocks[next(iter(self._blocks))]  # the oldest, of steps that are over
        rows = self._rows_of_block(block)  # (steps, shards, rows)
        nodes = rows.reshape(-1, rows.shape[2]) if stage in _BY_SHARD else rows.reshape(len(rows), -1)
        seconds = self._costs.seconds_of_nodes(stage, nodes)
        per_step = len(seconds) // len(rows)
        found = [seconds[first : first + per_step] for first in range(0, len(seconds), per_step)]
        self._blocks[stage, block] = found
        return found

    def _drawn(self, block: int) -> np.ndarray:
        """Return the response tokens of a block (steps, shards, rows): of one step if all have the same lengths."""
        shards, count = range(self._config.rollout.shards), self._config.rows_per_shard
        steps = range(block * _BLOCK, block * _BLOCK + (1 if self._is_same else _BLOCK))
        return np.array([[self._lengths.rows(step, shard, count) for shard in shards] for step in steps])

    def _rows_of(self, node: Node) -> Sequence[int]:
        """Return the response tokens of the rows of an evaluation or a canary, which has the rows of shard 0. A
        publication has no rows."""
        stage, step, config = node.address.stage, node.address.step, self._config
        if stage.startswith("evaluate"):
            shard = config.rollout.shards + node.address.shard
            return self._lengths.rows(step, shard, config.eval_rows_per_shard)
        return () if stage == "publish" else self._lengths.rows(min(step, config.steps - 1), 0, config.rows_per_shard)


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
