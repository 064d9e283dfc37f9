"""The spool, the writer process and a real sqlite MLflow: what a run reports arrives once, whatever dies on the way."""

import json
import logging
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.tracing.client import TracingClient
from mlflow.tracking import MlflowClient

from pipeline.observe import mlflow_writer, tracking
from pipeline.observe.mlflow_writer import WINDOW_BYTES, SpoolWriter
from pipeline.observe.tracking import (
    WRITER_ENV,
    Dataset,
    Delivery,
    MlflowTracker,
    Span,
    deliver,
    opening_hint,
    read_spool,
    read_state,
)
from tests.support.ports import free_ports

T0 = 1_700_000_000.0


@pytest.fixture(autouse=True)
def _quiet_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WRITER_ENV.items():
        monkeypatch.setenv(name, value)


def _tracker(uri: str, run_dir: Path, params: dict[str, str] | None = None, timeout_s: float = 30.0) -> MlflowTracker:
    run_dir.mkdir(exist_ok=True)
    return MlflowTracker(uri, "exp", "demo", params or {"seed": "1"}, {"host": "here"}, run_dir / "mlflow_spool.jsonl",
                         timeout_s)  # fmt: skip


def _tell_step(tracker: MlflowTracker, step: int) -> None:
    tracker.log_metrics(step, {"reward": 0.5 * step, "kl": 0.25})
    tracker.log_trace(
        step,
        [
            Span(f"generate[{step + 1},0]", "generate", T0 + step, T0 + step + 2, "generate", "g0", {},
                 (f"publish/step_{step:06d}",), f"generate/step_{step + 1:06d}"),
            Span(f"update_policy[{step}]", "update_policy", T0 + step + 1, T0 + step + 3, "train", "t0", {"rank": 0}),
        ],
        "demo", "reward 1 KL 2",
    )  # fmt: skip


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for the module: MLflow takes seconds to create its tables."""
    return f"sqlite:///{tmp_path_factory.mktemp('db')}/runs/mlflow.db"


def test_a_down_server_loses_nothing_and_costs_one_warning(
    tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The life of a run: server down, delivered elsewhere later, resumed with repeated steps, closed."""
    run_dir = tmp_path / "run"
    spool = run_dir / "mlflow_spool.jsonl"
    with caplog.at_level(logging.WARNING, "stageline.tracking"):
        tracker = _tracker(f"http://127.0.0.1:{free_ports(1)[0]}", run_dir, timeout_s=1.0)
        for step in range(3):
            _tell_step(tracker, step)
        # Each call has left its line by the time it returns, whatever the writer is doing: the calls wait for nothing.
        assert [item["kind"] for _, item in read_spool(spool)] == ["open"] + ["metrics", "trace"] * 3
        tracker.close("FAILED")
    unreachable = [r.getMessage() for r in caplog.records if "cannot be reached;" in r.getMessage()]
    assert len(unreachable) == 1
    assert "stays in the spool" in unreachable[0]
    announced = [r.getMessage() for r in caplog.records if "takes the rest" in r.getMessage()]
    assert all("a few where it cannot be reached" in text for text in announced)
    last = caplog.records[-1].getMessage()
    assert "8 items not delivered" in last
    assert f"`stageline sync {run_dir}`" in last

    assert deliver(spool, uri).num_undelivered == 0
    run_id = (run_dir / "mlflow_run_id").read_text().strip()
    client = MlflowClient(uri)
    run = client.get_run(run_id)
    assert run.info.status == "FAILED"
    assert run.data.params == {"seed": "1"}
    assert run.data.tags["host"] == "here"
    assert [(m.step, m.value) for m in client.get_metric_history(run_id, "reward")] == [(0, 0.0), (1, 0.5), (2, 1.0)]

    # A resume repeats step 2 and goes on; a changed param is kept as a tag. One name is not acceptable to MLflow.
    caplog.clear()
    artifact = tmp_path / "curves.txt"
    artifact.write_text("picture")
    table = tmp_path / "samples.json"
    table.write_text('{"columns": ["prompt"], "data": [["a"]]}')
    with caplog.at_level(logging.WARNING, "stageline.tracking"), _tracker(uri, run_dir, {"seed": "2"}) as resumed:
        for step in (2, 3):
            _tell_step(resumed, step)
        resumed.log_metrics(3, {"bad*name": 1.0, "good": 7.0})
        resumed.log_artifact(artifact, "plots")
        resumed.set_tags({"note": "resumed"})
        for _ in range(2):
            resumed.log_dataset(Dataset("prompts.jsonl", "d1", "/data/prompts.jsonl", "training", 60))
            resumed.log_table(table)
            resumed.log_model("tiny-chat", tmp_path)
    said = [r.getMessage() for r in caplog.records if "sending the rest of the run" not in r.getMessage()]
    assert [text[:29] for text in said] == ["MLflow refused metric bad*nam"]
    # A writer that died before it noted its progress delivers everything again: nothing may change.
    (run_dir / "mlflow_spool.state.json").unlink()
    again = deliver(spool, uri)
    assert (again.run_id, again.num_undelivered) == (run_id, 0)

    run = client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert (run.data.params["seed"], run.data.tags["resumed.seed"], run.data.tags["note"]) == ("1", "2", "resumed")
    assert run.data.metrics["good"] == 7.0
    assert [m.step for m in client.get_metric_history(run_id, "reward")] == [0, 1, 2, 3]
    assert [f.path for f in client.list_artifacts(run_id, "plots")] == ["plots/curves.txt"]
    assert [r.info.run_id for r in client.search_runs([run.info.experiment_id])] == [run_id]

    (data,) = run.inputs.dataset_inputs
    assert (data.dataset.name, data.dataset.digest, data.tags[0].value) == ("prompts.jsonl", "d1", "training")
    assert json.loads(data.dataset.profile) == {"num_rows": 60}
    assert json.loads(run.data.tags["mlflow.loggedArtifacts"]) == [{"path": "samples.json", "type": "table"}]
    assert "samples.json" in {file.path for file in client.list_artifacts(run_id)}
    (version,) = client.search_model_versions("name = 'tiny-chat'")
    assert (version.run_id, version.source) == (run_id, str(tmp_path))
    experiment = client.get_experiment(run.info.experiment_id)
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"

    traces = TracingClient(uri).search_traces(locations=[run.info.experiment_id])
    assert sorted(t.info.tags["mlflow.traceName"] for t in traces) == ["step 0", "step 1", "step 2", "step 3"]
    assert {t.info.trace_metadata["mlflow.sourceRun"] for t in traces} == {run_id}
    spans = {s.name: s for t in traces for s in t.data.spans if t.info.tags["step"] == "1"}
    root, generate, update = spans["step 1"], spans["generate[2,0]"], spans["update_policy[1]"]
    assert root.parent_id is None
    assert (spans["generate"].parent_id, spans["train"].parent_id) == (root.span_id, root.span_id)
    assert (generate.parent_id, update.parent_id) == (spans["generate"].span_id, spans["train"].span_id)
    assert (generate.inputs, generate.outputs) == (["publish/step_000001"], "generate/step_000002")
    assert {(t.info.request_preview, t.info.response_preview) for t in traces} == {("demo", "reward 1 KL 2")}
    assert (root.start_time_ns, root.end_time_ns) == (int((T0 + 1) * 1e9), int((T0 + 4) * 1e9))
    assert (generate.start_time_ns, generate.end_time_ns) == (int((T0 + 1) * 1e9), int((T0 + 3) * 1e9))
    assert update.start_time_ns < generate.end_time_ns, "generation of step 2 overlaps the training of step 1"
    assert update.get_attribute("gang") == "train"


