"""The sbatch script of a run, of a sweep or of `stageline doctor`: a template (`slurm/*.sbatch`) whose placeholders
`@NAME@` are replaced by values.

A job consists of groups of equal nodes. The config's section `slurm.gangs` decides on which group
the workers of each gang run:

    gang A with `nodes: 4`              ──► a group of four nodes
    gang B with `beside: A`             ──► the group of gang A
    gang C with neither of the two      ──► the batch node, a group of its own

If all groups request the same GPUs per node, partition and sbatch options, the job is a plain job with one list of
nodes. Otherwise it is a heterogeneous job with one component per group. The setting `slurm.job` can prescribe one of
the two kinds.

All functions are pure, except that the template is read from its file.
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
"""Time limit of a job that runs `stageline doctor`."""
_WORD = re.compile(r"@([A-Z]+)@")


@dataclass(frozen=True)
class ScriptValues:
    """The values of an sbatch script that the caller chooses for each job. All other values of the script follow from
    the config."""

    title: str
    """Title in the comment at the top of the script."""
    name: str
    """Name of the job in Slurm."""
    run: str
    """The run's directory, as a shell expression."""
    folder: Path
    """Working directory of the job. Relative paths in the config are relative to it."""
    output: Path
    """Path of the file for the job's output, as a filename pattern of sbatch."""
    array: str | None = None
    """Task numbers of a sweep, in the notation of sbatch. None if the job is no array."""


