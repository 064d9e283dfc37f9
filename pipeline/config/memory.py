"""Predict the memory of a run, by worker, host and purpose, before anything starts.

    stages.models.memory    a rank's models, from architecture and layout    ─┐
    engine's weights, keys and values, drafts                                ─┼─► WorkerMemory ─► each GPU
    processes, CUDA, publication, copies for checkpoints and exports         ─┘        │
    the models' files and published weights, once per host                   ──────────┴─────► HostMemory

On a host without GPUs everything is in the host's memory. With GPUs, the models and their caches are in GPU memory. The
host's memory then has the processes, copies of weights, published versions, and the models' files, which all processes
map.

The prediction is an upper bound. It assumes the largest micro-batches that rows of any lengths can fill, and that every
engine is full of rows. Differences between engines are in their capabilities (`EngineMemory`). `fitting` compares the
prediction with the memory available. The last part reads the memory of this host and its GPUs; all else is pure.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from importlib import import_module
from pathlib import Path

from pipeline.config.devices import Worker, place_all_here
from pipeline.config.hardware import GIB
from pipeline.config.role_models import read_model, role_models
from pipeline.config.run import RunConfig
from pipeline.graph.graph import Gang
from stages.engines.capabilities import EngineMemory
from stages.engines.config import ENGINE_WORK_BYTES, HIDDEN_STATES_BYTES
from stages.engines.embedded.kernels.blocks import block_bytes, blocks_for
from stages.models.config import ModelConfig, OptimizerConfig
from stages.models.hf_files import MAX_FILE_BYTES
from stages.models.memory import (
    CUDA_CONTEXT_BYTES,
    DTYPE_BYTES,
    GRADIENTS,
    NCCL_BYTES,
    GangModels,
    MicroBatchSize,
    RowsSize,
    adapter_bytes,
    checkpoint_bytes,
    communicators,
    offloaded_bytes,
    publication_bytes,
    published_tensors,
    rank_bytes,
    role_parameters,
)
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import ModelSpec, is_random, read_config, read_spec, stored_bytes, tensor_shapes

PROCESS_BYTES = 500 << 20
"""Memory of a worker's process without models and caches, in bytes: libraries, mostly torch's, and small objects.
Measured: a worker that trains the tiny model in float32 takes 499 MiB in all, very little of it for the model."""
CUDA_PROCESS_BYTES = 2 << 30
"""Host memory that CUDA adds to a process: libraries and the driver's records. Not measured."""
DRIVER_BYTES = 500 << 20
SHARED_MEMORY = Path("/dev/shm")
"""Directory of published weights unless the config gives another."""
_HEAD_BYTES = 110 << 20
"""Memory of a learned draft head and its optimizer, at hidden size `_HEAD_HIDDEN`; see docs/engine.md."""
_HEAD_HIDDEN = 576


class Phase(StrEnum):
    """The phases for which a worker's memory is predicted. The largest of the predictions is the worker's peak."""

    START = "start"
    """Weights are read."""
    STEP = "step"
    """The phase in which rows are generated or a model is trained."""
    PUBLISH = "publish"
    """A version is published, and perhaps exported."""


