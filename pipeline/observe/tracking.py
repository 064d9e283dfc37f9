"""Experiment tracking from the driver's side: everything is appended to a spool file, and a process of its own
(`pipeline/observe/mlflow_writer.py`, the only module that imports mlflow) carries the spool to MLflow.

    driver loop ── one appended line per call ──► mlflow_spool.jsonl ──► writer process ──► sqlite or server
                                                       (offsets delivered: mlflow_spool.state.json)

The spool is the queue, so a call never waits for MLflow, and neither a server that is down nor a killed driver loses
or repeats anything. Why a process and not a thread: with the writer in a thread, importing mlflow and logging held
the interpreter lock for up to 146 ms at a time and used 3.1 s of the driver's CPU in 7 s; in a process of its own,
3 ms and 0.09 s.

May import the standard library, pipeline.observe.{appending, metric_catalogue, slurm_job, spool}.
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
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Protocol

from pipeline.observe.appending import LineFile
from pipeline.observe.metric_catalogue import tracked
from pipeline.observe.slurm_job import slurm_job
from pipeline.observe.spool import read_spool

LOG = logging.getLogger("stageline.tracking")

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]

LEAVE_S = 2.0
"""Of `leave`: for a writer that has little left."""
ANNOUNCE_S = 2.0
"""After which a person is told that `close` waits, and for what."""
IMPORT_GRACE_S = 60.0
"""Added to the deadline of `close`: the writer may still be importing mlflow or creating the database."""
WRITER_ENV = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "true",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the writer retries by itself; MLflow's own retries take minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "OMP_NUM_THREADS": "1",
}


@dataclass(frozen=True)
class Span:
    """One node of a PPO step as it ran; spans of different gangs overlap in time."""

    name: str
    stage: str
    start_s: float
    """Seconds since the epoch."""
    end_s: float
    gang: str
    worker: str
    attributes: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    """Addresses of what it read; the arrays stay in the store."""
    output: str = ""
    """Address of what it made."""


@dataclass(frozen=True)
class Dataset:
    """Prompts that a run samples from."""

    name: str
    digest: str
    source: str
    """URL or path."""
    context: Literal["training", "evaluation"]
    num_rows: int


@dataclass(frozen=True)
class Delivery:
    """What a writer achieved when it ended."""

    run_id: str | None
    """The MLflow run; None if the store was never reached."""
    left: int
    """Items of the spool still undelivered."""


class Tracker(Protocol):
    """What the driver reports of a run. No method waits for the tracking server, `close` excepted."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of a step. The first value given for a (step, name) stays; a resume may give it again."""
        ...

    def has(self, step: int, name: str) -> bool:
        """Whether a number need not be given (again)."""
        ...

    def trace(self, step: int, spans: Sequence[Span], asked: str = "", answered: str = "") -> None:
        """The nodes of a step as one trace: a root span `step N`, a span for each gang in it, and in those the nodes.
        `asked`, `answered`: what a list of traces shows of it."""
        ...

    def dataset(self, dataset: Dataset) -> None:
        """Prompts of the run; giving them again changes nothing."""
        ...

    def table(self, local_path: Path) -> None:
        """A file of pandas' "split" JSON, as a table that is compared between runs; giving it again replaces it."""
        ...

    def model(self, name: str, source: Path) -> None:
        """Exported weights, as a new version of a registered model; giving them again changes nothing."""
        ...

    def artifact(self, local_path: Path, artifact_dir: str) -> None:
        """A file to keep with the run; its content is read when it is delivered."""
        ...

    def tags(self, values: Mapping[str, str]) -> None: ...

    def close(self, status: RunStatus) -> None:
        """Delivers what is left within a bounded time and ends the run with `status`."""
        ...

    def leave(self) -> None:
        """Ends within seconds: the run is to go on, and what is not delivered yet goes out then."""
        ...


class _SeenMetrics:
    """Owns which metrics of which steps are in the spool: a bit for each name in a number for each step, since a run
    has hundreds of names and tens of thousands of steps."""

    def __init__(self) -> None:
        self._bit: dict[str, int] = {}
        self._seen: dict[int, int] = {}

    def unseen(self, step: int, names: Iterable[str]) -> list[str]:
        """Those of the names that were not given with this step before; from now on they were."""
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
        """All that were given."""
        return self._bit.keys()

    def has(self, step: int, name: str) -> bool:
        return name in self._bit and bool(self._seen.get(step, 0) >> self._bit[name] & 1)


