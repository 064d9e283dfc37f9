"""The section `placement`: groups of worker processes, and which roles they serve."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from pipeline.graph.graph import Gang, gangs_of
from stages.models.config import LayoutConfig, Offload
from stages.models.layouts import gang_problems
from stages.models.protocol import MODEL_ROLES, Role
from storage.problems import Constraint, Problem, at_least, local_directory, plain_name, setting, unread_problems

_MODELS = frozenset({Role.GENERATE, *MODEL_ROLES})
"""Roles whose models always compute on GPUs if there are GPUs."""


@dataclass
class GangConfig:
    """Processes that serve some roles. A gang acts as one parallel group of `workers` ranks if it serves `policy`,
    `critic` or `reference`, or if its layout divides the models of its rewards. Any other gang is a pool of `workers`
    independent replicas."""

    workers: int = setting(1, at_least(1))
    """Number of worker processes."""
    threads: int = setting(1, at_least(1))
    """CPU threads of each worker's computation. If a replica has several ranks (engine.tensor_parallel,
    engine.pipeline_parallel), each rank has this number of threads."""
    concurrent_shards: int = setting(1, at_least(1))
    """Number of shards that each replica of a pool works on at the same time. Must be 1 for a gang that acts as one
    parallel group."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    offload: Offload = "none"
    """Parts of the gang's models that leave its devices while they are not needed. none: nothing. gradients: the
    gradient buffers of a model, except during its update. idle: also whole models of policy, critic and reference while
    they are idle. Idle models move to the host's memory, so idle needs GPUs."""
    device: Literal["auto", "cpu"] = "auto"
    """Devices of reward models and local judges. auto: GPUs, one for each worker, if the hosts have any; cpu: CPUs,
    even if the hosts have GPUs. Other models always compute on GPUs if there are any."""
    weights_dir: str | None = setting(
        None,
        local_directory(),
        Constraint(
            "an absolute path, best in memory (/dev/shm/NAME), or null for cluster.weights_dir's", os.path.isabs
        ),
    )
    """Directory for published weights on the hosts of this gang; null: `cluster.weights_dir`. The policy's gang
    publishes weights in its own directory. If this gang has another directory, each published version is copied into
    it."""


@dataclass
class PlacementConfig:
    """Gangs (groups of workers), their layouts and devices, and the gang that each role runs on."""

    gangs: dict[str, GangConfig] = field(default_factory=dict)
    """Gangs by name."""
    roles: dict[str, str] = field(default_factory=dict)
    """Role -> name of the gang that it runs on, for generate, score, reference, policy and critic. The role `advantage`
    may be left out; it then runs on the gang of `score`. Without a critic (ppo.advantage) `critic` is not read and may
    be left out."""
    oversubscribe: bool | None = None
    """true: if a host has fewer GPUs than its workers need, gangs may share a GPU and its memory. Ranks of one gang
    never share a GPU. null: true for a local run on a host with a single GPU, otherwise false."""
    device_sharing: list[list[str]] = field(default_factory=list)
    """Groups of gangs that share the same devices. One gang of a group uses the devices at a time; the others have
    released them. `[[generate, train]]`: generation and training on the same GPUs."""


DEFAULT_PLACEMENT: Mapping[str, Any] = {
    "gangs": {"generate": {"concurrent_shards": 2}, "score": {}, "train": {}},
    "roles": {
        "generate": "generate",
        "score": "score",
        "reference": "train",
        "policy": "train",
        "critic": "train",
    },
}
"""The placement of a config that places no role. It is for one machine: an engine with two shards in flight, a scorer,
and one process for all training. A config may change settings of these three gangs."""


def default_placement() -> PlacementConfig:
    """Return the placement of a config that places no role."""
    gangs = {name: GangConfig(**settings) for name, settings in DEFAULT_PLACEMENT["gangs"].items()}
    return PlacementConfig(gangs=gangs, roles=dict(DEFAULT_PLACEMENT["roles"]))


def gang_of_role(placement: PlacementConfig, role: Role) -> str:
    """Return the name of the gang that serves a role."""
    roles = placement.roles
    return roles.get(Role.ADVANTAGE, roles[Role.SCORE]) if role is Role.ADVANTAGE else roles[role]


def placed_gangs(
    placement: PlacementConfig, *, critic: bool, replica_ranks: int = 1, scoring_models: bool = False
) -> list[Gang]:
    """Return the gangs. Each has the roles that are placed on it, and the number of GPUs that each of its workers
    needs.

    Args:
        critic: True if a critic is trained. If False, its role is left out, and so is a gang that has only this role.
        replica_ranks: ranks of one replica of the engine.
        scoring_models: True if rewards use models. Each worker that scores then needs a GPU if its gang's `device` is
            "auto".
    """
    gangs = placement.gangs
    roles = {role: gang_of_role(placement, role) for role in Role if critic or role is not Role.CRITIC}
    dividing = [name for name, gang in gangs.items() if gang.layout.tensor > 1 or gang.layout.pipeline > 1]
    workers = {name: gang.workers for name, gang in gangs.items()}
    placed = gangs_of(roles, workers, {name: gang.concurrent_shards for name, gang in gangs.items()}, dividing)

    def gpus(gang: Gang) -> int:
        if Role.GENERATE in gang.roles:
            return replica_ranks
        scores = scoring_models and Role.SCORE in gang.roles and gangs[gang.name].device == "auto"
        return 1 if gang.roles & MODEL_ROLES or scores else 0

    return [replace(gang, gpus=gpus(gang)) for gang in placed]


