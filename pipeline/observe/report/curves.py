"""What is drawn against the step: every metric of a run, and its held-out scores. Pure functions of what is given. May
import this folder and pipeline.observe.evaluations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.observe.evaluations import Evaluation
from pipeline.observe.paired import standard_error
from pipeline.observe.report.numbers import number

MOST_POINTS = 400
"""Of a curve; of a longer run so many of its steps are drawn."""


@dataclass(frozen=True)
class CurvePanel:
    """One picture. `series`: (name of a metric, its label); a name ending in `*` stands for all that begin so."""

    title: str
    unit: str
    series: tuple[tuple[str, str], ...]
    healthy: float | None = None
    """What a healthy run stays at: a dashed line."""


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
"""Those that are drawn at once; any other metric can be chosen on the page."""


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
    """By name: a value for each of `steps`, null where it has none."""
    held_out: Sequence[HeldOutPoint]


def run_curves(
    metrics: Mapping[int, Mapping[str, float]], of_steps: int, evaluations: Sequence[Evaluation]
) -> RunCurves:
    """`metrics`: those of each step that is drawn. A metric that is 0 at all of them is of something that is off, and
    left out."""
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
