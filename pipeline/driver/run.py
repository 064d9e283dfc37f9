"""The driver: one run from config to summary.

    prepare    preflight, run directory, identity, repairs
       ▼
    start      board of weights, workers, journal, displays
       ▼
    drive      flow ◄──► dispatch ◄──► executor ◄──► workers
       │        │ a step is trained and published: metrics, progress
       │        │ an evaluation is complete:       held-out reward
       ▼        └ no open node reads a version: release its weights
    conclude   summary, samples, plots, report, MLflow

Everything here runs in the driver's process and thread. Stages run in workers. `session` has the lock, the signals and
the worker processes; `results` has the summary, the report and the tracking.
"""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass

from rich.console import Console

from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import check_run, check_run_directory
from pipeline.config.run import RunConfig
from pipeline.config.stored import KEY
from pipeline.driver.alarms import Alarms
from pipeline.driver.cluster import Cluster, begin_forkserver
from pipeline.driver.context import ExecutorEvents, ExecutorSettings, WorkerKey
from pipeline.driver.executor import Executor
from pipeline.driver.integrity import UnreadVersions, check_recomputed, clean_up_after
from pipeline.driver.preparation import NumericsWatch, PreparedRun, prepare
from pipeline.driver.results import (
    conclude_despite_error,
    conclude_run,
    experiment_page,
    open_tracker,
    report_missed_metrics,
    report_second_error,
    result_paths,
    track_prompts,
)
from pipeline.driver.retention import LedgerCompactor, Retention, is_complete
from pipeline.driver.run_view import (
    current_gang_views,
    first_and_latest_means,
    first_driver_start_s,
    open_progress,
    open_run_page,
    watch_links,
)
from pipeline.driver.session import (
    TerminatedEarly,
    handle_signals,
    hold_driver_lock,
    published_weights,
    refuse_unwritable_directory,
    start_cluster,
)
from pipeline.driver.tracked import SystemMetrics, step_spans, trace_previews
from pipeline.errors import StageFailed, StoredWrongly, WorkersMissing
from pipeline.graph.display import ObservedDispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node, weight_readers
from pipeline.observe.evaluations import Evaluation
from pipeline.observe.graph_view import ordered_gang_names
from pipeline.observe.history import History, canary_alarm_text, evaluation_metrics
from pipeline.observe.incidents import WorkerLosses
from pipeline.observe.journal import Event, EventKind, Journal, read_run_starts
from pipeline.observe.live import Progress, Screen
from pipeline.observe.node_events import NodeEvents
from pipeline.observe.provenance import dashboard_tags, driver_origin
from pipeline.observe.rows import choose_pairs, response_pairs
from pipeline.observe.summary import Summary
from pipeline.observe.tables import end_of_run_text
from pipeline.observe.tracking import Tracker
from pipeline.workers.messages import Outcome
from stages.prompts import last_questions
from storage.address import Address
from storage.errors import StoreError, StoreRefused
from storage.rollouts import Decode
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
    immediate_signals: Collection[signal.Signals] = (),
    json_lines: bool = False,
    callbacks: Collection[Callable[[int, Mapping[str, float]], None]] = (),
) -> RunResult:
    """Run (or continue) a run to its last step.

    Args:
        from_checkpoint: with `resume`, first archive what was committed after the newest checkpoint, and compute it
            again.
        immediate_signals: signals that end this call at once with TerminatedEarly. Pass them in a job that will be
            started again and then continues the run. If any are passed, no summary is written after such a signal or
            after WorkersMissing.
        json_lines: show progress as lines of JSON, for a program that reads them.
        callbacks: called with (step, metrics) when a step's updates and publication are committed, and with (version,
            metrics) when a version's evaluation is complete.

    Raises:
        ConfigError: the config cannot work, and nothing was started. Or a worker was refused because of its numerics or
            its host, and the run cannot go on without this worker.
        StageFailed: a stage raised, workers were lost too often or did not start in time (WorkersMissing), or stored
            data was found damaged.
        StoreError: the stored data is inconsistent; nothing was started.
        AppendFailed: the journal or the tracking spool could not be written.
        StoreRefused: the file system refuses access to the stored data.
        OSError: another file could not be written.
        KeyboardInterrupt: Ctrl-C, SIGTERM or SIGHUP. Commits stay, and `resume` continues from them.
        TerminatedEarly: like KeyboardInterrupt, but without a summary.
    """
    paths, screen = RunPaths(config.run_dir), Screen(console, json_lines)
    checked = check_run(config, resume=resume)
    num_prompts = len(checked.prompts.train), len(checked.prompts.held_out)
    with refuse_unwritable_directory(config):
        paths.root.mkdir(parents=True, exist_ok=True)
    with hold_driver_lock(paths), handle_signals(immediate_signals), _freeze_garbage_collection():
        check_run_directory(config, resume=resume)  # another driver may have run since the first check
        if config.cluster.kind == "local" and not resume:  # a resumed run may have nothing left to compute
            begin_forkserver(config)  # the forkserver imports torch while this process prepares the run
        with refuse_unwritable_directory(config):
            ready = prepare(config, checked, resume=resume, from_checkpoint=from_checkpoint)
        this = Run(
            config=config,
            prepared=ready,
            screen=screen,
            tracker=open_tracker(config),
            decode=checked.tokenizer.decode,
            is_resumed=resume,
            continuing_errors=(TerminatedEarly, WorkersMissing) if immediate_signals else (TerminatedEarly,),
            callbacks=callbacks,
        )
        for change in ready.changed:
            kept = "; the learning rates stay constant, as they were" if change.startswith("steps=") else ""
            screen.print_event("changed", text := f"resumed with {change}{kept}", text=text)
        with _detach_if_continued(this):
            track_prompts(config, this.tracker, ready.identity.prompts, *num_prompts)
            with _conclude_on_error(this), _start_run(this) as started:
                if started is not None:
                    with closing(_Driver(started)) as driver:
                        driver.run()
            summary = conclude_run(config, this.history, this.tracker, "FINISHED", this.decode)
    _print_results(this, summary)
    return RunResult(summary, paths)


