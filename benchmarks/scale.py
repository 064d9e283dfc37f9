"""The cost of the graph when a run is long or wide: stages that compute nothing, through the real driver.

Long: a whole run of many steps through real Dask processes: milliseconds a node and resident memory of the driver (with
the scheduler in it) and of the workers, by tenths of the run, then seconds until the finished run is resumed.

Wide: hundreds of simulated workers, which answer at once in this process: milliseconds of the driver a node, without
Dask's messages.

What is possible: exclusive creation of one small file, which a commit is, timed in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from io import StringIO
from pathlib import Path
from typing import Any, cast

import psutil
from distributed import Client
from rich.console import Console

import pipeline.driver.run
from benchmarks.harness import arguments, measured_load, report, write_json
from benchmarks.noop_driver import computing_nothing
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.config.sections import ClusterConfig
from pipeline.driver.context import ExecutorEvents, ExecutorSettings
from pipeline.driver.executor import Executor
from pipeline.graph.dispatch import Dispatch
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Gang, GraphSpec, Node, run_nodes
from pipeline.observe.journal import Journal
from pipeline.workers.messages import REPORTS, Built, Call, Outcome, WorkerSpec
from stages.models.protocol import Role
from storage import codec
from storage.address import Ref

ROOT = Path(__file__).resolve().parents[1]
TENTHS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1000, help="of the long run")
    parser.add_argument(
        "--dashboard", action="store_true", help="the long run with Dask's dashboard, and nobody looking"
    )
    parser.add_argument("--workers", type=int, default=512, help="simulated ones of the wide run")


# ---- long ------------------------------------------------------------------------------------------------------------


def long_config(directory: Path, steps: int, dashboard: bool) -> RunConfig:
    changes = (
        f"runs_dir={directory}", "name=long", f"steps={steps}", "evaluate.every=0", "tracking.uri=null",
        "tracking.report=false", f"cluster.dashboard={'127.0.0.1:0' if dashboard else 'null'}",
        f"prompts.url={ROOT}/conf/data/tiny_prompts.jsonl",
    )  # fmt: skip
    return load_config([str(ROOT / "conf/run/tiny.yaml")], list(changes))


@dataclass
class Samples:
    """Samples of a long run: seconds and bytes each time a tenth of its steps is done."""

    at_s: list[float] = field(default_factory=list)
    driver: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)

    def take(self) -> None:
        process = psutil.Process()
        self.at_s.append(time.perf_counter())
        self.driver.append(process.memory_info().rss)
        self.workers.append(sum(child.memory_info().rss for child in process.children(recursive=True)))


def run_long(config: RunConfig, samples: Samples, *, resume: bool) -> None:
    """The real driver, with the runtime that computes nothing."""
    steps = itertools.count(1)

    def counted(node: Node) -> None:
        if node.stage == "update_critic" and next(steps) % max(1, config.steps // TENTHS) == 0:
            samples.take()

    with computing_nothing(counted):
        samples.take()
        pipeline.driver.run.run(config, Console(file=StringIO()), resume=resume)


def measure_long(steps: int, dashboard: bool) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """Figures by name, and a row for each tenth."""
    with tempfile.TemporaryDirectory() as folder:
        config = long_config(Path(folder), steps, dashboard)
        samples = Samples()
        run_long(config, samples, resume=False)
        ended = time.perf_counter()
        nodes = sum(1 for _ in run_nodes(config.graph()))
        started = time.perf_counter()
        run_long(config, Samples(), resume=True)
        resumed_s = time.perf_counter() - started
        files = sum(len(names) for _, _, names in os.walk(folder))
        size = sum((Path(at) / name).stat().st_size for at, _, names in os.walk(folder) for name in names)
    per_tenth = nodes / TENTHS
    ms = [1e3 * (b - a) / per_tenth for a, b in itertools.pairwise(samples.at_s)]
    rows: list[tuple[str, ...]] = [
        (f"steps to {steps * (i + 1) // TENTHS}", f"{ms[i]:.2f}", f"{samples.driver[i + 1] / 1e6:.0f}",
         f"{samples.workers[i + 1] / 1e6:.0f}")
        for i in range(len(ms))
    ]  # fmt: skip
    figures = {
        "long/steps": float(steps),
        "long/nodes": float(nodes),
        "long/ms_per_node_first": ms[1],
        "long/ms_per_node_last": ms[-1],
        "long/driver_kb_per_step": (samples.driver[-1] - samples.driver[2]) / 1e3 / (steps * 0.8),
        "long/workers_kb_per_step": (samples.workers[-1] - samples.workers[2]) / 1e3 / (steps * 0.8),
        "long/summary_s": ended - samples.at_s[-1],
        "long/resume_finished_s": resumed_s,
        "long/files_per_step": files / steps,
        "long/bytes_per_step": size / steps,
    }
    return figures, rows


# ---- wide ------------------------------------------------------------------------------------------------------------


class SimulatedFuture:
    """The part of a Dask future that the executor uses."""

    def __init__(self, key: object, result: object) -> None:
        self.key, self._result, self.status = key, result, "finished"
        self._callbacks: list[Callable[[Any], None]] = []

    def result(self, timeout: float | None = None) -> object:
        del timeout
        return self._result

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        callback(self)

    def release(self) -> None:
        self._result = None


class SimulatedCluster:
    """Owns the answers of workers that do nothing: a build succeeds at once, a node's outcome is reported at once."""

    def __init__(self) -> None:
        self._topics: dict[str, Callable[[tuple[float, object]], None]] = {}
        self._names: list[str] = []

    def submit(self, function: object, what: object, *edges: object, key: object, **options: object) -> SimulatedFuture:
        del function, edges, options
        if isinstance(what, WorkerSpec):
            self._names.append(what.name)
            return SimulatedFuture(key, Built(f"simulated://{what.name}", {}, host="simulated"))
        call = cast(Call, what)
        index = int(call.worker.rpartition("-")[2])
        now = time.time()
        outcome = Outcome(
            call.address, call.attempt, Ref(call.address, call.attempt), call.worker, index, now, now, 0.0
        )
        self._topics[REPORTS]((now, codec.encode(outcome)))
        return SimulatedFuture(key, None)

    def scheduler_info(self, n_workers: int) -> dict[str, dict[str, dict[str, object]]]:
        """Every worker lives."""
        del n_workers
        return {"workers": {f"simulated://{name}": {"name": name, "last_seen": time.time()} for name in self._names}}

    def subscribe_topic(self, topic: str, handler: Callable[[tuple[float, object]], None]) -> None:
        self._topics[topic] = handler

    def unsubscribe_topic(self, topic: str) -> None:
        del self._topics[topic]


