"""The cost model: seconds of every node of a run's graph on a cluster, before it runs.

    PlannedRun ─┐                       ┌─► decode      generate, evaluate, canary
    cluster    ─┼─► costs_of ─► Costs ──┼─► training    reference, logprob, value, update_policy, update_critic
    calibration ┘                       └─► copies      publish, and the engines' refit
                                               │
       roofline seconds ─ efficiencies, calls, fixed costs ─► Costs.parts, Costs.seconds

`Costs.seconds` returns the seconds for which a worker, or a gang, is busy with a node. The graph and dispatch decide
when the node starts (`simulate`). docs/planning.md has the equations with their sources, and lists what is not
modelled. Pure: no file is read. Seconds and bytes are floats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.config.hardware import HardwareCluster
from pipeline.config.memory import PlannedRun
from pipeline.graph.graph import STAGE_ROLES, Gang, Node
from pipeline.plan.calibration import STAGE_KIND, Calibration, StageSpeed
from pipeline.plan.cores import thread_speedup
from pipeline.plan.decode import Decoded, DecodeSpeed, PassRates, RowQueue, decode, decode_speed
from pipeline.plan.links import Numbers, link_of, send_s
from pipeline.plan.training import (
    ARITHMETIC,
    WEIGHTS,
    GangSpeed,
    Rows,
    Work,
    forward_work,
    gang_speed,
    rows_of,
    rows_of_nodes,
)
from pipeline.plan.training import update_work as work_of_update
from stages.models.flops import forward_flops
from stages.models.memory import DTYPE_BYTES, GangModels, published_tensors
from stages.models.protocol import MODEL_ROLES, Role

CONTEXT, PREFILL, COPIES, ENGINE_LINKS = "keys and values read", "prefill", "copies", "engine's collectives"
CALLS, FIXED = "calls", "store and commit"
"""Names of the parts of a node's seconds that are not in its roofline: fixed costs of calls and of the node."""
_CORE_FLOPS = 243.2e9
"""Float32 FLOP/s of one CPU core, from conf/hardware/cpu.yaml. On a node with GPUs, reward models run on such cores."""

_ROW_CALLS = 1 / 16
"""Fixed cost of each row in a decoding pass of the embedded engine on a CPU, as a multiple of the fixed cost of the
pass (`StageSpeed.call_s`). A pass of the tiny model took 0.4 ms and some 25 us more for each row (passes of 8, 16 and
32 rows on an AMD EPYC). On GPUs nothing was measured, and rows are assumed to have no fixed cost."""


