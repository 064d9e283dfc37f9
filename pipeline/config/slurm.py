"""The section `slurm`: what `stageline submit` asks a cluster for. May import pipeline.config.placement, stages.models
(protocol) and storage.problems.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.placement import PlacementConfig
from stages.models.protocol import MODEL_ROLES, Role
from storage.problems import Problem, at_least

_LONGEST_LEAD_S = 65535
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_WRITTEN = {
    "--account": "slurm.account",
    "-A": "slurm.account",
    "--array": "slurm.array_at_once",
    "-a": "slurm.array_at_once",
    "--constraint": "slurm.constraint",
    "-C": "slurm.constraint",
    "--cpus-per-task": "cpus_per_worker in slurm.gangs",
    "-c": "cpus_per_worker in slurm.gangs",
    "--gres": "slurm.gres",
    "--job-name": "name",
    "-J": "name",
    "--no-kill": None,
    "-k": None,
    "--no-requeue": None,
    "--nodes": "nodes in slurm.gangs",
    "-N": "nodes in slurm.gangs",
    "--ntasks-per-node": "workers in placement.gangs",
    "--open-mode": None,
    "--output": None,
    "-o": None,
    "--partition": "slurm.partition",
    "-p": "slurm.partition",
    "--qos": "slurm.qos",
    "-q": "slurm.qos",
    "--requeue": None,
    "--signal": "slurm.signal_lead_s",
    "--time": "slurm.time_limit",
    "-t": "slurm.time_limit",
}
"""Options of sbatch that the script has by itself -> what decides them; None: nothing."""
_WORD = re.compile(r"[^\s'\"`$\\;&|<>]+")
"""An argument that a shell and a line of sbatch take as it is."""


@dataclass
class SlurmGangConfig:
    """Where a gang's workers are, and what each of them has."""

    nodes: int | None = None
    """Nodes of their own, over which they are spread evenly; null: beside another gang, or on the batch node."""
    beside: str | None = None
    """The gang on whose nodes they are, spread likewise."""
    gpus_per_worker: int | None = None
    """null: one for each rank that holds a model, as many for a replica as its engine has ranks, none for scorers."""
    cpus_per_worker: int | None = None
    """null: `placement.gangs.NAME.threads`, for each rank of a replica."""
    partition: str | None = None
    """Of these nodes; null: `slurm.partition`."""
    constraint: str | None = None
    """Likewise; null: `slurm.constraint`."""
    sbatch: list[str] = field(default_factory=list)
    """Options of sbatch for these nodes: `--mem=0`."""


@dataclass
class SlurmConfig:
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time_limit: str | None = None
    """As Slurm writes it: days-hours:minutes:seconds, or in quotes hours:minutes:seconds; null: the partition's."""
    signal_lead_s: int = 180
    """Before the time limit: when the run is ended, to be requeued. Slurm may be a minute early."""
    restarts: int = 20
    """Of a job, for whatever reason (time limits and preemption count): after so many it is not requeued any more where
    its driver died, its batch node failed, or workers are missing."""
    job: Literal["auto", "plain", "heterogeneous"] = "auto"
    """auto: heterogeneous where gangs need different nodes."""
    gpus: bool = True
    """false: everything is computed on CPUs."""
    gres: str = "gpu"
    """What a GPU is called: `gpu`, or with its kind `gpu:h100`."""
    driver_cpus: int = 2
    """Of the batch node, for driver and scheduler."""
    modules: list[str] = field(default_factory=list)
    """Loaded with `module load`, in this order."""
    environment: list[str] = field(default_factory=list)
    """Lines of shell, run before anything else of the job."""
    command: str | None = None
    """What starts Stageline on a node; null: the Python that submits."""
    container_image: str | None = None
    container_command: str = "apptainer exec --nv {image}"
    """What runs a command in the image, wherever there is one."""
    sbatch: list[str] = field(default_factory=list)
    """More options of sbatch, for the whole job: for every component where it is heterogeneous."""
    template: str | None = None
    """The script's; null: slurm/run.sbatch of Stageline."""
    array_at_once: int | None = None
    """Of a sweep: runs that may go on at the same time; null: all."""
    gangs: dict[str, SlurmGangConfig] = field(default_factory=dict)