_ALWAYS = frozenset(Phase)
_LATER = _ALWAYS - {Phase.START}
_STEP = frozenset({Phase.STEP})
_PHASES = {
    "activations": _STEP,
    "logits": _STEP,
    "refit": _STEP,
    "publication": frozenset({Phase.PUBLISH}),
    "publication on the host": frozenset({Phase.PUBLISH}),
    "reading weights": frozenset({Phase.START}),
    "moments": _LATER,
    "trunk cache": _LATER,
    "KV cache": _LATER,
    "draft head": _LATER,
    "copies for checkpoints": _LATER,
    "export": frozenset({Phase.PUBLISH}),
    "exports": _LATER,
}
"""Name in `WorkerMemory.items` -> phases in which this item takes memory. An item that is not listed takes memory in
all phases."""
PROCESS, READING, OFFLOADED = "process", "reading weights", "offloaded"
CONTEXT, NCCL, SCORERS = "CUDA context", "NCCL", "reward models"
ENGINE_PROCESSES, ENGINE_WORK = "engine's processes", "engine's graphs and buffers"
PUBLICATION, ON_HOST, CHECKPOINTS = "publication", "publication on the host", "copies for checkpoints"
EXPORT, EXPORTS = "export", "exports"
"""Names of two items of the memory prediction (`WorkerMemory.items`). `EXPORT`: memory for the export of the last
version, after training. `EXPORTS` takes the place of `EXPORT` if versions are also exported during training."""
_ON_HOST = frozenset({PROCESS, READING, OFFLOADED, ENGINE_PROCESSES, ON_HOST, CHECKPOINTS, EXPORT, EXPORTS})
"""Items that lie in the host's memory for a worker with a GPU."""
_REMAINS = frozenset({CONTEXT, NCCL})
"""Items that stay on the device while other gangs use it."""
_COMPUTED_AGAIN = frozenset(
    {GRADIENTS, "activations", "logits", "trunk cache", "refit", "KV cache", PUBLICATION, ENGINE_WORK}
)
"""Items that are freed, and not moved to the host, when other gangs get the device."""


@dataclass(frozen=True)
class PlannedModel:
    """A model that workers of a run will load: the facts from which its memory is predicted."""

    path: str
    spec: ModelSpec
    stored_bytes: int
    """Bytes of the model's weight files. If there are none: the bytes that its weights would take in a file."""
    stored_dtype: str = "float32"

    @property
    def is_mapped(self) -> bool:
        """True if the model has files, which all processes of a host share in memory. False if its weights are random:
        then each process makes its own copy."""
        return not is_random(self.path)


@dataclass(frozen=True)
class PlannedScorer:
    """A model of a reward: a reward model or a local judge."""

    model: PlannedModel
    dtype: str


@dataclass(frozen=True)
class PlannedRun:
    """A run, with the facts about its models from which its memory is predicted."""

    config: RunConfig
    model: PlannedModel
    """The model at `model.path`."""
    on_gpus: bool
    own: Mapping[Role, PlannedModel] = field(default_factory=dict)
    """Role -> its model, for each role whose model is not the model at `model.path`."""
    scorers: Sequence[PlannedScorer] = ()
    """Models of rewards. Every scoring worker holds all of these models, or a part of each."""

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def separate_specs(self) -> dict[Role, ModelSpec]:
        return {role: model.spec for role, model in self.own.items()}


@dataclass(frozen=True)
class WorkerMemory:
    """The predicted memory of one worker: bytes by purpose."""

    worker: Worker
    items: Mapping[str, int]
    on_gpu: bool

    @property
    def total(self) -> int:
        """Peak number of bytes in use, on the device and the host together."""
        return self._peak_of(self.items)

    @property
    def device_items(self) -> dict[str, int]:
        """The worker's memory on its GPUs: purpose, such as `activations` -> bytes. Empty if the worker has no GPU."""
        return {name: number for name, number in self.items.items() if name not in _ON_HOST} if self.on_gpu else {}

    @property
    def on_device(self) -> int:
        """Peak number of bytes on all of the worker's GPUs together."""
        return self._peak_of(self.device_items)

    @property
    def on_host(self) -> int:
        """Peak number of bytes in the host's memory."""
        return self._peak_of(self.items.keys() & _ON_HOST) if self.on_gpu else self.total

    @property
    def remaining(self) -> int:
        """Bytes on the device after the worker has left it to another gang."""
        return sum(self.items.get(name, 0) for name in _REMAINS)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that move from the device to the host's memory when the worker leaves the device to another gang.
        Items that stay on the device, or are freed and computed again, do not count. The host's memory stays allocated
        afterwards, because pinning it again would take longer than copying."""
        return sum(self.items[name] for name in self.items.keys() - _ON_HOST - _REMAINS - _COMPUTED_AGAIN)

    def at(self, phase: Phase, names: Iterable[str] | None = None) -> int:
        """Return the bytes that the worker has in use during a phase. `names`: the purposes to count, as keys of
        `items`; None: all purposes."""
        kept = self.items if names is None else names
        return sum(self.items[name] for name in kept if phase in _PHASES.get(name, _ALWAYS))

    def _peak_of(self, names: Iterable[str]) -> int:
        kept = [*names]
        return max(self.at(phase, kept) for phase in Phase)


@dataclass(frozen=True)
class HostMemory:
    """Bytes of one host's memory, by purpose."""

    host: str
    items: Mapping[str, int]
    """Bytes by purpose. A key is the name of a gang, for all its workers on the host, or the name of an item that all
    workers of the host share."""
    shared: int
    """Bytes in /dev/shm. They are included in `items`."""

    @property
    def total(self) -> int:
        return sum(self.items.values())


