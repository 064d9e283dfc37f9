"""The sbatch script of a run or of a sweep: a template (`slurm/run.sbatch`) whose `@WORDS@` are filled in.

The job's shape is its groups of nodes and the group that each gang's workers run on:

    gangs without nodes of their own ───────► the batch node ─┐
    a gang with slurm.gangs.NAME.nodes ─┬───► so many nodes ──┴─► alike? ──yes──► a plain job, groups side by side
    and those beside it ────────────────┘                           └─────no───► a heterogeneous one, a component each

Pure.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.config.placement import PlacementConfig
from pipeline.config.run import RunConfig
from pipeline.config.slurm import SlurmConfig, SlurmGangConfig, cpus_per_worker, gpus_of_worker, host_gang
from pipeline.errors import ConfigError
from pipeline.launch import requeues
from stages.models.protocol import Role

TEMPLATE = Path(__file__).resolve().parents[2] / "slurm/run.sbatch"
DOCTOR_TEMPLATE = TEMPLATE.with_name("doctor.sbatch")
DOCTOR_LIMIT = "0-00:30:00"
"""Time limit of a job that tests its nodes."""
_WORD = re.compile(r"@([A-Z]+)@")


@dataclass(frozen=True)
class JobPlace:
    """The parts of a script that are not in the config."""

    title: str
    """Title in the comment at the top."""
    name: str
    """Slurm's name of the job."""
    run: str
    """The run's directory, as an expression of the shell."""
    folder: Path
    """Working directory of the job; relative paths of the config begin there."""
    output: Path
    """File of the job's output, as a pattern of sbatch."""
    array: str | None = None
    """Tasks of a sweep, in sbatch's notation."""


def render(config: RunConfig, place: JobPlace) -> str:
    """Return the script of a run or of a sweep.

    Raises:
        ConfigError: `slurm.template` cannot be read, lacks a word, or has one that is unknown.
    """
    shape = job_shape(config)
    filled = {
        "TITLE": place.title,
        "DIRECTIVES": "\n".join(_directives(config.slurm, shape, place)),
        "RUN": place.run,
        "COMMAND": shlex.join(start_command(config.slurm)),
        "FOLDER": shlex.quote(str(place.folder)),
        "ENVIRONMENT": "\n".join(config.slurm.environment),
        "WORKERS": "\n".join(_workers(config.slurm, shape)),
        "RESTARTS": str(requeues.MOST_LOST),
        "IDLE": str(requeues.MOST_IDLE),
        "LEAD": str(config.slurm.signal_lead_s),
    }
    template = TEMPLATE if config.slurm.template is None else Path(config.slurm.template)
    return _filled(template, filled)


def render_doctor(config: RunConfig, place: JobPlace, arguments: Sequence[str]) -> str:
    """Return the script that runs `stageline doctor` once on each node that a run asks for."""
    shape, slurm = job_shape(config), replace(config.slurm, time_limit=DOCTOR_LIMIT)
    components = f" --het-group=0-{len(shape.groups) - 1}" if shape.heterogeneous else ""
    filled = {
        "TITLE": place.title,
        "DIRECTIVES": "\n".join(line for line in _directives(slurm, shape, place) if line != "#SBATCH --requeue"),
        "COMMAND": shlex.join([*start_command(config.slurm), "doctor", *arguments]),
        "FOLDER": shlex.quote(str(place.folder)),
        "ENVIRONMENT": "\n".join(config.slurm.environment),
        "COMPONENTS": components,
    }
    return _filled(DOCTOR_TEMPLATE, filled)


def _filled(template: Path, filled: Mapping[str, str]) -> str:
    """Return a template with its words filled in. Raises ConfigError if it cannot be read, or has other words."""
    try:
        text = template.read_text("utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "slurm.template", f"given {str(template)!r}; cannot be read ({error}); null: {TEMPLATE}"
        ) from error
    words = set(_WORD.findall(text))
    if words != filled.keys():
        lacks, strange = sorted(filled.keys() - words), sorted(words - filled.keys())
        said = f"lacks {', '.join(lacks) or 'none'} of the words in @, and has {', '.join(strange) or 'none'} that mean"
        raise ConfigError("slurm.template", f"given {str(template)!r}; it {said} nothing; compare {TEMPLATE}")
    return _WORD.sub(lambda match: filled[match[1]], text)