def gpus_per_worker(config: SlurmConfig, placement: PlacementConfig, gang: str, replica_ranks: int) -> int:
    """GPUs that a worker is given."""
    given = _of(config, gang).gpus_per_worker
    if not config.gpus:
        return 0
    return gpus_needed(placement, gang, replica_ranks) if given is None else given


def gpus_needed(placement: PlacementConfig, gang: str, replica_ranks: int) -> int:
    """GPUs that a worker computes on, where it is not all done on CPUs. `replica_ranks`: of an engine."""
    roles = {role for role, name in placement.roles.items() if name == gang}
    if Role.GENERATE in roles:
        return replica_ranks
    return 0 if MODEL_ROLES.isdisjoint(roles) else 1


def cpus_per_worker(config: SlurmConfig, placement: PlacementConfig, gang: str, replica_ranks: int) -> int:
    """CPUs that a worker is given."""
    given = _of(config, gang).cpus_per_worker
    if given is not None:
        return given
    generates = placement.roles[Role.GENERATE] == gang
    return placement.gangs[gang].threads * (replica_ranks if generates else 1)


def seconds(limit: str) -> float:
    """A time limit as Slurm reads it: M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError for anything else, and for a
    bare number: YAML makes one of 1:30:00 without quotes, and Slurm would read its seconds as minutes."""
    match = _TIME.fullmatch(limit)
    if match is None or limit.isdigit():
        raise ValueError(limit)
    parts = [int(part) for part in match["parts"].split(":")]
    if match["days"] is not None:
        hours, minutes, rest = (*parts, 0, 0, 0)[:3]
    elif len(parts) == 3:
        hours, minutes, rest = parts
    else:
        hours, minutes, rest = 0, *(*parts, 0)[:2]
    return ((int(match["days"] or 0) * 24 + hours) * 60 + minutes) * 60 + rest


