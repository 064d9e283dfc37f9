"""Predict the memory of a run, by worker and purpose, before anything starts, and refuse a run that would not fit.

    stages.models.memory    a rank's models, from architecture and layout    ─┐
    engine's weights, keys and values, drafts                                ─┼─► WorkerMemory ─► this host, each GPU
    published weights, the libraries of a process                            ─┘

On a host without GPUs everything lies in the host's memory. With GPUs, the models and their caches lie in GPU memory;
the host holds the processes, a copy of the weights while they are read, and the published versions.

The prediction is an upper bound: the largest micro-batches that rows of any lengths can fill, and every slot of every
engine in use. Differences between engines are in their capabilities (`EngineMemory`). The last part reads the memory of
this host and its GPUs.
"""

from __future__ import annotations

import bisect
import itertools
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path

from pipeline.config.devices import Worker, plan_devices
from pipeline.config.role_models import read_model, role_models
from pipeline.config.run import RunConfig
from pipeline.graph.graph import Gang
from stages.engines.capabilities import EngineMemory
from stages.engines.config import HIDDEN_STATES_BYTES
from stages.engines.embedded.kernels.blocks import block_bytes, blocks_for
from stages.models.config import LayoutConfig, OptimizerConfig
from stages.models.layouts import layout_problems, target_parts
from stages.models.memory import (
    DTYPE_BYTES,
    GRADIENTS,
    GangModels,
    MicroBatchSize,
    RowsSize,
    offloaded_bytes,
    rank_bytes,
)
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import EMBEDDING, ModelSpec, layer_and_part, read_spec, stored_bytes, tensor_shapes
from storage.problems import Problem

GIB = 1 << 30
PROCESS_BYTES = 500 << 20
"""A worker's process before any work: libraries, mostly torch's, and records. Measured: a worker that trains the tiny
model in float32 takes 499 MiB in all."""
DRIVER_BYTES = 500 << 20
_HEAD_BYTES = 110 << 20
"""A learned draft head and its optimizer, at hidden size `_HEAD_HIDDEN`; see engine.md."""
_HEAD_HIDDEN = 576
PROCESS, READING, EXPORTING, OFFLOADED = "process", "reading weights", "exporting", "offloaded"
ENGINE_PROCESSES, SCORERS = "engine's processes", "reward models"
_STAYING_ON_HOST = (PROCESS, ENGINE_PROCESSES, OFFLOADED, SCORERS)
_ON_HOST = (*_STAYING_ON_HOST, READING, EXPORTING)
"""Items that lie in the host's memory for a worker with a GPU."""
_AFTER_READING = ("Adam moments", "activations", "logits", "trunk cache", "refit", "KV cache", "draft head")
"""Items that are not allocated yet while weights are read."""
_BEFORE_EXPORTING = ("activations", "logits")
"""Items that are freed again when a version is exported."""


@dataclass(frozen=True)
class PlannedScorer:
    """A reward model."""

    spec: ModelSpec
    dtype: str
    stored_bytes: int


@dataclass(frozen=True)
class PlannedRun:
    """A run as input of the prediction."""

    config: RunConfig
    spec: ModelSpec
    stored_bytes: int
    """Size of the model's files, which are read whole."""
    on_gpus: bool
    own: Mapping[Role, ModelSpec] = field(default_factory=dict)
    """Architectures of the roles whose model is not the policy's."""
    scorers: Sequence[PlannedScorer] = ()
    """Reward models. Every scoring worker holds all of them in its host's memory."""


@dataclass(frozen=True)
class MemoryLimits:
    """The available memory, in bytes."""

    host: float
    device: float
    """Memory of each GPU."""
    num_devices: int


