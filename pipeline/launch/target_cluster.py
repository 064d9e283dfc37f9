"""Check a config against another cluster: nodes and GPUs of its workers, layouts, and memory.

The kind of cluster decides on which node a worker is placed:

    local       all workers are on one node
    attached    each group of workers is on the first node with room; groups of large gangs are placed first
    Slurm       the nodes that the job would ask for (`script.job_shape`), if the config has a section `slurm`

Under `attached`, the workers of a tensor-parallel group are on the same node, and so are the workers of a replica.

The check reads nothing of this machine except the models' directories. In this file, `num_gpus` is the number of GPUs
of a node, or 0 if the run uses no GPUs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.devices import Worker, device_problems, plan_devices
from pipeline.config.fitting import memory_problems
from pipeline.config.hardware import AS, GIB, HardwareCluster
from pipeline.config.memory import MemoryLimits, PlannedRun, planned_run
from pipeline.config.preflight import check_shapes, device_notes, may_share_gpus
from pipeline.config.run import RunConfig
from pipeline.config.slurm import SlurmConfig
from pipeline.errors import refusal, refuse
from pipeline.graph.graph import Gang
from pipeline.launch.script import NodeGroup, job_shape
from stages.models.spec import is_random
from storage.problems import Problem


@dataclass(frozen=True)
class TargetCheck:
    """Placement and memory limits of a run on another cluster."""

    run: PlannedRun
    hosts: Mapping[Worker, str]
    devices: Mapping[Worker, tuple[int, ...]]
    """GPUs of each worker, as indices on its node."""
    limits: MemoryLimits
    problems: list[Problem]
    """Problems of workers or nodes for which the cluster has too little memory."""
    notes: list[str]


def require_fitting_target(config: RunConfig, cluster: HardwareCluster, text: str) -> TargetCheck:
    """Return the result of `check_target`.

    Raises:
        ConfigError: `check_target` raised it, or the cluster has too little memory."""
    checked = check_target(config, cluster, text)
    refuse(checked.problems)
    return checked


def check_target(config: RunConfig, cluster: HardwareCluster, text: str) -> TargetCheck:
    """Return the placement of a run on a cluster, and the input of its memory prediction.

    Too little memory raises no error. It is listed in `problems` of the result, so that the predicted numbers can be
    shown with it.

    Args:
        config: the config of the run.
        cluster: the cluster.
        text: description of the cluster as the user gave it.

    Raises:
        ConfigError: lists the settings that cannot work on the cluster: layouts that cannot divide a model, and too few
            nodes, GPUs or cores.
    """
    num_gpus = cluster.gpus_per_node if config.slurm.gres or not is_slurm(config) else 0
    models = check_shapes(config, on_gpus=num_gpus > 0)
    gangs, sharing = config.gangs(), config.placement.device_sharing
    refuse(_node_problems(config, cluster, num_gpus))
    hosts = place_workers(config, cluster, num_gpus)
    available = dict.fromkeys(hosts.values(), num_gpus)
    share = may_share_gpus(config, num_gpus) if _on_one_node(config) else bool(config.placement.oversubscribe)
    for problem in device_problems(gangs, hosts, available, share=share, device_sharing=sharing):
        raise refusal(problem)
    limits = limits_of(config, cluster, num_gpus, text)
    run = planned_run(config, models, on_gpus=num_gpus > 0)
    devices = plan_devices(gangs, hosts, available, sharing)
    problems = [*memory_problems(run, limits, hosts)]
    return TargetCheck(run, hosts, devices, limits, problems, [*_notes(config, cluster, num_gpus)])


def is_slurm(config: RunConfig) -> bool:
    """Return True if any setting of the section `slurm` differs from its default."""
    return config.slurm != SlurmConfig()


def limits_of(config: RunConfig, cluster: HardwareCluster, num_gpus: int, text: str) -> MemoryLimits:
    """Return the numbers of bytes that a run may use on a host and on a GPU of the cluster. Each is the cluster's
    memory, or the config's limit if the limit is lower. `text`: the cluster as the user named it."""
    settings = config.cluster
    host = math.inf if settings.host_memory_gb is None else settings.host_memory_gb * GIB
    device = math.inf if settings.device_memory_gb is None else settings.device_memory_gb * GIB
    return MemoryLimits(
        min(host, cluster.host_bytes),
        min(device, cluster.device_bytes),
        num_gpus,
        cluster.shared_bytes,
        f"{AS} {text}",
    )


