"""The process that carries a run's spool to MLflow: `python -m THIS_MODULE URI SPOOL TIMEOUT_S`. The only
module that imports mlflow; started by `pipeline/observe/tracking.py`, imported by nobody else.

    consumes   complete lines of the spool
    waits for  new lines, or a store that is down (backoff 1 s … 30 s; one warning until it is back)
    ends       when its stdin is closed (the driver closed or died) and all is delivered, or TIMEOUT_S after that, or
               soon where the store cannot be reached: `stageline sync` delivers the rest

Each delivery moves an offset in `mlflow_spool.state.json`, written after the store has answered. A writer that dies
between the two sends that delivery again, which changes nothing: MLflow's key of a metric includes its time stamp
(taken when it was spooled), traces have ids derived from the spool's key and the step, and the run is found again by
that key. Reports to the driver are JSON lines on stdout.
"""

from __future__ import annotations

import fcntl
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

from pipeline.observe.spool import read_spool, read_state

Item = dict[str, Any]

POLL_S = 0.25
DOWN_S = 3.0
"""So long after the close a store that cannot be reached is tried."""
MAX_METRICS = 1000
MAX_PARAMS = 100
MAX_VALUE = 6000
"""MLflow's limits: metrics and params per `log_batch`, characters of a param's value."""
SPOOL_TAG = "stageline.spool"
STORE_ERRORS = (MlflowException, OSError, SQLAlchemyError)


class SpoolWriter:
    """Owns the delivery of one spool to one store: the cursors, and the MLflow run they belong to."""

    def __init__(self, uri: str, spool: Path, report: Callable[[Item], None]) -> None:
        self._uri = uri
        self._spool = spool
        self._state_path = spool.with_suffix(".state.json")
        self._report = report
        state = read_state(spool)
        if state.get("uri") != uri:  # another store has nothing of this run yet
            state = {"uri": uri, "metrics": 0, "rest": 0, "run_id": None, "experiment_id": None, "open": False}
        self._state: Item = state
        self._read_to = min(state["metrics"], state["rest"])
        self._metrics: deque[tuple[int, Item]] = deque()
        self._rest: deque[tuple[int, Item]] = deque()
        self._client: MlflowClient | None = None

    @property
    def run_id(self) -> str | None:
        run_id: str | None = self._state["run_id"]
        return run_id

    @property
    def left(self) -> int:
        return len(self._metrics) + len(self._rest)

    def read(self) -> None:
        """Takes up the lines appended since the last call. Metrics are coalesced across the other kinds of items,
        so they have a queue and a cursor of their own."""
        for end, item in read_spool(self._spool, self._read_to):
            self._read_to = end
            lane = "metrics" if item["kind"] == "metrics" else "rest"
            if end > self._state[lane]:
                (self._metrics if lane == "metrics" else self._rest).append((end, item))

    def deliver(self) -> None:
        """Sends all that has been read. Raises one of STORE_ERRORS when the store cannot be reached; what was sent
        until then stays sent."""
        if self._client is None:
            self._client = MlflowClient(self._uri)
        while self.left:
            if self.run_id is None or self._opens_next():
                self._pop(self._client)
            elif self._metrics:
                self._send_metrics(self._client)
            else:
                self._pop(self._client)

    def abandon(self) -> None:
        """Marks as KILLED a run whose driver went away without closing it, with the tags that it left for that."""
        if self._client is not None and self._state["open"]:
            tags = self._state.get("if_abandoned", {})
            self._client.log_batch(self.run_id, tags=[RunTag(name, value) for name, value in tags.items()])
            self._client.set_terminated(self.run_id, "KILLED")
            self._state["open"] = False
            self._save()

    def _opens_next(self) -> bool:
        """A tracker's first item goes before its metrics: it makes the run RUNNING again."""
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
            self._unless_refused(f"{item['kind']} {item.get('step', '')}", partial(send[item["kind"]], client, item))
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
            if not _refused(error):
                raise
            for metric in batch:  # one bad name must not cost the others
                self._unless_refused(f"metric {metric.key}", partial(client.log_batch, self.run_id, metrics=[metric]))

    def _unless_refused(self, what: str, send: Callable[[], None]) -> None:
        """An item that the store will never take is dropped with a warning, so that it does not hold up the rest."""
        try:
            send()
        except MlflowException as error:
            if not _refused(error):
                raise
            self._report({"warning": f"MLflow refused {what.strip()}: {error.message}"})

    def _open(self, client: MlflowClient, item: Item) -> None:
        """Makes or continues the run: the one known to this store, else the one tagged with the spool's key."""
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
        # A param can be written once; what a resume changed is kept as a tag.
        tags |= {f"resumed.{name}": v for name, v in params.items() if run.data.params.get(name, v) != v}
        for start in range(0, len(new), MAX_PARAMS):
            client.log_batch(run_id, params=new[start : start + MAX_PARAMS])
        client.log_batch(run_id, tags=[RunTag(name, value) for name, value in tags.items()])
        self._state |= {"run_id": run_id, "experiment_id": run.info.experiment_id, "key": item["key"], "open": True}
        self._state["if_abandoned"] = item.get("if_abandoned", {})
        self._spool.with_name("mlflow_run_id").write_text(run_id + "\n")

    def _find_run(self, client: MlflowClient, item: Item) -> Run | None:
        if self.run_id is not None:  # a resume may name another experiment: the run stays where it is
            return client.get_run(self.run_id)
        experiment_id = self._experiment_id(client, item["experiment"])
        found = client.search_runs([experiment_id], f"tags.`{SPOOL_TAG}` = '{item['key']}'", max_results=1)
        return found[0] if found else None

    def _experiment_id(self, client: MlflowClient, name: str) -> str:
        experiment = client.get_experiment_by_name(name)
        if experiment is None:
            tags = {"mlflow.experimentKind": "custom_model_development"}  # model training; not evaluations of GenAI
            return str(client.create_experiment(name, _artifact_location(self._uri, name), tags))
        return str(experiment.experiment_id)

    def _trace(self, client: MlflowClient, item: Item) -> None:
        """One trace per step. `log_spans` and `start_trace` are what MLflow's exporter calls, used directly because
        the exporter swallows errors, and because they accept trace ids that make a second delivery harmless."""
        name = f"step {item['step']}"
        otel_id = hashlib.sha256(f"{self._state['key']} {name}".encode()).hexdigest()[:32]
        start, end = _extent(item["spans"])
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
        """A version of a registered model for each place that weights were exported to."""
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