def workers_memory(run: PlannedRun) -> list[WorkerMemory]:
    """Return the predicted memory of every worker."""
    workers, known = [], dict[tuple[object, ...], dict[str, int]]()
    for gang in run.config.gangs():
        for index in range(gang.workers):
            stage = _stage(run, gang, index)
            key = gang.name, stage, index == 0
            if key not in known:
                known[key] = _items(run, gang, stage, first=index == 0)
            workers.append(WorkerMemory((gang.name, index), known[key], on_gpu=run.on_gpus and gang.gpus > 0))
    return workers


def worker_memory(run: PlannedRun, gang: Gang, index: int) -> WorkerMemory:
    """Return the predicted memory of one worker."""
    stage = _stage(run, gang, index)
    items = _items(run, gang, stage, first=index == 0)
    return WorkerMemory((gang.name, index), items, on_gpu=run.on_gpus and gang.gpus > 0)


def _stage(run: PlannedRun, gang: Gang, index: int) -> int:
    """Return a worker's pipeline stage. In Megatron's ranks the tensor index changes fastest, then data, then the
    stage."""
    if not gang.is_ordered:
        return 0
    return index // (gang.workers // run.config.placement.gangs[gang.name].layout.pipeline)


def hosts_memory(run: PlannedRun, workers: Sequence[WorkerMemory], hosts: Mapping[Worker, str]) -> list[HostMemory]:
    """Return the predicted memory of every host that has workers. `hosts`: worker -> its host. The driver is on the
    first host."""
    gangs = {gang.name: gang for gang in run.config.gangs()}
    alternating = {name for group in run.config.placement.device_sharing for name in group}
    memory = []
    for number, host in enumerate(dict.fromkeys(hosts.values())):
        here = [worker for worker in workers if hosts[worker.worker] == host]
        items: dict[str, int] = {}
        for worker in here:
            name = worker.worker[0]
            offloaded = worker.offloaded_bytes if run.on_gpus and name in alternating else 0
            items[name] = items.get(name, 0) + worker.on_host + offloaded
        files = {m.path: m.stored_bytes for w in here for m in _models_of(run, gangs[w.worker[0]]) if m.is_mapped}
        boards = _boards(run, [worker.worker for worker in here])
        shared = sum(Path(board or SHARED_MEMORY).is_relative_to(SHARED_MEMORY) for board in boards) * board_bytes(run)
        items |= {"model files": sum(files.values()), "published weights": len(boards) * board_bytes(run)}
        items |= {"driver": DRIVER_BYTES} if not number else {}
        memory.append(HostMemory(host, {name: size for name, size in items.items() if size}, shared))
    return memory


def host_bytes(run: PlannedRun, workers: Sequence[WorkerMemory]) -> int:
    """Return the host memory, in bytes, that the run takes if all its workers are on one host."""
    (host,) = hosts_memory(run, workers, place_all_here(run.config.gangs()))
    return host.total


def board_bytes(run: PlannedRun) -> int:
    """Return the bytes of a directory of published weights. It holds the `staleness` + 2 versions that readers may
    still need. If exports are written during training, it holds one more version, from which an export is written."""
    versions = run.config.staleness + 2 + run.config.exports_in_training
    return versions * DTYPE_BYTES[run.config.model.dtype] * _published_parameters(run)