@dataclass(frozen=True)
class WorkerMemory:
    """Bytes of one worker, by purpose."""

    worker: Worker
    items: Mapping[str, int]

    @property
    def total(self) -> int:
        """Largest number of bytes in use at once: while weights are read, in a step, or while a version is exported."""
        reading = self._without(EXPORTING, *_AFTER_READING)
        return max(reading, self._without(READING, EXPORTING), self._without(READING, *_BEFORE_EXPORTING))

    @property
    def on_device(self) -> int:
        return self._without(*_ON_HOST)

    @property
    def beside_device(self) -> int:
        return max(self._without(*self.items.keys() - {*_STAYING_ON_HOST, kind}) for kind in (READING, EXPORTING))

    @property
    def resting(self) -> int:
        """Bytes in the host's memory after the worker has left its device to another gang: everything except what is
        computed again. The host's copy is kept, since pinning memory takes longer than copying."""
        return self._without(*_ON_HOST, GRADIENTS, "activations", "logits", "trunk cache", "refit", "KV cache")

    def _without(self, *names: str) -> int:
        return sum(number for name, number in self.items.items() if name not in names)


def workers_memory(run: PlannedRun) -> list[WorkerMemory]:
    """Return the predicted memory of every worker."""
    gangs = run.config.gangs()
    return [WorkerMemory((g.name, index), _items(run, g, index)) for g in gangs for index in range(g.workers)]


def published_bytes(run: PlannedRun) -> int:
    """Return the bytes of published versions in shared memory: `board_bytes` for each board of this host."""
    config = run.config
    boards = {config.weights_dir(config.placement.roles[role]) for role in (Role.POLICY, Role.GENERATE)}
    return len(boards) * board_bytes(run)


def board_bytes(run: PlannedRun) -> int:
    """Return the bytes of the versions on one board that readers may still need: eta + 2 of them."""
    return (run.config.staleness + 2) * DTYPE_BYTES[run.config.model.dtype] * _published_parameters(run)


def host_bytes(run: PlannedRun, workers: Iterable[WorkerMemory]) -> int:
    """Return the bytes of the whole run in this host's memory."""
    device_sharing = {name for group in run.config.placement.device_sharing for name in group}
    own = 0
    for worker in workers:
        own += worker.beside_device if run.on_gpus else worker.total
        own += worker.resting if run.on_gpus and worker.worker[0] in device_sharing else 0
    return own + published_bytes(run) + DRIVER_BYTES


def memory_problems(run: PlannedRun, limits: MemoryLimits) -> Iterator[Problem]:
    """Yield a problem if the run is predicted not to fit. It names layouts that would fit."""
    workers = workers_memory(run)
    need = host_bytes(run, workers)
    if need > limits.host:
        gangs = run.config.gangs()
        largest = max(gangs, key=lambda gang: sum(w.total for w in workers if w.worker[0] == gang.name))
        yield _problem(run, limits, largest, "this host", need, limits.host)
        return
    for number, (on_device, gang) in enumerate(_by_device(run.config, workers, limits.num_devices)):
        if on_device > limits.device:
            yield _problem(run, limits, gang, f"GPU {number}", on_device, limits.device)
            return


def fitting_layouts(run: PlannedRun, limits: MemoryLimits, gang: Gang) -> list[LayoutConfig]:
    """Return the layouts of a gang with which the run is predicted to fit, the cheapest first: less recomputation, then
    fewer ranks per model."""
    found, placement = [], run.config.placement
    for layout in _layouts(run, gang):
        gangs = {**placement.gangs, gang.name: replace(placement.gangs[gang.name], layout=layout)}
        if _fits(replace(run, config=replace(run.config, placement=replace(placement, gangs=gangs))), limits):
            found.append(layout)
    return found


def fitting_cache_mb(run: PlannedRun, limits: MemoryLimits) -> int:
    """Return the largest `engine.kv_budget_mb`, at most the given one, with which the run is predicted to fit, or 0 if
    none that fits can hold a row."""
    config = run.config

    def too_much(megabytes: int) -> bool:
        engine = replace(config.engine, kv_budget_mb=megabytes)
        return not _fits(replace(run, config=replace(config, engine=engine)), limits)

    most = bisect.bisect_left(range(config.engine.kv_budget_mb + 1), True, key=too_much) - 1
    return most if most << 20 >= row_cache_bytes(config, run.spec) else 0


def _fits(run: PlannedRun, limits: MemoryLimits) -> bool:
    workers = workers_memory(run)
    devices = _by_device(run.config, workers, limits.num_devices)
    return host_bytes(run, workers) <= limits.host and all(need <= limits.device for need, _ in devices)


