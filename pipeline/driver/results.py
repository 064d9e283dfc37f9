"""What a run comes to, where its config says that it is kept and tracked. Loads no Dask: commands that only read a run
start sooner without.

    ledger, store ──History──┬──► summary.json
    events.jsonl ────────────┤    samples.json   ──► tracker (spool ──► MLflow)
                             ├──► plots/*.png
                             └──► report.html

May import pipeline.config, pipeline.observe, pipeline.driver.tracked_config and below.
"""

from __future__ import annotations

import getpass
import importlib
import os
import platform
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.config.loading import config_hash
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.reporting import report_source, write_report
from pipeline.driver.tracked_config import off_metrics, tracked_params
from pipeline.graph.graph import run_nodes
from pipeline.observe.evaluations import best_evaluation
from pipeline.observe.history import EVALUATION_METRIC, STEP_METRIC, History, evaluation_metrics
from pipeline.observe.journal import journal_exists, read_events, run_starts
from pipeline.observe.live import Screen
from pipeline.observe.overlap import overlap_by_step
from pipeline.observe.redaction import without_credentials
from pipeline.observe.responses import response_pairs, samples_table
from pipeline.observe.revision import git_commit, short_command, software_versions, started_by
from pipeline.observe.run_note import code, result_text, run_note
from pipeline.observe.slurm_job import slurm_job
from pipeline.observe.spool import experiment_id
from pipeline.observe.summary import Summary, summarise
from pipeline.observe.tracking import Dataset, MlflowTracker, NullTracker, RunStatus, Tracker, how_to_open
from storage.ledger import Ledger
from storage.rollouts import RolloutStore
from storage.vocabulary import Decode

_CHANGED = "+changes"
_NOTE, _ENDED = "mlflow.note.content", "stageline.ended"
_GONE = "killed, or left to go on: its driver ended without closing it"


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
    commit = git_commit()
    resumes = len(run_starts(paths.events))
    running = f"running, resumed for the {resumes}. time" if resumes else "running"
    gone = f"{_GONE}; {code(f'stageline resume {paths.root}')} goes on with it"
    tags = {
        "host": platform.node(),
        "config_hash": config_hash(config),
        "run_dir": str(paths.root.resolve()),
        "stageline.resumes": str(resumes) if resumes else None,
        _ENDED: "not yet" if resumes else None,  # it says why an earlier driver did
        "mlflow.parentRunId": config.tracking.parent,
        "mlflow.user": _user(),
        "mlflow.source.name": short_command(),
        "mlflow.source.type": "LOCAL" if slurm_job(os.environ) is None else "JOB",
        "mlflow.source.git.commit": commit.removesuffix(_CHANGED),
        "mlflow.source.git.dirty": "true" if commit.endswith(_CHANGED) else None,
        _NOTE: _note(config, commit, running),
    }
    tracker = MlflowTracker(
        uri=config.tracking.uri,
        experiment=config.tracking.experiment,
        run_name=config.name,
        params=tracked_params(config),
        tags={name: value for name, value in tags.items() if value},
        spool_path=paths.mlflow_spool,
        off=off_metrics(config),
        if_abandoned={_ENDED: _GONE, _NOTE: _note(config, commit, gone)},
    )
    tracker.artifact(_config_to_show(paths), "")
    return tracker


def track_prompts(config: RunConfig, tracker: Tracker, digest: str, num_train: int, num_held_out: int) -> None:
    """The prompts as datasets of the run: those it trains on and those held out. `digest`: of both."""
    source, name = without_credentials(config.prompts.url), Path(config.prompts.url).name
    tracker.dataset(Dataset(name, digest[:36], source, "training", num_train))
    if num_held_out:
        tracker.dataset(Dataset(f"{name} held out", digest[:36], source, "evaluation", num_held_out))


def _user() -> str | None:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run under a number that has no name
        return None


def _config_to_show(paths: RunPaths) -> Path:
    """The run's config, as a file that others may read."""
    text = paths.config.read_text("utf8")
    shown = without_credentials(text)
    if shown == text:
        return paths.config
    copy = paths.root / "without_passwords" / paths.config.name
    copy.parent.mkdir(exist_ok=True)
    copy.write_text(shown, "utf8")
    return copy


