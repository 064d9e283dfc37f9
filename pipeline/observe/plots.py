"""PNG plots: the learning curves and the timeline of a run, the costs of an engine, and the training of a reward model.

Only this module imports matplotlib (Agg, no display); import it only to draw.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from pipeline.observe.journal import Event, EventKind
from pipeline.observe.summary import boxes
from pipeline.observe.timeline import lanes_of, middle_window
from stages.preferences.losses import Reliability

STAGE_COLOURS = {
    "generate": "#4C78A8",
    "evaluate": "#9ECAE9",
    "score": "#59A14F",
    "evaluate_score": "#B5D8AE",
    "reference": "#8CBF5A",
    "evaluate_reference": "#CFE5B3",
    "logprob": "#F2B447",
    "value": "#D9933D",
    "advantage": "#B279A2",
    "update_policy": "#D64550",
    "update_critic": "#F08A7B",
    "publish": "#6B5B95",
    "canary_logprob": "#D9C24A",
    "canary": "#BAB0AC",
}
OTHER_COLOUR = "#9D9D9D"
INK, FAINT = "#22252B", "#D8DBE0"
LANE_HEIGHT = 0.82


@dataclass(frozen=True)
class DrawnLane:
    """Position of a lane."""

    gang: str
    worker: str
    y: float
    """Centre; lanes are 1 apart, gangs a further 0.5. The first lane is at 0 and y grows downwards."""


@dataclass(frozen=True)
class DrawnBox:
    stage: str
    step: int
    shard: int
    y: float
    left_s: float
    """Seconds since the start of the first box."""
    width_s: float


@dataclass(frozen=True)
class Timeline:
    lanes: list[DrawnLane]
    boxes: list[DrawnBox]
    duration_s: float
    middle_s: tuple[float, float] | None = None
    """Start and end of the training of the middle steps, in seconds; None if there are few steps."""
    losses: tuple[tuple[float, str], ...] = ()
    """(seconds since the start of the first box, lost worker)."""


@dataclass(frozen=True)
class Panel:
    """One panel of the learning curves: `metrics` over the steps."""

    title: str
    metrics: tuple[tuple[str, str], ...]
    """(name of the metric, its label)."""
    reference: float | None = None
    """The value of a healthy run, drawn as a dashed line."""


CURVES = (
    Panel("reward", (("reward/mean", "training"),)),
    Panel("KL to the reference, nats per response", (("kl/ref", "k1"),)),
    Panel("entropy of the policy, nats", (("policy/entropy_start", "entropy"),)),
    Panel("explained variance of the critic", (("critic/explained_variance", "critic"),), 1.0),
    Panel("prompts whose responses score alike", (("group/equal_fraction", "fraction"),)),
    Panel("clipped fraction", (("policy/clipfrac", "policy"), ("critic/clipfrac", "critic"))),
    Panel(
        "mismatch of log-probs, mean |difference|",
        (("mismatch/mean_abs_all", "trainer - sampler"), ("mismatch/canary_mean_abs", "at one version")),
        0.0,
    ),
    Panel("staleness, versions", (("staleness/mean", "mean"), ("staleness/max", "max"))),
    Panel("effective sample size of the weights w", (("ess/fraction", "fraction"),), 1.0),
    Panel(
        "seconds",
        (("time/step_s", "step"), ("time/generate_s", "generate"), ("time/update_policy_s", "update policy")),
    ),
)
"""The learning curves of a run."""


def panels_of(parts: Sequence[str]) -> tuple[Panel, ...]:
    """Return `CURVES`, with a panel for the parts of the reward if there are several. If the policy exploits a weakness
    of one part, the sum rises while another part falls."""
    if len(parts) < 2:
        return CURVES
    first, *others = CURVES
    return (first, Panel("parts of the reward", tuple((f"reward/{name}/mean", name) for name in parts)), *others)


def lay_out(events: Iterable[Event]) -> Timeline:
    """Return the positions of all finished nodes, in the lanes of pipeline/observe/timeline.py."""
    log = list(events)
    drawn = boxes(log)
    if not drawn:
        return Timeline([], [], 0.0)
    origin = drawn[0].start_s
    placed_lanes: list[DrawnLane] = []
    placed: list[DrawnBox] = []
    gangs: dict[str, int] = {}
    for number, lane in enumerate(lanes_of(drawn)):
        y = number + 0.5 * gangs.setdefault(lane.gang, len(gangs))
        placed_lanes.append(DrawnLane(lane.gang, lane.worker, y))
        placed += [
            DrawnBox(a.stage, a.step, a.shard, y, box.start_s - origin, box.end_s - box.start_s)
            for box in lane.boxes
            for a in [box.address]
        ]
    lost = [e for e in log if e.kind is EventKind.GANG_LOST]
    window = middle_window(drawn)
    return Timeline(
        placed_lanes,
        placed,
        duration_s=max(box.end_s for box in drawn) - origin,
        middle_s=None if window is None else (window[0] - origin, window[1] - origin),
        losses=tuple((e.t - origin, e.worker or e.gang or "a worker") for e in lost),
    )


def plot_timeline(events: Iterable[Event], path: Path, title: str) -> None:
    """Draw the stages that each worker ran over time. The number in a box is its step."""
    timeline = lay_out(events)
    num_rows = len(timeline.lanes)
    zoomed = timeline.middle_s is not None
    panel_height = 0.42 * max(num_rows, 2) + 0.7
    num_panels = 2 if zoomed else 1
    figure = Figure(figsize=(13, num_panels * panel_height + 1.5), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.subplots(num_panels, 1, squeeze=False)[:, 0]
    windows = [] if timeline.middle_s is None else [timeline.middle_s]
    windows.append((0.0, max(timeline.duration_s, 1e-3)))
    for ax, window in zip(axes, windows, strict=True):
        _draw_window(ax, timeline, window, panel_width_px=1550)
        for left_s, worker in timeline.losses:
            if window[0] <= left_s <= window[1]:
                ax.axvline(left_s, color="#c00000", lw=1.2, ls="--")
                at = ("data", "axes fraction")
                ax.annotate(f"{worker} lost", (left_s, 1.0), xycoords=at, fontsize=7, color="#c00000")
    if zoomed:
        axes[0].set_title("Middle steps", loc="left", fontsize=10, color=INK)
        axes[1].set_title("Whole run (shaded: the steps above)", loc="left", fontsize=10, color=INK)
        axes[1].axvspan(*windows[0], color="#000000", alpha=0.07, zorder=0, lw=0)
    axes[-1].set_xlabel("seconds since the first stage started", color=INK)
    present = {b.stage for b in timeline.boxes}
    order = [s for s in STAGE_COLOURS if s in present] + sorted(present - STAGE_COLOURS.keys())
    handles = [Patch(color=STAGE_COLOURS.get(stage, OTHER_COLOUR), label=stage) for stage in order]
    figure.suptitle(f"{title}: stages by gang; the number in a box is its PPO step", fontsize=12, color=INK)
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncol=len(handles), frameon=False, fontsize=9)
    figure.savefig(path)


def plot_curves(
    step_metrics: Mapping[int, Mapping[str, float]],
    panels: Sequence[Panel],
    held_out: Mapping[str, Sequence[tuple[int, float]]],
    path: Path,
    title: str,
) -> None:
    """Draw the learning curves as small multiples.

    `step_metrics[step][name]` are the values, `held_out[name]` the (version, mean) points of the same metric on the
    held-out prompts. Metrics that were never logged are skipped, and so are panels without metrics."""
    logged = {name for values in step_metrics.values() for name in values} | held_out.keys()
    shown = [panel for panel in panels if any(name in logged for name, _ in panel.metrics)]
    columns = max(1, min(4, math.ceil(len(shown) / 2)))
    rows = max(1, math.ceil(len(shown) / columns))
    figure = Figure(figsize=(4.2 * columns, 2.9 * rows + 0.5), dpi=130, facecolor="white")
    figure.set_layout_engine("constrained", w_pad=0.12, h_pad=0.1)
    FigureCanvasAgg(figure)
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for ax, panel in zip(axes, shown, strict=False):
        _draw_panel(ax, panel, step_metrics, held_out)
    for ax in axes[len(shown) :]:
        ax.set_visible(False)
    figure.suptitle(title, fontsize=12, color=INK)
    for ax in axes[max(0, len(shown) - columns) : len(shown)]:
        ax.set_xlabel("PPO step", fontsize=9, color=INK)
    figure.savefig(path)


def plot_engine_costs(
    pass_seconds: Mapping[int, float], speeds: Mapping[int, Sequence[float]], path: Path, title: str
) -> None:
    """Draw the measurements by which an engine chooses draft lengths.

    Left: measured seconds of a pass by its number of tokens. Right: expected tokens per second with drafts of
    0, 1, 2, ... tokens, relative to no drafts, for each number of rows in flight (the keys of `speeds`). A dot marks
    the best."""
    figure = Figure(figsize=(11, 4.2), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    sizes = sorted(pass_seconds)
    left.plot(sizes, [1000 * pass_seconds[size] for size in sizes], color="#4C78A8", lw=1.8, marker="o", ms=4)
    left.set_xscale("log", base=2)
    left.set_xticks(sizes, [str(size) for size in sizes])
    left.set_ylim(bottom=0)
    left.set_xlabel("tokens in a pass", fontsize=9, color=INK)
    left.set_title("Milliseconds of a pass", loc="left", fontsize=10, color=INK)
    colours = ("#4C78A8", "#59A14F", "#F2B447", "#D64550", "#6B5B95", "#9D9D9D")
    for (num_rows, speed), colour in zip(sorted(speeds.items()), colours, strict=False):
        ratios = [each / speed[0] for each in speed]
        best = max(range(len(ratios)), key=ratios.__getitem__)
        label = f"{num_rows} row{'s' if num_rows > 1 else ''}"
        right.plot(range(len(ratios)), ratios, color=colour, lw=1.6, label=label)
        right.plot([best], [ratios[best]], color=colour, marker="o", ms=6, zorder=3)
    right.axhline(1.0, color=INK, lw=0.8, ls=(0, (4, 3)), alpha=0.55, zorder=1)
    right.xaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_xlabel("drafted tokens of each row", fontsize=9, color=INK)
    right.set_title("Expected tokens per second, against no drafts", loc="left", fontsize=10, color=INK)
    right.legend(frameon=False, fontsize=8, loc="best", handlelength=1.6)
    for ax in (left, right):
        _clean(ax, "both")
    figure.suptitle(title, fontsize=12, color=INK)
    figure.savefig(path)


def plot_reward_model(
    metrics: Mapping[int, Mapping[str, float]],
    margins: np.ndarray,
    calibration: Reliability | None,
    path: Path,
    title: str,
) -> None:
    """Draw the training of a reward model: accuracy (or loss) by optimizer step, calibration on held-out pairs (under
    Bradley–Terry), and margins of the held-out pairs (score of the better row minus that of the worse)."""
    figure = Figure(figsize=(12.6, 3.8), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    curves, right, last = figure.subplots(1, 3)
    pairs = Panel("accuracy on pairs", (("train/accuracy", "training step"), ("validation/accuracy", "validation")))
    errors = Panel("loss, and accuracy on pairs", (("train/loss", "loss"), ("validation/accuracy", "validation")))
    _draw_panel(curves, pairs if calibration is not None else errors, metrics, {})
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
    left, right = window
    px_per_s = panel_width_px / (right - left)
    seen = [b for b in timeline.boxes if b.left_s + b.width_s >= left and b.left_s <= right]
    for stage, y in sorted({(b.stage, b.y) for b in seen}):
        row = [b for b in seen if (b.stage, b.y) == (stage, y)]
        colour = STAGE_COLOURS.get(stage, OTHER_COLOUR)
        widest = max(b.width_s for b in row) * px_per_s
        ax.broken_barh([(b.left_s, b.width_s) for b in row], (y - LANE_HEIGHT / 2, LANE_HEIGHT), facecolors=colour,
                       edgecolors="white", linewidth=0.7 if widest > 4 else 0.0, zorder=2)  # fmt: skip
        spans = [(b, max(b.left_s, left), min(b.left_s + b.width_s, right)) for b in row]
        fitting = [(b, lo, hi) for b, lo, hi in spans if (hi - lo) * px_per_s > 9 * len(str(b.step)) + 2]
        # Boxes cut by the window's edge do not count.
        whole = [b for b in row if b.left_s >= left and b.left_s + b.width_s <= right]
        if len(fitting) < 0.9 * len(whole):
            continue  # numbers in only a few boxes would be misleading
        for b, lo, hi in fitting:
            ax.text((lo + hi) / 2, y, str(b.step), ha="center", va="center", fontsize=8, color=_ink_on(colour),
                    zorder=3, clip_on=True)  # fmt: skip
    ax.set_xlim(left, right)
    bottom = max((lane.y for lane in timeline.lanes), default=0.0)
    ax.set_ylim(bottom + 0.6, -0.6)
    labels: dict[str, list[float]] = {}
    for lane in timeline.lanes:
        labels.setdefault(_lane_label(lane), []).append(lane.y)
    ax.set_yticks([sum(ys) / len(ys) for ys in labels.values()], list(labels), fontsize=9)
    _clean(ax, "x")
    ax.tick_params(axis="y", length=0)


def _lane_label(lane: DrawnLane) -> str:
    short = lane.worker if len(lane.worker) <= 24 else "…" + lane.worker[-23:]
    return lane.gang if lane.worker == lane.gang else short if short.startswith(lane.gang) else f"{lane.gang}  {short}"


def _draw_panel(
    ax: Axes,
    panel: Panel,
    step_metrics: Mapping[int, Mapping[str, float]],
    held_out: Mapping[str, Sequence[tuple[int, float]]],
) -> None:
    colours = ("#4C78A8", "#D64550", "#59A14F", "#B279A2")
    num_lines = 0
    for (name, label), colour in zip(panel.metrics, colours, strict=False):
        points = [(step, values[name]) for step, values in sorted(step_metrics.items()) if name in values]
        points = [(step, value) for step, value in points if math.isfinite(value)]
        if not points:
            continue
        num_lines += 1
        steps, values = zip(*points, strict=True)
        style = "-" if num_lines == 1 else (0, (3, 2))  # dashed, because a second line may cover the first
        ax.plot(steps, values, color=colour, lw=1.6, ls=style, label=label, marker="o" if len(points) < 3 else None)
    for (name, label), colour in zip(panel.metrics, colours, strict=False):
        if held_out.get(name):
            alone = len(panel.metrics) == 1
            colour, label = ("#D64550", "held-out prompts") if alone else (colour, f"{label}, held out")
            versions, means = zip(*held_out[name], strict=True)
            ax.plot(versions, means, color=colour, lw=1.0, ls=":", marker="o", ms=5, label=label, zorder=3)
            num_lines += 1
    if panel.reference is not None:
        ax.axhline(panel.reference, color=INK, lw=0.8, ls=(0, (4, 3)), alpha=0.55, zorder=1)
    ax.set_title(panel.title, loc="left", fontsize=10, color=INK)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    ax.yaxis.set_major_locator(MaxNLocator(nbins=5))
    ax.margins(x=0.02, y=0.12)
    if num_lines > 1:
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