@dataclass(frozen=True)
class Costs:
    """The costs of the nodes of one run. `costs_of` makes this record."""

    run: PlannedRun
    cluster: HardwareCluster
    calibration: Calibration
    prompt_tokens: float
    """Mean number of tokens of a prompt."""
    gangs: Mapping[str, Gang]
    models: Mapping[str, GangSpeed]
    """Gang's name -> the models of the gang, with the peak FLOP/s and memory bandwidth of its ranks. Only gangs that
    hold models are listed."""
    engine: DecodeSpeed
    trunk_stages: frozenset[str]
    """Stages that compute the model's frozen blocks for their rows. Other stages reuse the outputs of these blocks from
    an earlier stage of the gang."""

    def seconds(self, node: Node, lengths: Sequence[int]) -> float:
        """Return the seconds for which the node's gang, or one replica, is busy with the node. The replica is assumed
        to have no other shards. For shards that share a replica, use `engine_queue`.

        Args:
            lengths: number of tokens of each response that the node works on: the responses of its shard, or of the
                whole step for `advantage` and updates. Empty for `publish`.
        """
        return self._total(self.work(node, lengths), self.speed_of(node.stage)) + self.calibration.turnaround_s

    def seconds_of_nodes(self, stage: str, lengths: np.ndarray) -> list[float]:
        """Return the `seconds` of many nodes of one stage, computed together. `lengths`: tokens of the responses that
        each node works on (nodes, rows). Stages that decode, and canaries, are not supported."""
        work = self._work(stage, rows_of_nodes(self.prompt_tokens, lengths))
        total = self._total(work, self.speed_of(stage)) + self.calibration.turnaround_s
        seconds: list[float] = np.broadcast_to(total, len(lengths)).tolist()
        return seconds

    def parts(self, node: Node, lengths: Sequence[int]) -> dict[str, float]:
        """Return cause -> its part of `seconds`. Causes are, for example, arithmetic, weights read or bubble. Parts of
        0 seconds are left out."""
        parts = self._timed(self.work(node, lengths), self.speed_of(node.stage))
        fixed = parts.get(FIXED, 0.0) + self.calibration.turnaround_s
        return parts | ({FIXED: fixed} if fixed else {})

    def overhead(self, node: Node) -> float:
        """Return the seconds from the commit of the node's last parent to the start of the node on an idle worker.
        Scheduling and tracking take this time."""
        return self.calibration.overhead_s

    def engine_queue(self) -> RowQueue[Any]:
        """Return an empty queue for the rows of a replica."""
        speed = self.calibration.generate
        rates = PassRates(speed.efficiency, self.calibration.link_efficiency, speed.call_s)
        return RowQueue(self.engine, self.prompt_tokens, rates)

    def decoding_s(self, decoded: Decoded) -> float:
        """Return the seconds of decoding on one replica. The fixed costs of a node are not included."""
        return self._total(decoding_work(decoded), replace(self.calibration.generate, node_s=0.0))

    def after_rows_s(self, *, beside: bool) -> float:
        """Return the seconds of a shard after its decoding: store, commit and turnaround. `beside`: True if its worker
        has other shards at the same time."""
        alone = self.calibration.generate.node_s + self.calibration.turnaround_s
        return alone + self.calibration.beside_s * beside

    def writeback_s(self, gang: str, stage: str) -> float:
        """Return the seconds at the end of a node in which its worker already computes the next node of the gang
        (`pipeline/workers/turns.py`). 0 unless the gang has a single rank. 0 for updates and publications too: their
        worker may not go on before the commit."""
        of_gang = self.gangs[gang]
        if not of_gang.is_ordered or of_gang.max_submitted_nodes == 1 or STAGE_KIND[stage] in ("update", "publish"):
            return 0.0
        return self.speed_of(stage).store_s

    def refit_s(self) -> float:
        """Return the seconds in which a replica loads new weights. A replica does this before its first shard of
        another version."""
        return self._total(self.refit_work(), self.calibration.refit)

    def refit_work(self) -> Work:
        """Return the work of loading new weights: each rank of a replica loads its share."""
        return self._copied(self._published_bytes / self.run.config.replica_ranks)

    def speed_of(self, stage: str) -> StageSpeed:
        """Return the calibrated speed of a stage."""
        speed: StageSpeed = getattr(self.calibration, STAGE_KIND[stage])
        return speed

    def timed(self, work: Work, stage: str) -> float:
        """Return the seconds of a node of `stage` with this work. The worker's turnaround is not included."""
        return self._total(work, self.speed_of(stage))

    def _total(self, work: Work, speed: StageSpeed) -> Numbers:
        """Return the calibrated seconds of a node's work, including the fixed costs of its calls and of the node."""
        links = sum(work.links.values()) / self.calibration.link_efficiency
        peak = sum(seconds / speed.peak_share(name) for name, seconds in work.parts.items())
        return peak + links + work.calls * speed.call_s + speed.node_s

    def _timed(self, work: Work, speed: StageSpeed) -> dict[str, float]:
        """Return cause -> seconds (arithmetic, a kind of collective, fixed costs), of the seconds that `_total`
        returns."""
        parts = {name: seconds / speed.peak_share(name) for name, seconds in work.parts.items()}
        parts |= {name: seconds / self.calibration.link_efficiency for name, seconds in work.links.items()}
        parts |= {CALLS: work.calls * speed.call_s, FIXED: speed.node_s}
        return {name: seconds for name, seconds in parts.items() if seconds}

    # ---- work, at the hardware's peaks ---------------------------------------------------------------------------

    def work(self, node: Node, lengths: Sequence[int]) -> Work:
        """Return the work of a node. The replica of a shard is assumed to have no other shards."""
        if node.stage in ("generate", "evaluate"):
            return decoding_work(decode(self.engine, self.prompt_tokens, lengths))
        if node.stage in ("canary", "canary_logprob"):
            lengths = lengths[: self.run.config.mismatch.rows]
        return self._work(node.stage, rows_of(self.prompt_tokens, lengths))

    def _work(self, stage: str, rows: Rows) -> Work:
        """Return the work of a node of `stage` with these rows. If `rows` describes several nodes, the work may have
        arrays with one number per node. The stages `generate` and `evaluate` are not supported."""
        config, gang = self.run.config, self.gang_of(stage)
        match stage:
            case "canary":
                return Work({PREFILL: rows.tokens * self.engine.token_s}, {}, 1.0)
            case "score" | "evaluate_score":
                return self._scoring(gang, rows)
            case "advantage":
                return Work({}, {}, rows.count)
            case "publish":
                return self._publication(gang)
            case "update_policy" | "update_critic":
                role = STAGE_ROLES[stage]
                optimizer = config.model.optimizer_of(role)
                numbers = {"epochs": config.ppo.epochs, "minibatches": config.ppo.minibatches}
                return work_of_update(self.models[gang.name], role, optimizer, rows, **numbers)
            case _:
                role = STAGE_ROLES[stage]
                optimizer = config.model.optimizer_of(role)
                trunk = stage in self.trunk_stages
                return forward_work(self.models[gang.name], role, optimizer, rows, trunk=trunk)

    def gang_of(self, stage: str) -> Gang:
        """Return the gang that runs a stage."""
        role = STAGE_ROLES[stage]
        return next(gang for gang in self.gangs.values() if role in gang.roles)

    def _scoring(self, gang: Gang, rows: Rows) -> Work:
        """Return the work of scoring: one call per row, and the reward models' forward passes on the worker's cores."""
        operations = 0.0
        for scorer in self.run.scorers:
            spec = scorer.model.spec
            operations += forward_flops(
                spec, spec.num_layers, rows.tokens, rows.squares, outputs=1, num_outputs=rows.count
            )
        rate = self.run.config.placement.gangs[gang.name].threads * (
            _CORE_FLOPS if self.run.on_gpus else self.cluster.hardware.fp32_flops
        )
        return Work({ARITHMETIC: operations / rate}, {}, rows.count)

    def _publication(self, gang: Gang) -> Work:
        """Return the work of a publication: the trained weights are written to the board of published weights. Ranks on
        other nodes send their parts to the node of the board."""
        layout, num_bytes = self.run.config.placement.gangs[gang.name].layout, self._published_bytes
        # ranks are numbered stage by stage: all data-parallel copies of a stage come before the next stage
        per_stage, here = gang.workers // layout.pipeline, self.cluster.gpus_per_node or gang.workers
        writers = [stage * per_stage + rank for stage in range(layout.pipeline) for rank in range(layout.tensor)]
        away = sum(rank >= here for rank in writers) / len(writers)
        link = link_of(self.cluster, writers[-1] + 1)
        return Work(self._copied(num_bytes).parts, {"sending": send_s(link, away * num_bytes)} if away else {})

    @cached_property
    def _published_bytes(self) -> float:
        number = DTYPE_BYTES[self.run.config.model.dtype]
        return float(number * sum(published_tensors(self.run.spec, self.run.config.model).values()))

    def _copied(self, num_bytes: float) -> Work:
        """Return the work of moving bytes between a device and its host's memory."""
        hardware = self.cluster.hardware
        rate = hardware.pcie_bytes_per_s if self.run.on_gpus else hardware.host_bytes_per_s(1)
        return Work({COPIES: num_bytes / rate}, {})


