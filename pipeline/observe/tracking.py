"""Experiment tracking in the driver. The driver appends items to a spool file, and a separate process delivers them to
MLflow (`pipeline/observe/mlflow_writer.py`, the only module that imports mlflow).

    driver loop ── one appended line per call ──► mlflow_spool.jsonl ──► writer process ──► sqlite or server
                                                       │               (delivered offsets: mlflow_spool.state.json)
                                                       └─► one process for each of `tracking.also` (`sinks.py`)

The spool is a queue on disk, so the driver does not wait for MLflow while it logs. If the server is down or the driver
is killed, no item is lost, and no item appears twice in MLflow.

The writer is a process and not a thread because of Python's global interpreter lock. While a writer thread imported
mlflow and logged, it held the lock for up to 146 ms at a time. It used 3.1 s of the driver's CPU time in 7 s. With a
writer process, the lock is held for up to 3 ms at a time, and 0.09 s of the driver's CPU time are used.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from pipeline.observe.journal import LineFile
from pipeline.observe.metric_catalogue import select_tracked
from pipeline.observe.provenance import slurm_job
from storage.redaction import redacted, redacted_text

LOG = logging.getLogger("stageline.tracking")

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

DETACH_TIMEOUT_S = 2.0
"""Maximum number of seconds that `detach` waits for each writer. They suffice if only few items are left."""
ANNOUNCE_S = 2.0
"""If `close` or `deliver` has waited this many seconds for a writer, a warning is logged."""
IMPORT_GRACE_S = 60.0
"""Seconds by which `close` and `deliver` extend the time limit of a writer, because the writer may still be importing
mlflow or creating the database."""
WRITER_ENV = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "WANDB_ERROR_REPORTING": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the writer retries by itself; MLflow's own retries take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Span:
    """One executed node of a PPO step. Spans of different gangs overlap in time."""

    name: str
    stage: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float
    gang: str
    worker: str
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    """Addresses of the node's inputs. The arrays themselves stay in the store."""
    output: str = ""
    """Address of the node's output."""


@dataclass(frozen=True)
class Dataset:
    """Prompts that a run uses for training or for evaluation."""

    name: str
    digest: str
    source: str
    """URL or path from which the prompts were read."""
    context: Literal["training", "evaluation"]
    num_rows: int


@dataclass(frozen=True)
class Delivery:
    """The state of the delivery to MLflow when the writer process ended."""

    run_id: str | None
    """Id of the MLflow run. None if MLflow's store was never reached, or if the writer was killed or died."""
    num_undelivered: int
    """Number of items that are not delivered. If the writer was killed or died, this is the number of all items in the
    spool."""


