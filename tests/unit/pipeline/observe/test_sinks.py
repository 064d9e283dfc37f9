"""TensorBoard and Weights & Biases get every metric of the spool once, wherever their process dies."""

from __future__ import annotations

import importlib
import json
import os
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from pipeline.config.sections import TRACKERS
from pipeline.observe.sinks import SINKS, TensorBoardSink
from pipeline.observe.tracking import deliver, sink_hints

T0 = 1_700_000_000.0
OPEN = {"t": T0, "kind": "open", "key": "k" * 32, "experiment": "e", "run_name": "r", "tags": {}, "params": {"a": "1"}}
CLOSE = {"t": T0, "kind": "close", "status": "FINISHED"}


def metrics(step: int, **values: float) -> dict[str, object]:
    return {"t": T0 + step, "kind": "metrics", "step": step, "values": values or {"reward/mean": 0.5 * step, "x": 1.0}}


def write(spool: Path, *items: dict[str, object]) -> None:
    with spool.open("a") as lines:
        lines.writelines(json.dumps(item) + "\n" for item in items)


@pytest.fixture
def spool(tmp_path: Path) -> Path:
    path = tmp_path / "mlflow_spool.jsonl"
    trace = {"t": T0, "kind": "trace", "step": 0, "spans": []}
    write(path, OPEN, metrics(0), metrics(1), trace, metrics(2))
    return path


def test_each_tracker_of_the_config_has_a_sink_and_a_command(tmp_path: Path) -> None:
    assert tuple(SINKS) == TRACKERS
    assert len(sink_hints(TRACKERS, tmp_path)) == len(TRACKERS)


# ---- TensorBoard -----------------------------------------------------------------------------------------


def event_file(spool: Path) -> Path:
    (found,) = spool.with_name("tensorboard").iterdir()
    return found


def points(spool: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, value, time) of each metric, as TensorBoard reads them."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = accumulator.EventAccumulator(str(spool.with_name("tensorboard"))).Reload()
    return {tag: [(e.step, e.value, e.wall_time) for e in found.Scalars(tag)] for tag in found.Tags()["scalars"]}


def test_tensorboard_reads_each_point_once(spool: Path) -> None:
    """The first process writes more than it has noted, and dies in the middle of a record. The second one loses the end
    of its file in a power cut. A third one continues."""
    pytest.importorskip("tensorboard")
    note = spool.with_suffix(".tensorboard.json")
    first = TensorBoardSink(spool)
    first.deliver()
    noted = note.read_bytes()
    write(spool, metrics(3))
    first.deliver()
    first.close()
    note.write_bytes(noted)
    with event_file(spool).open("ab") as file:
        file.write(b"torn")
    assert deliver(spool, "tensorboard").num_undelivered == 0
    expected = {
        "reward/mean": [(step, 0.5 * step, T0 + step) for step in range(4)],
        "x": [(step, 1.0, T0 + step) for step in range(4)],
    }
    assert points(spool) == expected
    whole = event_file(spool).read_bytes()
    os.truncate(event_file(spool), len(whole) - 1)
    write(spool, metrics(2, late=7.0), CLOSE)
    assert deliver(spool, "tensorboard").num_undelivered == 0
    assert event_file(spool).read_bytes().startswith(whole)
    assert points(spool) == expected | {"late": [(2, 7.0, T0 + 2)]}


@pytest.mark.parametrize("note", [b"", b"{}", b"[1]", b'["a", 2]'])
def test_a_damaged_note_makes_the_file_anew(spool: Path, note: bytes) -> None:
    pytest.importorskip("tensorboard")
    wholes = []
    for _ in range(2):
        with closing(TensorBoardSink(spool)) as sink:
            sink.deliver()
        wholes.append(event_file(spool).read_bytes())
        spool.with_suffix(".tensorboard.json").write_bytes(note)
    assert wholes[0] == wholes[1]


def test_a_sink_that_fails_leaves_its_items(spool: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file lies where its directory should be. What it wrote about that is in a log that only this user may read."""
    spool.with_name("tensorboard").touch()
    assert deliver(spool, "tensorboard").num_undelivered == 5
    log = spool.with_name("tensorboard_writer.log")
    assert str(log) in caplog.text
    assert log.stat().st_mode & 0o777 == 0o600
    spool.with_name("tensorboard").unlink()
    pytest.importorskip("tensorboard")
    assert deliver(spool, "tensorboard").num_undelivered == 0


# ---- Weights & Biases ------------------------------------------------------------------------------------


def records(path: Path) -> Iterator[bytes]:
    """The records of a `.wandb` file: a header of 7 bytes, then blocks of 32 KiB as in LevelDB's log. Each part of a
    record has a checksum, a length, and a type: whole, first, middle or last."""
    data, at, record = path.read_bytes(), 7, b""
    while at < len(data):
        if 2**15 - at % 2**15 < 7:  # no room for another part in this block
            at += 2**15 - at % 2**15
            continue
        length, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def history(spool: Path) -> Iterator[dict[str, float]]:
    """The rows of the only offline run beside the spool."""
    proto = importlib.import_module("wandb.proto.wandb_internal_pb2")
    (path,) = spool.parent.glob("wandb/offline-run-*/*.wandb")
    for data in records(path):
        record = proto.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            row = {one.key or ".".join(one.nested_key): json.loads(one.value_json) for one in record.history.item}
            yield {name: value for name, value in row.items() if not name.startswith("_")}


def test_wandb_has_each_point_once_in_one_offline_run(spool: Path) -> None:
    """A second process, after a resume: the run's directory is written anew, and has all of the run."""
    pytest.importorskip("wandb")
    assert deliver(spool, "wandb").num_undelivered == 0
    write(spool, OPEN | {"params": {"a": "2"}}, metrics(3), metrics(40, **{"system/driver/memory_bytes": 5.0}), CLOSE)
    assert deliver(spool, "wandb").num_undelivered == 0
    rows = [{"reward/mean": 0.5 * step, "x": 1.0, "step": step} for step in range(4)]
    assert [*history(spool)] == [*rows, {"system/driver/memory_bytes": 5.0, "seconds": 40}]
