"""The driver: one run from config to summary.

    preflight ──► run directory ──► workers ──► flow ◄──► dispatch ◄──► executor ──► workers end ──► summary, plots,
                                                 │ on a step:    metrics, progress                     MLflow
                                                 │ on a version nobody reads any more: release its weights
                                                 └ on an evaluation: held-out reward

Everything here runs in the driver's process and thread; stages run in workers. May import all of pipeline.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import json
import logging
import os
import platform
import signal
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config.paths import RunPaths
from pipeline.config.preflight import Preflight, check_run_directory, preflight
from pipeline.config.schema import ConfigError, RunConfig, config_hash, flatten, to_yaml
from pipeline.driver.cluster import LocalWorkers
from pipeline.driver.context import ExecutorSettings
from pipeline.driver.executor import Executor
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node, run_nodes, weight_readers
from pipeline.observe.history import History
from pipeline.observe.journal import EventKind, Journal, read_events
from pipeline.observe.live import Progress
from pipeline.observe.revision import git_commit
from pipeline.observe.summary import Summary, summarise
from pipeline.observe.tables import ResponsePair, end_of_run
from pipeline.observe.tracking import MlflowTracker, NullTracker, RunStatus, Span, Tracker, how_to_open
from pipeline.workers.messages import Outcome
from stages.models.protocol import Role
from stages.publish import is_published
from storage import files
from storage.address import Address
from storage.ledger import Ledger
from storage.rollouts import RolloutStore
from storage.weights import WeightBoard

HEADLINE = (("reward/mean", "reward"), ("kl/ref", "KL"), ("staleness/max", "staleness"))
EVALUATED = "eval/reward_mean"
SHOWN_RESPONSES = 3
SOFTWARE = ("stageline", "torch", "megatron-core", "transformers", "dask", "zarr", "mlflow-skinny", "omegaconf")
"""Packages whose versions the summary names."""
CURVES: tuple[tuple[str, tuple[tuple[str, str], ...], float | None], ...] = (
    ("reward", (("reward/mean", "training"),), None),
    ("KL to the reference, nats per response", (("kl/ref", "k1"),), None),
    ("entropy of the policy, nats", (("policy/entropy_start", "entropy"),), None),
    ("explained variance of the critic", (("critic/explained_variance", "critic"),), 1.0),
    ("clipped fraction", (("policy/clipfrac", "policy"), ("critic/clipfrac", "critic")), None),
    ("mismatch of log-probs, mean |difference|", (("mismatch/mean_abs_all", "trainer - sampler"),), 0.0),
    ("staleness, versions", (("staleness/mean", "mean"), ("staleness/max", "max")), None),
    ("effective sample size of the weights w", (("ess/fraction", "fraction"),), 1.0),
    (
        "seconds",
        (("time/step_s", "step"), ("time/generate_s", "generate"), ("time/update_policy_s", "update policy")),
        None,
    ),
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
    paths = RunPaths(config.run_dir)
    check_run_directory(config, resume=resume)
    checked = preflight(config, paths.prompts if resume else None)
    paths.root.mkdir(parents=True, exist_ok=True)
    gc.freeze()  # tokenizer and prompts live to the end: looking through them again and again stalls the loop by 0.2 s
    with _only_driver(paths), _interruptible():
        history = _prepare(config, paths, checked, resume=resume)
        summary = _run_and_conclude(config, paths, history, console, checked, resume=resume)
    shown = response_pairs(config, history, checked)[:SHOWN_RESPONSES]
    console.print(end_of_run(summary, shown, _results(config, paths)))
    return RunResult(summary, paths)


def _prepare(config: RunConfig, paths: RunPaths, checked: Preflight, *, resume: bool) -> History:
    """Fills the run's directory with what workers read, and tidies up after an earlier driver."""
    for directory in (paths.rendezvous, paths.plots):
        directory.mkdir(exist_ok=True)
    if not (resume and paths.prompts.exists()):
        checked.prompts.save(paths.prompts)
    files.write(files.open_root(str(paths.root)), paths.config.name, to_yaml(config).encode())
    history = open_history(config)
    history.store.recover()
    return history


def _run_and_conclude(
    config: RunConfig, paths: RunPaths, history: History, console: Console, checked: Preflight, *, resume: bool
) -> Summary:
    tracker = _tracker(config, paths)
    status: RunStatus = "KILLED"
    try:
        _run(config, paths, history, console, tracker, resume=resume)
        status = "FINISHED"
    except Exception:
        status = "FAILED"
        raise
    finally:
        if status != "FINISHED":
            _conclude_despite(config, paths, history, tracker, status, checked, console)
    return _conclude(config, paths, history, tracker, status, checked)


