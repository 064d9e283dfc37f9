"""What a run asks a cluster for: its nodes in groups, and on which of them each gang's workers are.

    gangs without nodes of their own ───────► the batch node ─┐
    a gang with slurm.gangs.NAME.nodes ─┬───► so many nodes ──┴─► alike? ──yes──► a plain job, groups side by side
    and those beside it ────────────────┘                           └─────no───► a heterogeneous one, a component each

Pure. May import pipeline.config.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from pipeline.config.errors import ConfigError
from pipeline.config.run import RunConfig
from pipeline.config.slurm import SlurmConfig, SlurmGangConfig, cpus_per_worker, gpus_per_worker
from stages.models.protocol import Role


@dataclass(frozen=True)
class Step:
    """One gang's workers: what one srun starts."""

    gang: str
    ordered: bool
    """Its workers are ranks, of which none can go on without the others; else replicas."""
    workers: int
    cpus: int
    """Of a worker."""
    gpus: int
    """Likewise."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are alike, and what runs on them."""

    nodes: int
    steps: tuple[Step, ...]
    cpus: int
    """Of a node."""
    gpus: int
    """Likewise."""
    partition: str | None
    constraint: str | None
    sbatch: tuple[str, ...]


@dataclass(frozen=True)
class JobShape:
    """The groups, of which the first has the batch node."""

    groups: tuple[NodeGroup, ...]
    heterogeneous: bool
    """Whether each group is a component of a heterogeneous job; else they follow one another in one list of nodes."""

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    def first_node(self, group: NodeGroup) -> int:
        """Of a plain job: where in its list of nodes a group begins."""
        return sum(other.nodes for other in self.groups[: self.groups.index(group)])


def job_shape(config: RunConfig) -> JobShape:
    """What a run asks for. For a config that `run_problems` lets pass. Raises ConfigError for gangs that are to have
    their GPUs in turn: each step of a job has its own."""
    slurm, used = config.slurm, {gang.name for gang in config.gangs()}
    gangs = [gang for gang in config.placement.gangs if gang in used]  # a critic's may be there, and no critic
    if config.placement.turns and slurm.gpus:
        need = (
            "the steps of a Slurm job have GPUs of their own, which no other step sees; leave it out, or, for a run on "
            "CPUs, set slurm.gpus=false"
        )
        raise ConfigError("placement.turns", f"given {[list(group) for group in config.placement.turns]}; {need}")
    hosts = {gang: _host(slurm, gang) for gang in gangs}
    own = sorted({host for host in hosts.values() if host is not None}, key=lambda host: _rank(config, host))
    members = [[gang for gang in gangs if hosts[gang] == host] for host in own]
    on_batch_node = [gang for gang in gangs if hosts[gang] is None]
    groups = [_group(config, None, on_batch_node)] * bool(on_batch_node)
    groups += [_group(config, host, of_host) for host, of_host in zip(own, members, strict=True)]
    groups[0] = replace(groups[0], cpus=groups[0].cpus + slurm.driver_cpus)
    alike = len({(group.gpus, group.partition, group.constraint, group.sbatch) for group in groups}) == 1
    heterogeneous = len(groups) > 1 and (slurm.job == "heterogeneous" or (slurm.job == "auto" and not alike))
    return JobShape(tuple(groups), heterogeneous)


def _host(slurm: SlurmConfig, gang: str) -> str | None:
    """The gang whose nodes a gang is on; None: the batch node."""
    of_gang = slurm.gangs.get(gang) or SlurmGangConfig()
    return gang if of_gang.nodes is not None else of_gang.beside


def _rank(config: RunConfig, host: str) -> tuple[bool, int]:
    """The policy's nodes come first: without a batch node of its own, the driver is beside the policy's ranks."""
    policy = _host(config.slurm, config.placement.roles[Role.POLICY])
    return host != policy, list(config.placement.gangs).index(host)


def _group(config: RunConfig, host: str | None, gangs: Sequence[str]) -> NodeGroup:
    slurm, ranks = config.slurm, config.replica_ranks
    ordered = {gang.name: gang.ordered for gang in config.gangs()}
    of_host = SlurmGangConfig() if host is None else slurm.gangs[host]
    nodes = of_host.nodes or 1
    steps = tuple(
        Step(
            gang,
            ordered[gang],
            config.placement.gangs[gang].workers,
            cpus_per_worker(slurm, config.placement, gang, ranks),
            gpus_per_worker(slurm, config.placement, gang, ranks),
        )
        for gang in gangs
    )
    return NodeGroup(
        nodes=nodes,
        steps=steps,
        cpus=sum(step.cpus * step.workers // nodes for step in steps),
        gpus=sum(step.gpus * step.workers // nodes for step in steps),
        partition=of_host.partition or slurm.partition,
        constraint=of_host.constraint or slurm.constraint,
        sbatch=tuple(of_host.sbatch),
    )