def start_command(slurm: SlurmConfig) -> list[str]:
    """Return the command that starts Stageline on a node."""
    return [sys.executable, "-m", "pipeline.cli"] if slurm.command is None else shlex.split(slurm.command)


def _directives(slurm: SlurmConfig, shape: JobShape, place: JobPlace) -> Iterator[str]:
    options = {
        "job-name": place.name,
        "output": str(place.output),
        "open-mode": "append",
        "account": slurm.account,
        "time": slurm.time_limit,
        "signal": f"B:USR1@{slurm.signal_lead_s}",
        "array": place.array,
    }
    for name, value in options.items():
        if value is not None:
            yield f"#SBATCH --{name}={_sbatch_word(value)}"
    yield "#SBATCH --requeue"
    yield "#SBATCH --no-kill                    # a node may fail: pools go on without it"
    for option in slurm.sbatch:
        yield f"#SBATCH {option}"
    if not shape.heterogeneous:
        yield from _of_nodes(slurm, _together(shape))
        return
    for number, group in enumerate(shape.groups):
        if number:
            yield "#SBATCH hetjob"
            # repeated, since some options (--exclusive) apply to one component only
            yield from (f"#SBATCH {option}" for option in slurm.sbatch)
        yield from _of_nodes(slurm, group)


def _together(shape: JobShape) -> NodeGroup:
    """Return one group for all gangs of a plain job. Its nodes are alike: each has what the largest gang needs."""
    first = shape.groups[0]
    return NodeGroup(
        nodes=shape.nodes,
        steps=tuple(step for group in shape.groups for step in group.steps),
        cpus=max(group.cpus for group in shape.groups),
        gpus=max(group.gpus for group in shape.groups),
        partition=first.partition,
        sbatch=first.sbatch,
    )


def _of_nodes(slurm: SlurmConfig, group: NodeGroup) -> Iterator[str]:
    yield f"# {', '.join(_counted(step) for step in group.steps)}"
    gpus = f" --gres={slurm.gres}:{group.gpus}" if group.gpus else ""
    yield f"#SBATCH --nodes={group.nodes} --ntasks-per-node=1 --cpus-per-task={group.cpus}{gpus}"
    if group.partition is not None:
        yield f"#SBATCH --partition={group.partition}"
    for option in group.sbatch:
        yield f"#SBATCH {option}"


def _counted(step: Step) -> str:
    return f"{step.gang}: {step.workers} worker{'s' * (step.workers > 1)}"


def _workers(slurm: SlurmConfig, shape: JobShape) -> Iterator[str]:
    """Yield a line per gang: its kind, its name, and srun's options.

    Steps overlap. Each gets all CPUs of its nodes, and all of the job's GPUs there if its workers need any. Slurm binds
    tasks to neither: NCCL does not use NVLink to a GPU that a control group hides from the process (NVIDIA/nccl#1066).
    Each worker reports the GPUs that it sees, and the driver gives it some of them. There is no `--cpus-per-task`: with
    it overlapping steps would get the same CPUs.
    """
    for number, group in enumerate(shape.groups):
        where = f"--het-group={number}" if shape.heterogeneous else f"--relative={shape.first_node(group)}"
        on_node = (group if shape.heterogeneous else _together(shape)).gpus
        for step in group.steps:
            counts = f"--nodes={group.nodes} --ntasks={step.workers} --ntasks-per-node={step.workers // group.nodes}"
            gpus = f"{slurm.gres}:{on_node}" if step.gpus else "none"
            kind = "ranks" if step.ordered else "replicas"
            yield f"{kind} {step.gang} {where} {counts} --overlap --cpu-bind=none --gres={gpus}"


def _sbatch_word(value: str) -> str:
    """Return a value in quotes for sbatch if it needs them. Like a shell, sbatch interprets quotes, and # outside of
    quotes; unlike a shell, it does not expand dollar signs."""
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