def test_a_killed_drivers_run_is_marked_killed_and_a_torn_line_is_cut(tmp_path: Path, uri: str) -> None:
    spool = tmp_path / "mlflow_spool.jsonl"
    opened = {"t": T0, "kind": "open", "key": "k", "experiment": "other", "run_name": "r", "params": {}}
    opened |= {"tags": {"note": "running", "host": "here"}, "if_abandoned": {"note": "killed"}}
    metrics = {"t": T0, "kind": "metrics", "step": 0, "values": {"reward": 1.0}}
    spool.write_text(json.dumps(opened) + "\n" + json.dumps(metrics) + "\n" + '{"t": 1, "kind": "met')
    run_id = deliver(spool, uri).run_id
    assert run_id is not None
    run = MlflowClient(uri).get_run(run_id)
    assert (run.info.status, run.data.metrics) == ("KILLED", {"reward": 1.0})
    assert (run.data.tags["note"], run.data.tags["host"]) == ("killed", "here")
    with _tracker(uri, tmp_path) as resumed:
        resumed.log_metrics(0, {"reward": 9.0})  # known: the first value stays
        resumed.log_metrics(1, {"reward": 2.0})
    assert [item["kind"] for _, item in read_spool(spool)] == ["open", "metrics", "open", "metrics", "close"]
    history = MlflowClient(uri).get_metric_history(run_id, "reward")
    assert [(m.step, m.value) for m in history] == [(0, 1.0), (1, 2.0)]
    assert MlflowClient(uri).get_run(run_id).info.status == "FINISHED"