class Tracker:
    """The driver's interface to experiment tracking. Only `close` and `detach` wait for the tracking server. This base
    class logs nothing (`tracking.uri: null`)."""

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Log metrics of a step. If a metric of this step was logged before, the new value is ignored. So a resumed run
        may log a step again."""

    def has_metric(self, step: int, name: str) -> bool:
        """Return True if this metric of this step is logged already, or if the tracker logs nothing."""
        return True

    def log_trace(self, step: int, spans: Sequence[Span], request: str = "", response: str = "") -> None:
        """Log the nodes of a step as one trace. A root span `step N` contains a span for each gang, which contains the
        spans of its nodes.

        `request` and `response` are short texts about the step. MLflow's list of traces shows them as request and
        response."""

    def log_dataset(self, dataset: Dataset) -> None:
        """Log a dataset of the run. Logging it again changes nothing."""

    def log_table(self, local_path: Path) -> None:
        """Log a file as a table that can be compared between runs. The file contains pandas' "split" JSON. Logging the
        table again replaces it."""

    def log_model(self, name: str, source: Path) -> None:
        """Log exported weights as a new version of a registered model. Logging them again changes nothing."""

    def log_artifact(self, local_path: Path, artifact_dir: str) -> None:
        """Log a file as an artifact of the run. The file is read when it is delivered, not during the call."""

    def set_tags(self, values: Mapping[str, str]) -> None:
        """Set tags of the run. A new value replaces an earlier one."""

    def close(self, status: RunStatus) -> None:
        """Deliver the remaining items within a bounded time and end the run with `status`."""

    def detach(self) -> None:
        """Stop within seconds without ending the MLflow run. Another process will continue the run and deliver the
        remaining items."""


class _SeenMetrics:
    """The set of (step, metric name) pairs that are in the spool. To save memory, it is stored as one integer per step
    with one bit per name. A run has hundreds of names and tens of thousands of steps."""

    def __init__(self) -> None:
        self._bit: dict[str, int] = {}
        self._seen: dict[int, int] = {}

    def mark_new(self, step: int, names: Iterable[str]) -> list[str]:
        """Return the names that were not seen at this step before, and mark them as seen."""
        before = seen = self._seen.get(step, 0)
        new = []
        for name in names:
            bit = 1 << self._bit.setdefault(name, len(self._bit))
            if not before & bit:
                new.append(name)
                seen |= bit
        self._seen[step] = seen
        return new

    @property
    def names(self) -> Collection[str]:
        """All metric names seen so far."""
        return self._bit.keys()

    def is_seen(self, step: int, name: str) -> bool:
        return name in self._bit and bool(self._seen.get(step, 0) >> self._bit[name] & 1)


class MlflowTracker(Tracker):
    """A tracker that appends items to the run's spool. It owns the spool file and the processes that deliver the items.

    If the spool exists already, the same MLflow run is continued. Used as a context manager, the tracker closes the run
    as FINISHED, as FAILED after an exception, or as KILLED after Ctrl-C.
    """

    def __init__(
        self,
        uri: str,
        experiment: str,
        run_name: str,
        params: Mapping[str, str],
        tags: Mapping[str, str],
        spool_path: Path,
        close_timeout_s: float = 60.0,
        meaningless_metrics: Collection[str] = (),
        tags_if_abandoned: Mapping[str, str] | None = None,
        further_trackers: Iterable[str] = (),
    ) -> None:
        """Open the spool and start the writers.

        Args:
            uri: an MLflow tracking URI (`sqlite:///…` or `http(s)://…`).
            experiment: name of the MLflow experiment.
            run_name: name of the run in MLflow.
            params: the config, flattened.
            tags: tags of the run.
            spool_path: path of the spool in the run's directory.
            close_timeout_s: time limit of each writer after `close`, in seconds. A writer has `IMPORT_GRACE_S` more if
                it is still starting.
            meaningless_metrics: names of metrics that have no meaning under this config. They are not logged.
            tags_if_abandoned: tags to set if the driver ends without closing the run.
            further_trackers: names of the sinks that also get the metrics (`tracking.also`)."""
        self.uri = redacted_text(uri)
        self.spool_path = spool_path
        self._closed = False
        self._off = frozenset(meaningless_metrics)
        self._file = LineFile(spool_path)
        self._metrics_seen = _SeenMetrics()
        self._traces_seen: set[int] = set()
        key = None
        for _, item in read_spool(spool_path):
            if item["kind"] == "metrics":
                self._metrics_seen.mark_new(item["step"], item["values"])
            elif item["kind"] == "trace":
                self._traces_seen.add(item["step"])
            elif item["kind"] == "open":
                key = key or item["key"]
        job = slurm_job(os.environ)
        self._append(
            kind="open",
            key=key or uuid.uuid4().hex,
            experiment=experiment,
            run_name=run_name,
            params=redacted(params),
            tags=redacted(dict(tags) | ({} if job is None else job.tags())),
            if_abandoned=redacted(tags_if_abandoned or {}),
        )
        self._sinks = [_Writer(name, spool_path, close_timeout_s) for name in further_trackers]
        self._writer = _Writer(uri, spool_path, close_timeout_s)

    def log_metrics(self, step: int, values: Mapping[str, float]) -> None:
        tracked = select_tracked(values, self._off, self._metrics_seen.names)
        new = self._metrics_seen.mark_new(step, tracked)
        if new:
            self._append(kind="metrics", step=step, values={name: float(tracked[name]) for name in new})

    def has_metric(self, step: int, name: str) -> bool:
        return self._metrics_seen.is_seen(step, name)

    def log_trace(self, step: int, spans: Sequence[Span], request: str = "", response: str = "") -> None:
        if spans and step not in self._traces_seen:
            self._traces_seen.add(step)
            as_given = [asdict(span) for span in spans]
            self._append(kind="trace", step=step, spans=as_given, asked=request, answered=response)

    def log_dataset(self, dataset: Dataset) -> None:
        profile = json.dumps({"num_rows": dataset.num_rows})
        fields = {name: value for name, value in asdict(dataset).items() if name != "num_rows"}
        self._append(kind="dataset", **fields, profile=profile)

    def log_table(self, local_path: Path) -> None:
        self.log_artifact(local_path, "")
        self.set_tags({"mlflow.loggedArtifacts": json.dumps([{"path": local_path.name, "type": "table"}])})

    def log_model(self, name: str, source: Path) -> None:
        self._append(kind="model", name=name, source=str(source.absolute()))

    def log_artifact(self, local_path: Path, artifact_dir: str) -> None:
        self._append(kind="artifact", path=str(local_path.absolute()), artifact_dir=artifact_dir)

    def set_tags(self, values: Mapping[str, str]) -> None:
        self._append(kind="tags", values=redacted(values))

    def close(self, status: RunStatus) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._append(kind="close", status=status)
        finally:
            self._file.close()
            for sink in self._sinks:
                sink.finish()
            delivery = self._writer.finish()
        if delivery.num_undelivered:
            LOG.warning(
                "MLflow at %s: %d items not delivered; they are kept, and `stageline sync %s` delivers them",
                self.uri, delivery.num_undelivered, self.spool_path.parent,
            )  # fmt: skip

    def detach(self) -> None:
        if not self._closed:
            self._closed = True
            self._file.close()
            for writer in (self._writer, *self._sinks):
                writer.finish(DETACH_TIMEOUT_S)

    def __enter__(self) -> MlflowTracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        killed = kind is not None and not issubclass(kind, Exception)
        self.close("FINISHED" if kind is None else "KILLED" if killed else "FAILED")

    def _append(self, **item: Any) -> None:
        self._file.append(json.dumps({"t": time.time(), **item}, separators=(",", ":")))


def deliver(spool_path: Path, target: str, timeout_s: float = 60.0) -> Delivery:
    """Deliver the items in a run's spool to a tracker: an MLflow store (`target` is its URI) or a tracker of
    `tracking.also` (`target` is its name). Return the state of the delivery.

    - The MLflow store that got the last delivery of this spool gets only the missing items.
    - Any other MLflow store gets the whole run.
    - `tensorboard` gets only the missing items.
    - `wandb` gets the whole run again, in place of what was written before.

    The call lasts at most `timeout_s` seconds, plus `IMPORT_GRACE_S` for the start of the process that delivers the
    items.
    """
    return _Writer(target, spool_path, timeout_s).finish()


def opening_hint(uri: str, experiment: str | None = None) -> str:
    """Return the address to open, or the command to type, to see the runs in MLflow. Secrets in the URI are redacted.

    `experiment` is MLflow's id of the experiment, if known. The address contains `workflowType`. Without it MLflow's
    page shows every experiment as a GenAI experiment, regardless of the experiment's tags."""
    uri = redacted_text(uri)
    page = f"/#/experiments/{experiment}/runs?workflowType=machine_learning" if experiment is not None else ""
    if uri.startswith("http"):
        return f"{uri.rstrip('/')}{page}"
    command = f"mlflow ui --backend-store-uri {uri}"
    return f"{command}, then http://127.0.0.1:5000{page}" if page else command


