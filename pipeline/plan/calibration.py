"""A calibration: how close each kind of work comes to the hardware's peaks, and the fixed costs of a call and a node.

    seconds of a node = roofline / efficiency + collectives / link_efficiency + calls * call_s + node_s

The roofline is the seconds of the work at the hardware's peaks. It follows from model, layout, batch and hardware
(`cost`). The other numbers are measured in a run (`calibrate`), scaled to a published step time (`scaled`), or assumed
(`typical`). A calibration belongs to one kind of hardware: its efficiencies are shares of that hardware's peaks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.loading import load_file
from pipeline.errors import ConfigError, join_errors, refusal
from storage.problems import Constraint, Problem, above, at_least, setting, setting_problems

CALIBRATION = "--calibration"
"""The option that names a calibration file. A ConfigError names this option as the setting at fault if the file is
missing or belongs to other hardware."""
LEAST_EFFICIENCY = 0.01
"""Lowest efficiency that `scaled` accepts when it fits a calibration to a known step time. If a lower efficiency would
be needed, the hardware is not what limits the step."""
STEP_SECONDS = "--step-seconds"
"""The command-line option for a known time of one step, for example from a paper. A ConfigError about this time names
the option as the setting at fault."""
ELEMENTS = "element-wise operations"
"""The part of a node's work (`training.Work`) that has an efficiency of its own, `StageSpeed.element_efficiency`."""
_SHARE = Constraint("above 0 and at most 1", lambda share: 0 < share <= 1)


@dataclass(frozen=True)
class StageSpeed:
    """The speed of one kind of work."""

    efficiency: float = setting(1.0, _SHARE)
    """Share of the hardware's peak that the work reaches: the peak of arithmetic or of memory bandwidth, whichever
    limits the work."""
    element_efficiency: float = setting(1.0, _SHARE)
    """The same for element-wise operations on CPUs, such as norms and softmax. 1 for kinds of work that do not count
    them separately."""
    call_s: float = setting(0.0, at_least(0))
    """Additional seconds of each call, for launches and Python. Engines make one call per decoding pass. Scoring and
    advantage nodes make one per row. Forward passes and updates make one per transformer block and micro-batch (in an
    update, forward and backward together). On a CPU, each row of a decoding pass adds a part of a call."""
    node_s: float = setting(0.0, at_least(0))
    """Additional seconds of each node, for reading and writing the store and for the commit."""
    store_s: float = setting(0.0, at_least(0))
    """Part of `node_s`, at the end of a node, in which its output is stored and committed."""
    scatter: float | None = setting(None, at_least(0))
    """Root mean square of the relative errors of predicted seconds; outliers count less. null: nothing was measured."""
    nodes: int = setting(0, at_least(0))
    """Number of nodes that were measured."""

    def peak_share(self, part: str) -> float:
        """Return the share of the hardware's peak that a part of the work reaches. `part`: a name in `Work.parts`."""
        return self.element_efficiency if part == ELEMENTS else self.efficiency


