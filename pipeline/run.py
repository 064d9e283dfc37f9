"""The driver: one run from config to summary.

    preflight ──► run directory ──► workers ──► flow ◄──► dispatch ◄──► executor ──► summary, plots, MLflow
                                                 │ on a step:    metrics, progress
                                                 │ on a version nobody reads any more: release its weights
                                                 └ on an evaluation: held-out reward

Everything here runs in the driver's process and thread; stages run in workers. May import all of pipeline.
"""

from __future__ import annotations

import importlib
import os
import platform
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.calls import Outcome
from pipeline.cluster import LocalWorkers
from pipeline.config import RunConfig, config_hash, flatten, to_yaml
from pipeline.dispatch import Dispatch
from pipeline.events import EventKind, Journal, read_events
from pipeline.executor import Executor, ExecutorSettings
from pipeline.flow import Flow
from pipeline.graph import Node, run_nodes
from pipeline.history import History
from pipeline.paths import RunPaths
from pipeline.preflight import Preflight, check_run_directory, preflight
from pipeline.progress import Progress
from pipeline.summary import Summary, summarise
from pipeline.tables import ResponsePair, end_of_run
from pipeline.tracking import MlflowTracker, NullTracker, RunStatus, Span, Tracker, how_to_open
from storage.address import Address
from storage.ledger import Ledger
from storage.rollouts import RolloutStore
from storage.weights import WeightBoard

HEADLINE = (("reward/mean", "reward"), ("kl/ref", "KL"), ("staleness/max", "staleness"))
SHOWN_RESPONSES = 3
SOFTWARE = ("stageline", "torch", "megatron-core", "transformers", "dask", "zarr", "mlflow-skinny", "omegaconf")
"""Packages whose versions the summary names."""
CURVES: tuple[tuple[str, tuple[tuple[str, str], ...], float | None], ...] = (
    ("reward", (("reward/mean", "training"),), None),
    ("KL to the reference, nats per response", (("kl/ref", "k1"),), None),
    ("entropy of the policy, nats", (("policy/entropy_start", "entropy"),), None),
    ("explained variance of the critic", (("value/explained_variance", "critic"),), 1.0),
    ("clipped fraction", (("policy/clipfrac", "policy"), ("value/clipfrac", "critic")), None),
    ("mismatch of log-probs, mean |difference|", (("mismatch/mean_abs_all", "trainer - sampler"),), 0.0),
    ("staleness, versions", (("staleness/mean", "mean"), ("staleness/max", "max")), None),
    ("effective sample size of the weights w", (("ess/fraction", "fraction"),), 1.0),
    ("seconds", (("time/step_s", "step"), ("time/generate_s", "generate"), ("time/update_policy_s", "update policy")), None),
)
"""The learning curves: (title, metrics and their labels, a value worth a dashed line)."""


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves: its numbers and where things are."""

    summary: Summary
    paths: RunPaths


def open_history(config: RunConfig) -> History:
    """The ledger and store of a run's directory."""
    paths = RunPaths(config.run_dir)
    ledger = Ledger(str(paths.ledger))
    store = RolloutStore(str(paths.root), ledger, config.layouts())
    return History(config.graph(), ledger, store, config.rollout.rows)


def run(config: RunConfig, console: Console, *, resume: bool = False) -> RunResult:
    """Runs (or continues) a run to its last step.

    Raises:
        ConfigError: something that cannot work; nothing was started.
        StageFailed: a stage raised, or workers were lost too often.
        KeyboardInterrupt: Ctrl-C or SIGTERM; what is committed stays, and `resume` goes on from there.
    """
    check_run_directory(config, resume=resume)
    checked = preflight(config)
    paths = RunPaths(config.run_dir)
    for directory in (paths.rendezvous, paths.plots):
        directory.mkdir(exist_ok=True)
    paths.config.write_text(to_yaml(config), "utf8")
    checked.prompts.save(paths.prompts)
    history = open_history(config)
    history.store.recover()
    first_step = len(history.steps_done())
    with _interruptible(), LocalWorkers(config) as workers:
        links = _links(config, workers)
        progress = Progress(
            config.name, config.steps, links, console=console, first_step=first_step, headline=HEADLINE
        )
        tracker = _tracker(config, paths, links)
        status: RunStatus = "KILLED"
        try:
            with progress, Journal(paths.events, progress.event) as journal:
                journal.now(EventKind.RUN_STARTED, detail="resume" if resume else "start")
                _Driver(config, paths, history, workers, journal, progress, tracker).run()
                journal.now(EventKind.RUN_FINISHED)
            status = "FINISHED"
        except Exception:
            status = "FAILED"
            raise
        finally:
            result = _conclude(config, paths, history, tracker, status)
    pairs = response_pairs(config, history, checked)
    console.print(end_of_run(result, pairs, _results(config, paths)))
    return RunResult(result, paths)