def placement_problems(placement: PlacementConfig, *, critic: bool) -> Iterator[Problem]:
    """Yield the section's problems that do not involve other sections. Gangs are checked only if `roles` has no
    problem. `critic`: True if a critic is trained."""
    misplaced = [*_role_problems(placement, critic=critic)]
    yield from misplaced
    if misplaced:
        return
    for name in placement.gangs:
        yield from _gang_problems(placement, name)
    yield from _device_sharing_problems(placement)
    for gang in placed_gangs(placement, critic=critic):
        if gang.is_ordered:
            yield from _ordered_gang_problems(gang, placement.gangs[gang.name])


def _role_problems(placement: PlacementConfig, *, critic: bool) -> Iterator[Problem]:
    known = [str(role) for role in Role]
    choice = ", ".join(placement.gangs) or "none"
    for role, gang in placement.roles.items():
        key = f"placement.roles.{role}"
        if role not in known:
            yield Problem(key, gang, f"no such role; the roles are {', '.join(known)}")
        if str(gang) not in placement.gangs:  # omegaconf lets a list pass for the first value of a mapping
            yield Problem(key, gang, f"no such gang; placement.gangs has {choice}")
    for role in known:
        if role not in placement.roles and role != Role.ADVANTAGE and (critic or role != Role.CRITIC):
            key = f"placement.roles.{role}"
            need = f"placed nowhere; set {key} to the name of a gang (placement.gangs has {choice})"
            yield Problem(key, None, need)


def _gang_problems(placement: PlacementConfig, name: str) -> Iterator[Problem]:
    key, settings = f"placement.gangs.{name}", placement.gangs[name]
    yield from plain_name(dots=False).problems({key: name})
    roles = [role for role, gang in placement.roles.items() if gang == name]
    if not roles:
        yield Problem(key, name, "no role is placed on it; place one or remove the gang")
    yield from _offload_problems(f"{key}.offload", settings.offload, roles)
    yield from _weights_dir_problems(f"{key}.weights_dir", settings.weights_dir, roles)
    if settings.device != "auto" and (Role.SCORE not in roles or not _MODELS.isdisjoint(roles)):
        need = "is for gangs that only score: models of other roles compute on GPUs if there are any: auto"
        yield Problem(f"{key}.device", settings.device, need)
    if MODEL_ROLES.isdisjoint(roles):
        yield from _unused_layout_problems(f"{key}.layout", settings.layout, roles)


def _device_sharing_problems(placement: PlacementConfig) -> Iterator[Problem]:
    """Yield the problems of `device_sharing`."""
    seen: set[str] = set()
    for number, group in enumerate(placement.device_sharing):
        key = f"placement.device_sharing.{number}"
        choice = ", ".join(placement.gangs)
        if len(group) < 2:
            yield Problem(key, group, f"two or more gangs share devices (placement.gangs has {choice})")
        for name in group:
            if name not in placement.gangs:
                yield Problem(key, name, f"no such gang; placement.gangs has {choice}")
            elif name in seen:
                yield Problem(key, name, "is named twice: a gang shares devices in one group")
            seen.add(name)


def _unused_layout_problems(key: str, layout: LayoutConfig, roles: Collection[str]) -> Iterator[Problem]:
    """Yield a problem for each changed layout setting that a gang without policy, critic and reference does not use. A
    gang that scores and does not generate uses `tensor`, `pipeline` and `sequence_parallel`, to divide the rewards'
    models."""
    if Role.SCORE in roles and Role.GENERATE not in roles:
        why = "nothing is trained on that gang"
        names = sorted({one.name for one in fields(layout)} - {"tensor", "pipeline", "sequence_parallel"})
        yield from unread_problems(key, layout, why, names)
        if layout.sequence_parallel and layout.tensor <= 1 and layout.pipeline <= 1:  # else `gang_problems` reports it
            yield Problem(f"{key}.sequence_parallel", True, "needs layout.tensor of 2 or more")
        return
    why = (
        f"a layout divides the models of {', '.join(sorted(MODEL_ROLES))} and of rewards, and that gang has none of "
        "these (engine.tensor_parallel and engine.pipeline_parallel divide an engine's model)"
    )
    yield from unread_problems(key, layout, why)


def _offload_problems(key: str, given: str, roles: Collection[str]) -> Iterator[Problem]:
    if given == "gradients" and {Role.POLICY, Role.CRITIC}.isdisjoint(roles):
        yield Problem(key, given, "that gang trains no model: none")
    if given == "idle" and len(MODEL_ROLES.intersection(roles)) < 2:
        need = "needs two or more of policy, critic, reference on the gang; the idle ones leave: none or gradients"
        yield Problem(key, given, need)


def _weights_dir_problems(key: str, given: str | None, roles: Collection[str]) -> Iterator[Problem]:
    using = (Role.GENERATE, Role.POLICY)
    if given is not None and set(using).isdisjoint(roles):
        need = f"that gang has none of the roles that read or publish weights ({', '.join(using)}): leave it null"
        yield Problem(key, given, need)


def _ordered_gang_problems(gang: Gang, settings: GangConfig) -> Iterator[Problem]:
    """Yield the problems of a gang whose workers act as one parallel group."""
    key = f"placement.gangs.{gang.name}"
    yield from gang_problems(settings.layout, gang.workers, f"{key}.")
    if Role.GENERATE in gang.roles and gang.workers > 1:
        yield Problem(
            "placement.roles.generate",
            gang.name,
            f"that gang's {gang.workers} ranks act together, but an engine runs in one process: give it a gang of its "
            "own",
        )
    if settings.concurrent_shards != 1:
        need = "only a pool works on several shards at once, and the ranks of this gang act together: 1"
        yield Problem(f"{key}.concurrent_shards", settings.concurrent_shards, need)