def measure_wide(workers: int, steps: int) -> dict[str, float]:
    """Half of the workers generate, a shard each; half train, in one gang."""
    half = workers // 2
    gangs = [
        Gang("generate", frozenset({Role.GENERATE}), half),
        Gang("score", frozenset({Role.SCORE, Role.ADVANTAGE}), 1),
        Gang("train", frozenset({Role.POLICY, Role.REFERENCE, Role.CRITIC}), workers - half),
    ]
    graph = GraphSpec(steps=steps, shards=half, staleness=1)
    with tempfile.TemporaryDirectory() as folder:
        journal = Journal(Path(folder) / "events.jsonl")
        dispatch = Dispatch(gangs)
        settings = ExecutorSettings(ClusterConfig(deadline_s=60.0), 300.0, RunPaths(Path(folder)), config_yaml="")
        done: list[Node] = []

        class Counting(ExecutorEvents):
            def node_done(self, node: Node, outcome: Outcome) -> None:
                del outcome
                done.append(node)
                flow.done(node)

        client = cast(Client, SimulatedCluster())
        executor = Executor(client, dispatch, journal, settings, Counting())
        flow = Flow(
            graph,
            dispatch,
            on_step=lambda step, nodes: executor.release([node.address for node in nodes]),
            on_unread=lambda version: None,
        )
        executor.start()
        flow.advance()
        started = time.process_time()
        executor.run(lambda: flow.finished)
        seconds = time.process_time() - started
        executor.close()
        size = journal.path.stat().st_size
        journal.close()
    return {
        "wide/workers": float(workers),
        "wide/nodes": float(len(done)),
        "wide/ms_per_node": 1e3 * seconds / len(done),
        "wide/journal_bytes_per_node": size / len(done),
    }


def create_ms(number: int = 2000) -> float:
    """Return the median milliseconds of one exclusive creation of a file of a commit's size."""
    data, taken = b"x" * 1000, []
    with tempfile.TemporaryDirectory() as folder:
        for i in range(number):
            started = time.perf_counter()
            with (Path(folder) / str(i)).open("xb") as file:
                file.write(data)
            taken.append(time.perf_counter() - started)
    return 1e3 * statistics.median(taken)


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    steps, workers = (20, 32) if options.quick else (options.steps, options.workers)
    with measured_load() as load:
        wide = measure_wide(workers, 2 if options.quick else 4)
        long, rows = measure_long(steps, options.dashboard)
        figures = {**long, **wide, "limit/create_ms": create_ms()}
    notes = [f"{name}: {value:.4g}" for name, value in figures.items()]
    figures["others_load"] = load().others
    columns = ("long run", "ms a node", "driver MB", "workers MB")
    report(f"A run of {steps} steps whose stages compute nothing", columns, rows, notes)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