# ---- shape -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The workers of one gang, which one srun starts."""

    gang: str
    ordered: bool
    """True if the workers are ranks, none of which can continue without the others; else they are replicas."""
    workers: int
    cpus: int
    """CPUs of a worker."""
    gpus: int
    """GPUs of a worker."""


@dataclass(frozen=True)
class NodeGroup:
    """Nodes that are alike, and the workers on them."""

    nodes: int
    steps: tuple[Step, ...]
    cpus: int
    """CPUs of a node."""
    gpus: int
    """GPUs of a node."""
    partition: str | None
    sbatch: tuple[str, ...]


@dataclass(frozen=True)
class JobShape:
    """The groups of nodes. The first contains the batch node."""

    groups: tuple[NodeGroup, ...]
    heterogeneous: bool
    """True if each group is a component of a heterogeneous job; else the groups follow each other in one list of
    nodes."""

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    def first_node(self, group: NodeGroup) -> int:
        """Return the index of a group's first node in the list of nodes of a plain job."""
        return sum(other.nodes for other in self.groups[: self.groups.index(group)])


def job_shape(config: RunConfig) -> JobShape:
    """Return the nodes and resources that a run asks for. The config must have no `run_problems`."""
    slurm, used = config.slurm, {gang.name for gang in config.gangs()}
    gangs = [gang for gang in config.placement.gangs if gang in used]  # a run without a critic may list its gang
    hosts = {gang: host_gang(slurm, gang) for gang in gangs}
    own = sorted({host for host in hosts.values() if host is not None}, key=lambda host: _sort_key(config, host))
    members = [[gang for gang in gangs if hosts[gang] == host] for host in own]
    on_batch_node = [gang for gang in gangs if hosts[gang] is None]
    groups = [_group(config, None, on_batch_node)] * bool(on_batch_node)
    groups += [_group(config, host, of_host) for host, of_host in zip(own, members, strict=True)]
    groups[0] = replace(groups[0], cpus=groups[0].cpus + slurm.driver_cpus)
    alike = len({(group.gpus, group.partition, group.sbatch) for group in groups}) == 1
    heterogeneous = len(groups) > 1 and (slurm.job == "heterogeneous" or (slurm.job == "auto" and not alike))
    return JobShape(tuple(groups), heterogeneous)


def _sort_key(config: RunConfig, host: str) -> tuple[bool, int]:
    """Return the sort key of the nodes of gang `host`. The policy's nodes come first, so that the driver runs beside
    the policy's ranks if no gang is assigned to the batch node."""
    policy = host_gang(config.slurm, config.placement.roles[Role.POLICY])
    return host != policy, list(config.placement.gangs).index(host)


def _group(config: RunConfig, host: str | None, gangs: Sequence[str]) -> NodeGroup:
    slurm, ranks = config.slurm, config.replica_ranks
    placed = {gang.name: gang for gang in config.gangs()}
    of_host = SlurmGangConfig() if host is None else slurm.gangs[host]
    nodes = of_host.nodes or 1
    steps = tuple(
        Step(
            gang,
            placed[gang].ordered,
            config.placement.gangs[gang].workers,
            cpus_per_worker(slurm, config.placement, gang, ranks),
            gpus_of_worker(slurm, placed[gang]),
        )
        for gang in gangs
    )
    return NodeGroup(
        nodes=nodes,
        steps=steps,
        cpus=sum(step.cpus * step.workers // nodes for step in steps),
        gpus=_gpus_of_node({step.gang: step.gpus * step.workers // nodes for step in steps}, config.placement),
        partition=of_host.partition or slurm.partition,
        sbatch=tuple(of_host.sbatch),
    )


def _gpus_of_node(needed: Mapping[str, int], placement: PlacementConfig) -> int:
    """Return the number of GPUs of a node from each gang's number there. Gangs that share devices need the largest
    number among them."""
    sharing = {name for group in placement.device_sharing for name in group}
    alone = sum(number for name, number in needed.items() if name not in sharing)
    return alone + sum(max(needed.get(name, 0) for name in group) for group in placement.device_sharing)