class _Driver:
    """Owns the executor and the published weights of a run."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        history: History,
        workers: LocalWorkers,
        journal: Journal,
        progress: Progress,
        tracker: Tracker,
    ) -> None:
        self._history = history
        self._progress = progress
        self._tracker = tracker
        self._board = WeightBoard(paths.board(config.cluster.weights_dir))
        self._boxes: dict[int, list[tuple[Node, Outcome]]] = {}
        self._gang_of = {role: gang.name for gang in config.gangs() for role in gang.roles}
        dispatch = Dispatch(config.gangs())
        settings = ExecutorSettings(
            runtime="pipeline.runtime:StageRuntime",
            config_yaml=to_yaml(config),
            rendezvous_dir=paths.rendezvous,
            start_timeout_s=config.cluster.start_timeout_s,
            deadline_s=config.cluster.deadline_s,
            attempts=config.cluster.attempts,
        )
        self._executor = Executor(workers.client, config.gangs(), dispatch, journal, settings, self._done)
        self._flow = Flow(
            config.graph(),
            dispatch,
            committed=[commit.address for commit in history.ledger.list()],
            published=self._board.available(),
            on_step=self._step_over,
            on_unread=lambda version: self._board.release(version),
        )

    def run(self) -> None:
        try:
            self._executor.start()
            self._flow.advance()
            self._executor.run(lambda: self._flow.finished)
        finally:
            self._executor.close()
            self._board.close()

    def _done(self, node: Node, outcome: Outcome) -> None:
        self._boxes.setdefault(node.priority[0], []).append((node, outcome))
        address = node.address
        if address.stage in ("update_policy", "update_value"):
            other = "update_value" if address.stage == "update_policy" else "update_policy"
            if self._history.ledger.find(Address(other, address.step)) is not None:
                metrics = self._history.step_metrics(address.step)
                self._tracker.metrics(address.step, metrics)
                self._progress.step(address.step, metrics)
        elif address.stage == "evaluate_score":
            evaluation = self._history.evaluation(address.step)
            if evaluation is not None:
                self._tracker.metrics(address.step, {"eval/reward_mean": evaluation.mean})
                self._progress.evaluation(address.step, evaluation.mean)
        self._flow.done(node)

    def _step_over(self, step: int, nodes: list[Node]) -> None:
        """Every node of a step is done: its trace goes out, its results are let go."""
        self._executor.release([node.address for node in nodes])
        spans = [
            Span(
                name=str(node.address),
                stage=node.stage,
                start_s=outcome.started,
                end_s=outcome.finished,
                gang=self._gang_of[node.role],
                worker=outcome.worker,
                attributes={"step": node.address.step, "shard": node.address.shard, "version": node.version},
            )
            for node, outcome in self._boxes.pop(step, [])
        ]
        self._tracker.trace(step, spans)


# ---- around it ----------------------------------------------------------------------------------------------------


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM (Slurm's, before a time limit) interrupts like Ctrl-C."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _links(config: RunConfig, workers: LocalWorkers) -> dict[str, str]:
    links = {}
    if workers.dashboard is not None:
        links["Dask dashboard"] = workers.dashboard
    if config.tracking.uri is not None:
        links["MLflow"] = how_to_open(config.tracking.uri)
    return links


def _tracker(config: RunConfig, paths: RunPaths, links: dict[str, str]) -> Tracker:
    if config.tracking.uri is None:
        return NullTracker()
    tags = {
        "git_commit": git_commit(),
        "host": platform.node(),
        "dashboard": links.get("Dask dashboard", ""),
        "config_hash": config_hash(config),
        "run_dir": str(paths.root.resolve()),
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


def git_commit() -> str:
    """The commit of the code that runs, with "+changes" if the tree differs from it; empty outside a repository."""
    here = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        answer = subprocess.run(
            ["git", "-C", str(here), *arguments], capture_output=True, text=True, check=False, env={**os.environ}
        )
        return answer.stdout.strip() if answer.returncode == 0 else ""

    commit = git("rev-parse", "HEAD")
    return commit + ("+changes" if commit and git("status", "--porcelain", "--untracked-files=no") else "")


def _conclude(
    config: RunConfig, paths: RunPaths, history: History, tracker: Tracker, status: RunStatus
) -> Summary:
    """Writes what the run came to so far, draws it, and ends the tracking."""
    summary = summarise_run(config, paths, history)
    paths.summary.write_text(summary.to_json(), "utf8")
    tracker.artifact(paths.summary, "")
    if config.tracking.plots and history.steps_done():
        for plot in draw(config, paths, history):
            tracker.artifact(plot, "plots")
    tracker.close(status)
    return summary


def summarise_run(config: RunConfig, paths: RunPaths, history: History) -> Summary:
    """`summary.json` from a run's directory."""
    parents = {node.address: node.parents for node in run_nodes(config.graph())}
    steps = [history.step_numbers(step) for step in history.steps_done()]
    software = {package: version(package) for package in SOFTWARE} | {"python": platform.python_version()}
    return summarise(read_events(paths.events), steps, history.evaluations(), parents, software)


