"""PNG plots: the learning curves and the timeline of a run, and the training of a reward model.

Only this module imports matplotlib, with the backend Agg, which needs no display. Import this module only to draw.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pipeline.observe.curves import RunCurves, panels_to_draw
from pipeline.observe.metric_catalogue import PANELS, Panel
from pipeline.observe.timeline import OTHER_COLOUR, STAGE_COLOURS, Box, Lane, Timeline

if TYPE_CHECKING:  # this import would load torch and Megatron, which a run's driver does not load
    from stages.preferences.losses import Reliability

INK, FAINT = "#22252B", "#D8DBE0"
COLOURS = ("#4C78A8", "#D64550", "#59A14F", "#B279A2")
LANE_HEIGHT = 0.82


Points = Sequence[tuple[float, float]]


def plot_timeline(timeline: Timeline, losses: Sequence[tuple[float, str]], path: Path, title: str) -> None:
    """Draw the stages that each worker ran over time: the middle steps enlarged, if there are enough steps, and the
    whole run. The number in a box is its PPO step. `losses` are pairs (time of the loss in seconds since the epoch,
    name of the lost worker)."""
    windows = [window for window in (timeline.middle_period, (timeline.start_s, timeline.end_s)) if window is not None]
    height = 0.42 * max(len(timeline.lanes), 2) + 0.7
    figure = Figure(figsize=(13, len(windows) * height + 1.5), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(windows), 1, squeeze=False)[:, 0]
    for ax, window in zip(axes, windows, strict=True):
        _draw_window(ax, timeline, window, panel_width_px=1550)
        for start, _ in timeline.gaps:
            if window[0] <= timeline.without_gaps(start) <= window[1]:
                ax.axvline(timeline.without_gaps(start) - timeline.start_s, color=INK, lw=1.0, ls=":")
        for at, worker in [(timeline.without_gaps(t), name) for t, name in losses]:
            if window[0] <= at <= window[1]:
                left_s = at - timeline.start_s
                ax.axvline(left_s, color="#c00000", lw=1.2, ls="--")
                where = ("data", "axes fraction")
                ax.annotate(f"{worker} lost", (left_s, 1.0), xycoords=where, fontsize=7, color="#c00000")
    if timeline.middle_period is not None:
        axes[0].set_title("Middle steps", loc="left", fontsize=10, color=INK)
        axes[1].set_title("Whole run (shaded: the steps above)", loc="left", fontsize=10, color=INK)
        left, right = (t - timeline.start_s for t in timeline.middle_period)
        axes[1].axvspan(left, right, color="#000000", alpha=0.07, zorder=0, lw=0)
    between = " (dotted: resumed; the time between is left out)" if timeline.gaps else ""
    axes[-1].set_xlabel(f"seconds since the first stage started{between}", color=INK)
    present = {box.address.stage for lane in timeline.lanes for box in lane.boxes}
    order = [s for s in STAGE_COLOURS if s in present] + sorted(present - STAGE_COLOURS.keys())
    handles = [Patch(color=STAGE_COLOURS.get(stage, OTHER_COLOUR), label=stage) for stage in order]
    figure.suptitle(f"{title}: stages by gang; the number in a box is its PPO step", fontsize=12, color=INK)
    figure.legend(handles=handles, loc="outside lower center", ncol=min(8, len(handles)), frameon=False, fontsize=9)
    figure.savefig(path)


def plot_curves(curves: RunCurves, path: Path, title: str, panels: Sequence[Panel] = PANELS) -> None:
    """Draw the learning curves as a grid of small plots. Panels for which the run has no metric are left out."""
    shown = panels_to_draw([curves], panels)
    columns = max(1, min(4, math.ceil(len(shown) / 2)))
    rows = max(1, math.ceil(len(shown) / columns))
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows + 0.5), dpi=130, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, shown, strict=False):
        trained = [(label, _points(curves.steps, curves.metrics[name]))
                   for name, label in panel.series if name in curves.metrics]  # fmt: skip
        held_out = [(label, _points(*zip(*((p.version, p.value) for p in curves.held_out[name]), strict=True)))
                    for name, label in panel.series if name in curves.held_out]  # fmt: skip
        _draw_panel(ax, f"{panel.title}, {panel.unit}", trained, held_out, panel.healthy)
    for ax in axes[len(shown) :]:
        ax.set_visible(False)
    figure.suptitle(title, fontsize=12, color=INK)
    for ax in axes[max(0, len(shown) - columns) : len(shown)]:
        ax.set_xlabel("PPO step", fontsize=9, color=INK)
    figure.savefig(path)


def _points(steps: Sequence[int], values: Sequence[float | None]) -> Points:
    return [(step, value) for step, value in zip(steps, values, strict=True) if value is not None]


def plot_reward_model(
    metrics: Mapping[int, Mapping[str, float]],
    margins: np.ndarray,
    calibration: Reliability | None,
    path: Path,
    title: str,
) -> None:
    """Draw up to three plots about the training of a reward model. `metrics`: optimizer step -> its metrics. `margins`:
    one margin per held-out pair.

    - The accuracy by optimizer step, on the training pairs and on the validation pairs. If `calibration` is None, the
      training loss replaces the accuracy on the training pairs.
    - The calibration on held-out pairs. This plot is left out if `calibration` is None.
    - A histogram of the margins on held-out pairs. A margin is the score of the better row minus the score of the worse
      row."""
    figure = Figure(figsize=(12.6, 3.8), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    curves, right, last = figure.subplots(1, 3)

    def line(name: str) -> Points:
        points = [(step, values[name]) for step, values in sorted(metrics.items()) if name in values]
        return [(step, value) for step, value in points if math.isfinite(value)]

    validation = ("validation", line("validation/accuracy"))
    if calibration is None:
        _draw_panel(curves, "loss, and accuracy on pairs", [("loss", line("train/loss")), validation])
    else:
        _draw_panel(curves, "accuracy on pairs", [("training step", line("train/accuracy")), validation])
    curves.set_xlabel("optimizer step", fontsize=9, color=INK)
    if calibration is None:
        right.set_visible(False)
    else:
        held = calibration.counts > 0
        right.plot([0.5, 1], [0.5, 1], color=INK, lw=0.8, ls=(0, (4, 3)), alpha=0.55)
        right.plot(calibration.confidence[held], calibration.accuracy[held], color="#4C78A8", lw=1.6, marker="o", ms=4)
        right.set_title(f"Calibration (ECE {calibration.ece:.3f})", loc="left", fontsize=10, color=INK)
        right.set_xlabel("probability of the order given", fontsize=9, color=INK)
        right.set_ylabel("share of pairs ordered as judged", fontsize=9, color=INK)
        _clean(right, "both")
    last.hist(margins, bins=60, color="#4C78A8")
    last.axvline(0.0, color=INK, lw=0.8, ls=(0, (4, 3)), alpha=0.55)
    last.set_title("Held-out pairs by margin", loc="left", fontsize=10, color=INK)
    last.set_xlabel("score of the better less that of the worse", fontsize=9, color=INK)
    _clean(last, "y")
    figure.suptitle(title, fontsize=12, color=INK)
    figure.savefig(path)


def _draw_window(ax: Axes, timeline: Timeline, window: tuple[float, float], panel_width_px: int) -> None:
    """Draw the part of the lanes within a time window. On the y-axis, which points downwards, neighbouring lanes have a
    distance of 1. Between gangs there is an additional distance of 0.5."""
    left, right = window[0], max(window[1], window[0] + 1e-3)
    px_per_s = panel_width_px / (right - left)
    gangs: dict[str, int] = {}
    labels: dict[str, list[float]] = {}
    for number, lane in enumerate(timeline.lanes):
        y = number + 0.5 * gangs.setdefault(lane.gang, len(gangs))
        labels.setdefault(_lane_label(lane), []).append(y)
        seen = [box for box in lane.boxes if box.end_s >= left and box.start_s <= right]
        for stage in sorted({box.address.stage for box in seen}):
            row = [box for box in seen if box.address.stage == stage]
            _draw_stage(ax, row, y, (left, right), timeline.start_s, px_per_s)
    ax.set_xlim(left - timeline.start_s, right - timeline.start_s)
    ax.set_ylim(max(max(ys) for ys in labels.values()) + 0.6, -0.6)
    ax.set_yticks([sum(ys) / len(ys) for ys in labels.values()], list(labels), fontsize=9)
    _clean(ax, "x")
    ax.tick_params(axis="y", length=0)


def _draw_stage(
    ax: Axes, row: Sequence[Box], y: float, window: tuple[float, float], origin: float, px_per_s: float
) -> None:
    """Draw the boxes `row` of one stage in the lane at height `y`. If at least 90 % of the boxes are wide enough, write
    the number of the step into each wide box. `origin`: time at x = 0."""
    left, right = window
    colour = STAGE_COLOURS.get(row[0].address.stage, OTHER_COLOUR)
    widest = max(box.end_s - box.start_s for box in row) * px_per_s
    ax.broken_barh([(box.start_s - origin, box.end_s - box.start_s) for box in row],
                   (y - LANE_HEIGHT / 2, LANE_HEIGHT), facecolors=colour, edgecolors="white",
                   linewidth=0.7 if widest > 4 else 0.0, zorder=2)  # fmt: skip
    spans = [(box.address.step, max(box.start_s, left), min(box.end_s, right)) for box in row]
    fitting = [(step, lo, hi) for step, lo, hi in spans if (hi - lo) * px_per_s > 9 * len(str(step)) + 2]
    # Boxes that the window cuts do not count in the 90 %.
    whole = [box for box in row if box.start_s >= left and box.end_s <= right]
    if len(fitting) < 0.9 * len(whole):
        return  # numbers in only a few boxes would be misleading
    for step, lo, hi in fitting:
        ax.text((lo + hi) / 2 - origin, y, str(step), ha="center", va="center", fontsize=8, color=_ink_on(colour),
                zorder=3, clip_on=True)  # fmt: skip


def _lane_label(lane: Lane) -> str:
    short = lane.worker if len(lane.worker) <= 24 else "…" + lane.worker[-23:]
    return lane.gang if lane.worker == lane.gang else short if short.startswith(lane.gang) else f"{lane.gang}  {short}"


def _draw_panel(
    ax: Axes,
    title: str,
    trained: Sequence[tuple[str, Points]],
    held_out: Sequence[tuple[str, Points]] = (),
    healthy: float | None = None,
) -> None:
    """Draw one panel of curves. Training series are lines, held-out series are dots joined by a thin line, and the
    ideal value `healthy` is a dashed line."""
    lines = [(label, points) for label, points in trained if points]
    for number, (label, points) in enumerate(lines):
        steps, values = zip(*points, strict=True)
        style = "-" if number == 0 else (0, (3, 2))  # dashed, because a second line may cover the first
        marker = "o" if len(points) < 3 else None
        ax.plot(steps, values, color=COLOURS[number % len(COLOURS)], lw=1.6, ls=style, label=label, marker=marker)
    dotted = [(label, points) for label, points in held_out if points]
    for number, (label, points) in enumerate(dotted):
        steps, values = zip(*points, strict=True)
        colour = COLOURS[(1 if len(dotted) == 1 else number) % len(COLOURS)]
        ax.plot(steps, values, color=colour, lw=1.0, ls=":", marker="o", ms=5, label=label, zorder=3)
    if healthy is not None:
        ax.axhline(healthy, color=INK, lw=0.8, ls=(0, (4, 3)), alpha=0.55, zorder=1)
    ax.set_title(title, loc="left", fontsize=10, color=INK)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.margins(x=0.02, y=0.12)
    if len(lines) + len(dotted) > 1:
        ax.legend(frameon=False, fontsize=8, loc="best", handlelength=1.6)
    _clean(ax, "both")


def _clean(ax: Axes, grid: str) -> None:
    ax.grid(axis=grid, color=FAINT, lw=0.6, zorder=0)  # type: ignore[arg-type]
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    ax.spines[["left", "bottom"]].set_color(FAINT)
    ax.tick_params(colors=INK, labelsize=8.5, color=FAINT)


def _ink_on(colour: str) -> str:
    """Return the ink colour or white, whichever is more readable on `colour` (relative luminance, Rec. 709)."""
    r, g, b = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return INK if 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.6 else "white"