def place_workers(config: RunConfig, cluster: HardwareCluster, num_gpus: int) -> dict[Worker, str]:
    """Return the name of each worker's node, such as `node 3`. The config must have no `_node_problems`."""
    gangs = config.gangs()
    if is_slurm(config):
        number_of = dict(_workers_with_nodes(config))
    elif config.cluster.kind == "local":
        number_of = {(gang.name, index): 0 for gang in gangs for index in range(gang.workers)}
    else:
        packed = _pack_groups(config, cluster, num_gpus)
        assert not isinstance(packed, _Group), f"{packed} was not refused"
        number_of = packed
    order = sorted(number_of, key=lambda worker: number_of[worker])
    return {worker: f"node {number_of[worker]}" for worker in order}


def _workers_with_nodes(config: RunConfig) -> Iterator[tuple[Worker, int]]:
    """Yield each worker with the index of its node in the job. The workers of a gang are spread evenly over the gang's
    nodes, in order."""
    first = 0
    for group in job_shape(config).groups:
        for step in group.steps:
            for index in range(step.workers):
                yield (step.gang, index), first + index // (step.workers // group.nodes)
        first += group.nodes


@dataclass(frozen=True)
class _Group:
    """Workers of a gang that must be on the same node: a tensor-parallel group, or a replica."""

    gang: Gang
    indices: range
    size: int
    """Number of GPUs of the group. On a cluster without GPUs, number of cores."""


def _pack_groups(config: RunConfig, cluster: HardwareCluster, num_gpus: int) -> dict[Worker, int] | _Group:
    """Return worker -> index of its node, or a group of workers for which there is no room. The gang with the most
    devices is placed first; if that fails, the largest group of any gang."""
    gangs = sorted(config.gangs(), key=lambda gang: -_size_of_gang(config, gang, num_gpus))
    groups = [group for gang in gangs for group in _groups(config, gang, num_gpus)]
    packed = _first_fit(config, cluster, num_gpus, groups)
    if isinstance(packed, _Group):
        packed = _first_fit(config, cluster, num_gpus, sorted(groups, key=lambda group: -group.size))
    return packed


def _first_fit(
    config: RunConfig, cluster: HardwareCluster, num_gpus: int, groups: Sequence[_Group]
) -> dict[Worker, int] | _Group:
    """Place the groups in order, each on the first node with room. Return worker -> index of its node, or the group
    without room. A gang that shares devices prefers the nodes of those gangs. If no core is free, workers share cores;
    with `placement.oversubscribe`, also GPUs."""
    placement, per_node = config.placement, num_gpus or cluster.cores
    sharing = {name: tuple(group) for group in placement.device_sharing for name in group}
    used: dict[str, list[int]] = {gang.name: [0] * cluster.nodes for gang in config.gangs()}
    loads = [0] * cluster.nodes
    nodes: dict[Worker, int] = {}
    for group in groups:
        name, size = group.gang.name, group.size if num_gpus else min(group.size, per_node)
        choices = []
        for node, load in enumerate(loads):
            others = max(used[other][node] for other in sharing.get(name, (name,)))
            growth = max(0, used[name][node] + size - others)
            rounds = math.ceil((load + growth) / per_node)
            if not num_gpus or (used[name][node] + size <= num_gpus and (rounds <= 1 or placement.oversubscribe)):
                choices.append((max(1, rounds), growth, node))
        if not choices:
            return group
        _, growth, node = min(choices)
        used[name][node] += size
        loads[node] += growth
        nodes |= dict.fromkeys(((name, index) for index in group.indices), node)
    return nodes


def _groups(config: RunConfig, gang: Gang, num_gpus: int) -> Iterator[_Group]:
    """Yield the groups of a gang. The workers of a group stay on one node."""
    side_by_side = config.placement.gangs[gang.name].layout.tensor if gang.is_ordered else 1
    size = _size_of_gang(config, gang, num_gpus) // gang.workers * side_by_side
    for first in range(0, gang.workers, side_by_side):
        yield _Group(gang, range(first, first + side_by_side), size)


def _size_of_gang(config: RunConfig, gang: Gang, num_gpus: int) -> int:
    """Return the number of GPUs that a gang needs, or of cores (threads) on a cluster without GPUs."""
    if num_gpus:
        return gang.workers * gang.gpus
    return gang.workers * config.placement.gangs[gang.name].threads