def decoding_work(decoded: Decoded) -> Work:
    """Return the work of a node that decodes."""
    parts = {
        WEIGHTS: decoded.weights,
        CONTEXT: decoded.context,
        ARITHMETIC: decoded.arithmetic,
        PREFILL: decoded.prefill,
    }
    return Work(parts, {ENGINE_LINKS: decoded.links}, decoded.calls)


def costs_of(
    run: PlannedRun, cluster: HardwareCluster, calibration: Calibration, prompt_tokens: float | None = None
) -> Costs:
    """Return the costs of a run's nodes on a cluster.

    Args:
        run: the config with the architectures of its models (`pipeline.config.memory.planned_run`).
        prompt_tokens: mean length of a prompt. None: the calibration's mean length, or `prompts.max_tokens` if the
            calibration has none.
    """
    config = run.config
    prompt = prompt_tokens or calibration.prompt_tokens or float(config.prompts.max_tokens)
    gangs = {gang.name: gang for gang in config.gangs()}
    models = {
        name: _gang_speed(run, cluster, calibration, gang) for name, gang in gangs.items() if gang.roles & MODEL_ROLES
    }
    engine = _engine_speed(run, cluster, calibration)
    return Costs(run, cluster, calibration, prompt, gangs, models, engine, _trunk_stages(run, gangs))