@dataclass(frozen=True)
class Calibration:
    """The speeds of all kinds of work on one kind of hardware."""

    description: str = "???"
    """Where the numbers come from, in words."""
    hardware: str = "???"
    """Hardware that the calibration is for: a name of `conf/hardware`, or the path of a file. The efficiencies are
    shares of its peaks."""
    generate: StageSpeed = field(default_factory=StageSpeed)
    """Speed of engines: in training steps, in evaluations and in canaries. A canary is a node that compares engine and
    trainer at one version of the weights."""
    forward: StageSpeed = field(default_factory=StageSpeed)
    """Speed of the forward passes of reference, policy and critic."""
    update: StageSpeed = field(default_factory=StageSpeed)
    publish: StageSpeed = field(default_factory=StageSpeed)
    refit: StageSpeed = field(default_factory=StageSpeed)
    """Speed of loading new weights into an engine."""
    score: StageSpeed = field(default_factory=StageSpeed)
    advantage: StageSpeed = field(default_factory=StageSpeed)
    thread_share: float = setting(1.0, Constraint("from 0 to 1", lambda share: 0 <= share <= 1))
    """On CPUs, the share of the arithmetic that is divided among a worker's threads. One thread does the rest."""
    crowding: float = setting(0.0, Constraint("at least 0 and below 1", lambda share: 0 <= share < 1))
    """On CPUs, the share of its speed that a node loses while nodes on all other cores work. The cores share memory
    bandwidth, caches and power."""
    link_efficiency: float = setting(1.0, _SHARE)
    """Share of the links' bandwidth that collectives reach."""
    overhead_s: float = setting(0.0, at_least(0))
    """Seconds from the commit of a node's last parent to the start of the node on an idle worker. Scheduling and
    tracking take this time."""
    turnaround_s: float = setting(0.0, at_least(0))
    """Seconds from a node's commit until its worker can start the next node. They count as seconds of the node that was
    committed."""
    beside_s: float = setting(0.0, at_least(0))
    """Additional seconds of a shard's store and commit if its worker has other shards at the same time. Store and
    commit then compete with the engine for Python's interpreter."""
    driver_s: float = setting(0.0, at_least(0))
    """Processor seconds of the driver and the scheduler for each node. They count where workers share the driver's
    cores."""
    tokens_per_pass: float = setting(1.0, at_least(1))
    """Mean number of tokens that a row gains in a decoding pass with speculation. Used for configs with a drafter."""
    drafts_per_pass: float = setting(0.0, at_least(0))
    """Mean number of tokens that are drafted for a row in a decoding pass, right or wrong. Used for configs with a
    drafter."""
    prompt_tokens: float | None = setting(None, above(0))
    """Mean number of tokens of the prompts in the measured runs; null: unknown."""
    extrapolated: list[str] = setting([])
    """Kinds of work whose numbers are partly assumed, because no nodes were measured, or because the measured nodes
    were too few or too alike."""


KINDS = ("generate", "forward", "update", "publish", "refit", "score", "advantage")
"""The kinds of work. `Calibration` has a field with the name of each kind, which holds its speed."""

STAGE_KIND: Mapping[str, str] = {
    "generate": "generate",
    "evaluate": "generate",
    "canary": "generate",
    "score": "score",
    "evaluate_score": "score",
    "reference": "forward",
    "evaluate_reference": "forward",
    "logprob": "forward",
    "canary_logprob": "forward",
    "value": "forward",
    "advantage": "advantage",
    "update_policy": "update",
    "update_critic": "update",
    "publish": "publish",
}
"""Stage -> its kind of work."""

ENGINE_STAGES = frozenset(stage for stage, kind in STAGE_KIND.items() if kind == "generate")
"""Stages that an engine computes."""


def typical(hardware: str, *, on_gpus: bool) -> Calibration:
    """Return assumed speeds, for hardware without measurements.

    GPUs: training and forward passes reach 45 % of the peak (Narayanan et al. 2021, arXiv 2104.04473, table 1: 44 to
    52 % on A100). Decoding reaches 60 % of the bandwidth, and each pass takes 2 ms more for launches and scheduling. A
    block launches about 20 kernels of 5 us forward, and twice as many backward. CPUs: 30 % of the peak. A block of a
    tiny model takes one thread 1 ms forward and 3 ms backward, measured with torch 2.13 and Megatron's blocks.
    """
    share, elements, block_s = (0.45, 1.0, 1e-4) if on_gpus else (0.3, 0.3, 1e-3)
    return Calibration(
        description="assumed, not measured",
        hardware=hardware,
        generate=StageSpeed(0.6 if on_gpus else share, call_s=2e-3, node_s=0.02),
        forward=StageSpeed(share, elements, call_s=block_s, node_s=0.02),
        update=StageSpeed(share, elements, call_s=(3 if on_gpus else 4) * block_s, node_s=0.02),
        publish=StageSpeed(0.5, node_s=0.02),
        refit=StageSpeed(0.5, node_s=0.02),
        score=StageSpeed(share, call_s=1e-4, node_s=0.02),
        advantage=StageSpeed(share, call_s=1e-5, node_s=0.02),
        link_efficiency=0.7,
        overhead_s=0.02,
    )