def sink_hints(names: Iterable[str], run_dir: Path) -> dict[str, str]:
    """Return a dictionary with one entry for each tracker in `names`, the trackers besides MLflow (`tensorboard`,
    `wandb`). The key is the tracker's label. The value is the shell command that shows or uploads the files that were
    written for this tracker."""
    commands = {
        "tensorboard": ("TensorBoard", f"tensorboard --logdir {run_dir / 'tensorboard'}"),
        "wandb": ("Weights & Biases", f"wandb sync {run_dir / 'wandb'}/offline-run-*"),
    }
    return dict(commands[name] for name in names)


class _Writer:
    """A writer process and its two pipes. The process delivers to MLflow or to one of the further sinks.

    stdin            one line with the target: MLflow's URI, which may contain a password, or the sink's name. End of
                     file means that the driver has closed the pipe or died.
    a second pipe    reports of the writer, one JSON object per line. Its descriptor is an argument of the process.
    stdout, stderr   NAME_writer.log, where NAME is `mlflow` or the sink's name. Only this user may read the file,
                     because a library's output may contain secrets.
    """

    def __init__(self, target: str, spool_path: Path, timeout_s: float) -> None:
        is_sink = "://" not in target
        self._target = target if is_sink else f"MLflow at {redacted_text(target)}"
        self._log = spool_path.with_name(f"{target if is_sink else 'mlflow'}_writer.log")
        self._timeout_s = timeout_s
        self._spool_path = spool_path
        self._delivery: Delivery | None = None
        self._cut_off = False
        self._down = False  # True if the writer last reported that the store cannot be reached
        if target.startswith("sqlite:///"):
            Path(target.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        arguments = [sys.executable, "-m", f"pipeline.observe.{'sinks' if is_sink else 'mlflow_writer'}"]
        ours, theirs = os.pipe()
        arguments += [str(spool_path.absolute()), str(timeout_s), str(theirs)]
        self._reports_from = os.fdopen(ours)
        try:
            with _private_log(self._log) as log:
                self._process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[theirs],
                    env=os.environ | WRITER_ENV | {"PYTHONPATH": path},
                    start_new_session=True,  # Ctrl-C stops the driver, which then closes the run
                )
        finally:
            os.close(theirs)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):  # the writer ended at once; `_listen` warns
                self._process.stdin.write(f"{target}\n".encode())
                self._process.stdin.flush()
        self._reports = threading.Thread(target=self._listen, name="tracking-reports", daemon=True)
        self._reports.start()

    def _listen(self) -> None:
        for line in self._reports_from:
            report = json.loads(line)
            self._down = report.get("down", self._down)
            if "warning" in report:
                LOG.warning(report["warning"])
            elif "left" in report:
                self._delivery = Delivery(report["run_id"], report["left"])
        if self._delivery is None and not self._cut_off:
            LOG.warning("the writer for %s ended early; see %s", self._target, self._log)

    def finish(self, timeout_s: float | None = None) -> Delivery:
        """Wait until the writer process has delivered the remaining items and ended. Return the state of the delivery.

        The wait lasts at most `timeout_s` seconds. None means the writer's own time limit plus `IMPORT_GRACE_S`. A
        writer that has not ended by then is killed. The remaining items can be delivered later. Some items may then be
        sent again, but no item appears twice in MLflow.
        """
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._wait(self._timeout_s + IMPORT_GRACE_S if timeout_s is None else timeout_s)
        except subprocess.TimeoutExpired:
            self._cut_off = timeout_s is not None
            self._process.kill()
            self._process.wait()
        self._reports.join()
        self._reports_from.close()
        return self._delivery or Delivery(None, sum(1 for _ in read_spool(self._spool_path)))

    def _wait(self, timeout_s: float) -> None:
        """Wait for the writer to end. After `ANNOUNCE_S`, log the target and the time limit, unless the writer has
        warned that the store is down. Raises TimeoutExpired."""
        if timeout_s > ANNOUNCE_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ANNOUNCE_S)
                return
            if not self._down:  # if the store is down, the writer has already warned and will give up soon
                LOG.warning(
                    "sending the rest of the run to %s: at most %.0f s, or a few if it cannot be reached",
                    self._target, timeout_s - ANNOUNCE_S,
                )  # fmt: skip
            timeout_s -= ANNOUNCE_S
        self._process.wait(timeout_s)