def describe_layout(layout: LayoutConfig) -> str:
    """Return a layout in the form that a config has."""
    modules = f", recompute_modules: [{', '.join(layout.recompute_modules)}]" if layout.recompute_modules else ""
    return (
        f"{{tensor: {layout.tensor}, pipeline: {layout.pipeline}, distributed_optimizer: "
        f"{str(layout.distributed_optimizer).lower()}, recompute: {layout.recompute}{modules}}}"
    )


def _problem(run: PlannedRun, limits: MemoryLimits, gang: Gang, where: str, need: int, limit: float) -> Problem:
    """Return the problem of a run that does not fit. `gang`: the one that takes the most memory."""
    key, given, engine = f"placement.gangs.{gang.name}", run.config.placement.gangs[gang.name], run.config.engine
    kind = "host" if where == "this host" else "device"
    predicted = f"{where} would need {need / GIB:.2f} GiB and has {limit / GIB:.2f} (cluster.{kind}_memory_gb)"
    fitting = [describe_layout(layout) for layout in fitting_layouts(run, limits, gang)] if gang.ordered else []
    cache_mb = fitting_cache_mb(run, limits) if _engine_memory(run).reserves_cache else 0
    if cache_mb and (Role.GENERATE in gang.roles or not fitting):
        what = f"{predicted}; {engine.kind} takes all of its cache at its start: at most {cache_mb} fits"
        return Problem("engine.kv_budget_mb", engine.kv_budget_mb, what)
    if fitting:
        what = f"{predicted}; it fits with {' or '.join(fitting[:3])}"
        return Problem(f"{key}.layout", describe_layout(given.layout), what)
    what = f"no layout of its ranks ({gang.workers}) fits" if gang.ordered else "its replicas take the most"
    others = "smaller model.*.micro_batch_tokens, engine.max_rows or engine.kv_budget_mb, model.dtype=bfloat16"
    return Problem(f"{key}.workers", given.workers, f"{predicted}; {what}: {others}, LoRA or more model.frozen_blocks")


def _by_device(config: RunConfig, workers: Sequence[WorkerMemory], num_devices: int) -> list[tuple[int, Gang]]:
    """Return (bytes of its workers, gang that has the most of them) for each GPU of this host that is used."""
    gangs = {gang.name: gang for gang in config.gangs()}
    hosts = {worker.worker: "" for worker in workers}
    device_sharing = config.placement.device_sharing
    plan = plan_devices(list(gangs.values()), config.replica_ranks, hosts, {"": num_devices}, device_sharing)
    loads: list[dict[str, int]] = [{} for _ in range(num_devices)]
    for worker in workers:
        own = plan[worker.worker]
        for number in own:
            load, name = loads[number], worker.worker[0]
            load[name] = load.get(name, 0) + worker.on_device // len(own)
    return [(_at_once(load, device_sharing), gangs[max(load, key=load.__getitem__)]) for load in loads if load]


def _at_once(load: Mapping[str, int], device_sharing: Sequence[Sequence[str]]) -> int:
    """Return the bytes on a GPU at one time. `load`: bytes by gang. Of gangs that take turns, only the largest
    counts."""
    alternating = {name for group in device_sharing for name in group}
    alone = sum(number for name, number in load.items() if name not in alternating)
    return alone + sum(max((load.get(name, 0) for name in group), default=0) for group in device_sharing)


