"""The driver: one run from config to summary.

    preflight ──► run directory ──► workers ──► flow ◄──► dispatch ◄──► executor ──► workers end ──► summary, plots,
                                                 │ on a step:    metrics, progress                     MLflow
                                                 │ on a version nobody reads any more: release its weights
                                                 └ on an evaluation: held-out reward

Everything here runs in the driver's process and thread; stages run in workers. What is around a run is in `session`,
what it comes to in `results`. May import all of pipeline below the command line.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console

from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_run_directory, preflight
from pipeline.config.run import RunConfig
from pipeline.driver.alarms import Alarms
from pipeline.driver.closing import OpenBooks, all_committed
from pipeline.driver.cluster import Cluster
from pipeline.driver.context import ExecutorSettings
from pipeline.driver.executor import Executor
from pipeline.driver.identity import NumericsWatch
from pipeline.driver.integrity import UnreadVersions, books_closed, check_made_again
from pipeline.driver.preparation import PreparedRun, prepare
from pipeline.driver.results import conclude, conclude_despite_error, open_tracker, where_results_are
from pipeline.driver.retention import Retention
from pipeline.driver.run_view import RunView
from pipeline.driver.session import (
    EndedEarly,
    interruptible,
    only_driver,
    published_weights,
    worker_processes,
    writable,
)
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node, weight_readers
from pipeline.observe.history import EVALUATION_METRIC, STEP_METRIC, History, alarm_text, evaluation_metrics
from pipeline.observe.journal import Event, EventKind, Journal, run_starts
from pipeline.observe.live import Progress
from pipeline.observe.node_events import NodeEvents
from pipeline.observe.responses import Decode, response_pairs
from pipeline.observe.slurm_job import slurm_job, tunnel
from pipeline.observe.summary import Summary
from pipeline.observe.tables import end_of_run
from pipeline.observe.tracking import RunStatus, Span, Tracker, how_to_open
from pipeline.workers.messages import Outcome
from storage.address import Address
from storage.weights import WeightBoard

SHOWN_RESPONSES = 3


@dataclass(frozen=True)
class RunResult:
    """What a finished run leaves: its numbers and where things are."""

    summary: Summary
    paths: RunPaths


def run(
    config: RunConfig,
    console: Console,
    *,
    resume: bool = False,
    from_checkpoint: bool = False,
    at_once: Collection[signal.Signals] = (),
) -> RunResult:
    """Runs (or continues) a run to its last step. `from_checkpoint`: of one that is continued, what was committed after
    its newest checkpoint is archived first, and made anew. `at_once`: signals that end it with EndedEarly.

    Raises:
        ConfigError: something that cannot work; nothing was started.
        StageFailed: a stage raised, or workers were lost too often.
        AppendFailed: the journal or the spool of the tracking could not be written; likewise OSError for other files.
        KeyboardInterrupt: Ctrl-C or SIGTERM; what is committed stays, and `resume` goes on from there.
        EndedEarly: likewise, and no summary was made of it.
    """
    paths = RunPaths(config.run_dir)
    check_run_directory(config, resume=resume)
    checked = preflight(config, paths.prompts if resume else None)
    decode: Decode = checked.tokenizer.decode
    with writable(config):
        paths.root.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # tokenizer and prompts live to the end: looking through them again and again stalls the loop by 0.2 s
    with only_driver(paths), interruptible(at_once):
        with writable(config):
            ready = prepare(config, checked, resume=resume, from_checkpoint=from_checkpoint)
        summary = _run_and_conclude(config, ready, console, decode, resume=resume)
    shown = response_pairs(ready.history, decode)[:SHOWN_RESPONSES]
    console.print(end_of_run(summary, shown, where_results_are(config, summary)))
    return RunResult(summary, paths)


def _run_and_conclude(
    config: RunConfig, ready: PreparedRun, console: Console, decode: Decode, *, resume: bool
) -> Summary:
    """Whatever ends the run, its summary and its tracking say how far it came; unless there is no time for it."""
    tracker = open_tracker(config)
    try:
        return _run_to_conclusion(config, ready, console, tracker, decode, resume=resume)
    except EndedEarly:
        tracker.leave()
        raise


def _run_to_conclusion(
    config: RunConfig, ready: PreparedRun, console: Console, tracker: Tracker, decode: Decode, *, resume: bool
) -> Summary:
    history = ready.history
    try:
        with books_closed(history):
            _run(config, ready, console, tracker, resume=resume)
    except EndedEarly:
        raise
    except BaseException as error:
        status: RunStatus = "FAILED" if isinstance(error, Exception) else "KILLED"
        conclude_despite_error(config, history, tracker, status, decode, console)
        raise
    return conclude(config, history, tracker, "FINISHED", decode)


def _run(config: RunConfig, ready: PreparedRun, console: Console, tracker: Tracker, *, resume: bool) -> None:
    """Starts the workers, runs the graph, and ends the workers."""
    paths, history = RunPaths(config.run_dir), ready.history
    tracked = _catch_up(history, tracker, run_starts(paths.events))
    if all_committed(config.graph(), history.ledger):
        for warning in ready.warnings:
            console.print(f"WARNING: {warning}", markup=False, highlight=False, soft_wrap=True)
        with published_weights(config, history.ledger):
            return  # a driver that died at the run's end has left them in memory
    with published_weights(config, history.ledger) as board, worker_processes(config) as workers:
        if workers.dashboard is not None:
            tracker.tags({"dashboard": workers.dashboard})
        progress = Progress(
            config.name, config.steps, _links(config, workers), console=console, first_step=len(tracked)
        )
        seen = NodeEvents()

        def heard(event: Event) -> None:
            progress.event(event)
            seen.take(event)

        with progress, Journal(paths.events, heard) as journal:
            begun = ["resume" if resume else "start", f"ppo.proximal={config.ppo.proximal}"]
            begun += [*_without_critic(config), *ready.changed]
            journal.now(EventKind.RUN_STARTED, detail=", ".join(begun))
            for warning in ready.warnings:
                journal.now(EventKind.WARNED, detail=warning)
            numerics = NumericsWatch(config, ready.identity, journal, tracker.tags)
            _Driver(config, ready, board, workers, numerics, journal, progress, tracker, tracked, seen).run()
            journal.now(EventKind.RUN_FINISHED)


def _catch_up(history: History, tracker: Tracker, starts: Sequence[float]) -> list[int]:
    """Tracks what earlier drivers left: one may have been killed before it had reported all of it. Returns the
    steps."""
    steps = history.steps_done()
    for step in steps:
        if not tracker.has(step, STEP_METRIC):
            tracker.metrics(step, history.step_metrics(step, starts))
    for version in history.evaluated_versions():
        evaluation = None if tracker.has(version, EVALUATION_METRIC) else history.evaluation(version)
        if evaluation is not None:
            tracker.metrics(version, evaluation_metrics(evaluation))
    return steps


def _links(config: RunConfig, workers: Cluster) -> dict[str, str]:
    """Where a person can watch the run."""
    links = {}
    if workers.dashboard is not None:
        links["Graph"] = f"{workers.dashboard.removesuffix('/status')}/stageline"
        links["Dask dashboard"] = workers.dashboard
        job = slurm_job(os.environ)
        if job is not None:
            links["to see it from elsewhere"] = tunnel(workers.dashboard, job.submitted_from)
    if config.tracking.uri is not None:
        links["MLflow"] = how_to_open(config.tracking.uri)
    return links


def _page(
    config: RunConfig,
    workers: Cluster,
    dispatch: Dispatch,
    flow: Flow,
    history: History,
    board: WeightBoard | None,
    seen: NodeEvents,
) -> RunView | None:
    """The run's page on Dask's dashboard, where there is one."""
    if workers.dashboard is None:
        return None
    root = workers.dashboard.removesuffix("/status")
    links = {"Task stream": workers.dashboard, "Dask's graph": f"{root}/graph", "Groups": f"{root}/groups"}
    if config.tracking.uri is not None:
        links["MLflow"] = how_to_open(config.tracking.uri)
    open_page = importlib.import_module("pipeline.driver.dashboard").open_page  # loads Bokeh
    view: RunView = open_page(config, workers.scheduler, dispatch, flow, history.ledger, board, seen, links)
    return view


def _executor_settings(config: RunConfig) -> ExecutorSettings:
    paths, attached = RunPaths(config.run_dir), config.cluster.kind == "attached"
    return ExecutorSettings(
        runtime="pipeline.workers.runtime:StageRuntime",
        config_yaml=to_yaml(config),
        start_timeout_s=config.cluster.start_timeout_s,
        arrival_timeout_s=config.cluster.arrival_timeout_s if attached else None,
        deadline_s=config.cluster.deadline_s,
        attempts=config.cluster.attempts,
        ledger=str(paths.ledger),
        run_dir=paths.root,
        log_dir=paths.logs,
        move_rows_below=config.cluster.move_rows_below,
        boards={gang.name: str(paths.board(config.weights_dir(gang.name))) for gang in config.gangs()},
        boards_elsewhere=attached,
    )


def _without_critic(config: RunConfig) -> Iterator[str]:
    """What a person should know of a run that has none."""
    if not config.has_critic:
        yield f"ppo.advantage={config.ppo.advantage} (no critic)"
        unused = sorted(config.placement.gangs.keys() - {gang.name for gang in config.gangs()})
        yield from (f"gang {name} is not started" for name in unused)


class _Driver:
    """Owns the executor of a run."""

    def __init__(
        self,
        config: RunConfig,
        ready: PreparedRun,
        board: WeightBoard | None,
        workers: Cluster,
        numerics: NumericsWatch,
        journal: Journal,
        progress: Progress,
        tracker: Tracker,
        tracked: Iterable[int],
        seen: NodeEvents,
    ) -> None:
        """`tracked`: steps whose metrics the tracker has. `seen` takes every event of the journal."""
        history = self._history = ready.history
        self._mended = ready.mended
        self._unread = None if board is None else UnreadVersions(board)
        self._journal = journal
        self._progress = progress
        self._tracker = tracker
        self._began = time.time()
        self._tracked = set(tracked)
        self._evaluated: set[int] = set()
        """Versions whose evaluation was reported."""
        self._outcomes: dict[Address, Outcome] = {}
        """Of the open steps' nodes."""
        self._graph = config.graph()
        self._mid_row = config.engine.update == "inflight"
        self._gang_of = {role: gang.name for gang in config.gangs() for role in gang.roles}
        dispatch = Dispatch(config.gangs())
        self._alarms = Alarms(config, dispatch, journal, progress, tracker)
        self._executor = Executor(
            workers.client,
            config.gangs(),
            dispatch,
            journal,
            _executor_settings(config),
            self._node_done,
            self._worker_replaced,
            numerics.built,
            self._look,
        )
        self._books = OpenBooks(self._graph, history.ledger)
        self._retention = Retention(config, history, self._warn)
        self._flow = Flow(
            self._graph,
            dispatch,
            first_step=self._books.first_step,
            committed=history.ledger.addresses(from_step=self._books.first_step),
            published=[] if board is None else board.available(),
            made_with=ready.mended.made_with,
            on_step=self._step_over,
            on_unread=self._version_unread,
        )
        self._view = _page(config, workers, dispatch, self._flow, history, board, seen)

    def run(self) -> None:
        try:
            self._executor.start()
            self._flow.advance()
            self._executor.run(lambda: self._flow.finished)
            self._retention.finish()
        finally:
            self._executor.close()
            self._retention.close()

    def _look(self, now: float) -> None:
        """About once a second."""
        self._alarms.look(now)
        if self._view is not None:
            self._view.look()

    def _node_done(self, node: Node, outcome: Outcome) -> None:
        """A node has its commit: what it completes is reported, and the window may advance."""
        address = node.address
        check_made_again(self._history, self._mended, address)
        self._outcomes[address] = outcome
        self._alarms.finished(outcome.worker)
        if address.stage in ("update_policy", "update_critic", "publish"):
            self._report_step(address.step - (address.stage == "publish"))
        if address.stage == "publish" and weight_readers(self._graph, node.version):
            self._executor.fetch_weights(node.version)
            if self._mid_row:
                self._executor.take_weights(node.version)
        elif address.stage == "canary" and outcome.ref is not None:
            self._report_canary(address.step, outcome.ref.metrics)
        elif address.stage in ("evaluate_score", "evaluate_reference"):
            self._report_evaluation(address.step)
        self._flow.done(node)

    def _report_step(self, step: int) -> None:
        """Once, when the updates and the publication of a step are committed."""
        if step in self._tracked:
            return
        known = {address: o.ref for address, o in self._outcomes.items() if o.ref is not None}
        if not self._history.step_over(step, known):
            return
        self._tracked.add(step)
        metrics = self._history.step_metrics(step, [self._began], known)
        self._tracker.metrics(step, metrics)
        self._progress.step(step, metrics)
        self._alarms.step(step, metrics)

    def _report_evaluation(self, version: int) -> None:
        """Once, when the last shard of a version's evaluation is scored and the reference has looked at it."""
        evaluation = None if version in self._evaluated else self._history.evaluation(version)
        if evaluation is not None and evaluation.kl is not None:
            self._evaluated.add(version)
            self._tracker.metrics(version, evaluation_metrics(evaluation))
            self._progress.evaluation(version, evaluation.mean)

    def _report_canary(self, version: int, metrics: Mapping[str, float]) -> None:
        """Engine and trainer were compared at a version; loudly where they differ."""
        self._tracker.metrics(version, metrics)
        text = alarm_text(version, metrics)
        if text is not None:
            self._journal.now(EventKind.ALARM, stage="canary", step=version, detail=text)
            self._progress.alarm(text)

    def _step_over(self, step: int, nodes: list[Node]) -> None:
        """Every node of a step is done: its trace goes out, its results are let go, its books may be closed."""
        self._books.over(step, [node.address for node in nodes])
        self._retention.over_until(self._books.over_until)
        self._executor.release([node.address for node in nodes])
        ran = [(node, self._outcomes.pop(node.address)) for node in nodes if node.address in self._outcomes]
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
            for node, outcome in ran
        ]
        self._tracker.trace(step, spans)

    def _version_unread(self, version: int) -> None:
        """Every reader of a version of the weights is done."""
        if self._unread is not None:
            self._unread.release(version)
        self._executor.release_weights(version)

    def _warn(self, text: str) -> None:
        self._journal.now(EventKind.WARNED, detail=text)

    def _worker_replaced(self) -> None:
        """A process that was lost is dead, and another is up: what it had committed is put in its place, what it read
        may be released."""
        if self._unread is not None:
            self._unread.retry()
        self._history.store.recover(discard=False)