def slurm_problems(config: SlurmConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    words = {"account": config.account, "partition": config.partition, "qos": config.qos, "gres": config.gres}
    yield from _word_problems({f"slurm.{name}": value for name, value in words.items()})
    yield from _constraint_problems("slurm.constraint", config.constraint)
    yield from _time_problems(config)
    counts = {
        "slurm.restarts": (0, config.restarts),
        "slurm.driver_cpus": (1, config.driver_cpus),
        "slurm.array_at_once": (1, config.array_at_once),
    }
    for key, (least, value) in counts.items():
        yield from at_least(least, {key: value})
    for number, module in enumerate(config.modules):
        yield from _word_problems({f"slurm.modules[{number}]": module})
    yield from _line_problems("slurm.environment", config.environment)
    yield from _option_problems("slurm.sbatch", config.sbatch)
    yield from _command_problems(config)
    for name, gang in config.gangs.items():
        yield from _gang_problems(f"slurm.gangs.{name}", gang)
        own = [key for key in ("partition", "constraint", "sbatch") if getattr(gang, key)]
        if own and config.job == "plain":
            need = (
                f"the nodes of a plain job are alike, and slurm.gangs.{name}.{own[0]} is given: auto, or heterogeneous"
            )
            yield Problem("slurm.job", config.job, need)


def slurm_placement_problems(config: SlurmConfig, placement: PlacementConfig, replica_ranks: int) -> Iterator[Problem]:
    """What of the section does not suit the placement."""
    choice = ", ".join(placement.gangs)
    for name, gang in config.gangs.items():
        key = f"slurm.gangs.{name}"
        if name not in placement.gangs:
            yield Problem(key, name, f"no such gang; placement.gangs has {choice}")
            continue
        host = name if gang.beside is None else gang.beside
        if gang.beside is not None and (gang.beside == name or _of(config, gang.beside).nodes is None):
            with_nodes = ", ".join(other for other, one in config.gangs.items() if one.nodes) or "none"
            yield Problem(f"{key}.beside", gang.beside, f"must be a gang with nodes of its own ({with_nodes})")
            continue
        nodes, workers = _of(config, host).nodes, placement.gangs[name].workers
        if nodes is not None and workers % nodes:
            where = f"slurm.gangs.{host}.nodes"
            yield Problem(where, nodes, f"must divide the workers of {name}, which are {workers}")
        needed, given = gpus_needed(placement, name, replica_ranks), gang.gpus_per_worker
        if config.gpus and given is not None and 0 < given < needed:
            yield Problem(f"{key}.gpus_per_worker", given, f"a worker of {name} has {needed} ranks: {needed}, or null")


def _of(config: SlurmConfig, gang: str) -> SlurmGangConfig:
    return config.gangs.get(gang) or SlurmGangConfig()


def _gang_problems(key: str, gang: SlurmGangConfig) -> Iterator[Problem]:
    yield from at_least(1, {f"{key}.nodes": gang.nodes, f"{key}.cpus_per_worker": gang.cpus_per_worker})
    yield from at_least(0, {f"{key}.gpus_per_worker": gang.gpus_per_worker})
    if gang.nodes is not None and gang.beside is not None:
        yield Problem(f"{key}.beside", gang.beside, f"must be null where {key}.nodes is given")
    yield from _word_problems({f"{key}.partition": gang.partition})
    yield from _constraint_problems(f"{key}.constraint", gang.constraint)
    yield from _option_problems(f"{key}.sbatch", gang.sbatch)
    of_nodes: dict[str, object] = {"partition": gang.partition, "constraint": gang.constraint, "sbatch": gang.sbatch}
    for name, value in of_nodes.items():
        if value and gang.nodes is None:
            yield Problem(f"{key}.{name}", value, f"is of nodes that are the gang's own: needs {key}.nodes")


def _command_problems(config: SlurmConfig) -> Iterator[Problem]:
    for key, line in {"slurm.command": config.command, "slurm.container_command": config.container_command}.items():
        if line is None:
            continue
        try:
            words = shlex.split(line)
        except ValueError as error:
            yield Problem(key, line, f"must be a command as a shell reads it ({error})")
            return
        if not words:
            yield Problem(key, line, "must be a command")
    if config.container_image is None:
        return
    if "{image}" not in config.container_command:
        need = "must name the image as {image}, for example: apptainer exec --nv {image}"
        yield Problem("slurm.container_command", config.container_command, need)
    if config.command is None:
        yield Problem("slurm.command", None, "must say what starts Stageline in slurm.container_image: stageline")


def _time_problems(config: SlurmConfig) -> Iterator[Problem]:
    yield from at_least(1, {"slurm.signal_lead_s": config.signal_lead_s})
    if config.signal_lead_s > _LONGEST_LEAD_S:
        yield Problem("slurm.signal_lead_s", config.signal_lead_s, f"Slurm takes at most {_LONGEST_LEAD_S}")
    if config.time_limit is None:
        return
    try:
        limit_s = seconds(config.time_limit)
    except ValueError:
        need = "must be days-hours:minutes:seconds (0-12:00:00), or hours:minutes:seconds in quotes, or null"
        yield Problem("slurm.time_limit", config.time_limit, need)
        return
    if limit_s <= config.signal_lead_s:
        need = f"must be more than slurm.signal_lead_s = {config.signal_lead_s} seconds"
        yield Problem("slurm.time_limit", config.time_limit, need)


def _word_problems(values: Mapping[str, str | None]) -> Iterator[Problem]:
    for key, value in values.items():
        if value is not None and not _WORD.fullmatch(value):
            yield Problem(key, value, "must be one word, without spaces and without marks that a shell reads")


def _constraint_problems(key: str, value: str | None) -> Iterator[Problem]:
    """Slurm joins features with & and |: the line is quoted for it."""
    if value is not None and not re.fullmatch(r"[\w.,:*&|()\[\]-]+", value):
        yield Problem(key, value, "must be features, joined by & or |, without spaces")


def _line_problems(key: str, lines: list[str]) -> Iterator[Problem]:
    for number, line in enumerate(lines):
        if "\n" in line or not line.strip():
            yield Problem(f"{key}[{number}]", line, "must be one line, and not empty")


def _option_problems(key: str, options: list[str]) -> Iterator[Problem]:
    yield from _line_problems(key, options)
    for number, option in enumerate(options):
        if not option.startswith("-"):
            yield Problem(
                f"{key}[{number}]", option, "must be an option of sbatch, as it is on the command line: --mem=0"
            )
            continue
        for word in option.split():
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            if name in _WRITTEN:
                where = _WRITTEN[name]
                need = "and must be as it is" if where is None else f"as {where} says"
                yield Problem(f"{key}[{number}]", option, f"{name} is in the script already, {need}")
