"""The section `slurm`: the resources and options of the job that `stageline submit` submits."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from pipeline.config.placement import PlacementConfig
from pipeline.graph.graph import Gang
from stages.models.protocol import Role
from storage.problems import Constraint, Problem, at_least, between, setting

_LONGEST_LEAD_S = 65535
_TIME = re.compile(r"(?:(?P<days>\d+)-)?(?P<parts>\d+(?::\d+){0,2})")
_WRITTEN = {
    "--account": "slurm.account",
    "-A": "slurm.account",
    "--array": "stageline sweep --at-once",
    "-a": "stageline sweep --at-once",
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
    "--requeue": None,
    "--signal": "slurm.signal_lead_s",
    "--time": "slurm.time_limit",
    "-t": "slurm.time_limit",
}
"""Option of sbatch that a config must not give, because the job script decides it -> the setting or command that
decides the option's value. None if the value is fixed."""
_UNQUOTED = re.compile(r"[^\s'\"`$\\;&|<>]+")


def _is_word(value: str) -> bool:
    return _UNQUOTED.fullmatch(value) is not None


def _is_line(value: str) -> bool:
    return "\n" not in value and bool(value.strip())


_WORD = Constraint("one word, without spaces and without marks that a shell reads", _is_word)
_LINES = Constraint("one line, and not empty", _is_line, of_elements=True)
_OPTIONS = Constraint(
    "one option of sbatch, as it is on the command line: --mem=0",
    lambda value: _is_line(value) and value.startswith("-"),
    of_elements=True,
)


@dataclass
class SlurmGangConfig:
    """The nodes of a gang's workers, and the resources of each worker."""

    nodes: int | None = setting(None, at_least(1))
    """Number of nodes that the job requests for this gang. The gang's workers are spread evenly over these nodes. null:
    the workers run on the nodes of another gang (`beside`), or on the batch node if `beside` is null too."""
    beside: str | None = None
    """Name of another gang. The workers of this gang are spread evenly over the nodes of the other gang."""
    gpus_per_worker: int | None = setting(None, at_least(0))
    """GPUs of each worker. null: as many as it needs. A rank that holds a model needs one. A replica needs one for each
    of its engine ranks. A scoring worker needs one if rewards have models and its gang's `device` is not cpu. Other
    workers need none."""
    cpus_per_worker: int | None = setting(None, at_least(1))
    """CPUs of each worker. null: the number of threads in `placement.gangs.NAME.threads`. For a replica of the engine,
    this number is multiplied by the number of the replica's ranks."""
    partition: str | None = setting(None, _WORD)
    """Partition of the gang's nodes; null: `slurm.partition`."""
    sbatch: list[str] = setting([], _OPTIONS)
    """Options of sbatch for the gang's nodes, for example `--mem=0` and `--constraint=nvlink`."""


@dataclass
class SlurmConfig:
    """The job that `stageline submit` writes for sbatch. The number of its workers comes from `placement`."""

    account: str | None = setting(None, _WORD)
    """Account that the job is charged to; null: the user's default."""
    partition: str | None = setting(None, _WORD)
    """Partition of the nodes; null: the cluster's default."""
    time_limit: str | None = None
    """Time limit in Slurm's format: days-hours:minutes:seconds, or in quotes hours:minutes:seconds; null: the time
    limit of the partition."""
    signal_lead_s: int = setting(180, between(1, _LONGEST_LEAD_S))
    """Number of seconds before the time limit at which the run is stopped. The job is then requeued. Slurm may stop the
    run up to a minute earlier."""
    job: Literal["auto", "plain", "heterogeneous"] = "auto"
    """Kind of job. auto: heterogeneous if gangs need different nodes, else plain."""
    gres: str | None = setting("gpu", _WORD)
    """Slurm's name of a GPU: `gpu`, or with its kind `gpu:h100`; null: everything is computed on CPUs."""
    driver_cpus: int = setting(2, at_least(1))
    """Number of CPUs that driver and scheduler get on the batch node."""
    environment: list[str] = setting([], _LINES)
    """Lines of shell that run before anything else in the job: `module load cuda`, `source .venv/bin/activate`."""
    command: str | None = None
    """Command that starts Stageline on a node, for example in a container: `apptainer exec --nv IMAGE stageline`. null:
    the Python that runs `stageline submit`."""
    sbatch: list[str] = setting([], _OPTIONS)
    """More options of sbatch for the whole job (`--qos=long`, `--constraint=h100`); in a heterogeneous job, for every
    component."""
    template: str | None = None
    """Path of the script's template; null: Stageline's slurm/run.sbatch."""
    gangs: dict[str, SlurmGangConfig] = field(default_factory=dict)
    """Name of a gang -> its nodes and resources."""


def gpus_of_worker(config: SlurmConfig, gang: Gang) -> int:
    """Return the number of GPUs that the job requests for each worker of a gang. It is 0 if `slurm.gres` is null."""
    configured = _gang_settings(config, gang.name).gpus_per_worker
    if config.gres is None:
        return 0
    return gang.gpus if configured is None else configured


def host_gang(config: SlurmConfig, gang: str) -> str | None:
    """Return the name of the gang on whose nodes the workers of `gang` run: `gang` itself or another gang. Return None
    if they run on the batch node."""
    own = _gang_settings(config, gang)
    return gang if own.nodes is not None else own.beside


