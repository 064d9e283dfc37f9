"""The process that delivers a run's spool to MLflow. The spool is the file in which the driver queues the items to
track. `pipeline/observe/tracking.py` starts the process with `python -m THIS_MODULE SPOOL TIMEOUT_S REPORTS`, and
writes the URI of MLflow as the first line of its stdin. Only this module imports mlflow.

    reads      complete lines of the spool
    waits for  new lines, or the return of a store that is down (backoff 1 s … 30 s; one warning until it is back)
    ends       after the driver has closed stdin or died: as soon as everything is delivered, and after TIMEOUT_S at the
               latest. If the store cannot be reached, the writer ends earlier, and `stageline sync` delivers the rest.

When the store has accepted a delivery, the writer advances an offset in `mlflow_spool.state.json`. If the writer dies
before the offset is advanced, the delivery is repeated. The repetition changes nothing in MLflow:

- A metric's key in MLflow includes its time stamp, which was taken when the metric was spooled.
- Trace ids are derived from the step and the spool's key, a random id that is stored in the spool.
- The run is found by the spool's key.

The writer reports to the driver in JSON lines on the descriptor REPORTS. stdout and stderr go to a log, because MLflow
writes to them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from mlflow.entities import (
    Dataset,
    DatasetInput,
    InputTag,
    Metric,
    Param,
    Run,
    RunTag,
    Span,
    TraceInfo,
    TraceLocation,
    TraceState,
)
from mlflow.exceptions import MlflowException
from mlflow.tracing.client import TracingClient
from mlflow.tracing.constant import (
    TRACE_SCHEMA_VERSION,
    TRACE_SCHEMA_VERSION_KEY,
    SpanAttributeKey,
    TraceMetadataKey,
    TraceTagKey,
)
from mlflow.tracking import MlflowClient
from sqlalchemy.exc import SQLAlchemyError

from pipeline.observe.tracking import read_spool, read_state
from storage.locks import open_lock, take_lock
from storage.redaction import redacted, redacted_text, split_credentials

Item = dict[str, Any]

POLL_S = 0.25
DOWN_S = 3.0
"""Seconds for which the writer retries an unreachable store after stdin is closed."""
WINDOW_BYTES = 1 << 20
"""Approximate number of bytes of the spool that are read before they are delivered."""
MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_VALUE = 6000
"""Three limits of MLflow. `MAX_METRICS` and `MAX_PARAMS` are the largest numbers of metrics and params in one call of
`log_batch`. `MAX_VALUE` is the largest number of characters in the value of a param."""
SPOOL_TAG = "stageline.spool"
STORE_ERRORS = (MlflowException, OSError, SQLAlchemyError)


class SpoolWriter:
    """A client that sends the items of one spool to one MLflow store. The spool is the file in which the driver queues
    what is to be tracked.

    A state file contains the id of the MLflow run and two offsets in the spool. All metrics before the first offset are
    delivered, and all other items before the second offset.
    """

    def __init__(self, uri: str, spool: Path, report: Callable[[Item], None]) -> None:
        self._uri = uri
        self._spool = spool
        self._state_path = spool.with_suffix(".state.json")
        self._report = report
        state, shown = read_state(spool), redacted_text(uri)
        if state.get("uri") != shown:  # the state describes another store; nothing is delivered to this one
            state = {"uri": shown, "metrics": 0, "rest": 0, "run_id": None, "experiment_id": None, "open": False}
        self._state: Item = state
        self._read_to = min(state["metrics"], state["rest"])
        self._metrics: deque[tuple[int, Item]] = deque()
        self._rest: deque[tuple[int, Item]] = deque()
        self._client: MlflowClient | None = None

    @property
    def run_id(self) -> str | None:
        run_id: str | None = self._state["run_id"]
        return run_id

    def count_undelivered(self) -> int:
        """Return the number of items in the spool that are not delivered."""
        start = min(self._state["metrics"], self._state["rest"])
        return sum(end > self._state[_queue_name(item)] for end, item in read_spool(self._spool, start))

    def _read(self) -> bool:
        """Read about WINDOW_BYTES of the spool if both queues are empty, and return True if there are items to deliver.
        Metrics are sent in batches, so they have their own queue and offset, and may overtake other items."""
        if not (self._metrics or self._rest):
            first = self._read_to
            for end, item in read_spool(self._spool, self._read_to):
                self._read_to = end
                if end > self._state[_queue_name(item)]:
                    (self._metrics if _queue_name(item) == "metrics" else self._rest).append((end, item))
                    if end - first > WINDOW_BYTES:
                        break
                else:
                    first = end
        return bool(self._metrics or self._rest)

    def deliver(self) -> None:
        """Send all items of the spool that are not delivered. Items that were sent before an error stay delivered.

        Raises:
            STORE_ERRORS: the store cannot be reached or fails, or it rejects the item of kind `open`. If the store
                rejects another item, this item is dropped with a warning."""
        if self._client is None:
            self._client = MlflowClient(self._uri)
        while self._read():
            if self.run_id is None or self._opens_next():
                self._pop(self._client)
            elif self._metrics:
                self._send_metrics(self._client)
            else:
                self._pop(self._client)

    def abandon(self) -> None:
        """Mark the MLflow run as KILLED, because the driver ended without closing it. Also set the tags that the driver
        prepared for this case (field `if_abandoned` of the item `open` in the spool). Do nothing if the run is not open
        in MLflow, for example because the driver has closed it."""
        if self._client is not None and self._state["open"]:
            tags = self._state.get("if_abandoned", {})
            self._client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            self._client.set_terminated(self.run_id, "KILLED")
            self._state["open"] = False
            self._save()

    def _opens_next(self) -> bool:
        """Return True if the next item is an `open`. It sets the run to RUNNING, so it must be sent before later
        metrics."""
        before = not self._metrics or (bool(self._rest) and self._rest[0][0] < self._metrics[0][0])
        return bool(self._rest) and self._rest[0][1]["kind"] == "open" and before

    def _pop(self, client: MlflowClient) -> None:
        end, item = self._rest[0]
        if item["kind"] == "open":
            self._open(client, item)
        else:
            send = {
                "trace": self._trace,
                "artifact": self._artifact,
                "tags": self._tags,
                "dataset": self._dataset,
                "model": self._model,
                "close": self._close,
            }
            self._send_unless_rejected(
                f"{item['kind']} {item.get('step', '')}", partial(send[item["kind"]], client, item)
            )
        self._rest.popleft()
        self._state["rest"] = end
        self._save()

    def _send_metrics(self, client: MlflowClient) -> None:
        batch: list[Metric] = []
        num_items = 0
        for _, item in self._metrics:
            stamp = int(item["t"] * 1000)
            new = [Metric(name, value, stamp, item["step"]) for name, value in item["values"].items()]
            if num_items and len(batch) + len(new) > MAX_METRICS:
                break
            batch += new
            num_items += 1
        for start in range(0, len(batch), MAX_METRICS):
            self._log_batch(client, batch[start : start + MAX_METRICS])
        for _ in range(num_items):
            self._state["metrics"] = self._metrics.popleft()[0]
        self._save()

    def _log_batch(self, client: MlflowClient, batch: list[Metric]) -> None:
        try:
            client.log_batch(self.run_id, metrics=batch)
        except MlflowException as error:
            if not _is_rejected(error):
                raise
            for metric in batch:  # a metric with an invalid name must not keep out the other metrics
                self._send_unless_rejected(
                    f"metric {metric.key}", partial(client.log_batch, self.run_id, metrics=[metric])
                )

    def _send_unless_rejected(self, description: str, send: Callable[[], None]) -> None:
        """Send an item to MLflow by calling `send`. If MLflow's server rejects the item (HTTP status 400), report a
        warning and drop the item. Otherwise it would block later items. Other errors are raised."""
        try:
            send()
        except MlflowException as error:
            if not _is_rejected(error):
                raise
            self._report({"warning": f"MLflow refused {description.strip()}: {error.message}"})

    def _open(self, client: MlflowClient, item: Item) -> None:
        """Continue the MLflow run whose id is in the state file. If the file has no id, continue the run that is tagged
        with the spool's key. If there is no such run either, create a run."""
        tags = {**item["tags"], SPOOL_TAG: item["key"]}
        run = self._find_run(client, item)
        if run is None:
            experiment_id = self._experiment_id(client, item["experiment"])
            run = client.create_run(experiment_id, int(item["t"] * 1000), tags, item["run_name"])
        else:
            client.update_run(run.info.run_id, status="RUNNING")
        run_id = run.info.run_id
        params = {name: value[:MAX_VALUE] for name, value in item["params"].items()}
        new = [Param(name, value) for name, value in params.items() if name not in run.data.params]
        # A param can be written only once, so a param that a resume changed becomes a tag.
        tags |= {f"resumed.{name}": v for name, v in params.items() if run.data.params.get(name, v) != v}
        for start in range(0, len(new), MAX_PARAMS):
            client.log_batch(run_id, params=new[start : start + MAX_PARAMS])
        client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        self._state |= {"run_id": run_id, "experiment_id": run.info.experiment_id, "key": item["key"], "open": True}
        self._state["if_abandoned"] = item.get("if_abandoned", {})
        self._spool.with_name("mlflow_run_id").write_text(run_id + "\n")

    def _find_run(self, client: MlflowClient, item: Item) -> Run | None:
        if self.run_id is not None:  # even if the resumed config names another experiment
            return client.get_run(self.run_id)
        experiment_id = self._experiment_id(client, item["experiment"])
        runs = client.search_runs([experiment_id], f"tags.`{SPOOL_TAG}` = '{item['key']}'", max_results=1)
        return runs[0] if runs else None

    def _experiment_id(self, client: MlflowClient, name: str) -> str:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            tags = {"mlflow.experimentKind": "custom_model_development"}  # model training, not GenAI evaluations
            return str(client.create_experiment(name, _artifact_location(self._uri, name), tags))
        return str(experiment.experiment_id)

    def _trace(self, client: MlflowClient, item: Item) -> None:
        """Send a step's trace with the functions that MLflow's exporter calls. The exporter itself hides errors, and
        would not let us choose the trace id, which makes a repeated delivery harmless."""
        name = f"step {item['step']}"
        otel_id = hashlib.sha256(f"{self._state['key']} {name}".encode()).hexdigest()[:32]
        start, end = _time_range(item["spans"])
        tracing = TracingClient(self._uri)
        tracing.log_spans(self._state["experiment_id"], _spans(otel_id, name, item))
        tracing.start_trace(
            TraceInfo(
                trace_id=f"tr-{otel_id}",
                trace_location=TraceLocation.from_experiment_id(self._state["experiment_id"]),
                request_time=int(start * 1000),
                execution_duration=int((end - start) * 1000),
                state=TraceState.OK,
                request_preview=item.get("asked") or None,
                response_preview=item.get("answered") or None,
                trace_metadata={
                    TraceMetadataKey.SOURCE_RUN: str(self.run_id),
                    TRACE_SCHEMA_VERSION_KEY: str(TRACE_SCHEMA_VERSION),
                },
                tags={TraceTagKey.TRACE_NAME: name, "step": str(item["step"])},
            )
        )

    def _dataset(self, client: MlflowClient, item: Item) -> None:
        source = json.dumps({"url" if "://" in item["source"] else "uri": item["source"]})
        dataset = Dataset(item["name"], item["digest"], "local", source, profile=item["profile"])
        client.log_inputs(self.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", item["context"])])])

    def _model(self, client: MlflowClient, item: Item) -> None:
        """Register exported weights as a model version, unless this run has registered weights with this path
        before."""
        try:
            client.create_registered_model(item["name"])
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        own = client.search_model_versions(f"name = '{item['name']}' and run_id = '{self.run_id}'")
        if item["source"] not in {version.source for version in own}:
            client.create_model_version(item["name"], item["source"], self.run_id)

    def _artifact(self, client: MlflowClient, item: Item) -> None:
        if Path(item["path"]).is_file():
            client.log_artifact(self.run_id, item["path"], item["artifact_dir"] or None)
        else:
            self._report({"warning": f"artifact {item['path']} is gone and was not sent to MLflow"})

    def _tags(self, client: MlflowClient, item: Item) -> None:
        client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in item["values"].items()])

    def _close(self, client: MlflowClient, item: Item) -> None:
        client.set_terminated(self.run_id, item["status"], int(item["t"] * 1000))
        self._state["open"] = False

    def _save(self) -> None:
        new = self._state_path.with_suffix(".tmp")
        new.write_text(json.dumps(self._state))
        new.replace(self._state_path)


