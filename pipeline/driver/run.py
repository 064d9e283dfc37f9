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
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass

from rich.console import Console

from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_run, check_run_directory
from pipeline.config.run import RunConfig
from pipeline.driver.alarms import Alarms
from pipeline.driver.closing import OpenBooks, all_committed
from pipeline.driver.cluster import Cluster
from pipeline.driver.context import ExecutorSettings, StoredWrongly, WorkersMissing
from pipeline.driver.executor import Executor
from pipeline.driver.identity import NumericsWatch
from pipeline.driver.integrity import UnreadVersions, books_closed, check_made_again
from pipeline.driver.lock import only_driver
from pipeline.driver.preparation import PreparedRun, prepare
from pipeline.driver.results import (
    catch_up,
    conclude,
    conclude_despite_error,
    experiment_page,
    open_tracker,
    track_prompts,
    where_results_are,
)
from pipeline.driver.retention import Retention
from pipeline.driver.session import (
    EndedEarly,
    interruptible,
    published_weights,
    worker_processes,
    writable,
)
from pipeline.driver.step_trace import previews, step_spans
from pipeline.driver.system_metrics import SystemMetrics
from pipeline.driver.watching import at_work, baseline, first_start, links, open_progress, page
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node, weight_readers
from pipeline.observe.evaluations import Evaluation
from pipeline.observe.history import alarm_text, evaluation_metrics
from pipeline.observe.journal import Event, EventKind, Journal, run_starts
from pipeline.observe.live import Progress, Screen
from pipeline.observe.losses import Losses
from pipeline.observe.node_events import NodeEvents
from pipeline.observe.recorded_view import ordered
from pipeline.observe.responses import chosen, response_pairs
from pipeline.observe.revision import started_by
from pipeline.observe.slurm_job import dashboard_tags
from pipeline.observe.summary import Summary
from pipeline.observe.tables import end_of_run
from pipeline.observe.tracking import Tracker
from pipeline.workers.messages import Outcome
from storage.address import Address
from storage.errors import StoreError, StoreRefused
from storage.vocabulary import Decode
from storage.weights import WeightBoard


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
    json_lines: bool = False,
) -> RunResult:
    """Runs (or continues) a run to its last step. `from_checkpoint`: of one that is continued, what was committed after
    its newest checkpoint is archived first, and made anew. `at_once`: signals that end it with EndedEarly, in a job
    that is started again: neither then nor where workers are missing is time spent on what the run came to so far.
    `json_lines`: what is shown is for a program.

    Raises:
        ConfigError: something that cannot work; nothing was started.
        StageFailed: a stage raised, or workers were lost too often; or the driver found what is stored damaged.
        StoreError: what is stored does not fit together; nothing was started.
        AppendFailed: the journal or the spool of the tracking could not be written; likewise OSError for other files.
        KeyboardInterrupt: Ctrl-C or SIGTERM; what is committed stays, and `resume` goes on from there.
        EndedEarly: likewise, and no summary was made of it.
    """
    paths = RunPaths(config.run_dir)
    checked = check_run(config, resume=resume)
    decode: Decode = checked.tokenizer.decode
    with writable(config):
        paths.root.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # tokenizer and prompts live to the end: looking through them again and again stalls the loop by 0.2 s
    with only_driver(paths), interruptible(at_once):
        check_run_directory(config, resume=resume)  # another driver may have come and gone meanwhile
        with writable(config):
            ready = prepare(config, checked, resume=resume, from_checkpoint=from_checkpoint)
        prompts = len(checked.prompts.train), len(checked.prompts.held_out)
        screen = Screen(console, json_lines)
        goes_on = (EndedEarly, WorkersMissing) if at_once else (EndedEarly,)
        summary = _run_and_conclude(config, ready, screen, decode, prompts, goes_on, resume=resume)
    where = where_results_are(config, summary)
    if json_lines:
        screen.say("done", "", summary=asdict(summary), paths={label: str(path) for label, path in where.items()})
    else:
        console.print(end_of_run(summary, chosen(response_pairs(ready.history, decode)), where))
    return RunResult(summary, paths)


def _run_and_conclude(
    config: RunConfig,
    ready: PreparedRun,
    screen: Screen,
    decode: Decode,
    prompts: tuple[int, int],
    goes_on: tuple[type[BaseException], ...],
    *,
    resume: bool,
) -> Summary:
    """Whatever ends the run, its summary and its tracking say how far it came; unless it `goes_on` elsewhere, and there
    is no time for it. `prompts`: how many are trained on, and held out."""
    tracker = open_tracker(config)
    try:
        track_prompts(config, tracker, ready.identity.prompts, *prompts)
        return _run_to_conclusion(config, ready, screen, tracker, decode, goes_on, resume=resume)
    except goes_on:
        tracker.leave()
        raise
    except StoreRefused:  # says already what is to be done
        raise
    except StoreError as error:
        raise StoredWrongly(str(error)) from error


def _run_to_conclusion(
    config: RunConfig,
    ready: PreparedRun,
    screen: Screen,
    tracker: Tracker,
    decode: Decode,
    goes_on: tuple[type[BaseException], ...],
    *,
    resume: bool,
) -> Summary:
    history = ready.history
    try:
        with books_closed(history):
            _run(config, ready, screen, tracker, resume=resume)
    except goes_on:
        raise
    except BaseException as error:
        conclude_despite_error(config, history, tracker, decode, screen, error)
        raise
    return conclude(config, history, tracker, "FINISHED", decode)


