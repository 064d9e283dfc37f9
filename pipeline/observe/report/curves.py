"""The curves and the timeline of the page: every metric of a run and its held-out scores by step, and the stages that
each worker ran. The timeline is columns of integers, because a long run has tens of thousands of executions. Pure
functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.observe.evaluations import Evaluation, standard_error
from pipeline.observe.journal import Event, EventKind
from pipeline.observe.report.facts import Trouble
from pipeline.observe.report.numbers import number
from pipeline.observe.summary import boxes
from pipeline.observe.timeline import lanes_of, middle_window
from storage.address import Address

MOST_POINTS = 400
"""Most points of a curve; longer runs are drawn at this many of their steps."""


@dataclass(frozen=True)
class CurvePanel:
    """One picture. `series`: (name of a metric, its label); a name that ends in `*` stands for all metrics with that
    beginning."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    healthy: float | None = None
    """Value of a healthy run, drawn as a dashed line."""


PANELS = (
    CurvePanel("Reward", "mean score", (("reward/mean", "training"), ("held_out/score", "held-out"))),
    CurvePanel("Parts of the reward", "before weights", (("part/*", "training"), ("held_out/part/*", "held-out"))),
    CurvePanel("KL to the reference", "nats per response", (("kl/ref", "training"), ("held_out/kl", "held-out"))),
    CurvePanel("Entropy of the policy", "nats per token", (("policy/entropy_start", "at the step's start"),)),
    CurvePanel("Response length", "tokens", (("response/length_mean", "training"), ("held_out/length", "held-out"))),
    CurvePanel("Explained variance of the critic", "fraction", (("critic/explained_variance", "critic"),), 1.0),
    CurvePanel("Clipped", "fraction of tokens", (("policy/clipfrac", "policy"), ("critic/clipfrac", "critic"))),
    CurvePanel("Policy's change in an update", "nats per token", (("policy/approx_kl", "approx. KL"),)),
    CurvePanel("Gradient norm", "before clipping", (("policy/grad_norm", "policy"), ("critic/grad_norm", "critic"))),
    CurvePanel(
        "Trainer against sampler",
        "mean |difference| of log-probs, nats",
        (("mismatch/mean_abs_all", "all tokens"), ("mismatch/canary_mean_abs", "at one version")),
    ),
    CurvePanel("Staleness", "versions", (("staleness/mean", "mean"), ("staleness/max", "max"))),
    CurvePanel("Effective sample size", "fraction", (("ess/fraction", "of the tokens"),), 1.0),
    CurvePanel("Prompts whose responses score alike", "fraction", (("group/equal_fraction", "of the prompts"),)),
    CurvePanel("Speed", "samples/s", (("samples_per_s", "samples/s"),)),
    CurvePanel(
        "Seconds of a step",
        "s",
        (
            ("time/step_s", "step"),
            ("time/generate_s", "generate"),
            ("time/update_policy_s", "update policy"),
            ("time/update_critic_s", "update critic"),
        ),
    ),
)
"""Panels that are drawn at once; readers can choose any other metric on the page."""