def scaled(calibration: Calibration, predicted_s: float, step_s: float, description: str) -> Calibration:
    """Return a calibration in which every node and every overhead takes `step_s` / `predicted_s` times as long. The
    share of each stage in the step stays the same. The new speeds have no `scatter` (spread of measured / predicted
    seconds): it is None, because only the time of a whole step is known.

    Args:
        predicted_s: seconds of a step as predicted with `calibration`.
        step_s: seconds that a step should take with the new calibration.

    Raises:
        ConfigError: an efficiency would be above 1 or below `LEAST_EFFICIENCY`.
    """
    speeds_now: list[StageSpeed] = [getattr(calibration, kind) for kind in KINDS]
    shares = [*(speed.efficiency for speed in speeds_now), calibration.link_efficiency]
    shares += [speed.element_efficiency for speed in speeds_now if speed.element_efficiency < 1]
    factor, least, most = step_s / predicted_s, max(shares), min(shares) / LEAST_EFFICIENCY
    if not least <= factor <= most:
        need = (
            f"{calibration.description}, the speeds of {calibration.hardware} make it {predicted_s:.4g} s; scaled to "
            f"less than {least * predicted_s:.4g} s an efficiency would be above 1, to more than "
            f"{most * predicted_s:.4g} s below {LEAST_EFFICIENCY:g}: give a time between them"
        )
        raise ConfigError(STEP_SECONDS, f"given {step_s:g}; {need}")

    def slower(speed: StageSpeed) -> StageSpeed:
        elements = speed.element_efficiency if speed.element_efficiency == 1 else speed.element_efficiency / factor
        return StageSpeed(
            speed.efficiency / factor, elements, speed.call_s * factor, speed.node_s * factor, speed.store_s * factor
        )

    speeds: dict[str, Any] = {kind: slower(getattr(calibration, kind)) for kind in KINDS}
    return replace(
        calibration,
        description=description,
        link_efficiency=calibration.link_efficiency / factor,
        overhead_s=calibration.overhead_s * factor,
        turnaround_s=calibration.turnaround_s * factor,
        beside_s=calibration.beside_s * factor,
        driver_s=calibration.driver_s * factor,
        extrapolated=list(KINDS),
        **speeds,
    )


def load_calibration(file: str | Path) -> Calibration:
    """Return the calibration in a YAML file. Raises ConfigError if the file is missing or a value is not allowed."""
    path = Path(file)
    if not path.is_file():
        is_what = "it is a directory" if path.is_dir() else "no such file"
        raise ConfigError(CALIBRATION, f"given {str(file)!r}; {is_what} (`stageline calibrate RUN --write` makes one)")
    try:
        loaded: tuple[Calibration, list[str]] = load_file(Calibration, path)
        calibration, given = loaded
        _check(calibration)
    except ConfigError as error:
        if any(one.key == "gpus_per_node" for one in error.errors):
            need = "it describes hardware (--hardware), and is no calibration"
            raise ConfigError(CALIBRATION, f"given {str(file)!r}; {need}") from error
        within = [ConfigError(f"{CALIBRATION} {file}: {one.key}", one.message) for one in error.errors]
        raise join_errors(within) from error
    lacks = [kind for kind in KINDS if kind not in given]
    if lacks:
        need = f"lacks {', '.join(lacks)}: it was cut short (`stageline calibrate RUN --write` makes a whole one)"
        raise ConfigError(CALIBRATION, f"given {str(file)!r}; it {need}")
    return calibration


def _check(calibration: Calibration) -> None:
    """Raise ConfigError if a value is not allowed, or two values contradict one another."""
    problems = [*setting_problems(calibration)]
    most = 1 + calibration.drafts_per_pass
    if calibration.tokens_per_pass > most:
        need = f"a row gains a token and its right drafts: at most 1 + drafts_per_pass = {most:g}"
        problems.append(Problem("tokens_per_pass", calibration.tokens_per_pass, need))
    for kind in KINDS:
        speed: StageSpeed = getattr(calibration, kind)
        if speed.store_s > speed.node_s:
            need = f"is a part of the node's fixed seconds: at most {kind}.node_s = {speed.node_s:g}"
            problems.append(Problem(f"{kind}.store_s", speed.store_s, need))
    if problems:
        raise join_errors([refusal(problem) for problem in problems])


def to_yaml(calibration: Calibration) -> str:
    """Return a calibration as the YAML text of a calibration file."""
    return OmegaConf.to_yaml(OmegaConf.structured(calibration))


def check_hardware(calibration: Calibration, hardware: str) -> None:
    """Raise ConfigError if a calibration is for other hardware than `hardware`."""
    if calibration.hardware != hardware:
        need = f"is for {calibration.hardware}, and this plan is for {hardware}: calibrate there, or plan for"
        raise ConfigError(CALIBRATION, f"{calibration.description}; it {need} {calibration.hardware}")