@dataclass(frozen=True)
class Run:
    """The parts of a prepared run. They exist before the workers start and after the workers end."""

    config: RunConfig
    prepared: PreparedRun
    screen: Screen
    tracker: Tracker
    decode: Decode
    is_resumed: bool
    continuing_errors: tuple[type[BaseException], ...]
    """Exceptions after which another job continues the run, so that this job writes no summary."""
    callbacks: Collection[Callable[[int, Mapping[str, float]], None]] = ()

    @property
    def history(self) -> History:
        return self.prepared.history


@dataclass(frozen=True)
class StartedRun:
    """The objects that exist while the workers of a run exist: the cluster, the journal, the progress display and
    others. The field `run` has the objects that exist before and after that too."""

    run: Run
    board: WeightBoard | None
    """Board of published weights. None if workers are attached, because all boards are then on the workers' hosts."""
    cluster: Cluster
    journal: Journal
    progress: Progress
    numerics: NumericsWatch
    node_events: NodeEvents
    """Receives every event of the journal."""
    tracked_steps: frozenset[int]
    """Steps whose metrics the tracker already has."""


@contextmanager
def _freeze_garbage_collection() -> Iterator[None]:
    """Exclude the objects that exist now from garbage collection until the block ends. Tokenizer and prompts live that
    long, and each collection that visits them stalls the loop by 0.2 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _detach_if_continued(run: Run) -> Iterator[None]:
    """Pass every error on. If another job continues the run, tracking is left open for it. A StoreError during the run
    means damaged data, and becomes StoredWrongly."""
    try:
        yield
    except run.continuing_errors as error:
        with report_second_error(error, run.screen, "the tracking could not be left"):
            run.tracker.detach()
        raise
    except StoreRefused:  # its text already says what to do
        raise
    except StoreError as error:
        raise StoredWrongly(str(error)) from error


@contextmanager
def _conclude_on_error(run: Run) -> Iterator[None]:
    """Clean up when the block ends (`clean_up_after`). If the run fails or is interrupted, also write the summary and
    close tracking, unless another job continues the run."""
    try:
        with clean_up_after(run.history):
            yield
    except run.continuing_errors:
        raise
    except BaseException as error:
        conclude_despite_error(run.config, run.history, run.tracker, run.decode, run.screen, error)
        raise


@contextmanager
def _start_run(run: Run) -> Iterator[StartedRun | None]:
    """Start the workers, the journal and the displays, and end them after the block. Yield None if nothing is left to
    compute."""
    config, ready, history = run.config, run.prepared, run.history
    paths = RunPaths(config.run_dir)
    tracked = report_missed_metrics(history, run.tracker, read_run_starts(paths.events))
    if is_complete(config.graph(), history.ledger, ready.repairs.unneeded_outputs):
        for warning in ready.warnings:
            run.screen.print_event("warning", f"WARNING: {warning}", text=warning)
        with published_weights(config, history.ledger):
            pass  # removes weights that a driver left in memory when it died at the run's end
        text = f"complete: {paths.root} has all {config.steps} steps, and nothing was left to compute"
        run.screen.print_event("complete", text, text=text)
        yield None
        return
    with published_weights(config, history.ledger) as board, start_cluster(config) as workers:
        if workers.dashboard is not None:
            run.tracker.set_tags(dashboard_tags(workers.dashboard, os.environ))
        progress = open_progress(config, run.screen, watch_links(config, workers), len(tracked))
        seen = NodeEvents(WorkerLosses(ordered_gang_names(config.gangs())))

        def heard(event: Event) -> None:
            progress.on_event(event)
            seen.apply_event(event)

        with progress, Journal(paths.events, heard) as journal:
            for version, mean in first_and_latest_means(history):
                progress.on_evaluation(version, mean)
            begun = ["resume" if run.is_resumed else "start", f"ppo.proximal={config.ppo.proximal}"]
            begun += [*_critic_notes(config), *ready.changed]
            journal.append_now(EventKind.RUN_STARTED, detail=", ".join(begun), **driver_origin())
            for warning in ready.warnings:
                journal.append_now(EventKind.WARNED, detail=warning)
            numerics = NumericsWatch(config, ready.identity, journal, run.tracker.set_tags)
            yield StartedRun(run, board, workers, journal, progress, numerics, seen, frozenset(tracked))
            journal.append_now(EventKind.RUN_FINISHED)


def _print_results(run: Run, summary: Summary) -> None:
    paths = result_paths(run.config, summary)
    if run.screen.json_lines:
        run.screen.print_event(
            "done", "", summary=asdict(summary), paths={label: str(path) for label, path in paths.items()}
        )
    else:
        pairs = choose_pairs(
            response_pairs(run.history, run.decode, last_questions(RunPaths(run.config.run_dir).prompts))
        )
        run.screen.console.print(end_of_run_text(summary, pairs, paths), soft_wrap=True)


def _executor_settings(config: RunConfig) -> ExecutorSettings:
    paths = RunPaths(config.run_dir)
    return ExecutorSettings(
        scores_early=config.scores_early,
        cluster=config.cluster,
        start_timeout_s=config.start_timeout_s,
        paths=paths,
        ledger_url=config.stored.ledger_url,
        config_yaml=to_yaml(config),
        boards={gang.name: str(paths.board(config.weights_dir(gang.name))) for gang in config.gangs()},
    )


def _critic_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes for the journal if the run has no critic."""
    if not config.has_critic:
        yield f"ppo.advantage={config.ppo.advantage} (no critic)"
        unused = sorted(config.placement.gangs.keys() - {gang.name for gang in config.gangs()})
        yield from (f"gang {name} is not started" for name in unused)


