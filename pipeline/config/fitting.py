"""Compare the predicted memory and number of open files of a run with the limits of its hosts. Find settings with which
the run would fit into memory.

    WorkerMemory, HostMemory (`memory`) ──► compared with each host, its /dev/shm and each GPU
        ──► Problem if the run does not fit: the bytes needed, the bytes available, and the layouts
            or the cache size with which it would fit

The functions about memory are pure. Two functions about open files read or raise this process's limit.
"""

from __future__ import annotations

import bisect
import itertools
import math
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from pipeline.config.devices import THIS_HOST, Worker, place_all_here, plan_devices
from pipeline.config.hardware import GIB
from pipeline.config.memory import (
    HostMemory,
    MemoryLimits,
    PlannedRun,
    WorkerMemory,
    engine_memory,
    hosts_memory,
    row_cache_bytes,
    workers_memory,
)
from pipeline.config.run import RunConfig
from pipeline.graph.graph import Gang
from stages.models.config import LayoutConfig
from stages.models.layouts import layout_problems
from stages.models.protocol import MODEL_ROLES, Role
from storage.problems import Problem

RECOMPUTES = (
    LayoutConfig(),
    LayoutConfig(recompute="selective", recompute_modules=["mlp"]),
    LayoutConfig(recompute="full"),
)
"""Ways to recompute activations, from the fastest to the one that saves the most memory."""


@dataclass(frozen=True)
class DeviceMemory:
    """The predicted peak of the memory in use on one GPU."""

    host: str
    number: int
    num_bytes: int
    largest: WorkerMemory
    """The worker that takes the most memory on this GPU while its gang uses the GPU."""


def memory_problems(
    run: PlannedRun, limits: MemoryLimits, hosts: Mapping[Worker, str] | None = None
) -> Iterator[Problem]:
    """Yield the problems of a run that is predicted to need more memory than there is. Each problem names changes that
    may help. There is at most one problem

    - about the memory of hosts, for the fullest host,
    - about /dev/shm, for the host whose /dev/shm is fullest,
    - about the GPUs of each gang, for the gang's fullest GPU.

    If several gangs use a GPU, its problem is reported only for one of them: the gang whose worker takes the most
    memory on this GPU.

    `hosts`: worker -> its host. None: all workers are on this host.
    """
    hosts = hosts or place_all_here(run.config.gangs())
    workers = workers_memory(run)
    of_hosts = hosts_memory(run, workers, hosts)
    worst = max(of_hosts, key=lambda host: host.total)
    if worst.total > limits.host:
        yield _host_problem(run, limits, hosts, worst)
    fullest = max(of_hosts, key=lambda host: host.shared)
    if fullest.shared > limits.shared:
        need = (
            f"/dev/shm of {fullest.host} would hold {fullest.shared / GIB:.2f} GiB of published weights "
            f"(staleness + 2 versions) and has {limits.shared / GIB:.2f}: make it larger, give a directory on another "
            "filesystem, or a smaller staleness"
        )
        yield Problem("cluster.weights_dir", run.config.cluster.weights_dir, need)
    by_gang: dict[str, DeviceMemory] = {}
    for device in devices_memory(run, workers, hosts, limits.num_devices):
        name = device.largest.worker[0]
        if name not in by_gang or device.num_bytes > by_gang[name].num_bytes:
            by_gang[name] = device
    for device in by_gang.values():
        if device.num_bytes > limits.device:
            yield _device_problem(run, limits, hosts, device)


