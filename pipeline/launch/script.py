"""The sbatch script of a run or of a sweep, from a template (`slurm/run.sbatch`) whose `@WORDS@` are filled in.

Pure, but for the template that is read. May import pipeline.config and pipeline.launch.shape.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.errors import ConfigError
from pipeline.config.run import RunConfig
from pipeline.config.slurm import SlurmConfig
from pipeline.launch.shape import JobShape, NodeGroup, Step, job_shape

TEMPLATE = Path(__file__).resolve().parents[2] / "slurm/run.sbatch"
_WORD = re.compile(r"@([A-Z]+)@")


@dataclass(frozen=True)
class JobPlace:
    """What of a script is not in the config."""

    title: str
    """In the comment at its top."""
    name: str
    """Slurm's, of the job."""
    run: str
    """The run's directory, as an expression of the shell."""
    folder: Path
    """Where the job works: relative paths of the config begin there."""
    output: Path
    """Of the job, as a pattern of sbatch's."""
    array: str | None = None
    """Of a sweep: its tasks, as sbatch writes them."""


def render(config: RunConfig, place: JobPlace) -> str:
    """The script, which any shell can run and a person can read.

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
        "ENVIRONMENT": "\n".join(_environment(config.slurm)),
        "WORKERS": "\n".join(_workers(shape)),
        "RESTARTS": str(config.slurm.restarts),
        "LEAD": str(config.slurm.signal_lead_s),
    }
    template = TEMPLATE if config.slurm.template is None else Path(config.slurm.template)
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
    """What starts Stageline on a node."""
    command = [sys.executable, "-m", "pipeline.cli"] if slurm.command is None else shlex.split(slurm.command)
    if slurm.container_image is None:
        return command
    container = [part.replace("{image}", slurm.container_image) for part in shlex.split(slurm.container_command)]
    return [*container, *command]


def _directives(slurm: SlurmConfig, shape: JobShape, place: JobPlace) -> Iterator[str]:
    options = {
        "job-name": place.name,
        "output": str(place.output),
        "open-mode": "append",
        "account": slurm.account,
        "qos": slurm.qos,
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
            # again, since some options (--exclusive) are those of a component alone
            yield from (f"#SBATCH {option}" for option in slurm.sbatch)
        yield from _of_nodes(slurm, group)


def _together(shape: JobShape) -> NodeGroup:
    """The groups of a plain job, whose nodes are alike: each has what the largest needs."""
    first = shape.groups[0]
    return NodeGroup(
        nodes=shape.nodes,
        steps=tuple(step for group in shape.groups for step in group.steps),
        cpus=max(group.cpus for group in shape.groups),
        gpus=max(group.gpus for group in shape.groups),
        partition=first.partition,
        constraint=first.constraint,
        sbatch=first.sbatch,
    )


def _of_nodes(slurm: SlurmConfig, group: NodeGroup) -> Iterator[str]:
    yield f"# {', '.join(_counted(step) for step in group.steps)}"
    gpus = f" --gres={slurm.gres}:{group.gpus}" if group.gpus else ""
    yield f"#SBATCH --nodes={group.nodes} --ntasks-per-node=1 --cpus-per-task={group.cpus}{gpus}"
    if group.partition is not None:
        yield f"#SBATCH --partition={group.partition}"
    if group.constraint is not None:
        yield f"#SBATCH --constraint={_sbatch_word(group.constraint)}"
    for option in group.sbatch:
        yield f"#SBATCH {option}"


def _counted(step: Step) -> str:
    return f"{step.gang}: {step.workers} worker{'s' * (step.workers > 1)}"


def _environment(slurm: SlurmConfig) -> Iterator[str]:
    if slurm.modules:
        yield f"module load {shlex.join(slurm.modules)} || exit 2"
    yield from slurm.environment


def _workers(shape: JobShape) -> Iterator[str]:
    for number, group in enumerate(shape.groups):
        where = f"--het-group={number}" if shape.heterogeneous else f"--relative={shape.first_node(group)}"
        for step in group.steps:
            counts = f"--nodes={group.nodes} --ntasks={step.workers} --ntasks-per-node={step.workers // group.nodes}"
            # Steps that compute on CPUs share a node's: each would round its own up to whole cores.
            gpus = f"--exact --gpus-per-task={step.gpus}" if step.gpus else "--overlap --gres=none"
            kind = "ranks" if step.ordered else "replicas"
            yield f"{kind} {step.gang} {where} {counts} --cpus-per-task={step.cpus} {gpus}"


def _sbatch_word(value: str) -> str:
    """sbatch takes quotes, and a # outside of them, as a shell does; of a dollar sign it makes nothing."""
    if re.fullmatch(r"[\w@%+=:,./-]*", value):
        return value
    escaped = re.sub(r'(["\\])', r"\\\1", value)
    return f'"{escaped}"'
