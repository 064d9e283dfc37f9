"""The nodes that a run executed, with their seconds and the lengths of their rows: the input of a calibration.

    journal ──► executions of nodes (`Box`) ──┐
    store ────► lengths of the responses ─────┼─► Observed, one for each node
    graph ────► nodes and their parents ──────┘

An execution has a start, an end and a worker. Where workers share cores, the seconds of a node are the seconds that it
would have taken on cores of its own (`cores`).

The first node of each stage on a worker is left out: it compiles, allocates and fills caches. The last publication is
left out, too, since it also writes the export of the run. If there were several
attempts at a node (for example, after the loss of a worker), only the last attempt is used.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from pipeline.config.identity import Identity
from pipeline.config.memory import PlannedRun
from pipeline.graph.graph import Node, run_nodes
from pipeline.observe.engine_metrics import DRAFTED
from pipeline.observe.history import History
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.timeline import Box, read_boxes
from pipeline.plan.calibration import ENGINE_STAGES
from pipeline.plan.cores import WorkDone, work_at, working_threads
from storage.address import Address
from storage.records import Rollout


@dataclass(frozen=True)
class Observed:
    """A node that a run executed."""

    node: Node
    seconds: float
    """Seconds of work of the node, without the loading of new weights. If more threads worked than the host has cores,
    the node ran slower for some time. This number is then the time that it would have taken on a core of its own."""
    lengths: Sequence[int]
    """Number of tokens of each response that the node worked on, without responses that are no longer stored."""
    worker: str = ""
    start_s: float = 0.0
    """Time at which the node began its work, after any loading of new weights. Where workers share cores, it is not the
    time of day. It is the reading of a clock that runs slower while threads outnumber cores (see `cores`)."""
    store_s: float = 0.0
    """Part of `seconds` that was spent on store and ledger; 0: not measured."""
    beside: bool = False
    """True if the node's worker ran other nodes at the same time."""
    crowded_s: float = 0.0
    """Part of `seconds` that was done beside nodes on other cores (`WorkDone.crowded`)."""
    start_crowded_s: float = 0.0
    """The same part of `start_s`."""

    def alone(self, crowding: float) -> Observed:
        """Return this node with the seconds that it would have taken alone if nodes lose the share `crowding` of their
        speed while all other cores work."""
        seconds = WorkDone(self.seconds, self.crowded_s).alone_s(crowding)
        store_s = self.store_s * seconds / self.seconds if self.seconds else 0.0
        start_s = WorkDone(self.start_s, self.start_crowded_s).alone_s(crowding)
        return replace(self, seconds=seconds, start_s=start_s, store_s=store_s, crowded_s=0.0, start_crowded_s=0.0)


@dataclass(frozen=True)
class DraftedPasses:
    """Two averages over the rows and decoding passes of a run with speculation: the number of tokens that a row gained
    in a pass, and the number of tokens that were drafted for it. `Calibration` has the same fields."""

    tokens_per_pass: float
    drafts_per_pass: float


@dataclass(frozen=True)
class ObservedRun:
    """The executed nodes of a run, with its settings."""

    name: str
    run: PlannedRun
    nodes: Sequence[Observed]
    waits: Sequence[float]
    """Seconds from the end of a node's last parent to the start of the node, one number per node. A node is left out if
    its worker was still busy when the last parent ended."""
    refits: Sequence[WorkDone]
    """Seconds of each load of new weights into an engine. No node's `seconds` include them."""
    steps: int
    """Number of steps that have ended."""
    prompt_tokens: float
    """Mean number of tokens of a prompt."""
    drafted: DraftedPasses | None
    """Mean numbers of tokens that a row gained, and that were drafted for it, in a pass. None if the run had no
    speculation."""
    gpu: str
    """Name and compute capability of the run's GPUs; empty on CPUs."""
    processor: str
    """Vector instruction sets of the run's processor."""
    turnarounds: Sequence[float] = ()
    """Seconds that a worker needed between the end of a node and the start of its next node. A time counts only if all
    parents of the second node had ended before the first node ended, so that the worker did not wait for a result.
    Engines are left out."""
    driver_s: float = 0.0
    """Processor seconds of the driver and the scheduler for each node."""

    def alone(self, crowding: float) -> ObservedRun:
        """Return this run with the seconds that each node, and each load of weights, would have taken alone
        (`Observed.alone`)."""
        if not crowding:
            return self
        refits = [WorkDone(refit.alone_s(crowding)) for refit in self.refits]
        return replace(self, nodes=[node.alone(crowding) for node in self.nodes], refits=refits)

    @property
    def lengths(self) -> list[int]:
        """Lengths of the responses in `nodes`, without the responses of evaluations."""
        return [length for one in self.nodes if one.node.stage == "generate" for length in one.lengths]