@dataclass(frozen=True)
class HeldOutPoint:
    """An evaluation."""

    version: int
    score: float | None
    error: float | None
    """Standard error of the score."""
    kl: float | None
    length: float | None
    parts: Mapping[str, float | None]


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run over some of its steps."""

    steps: Sequence[int]
    of_steps: int
    """Steps that are finished; more than are drawn where a run is long."""
    metrics: Mapping[str, Sequence[float | None]]
    """By name: a value for each of `steps`, null if a step has none."""
    held_out: Sequence[HeldOutPoint]


def run_curves(
    metrics: Mapping[int, Mapping[str, float]], of_steps: int, evaluations: Sequence[Evaluation]
) -> RunCurves:
    """Return the curves of a run. `metrics`: the metrics of each drawn step. A metric that is 0 at all steps belongs to
    something that is off, and is left out."""
    steps = sorted(metrics)
    names = sorted({name for step in steps for name in metrics[step]})
    curves = {name: [number(metrics[step].get(name), 4) for step in steps] for name in names}
    parts = sorted({name.split("/")[1] for name in names if name.startswith("reward/") and name.count("/") == 2})
    if len(parts) > 1:
        curves |= {f"part/{part}": curves[f"reward/{part}/mean"] for part in parts if f"reward/{part}/mean" in curves}
    return RunCurves(
        steps=steps,
        of_steps=of_steps,
        metrics={name: values for name, values in curves.items() if any(value for value in values)},
        held_out=[_point(evaluation) for evaluation in evaluations],
    )


def _point(evaluation: Evaluation) -> HeldOutPoint:
    parts = evaluation.parts if len(evaluation.parts) > 1 else {}
    return HeldOutPoint(
        version=evaluation.version,
        score=number(evaluation.mean),
        error=number(standard_error(list(evaluation.scores.values()))),
        kl=number(evaluation.kl),
        length=number(evaluation.length),
        parts={name: number(value) for name, value in parts.items()},
    )


# ---- timeline --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimelineLane:
    """A row of the picture."""

    gang: str
    worker: str


@dataclass(frozen=True)
class TimelineMark:
    """A moment worth seeing: a driver began, an alarm, a loss."""

    ms: int
    kind: str
    text: str


@dataclass(frozen=True)
class RunTimeline:
    """Columns of equal length, one entry for each execution; times in milliseconds since `start`."""

    start: float
    """Seconds since the epoch."""
    duration_ms: int
    window_ms: tuple[int, int]
    """The part that is shown first: the middle steps."""
    lanes: Sequence[TimelineLane]
    stages: Sequence[str]
    lane: Sequence[int]
    stage: Sequence[int]
    """Number of the stage in `stages`."""
    step: Sequence[int]
    shard: Sequence[int]
    begin_ms: Sequence[int]
    length_ms: Sequence[int]
    versions: Sequence[str]
    """Versions of the weights that took part, if they were read; otherwise empty."""
    marks: Sequence[TimelineMark]
    of_executions: int
    """More than are drawn where a run is long: then the first and the last are."""


def run_timeline(
    events: Sequence[Event], versions: Mapping[Address, str], troubles: Sequence[Trouble], most: int
) -> RunTimeline | None:
    """Return the timeline of at most `most` executions; None if nothing ran."""
    every = boxes(events)
    if not every:
        return None
    kept = every if len(every) <= most else [*every[: most // 2], *every[len(every) - most // 2 :]]
    start, end = every[0].start_s, max(box.end_s for box in every)
    lanes = lanes_of(kept)
    placed = [(number, box) for number, lane in enumerate(lanes) for box in lane.boxes]
    stages = sorted({box.address.stage for box in kept})
    number = {stage: i for i, stage in enumerate(stages)}

    def ms(t: float) -> int:
        return round((t - start) * 1000)

    window = middle_window(kept)
    return RunTimeline(
        start=start,
        duration_ms=ms(end),
        window_ms=(ms(window[0]), ms(window[1])) if window is not None else (0, ms(end)),
        lanes=[TimelineLane(lane.gang, lane.worker) for lane in lanes],
        stages=stages,
        lane=[lane for lane, _ in placed],
        stage=[number[box.address.stage] for _, box in placed],
        step=[box.address.step for _, box in placed],
        shard=[box.address.shard for _, box in placed],
        begin_ms=[ms(box.start_s) for _, box in placed],
        length_ms=[round((box.end_s - box.start_s) * 1000) for _, box in placed],
        versions=[versions.get(box.address, "") for _, box in placed],
        marks=[*_starts(events, start), *(TimelineMark(ms(t.at), t.kind, t.text) for t in troubles)],
        of_executions=len(every),
    )


def _starts(events: Sequence[Event], start: float) -> list[TimelineMark]:
    """Return marks for the starts of all drivers after the first."""
    begun = [event for event in events if event.kind is EventKind.RUN_STARTED][1:]
    return [TimelineMark(round((e.t - start) * 1000), "resumed", e.detail or "") for e in begun]