def draw(config: RunConfig, paths: RunPaths, history: History) -> list[Path]:
    """The learning curves and the stage timeline, as PNG files in the run's directory."""
    plots: Any = importlib.import_module("pipeline.plots")  # matplotlib takes a second to import: not before the end
    curves, timeline = paths.plots / "curves.png", paths.plots / "timeline.png"
    metrics = {step: history.step_metrics(step) for step in history.steps_done()}
    held_out = [(evaluation.version, evaluation.mean) for evaluation in history.evaluations()]
    panels = [plots.Panel(title, lines, reference) for title, lines, reference in CURVES]
    plots.plot_curves(metrics, panels, held_out, curves, config.name)
    plots.plot_timeline(read_events(paths.events), timeline, config.name)
    return [curves, timeline]


def response_pairs(config: RunConfig, history: History, checked: Preflight) -> list[ResponsePair]:
    """A few held-out prompts with the responses of the first and the last evaluated version."""
    evaluations = history.evaluations()
    if len(evaluations) < 2:
        return []
    (rows, scores), (rows_after, scores_after) = (history.evaluated(e.version) for e in (evaluations[0], evaluations[-1]))
    decode = checked.tokenizer.decode

    def response(rollout: Any, row: int) -> str:
        start = int(rollout.prompt_lengths[row])
        return decode(rollout.tokens[row, start : start + int(rollout.response_lengths[row])].tolist())

    return [
        ResponsePair(
            prompt=decode(rows.tokens[row, : rows.prompt_lengths[row]].tolist()),
            before=response(rows, row),
            before_score=float(scores.scores[row]),
            after=response(rows_after, row),
            after_score=float(scores_after.scores[row]),
        )
        for row in range(min(SHOWN_RESPONSES, rows.num_rows))
    ]


def _results(config: RunConfig, paths: RunPaths) -> dict[str, Path | str]:
    where: dict[str, Path | str] = {"summary": paths.summary}
    if config.tracking.plots:
        where |= {"learning curves": paths.plots / "curves.png", "timeline": paths.plots / "timeline.png"}
    where["weights"] = paths.weights(config.steps)
    where["rollouts"] = paths.rollouts
    if config.tracking.uri is not None:
        where["compare runs"] = how_to_open(config.tracking.uri)
    return where