def observe(
    name: str,
    run: PlannedRun,
    history: History,
    events: Iterable[Event],
    identity: Identity | None,
    cores: int | None = None,
) -> ObservedRun:
    """Return the nodes that a run executed, from its history and its journal's events. `cores`: number of cores that
    all workers of the run shared. None: each worker had enough cores. Raises StoreError if rows cannot be read."""
    log = list(events)
    boxes, driver_s = [box for box in read_boxes(log) if box.rank == 0], _driver_s(log)
    last = {box.address: box for box in boxes}  # of several attempts the last one was committed
    nodes = {node.address: node for node in run_nodes(history.spec)}
    lengths, prompts = _rows(history, [node for node in nodes.values() if node.address in last])
    exported = Address("publish", history.spec.steps)
    kept, crowded = [box for box in _warm(boxes, last, nodes) if box.address != exported], _beside(boxes)
    refits = _refits(boxes, nodes, history)
    threads = working_threads(run.config, share=1.0)
    work = {} if cores is None else work_at(boxes, threads, cores, driver_s)
    observed, loads = list[Observed](), list[WorkDone]()
    for box in kept:
        refit_s, wall_s = refits.get(box.address, 0.0), box.end_s - box.start_s
        start, end = WorkDone(box.start_s), WorkDone(box.end_s)
        if box.gang in threads and wall_s > 0 and work:
            start, end = work[box.start_s], work[box.end_s]
        loading = (end - start).part(min(1.0, refit_s / wall_s) if wall_s > 0 else 0.0)
        loads += [loading] if refit_s else []
        begin, done = start + loading, end - start - loading
        observed.append(
            Observed(
                nodes[box.address],
                done.work,
                _lengths_of(nodes[box.address], history, lengths),
                box.worker,
                begin.work,
                box.store_s * (end - start).work / wall_s if wall_s > 0 else 0.0,
                box.address in crowded,
                done.crowded,
                begin.crowded,
            )
        )
    return ObservedRun(
        name,
        run,
        observed,
        _waits(kept, boxes, nodes),
        loads,
        len(history.finished_steps()),
        prompts,
        _drafted(run, history) if run.config.engine.embedded.speculation.drafter != "none" else None,
        _item(identity, "device"),
        _item(identity, "instructions"),
        _turnarounds(boxes, nodes),
        driver_s,
    )


def _driver_s(log: Sequence[Event]) -> float:
    """Return the driver's processor seconds for each node: the median over the steps. A step in which another driver
    took over does not count. 0 if nothing was measured."""
    seconds, nodes = list[float](), 0
    before: float | None = None
    for event in log:
        if event.kind is EventKind.RUN_STARTED:
            before = None
        nodes += event.kind is EventKind.FINISHED and event.rank == 0
        if event.kind is EventKind.PUBLISHED and event.cpu_s is not None:
            if before is not None and nodes:
                seconds.append((event.cpu_s - before) / nodes)
            nodes, before = 0, event.cpu_s
    return median(seconds) if seconds else 0.0


def _warm(boxes: Sequence[Box], last: Mapping[Address, Box], nodes: Mapping[Address, Node]) -> list[Box]:
    """Return the boxes to measure: the last box of each node, without the first box of each stage on a worker. A box is
    one execution of a node on a worker."""
    seen: set[tuple[str, str]] = set()
    kept = []
    for box in boxes:
        key = (box.worker, box.address.stage)
        if key in seen and box.address in nodes and last[box.address] is box:
            kept.append(box)
        seen.add(key)
    return kept


def _beside(boxes: Sequence[Box]) -> set[Address]:
    """Return the addresses of the nodes whose worker ran another node at the same time. `boxes` is sorted by start."""
    crowded: set[Address] = set()
    latest: dict[str, Box] = {}
    for box in boxes:
        before = latest.get(box.worker)
        if before is not None and box.start_s < before.end_s:
            crowded |= {before.address, box.address}
        if before is None or box.end_s > before.end_s:
            latest[box.worker] = box
    return crowded


def _rows(history: History, nodes: Iterable[Node]) -> tuple[dict[Address, list[int]], float]:
    """Return two things: the response lengths of each shard in `nodes` that was generated or evaluated and whose rows
    are still stored; and the mean length of the prompts of these shards."""
    lengths, prompts, dropped = dict[Address, list[int]](), list[int](), history.store.dropped_before()
    for node in nodes:
        if node.stage == "evaluate" or (node.stage == "generate" and node.address.step >= dropped):
            rollout: Rollout = history.store.read(node.address)
            lengths[node.address] = rollout.response_lengths.tolist()
            prompts += rollout.prompt_lengths.tolist()
    return lengths, fmean(prompts) if prompts else 0.0