def cpus_per_worker(config: SlurmConfig, placement: PlacementConfig, gang: str, replica_ranks: int) -> int:
    """Return the number of CPUs that the job requests for each worker of a gang. `replica_ranks`: number of ranks of
    one replica of the engine."""
    configured = _gang_settings(config, gang).cpus_per_worker
    if configured is not None:
        return configured
    generates = placement.roles[Role.GENERATE] == gang
    return placement.gangs[gang].threads * (replica_ranks if generates else 1)


def parse_time_limit(limit: str) -> float:
    """Return the seconds of a time limit in Slurm's notation: M:S, H:M:S, D-H, D-H:M, D-H:M:S. Raises ValueError for
    any other text. A bare number is refused too: YAML turns an unquoted 1:30:00 into a number of seconds, and Slurm
    would read it as minutes."""
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
    """Yield the section's problems that do not involve other sections."""
    yield from _time_problems(config)
    yield from _option_problems("slurm.sbatch", config.sbatch)
    yield from _command_problems(config)
    for name, gang in config.gangs.items():
        yield from _gang_problems(f"slurm.gangs.{name}", gang)
        own = [key for key in ("partition", "sbatch") if getattr(gang, key)]
        if own and config.job == "plain":
            need = (
                f"the nodes of a plain job are alike, and slurm.gangs.{name}.{own[0]} is given: auto, or heterogeneous"
            )
            yield Problem("slurm.job", config.job, need)


def slurm_placement_problems(
    config: SlurmConfig, placement: PlacementConfig, gangs: Iterable[Gang]
) -> Iterator[Problem]:
    """Yield the contradictions between this section and the placement. `gangs`: the gangs with a role."""
    gpus = {gang.name: gang.gpus for gang in gangs}
    choice = ", ".join(placement.gangs)
    for name, gang in config.gangs.items():
        key = f"slurm.gangs.{name}"
        if name not in placement.gangs:
            yield Problem(key, name, f"no such gang; placement.gangs has {choice}")
            continue
        host = name if gang.beside is None else gang.beside
        if gang.beside is not None and (gang.beside == name or _gang_settings(config, gang.beside).nodes is None):
            with_nodes = ", ".join(other for other, one in config.gangs.items() if one.nodes) or "none"
            yield Problem(f"{key}.beside", gang.beside, f"must be a gang with nodes of its own ({with_nodes})")
            continue
        nodes, workers = _gang_settings(config, host).nodes, placement.gangs[name].workers
        if nodes is not None and workers % nodes:
            where = f"slurm.gangs.{host}.nodes"
            yield Problem(where, nodes, f"must divide the workers of {name}, which are {workers}")
        needed, configured = gpus.get(name, 0), gang.gpus_per_worker
        if config.gres and configured is not None and 0 < configured < needed:
            yield Problem(
                f"{key}.gpus_per_worker", configured, f"a worker of {name} has {needed} ranks: {needed}, or null"
            )
    for number, group in enumerate(placement.device_sharing if config.gres else ()):
        if len({host_gang(config, name) for name in group}) > 1:
            need = f"gangs that share devices run on the same nodes: slurm.gangs.{group[1]}.beside={group[0]}"
            yield Problem(f"placement.device_sharing.{number}", list(group), need)


def _gang_settings(config: SlurmConfig, gang: str) -> SlurmGangConfig:
    return config.gangs.get(gang) or SlurmGangConfig()


def _gang_problems(key: str, gang: SlurmGangConfig) -> Iterator[Problem]:
    if gang.nodes is not None and gang.beside is not None:
        yield Problem(f"{key}.beside", gang.beside, f"must be null where {key}.nodes is given")
    yield from _option_problems(f"{key}.sbatch", gang.sbatch)
    of_nodes: dict[str, object] = {"partition": gang.partition, "sbatch": gang.sbatch}
    for name, value in of_nodes.items():
        if value and gang.nodes is None:
            yield Problem(f"{key}.{name}", value, f"applies to nodes of the gang's own: needs {key}.nodes")


def _command_problems(config: SlurmConfig) -> Iterator[Problem]:
    if config.command is not None:
        try:
            words = shlex.split(config.command)
        except ValueError as error:
            yield Problem("slurm.command", config.command, f"must be a command as a shell reads it ({error})")
        else:
            if not words:
                yield Problem("slurm.command", config.command, "must be a command")


def _time_problems(config: SlurmConfig) -> Iterator[Problem]:
    if config.time_limit is None:
        return
    try:
        limit_s = parse_time_limit(config.time_limit)
    except ValueError:
        need = "must be days-hours:minutes:seconds (0-12:00:00), or hours:minutes:seconds in quotes, or null"
        yield Problem("slurm.time_limit", config.time_limit, need)
        return
    if limit_s <= config.signal_lead_s:
        need = f"must be more than slurm.signal_lead_s = {config.signal_lead_s} seconds"
        yield Problem("slurm.time_limit", config.time_limit, need)


def _option_problems(key: str, options: list[str]) -> Iterator[Problem]:
    """Yield a problem for each option of sbatch that the job script decides itself (`_WRITTEN`). `key`: the setting
    that lists the options."""
    for number, option in enumerate(options):
        for word in option.split():
            name = word.partition("=")[0] if word.startswith("--") else word[:2]
            if name in _WRITTEN:
                where = _WRITTEN[name]
                need = "and must be as it is" if where is None else f"as {where} says"
                yield Problem(f"{key}[{number}]", option, f"{name} is in the script already, {need}")
