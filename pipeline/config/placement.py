"""The section `placement`: groups of worker processes, and which roles they serve.

May import pipeline.graph.gangs, stages.models (config, layouts, protocol) and storage.problems.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from pipeline.graph.gangs import Gang, gangs_of
from stages.models.config import LayoutConfig, Offload
from stages.models.layouts import gang_problems
from stages.models.protocol import MODEL_ROLES, Role
from storage.problems import Problem, at_least, local_directory, plain_name


@dataclass
class GangConfig:
    """Processes that serve some roles. A gang with `policy`, `critic` or `reference` acts as one parallel group of
    `workers` ranks; any other gang is a pool of `workers` independent replicas."""

    workers: int = 1
    threads: int = 1
    """CPU threads of each worker's maths; of each rank's, where a replica has several (engine.tensor_parallel,
    engine.pipeline_parallel)."""
    slots: int = 1
    """Pools: shards that a replica works on at once."""
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    offload: Offload = "none"
    """What of a gang's models leaves its devices while it is not needed. gradients: gradient buffers outside their
    model's update. idle: also policy, critic and reference but the one that works; to the host's memory, on GPUs
    only."""
    weights_dir: str | None = None
    """Directory for published weights on this gang's host; null: `cluster.weights_dir`'s. A gang with another one than
    the policy's has copies of its own, as on another host."""


@dataclass
class PlacementConfig:
    gangs: dict[str, GangConfig] = field(default_factory=dict)
    roles: dict[str, str] = field(default_factory=dict)
    """Each of generate, score, reference, policy, critic -> the name of a gang; and, where it is not to run beside
    `score`, advantage. Where no critic is trained (ppo.advantage) critic may be left out, and is not read."""
    share_devices: bool = False
    """Where a host has fewer GPUs than its workers need, they may share: two gangs a GPU, and its memory. Ranks of one
    gang never do."""
    turns: list[list[str]] = field(default_factory=list)
    """Groups of gangs that have the same devices in turn: while one of them has anything to do, the others have left
    them. `[[generate, train]]`: generation and training on the same GPUs."""


DEFAULT_PLACEMENT: Mapping[str, Any] = {
    "gangs": {"generate": {"slots": 2}, "score": {}, "train": {}},
    "roles": {
        "generate": "generate",
        "score": "score",
        "reference": "train",
        "policy": "train",
        "critic": "train",
    },
}
"""Where no role is placed: an engine with two shards in flight, a scorer, and one process for all that is trained. For
one machine; what is given of the three gangs changes them."""


def gang_of(placement: PlacementConfig, role: Role) -> str:
    """The gang that serves a role."""
    roles = placement.roles
    return roles.get(Role.ADVANTAGE, roles[Role.SCORE]) if role is Role.ADVANTAGE else roles[role]


def placed_gangs(placement: PlacementConfig, *, critic: bool) -> list[Gang]:
    """The gangs with the roles that are placed on them. `critic`: whether one is trained; its role is left out where
    none is, and so are gangs that would have no other."""
    gangs = placement.gangs
    roles = {role: gang_of(placement, role) for role in Role if critic or role is not Role.CRITIC}
    return gangs_of(roles, {n: g.workers for n, g in gangs.items()}, {n: g.slots for n, g in gangs.items()})