def _lengths_of(node: Node, history: History, lengths: Mapping[Address, list[int]]) -> list[int]:
    """Return the lengths of the responses that a node works on: the responses of its shard, or of the whole step.
    Responses that are not stored are left out. Empty for `publish`."""
    address, spec = node.address, history.spec
    match node.stage:
        case "publish":
            return []
        case "generate" | "evaluate":
            return lengths.get(address, [])
        case "evaluate_score" | "evaluate_reference":
            return lengths.get(Address("evaluate", address.step, address.shard), [])
        case "advantage" | "update_policy" | "update_critic":
            shards = range(spec.shards)
        case _:
            shards = range(address.shard, address.shard + 1)
    return [length for shard in shards for length in lengths.get(Address("generate", address.step, shard), [])]


def _waits(kept: Iterable[Box], boxes: Sequence[Box], nodes: Mapping[Address, Node]) -> list[float]:
    """Return, for each node, the seconds from the end of its last parent to its own start. Only nodes of the executions
    in `kept` are considered. A node is left out if its worker was still busy when the last parent ended. `boxes`: all
    executions of the run."""
    ends = {box.address: box.end_s for box in boxes}
    by_worker: dict[str, list[Box]] = {}
    for box in boxes:
        by_worker.setdefault(box.worker, []).append(box)
    waits = []
    for box in kept:
        parents = [ends[parent] for parent in nodes[box.address].parents if parent in ends]
        ready = max(parents, default=box.start_s)
        before = [other.end_s for other in by_worker[box.worker] if other.start_s < box.start_s]
        if parents and ready <= box.start_s and max(before, default=0.0) <= ready:
            waits.append(box.start_s - ready)
    return waits


def _turnarounds(boxes: Sequence[Box], nodes: Mapping[Address, Node]) -> list[float]:
    """Return the seconds that workers needed between the end of a node and the start of their next node. A time counts
    only if all parents of the second node had ended before the first node ended, so that the worker did not wait for a
    result. Engines are left out, because they run several nodes at once."""
    ends = {box.address: box.end_s for box in boxes}
    last: dict[str, Box] = {}
    gaps = []
    for box in boxes:
        before = last.get(box.worker)
        if before is not None and box.address in nodes and box.address.stage not in ENGINE_STAGES:
            ready = max((ends.get(parent, math.inf) for parent in nodes[box.address].parents), default=math.inf)
            if ready <= before.end_s <= box.start_s:
                gaps.append(box.start_s - before.end_s)
        last[box.worker] = box
    return gaps


def _refits(boxes: Sequence[Box], nodes: Mapping[Address, Node], history: History) -> dict[Address, float]:
    """Return the address of each node for which an engine loaded new weights -> the seconds that this took. The seconds
    are in the commit of the engine's next shard, although a canary may be the first node with the new weights.
    `boxes` is sorted by start."""
    committed = {
        commit.address: commit.metrics.get("engine/refit_s", 0.0)
        for stage in ("generate", "evaluate")
        for commit in history.ledger.list(stage)
    }
    first: dict[str, Address] = {}
    version: dict[str, int] = {}
    refits: dict[Address, float] = {}
    for box in boxes:
        node = nodes.get(box.address)
        if node is None or node.stage not in ENGINE_STAGES:
            continue
        if version.get(box.worker) != node.version:
            first[box.worker], version[box.worker] = box.address, node.version
        if seconds := committed.get(box.address, 0.0):
            refits[first[box.worker]] = refits.get(first[box.worker], 0.0) + seconds
    return refits


def _drafted(run: PlannedRun, history: History) -> DraftedPasses:
    """Return two means for a row in a decoding pass: the number of tokens that the row gained, and the number of tokens
    that were drafted for it. They are computed from the engines' metrics in the commits."""
    tokens = passes = drafts = 0.0
    for commit in history.ledger.list("generate"):
        tokens += commit.metrics.get("engine/tokens", 0.0)
        passes += commit.metrics.get("engine/full_decode_steps", 0.0) * run.config.engine.max_rows
        drafts += sum(number for name, number in commit.metrics.items() if name.startswith(DRAFTED))
    fed = 1.0 + (drafts / passes if passes else 0.0)
    return DraftedPasses(min(max(1.0, tokens / passes), fed) if passes else 1.0, fed - 1.0)


def _item(identity: Identity | None, name: str) -> str:
    """Return a fact about the workers' hardware, such as `device`, or ""."""
    gangs = identity.numerics if identity is not None else ()
    return next((gang.items[name] for gang in gangs if name in gang.items), "")
