"""The learning curves of a run: metrics of its steps and evaluations. The plot, the report and `/stageline` draw them.

The last part makes numbers for JSON: rounded, and null if not finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import NamedTuple

from pipeline.observe.evaluations import Evaluation, standard_error
from pipeline.observe.history import EVALUATION_METRIC, History, evaluation_metrics
from pipeline.observe.metric_catalogue import PANELS, Panel
from storage.address import Address, Ref

MOST_POINTS = 400
"""Most points of a curve; longer runs are drawn at this many of their steps."""


class HeldOutPoint(NamedTuple):
    """A metric of one evaluated version."""

    version: int
    value: float | None
    error: float | None
    """Standard error of the value, if it is the mean score."""


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run over some of its steps."""

    steps: Sequence[int]
    of_steps: int
    """Number of finished steps. `steps` holds fewer of them if the run is long."""
    metrics: Mapping[str, Sequence[float | None]]
    """Metrics by name: a value for each of `steps`; None if the step has no value, or none that is finite."""
    held_out: Mapping[str, Sequence[HeldOutPoint]]
    """Points by name of an `eval/` metric: one for each evaluation."""


def read_curves(
    history: History,
    starts: Iterable[float],
    evaluations: Sequence[Evaluation],
    known: Mapping[Address, Ref] | None = None,
) -> RunCurves:
    """Read the curves of a run. `starts`: start times of its drivers. `known`: references that need not be read
    again."""
    done, begun = history.steps_done(), [*starts]
    drawn = [done[i] for i in evenly(len(done), MOST_POINTS)]
    metrics = {step: history.step_metrics(step, begun, known or {}) for step in drawn}
    return run_curves(metrics, len(done), evaluations)


def run_curves(
    metrics: Mapping[int, Mapping[str, float]], of_steps: int, evaluations: Sequence[Evaluation]
) -> RunCurves:
    """Return the curves of a run. `metrics`: the metrics of each drawn step. A metric that is 0 or missing at all steps
    is left out, because it belongs to a feature that is off."""
    steps = sorted(metrics)
    names = sorted({name for step in steps for name in metrics[step]})
    curves = {name: [number(metrics[step].get(name), 4) for step in steps] for name in names}
    held_out: dict[str, list[HeldOutPoint]] = {}
    for evaluation in evaluations:
        for name, value in evaluation_metrics(evaluation).items():
            error = standard_error(evaluation.scores.values()) if name == EVALUATION_METRIC else None
            held_out.setdefault(name, []).append(HeldOutPoint(evaluation.version, number(value), number(error)))
    return RunCurves(
        steps=steps,
        of_steps=of_steps,
        metrics={name: values for name, values in curves.items() if any(values)},
        held_out=held_out,
    )


def panels_of(runs: Sequence[RunCurves], panels: Sequence[Panel] = PANELS) -> list[Panel]:
    """Return the panels for which a run has a metric. A name with a `*` is replaced by the metrics that fit it, if at
    least two fit."""
    names = sorted({name for run in runs for name in (*run.metrics, *run.held_out)})
    found = []
    for panel in panels:
        series: list[tuple[str, str]] = []
        for pattern, label in panel.series:
            fitting = [name for name in names if fnmatchcase(name, pattern)]
            if "*" not in pattern:
                series += [(name, label) for name in fitting]
            elif len(fitting) > 1:
                series += [(name, f"{name.split('/')[1]}, {label}") for name in fitting]
        if series:
            found.append(replace(panel, series=tuple(series)))
    return found


# ---- numbers for JSON ------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 5) -> float | None:
    """Round to significant digits. Return None for a value that is not finite, because JSON cannot hold it."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    """Return `number` of each value."""
    return [number(float(value), digits) for value in values]


def evenly(total: int, most: int) -> list[int]:
    """Return up to `most` indices spread evenly over range(total), including both ends; if `most` is 1, the last."""
    if total <= most:
        return list(range(total))
    if most < 2:
        return [total - 1] * most
    return [round(i * (total - 1) / (most - 1)) for i in range(most)]