def _node_problems(config: RunConfig, cluster: HardwareCluster, num_gpus: int) -> Iterator[Problem]:
    """Yield the problems of a run that requests more nodes, GPUs or cores than the cluster has."""
    if is_slurm(config):
        shape = job_shape(config)
        if shape.nodes > cluster.nodes:
            asked = ", ".join(f"{group.nodes} for {_gang_names(group)}" for group in shape.groups)
            need = f"the job asks for {shape.nodes} nodes ({asked}), there are {cluster.nodes}"
            yield Problem("slurm.gangs", [*config.slurm.gangs], f"{need}: fewer nodes, or gangs beside one another")
        for group in shape.groups:
            yield from _group_problems(config, group, cluster, num_gpus)
    elif config.cluster.kind == "attached" and num_gpus:
        problems = [*_attached_problems(config, cluster, num_gpus)]
        yield from problems
        packed = {} if problems else _pack_groups(config, cluster, num_gpus)
        if isinstance(packed, _Group):
            need = f"groups of {packed.size} GPUs that stay on a node find no room: there are {cluster.nodes} nodes of "
            need += f"{num_gpus} GPUs, and others take some of them: more nodes, fewer workers, or smaller groups"
            yield Problem(f"placement.gangs.{packed.gang.name}.workers", packed.gang.workers, need)


def _attached_problems(config: RunConfig, cluster: HardwareCluster, num_gpus: int) -> Iterator[Problem]:
    """Yield a problem if the gangs need more GPUs than the cluster has (unless `placement.oversubscribe`), or a
    tensor-parallel group or a replica needs more than one node has."""
    rooms = {gang.name: _size_of_gang(config, gang, num_gpus) for gang in config.gangs()}
    listed = ", ".join(f"{name} {number}" for name, number in rooms.items() if number)
    shared = [[rooms.pop(name) for name in group if name in rooms] for group in config.placement.device_sharing]
    needed = sum(rooms.values()) + sum(max(group, default=0) for group in shared)
    if needed > cluster.gpus and not config.placement.oversubscribe:
        need = f"the gangs need {needed} GPUs ({listed}), there are {cluster.gpus}: fewer workers, or gangs that "
        yield Problem("placement.gangs", [*config.placement.gangs], f"{need}share devices (placement.device_sharing)")
    for gang in config.gangs():
        group = next(_groups(config, gang, num_gpus))
        if group.size > num_gpus:
            layout, replica = config.placement.gangs[gang.name].layout, config.engine.tensor_parallel
            key = f"placement.gangs.{gang.name}.layout.tensor" if gang.is_ordered else "engine.tensor_parallel"
            ranks = "of a tensor-parallel group" if gang.is_ordered else "(with engine.pipeline_parallel) of a replica"
            need = f"the ranks {ranks} stay on one node, and a node has {num_gpus} GPUs: at most {num_gpus}"
            yield Problem(key, layout.tensor if gang.is_ordered else replica, need)


def _group_problems(config: RunConfig, group: NodeGroup, cluster: HardwareCluster, num_gpus: int) -> Iterator[Problem]:
    """Yield the problems of a group of nodes that requests more GPUs or cores per node than the cluster's nodes
    have."""
    for what, asked, available in (("GPUs", group.gpus, num_gpus), ("cores", group.cpus, cluster.cores)):
        if asked > available:
            node = f"a node for {_gang_names(group)}"
            need = f"{node} would have {asked} {what} of theirs, and has {available}: more nodes, "
            key = f"slurm.gangs.{group.steps[0].gang}.nodes"
            yield Problem(key, group.nodes, f"{need}or fewer {'workers' if what == 'GPUs' else 'threads'}")


def _gang_names(group: NodeGroup) -> str:
    return " and ".join(step.gang for step in group.steps) or "the driver"


def _on_one_node(config: RunConfig) -> bool:
    return config.cluster.kind == "local" and not is_slurm(config)


def _notes(config: RunConfig, cluster: HardwareCluster, num_gpus: int) -> Iterator[str]:
    """Yield notes for the user: GPUs that gangs share, nodes that are not used, and things that were not checked."""
    if _on_one_node(config):
        yield from device_notes(config, num_gpus, cluster.cores)
    if _on_one_node(config) and cluster.nodes > 1:
        yield f"cluster.kind=local uses one of the {cluster.nodes} nodes; attached, or a section slurm, uses more"
    path = config.model.path
    if not is_random(path) and not any(Path(path).glob("*.safetensors")):
        yield f"model.path={path} has no weights here: sizes come from its config.json"
    yield (
        "weights, tokenizer, prompts, rewards and directories were not looked at: `stageline check CONFIG` does, where "
        "the run will be"
    )