def _refused(error: MlflowException) -> bool:
    return bool(error.get_http_status_code() == 400)


def _artifact_location(uri: str, experiment: str) -> str | None:
    """Beside a sqlite file (MLflow's own default is the current directory); a server decides by itself."""
    if not uri.startswith("sqlite:///"):
        return None
    folder = Path(uri.removeprefix("sqlite:///")).absolute().parent / "mlflow_artifacts"
    return (folder / experiment).as_uri()


def _extent(spans: Iterable[Item]) -> tuple[float, float]:
    """From the first start to the last end."""
    times = [(span["start_s"], span["end_s"]) for span in spans]
    return min(start for start, _ in times), max(end for _, end in times)


def _spans(otel_id: str, name: str, item: Item) -> list[Span]:
    """Span 0 is the step's, then each gang's, then the nodes' in their gangs. What a node read and made are addresses:
    the arrays stay in the store."""
    of_gang: dict[str, list[Item]] = {}
    for span in item["spans"]:
        of_gang.setdefault(span["gang"], []).append(span)
    root = {"step": item["step"], _IN: item.get("asked", ""), _OUT: item.get("answered", "")}
    made = [_span(otel_id, 0, None, name, _extent(item["spans"]), root, "CHAIN")]
    gangs = {gang: number for number, gang in enumerate(of_gang, start=1)}
    made += [_span(otel_id, n, 0, gang, _extent(of_gang[gang]), {"gang": gang}, "CHAIN") for gang, n in gangs.items()]
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
    """Span number `index` of a trace."""
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


def _print_report(report: Item) -> None:
    print(json.dumps(report), flush=True)


def serve(writer: SpoolWriter, uri: str, timeout_s: float, report: Callable[[Item], None]) -> None:
    """Delivers until stdin is closed and nothing is left, or until `timeout_s` after the close; `DOWN_S` where the
    store cannot be reached: nobody waits long for a server that does not answer."""
    deadline: float | None = None
    closed_at = 0.0
    retry_at, backoff_s, down = 0.0, 1.0, False
    while True:
        if deadline is None and select.select([sys.stdin], [], [], POLL_S)[0]:
            closed_at = time.monotonic()  # end of file: nothing is ever written to this pipe
            deadline = closed_at + timeout_s
        closing = deadline is not None
        writer.read()
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
    uri, spool, timeout_s = arguments
    os.nice(10)  # never in the way of the stages
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING)
    with Path(spool).with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the writer of an earlier attempt may still be draining this spool
        writer = SpoolWriter(uri, Path(spool), _print_report)
        serve(writer, uri, float(timeout_s), _print_report)
        _print_report({"run_id": writer.run_id, "left": writer.left})
    return 0 if writer.left == 0 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
