"""Further trackers of a run (`tracking.also`). Each tracker has its own process, which `pipeline/observe/tracking.py`
starts: `python -m THIS_MODULE SPOOL TIMEOUT_S REPORTS`. The first line of its stdin is the tracker's name.

    mlflow_spool.jsonl ─┬─ metrics ─────────► TensorBoardSink ──► tensorboard/events.out.tfevents.stageline
                        └─ config, metrics ─► WandbSink ────────► wandb/offline-run-…   (`wandb sync` uploads it)

MLflow's writer reads the same spool. Traces, data sets, artifacts and models go to MLflow only. Each sink has its own
offset in the spool, so it waits neither for MLflow nor for another sink. If the process of a sink dies, a resume or
`stageline sync` starts a new process. No point is lost, and none is written twice:

    TensorBoard   `mlflow_spool.tensorboard.json` holds the offset in the spool, and the size that the event file had at
                  this offset. The next process truncates the event file to this size and continues. So the contents
                  of the file depend on the spool alone.
    W&B           The library cannot continue an offline run. The next process removes the directory and writes the
                  whole spool again, under the same run id.

The libraries are optional. Each is imported only by the process that needs it.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import shutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

from pipeline.observe.metric_catalogue import STEP, find_metric
from pipeline.observe.tracking import read_spool
from storage.locks import open_lock, take_lock

Item = dict[str, Any]

POLL_S = 0.25


class Sink(Protocol):
    """The interface of a sink, which delivers one spool to one tracker."""

    def deliver(self) -> None:
        """Write the new items of the spool."""
        ...

    def close(self) -> None:
        """Write what is still in memory, and close the files."""
        ...


class TensorBoardSink:
    """A sink that writes the run's metrics as a TensorBoard event file. It owns the event file, and the file that notes
    what is delivered."""

    def __init__(self, spool: Path) -> None:
        self._spool = spool
        self._event = importlib.import_module("tensorboard.compat.proto.event_pb2").Event
        self._note = spool.with_suffix(".tensorboard.json")
        path = spool.with_name("tensorboard") / "events.out.tfevents.stageline"
        path.parent.mkdir(exist_ok=True)
        self._file = path.open("ab")
        self._read_to, size = self._noted()
        if path.stat().st_size < size:  # a power cut has destroyed the end of the event file
            self._read_to, size = 0, 0
        self._file.truncate(size)
        self._is_new = size == 0
        self._records = importlib.import_module("tensorboard.summary.writer.record_writer").RecordWriter(self._file)

    def _noted(self) -> tuple[int, int]:
        """Return the offset in the spool up to which the event file was written, and the event file's size then, in
        bytes."""
        try:
            read_to, size = map(int, json.loads(self._note.read_bytes()))
        except (FileNotFoundError, TypeError, ValueError):
            return 0, 0
        return read_to, size

    def deliver(self) -> None:
        start = self._read_to
        for end, item in read_spool(self._spool, start):
            if item["kind"] == "metrics":
                self._write(item)
            self._read_to = end
        if self._read_to > start:
            self._file.flush()
            new = self._note.with_suffix(".tmp")
            new.write_text(json.dumps([self._read_to, os.fstat(self._file.fileno()).st_size]))
            new.replace(self._note)

    def _write(self, item: Item) -> None:
        """Write the metrics of an item. If the event file is new, first write the record that names the file's
        format."""
        if self._is_new:
            self._records.write(self._event(wall_time=item["t"], file_version="brain.Event:2").SerializeToString())
            self._is_new = False
        event = self._event(wall_time=item["t"], step=item["step"])
        for name, value in item["values"].items():
            event.summary.value.add(tag=name, simple_value=value)
        self._records.write(event.SerializeToString())

    def close(self) -> None:
        self._file.close()


class WandbSink:
    """A sink that writes the run's config and metrics as an offline run of Weights & Biases. It owns the directory of
    the offline run."""

    def __init__(self, spool: Path) -> None:
        self._wandb = importlib.import_module("wandb")
        self._spool, self._read_to = spool, 0
        self._run: Any = None
        self._axes: dict[str, str] = {}
        """Metric that was written -> name of its x-axis."""
        self._status = "KILLED"
        earlier = spool.with_name("wandb")
        if earlier.exists():
            shutil.rmtree(earlier)

    def deliver(self) -> None:
        for end, item in read_spool(self._spool, self._read_to):
            match item["kind"]:
                case "open":
                    self._open(item)
                case "metrics" if self._run is not None:
                    self._log(item)
                case "close":
                    self._status = item["status"]
            self._read_to = end

    def _open(self, item: Item) -> None:
        """Begin the offline run. If it has begun already, because a driver has resumed the run, update the config."""
        self._status = "KILLED"
        if self._run is not None:
            self._run.config.update(item["params"], allow_val_change=True)
            return
        self._run = self._wandb.init(
            mode="offline",
            dir=self._spool.parent,
            id=item["key"],
            project=item["experiment"],
            name=item["run_name"],
            config=item["params"],
            settings={"console": "off", "silent": True, "x_disable_meta": True, "x_disable_stats": True},
        )

    def _log(self, item: Item) -> None:
        """Write the metrics of an item. The values of their x-axes are written as metrics too, because W&B's own step
        number cannot decrease."""
        for name in item["values"].keys() - self._axes.keys():
            metric = find_metric(name)
            self._axes[name] = STEP if metric is None else metric.axis
            self._run.define_metric(name, step_metric=self._axes[name])
        steps = {self._axes[name]: item["step"] for name in item["values"]}
        self._run.log(item["values"] | steps | {"_timestamp": item["t"]})  # the time of the metric, not of the delivery

    def close(self) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(self._status != "FINISHED"))


SINKS: dict[str, Callable[[Path], Sink]] = {"tensorboard": TensorBoardSink, "wandb": WandbSink}


def main(arguments: Iterable[str]) -> int:
    spool, timeout_s, descriptor = arguments
    os.set_inheritable(int(descriptor), False)
    name = sys.stdin.readline().strip()
    os.nice(10)  # the stages have priority
    path = Path(spool).with_name(f"{name}.lock")
    with open_lock(path) as lock:
        take_lock(lock, path, 2 * float(timeout_s))  # the process of an earlier attempt may still deliver
        with contextlib.closing(SINKS[name](Path(spool))) as sink:
            while not select.select([sys.stdin], [], [], POLL_S)[0]:  # stdin ends when the driver closes it or dies
                sink.deliver()
            sink.deliver()
    with contextlib.suppress(BrokenPipeError):  # the driver was killed
        os.write(int(descriptor), b'{"run_id": null, "left": 0}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