def _run(
    config: RunConfig, paths: RunPaths, history: History, console: Console, tracker: Tracker, *, resume: bool
) -> None:
    """Starts the workers, runs the graph, and ends the workers."""
    tracked = _catch_up(history, tracker, _starts(paths))
    if all(history.ledger.find(node.address) is not None for node in run_nodes(config.graph())):
        return
    with _published(config, paths, history) as board, _workers(config) as workers:
        links = _links(config, workers)
        if workers.dashboard is not None:
            tracker.tags({"dashboard": workers.dashboard})
        progress = Progress(
            config.name, config.steps, links, console=console, first_step=len(tracked), headline=HEADLINE
        )
        with progress, Journal(paths.events, progress.event) as journal:
            journal.now(EventKind.RUN_STARTED, detail="resume" if resume else "start")
            _Driver(config, paths, history, board, workers, journal, progress, tracker, tracked).run()
            journal.now(EventKind.RUN_FINISHED)


class _Driver:
    """Owns the executor of a run."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        history: History,
        board: WeightBoard,
        workers: LocalWorkers,
        journal: Journal,
        progress: Progress,
        tracker: Tracker,
        tracked: Iterable[int],
    ) -> None:
        """`tracked`: steps whose metrics the tracker has."""
        self._history = history
        self._progress = progress
        self._tracker = tracker
        self._began = time.time()
        self._tracked = set(tracked)
        self._outcomes: dict[Address, Outcome] = {}
        """Of the open steps' nodes."""
        self._graph = config.graph()
        self._gang_of = {role: gang.name for gang in config.gangs() for role in gang.roles}
        dispatch = Dispatch(config.gangs())
        settings = ExecutorSettings(
            runtime="pipeline.workers.runtime:StageRuntime",
            config_yaml=to_yaml(config),
            rendezvous_dir=paths.rendezvous,
            start_timeout_s=config.cluster.start_timeout_s,
            deadline_s=config.cluster.deadline_s,
            attempts=config.cluster.attempts,
            ledger=str(paths.ledger),
            log_dir=paths.logs,
            move_rows_below=config.cluster.move_rows_below,
            boards={gang.name: str(paths.board(config.weights_dir(gang.name))) for gang in config.gangs()},
        )
        self._executor = Executor(workers.client, config.gangs(), dispatch, journal, settings, self._done)

        def release(version: int) -> None:
            board.release(version)
            self._executor.release_weights(version)

        self._flow = Flow(
            self._graph,
            dispatch,
            committed=[commit.address for commit in history.ledger.list()],
            published=board.available(),
            on_step=self._step_over,
            on_unread=release,
        )

    def run(self) -> None:
        try:
            self._executor.start()
            self._flow.advance()
            self._executor.run(lambda: self._flow.finished)
        finally:
            self._executor.close()

    def _done(self, node: Node, outcome: Outcome) -> None:
        address = node.address
        self._outcomes[address] = outcome
        if address.stage in ("update_policy", "update_critic", "publish"):
            step = address.step - (address.stage == "publish")
            if step not in self._tracked and self._history.step_over(step):
                self._tracked.add(step)
                metrics = self._history.step_metrics(step, [self._began])
                self._tracker.metrics(step, metrics)
                self._progress.step(step, metrics)
        if address.stage == "publish" and weight_readers(self._graph, node.version):
            self._executor.fetch_weights(node.version)
        elif address.stage == "evaluate_score":
            evaluation = self._history.evaluation(address.step)
            if evaluation is not None:
                self._tracker.metrics(address.step, {EVALUATED: evaluation.mean})
                self._progress.evaluation(address.step, evaluation.mean)
        self._flow.done(node)

    def _step_over(self, step: int, nodes: list[Node]) -> None:
        """Every node of a step is done: its trace goes out, its results are let go."""
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


def _catch_up(history: History, tracker: Tracker, starts: Sequence[float]) -> list[int]:
    """Tracks what earlier drivers left: one may have been killed before it had told all of it. Returns the steps."""
    steps = history.steps_done()
    for step in steps:
        tracker.metrics(step, history.step_metrics(step, starts))
    for evaluation in history.evaluations():
        tracker.metrics(evaluation.version, {EVALUATED: evaluation.mean})
    return steps


def _starts(paths: RunPaths) -> list[float]:
    """When each driver of this run started."""
    if not paths.events.exists():
        return []
    return [event.t for event in read_events(paths.events) if event.kind is EventKind.RUN_STARTED]


# ---- around it ----------------------------------------------------------------------------------------------------


@contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM (Slurm's, before a time limit) interrupts like Ctrl-C; and Ctrl-C does so also where a shell started this
    process in the background, with SIGINT ignored."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _only_driver(paths: RunPaths) -> Iterator[None]:
    """Keeps a second driver out of the run's directory. The system lets go of the lock when this process ends, however
    it ends."""
    with paths.lock.open("a+") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().strip() or "another process"
            raise ConfigError("name", f"given {paths.root.name!r}; {owner} is running {paths.root} now") from error
        lock.truncate(0)
        lock.write(f"process {os.getpid()} on {platform.node()}")
        lock.flush()
        yield


@contextmanager
def _workers(config: RunConfig) -> Iterator[LocalWorkers]:
    """Worker processes that Ctrl-C does not reach: a terminal sends it to the whole process group, but only the driver
    is to answer it, and to end them. They inherit the mask of the thread that starts them."""
    logging.getLogger("distributed").setLevel(logging.ERROR)  # the executor says what is lost, in the run's words
    sys.warnoptions.append("ignore:resource_tracker")  # it cleans up after killed workers; it need not say so
    resource_tracker.ensure_running()  # starting it later would lift the mask
    sys.warnoptions.pop()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with LocalWorkers(config) as workers:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            yield workers
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _published(config: RunConfig, paths: RunPaths, history: History) -> Iterator[WeightBoard]:
    """The board of published weights, which is that of the policy's gang (the driver runs on the host of its rank 0),
    less what is not this run's: a killed run whose directory was removed leaves its weights in memory under the same
    name. In the end all boards of this host go; those of other hosts are removed by their workers."""
    boards = {gang.name: WeightBoard(paths.board(config.weights_dir(gang.name))) for gang in config.gangs()}
    with ExitStack() as stack:
        for board in boards.values():
            stack.enter_context(board)
        board = boards[config.placement.roles[Role.POLICY]]
        board.tidy(lambda manifest: is_published(history.ledger, manifest))
        yield board


def _links(config: RunConfig, workers: LocalWorkers) -> dict[str, str]:
    links = {}
    if workers.dashboard is not None:
        links["Dask dashboard"] = workers.dashboard
    if config.tracking.uri is not None:
        links["MLflow"] = how_to_open(config.tracking.uri)
    return links


def _tracker(config: RunConfig, paths: RunPaths) -> Tracker:
    if config.tracking.uri is None:
        return NullTracker()
    tags = {
        "git_commit": git_commit(),
        "host": platform.node(),
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


def _conclude(
    config: RunConfig, paths: RunPaths, history: History, tracker: Tracker, status: RunStatus, checked: Preflight
) -> Summary:
    """Writes what the run came to so far, draws it, and ends the tracking."""
    summary = summarise_run(config, paths, history)
    paths.summary.write_text(summary.to_json(), "utf8")
    tracker.artifact(paths.summary, "")
    pairs = response_pairs(config, history, checked)
    if pairs:
        paths.samples.write_text(samples_table(pairs), "utf8")
        tracker.artifact(paths.samples, "")
    if config.tracking.plots and history.steps_done():
        for plot in draw(config, paths, history):
            tracker.artifact(plot, "plots")
    tracker.close(status)
    return summary


def _conclude_despite(
    config: RunConfig,
    paths: RunPaths,
    history: History,
    tracker: Tracker,
    status: RunStatus,
    checked: Preflight,
    console: Console,
) -> None:
    """`_conclude` while an error is on its way out, which whatever goes wrong here (the same full disk, say) must not
    replace."""
    try:
        _conclude(config, paths, history, tracker, status, checked)
    except Exception as error:
        tracker.close(status)
        console.print(
            f"no summary could be made of what there is: {type(error).__name__}: {error}",
            markup=False, highlight=False, soft_wrap=True,
        )  # fmt: skip


def summarise_run(config: RunConfig, paths: RunPaths, history: History) -> Summary:
    """`summary.json` from a run's directory."""
    parents = {node.address: node.parents for node in run_nodes(config.graph())}
    steps = [history.step_numbers(step) for step in history.steps_done()]
    events = read_events(paths.events) if paths.events.exists() else ()
    software = {package: _installed(package) for package in SOFTWARE} | {"python": platform.python_version()}
    return summarise(events, steps, history.evaluations(), parents, software)


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"  # stageline itself, where it runs from a checkout


def samples_table(pairs: list[ResponsePair]) -> str:
    """The responses as a table that MLflow shows: pandas' "split" JSON."""
    columns = ("prompt", "before", "before_score", "after", "after_score")
    rows = [[getattr(pair, column) for column in columns] for pair in pairs]
    return json.dumps({"columns": columns, "data": rows}, ensure_ascii=False, indent=1)


def draw(config: RunConfig, paths: RunPaths, history: History) -> list[Path]:
    """The learning curves and the stage timeline, as PNG files in the run's directory."""
    plots: Any = importlib.import_module(
        "pipeline.observe.plots"
    )  # matplotlib takes a second to import: not before the end
    curves, timeline = paths.plots / "curves.png", paths.plots / "timeline.png"
    starts = _starts(paths)
    metrics = {step: history.step_metrics(step, starts) for step in history.steps_done()}
    held_out = [(evaluation.version, evaluation.mean) for evaluation in history.evaluations()]
    panels = [plots.Panel(title, lines, reference) for title, lines, reference in CURVES]
    plots.plot_curves(metrics, panels, held_out, curves, config.name)
    plots.plot_timeline(read_events(paths.events), timeline, config.name)
    return [curves, timeline]


def response_pairs(config: RunConfig, history: History, checked: Preflight) -> list[ResponsePair]:
    """The held-out prompts with the responses of the first and the last evaluated version."""
    evaluations = history.evaluations()
    if len(evaluations) < 2:
        return []
    (rows, scores), (rows_after, scores_after) = (history.evaluated(evaluations[i].version) for i in (0, -1))
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
        for row in range(rows.num_rows)
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