def _queue_name(item: Item) -> str:
    """Return the name of the queue in which an item waits."""
    return "metrics" if item["kind"] == "metrics" else "rest"


def _is_rejected(error: MlflowException) -> bool:
    return bool(error.get_http_status_code() == 400)


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Return the URI for an experiment's artifacts, beside the sqlite file. MLflow's default is the current
    directory."""
    if not uri.startswith("sqlite:///"):
        return None
    folder = Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlflow_artifacts"
    return (folder / experiment).as_uri()


def _time_range(spans: Iterable[Item]) -> tuple[float, float]:
    """Return the earliest start and the latest end of the spans."""
    times = [(span["start_s"], span["end_s"]) for span in spans]
    return min(start for start, _ in times), max(end for _, end in times)


def _spans(otel_id: str, name: str, item: Item) -> list[Span]:
    """Return the spans of a step as a tree: the step contains its gangs, and each gang contains its nodes. The inputs
    and outputs of a node are addresses, because the arrays stay in the store."""
    of_gang: dict[str, list[Item]] = {}
    for span in item["spans"]:
        of_gang.setdefault(span["gang"], []).append(span)
    root = {"step": item["step"], _IN: item.get("asked", ""), _OUT: item.get("answered", "")}
    made = [_span(otel_id, 0, None, name, _time_range(item["spans"]), root, "CHAIN")]
    gangs = {gang: number for number, gang in enumerate(of_gang, start=1)}
    made += [
        _span(otel_id, n, 0, gang, _time_range(of_gang[gang]), {"gang": gang}, "CHAIN") for gang, n in gangs.items()
    ]
    for gang, spans in of_gang.items():
        for span in spans:
            about = {"stage": span["stage"], "gang": gang, "worker": span["worker"], **span["attributes"]}
            about |= {_IN: span.get("inputs", []), _OUT: span.get("output", "")}
            times = span["start_s"], span["end_s"]
            made.append(_span(otel_id, len(made), gangs[gang], span["name"], times, about, "TASK"))
    return made


_IN, _OUT = SpanAttributeKey.INPUTS, SpanAttributeKey.OUTPUTS


def _span(
    otel_id: str, index: int, parent: int | None, name: str, times: tuple[float, float], attributes: Item, kind: str
) -> Span:
    """Return span number `index` of the trace with id `otel_id`. `parent`: number of the parent span, or None for the
    span of the whole step."""
    return Span.from_dict(
        {
            "name": name,
            "trace_id": f"tr-{otel_id}",
            "span_id": f"{index + 1:016x}",
            "parent_span_id": None if parent is None else f"{parent + 1:016x}",
            "start_time_unix_nano": int(times[0] * 1e9),
            "end_time_unix_nano": int(times[1] * 1e9),
            "status": {"code": "STATUS_CODE_OK", "message": ""},
            "attributes": {
                SpanAttributeKey.REQUEST_ID: json.dumps(f"tr-{otel_id}"),
                SpanAttributeKey.SPAN_TYPE: json.dumps(kind),
                **{key: json.dumps(value) for key, value in attributes.items() if value not in ("", [])},
            },
            "events": [],
        }
    )


def _write_report(descriptor: int, report: Item) -> None:
    with contextlib.suppress(BrokenPipeError):  # the driver was killed
        os.write(descriptor, f"{json.dumps(redacted(report))}\n".encode())


def _without_credentials(uri: str) -> str:
    """Return the URI without user and password, and put both into environment variables that MLflow reads. So MLflow's
    links and errors do not show them. If the URI lacks one of the two, return it unchanged."""
    bare, user, password = split_credentials(uri)
    if not (user and password):
        return uri
    os.environ |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
    return bare


def deliver_until_closed(writer: SpoolWriter, uri: str, timeout_s: float, report: Callable[[Item], None]) -> None:
    """Deliver items until stdin is closed and everything is sent. If the driver has not closed the run by then, mark
    the run as KILLED (`SpoolWriter.abandon`).

    After stdin is closed, the delivery goes on for at most `timeout_s` seconds. If the store cannot be reached, it goes
    on for at most `DOWN_S` seconds. Items that are not sent in this time stay in the spool, and the run is not marked.

    Args:
        writer: the writer of the spool.
        uri: URI of MLflow, for warnings.
        timeout_s: see above.
        report: called with each report to the driver, for example a warning."""
    deadline: float | None = None
    closed_at = 0.0
    retry_at, backoff_s, down = 0.0, 1.0, False
    while True:
        if deadline is None and select.select([sys.stdin], [], [], POLL_S)[0]:
            closed_at = time.monotonic()  # stdin is at its end: nothing is written to it after the URI
            deadline = closed_at + timeout_s
        closing = deadline is not None
        if closing or time.monotonic() >= retry_at:
            try:
                writer.deliver()
                if closing:
                    writer.abandon()
                    return
                if down:
                    report({"down": False})
                backoff_s, down = 1.0, False
            except STORE_ERRORS as error:
                if not down:
                    first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
                    report({"down": True, "warning": f"MLflow at {uri} cannot be reached; what it has not taken stays "
                                                     f"in the spool ({first_line[:300]})"})  # fmt: skip
                if deadline is not None:
                    deadline = min(deadline, closed_at + DOWN_S)
                down = True
                retry_at, backoff_s = time.monotonic() + backoff_s, min(2 * backoff_s, 30.0)
        if deadline is not None:
            if time.monotonic() >= deadline:
                return
            time.sleep(POLL_S)


def main(arguments: Iterable[str]) -> int:
    spool, timeout_s, descriptor = arguments
    os.set_inheritable(int(descriptor), False)
    report = partial(_write_report, int(descriptor))
    uri = _without_credentials(sys.stdin.readline().rstrip("\n"))
    os.nice(10)  # the stages have priority
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    path = Path(spool).with_suffix(".lock")
    with open_lock(path) as lock:
        # The writer of an earlier attempt may still deliver this spool. It ends within this time.
        take_lock(lock, path, 2 * float(timeout_s) + DOWN_S)
        writer = SpoolWriter(uri, Path(spool), report)
        deliver_until_closed(writer, uri, float(timeout_s), report)
        left = writer.count_undelivered()
        report({"run_id": writer.run_id, "left": left})
    return 0 if left == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