def test_what_a_damaged_disk_gives_back_is_passed_over(tmp_path: Path) -> None:
    """Lines that are JSON and no items; a note that is empty, as after a power cut, or lacks something."""
    spool = tmp_path / "mlflow_spool.jsonl"
    tags = {"t": T0, "kind": "tags", "values": {}}
    damaged: list[object] = [
        {"t": T0, "kynd": "tags", "values": {}},
        [1],
        tags | {"kind": ["tags"]},
        tags | {"kind": "tag"},
    ]
    spool.write_text("".join(json.dumps(item) + "\n" for item in (*damaged, {"t": T0, "kind": "tags"}, tags)))
    assert [item for _, item in read_spool(spool)] == [tags]
    state = {"uri": "u", "metrics": 0, "rest": 0, "run_id": "r", "experiment_id": "1", "open": True}
    for text, read in (("", {}), ("[]", {}), ('{"uri": "u"}', {}), (json.dumps(state), state)):
        (tmp_path / "mlflow_spool.state.json").write_text(text)
        assert read_state(spool) == read


def test_a_run_that_is_left_goes_on_later(tmp_path: Path, uri: str, caplog: pytest.LogCaptureFixture) -> None:
    """A job whose nodes are wanted back has no time for a server that does not answer; nothing is lost by it."""
    run_dir = tmp_path / "left"
    with caplog.at_level(logging.WARNING, "stageline.tracking"):
        tracker = _tracker(f"http://127.0.0.1:{free_ports(1)[0]}", run_dir, timeout_s=600.0)
        _tell_step(tracker, 0)
        tracker.detach()
        tracker.detach()
    assert "ended early" not in caplog.text
    again = _tracker(uri, run_dir)
    assert again.has_metric(0, "reward")
    again.close("FINISHED")
    run = MlflowClient(uri).get_run((run_dir / "mlflow_run_id").read_text().strip())
    assert (run.info.status, run.data.metrics["kl"]) == ("FINISHED", 0.25)


class _Taking:
    """An MLflow that takes everything; of each trace its step is kept."""

    def __init__(self, uri: str) -> None:
        info = SimpleNamespace(run_id="r", experiment_id="1")
        self._run = SimpleNamespace(info=info, data=SimpleNamespace(params={}))
        self.steps: list[int] = []

    def get_experiment_by_name(self, name: str) -> SimpleNamespace:
        return SimpleNamespace(experiment_id="1")

    def search_runs(self, *_: object, **__: object) -> list[SimpleNamespace]:
        return [self._run]

    def get_run(self, run_id: str) -> SimpleNamespace:
        return self._run

    def update_run(self, *_: object, **__: object) -> None: ...

    def log_batch(self, *_: object, **__: object) -> None: ...


def test_a_long_spool_is_read_as_a_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the driver that resumes a run, and by the writer: at 45 KB a step it would not fit into memory."""
    spool, steps = tmp_path / "mlflow_spool.jsonl", 600
    opened = {"t": T0, "kind": "open", "key": "k", "experiment": "e", "run_name": "r", "params": {}, "tags": {}}
    with spool.open("w") as lines:
        lines.write(json.dumps(opened) + "\n")
        for step in range(steps):
            lines.write(json.dumps({"t": T0, "kind": "metrics", "step": step, "values": {"a": 0.5}}) + "\n")
            spans = [{"name": f"{number:0100d}"} for number in range(400)]
            lines.write(json.dumps({"t": T0, "kind": "trace", "step": step, "spans": spans}) + "\n")
    assert spool.stat().st_size > 20 * WINDOW_BYTES
    delivered = _Taking("")
    monkeypatch.setattr(tracking, "_Writer", lambda *given: SimpleNamespace(finish=lambda: Delivery(None, 0)))
    monkeypatch.setattr(mlflow_writer, "MlflowClient", lambda uri: delivered)
    monkeypatch.setattr(SpoolWriter, "_trace", lambda self, client, item: client.steps.append(item["step"]))
    tracemalloc.start()
    try:
        tracker = _tracker("http://127.0.0.1:1", tmp_path)
        writer = SpoolWriter("http://127.0.0.1:1", spool, lambda report: None)
        assert writer.count_undelivered() == 2 + 2 * steps
        writer.deliver()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert tracker.has_metric(steps - 1, "a")
    tracker.close("FINISHED")
    assert delivered.steps == list(range(steps))
    assert writer.count_undelivered() == 1, "the end of the run"
    assert peak < 10 * WINDOW_BYTES, "one window of parsed lines, at several times their size as text"


def test_how_to_open() -> None:
    assert opening_hint("sqlite:///runs/mlflow.db") == "mlflow ui --backend-store-uri sqlite:///runs/mlflow.db"
    assert opening_hint("http://host:5000") == "http://host:5000"
    page = "/#/experiments/3/runs?workflowType=machine_learning"
    assert opening_hint("http://host:5000/", "3") == f"http://host:5000{page}"
    assert opening_hint("sqlite:///m.db", "3").endswith(f"m.db, then http://127.0.0.1:5000{page}")