def _boards(run: PlannedRun, here: Sequence[Worker]) -> set[str | None]:
    """Return the directories of published weights on a host with these workers (None: the default one). The policy's
    first rank and the replicas of the engine need one."""
    roles, config = run.config.placement.roles, run.config
    publishes = (roles[Role.POLICY], 0) in here
    reads = any(name == roles[Role.GENERATE] for name, _ in here)
    used = [roles[Role.POLICY]] * publishes + [roles[Role.GENERATE]] * reads
    return {config.weights_dir(gang) for gang in used}


def _models_of(run: PlannedRun, gang: Gang) -> list[PlannedModel]:
    """Return the models whose files a gang's workers read."""
    models = [run.own.get(role, run.model) for role in gang.roles & MODEL_ROLES]
    frozen = models and run.config.model.frozen_blocks
    models += [run.model] if Role.GENERATE in gang.roles or frozen else []
    return models + ([scorer.model for scorer in run.scorers] if Role.SCORE in gang.roles else [])


def _items(run: PlannedRun, gang: Gang, stage: int, *, first: bool) -> dict[str, int]:
    """Return the memory of a worker of this pipeline stage, as item -> bytes. `first`: True for the gang's first rank,
    which also exports the policy."""
    devices = gang.gpus if run.on_gpus else 0
    items = {PROCESS: PROCESS_BYTES + (CUDA_PROCESS_BYTES if devices else 0), CONTEXT: devices * CUDA_CONTEXT_BYTES}
    if gang.roles & MODEL_ROLES:
        items |= _model_items(run, gang, stage, first=first)
    if Role.GENERATE in gang.roles:
        items |= _engine_items(run)
    read = _models_of(run, gang)
    items[READING] = max((model.stored_bytes for model in read if not model.is_mapped), default=0)
    if Role.SCORE in gang.roles and run.scorers:  # a gang with reward models has no other models
        items[SCORERS] = sum(_scorer_bytes(run, gang, scorer, stage) for scorer in run.scorers)
        if devices and gang.divides_scorers:
            items[NCCL] = communicators(run.config.placement.gangs[gang.name].layout, gang.workers) * NCCL_BYTES
    return {name: number for name, number in items.items() if number}


def _scorer_bytes(run: PlannedRun, gang: Gang, scorer: PlannedScorer, stage: int) -> int:
    """Return the bytes of the weights of a reward's model on a rank of this pipeline stage."""
    layout, spec = run.config.placement.gangs[gang.name].layout, scorer.model.spec
    if not gang.divides_scorers:
        return DTYPE_BYTES[scorer.dtype] * parameters(spec)
    model = ModelConfig(dtype=scorer.dtype)  # type: ignore[arg-type]  # `ModelReward` has checked it
    data = gang.workers // (layout.tensor * layout.pipeline)
    held = GangModels(spec, model, layout, frozenset({Role.REFERENCE}), data)
    return DTYPE_BYTES[scorer.dtype] * role_parameters(held, Role.REFERENCE, stage).of_dtype


def _model_items(run: PlannedRun, gang: Gang, stage: int, *, first: bool) -> dict[str, int]:
    """Return item -> bytes of the models of a rank of this pipeline stage. `first`: True for the gang's first rank."""
    config = run.config
    settings = config.placement.gangs[gang.name]
    layout = settings.layout
    data = gang.workers // (layout.tensor * layout.pipeline)
    roles = gang.roles & MODEL_ROLES
    portable = run.on_gpus or config.model.kernels == "portable"
    models = GangModels(
        run.spec, config.model, layout, roles, data, settings.offload, run.separate_specs, portable, run.on_gpus
    )
    optimizers = {Role.POLICY: config.model.policy, Role.CRITIC: config.model.critic}
    batches = {role: largest_micro_batch(optimizer, config) for role, optimizer in optimizers.items()}
    rows = RowsSize(config.seq, config.rollout.rows, config.rollout.rows * config.steps)
    items = rank_bytes(models, batches, stage, rows=rows, device="cuda" if run.on_gpus else "cpu")
    items[OFFLOADED] = offloaded_bytes(models, stage)
    if config.checkpoint.every <= config.steps:
        items[CHECKPOINTS] = checkpoint_bytes(models, stage, is_pinned=run.on_gpus)
    if run.on_gpus:
        items[NCCL] = communicators(layout, gang.workers) * NCCL_BYTES
    if Role.POLICY in roles:
        items[PUBLICATION], items[ON_HOST] = publication_bytes(models, stage, on_gpu=run.on_gpus)
        of_export = _converted_bytes(run) + adapter_bytes(models) if first else 0
        items[EXPORTS if config.exports_in_training else EXPORT] = of_export
    return items