def _layouts(run: PlannedRun, gang: Gang) -> Iterator[LayoutConfig]:
    """Yield the layouts that can divide the gang's models and rows."""
    config = run.config
    given = config.placement.gangs[gang.name].layout
    models = {role: run.own.get(role, run.spec) for role in gang.roles & MODEL_ROLES}
    recomputes = (
        LayoutConfig(),
        LayoutConfig(recompute="selective", recompute_modules=["mlp"]),
        LayoutConfig(recompute="full"),
    )
    degrees = sorted(itertools.product(_divisors(gang.workers), repeat=2), key=lambda pair: (math.prod(pair), pair[1]))
    for saving, (tensor, pipeline), sharded in itertools.product(recomputes, degrees, (False, True)):
        data, cut = divmod(gang.workers, tensor * pipeline)
        rows = (config.rows_per_shard, config.rollout.rows // config.ppo.minibatches)
        if cut or any(number % data for number in rows) or (sharded and data == 1):
            continue
        layout = replace(
            given,
            tensor=tensor,
            pipeline=pipeline,
            sequence_parallel=given.sequence_parallel and tensor > 1,
            distributed_optimizer=sharded,
            recompute=saving.recompute,
            recompute_modules=saving.recompute_modules,
        )
        if not any(any(layout_problems(config.model, role, spec, layout)) for role, spec in models.items()):
            yield layout


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _items(run: PlannedRun, gang: Gang, index: int) -> dict[str, int]:
    items = {PROCESS: PROCESS_BYTES}
    if gang.ordered:
        items |= _model_items(run, gang, index)
    if Role.GENERATE in gang.roles:
        items |= _engine_items(run)
    if gang.ordered or Role.GENERATE in gang.roles:
        items[READING] = run.stored_bytes
    if Role.SCORE in gang.roles and run.scorers:  # they are then the only models of the gang
        items[SCORERS] = sum(DTYPE_BYTES[scorer.dtype] * _parameters(scorer.spec) for scorer in run.scorers)
        items[READING] = max(scorer.stored_bytes for scorer in run.scorers)
    if Role.POLICY in gang.roles and index == 0:  # the whole model: as it is stored, and as it is written
        items[EXPORTING] = run.stored_bytes + DTYPE_BYTES[run.config.model.dtype] * _parameters(run.spec)
    return {name: number for name, number in items.items() if number}


def _model_items(run: PlannedRun, gang: Gang, index: int) -> dict[str, int]:
    """Return the items of a rank's models. Megatron orders ranks by tensor, data, then pipeline."""
    config = run.config
    settings = config.placement.gangs[gang.name]
    layout = settings.layout
    data = gang.workers // (layout.tensor * layout.pipeline)
    roles = gang.roles & MODEL_ROLES
    models = GangModels(run.spec, config.model, layout, roles, data, settings.offload, run.own)
    optimizers = {Role.POLICY: config.model.policy, Role.CRITIC: config.model.critic}
    batches = {role: largest_micro_batch(optimizer, config) for role, optimizer in optimizers.items()}
    stage = index // (layout.tensor * data)
    device = "cuda" if run.on_gpus else "cpu"
    rows = RowsSize(config.seq, config.rollout.rows, config.rollout.rows * config.steps)
    found = rank_bytes(models, batches, stage, rows=rows, device=device)
    return found | {OFFLOADED: offloaded_bytes(models, stage)}


def largest_micro_batch(optimizer: OptimizerConfig, config: RunConfig) -> MicroBatchSize:
    """Return the largest micro-batch that rows of any lengths can make. Short rows may fill `micro_batch_tokens` where
    rows of full length would not; a row longer than that has a micro-batch of its own. At least one token of a row is
    the prompt's: with responses of at most n tokens, at most T n / (n + 1) of T tokens were sampled."""
    rows = min(optimizer.micro_batch_rows or config.rollout.rows, config.rollout.rows)
    tokens = min(max(optimizer.micro_batch_tokens, config.seq), rows * config.seq)
    new = config.sampling.max_new_tokens
    return MicroBatchSize(tokens, min(rows * new, tokens * new // (new + 1)))


def _engine_items(run: PlannedRun) -> dict[str, int]:
    """Return the items of one replica, all of its ranks together."""
    config, spec, engine, memory = run.config, run.spec, run.config.engine, _engine_memory(run)
    number, ranks = DTYPE_BYTES[engine.dtype], config.replica_ranks
    output_layer = spec.vocab_size * spec.hidden_size
    packed = _parameters(spec) + (output_layer if spec.tied_embeddings else 0)  # the output layer is a copy
    refit = number * _published_parameters(run)
    if memory.refit_bytes is not None:  # the engine refits the whole model in place
        refit = min(number * _parameters(spec), ranks * max(memory.refit_bytes, number * output_layer))
    budget = engine.kv_budget_mb << 20
    drafts = engine.embedded.speculation
    head = HIDDEN_STATES_BYTES + _HEAD_BYTES * spec.hidden_size // _HEAD_HIDDEN
    processes = (ranks - 1) * PROCESS_BYTES
    if memory.process_bytes:  # the server, and its ranks if there are several
        processes = memory.process_bytes * (1 if ranks == 1 else ranks + 1)
    return {
        "engine weights": number * packed,
        "refit": refit,
        "KV cache": budget
        if memory.reserves_cache
        else min(budget, engine.max_rows * row_cache_bytes(config, run.spec)),
        "draft head": head if drafts.drafter in ("learned", "both") else 0,
        ENGINE_PROCESSES: processes,
    }


def _engine_memory(run: PlannedRun) -> EngineMemory:
    return run.config.capabilities("cuda" if run.on_gpus else "cpu").memory


def row_cache_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """Return the bytes of the policy's keys and values for one row of full length."""
    number = DTYPE_BYTES[config.engine.dtype]
    return blocks_for(config.seq) * block_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, number)


def _parameters(spec: ModelSpec) -> int:
    return sum(map(math.prod, tensor_shapes(spec).values()))


def _published_parameters(run: PlannedRun) -> int:
    """Return the number of published parameters: those of the policy that are trained, or with LoRA those that adapters
    are merged into."""
    frozen, total = run.config.model.frozen_blocks, 0
    adapted = {*target_parts(run.config.model.lora)}
    for name, shape in tensor_shapes(run.spec).items():
        where = layer_and_part(name)
        if adapted:
            total += math.prod(shape) if where and where[0] >= frozen and where[1] in adapted else 0
        elif not frozen or (name != EMBEDDING and (where is None or where[0] >= frozen)):
            total += math.prod(shape)
    return total


# ---- Memory and GPUs of this host ------------------------------------------------------------------------

_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Present where a driver for GPUs is: NVIDIA's, that of Windows' Linux, AMD's."""

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files of control groups 2 and 1; each holds a number if the container has a limit."""


def gpus_here() -> int:
    """Return the number of GPUs that torch can use on this host. Without a driver torch, which loads slowly, is not
    loaded."""
    return int(import_module("torch").cuda.device_count()) if any(path.exists() for path in _GPU_DRIVERS) else 0


def memory_limits(config: RunConfig) -> MemoryLimits:
    """Return the memory of this host, or of this process's container, and of its GPUs. The config's limits take
    precedence."""
    given, num_devices = config.cluster, gpus_here()
    host, device = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), math.inf
    for path in _CONTAINER_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        host = min(host, int(text)) if text.isdigit() else host
    if num_devices and given.device_memory_gb is None:
        cuda = import_module("torch").cuda
        if cuda.is_available():
            device = min(cuda.get_device_properties(number).total_memory for number in range(num_devices))
    return MemoryLimits(
        host=host if given.host_memory_gb is None else given.host_memory_gb * GIB,
        device=device if given.device_memory_gb is None else given.device_memory_gb * GIB,
        num_devices=num_devices,
    )


def planned_run(config: RunConfig, models: Mapping[Role, ModelSpec], limits: MemoryLimits) -> PlannedRun:
    """Return the input of the prediction for this run. `models`: the result of `role_models`."""
    path = config.model.path
    own = {role: spec for role, spec in models.items() if config.model.path_of(role) != path}
    scorers = {(str(args["path"]), str(args.get("dtype", "float32"))) for args in config.scoring_models().values()}
    return PlannedRun(
        config,
        models[Role.POLICY],
        stored_bytes(path),
        limits.num_devices > 0,
        own,
        scorers=tuple(PlannedScorer(read_spec(path), dtype, stored_bytes(path)) for path, dtype in sorted(scorers)),
    )


def weights_bytes(config: RunConfig) -> int:
    """Return the bytes of published weights on each host that has any. For a config that `preflight` accepts."""
    models = role_models(config, read_model("model.path", config.model.path))
    return board_bytes(planned_run(config, models, memory_limits(config)))
