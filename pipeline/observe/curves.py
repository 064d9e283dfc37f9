"""The learning curves of a run: metrics of its steps and evaluations. The plot, the report and `/stageline` draw the
curves.

`round_or_none` prepares a value for JSON: it rounds the value, and replaces a value that is not finite by None.
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

MAX_POINTS = 400
"""Maximum number of points of a curve. If a run has more steps, this many evenly spaced steps are drawn."""


class HeldOutPoint(NamedTuple):
    """The value of one metric at one evaluated version of the weights."""

    version: int
    value: float | None
    error: float | None
    """Standard error of the value if the metric is the mean score (`eval/reward_mean`). None for any other metric, or
    if the error is not known."""


@dataclass(frozen=True)
class RunCurves:
    """Curves of a run over some of its steps."""

    steps: Sequence[int]
    of_steps: int
    """Number of all finished steps. If the run is long, `steps` contains only some of them."""
    metrics: Mapping[str, Sequence[float | None]]
    """Name of a metric -> its values, one per step in `steps`. A value is None if the step lacks the metric, or if the
    value is not finite."""
    held_out: Mapping[str, Sequence[HeldOutPoint]]
    """Name of an `eval/` metric -> its points, one per evaluation."""


def read_curves(
    history: History,
    driver_starts: Iterable[float],
    evaluations: Sequence[Evaluation],
    known_commits: Mapping[Address, Ref] | None = None,
) -> RunCurves:
    """Read the curves of a run.

    Args:
        history: the run's ledger and store.
        driver_starts: start times of the run's drivers.
        evaluations: the complete evaluations, in order of version.
        known_commits: commits that the caller has already read. They are not read again."""
    done, begun = history.finished_steps(), [*driver_starts]
    drawn = [done[i] for i in even_indices(len(done), MAX_POINTS)]
    metrics = {step: history.read_step_metrics(step, begun, known_commits or {}) for step in drawn}
    return run_curves(metrics, len(done), evaluations)


def run_curves(
    metrics: Mapping[int, Mapping[str, float]], of_steps: int, evaluations: Sequence[Evaluation]
) -> RunCurves:
    """Return the curves of a run. `metrics`: step to draw -> its metrics. `of_steps`: number of all finished steps.

    A metric that is 0 or missing at all steps is left out, because it belongs to a feature that is off."""
    steps = sorted(metrics)
    names = sorted({name for step in steps for name in metrics[step]})
    curves = {name: [round_or_none(metrics[step].get(name), 4) for step in steps] for name in names}
    held_out: dict[str, list[HeldOutPoint]] = {}
    for evaluation in evaluations:
        for name, value in evaluation_metrics(evaluation).items():
            error = standard_error(evaluation.scores.values()) if name == EVALUATION_METRIC else None
            held_out.setdefault(name, []).append(
                HeldOutPoint(evaluation.version, round_or_none(value), round_or_none(error))
            )
    return RunCurves(
        steps=steps,
        of_steps=of_steps,
        metrics={name: values for name, values in curves.items() if any(values)},
        held_out=held_out,
    )


def panels_to_draw(runs: Sequence[RunCurves], panels: Sequence[Panel] = PANELS) -> list[Panel]:
    """Return the panels to draw, with their series. A panel is left out if no run has any of its metrics.

    A series whose name contains `*` is replaced by one series for each metric that matches. If fewer than two metrics
    match, the series is left out."""
    names = sorted({name for run in runs for name in (*run.metrics, *run.held_out)})
    drawn = []
    for panel in panels:
        series: list[tuple[str, str]] = []
        for pattern, label in panel.series:
            fitting = [name for name in names if fnmatchcase(name, pattern)]
            if "*" not in pattern:
                series += [(name, label) for name in fitting]
            elif len(fitting) > 1:
                series += [(name, f"{name.split('/')[1]}, {label}") for name in fitting]
        if series:
            drawn.append(replace(panel, series=tuple(series)))
    return drawn


# ---- numbers for JSON ------------------------------------------------------------------------------------


def round_or_none(value: float | None, digits: int = 5) -> float | None:
    """Return a number rounded to `digits` significant digits. Return None if it is None or not finite, because JSON has
    no NaN and no infinity."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def even_indices(total: int, max_count: int) -> list[int]:
    """Return up to `max_count` indices, spread evenly over range(total). Both ends are included. If `max_count` is 1,
    only the last index is returned."""
    if total <= max_count:
        return list(range(total))
    if max_count < 2:
        return [total - 1] * max_count
    return [round(i * (total - 1) / (max_count - 1)) for i in range(max_count)]