def placement_problems(placement: PlacementConfig, *, critic: bool) -> Iterator[Problem]:
    """What of the section cannot work by itself; a gang is looked at where every role has one. `critic`: whether one is
    trained."""
    misplaced = [*_role_problems(placement, critic=critic)]
    yield from misplaced
    if misplaced:
        return
    for name in placement.gangs:
        yield from _gang_problems(placement, name)
    yield from _turn_problems(placement)
    for gang in placed_gangs(placement, critic=critic):
        if gang.ordered:
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
    yield from plain_name(key, name, dots=False)
    roles = [role for role, gang in placement.roles.items() if gang == name]
    if not roles:
        yield Problem(key, name, "no role is placed on it; place one or remove the gang")
    counts = {
        f"{key}.workers": settings.workers,
        f"{key}.threads": settings.threads,
        f"{key}.slots": settings.slots,
    }
    yield from at_least(1, counts)
    yield from _offload_problems(f"{key}.offload", settings.offload, roles)
    yield from _weights_dir_problems(f"{key}.weights_dir", settings.weights_dir, roles)
    if MODEL_ROLES.isdisjoint(roles):
        yield from _unused_layout_problems(f"{key}.layout", settings.layout)


def _turn_problems(placement: PlacementConfig) -> Iterator[Problem]:
    """Of the groups that have devices in turn."""
    seen: set[str] = set()
    for number, group in enumerate(placement.turns):
        key = f"placement.turns.{number}"
        choice = ", ".join(placement.gangs)
        if len(group) < 2:
            yield Problem(key, group, f"two or more gangs take turns (placement.gangs has {choice})")
        for name in group:
            roles = {role for role, gang in placement.roles.items() if gang == name}
            if name not in placement.gangs:
                yield Problem(key, name, f"no such gang; placement.gangs has {choice}")
            elif name in seen:
                yield Problem(key, name, "is named twice: a gang takes turns in one group")
            elif roles.isdisjoint({Role.GENERATE, *MODEL_ROLES}):
                models = ", ".join(sorted(MODEL_ROLES))
                yield Problem(key, name, f"has none of generate, {models}, and so no device: leave it out")
            seen.add(name)


def _unused_layout_problems(key: str, layout: LayoutConfig) -> Iterator[Problem]:
    """Of a pool, which has no model that a layout could cut."""
    for name, default in asdict(LayoutConfig()).items():
        given = getattr(layout, name)
        if given != default:
            models = ", ".join(sorted(MODEL_ROLES))
            need = (
                f"that gang has none of {models}, which a layout is for: leave it at {default} "
                "(engine.tensor_parallel and engine.pipeline_parallel cut an engine's model)"
            )
            yield Problem(f"{key}.{name}", given, need)


def _offload_problems(key: str, given: str, roles: Collection[str]) -> Iterator[Problem]:
    if given == "gradients" and {Role.POLICY, Role.CRITIC}.isdisjoint(roles):
        yield Problem(key, given, "that gang trains no model: none")
    if given == "idle" and len(MODEL_ROLES.intersection(roles)) < 2:
        need = "needs two or more of policy, critic, reference on the gang, which take turns: none or gradients"
        yield Problem(key, given, need)


def _weights_dir_problems(key: str, given: str | None, roles: Collection[str]) -> Iterator[Problem]:
    if given is None:
        return
    yield from local_directory(key, given)
    if not os.path.isabs(given):
        need = "must be an absolute path, best in memory (/dev/shm/NAME), or null for cluster.weights_dir's"
        yield Problem(key, given, need)
    using = (Role.GENERATE, Role.POLICY)
    if set(using).isdisjoint(roles):
        need = f"that gang has none of the roles that read or publish weights ({', '.join(using)}): leave it null"
        yield Problem(key, given, need)


def _ordered_gang_problems(gang: Gang, settings: GangConfig) -> Iterator[Problem]:
    """Of a gang whose workers act as one parallel group."""
    key = f"placement.gangs.{gang.name}"
    yield from gang_problems(settings.layout, gang.workers, f"{key}.")
    if Role.GENERATE in gang.roles and gang.workers > 1:
        yield Problem(
            "placement.roles.generate",
            gang.name,
            f"that gang's {gang.workers} ranks act together, but an engine runs in one process: give it a gang of its "
            "own",
        )
    if settings.slots != 1:
        need = "slots are for pools; a gang that trains works on one node at a time: 1"
        yield Problem(f"{key}.slots", settings.slots, need)