def rank_peaks(
    run: PlannedRun, cluster: HardwareCluster, dtype: str, threads: int, thread_share: float
) -> tuple[float, float]:
    """Return the peak FLOP/s and the peak bytes/s of one rank. A rank is a GPU, or a process with `threads` threads on
    a CPU.

    On a CPU, only the share `thread_share` of the arithmetic is divided among the threads. One thread does the rest,
    and the FLOP/s are lower accordingly (Amdahl's law). The bytes/s are those that `threads` cores reach, if no other
    cores use the memory.
    """
    hardware = cluster.hardware
    rate = hardware.fp32_flops if dtype == "float32" else hardware.bf16_flops
    if run.on_gpus:
        return rate, hardware.memory_bytes_per_s
    threads = min(threads, cluster.cores)
    return rate * thread_speedup(threads, thread_share), hardware.host_bytes_per_s(threads)


def _gang_speed(run: PlannedRun, cluster: HardwareCluster, calibration: Calibration, gang: Gang) -> GangSpeed:
    config = run.config
    settings = config.placement.gangs[gang.name]
    data = gang.workers // (settings.layout.tensor * settings.layout.pipeline)
    portable = run.on_gpus or config.model.kernels == "portable"
    models = GangModels(
        run.spec,
        config.model,
        settings.layout,
        gang.roles & MODEL_ROLES,
        data,
        settings.offload,
        run.separate_specs,
        portable,
    )
    flops, bytes_per_s = rank_peaks(run, cluster, config.model.dtype, settings.threads, calibration.thread_share)
    small_flops = element_flops = math.inf
    if not run.on_gpus:
        small_flops = rank_peaks(run, cluster, "float32", 1, 1.0)[0]
        element_flops = rank_peaks(run, cluster, "float32", settings.threads, calibration.thread_share)[0]
    return gang_speed(models, cluster, flops, small_flops, element_flops, bytes_per_s)


def _engine_speed(run: PlannedRun, cluster: HardwareCluster, calibration: Calibration) -> DecodeSpeed:
    config = run.config
    engine = config.engine
    threads = next(config.placement.gangs[g.name].threads for g in config.gangs() if Role.GENERATE in g.roles)
    flops, bytes_per_s = rank_peaks(run, cluster, engine.dtype, threads, calibration.thread_share)
    drafts = engine.embedded.speculation.drafter != "none"
    return decode_speed(
        run.spec,
        flops=flops,
        bytes_per_s=bytes_per_s,
        number_bytes=DTYPE_BYTES[engine.dtype],
        tensor=engine.tensor_parallel,
        pipeline=engine.pipeline_parallel,
        groups=engine.pipeline_parallel,
        max_rows=engine.max_rows,
        kv_bytes=float(engine.kv_budget_mb << 20),
        link=link_of(cluster, config.replica_ranks),
        tokens_per_pass=calibration.tokens_per_pass if drafts else 1.0,
        drafts_per_pass=calibration.drafts_per_pass if drafts else 0.0,
        row_calls=0.0 if run.on_gpus or engine.kind != "embedded" else _ROW_CALLS,
    )


def _trunk_stages(run: PlannedRun, gangs: Mapping[str, Gang]) -> frozenset[str]:
    """Return the stages that compute frozen blocks: the first of `reference`, `logprob` and `value` of each gang, whose
    outputs the later ones reuse, and the stages that have rows of their own."""
    if not run.config.model.frozen_blocks:
        return frozenset()
    stages = {"evaluate_reference", "canary_logprob"}  # rows that no other stage of the gang has seen
    recomputes = run.config.proximal == "recompute"
    order = ["reference", *(["logprob"] if recomputes else []), "value"]
    for gang in gangs.values():
        stages |= {next((stage for stage in order if STAGE_ROLES[stage] in gang.roles), "")} - {""}
    return frozenset(stages)
