"""The space of plans: divisions of the roles into gangs, numbers of devices, and configs made of their settings.

    groupings   gangs of roles: engine | trainer;  engine | policy + reference | critic;  engine | policy + critic |
                reference;  engine and trainer on the same devices
    counts_of   numbers of devices that a gang may have. On a host without GPUs all gangs share its cores (`cores`), and
                together they may have more threads than there are cores
    assembled   the config with settings of each gang

Module `options` finds the settings of one gang, and module `search` finds the best combination. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pipeline.config.hardware import GIB, HardwareCluster
from pipeline.config.memory import PlannedRun
from pipeline.config.placement import GangConfig, PlacementConfig
from pipeline.config.run import RunConfig
from pipeline.config.slurm import SlurmGangConfig
from pipeline.graph.graph import GraphSpec
from pipeline.plan.calibration import Calibration
from pipeline.plan.lengths import Lengths, SameLengths
from stages.models.protocol import Role

GENERATE, TRAIN, CRITIC, REFERENCE, SCORE = "generate", "train", "critic", "reference", "score"
"""Names of the gangs of a plan."""
STEPS = 12
"""Number of steps that a search simulates for each plan."""
_EXACT_SHARDS = 16
"""Maximum number of shards in a plan whose lower bounds are computed from all shards. With more shards, the bounds are
estimated from a sample of the shards."""


@dataclass(frozen=True)
class RoleGrouping:
    """A division of the roles into gangs."""

    name: str
    gangs: Mapping[str, frozenset[Role]]
    """Gang's name -> its roles. Only gangs that hold models are listed."""
    shares_devices: bool = False
    """True if the gangs in `gangs` and the engine take turns on the same devices."""


@dataclass(frozen=True)
class Space:
    """The input of a search for the fastest placement of a run: the run, the cluster with its measured or assumed
    speeds, the response lengths, and the values to try."""

    run: PlannedRun
    cluster: HardwareCluster
    calibration: Calibration
    lengths: SameLengths
    devices: int
    """Number of GPUs, or number of cores of a host without GPUs."""
    staleness: Sequence[int]
    """Staleness bounds to try."""
    shards: Sequence[int]
    """Numbers of shards to try."""

    @property
    def base(self) -> RunConfig:
        return self.run.config

    def sampled(self, shards: int) -> bool:
        """Return True if the lower bounds on the times of a plan with this many shards are estimated from a sample of
        the shards."""
        return shards > _EXACT_SHARDS

    @property
    def cores(self) -> int | None:
        """Number of cores that all gangs share. None if the gangs compute on GPUs."""
        return None if self.run.on_gpus else self.devices

    def used_devices(self, grouping: RoleGrouping, devices: Sequence[int]) -> int | None:
        """Return the number of devices that all gangs together use, or None if there are too few devices.

        If the gangs of the grouping share devices, the shared devices count once. On a host without GPUs, the gangs use
        threads in place of devices. All gangs together may have up to two threads per core. The result is then the
        number of threads or the number of cores, whichever is smaller.

        Args:
            devices: number of devices, or of threads, of each gang.
        """
        used = max(devices) if grouping.shares_devices else sum(devices)
        if self.cores is not None and used <= 2 * self.cores:
            return min(used, self.cores)
        return used if used <= self.devices else None

    @property
    def device_bytes(self) -> float:
        gigabytes = self.base.cluster.device_memory_gb
        return min(self.cluster.device_bytes, math.inf if gigabytes is None else gigabytes * GIB)