def _note(config: RunConfig, commit: str, result: str) -> str:
    kind, weights = "" if config.has_critic else ", no critic", RunPaths(config.run_dir).weights(config.steps)
    what = f"PPO ({config.ppo.advantage}{kind}) on the task graph, staleness {config.staleness}, {config.steps} steps."
    facts = {
        "model": config.model.path,
        "prompts": config.prompts.url,
        "command": started_by()["command"],
        "host": platform.node(),
        "commit": commit,
        "directory": str(RunPaths(config.run_dir).root.resolve()),
        "weights": str(weights.resolve()) if weights.is_dir() else "",
    }
    return without_credentials(run_note(what, facts, result))


def catch_up(history: History, tracker: Tracker, starts: Sequence[float]) -> list[int]:
    """Tracks what earlier drivers left: one may have been killed before it had reported all of it. Returns the
    steps."""
    steps = history.steps_done()
    for step in steps:
        if not tracker.has(step, STEP_METRIC):
            tracker.metrics(step, history.step_metrics(step, starts))
    first = None
    for version in history.evaluated_versions():
        needed = first is None or not tracker.has(version, EVALUATION_METRIC)
        evaluation = history.evaluation(version) if needed else None
        if evaluation is not None:
            first = first or evaluation
            tracker.metrics(version, evaluation_metrics(evaluation, first))
    return steps


def conclude(
    config: RunConfig, history: History, tracker: Tracker, status: RunStatus, decode: Decode, ended: str = ""
) -> Summary:
    """Writes what the run came to so far, draws it, and ends the tracking. `ended`: what ended it before its last
    step."""
    paths = RunPaths(config.run_dir)
    summary = summarise_run(config, history)
    paths.summary.write_text(summary.to_json(), "utf8")
    if config.tracking.uri is not None and journal_exists(paths.events):
        for step, fraction in overlap_by_step(read_events(paths.events)).items():
            tracker.metrics(step, {"overlap": fraction})
    tracker.artifact(paths.summary, "")
    pairs = response_pairs(history, decode)
    if pairs:
        paths.samples.write_text(samples_table(pairs), "utf8")
        tracker.table(paths.samples)
    if config.tracking.plots and history.steps_done():
        for plot in draw(config, history):
            tracker.artifact(plot, "plots")
    if config.tracking.report:
        written = write_report([report_source(config, history, summary)], paths.report)
        tracker.artifact(written, "plots")
    note = _note(config, git_commit(), result_text(status, summary, ended))
    tracker.tags({_ENDED: ended[:400] or status.lower(), _NOTE: note})
    if status == "FINISHED":
        tracker.tags({"stageline.weights": str(paths.weights(config.steps).resolve())})
        if config.tracking.register is not None:
            tracker.model(config.tracking.register, paths.weights(config.steps))
    tracker.close(status)
    return summary


def conclude_despite_error(
    config: RunConfig,
    history: History,
    tracker: Tracker,
    decode: Decode,
    screen: Screen,
    error: BaseException,
) -> None:
    """`conclude` while an error is on its way out, which whatever goes wrong here (the same full disk, say) must not
    replace."""
    status: RunStatus = "FAILED" if isinstance(error, Exception) else "KILLED"
    try:
        conclude(config, history, tracker, status, decode, f"{type(error).__name__}: {error}".removesuffix(": "))
    except Exception as again:
        tracker.close(status)
        text = f"no summary could be made of what there is: {type(again).__name__}: {again}"
        screen.say("warning", text, text=text)


def experiment_page(config: RunConfig) -> str | None:
    """How to look at the run's experiment in MLflow; None where it has none, or none yet."""
    uri = config.tracking.uri
    number = None if uri is None else experiment_id(RunPaths(config.run_dir).mlflow_spool, uri)
    return None if uri is None or number is None else how_to_open(uri, number)


def watch_runs(config: RunConfig) -> Mapping[str, str]:
    """How to look at the run in MLflow, by what a person calls it; empty where it is not tracked."""
    uri = config.tracking.uri
    return {} if uri is None else {"MLflow": experiment_page(config) or how_to_open(uri)}


def summarise_run(config: RunConfig, history: History) -> Summary:
    """`summary.json` from a run's directory."""
    paths = RunPaths(config.run_dir)
    parents = {node.address: node.parents for node in run_nodes(config.graph())}
    steps = [one for one in map(history.step_numbers, history.steps_done()) if one is not None]
    evaluations = history.evaluations()
    best = best_evaluation(evaluations, config.evaluate.select.max_kl)
    events = read_events(paths.events) if journal_exists(paths.events) else ()
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
        where["compare runs"] = watch_runs(config)["MLflow"]
    return where