class NullTracker:
    """Tracking switched off (`tracking.uri: null`)."""

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        pass

    def has(self, step: int, name: str) -> bool:
        return True

    def trace(self, step: int, spans: Sequence[Span], asked: str = "", answered: str = "") -> None:
        pass

    def dataset(self, dataset: Dataset) -> None:
        pass

    def table(self, local_path: Path) -> None:
        pass

    def model(self, name: str, source: Path) -> None:
        pass

    def artifact(self, local_path: Path, artifact_dir: str) -> None:
        pass

    def tags(self, values: Mapping[str, str]) -> None:
        pass

    def close(self, status: RunStatus) -> None:
        pass

    def leave(self) -> None:
        pass


class MlflowTracker:
    """Owns the open spool of a run and the writer process that delivers it.

    `spool_path` lies in the run's directory; a tracker opened on an existing spool continues the same MLflow run.
    `uri` is an MLflow tracking URI (`sqlite:///…` or `http(s)://…`), `params` the flattened config; `off` are metrics
    that say nothing under that config. What of the others goes out: `metric_catalogue.tracked`. Used as a context
    manager it closes the run as FINISHED, or as FAILED (KILLED on Ctrl-C) when left by an exception.
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
        off: Collection[str] = (),
        if_abandoned: Mapping[str, str] | None = None,
    ) -> None:
        """`if_abandoned`: tags that the run is given where its driver goes away without closing it."""
        self.uri = uri
        self.spool_path = spool_path
        self._closed = False
        self._off = frozenset(off)
        self._file = LineFile(spool_path)
        earlier = read_spool(spool_path)
        self._metrics_seen = _SeenMetrics()
        for _, item in earlier:
            if item["kind"] == "metrics":
                self._metrics_seen.unseen(item["step"], item["values"])
        self._traces_seen = {item["step"] for _, item in earlier if item["kind"] == "trace"}
        keys = [item["key"] for _, item in earlier if item["kind"] == "open"]
        job = slurm_job(os.environ)
        self._append(
            kind="open",
            key=keys[0] if keys else uuid.uuid4().hex,
            experiment=experiment,
            run_name=run_name,
            params=dict(params),
            tags=dict(tags) | ({} if job is None else job.tags()),
            if_abandoned=dict(if_abandoned or {}),
        )
        self._writer = _Writer(uri, spool_path, close_timeout_s)

    def metrics(self, step: int, values: Mapping[str, float]) -> None:
        given = tracked(values, self._off, self._metrics_seen.names)
        new = self._metrics_seen.unseen(step, given)
        if new:
            self._append(kind="metrics", step=step, values={name: float(given[name]) for name in new})

    def has(self, step: int, name: str) -> bool:
        return self._metrics_seen.has(step, name)

    def trace(self, step: int, spans: Sequence[Span], asked: str = "", answered: str = "") -> None:
        if spans and step not in self._traces_seen:
            self._traces_seen.add(step)
            as_given = [asdict(span) for span in spans]
            self._append(kind="trace", step=step, spans=as_given, asked=asked, answered=answered)

    def dataset(self, dataset: Dataset) -> None:
        profile = json.dumps({"num_rows": dataset.num_rows})
        fields = {name: value for name, value in asdict(dataset).items() if name != "num_rows"}
        self._append(kind="dataset", **fields, profile=profile)

    def table(self, local_path: Path) -> None:
        self.artifact(local_path, "")
        self.tags({"mlflow.loggedArtifacts": json.dumps([{"path": local_path.name, "type": "table"}])})

    def model(self, name: str, source: Path) -> None:
        self._append(kind="model", name=name, source=str(source.absolute()))

    def artifact(self, local_path: Path, artifact_dir: str) -> None:
        self._append(kind="artifact", path=str(local_path.absolute()), artifact_dir=artifact_dir)

    def tags(self, values: Mapping[str, str]) -> None:
        self._append(kind="tags", values=dict(values))

    def close(self, status: RunStatus) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._append(kind="close", status=status)
        finally:
            self._file.close()
            delivery = self._writer.finish()
        if delivery.left:
            LOG.warning(
                "MLflow at %s: %d items not delivered; they are kept, and `stageline sync %s` delivers them",
                self.uri, delivery.left, self.spool_path.parent,
            )  # fmt: skip

    def leave(self) -> None:
        if not self._closed:
            self._closed = True
            self._file.close()
            self._writer.finish(LEAVE_S)

    def __enter__(self) -> MlflowTracker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        killed = kind is not None and not issubclass(kind, Exception)
        self.close("FINISHED" if kind is None else "KILLED" if killed else "FAILED")

    def _append(self, **item: Any) -> None:
        self._file.append(json.dumps({"t": time.time(), **item}, separators=(",", ":")))


def deliver(spool_path: Path, uri: str, timeout_s: float = 60.0) -> Delivery:
    """Carries what is left in a spool to `uri`: items already delivered there are not sent again, and a `uri` that
    this spool was never delivered to gets the whole run. Waits at most `timeout_s` (and the writer's start)."""
    return _Writer(uri, spool_path, timeout_s).finish()


def how_to_open(uri: str, experiment: str | None = None) -> str:
    """What a person types or opens to see the runs. Without `workflowType` MLflow's page takes every experiment for one
    of GenAI evaluations, whatever its tags say; `experiment`: its number, where that is known."""
    page = f"/#/experiments/{experiment}/runs?workflowType=machine_learning" if experiment is not None else ""
    if uri.startswith("http"):
        return f"{uri.rstrip('/')}{page}"
    command = f"mlflow ui --backend-store-uri {uri}"
    return f"{command}, then http://127.0.0.1:5000{page}" if page else command


class _Writer:
    """Owns the writer process. Its stdin carries nothing: end of file tells it that the driver closed or died."""

    def __init__(self, uri: str, spool_path: Path, timeout_s: float) -> None:
        self._uri = uri
        self._timeout_s = timeout_s
        self._spool_path = spool_path
        self._delivery: Delivery | None = None
        self._cut_off = False
        self._down = False  # the store, as far as the writer has told
        if uri.startswith("sqlite:///"):
            Path(uri.removeprefix("sqlite:///")).parent.mkdir(parents=True, exist_ok=True)
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        arguments = [sys.executable, "-m", "pipeline.observe.mlflow_writer"]
        arguments += [uri, str(spool_path.absolute()), str(timeout_s)]
        with spool_path.with_name("mlflow_writer.log").open("ab") as log:
            self._process = subprocess.Popen(
                arguments,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=os.environ | WRITER_ENV | {"PYTHONPATH": path},
                start_new_session=True,  # Ctrl-C stops the driver, which then closes the run
            )
        self._reports = threading.Thread(target=self._listen, name="mlflow-writer-reports", daemon=True)
        self._reports.start()

    def _listen(self) -> None:
        if self._process.stdout is None:
            raise RuntimeError("the writer was started without a pipe for its reports")
        for line in self._process.stdout:
            report = json.loads(line)
            self._down = report.get("down", self._down)
            if "warning" in report:
                LOG.warning(report["warning"])
            elif "left" in report:
                self._delivery = Delivery(report["run_id"], report["left"])
        if self._delivery is None and not self._cut_off:
            LOG.warning("the MLflow writer ended early; see %s", self._spool_path.with_name("mlflow_writer.log"))

    def finish(self, patience_s: float | None = None) -> Delivery:
        """Has it deliver what is left, for `patience_s` (None: until it gives up by itself), and ends it: a delivery
        that is cut off is made again, which changes nothing."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._wait(self._timeout_s + IMPORT_GRACE_S if patience_s is None else patience_s)
        except subprocess.TimeoutExpired:
            self._cut_off = patience_s is not None
            self._process.kill()
            self._process.wait()
        self._reports.join()
        if self._process.stdout is not None:
            self._process.stdout.close()
        return self._delivery or Delivery(None, len(read_spool(self._spool_path)))

    def _wait(self, most_s: float) -> None:
        """Raises TimeoutExpired. Nobody is left to wonder what a wait is for."""
        if most_s > ANNOUNCE_S:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(ANNOUNCE_S)
                return
            if not self._down:  # else the writer has said so, and gives up in a moment
                LOG.warning(
                    "MLflow at %s takes the rest of the run; at most %.0f s, and a few where it cannot be reached",
                    self._uri, most_s - ANNOUNCE_S,
                )  # fmt: skip
            most_s -= ANNOUNCE_S
        self._process.wait(most_s)