def _run(config: RunConfig, ready: PreparedRun, screen: Screen, tracker: Tracker, *, resume: bool) -> None:
    """Starts the workers, runs the graph, and ends the workers."""
    paths, history = RunPaths(config.run_dir), ready.history
    tracked = catch_up(history, tracker, run_starts(paths.events))
    if all_committed(config.graph(), history.ledger, ready.mended.outlived):
        for warning in ready.warnings:
            screen.say("warning", f"WARNING: {warning}", text=warning)
        with published_weights(config, history.ledger):
            return  # a driver that died at the run's end has left them in memory
    with published_weights(config, history.ledger) as board, worker_processes(config) as workers:
        if workers.dashboard is not None:
            tracker.tags(dashboard_tags(workers.dashboard, os.environ))
        progress = open_progress(config, screen, links(config, workers), len(tracked))
        seen, losses = NodeEvents(ordered(config.gangs())), Losses()

        def heard(event: Event) -> None:
            progress.event(event)
            seen.take(event)
            losses.take(event)

        with progress, Journal(paths.events, heard) as journal:
            for version, mean in baseline(history):
                progress.evaluation(version, mean)
            begun = ["resume" if resume else "start", f"ppo.proximal={config.ppo.proximal}"]
            begun += [*_without_critic(config), *ready.changed]
            journal.now(EventKind.RUN_STARTED, detail=", ".join(begun), **started_by())
            for warning in ready.warnings:
                journal.now(EventKind.WARNED, detail=warning)
            numerics = NumericsWatch(config, ready.identity, journal, tracker.tags)
            _Driver(config, ready, board, workers, numerics, journal, progress, tracker, tracked, seen, losses).run()
            journal.now(EventKind.RUN_FINISHED)


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
        losses: Losses,
    ) -> None:
        """`tracked`: steps whose metrics the tracker has. `seen` and `losses` take every event of the journal."""
        history = self._history = ready.history
        self._config = config
        self._linked = config.tracking.uri is None or experiment_page(config) is not None  # its address was shown
        self._mended = ready.mended
        self._unread = None if board is None else UnreadVersions(board)
        self._journal = journal
        self._progress = progress
        self._seen, self._losses = seen, losses
        self._tracker = tracker
        self._began = time.time()
        self._tracked = set(tracked)
        self._evaluated: set[int] = set()  # versions whose evaluation was reported
        self._first_evaluation: Evaluation | None = None
        self._outcomes: dict[Address, Outcome] = {}
        """Of the open steps' nodes."""
        self._graph = config.graph()
        self._mid_row = config.engine.update == "inflight"
        self._gang_of = {role: gang.name for gang in config.gangs() for role in gang.roles}
        dispatch = self._dispatch = Dispatch(config.gangs(), config.placement.turns)
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
        self._books = OpenBooks(self._graph, history.ledger, ready.mended.outlived)
        self._retention = Retention(config, history, self._warn)
        self._flow = Flow(
            self._graph,
            dispatch,
            first_step=self._books.first_step,
            committed={*history.ledger.addresses(from_step=self._books.first_step), *ready.mended.outlived},
            published=[] if board is None else board.available(),
            made_with=ready.mended.made_with,
            on_step=self._step_over,
            on_unread=self._version_unread,
        )
        self._view = page(config, workers, dispatch, self._flow, history, board, seen)
        self._system = SystemMetrics(workers.scheduler, tracker, first_start(config, self._began))

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
        self._system.look()
        if not self._linked and (address := experiment_page(self._config)) is not None:
            self._linked = True
            self._progress.link("MLflow", address)
        if self._progress.live:
            self._progress.gangs(at_work(self._config, self._dispatch, self._flow, self._seen))
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
        lines, lost = self._losses.over(step, metrics)
        self._tracker.metrics(step, metrics | lost)
        self._progress.step(step, metrics)
        for line in lines:
            self._progress.recovered(line)
        self._alarms.step(step, metrics)

    def _report_evaluation(self, version: int) -> None:
        """Once, when the last shard of a version's evaluation is scored and the reference has looked at it."""
        evaluation = None if version in self._evaluated else self._history.evaluation(version)
        if evaluation is not None and evaluation.kl is not None:
            self._evaluated.add(version)
            self._first_evaluation = self._first_evaluation or self._history.evaluation(0) or evaluation
            self._tracker.metrics(version, evaluation_metrics(evaluation, self._first_evaluation))
            self._progress.evaluation(version, evaluation.mean)

    def _report_canary(self, version: int, metrics: Mapping[str, float]) -> None:
        """Engine and trainer were compared at a version; loudly where they differ. What says that all is well goes out
        with the version's step, if that is to come: MLflow's pages put first the metric that they were first given."""
        text = alarm_text(version, metrics)
        if text is not None or version in self._tracked or version == self._config.steps:
            self._tracker.metrics(version, metrics)
        if text is not None:
            self._journal.now(EventKind.ALARM, stage="canary", step=version, detail=text)
            self._progress.alarm(text)

    def _step_over(self, step: int, nodes: list[Node]) -> None:
        """Every node of a step is done: its trace goes out, its results are let go, its books may be closed."""
        self._books.over(step, [node.address for node in nodes])
        self._retention.over_until(self._books.over_until)
        self._executor.release([node.address for node in nodes])
        ran = [(node, self._outcomes.pop(node.address)) for node in nodes if node.address in self._outcomes]
        if ran:  # else an earlier driver ran them all
            asked, answered = previews(self._config.name, step, ran, self._history)
            self._tracker.trace(step, step_spans(ran, self._gang_of), asked, answered)

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