class _Driver(ExecutorEvents):
    """Owns the executor of a run, and reports finished steps and evaluations to people."""

    def __init__(self, started: StartedRun) -> None:
        self._run, self._started = started.run, started
        config = self._config = started.run.config
        history = self._history = started.run.history
        self._has_shown_link = config.tracking.uri is None or experiment_page(config) is not None
        """True if no link to MLflow's page remains to be shown: the run is not tracked, the link was known at the
        start, or it has been shown since."""
        repairs = self._repairs = started.run.prepared.repairs
        board = started.board
        self._unread_versions = None if board is None else UnreadVersions(board)
        self._journal, self._progress, self._tracker = started.journal, started.progress, started.run.tracker
        self._start_s = time.time()
        self._tracked_steps = set(started.tracked_steps)
        self._evaluated: set[int] = set()  # versions whose evaluation was reported
        self._first_evaluation: Evaluation | None = None
        self._outcomes: dict[Address, Outcome] = {}
        """Outcomes of the open steps' nodes."""
        self._graph = config.graph()
        dispatch = self._dispatch = ObservedDispatch(config.gangs(), config.placement.device_sharing)
        self._alarms = Alarms(config, dispatch, self._journal, self._progress, self._tracker)
        self._executor = Executor(started.cluster.client, dispatch, self._journal, _executor_settings(config), self)
        self._compactor = LedgerCompactor(self._graph, history.ledger, repairs.unneeded_outputs)
        self._retention = Retention(config, history, self._warn)
        self._flow = Flow(
            self._graph,
            dispatch,
            first_step=self._compactor.first_step,
            committed={*history.ledger.addresses(from_step=self._compactor.first_step), *repairs.unneeded_outputs},
            published=[] if board is None else board.available(),
            sampled_versions=repairs.sampled_versions,
            on_step=self._on_step_over,
            on_unread=self._on_version_unread,
        )
        self._view = open_run_page(config, started.cluster, dispatch, self._flow, history, board, started.node_events)
        self._system = SystemMetrics(
            started.cluster.scheduler, self._tracker, first_driver_start_s(config, self._start_s)
        )

    def run(self) -> None:
        self._executor.start()
        self._flow.advance()
        self._executor.run(lambda: self._flow.is_finished)
        self._refuse_to_share()
        self._retention.delete_at_end()

    def close(self) -> None:
        self._executor.close()
        self._retention.close()

    # ---- Events of the executor ------------------------------------------------------------------------------------

    def on_worker_built(self, worker: WorkerKey, numerics: Mapping[str, str]) -> None:
        self._started.numerics.on_worker_built(worker, numerics)

    def on_tick(self, now: float) -> None:
        """Check the alarms and update the displays, about once a second."""
        self._alarms.check_time(now)
        self._system.sample_if_due()
        if not self._has_shown_link and (address := experiment_page(self._config)) is not None:
            self._has_shown_link = True
            self._progress.show_link("MLflow", address)
        if self._progress.has_live_panel:
            self._progress.show_gangs(
                current_gang_views(self._config, self._dispatch, self._flow, self._started.node_events)
            )
        if self._view is not None:
            self._view.update()

    def on_node_done(self, node: Node, outcome: Outcome) -> None:
        """Report the step, canary or evaluation that a committed node completes, order the transfer of a published
        version, and advance the window."""
        address = node.address
        check_recomputed(self._history, self._repairs, address)
        self._outcomes[address] = outcome
        self._alarms.on_worker_finished(outcome.worker)
        if address.stage in ("update_policy", "update_critic", "publish"):
            self._report_step(address.step - (address.stage == "publish"))
        if address.stage == "publish" and weight_readers(self._graph, node.version):
            self._executor.fetch_weights(node.version)
            if self._config.in_flight:
                self._executor.order_load(node.version)
        elif address.stage == "canary" and outcome.ref is not None:
            self._report_canary(address.step, outcome.ref.metrics)
        elif address.stage in ("evaluate_score", "evaluate_reference"):
            self._report_evaluation(address.step)
        self._flow.on_node_done(node)

    def on_worker_replaced(self) -> None:
        """Clean up after the death of a worker process. Call it when the replacement process is built. Remove the
        versions of the weights that wait only for the dead process's lease. Move the files of its committed outputs
        into place, if the process died before it moved them."""
        if self._unread_versions is not None:
            self._unread_versions.release_unleased()
        self._history.store.recover(discard=False)

    # ---- Reports and releases ------------------------------------------------------------------------------------

    def _report_step(self, step: int) -> None:
        """Report a step's metrics, once, when its updates and its publication are committed. Do nothing for step -1,
        whose publication is that of version 0."""
        if step < 0 or step in self._tracked_steps:
            return
        if not all(map(self._dispatch.is_done, self._history.step_ends(step))):
            return
        known = {address: o.ref for address, o in self._outcomes.items() if o.ref is not None}
        self._tracked_steps.add(step)
        metrics = self._history.read_step_metrics(step, [self._start_s], known)
        lines, lost = self._started.node_events.losses.step_finished(step, metrics)
        self._tracker.log_metrics(step, metrics | lost)
        self._progress.on_step(step, metrics)
        for line in lines:
            self._progress.on_recovery(line)
        self._alarms.check_step(step, metrics)
        self._run_callbacks(step, metrics | lost)

    def _report_evaluation(self, version: int) -> None:
        """Report a version's evaluation, once, when all its shards have scores and reference log-probs."""
        evaluation = None if version in self._evaluated else self._history.read_evaluation(version)
        if evaluation is not None and evaluation.kl is not None:
            self._evaluated.add(version)
            self._first_evaluation = self._first_evaluation or self._history.read_evaluation(0) or evaluation
            metrics = evaluation_metrics(evaluation, self._first_evaluation)
            self._tracker.log_metrics(version, metrics)
            self._progress.on_evaluation(version, evaluation.mean)
            self._run_callbacks(version, metrics)

    def _run_callbacks(self, step: int, metrics: Mapping[str, float]) -> None:
        for callback in self._run.callbacks:
            callback(step, dict(metrics))

    def _report_canary(self, version: int, metrics: Mapping[str, float]) -> None:
        """Report how far engine and trainer differ at a version. The metrics are normally logged by `_report_step`,
        because MLflow lists metrics in the order of their first logging; here only after an alarm, or if that step is
        logged or missing."""
        text = canary_alarm_text(version, metrics)
        if text is not None or version in self._tracked_steps or version == self._config.steps:
            self._tracker.log_metrics(version, metrics)
        if text is not None:
            self._journal.append_now(EventKind.ALARM, stage="canary", step=version, detail=text)
            self._progress.print_alarm(text)

    def _on_step_over(self, step: int, nodes: list[Node]) -> None:
        """Compact the ledger, begin to delete old data, release the step's results, and track the step's trace, since
        all `nodes` of the step are done. Raises StageFailed first if another driver has claimed the run."""
        self._refuse_to_share()
        self._compactor.on_step_finished(step, [node.address for node in nodes])
        self._retention.on_steps_finished(self._compactor.first_open_step)
        self._executor.release([node.address for node in nodes])
        ran = [(node, self._outcomes.pop(node.address)) for node in nodes if node.address in self._outcomes]
        if ran:  # empty if an earlier driver ran them all
            gang_of = {role: gang.name for gang in self._config.gangs() for role in gang.roles}
            asked, answered = trace_previews(self._config.name, step, ran, self._history)
            self._tracker.log_trace(step, step_spans(ran, gang_of), asked, answered)

    def _refuse_to_share(self) -> None:
        """Raise StageFailed if another driver has claimed the run's stored data."""
        later = self._run.prepared.claim.later()
        if later is not None:
            raise StageFailed(f"{later} continues this run ({KEY}={self._config.storage.url}): this one ends")

    def _on_version_unread(self, version: int) -> None:
        """Release a version of the weights, here and on other hosts, since all its readers are done."""
        if self._unread_versions is not None:
            self._unread_versions.release(version)
        self._executor.release_weights(version)

    def _warn(self, text: str) -> None:
        self._journal.append_now(EventKind.WARNED, detail=text)