def space_of(
    run: PlannedRun, cluster: HardwareCluster, calibration: Calibration, lengths: Lengths, devices: int
) -> Space:
    """Return the space of plans around a config. Its staleness bounds are 0, 1, 2 and the bound of the config. Its
    numbers of shards are the number in the config, half this number and twice this number. A number of shards is
    left out if it does not divide the rows evenly, or if it would divide a prompt's responses between shards."""
    config = run.config
    rows = config.rollout.rows
    shards = {config.rollout.shards * 2**power // 2 for power in range(3)}
    counts = sorted(n for n in shards if n and rows % n == 0 and _whole_groups(config, rows // n))
    tokens = lengths.rows(0, 0, rows)
    staleness = sorted({0, 1, 2, config.staleness})
    return Space(run, cluster, calibration, SameLengths(tokens), devices, staleness, counts)


def _whole_groups(config: RunConfig, rows: int) -> bool:
    return rows % config.rollout.responses_per_prompt == 0


def role_groupings(config: RunConfig) -> list[RoleGrouping]:
    """Return the ways to divide a config's roles into gangs. If the engine can free its devices, one of these ways has
    the gangs on shared devices."""
    models = frozenset({Role.POLICY, Role.REFERENCE}) | ({Role.CRITIC} if config.has_critic else frozenset())
    possible = [RoleGrouping("apart", {TRAIN: models})]
    if config.capabilities().sleeps != "nothing":
        possible.append(RoleGrouping("shared devices", {TRAIN: models}, shares_devices=True))
    if config.has_critic:
        divided = {TRAIN: models - {Role.CRITIC}, CRITIC: frozenset({Role.CRITIC})}
        possible.append(RoleGrouping("critic apart", divided))
    divided = {TRAIN: models - {Role.REFERENCE}, REFERENCE: frozenset({Role.REFERENCE})}
    possible.append(RoleGrouping("reference apart", divided))
    return possible


def device_counts(devices: int, per_node: int) -> list[int]:
    """Return the numbers of devices that a gang may have. On one node any number is possible. On several nodes a gang
    has 1, 2, 3, 4, 6, 8, 12, ... whole nodes: a power of two, or three times a power of two."""
    if devices <= per_node:
        return [*range(1, devices + 1)]
    nodes = devices // per_node
    whole = {scale * 2**power for scale in (1, 3) for power in range(nodes.bit_length())}
    return sorted(count * per_node for count in whole if count <= nodes)


def counts_of(space: Space) -> list[int]:
    """Return the numbers of GPUs, or of threads on a host without GPUs, that a gang may have. On a host with more than
    8 cores these are 1, 2, 3, 4, 6, 8, 12, ... threads. On a host with up to 8 cores any number is possible."""
    if space.cores is None:
        return device_counts(space.devices, space.cluster.gpus_per_node)
    return device_counts(space.devices, 8 if space.devices <= 8 else 1)


# ---- whole configs ---------------------------------------------------------------------------------------------------


def assembled(
    space: Space,
    grouping: RoleGrouping,
    chosen: Mapping[str, tuple[GangConfig, Mapping[str, Any]]],
    shards: int,
    staleness: int,
) -> RunConfig:
    """Return the space's config with these gangs: one for the engine, one for scoring, and the gangs of `grouping`,
    which hold the models. `chosen`: gang's name -> its settings, and its changes to other sections of the config
    (`Option.changes`). An engine or a gang of models that is not in `chosen` has one worker."""
    base = space.base
    gangs = {SCORE: _scorers(space, chosen), GENERATE: gang_settings(space, frozenset({Role.GENERATE}))}
    gangs |= {name: gang_settings(space, roles) for name, roles in grouping.gangs.items()}
    gangs |= {name: settings for name, (settings, _) in chosen.items()}
    roles = {str(Role.GENERATE): GENERATE, str(Role.SCORE): SCORE}
    roles |= {str(role): name for name, of_gang in grouping.gangs.items() for role in sorted(of_gang)}
    placement = PlacementConfig(
        gangs=gangs,
        roles=roles,
        oversubscribe=base.placement.oversubscribe,
        device_sharing=[[GENERATE, *grouping.gangs]] if grouping.shares_devices else [],
    )
    changes: dict[str, Any] = {key: value for _, of_gang in chosen.values() for key, value in of_gang.items()}
    tokens = {role: changes.pop(role) for role in ("policy", "critic") if role in changes}
    model = replace(
        base.model,
        **{role: replace(getattr(base.model, role), micro_batch_tokens=count) for role, count in tokens.items()},
    )
    config = replace(
        base,
        staleness=staleness,
        model=model,
        engine=replace(base.engine, **changes),
        rollout=replace(base.rollout, shards=shards, versions=base.rollout.versions if staleness else "exact"),
        placement=placement,
    )
    return _on_nodes(space, config, grouping)


def _scorers(space: Space, chosen: Mapping[str, tuple[GangConfig, Mapping[str, Any]]]) -> GangConfig:
    """Return the settings of the gang that computes scores: copied from the config, but defaults if that gang has other
    roles besides scoring and advantages. On several nodes there is one worker for each of the engine's nodes."""
    placement = space.base.placement
    roles = {role for role, gang in placement.roles.items() if gang == placement.roles[Role.SCORE]}
    settings = placement.gangs[placement.roles[Role.SCORE]] if roles <= {Role.SCORE, Role.ADVANTAGE} else GangConfig()
    workers = settings.workers
    if space.cluster.nodes > 1 and GENERATE in chosen:
        engine, changes = chosen[GENERATE]
        workers = max(1, engine.workers * changes["tensor_parallel"] // space.cluster.gpus_per_node)
    return GangConfig(workers=workers, threads=settings.threads, concurrent_shards=settings.concurrent_shards)


def _on_nodes(space: Space, config: RunConfig, grouping: RoleGrouping) -> RunConfig:
    """Return `config` with the settings that start its workers: `kind: local` on one node, else `attached`, with the
    nodes of each gang in `slurm.gangs`. The scoring gang runs on another's nodes, and gangs that share devices on the
    largest's."""
    if space.cluster.nodes == 1:
        return replace(config, cluster=replace(config.cluster, kind="local"), slurm=replace(config.slurm, gangs={}))
    per_node = space.cluster.gpus_per_node
    gangs = {gang.name: gang for gang in config.gangs()}
    nodes = {name: max(1, gang.workers * gang.gpus // per_node) for name, gang in gangs.items() if name != SCORE}
    host = max(nodes, key=lambda name: nodes[name]) if grouping.shares_devices else None
    of_gangs = {
        name: SlurmGangConfig(nodes=count) if host in (None, name) else SlurmGangConfig(beside=host)
        for name, count in nodes.items()
    }
    of_gangs[SCORE] = SlurmGangConfig(beside=GENERATE if host is None else host)
    return replace(
        config, cluster=replace(config.cluster, kind="attached"), slurm=replace(config.slurm, gangs=of_gangs)
    )


def graph_of_steps(config: RunConfig) -> GraphSpec:
    return replace(config.graph(), steps=STEPS, eval_every=0)


def gang_settings(space: Space, roles: frozenset[Role]) -> GangConfig:
    """Return the settings to begin with for a gang of these roles. `threads` is copied from the config's gang that has
    the first of these roles (in the order generate, policy, critic, reference). If the roles include policy and critic,
    `offload` is copied from the same gang. All other settings are defaults, because the values of the config's gang may
    not suit."""
    placement = space.base.placement
    first = next(role for role in (Role.GENERATE, Role.POLICY, Role.CRITIC, Role.REFERENCE) if role in roles)
    settings = placement.gangs[placement.roles[first]]
    offload = settings.offload if {Role.POLICY, Role.CRITIC} <= roles else "none"
    return GangConfig(threads=settings.threads, offload=offload, weights_dir=None)
