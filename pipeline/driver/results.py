"""What a run comes to, where its config says that it is kept and tracked. Loads no Dask: commands that only read a run
start sooner without.

    ledger, store ──History──┬──► summary.json
    events.jsonl ────────────┤    samples.json   ──► tracker (spool ──► MLflow)
                             ├──► plots/*.png
                             └──► report.html

May import pipeline.config, pipeline.observe and below.
"""

from __future__ import annotations

import importlib
import platform
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config.loading import config_hash, flatten
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.reporting import report_source, write_report
from pipeline.graph.graph import run_nodes
from pipeline.observe.evaluations import best_evaluation
from pipeline.observe.history import STEP_METRIC, History
from pipeline.observe.journal import journal_exists, read_events, run_starts
from pipeline.observe.responses import Decode, response_pairs, samples_table
from pipeline.observe.revision import git_commit, software_versions
from pipeline.observe.summary import Summary, summarise
from pipeline.observe.tracking import MlflowTracker, NullTracker, RunStatus, Tracker, how_to_open
from storage.ledger import Ledger
from storage.rollouts import RolloutStore


def open_history(config: RunConfig) -> History:
    """The ledger and store of a run's directory."""
    paths = RunPaths(config.run_dir)
    durability = config.storage.durability()
    ledger = Ledger(str(paths.ledger), durability)
    store = RolloutStore(str(paths.root), ledger, config.layouts(), durability=durability)
    return History(config.graph(), ledger, store, config.rollout.rows)


def open_tracker(config: RunConfig) -> Tracker:
    """Of a run that begins or goes on; `conclude` closes it."""
    if config.tracking.uri is None:
        return NullTracker()
    paths = RunPaths(config.run_dir)
    tags = {
        "git_commit": git_commit(),
        "host": platform.node(),
        "config_hash": config_hash(config),
        "run_dir": str(paths.root.resolve()),
        "mlflow.parentRunId": config.tracking.parent,
    }
    tracker = MlflowTracker(
        uri=config.tracking.uri,
        experiment=config.tracking.experiment,
        run_name=config.name,
        params=flatten(config),
        tags={name: value for name, value in tags.items() if value},
        spool_path=paths.mlflow_spool,
    )
    tracker.artifact(paths.config, "")
    return tracker


def conclude(config: RunConfig, history: History, tracker: Tracker, status: RunStatus, decode: Decode) -> Summary:
    """Writes what the run came to so far, draws it, and ends the tracking."""
    paths = RunPaths(config.run_dir)
    summary = summarise_run(config, history)
    paths.summary.write_text(summary.to_json(), "utf8")
    tracker.artifact(paths.summary, "")
    pairs = response_pairs(history, decode)
    if pairs:
        paths.samples.write_text(samples_table(pairs), "utf8")
        tracker.artifact(paths.samples, "")
    if config.tracking.plots and history.steps_done():
        for plot in draw(config, history):
            tracker.artifact(plot, "plots")
    if config.tracking.report:
        written = write_report([report_source(config, history, summary)], paths.report)
        tracker.artifact(written, "plots")
    tracker.close(status)
    return summary


def conclude_despite_error(
    config: RunConfig, history: History, tracker: Tracker, status: RunStatus, decode: Decode, console: Console
) -> None:
    """`conclude` while an error is on its way out, which whatever goes wrong here (the same full disk, say) must not
    replace."""
    try:
        conclude(config, history, tracker, status, decode)
    except Exception as error:
        tracker.close(status)
        console.print(
            f"no summary could be made of what there is: {type(error).__name__}: {error}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def summarise_run(config: RunConfig, history: History) -> Summary:
    """`summary.json` from a run's directory."""
    paths = RunPaths(config.run_dir)
    parents = {node.address: node.parents for node in run_nodes(config.graph())}
    steps = [one for one in map(history.step_numbers, history.steps_done()) if one is not None]
    events = read_events(paths.events) if journal_exists(paths.events) else ()
    evaluations = history.evaluations()
    best = best_evaluation(evaluations, config.evaluate.select.max_kl)
    return summarise(events, steps, evaluations, parents, software_versions(), best)


def draw(config: RunConfig, history: History) -> list[Path]:
    """The learning curves and the stage timeline, as PNG files in the run's directory."""
    paths = RunPaths(config.run_dir)
    # matplotlib takes a second to import: not before the end
    plots: Any = importlib.import_module("pipeline.observe.plots")
    curves, timeline = paths.plots / "curves.png", paths.plots / "timeline.png"
    starts = run_starts(paths.events)
    of_steps = {step: history.step_metrics(step, starts) for step in history.steps_done()}
    metrics = {step: of_step for step, of_step in of_steps.items() if STEP_METRIC in of_step}  # else it is lost
    held_out: dict[str, list[tuple[int, float]]] = {}
    for evaluation in history.evaluations():
        means = {"reward/mean": evaluation.mean} | {f"reward/{name}/mean": v for name, v in evaluation.parts.items()}
        for name, mean in means.items():
            held_out.setdefault(name, []).append((evaluation.version, mean))
    parts = list(dict.fromkeys([*config.reward.parts, *config.evaluate.reward.parts]))
    plots.plot_curves(metrics, plots.panels_of(parts), held_out, curves, config.name)
    plots.plot_timeline(read_events(paths.events), timeline, config.name)
    return [curves, timeline]


def where_results_are(config: RunConfig, summary: Summary) -> dict[str, Path | str]:
    """Of a finished run, by what a person calls them: paths, and commands."""
    paths = RunPaths(config.run_dir)
    where: dict[str, Path | str] = {"summary": paths.summary}
    if config.tracking.plots:
        where |= {"learning curves": paths.plots / "curves.png", "timeline": paths.plots / "timeline.png"}
    if config.tracking.report:
        where["report"] = paths.report
    where["weights"] = paths.weights(config.steps)
    if summary.best is not None and summary.best.version != config.steps:
        exported = paths.weights(summary.best.version)
        command = f"stageline export {paths.root} --version best"
        where["best weights"] = exported if exported.is_dir() else command
    where["rollouts"] = paths.rollouts
    if config.tracking.uri is not None:
        where["compare runs"] = how_to_open(config.tracking.uri)
    return where