def devices_memory(
    run: PlannedRun, workers: Sequence[WorkerMemory], hosts: Mapping[Worker, str], num_devices: int
) -> list[DeviceMemory]:
    """Return the predicted peak memory of each GPU that workers use. Gangs that share devices
    (`placement.device_sharing`) use a GPU in turn. Only one of them counts in full: the gang that makes the sum
    largest. The others count with the bytes that they leave on the GPU.

    `hosts`: worker -> its host. `num_devices`: number of GPUs of each host.
    """
    config = run.config
    sharing = config.placement.device_sharing
    available = dict.fromkeys(hosts.values(), num_devices)
    plan = plan_devices(config.gangs(), hosts, available, sharing)
    loads: dict[tuple[str, int], list[WorkerMemory]] = {}
    for worker in workers:
        for number in plan[worker.worker]:
            loads.setdefault((hosts[worker.worker], number), []).append(worker)
    shares = {worker.worker: max(1, len(plan[worker.worker])) for worker in workers}
    return [
        DeviceMemory(
            host,
            number,
            _max_bytes_at_once(load, shares, sharing),
            max(load, key=lambda w: w.on_device // shares[w.worker]),
        )
        for (host, number), load in sorted(loads.items(), key=lambda one: one[0][1])
    ]


def fitting_layouts(
    run: PlannedRun, limits: MemoryLimits, gang: Gang, hosts: Mapping[Worker, str] | None = None
) -> list[LayoutConfig]:
    """Return the layouts of a gang with which the run is predicted to fit, the cheapest first. Layouts are ordered by
    the amount of recomputation, and then by the number of ranks per model."""
    layouts, placement = [], run.config.placement
    for layout in _layouts(run, gang):
        gangs = {**placement.gangs, gang.name: replace(placement.gangs[gang.name], layout=layout)}
        if _fits(replace(run, config=replace(run.config, placement=replace(placement, gangs=gangs))), limits, hosts):
            layouts.append(layout)
    return layouts


def fitting_cache_mb(run: PlannedRun, limits: MemoryLimits, hosts: Mapping[Worker, str] | None = None) -> int:
    """Return the largest `engine.kv_budget_mb`, up to the config's value, with which the run is predicted to fit.
    Return 0 if the run does not fit with any cache, or only with a cache that could not hold one row."""
    config = run.config

    def too_much(megabytes: int) -> bool:
        engine = replace(config.engine, kv_budget_mb=megabytes)
        return not _fits(replace(run, config=replace(config, engine=engine)), limits, hosts)

    most = bisect.bisect_left(range(config.engine.kv_budget_mb + 1), True, key=too_much) - 1
    return most if most << 20 >= row_cache_bytes(config, run.spec) else 0


def _fits(run: PlannedRun, limits: MemoryLimits, hosts: Mapping[Worker, str] | None) -> bool:
    hosts = hosts or place_all_here(run.config.gangs())
    workers = workers_memory(run)
    of_hosts = hosts_memory(run, workers, hosts)
    return (
        all(host.total <= limits.host and host.shared <= limits.shared for host in of_hosts)
        and all(one.num_bytes <= limits.device for one in devices_memory(run, workers, hosts, limits.num_devices))
    )  # fmt: skip


def _host_problem(run: PlannedRun, limits: MemoryLimits, hosts: Mapping[Worker, str], host: HostMemory) -> Problem:
    """Return the problem of a host whose memory is too small. The problem names the gang that takes the most of this
    memory."""
    gangs = {gang.name: gang for gang in run.config.gangs()}
    largest = max(host.items.keys() & gangs.keys(), key=lambda name: host.items[name])
    listed = _largest(host.items)
    origin = limits.origin or "cluster.host_memory_gb"
    need = f"{host.host} would need {host.total / GIB:.2f} GiB ({listed}) and has {limits.host / GIB:.2f} ({origin})"
    return _with_advice(run, limits, hosts, gangs[largest], need)


def _device_problem(
    run: PlannedRun, limits: MemoryLimits, hosts: Mapping[Worker, str], device: DeviceMemory
) -> Problem:
    name, index = device.largest.worker
    (gang,) = (gang for gang in run.config.gangs() if gang.name == name)
    where = f"GPU {device.number}" + (f" of {device.host}" if device.host != THIS_HOST else "")
    listed = _largest(device.largest.device_items)
    origin = limits.origin or "cluster.device_memory_gb"
    need = (
        f"{where} would need {device.num_bytes / GIB:.2f} GiB ({name}-{index}: {listed}) and has "
        f"{limits.device / GIB:.2f} ({origin})"
    )
    return _with_advice(run, limits, hosts, gang, need)


def _largest(items: Mapping[str, int]) -> str:
    """Return the names and sizes (in GiB) of the three largest items, as text for a message."""
    three = sorted(items.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{name} {number / GIB:.2f}" for name, number in three)


def _with_advice(
    run: PlannedRun, limits: MemoryLimits, hosts: Mapping[Worker, str], gang: Gang, predicted: str
) -> Problem:
    """Return the problem of a run that does not fit. The problem names a cache size or layouts that would fit. If there
    are none, the problem names other changes that would save memory. `gang`: the gang that takes the most memory.
    `predicted`: text about the predicted memory."""
    key, settings, engine = f"placement.gangs.{gang.name}", run.config.placement.gangs[gang.name], run.config.engine
    trained = bool(gang.roles & MODEL_ROLES)
    fitting = [layout_text(one) for one in fitting_layouts(run, limits, gang, hosts)] if trained else []
    cache_mb = fitting_cache_mb(run, limits, hosts) if engine_memory(run).reserves_cache else 0
    if cache_mb and (Role.GENERATE in gang.roles or not fitting):
        what = f"{predicted}; {engine.kind} takes all of its cache at its start: at most {cache_mb} fits"
        return Problem("engine.kv_budget_mb", engine.kv_budget_mb, what)
    if fitting:
        what = f"{predicted}; it fits with {' or '.join(fitting[:3])}"
        return Problem(f"{key}.layout", layout_text(settings.layout), what)
    what = f"no layout of its ranks ({gang.workers}) fits" if trained else "its workers take the most"
    return Problem(
        f"{key}.workers", settings.workers, f"{predicted}; {what}: {', '.join(_memory_saving_changes(run, gang))}"
    )


def _memory_saving_changes(run: PlannedRun, gang: Gang) -> Iterator[str]:
    """Yield the changes with which a gang would take less memory."""
    model, engine = run.config.model, run.config.engine
    if Role.GENERATE in gang.roles:
        yield "more engine.tensor_parallel" if run.on_gpus else "fewer replicas on a host"
        yield "smaller engine.max_rows or engine.kv_budget_mb"
        if engine.dtype == "float32":
            yield "engine.dtype=bfloat16"
    if Role.SCORE in gang.roles and run.scorers:
        if any(scorer.dtype == "float32" for scorer in run.scorers):
            yield "dtype: bfloat16 for its reward models"
        yield "on several hosts a larger layout.tensor or layout.pipeline"
    if gang.roles & MODEL_ROLES:
        yield "more ranks"
        yield "smaller model.*.micro_batch_tokens"
        if model.dtype == "float32":
            yield "model.dtype=bfloat16"
        yield "more model.frozen_blocks" + ("" if model.lora.rank else " or LoRA")


def layout_text(layout: LayoutConfig) -> str:
    """Return a layout as text, in the form of a config. The text has all settings, so that it can replace any other
    layout."""
    return (
        f"{{tensor: {layout.tensor}, pipeline: {layout.pipeline}, "
        f"sequence_parallel: {str(layout.sequence_parallel).lower()}, "
        f"distributed_optimizer: {str(layout.distributed_optimizer).lower()}, "
        f"recompute: {layout.recompute}, recompute_modules: [{', '.join(layout.recompute_modules)}]}}"
    )


def _max_bytes_at_once(
    load: Sequence[WorkerMemory], shares: Mapping[Worker, int], device_sharing: Sequence[Sequence[str]]
) -> int:
    """Return the most bytes that these workers hold on a GPU at one time. Of gangs that share devices one counts in
    full, and the others with what they leave there. `shares`: worker -> number of GPUs over which its bytes are
    spread."""

    by_gang: dict[str, tuple[int, int]] = {}
    for one in load:
        name, share = one.worker[0], shares[one.worker]
        most, left = by_gang.get(name, (0, 0))
        by_gang[name] = most + one.on_device // share, left + one.remaining // share
    alternating = [[by_gang.pop(name) for name in group if name in by_gang] for group in device_sharing]
    total = sum(most for most, _ in by_gang.values())
    for group in alternating:
        total += sum(left for _, left in group) + max((most - left for most, left in group), default=0)
    return total


def _layouts(run: PlannedRun, gang: Gang) -> Iterator[LayoutConfig]:
    """Yield the layouts that can divide the gang's models and rows."""
    config = run.config
    configured = config.placement.gangs[gang.name].layout
    models = {role: run.separate_specs.get(role, run.spec) for role in gang.roles & MODEL_ROLES}
    degrees = sorted(itertools.product(_divisors(gang.workers), repeat=2), key=lambda pair: (math.prod(pair), pair[1]))
    for saving, (tensor, pipeline), sharded in itertools.product(RECOMPUTES, degrees, (False, True)):
        data, cut = divmod(gang.workers, tensor * pipeline)
        rows = (config.rows_per_shard, config.rollout.rows // config.ppo.minibatches)
        if cut or any(number % data for number in rows) or (sharded and data == 1):
            continue
        layout = replace(
            configured,
            tensor=tensor,
            pipeline=pipeline,
            sequence_parallel=configured.sequence_parallel and tensor > 1,
            distributed_optimizer=sharded,
            recompute=saving.recompute,
            recompute_modules=saving.recompute_modules,
        )
        if not any(any(layout_problems(config.model, role, spec, layout)) for role, spec in models.items()):
            yield layout


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


# ---- open files ------------------------------------------------------------------------------------------


_OWN_DESCRIPTORS = 128
"""Open files of each process of a run, except files that the next two constants count. Measured: 24 in the driver, 101
in a rank."""
_DESCRIPTORS_PER_WORKER = 12
"""Open files of the driver for each worker: pipes of its nanny, and TLS connections. Measured: 12."""
_DESCRIPTORS_PER_RANK = 16
"""Number of open files that a rank needs for each rank of its gang: one connection in each process group. In a gang of
n ranks, each rank needs n times this number. Measured: 13."""


def descriptors_needed(config: RunConfig) -> int:
    """Return the number of open files that the driver needs. If the cluster is local, return the largest number that
    the driver or one of its workers needs."""
    gangs = config.gangs()
    driver = _OWN_DESCRIPTORS + _DESCRIPTORS_PER_WORKER * sum(gang.workers for gang in gangs)
    if config.cluster.kind != "local":
        return driver
    return max(driver, *(descriptors_of_worker(gang) for gang in gangs))


def descriptors_of_worker(gang: Gang) -> int:
    """Return the number of open files that a worker of this gang needs."""
    return _OWN_DESCRIPTORS + (_DESCRIPTORS_PER_RANK * gang.workers if gang.is_ordered else 0)


def max_descriptors() -> int:
    """Return how many open files a process may ask for: its hard limit, or `sys.maxsize` if there is no limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return sys.maxsize if hard == resource.RLIM_INFINITY else hard


def raise_descriptor_limit(needed: int) -> None:
    """Raise this process's soft limit of open files to `needed`, or to the hard limit if that is lower. A limit that is
    already higher stays. Child processes inherit the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < needed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(needed, max_descriptors())), hard))