def _private_log(path: Path) -> IO[bytes]:
    """Open a log file for appending. Only this user may read it, even if an existing file had other permissions."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.fchmod(descriptor, 0o600)
    return os.fdopen(descriptor, "ab")


# ---- spool -----------------------------------------------------------------------------------------------

_FIELDS: dict[Any, set[str]] = {
    "open": {"t", "key", "experiment", "run_name", "params", "tags"},  # newer spools also have: if_abandoned
    "metrics": {"t", "step", "values"},
    "trace": {"t", "step", "spans"},  # newer spools also have: asked, answered
    "dataset": {"t", "name", "digest", "source", "context", "profile"},
    "model": {"t", "name", "source"},
    "artifact": {"t", "path", "artifact_dir"},
    "tags": {"t", "values"},
    "close": {"t", "status"},
}
"""Kind of a spool item -> its required fields."""
STATE_FIELDS = {"uri", "metrics", "rest", "run_id", "experiment_id", "open"}
"""Fields of the writer's state file. `uri`: the URI without secrets. `metrics`: offset in the spool up to which metrics
are delivered. `rest`: the same for all other items. `run_id`, `experiment_id`: ids in MLflow. `open`: True if the
MLflow run is open."""


def delivered_run_id(spool_path: Path, uri: str) -> str | None:
    """Return the id of the MLflow run to which the spool was delivered at `uri`. None if the spool was never delivered,
    or if its last delivery went to another URI."""
    state = read_state(spool_path)
    run_id: str | None = state.get("run_id") if state.get("uri") == redacted_text(uri) else None
    return run_id


def read_state(spool_path: Path) -> dict[str, Any]:
    """Return the content of the writer's state file. Empty if the file is missing, or if it is damaged, for example by
    a power cut. Then all items are delivered again, which changes nothing in MLflow."""
    try:
        state = json.loads(spool_path.with_suffix(".state.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    if not isinstance(state, dict) or not state.keys() >= STATE_FIELDS:
        return {}
    return state | {"uri": redacted_text(str(state["uri"]))}  # state files of earlier versions contain passwords


def experiment_id(spool_path: Path, uri: str) -> str | None:
    """Return MLflow's id of the run's experiment at `uri`. None if the spool was never delivered, or if its last
    delivery went to another URI."""
    state = read_state(spool_path)
    number = state.get("experiment_id") if state.get("uri") == redacted_text(uri) else None
    return None if number is None else str(number)


def read_spool(path: Path, offset: int = 0) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the complete items of a spool that begin at byte `offset` or later, each as (offset of its end, item).

    Items are read one at a time, because the spool of a long run does not fit into memory. A line that is still being
    written is left for the next call. A line that a damaged disk has corrupted is skipped."""
    if not path.exists():
        return
    with path.open("rb") as lines:
        lines.seek(offset)
        for line in lines:
            if not line.endswith(b"\n"):
                return  # if more of this line were written now, the loop would read it as a line of its own
            offset += len(line)
            with contextlib.suppress(ValueError, TypeError):
                item = json.loads(line)
                if isinstance(item, dict) and _FIELDS.get(item.get("kind"), {"?"}) <= item.keys():
                    yield offset, item
