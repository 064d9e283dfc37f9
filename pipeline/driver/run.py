"""The driver: one run from config to summary.

    preflight ──► run directory ──► workers ──► flow ◄──► dispatch ◄──► executor ──► workers end ──► summary, plots,
                                                 │ on a step:    metrics, progress                     MLflow
                                                 │ on a version that no open node reads: release its weights
                                                 └ on an evaluation: held-out reward

Everything here runs in the driver's process and thread. Stages run in workers. `session` has the lock, the signals and
the worker processes; `results` has the summary, the report and the tracking.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console

from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_run, check_run_directory
from pipeline.config.run import RunConfig
from pipeline.driver.alarms import Alarms
from pipeline.driver.cluster import Cluster
from pipeline.driver.context import ExecutorSettings
from pipeline.driver.errors import StoredWrongly, WorkersMissing
from pipeline.driver.executor import Executor
from pipeline.driver.identity import NumericsWatch
from pipeline.driver.integrity import UnreadVersions, check_made_again, finalised
from pipeline.driver.preparation import PreparedRun, prepare
from pipeline.driver.results import (
    catch_up,
    conclude,
    conclude_despite_error,
    experiment_page,
    noting,
    open_tracker,
    track_prompts,
    where_results_are,
)
from pipeline.driver.retention import LedgerCompactor, Retention, all_committed
from pipeline.driver.run_view import at_work, baseline, first_start, links, open_progress, page
from pipeline.driver.session import (
    EndedEarly,
    interruptible,
    only_driver,
    published_weights,
    worker_processes,
    writable,
)
from pipeline.driver.tracked import SystemMetrics, previews, step_spans
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node, weight_readers
from pipeline.observe.evaluations import Evaluation
from pipeline.observe.graph_view import ordered
from pipeline.observe.history import alarm_text, evaluation_metrics
from pipeline.observe.journal import Event, EventKind, Journal, run_starts
from pipeline.observe.live import Progress, Screen
from pipeline.observe.node_events import NodeEvents, WorkerLosses
from pipeline.observe.provenance import dashboard_tags, started_by
from pipeline.observe.rows import chosen, response_pairs
from pipeline.observe.summary import Summary
from pipeline.observe.tables import end_of_run
from pipeline.observe.tracking import Tracker
from pipeline.workers.messages import Outcome
from storage.address import Address
from storage.errors import StoreError, StoreRefused
from storage.rollout_root import Decode
from storage.weights import WeightBoard


@dataclass(frozen=True)
class RunResult:
    """The summary of a finished run, and the paths of its files."""

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
    """Run (or continue) a run to its last step.

    Args:
        from_checkpoint: with `resume`, first archive what was committed after the newest checkpoint, and compute it
            again.
        at_once: signals that end the run with EndedEarly, for a job that is started again. With them, no summary is
            made after such a signal or if workers are missing.
        json_lines: show progress for a program.

    Raises:
        ConfigError: the config cannot work; nothing was started.
        StageFailed: a stage raised, workers were lost too often, or stored data was found damaged.
        StoreError: the stored data is inconsistent; nothing was started.
        AppendFailed: the journal or the tracking spool could not be written. For other files: OSError.
        KeyboardInterrupt: Ctrl-C or SIGTERM. Commits stay, and `resume` continues from them.
        EndedEarly: like KeyboardInterrupt, but without a summary.
    """
    paths = RunPaths(config.run_dir)
    checked = check_run(config, resume=resume)
    decode: Decode = checked.tokenizer.decode
    with writable(config):
        paths.root.mkdir(parents=True, exist_ok=True)
    with only_driver(paths), interruptible(at_once), _not_collected():
        check_run_directory(config, resume=resume)  # another driver may have run since the first check
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


@contextmanager
def _not_collected() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection: tokenizer and prompts live to the end of the run, and
    each pass over them stalls the loop by 0.2 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
    """Run; then write the summary and close tracking however the run ends, unless another job will continue it
    (`goes_on`: the exceptions that say so). `prompts`: numbers of training and held-out prompts."""
    tracker = open_tracker(config)
    try:
        track_prompts(config, tracker, ready.identity.prompts, *prompts)
        return _run_to_conclusion(config, ready, screen, tracker, decode, goes_on, resume=resume)
    except goes_on as error:
        with noting(error, screen, "the tracking could not be left"):
            tracker.leave()
        raise
    except StoreRefused:  # its text already says what to do
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
        with finalised(history):
            _run(config, ready, screen, tracker, resume=resume)
    except goes_on:
        raise
    except BaseException as error:
        conclude_despite_error(config, history, tracker, decode, screen, error)
        raise
    return conclude(config, history, tracker, "FINISHED", decode)


def _run(config: RunConfig, ready: PreparedRun, screen: Screen, tracker: Tracker, *, resume: bool) -> None:
    """Start the workers, run the graph, and end the workers."""
    paths, history = RunPaths(config.run_dir), ready.history
    tracked = catch_up(history, tracker, run_starts(paths.events))
    if all_committed(config.graph(), history.ledger, ready.repairs.expendable):
        for warning in ready.warnings:
            screen.say("warning", f"WARNING: {warning}", text=warning)
        with published_weights(config, history.ledger):
            return  # remove weights left in memory by a driver that died at the run's end
    with published_weights(config, history.ledger) as board, worker_processes(config) as workers:
        if workers.dashboard is not None:
            tracker.tags(dashboard_tags(workers.dashboard, os.environ))
        progress = open_progress(config, screen, links(config, workers), len(tracked))
        seen, losses = NodeEvents(ordered(config.gangs())), WorkerLosses()

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
        migrate_rows_below=config.cluster.migrate_rows_below,
        boards={gang.name: str(paths.board(config.weights_dir(gang.name))) for gang in config.gangs()},
        boards_elsewhere=attached,
    )


def _without_critic(config: RunConfig) -> Iterator[str]:
    """Yield notes for the journal if the run has no critic."""
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
        losses: WorkerLosses,
    ) -> None:
        """`tracked`: steps whose metrics the tracker already has. `seen` and `losses` receive every journal event."""
        history = self._history = ready.history
        self._config = config
        self._linked = config.tracking.uri is None or experiment_page(config) is not None  # no address left to show
        self._repairs = ready.repairs
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
        """Outcomes of the open steps' nodes."""
        self._graph = config.graph()
        self._mid_row = config.engine.update == "inflight"
        self._gang_of = {role: gang.name for gang in config.gangs() for role in gang.roles}
        dispatch = self._dispatch = Dispatch(config.gangs(), config.placement.device_sharing)
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
        self._compactor = LedgerCompactor(self._graph, history.ledger, ready.repairs.expendable)
        self._retention = Retention(config, history, self._warn)
        self._flow = Flow(
            self._graph,
            dispatch,
            first_step=self._compactor.first_step,
            committed={*history.ledger.addresses(from_step=self._compactor.first_step), *ready.repairs.expendable},
            published=[] if board is None else board.available(),
            made_with=ready.repairs.made_with,
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
        """Check the alarms and update the displays, about once a second."""
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
        """Report what a committed node completes, and advance the window."""
        address = node.address
        check_made_again(self._history, self._repairs, address)
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
        """Report a step's metrics, once, when its updates and its publication are committed."""
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
        """Report a version's evaluation, once, when all its shards have scores and reference log-probs."""
        evaluation = None if version in self._evaluated else self._history.evaluation(version)
        if evaluation is not None and evaluation.kl is not None:
            self._evaluated.add(version)
            self._first_evaluation = self._first_evaluation or self._history.evaluation(0) or evaluation
            self._tracker.metrics(version, evaluation_metrics(evaluation, self._first_evaluation))
            self._progress.evaluation(version, evaluation.mean)

    def _report_canary(self, version: int, metrics: Mapping[str, float]) -> None:
        """Report how far engine and trainer differ at a version, with an alarm if they differ too much. Without an
        alarm the metrics wait for the version's step, if that is still to come, because MLflow's pages list first the
        metric that was logged first."""
        text = alarm_text(version, metrics)
        if text is not None or version in self._tracked or version == self._config.steps:
            self._tracker.metrics(version, metrics)
        if text is not None:
            self._journal.now(EventKind.ALARM, stage="canary", step=version, detail=text)
            self._progress.alarm(text)

    def _step_over(self, step: int, nodes: list[Node]) -> None:
        """Track the trace of a step whose nodes are all done, release its results, and compact its ledger records."""
        self._compactor.over(step, [node.address for node in nodes])
        self._retention.over_until(self._compactor.over_until)
        self._executor.release([node.address for node in nodes])
        ran = [(node, self._outcomes.pop(node.address)) for node in nodes if node.address in self._outcomes]
        if ran:  # empty if an earlier driver ran them all
            asked, answered = previews(self._config.name, step, ran, self._history)
            self._tracker.trace(step, step_spans(ran, self._gang_of), asked, answered)

    def _version_unread(self, version: int) -> None:
        """Release a version of the weights, since all its readers are done."""
        if self._unread is not None:
            self._unread.release(version)
        self._executor.release_weights(version)

    def _warn(self, text: str) -> None:
        self._journal.now(EventKind.WARNED, detail=text)

    def _worker_replaced(self) -> None:
        """Release versions that a dead worker still held, and move what it had committed into place. Its replacement is
        up."""
        if self._unread is not None:
            self._unread.retry()
        self._history.store.recover(discard=False)