def render(config: RunConfig, place: ScriptValues) -> str:
    """Return the script of a run or of a sweep.

    Raises:
        ConfigError: `slurm.template` cannot be read, lacks a required word, or contains an unknown word.
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
        "RESTARTS": str(requeues.MAX_LOST_STARTS),
        "IDLE": str(requeues.MAX_REQUEUES_WITHOUT_PROGRESS),
        "LEAD": str(config.slurm.signal_lead_s),
    }
    template = TEMPLATE if config.slurm.template is None else Path(config.slurm.template)
    return _fill_template(template, filled)


def render_doctor(config: RunConfig, place: ScriptValues, arguments: Sequence[str]) -> str:
    """Return the script that runs `stageline doctor` once on each node that the run requests."""
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
    return _fill_template(DOCTOR_TEMPLATE, filled)


def _fill_template(template: Path, filled: Mapping[str, str]) -> str:
    """Return a template's text with `filled[NAME]` for each `@NAME@`. Raises ConfigError if it cannot be read, or if
    its placeholders are not exactly the keys of `filled`."""
    try:
        text = template.read_text("utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "slurm.template", f"given {str(template)!r}; cannot be read ({error}); null: {TEMPLATE}"
        ) from error
    words = set(_WORD.findall(text))
    if words != filled.keys():
        lacks, strange = sorted(filled.keys() - words), sorted(words - filled.keys())
        difference = (
            f"lacks {', '.join(lacks) or 'none'} of the words in @, and has {', '.join(strange) or 'none'} that mean"
        )
        raise ConfigError("slurm.template", f"given {str(template)!r}; it {difference} nothing; compare {TEMPLATE}")
    return _WORD.sub(lambda match: filled[match[1]], text)


def start_command(slurm: SlurmConfig) -> list[str]:
    """Return the command that starts Stageline on a node."""
    return [sys.executable, "-m", "pipeline.cli"] if slurm.command is None else shlex.split(slurm.command)


def _directives(slurm: SlurmConfig, shape: JobShape, place: ScriptValues) -> Iterator[str]:
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
        yield from _node_options(slurm, _merge_groups(shape))
        return
    for number, group in enumerate(shape.groups):
        if number:
            yield "#SBATCH hetjob"
            # repeated, since some options (--exclusive) apply to one component only
            yield from (f"#SBATCH {option}" for option in slurm.sbatch)
        yield from _node_options(slurm, group)


def _merge_groups(shape: JobShape) -> NodeGroup:
    """Merge the groups of a plain job into one group with all nodes and gangs. All nodes of a plain job are alike, so
    each has as many CPUs and GPUs as the most demanding group needs."""
    first = shape.groups[0]
    return NodeGroup(
        nodes=shape.nodes,
        steps=tuple(step for group in shape.groups for step in group.steps),
        cpus=max(group.cpus for group in shape.groups),
        gpus=max(group.gpus for group in shape.groups),
        partition=first.partition,
        sbatch=first.sbatch,
    )


def _node_options(slurm: SlurmConfig, group: NodeGroup) -> Iterator[str]:
    yield f"# {', '.join(_worker_count_text(step) for step in group.steps)}"
    gpus = f" --gres={slurm.gres}:{group.gpus}" if group.gpus else ""
    yield f"#SBATCH --nodes={group.nodes} --ntasks-per-node=1 --cpus-per-task={group.cpus}{gpus}"
    if group.partition is not None:
        yield f"#SBATCH --partition={group.partition}"
    for option in group.sbatch:
        yield f"#SBATCH {option}"


def _worker_count_text(step: Step) -> str:
    return f"{step.gang}: {step.workers} worker{'s' * (step.workers > 1)}"


def _workers(slurm: SlurmConfig, shape: JobShape) -> Iterator[str]:
    """Yield a line per gang: its kind, its name, and options of srun. Every step sees all CPUs and GPUs of its nodes,
    since NCCL does not use NVLink to a GPU that a control group hides (NVIDIA/nccl#1066); the driver assigns the GPUs.
    With `--cpus-per-task` the steps on a node would get the same CPUs."""
    for number, group in enumerate(shape.groups):
        where = f"--het-group={number}" if shape.heterogeneous else f"--relative={shape.first_node(group)}"
        on_node = (group if shape.heterogeneous else _merge_groups(shape)).gpus
        for step in group.steps:
            counts = f"--nodes={group.nodes} --ntasks={step.workers} --ntasks-per-node={step.workers // group.nodes}"
            gpus = f"{slurm.gres}:{on_node}" if step.gpus else "none"
            kind = "ranks" if step.ordered else "replicas"
            yield f"{kind} {step.gang} {where} {counts} --overlap --cpu-bind=none --gres={gpus}"


def _sbatch_word(value: str) -> str:
    """Return a value for an option of sbatch, in quotes if needed. sbatch interprets quotes and # like a shell, but not
    $."""
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'


# ---- shape -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    """The workers of one gang. One srun command starts them."""

    gang: str
    ordered: bool
    """True if the workers are ranks, which cannot continue without each other. False if they are replicas."""
    workers: int
    cpus: int
    """Number of CPUs per worker."""
    gpus: int
    """Number of GPUs per worker."""


@dataclass(frozen=True)
class NodeGroup:
    """A group of equal nodes, and the workers that run on them."""

    nodes: int
    steps: tuple[Step, ...]
    cpus: int
    """Number of CPUs per node."""
    gpus: int
    """Number of GPUs per node."""
    partition: str | None
    sbatch: tuple[str, ...]


@dataclass(frozen=True)
class JobShape:
    """The groups of nodes of a job. The first group contains the batch node."""

    groups: tuple[NodeGroup, ...]
    heterogeneous: bool
    """True if each group is a component of a heterogeneous job. False if the job has one list of nodes, in which the
    groups follow each other."""

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    def first_node(self, group: NodeGroup) -> int:
        """Return the index of a group's first node in the job's list of nodes. Only a job that is not heterogeneous has
        such a list."""
        return sum(other.nodes for other in self.groups[: self.groups.index(group)])


def job_shape(config: RunConfig) -> JobShape:
    """Return the nodes and resources that a run requests from Slurm. `run_problems` must find no problem in the
    config."""
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
    """Return the sort key of the nodes that gang `host` requests. The policy's nodes come first, so that the driver, on
    the batch node, runs beside ranks of the policy."""
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
            placed[gang].is_ordered,
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
    """Return the number of GPUs that a node needs. Of gangs that share devices, the largest counts."""
    sharing = {name for group in placement.device_sharing for name in group}
    alone = sum(number for name, number in needed.items() if name not in sharing)
    return alone + sum(max(needed.get(name, 0) for name in group) for group in placement.device_sharing)