def _converted_bytes(run: PlannedRun) -> int:
    """Return the most bytes that an export takes to convert a file's untrained tensors to the run's dtype. Trained
    tensors are written from the published version."""
    dtype = run.config.model.dtype
    unchanged = parameters(run.spec) - _published_parameters(run)
    return 0 if run.model.stored_dtype == dtype else min(MAX_FILE_BYTES, DTYPE_BYTES[dtype] * unchanged)


def largest_micro_batch(optimizer: OptimizerConfig, config: RunConfig) -> MicroBatchSize:
    """Return upper bounds for a micro-batch with rows of any lengths: T tokens, of which S were sampled, and W tokens
    for the longest row.

        T = min(max(micro_batch_tokens, L), R L)     L: length of a full row, R: largest number of rows
        S = min(R n, T n / (n + 1))                  n: largest number of sampled tokens of a row
        W = min(T, L)

    - Short rows may fill `micro_batch_tokens` completely, even if rows of full length cannot.
    - A row with more than `micro_batch_tokens` tokens has a micro-batch of its own. So T is at least L.
    - Each row has at least one token of a prompt. So at most T n / (n + 1) of the T tokens were sampled.
    """
    rows = min(optimizer.micro_batch_rows or config.rollout.rows, config.rollout.rows)
    tokens = min(max(optimizer.micro_batch_tokens, config.seq), rows * config.seq)
    new = config.sampling.max_new_tokens
    return MicroBatchSize(tokens, min(rows * new, tokens * new // (new + 1)), min(tokens, config.seq))


def _engine_items(run: PlannedRun) -> dict[str, int]:
    """Return item -> bytes of one replica of the engine, summed over its ranks."""
    config, spec, engine, memory = run.config, run.spec, run.config.engine, engine_memory(run)
    number, ranks = DTYPE_BYTES[engine.dtype], config.replica_ranks
    output_layer = spec.vocab_size * spec.hidden_size
    packed = parameters(spec) + (output_layer if spec.tied_embeddings else 0)  # tied: the layer is stored twice
    refit = number * _published_parameters(run)
    if memory.refit_bytes is not None:  # the engine refits the whole model in place
        refit = min(number * parameters(spec), ranks * max(memory.refit_bytes, number * output_layer))
    budget = engine.kv_budget_mb << 20
    drafts = engine.embedded.speculation
    head = HIDDEN_STATES_BYTES + _HEAD_BYTES * spec.hidden_size // _HEAD_HIDDEN
    of_process = PROCESS_BYTES + (CUDA_PROCESS_BYTES if run.on_gpus else 0)
    processes = (ranks - 1) * of_process
    if memory.process_bytes:  # the server, and its ranks if there are several
        of_process += memory.process_bytes - PROCESS_BYTES
        processes = of_process * (1 if ranks == 1 else ranks + 1)
    work = ENGINE_WORK_BYTES if run.on_gpus and memory.process_bytes else 0
    return {
        "engine weights": number * packed,
        "refit": refit,
        "KV cache": budget
        if memory.reserves_cache
        else min(budget, engine.max_rows * row_cache_bytes(config, run.spec)),
        "draft head": head if drafts.drafter in ("learned", "both") else 0,
        ENGINE_PROCESSES: processes,
        ENGINE_WORK: ranks * work,
        NCCL: ranks * NCCL_BYTES if run.on_gpus and ranks > 1 else 0,
    }


def engine_memory(run: PlannedRun) -> EngineMemory:
    """Return the properties that decide how much memory the run's engine needs on its kind of device (CUDA or CPU)."""
    return run.config.capabilities("cuda" if run.on_gpus else "cpu").memory


def row_cache_bytes(config: RunConfig, spec: ModelSpec) -> int:
    """Return the bytes of the policy's keys and values for one row of full length."""
    number = DTYPE_BYTES[config.engine.dtype]
    return blocks_for(config.seq) * block_bytes(spec.num_layers, spec.num_kv_heads, spec.head_dim, number)


def parameters(spec: ModelSpec) -> int:
    """Return the number of a model's parameters."""
    return sum(map(math.prod, tensor_shapes(spec).values()))


def _published_parameters(run: PlannedRun) -> int:
    return sum(published_tensors(run.spec, run.config.model).values())


# ---- memory and GPUs of this host ------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryLimits:
    """The memory of each host and GPU, in bytes."""

    host: float
    device: float
    """Largest amount of memory that the run may take on one GPU, in bytes. Unused if `num_devices` is 0."""
    num_devices: int
    """GPUs of a host."""
    shared: float = math.inf
    """Size of /dev/shm."""
    origin: str = ""
    """Where these limits come from, as a text for messages, such as `--as 16x8xH100-80`. "" if they are the memory of
    this host, or come from the config."""


_GPU_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))
"""Device files of the drivers of NVIDIA's GPUs, of GPUs in Linux under Windows, and of AMD's GPUs. One of the files
exists if a driver is installed."""

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with the memory limit of a container, for versions 2 and 1 of control groups. The file holds a number only if
the container has a limit."""


def gpus_here() -> int:
    """Return the number of GPUs that torch can use on this host. If the host has no GPU driver, return 0 without
    loading torch, because loading it is slow."""
    return int(import_module("torch").cuda.device_count()) if any(path.exists() for path in _GPU_DRIVERS) else 0


def memory_limits(config: RunConfig) -> MemoryLimits:
    """Return the memory of this host, of its smallest GPU (infinite without GPUs), and of its /dev/shm. If this
    process's container may use less than the host has, the container's limit counts. `cluster.host_memory_gb` and
    `cluster.device_memory_gb` replace the memory of host and GPU."""
    cluster, num_devices = config.cluster, gpus_here()
    host, device = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), math.inf
    for path in _CONTAINER_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        host = min(host, int(text)) if text.isdigit() else host
    if num_devices and cluster.device_memory_gb is None:
        cuda = import_module("torch").cuda
        if cuda.is_available():
            device = min(cuda.get_device_properties(number).total_memory for number in range(num_devices))
    return MemoryLimits(
        host=host if cluster.host_memory_gb is None else cluster.host_memory_gb * GIB,
        device=device if cluster.device_memory_gb is None else cluster.device_memory_gb * GIB,
        num_devices=num_devices,
        shared=shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else math.inf,
    )


def planned_run(config: RunConfig, models: Mapping[Role, ModelSpec], *, on_gpus: bool) -> PlannedRun:
    """Collect the facts about a run and its models from which the memory of the run is predicted. `models`: the result
    of `role_models`. `on_gpus`: True if the run will compute on GPUs."""
    path = config.model.path
    scorers = {(str(args["path"]), str(args.get("dtype", "float32"))) for args in config.scoring_models().values()}
    others = {role: config.model.path_of(role) for role in models if config.model.path_of(role) != path}
    return PlannedRun(
        config,
        _planned_model(path, models[Role.POLICY]),
        on_gpus,
        {role: _planned_model(other, models[role]) for role, other in others.items()},
        [PlannedScorer(_planned_model(path, read_spec(path)), dtype) for path, dtype in sorted(scorers)],
    )


def _planned_model(path: str, spec: ModelSpec) -> PlannedModel:
    """Return the model at `path` with the size of its weight files, computed from config.json if it has none."""
    content = read_config(path)
    dtype = str(content.get("dtype") or content.get("torch_dtype") or "float32")
    return PlannedModel(path, spec, stored_bytes(path) or DTYPE_BYTES.get(dtype, 4) * parameters(spec), dtype)


def weights_bytes(config: RunConfig) -> int:
    """Return the bytes of one directory of published weights. `preflight` must accept the config."""
    models = role_models(config, read_model("model.path", config.model.path))
    return board_bytes(planned_run(config, models, on_gpus=False))
