"""The cost of the graph when a run is long, or has many devices: stages that compute nothing, through the real driver.

**Long**: a whole run of many steps with worker processes: milliseconds a node and resident memory of the driver (with
the scheduler in it) and of the workers, by tenths of the run, then seconds until the finished run is resumed.

**Virtual devices**: the real driver, Dask over TLS, dispatch and ledger, with stages that sleep the seconds that the
cost model predicts for 8 to 512 H100 (`noop_runtime`). Policy and critic are Llama-3.1-8B; nothing of them is read.
Strong scaling has the same rows on all numbers of devices, weak scaling the same rows a device. The step is compared
with that of the simulator, which has no seconds for driver and scheduler here. So the difference is all that they, the
ledger and the sleeping workers of this machine add.

All seconds of a run are divided by one factor, so that its step takes `--step-s`. The driver is as fast as ever. So the
time by which a step is longer than its divided seconds is added to the whole ones:

    measured step = simulated step + (wall time of a step - simulated step / factor)

That is an upper bound: stages of whole length hide more of the driver's work than short ones do.

What is possible: exclusive creation of one small file, which a commit is, timed in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import os
import pickle
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path

import psutil
from distributed.security import Security
from rich.console import Console

import pipeline.driver.run
from benchmarks.harness import arguments, measured_load, report, write_json
from benchmarks.noop_driver import computing_nothing
from benchmarks.noop_runtime import TimedStages, VirtualHost
from pipeline.config.hardware import read_cluster
from pipeline.config.loading import load_config
from pipeline.config.memory import planned_run
from pipeline.config.preflight import Preflight, preflight
from pipeline.config.role_models import read_model, role_models
from pipeline.config.run import RunConfig
from pipeline.driver.cluster import Cluster
from pipeline.graph.graph import Node, run_nodes
from pipeline.plan.calibration import typical
from pipeline.plan.cost import costs_of
from pipeline.plan.lengths import lognormal_with_mean
from pipeline.plan.scenario import scenario_of
from pipeline.plan.simulate import Execution, Scenario, play
from pipeline.workers.worker_process import nanny_options

ROOT = Path(__file__).resolve().parents[1]
TENTHS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=1000, help="of the long run; 0: leave it out")
    parser.add_argument(
        "--dashboard", action="store_true", help="the long run with Dask's dashboard, and nobody looking"
    )
    parser.add_argument("--devices", type=int, nargs="*", default=DEVICES, help="numbers of virtual devices")
    parser.add_argument("--step-s", type=float, default=5.0, help="wall time of a simulated step (default 5 s)")


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
    """Run the real driver with the runtime that computes nothing."""
    steps = itertools.count(1)

    def counted(node: Node) -> None:
        if node.stage == "update_critic" and next(steps) % max(1, config.steps // TENTHS) == 0:
            samples.take()

    with computing_nothing(counted):
        samples.take()
        pipeline.driver.run.run(config, Console(file=StringIO()), resume=resume)


def measure_long(steps: int, dashboard: bool) -> tuple[dict[str, float], list[tuple[str, ...]]]:
    """Return the figures by name, and a row for each tenth."""
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


# ---- virtual devices -----------------------------------------------------------------------------------------------

DEVICES = (8, 16, 32, 64, 128, 256, 512)
STRONG_ROWS, WEAK_ROWS = 4096, 64
"""Rows of a step on any number of devices; rows of a step for each device."""
MEAN_TOKENS, SIGMA = 400, 0.8
"""Lengths of responses: the mean after the cut, and the spread of the logarithm."""
WARM_UP_STEPS = 2
COLUMNS = ("scaling", "rows a step", "simulator, s", "measured, s", "difference", "driver busy", "of linear")


def devices_config(devices: int, rows: int, steps: int, *changes: str) -> RunConfig:
    """Return the shipped 8B run on this many GPUs: half generate in up to 32 replicas, half train."""
    half = devices // 2
    replicas, tensor = min(half, 32), 4 if devices <= 64 else 8
    layout = f"tensor: {tensor}, sequence_parallel: true, distributed_optimizer: true, recompute: selective"
    fixed = (
        f"name=devices-{devices}-rows-{rows}", f"steps={steps}", "evaluate.every=0", "mismatch.rows=0",
        "tracking.uri=null", "tracking.report=false", "cluster.dashboard=null",
        f"model.path={ROOT}/conf/model/llama-3.1-8b", "engine.kind=embedded", "engine.python=null",
        f"engine.tensor_parallel={half // replicas}",
        f"rollout.rows={rows}", f"rollout.shards={2 * replicas}",
        f"placement.gangs.generate.workers={replicas}",
        f"placement.gangs.train.workers={half}", f"placement.gangs.train.layout={{{layout}}}",
    )  # fmt: skip
    return load_config([str(ROOT / "conf/run/8xh100_8b.yaml")], [*fixed, *changes])


def devices_scenario(config: RunConfig, devices: int) -> Scenario:
    """Return the run as the simulator plays it on nodes of 8 H100, with no seconds for driver and scheduler."""
    models = role_models(config, read_model("model.path", config.model.path, weights=False), weights=False)
    calibration = replace(typical("H100-80", on_gpus=True), overhead_s=0.0, turnaround_s=0.0, beside_s=0.0)
    cluster = read_cluster(f"{devices // 8}x8xH100-80")
    lengths = lognormal_with_mean(MEAN_TOKENS, SIGMA, config.sampling.max_new_tokens)
    return scenario_of(costs_of(planned_run(config, models, on_gpus=True), cluster, calibration), lengths)


def mean_step_s(published_s: Sequence[float]) -> float:
    """Return the mean seconds of the steps after the warm-up. `published_s`: times of versions 0, 1, ..."""
    return (published_s[-1] - published_s[WARM_UP_STEPS]) / (len(published_s) - 1 - WARM_UP_STEPS)


def timed_stages(scenario: Scenario, wall_step_s: float) -> tuple[float, TimedStages]:
    """Return the simulated seconds of a step, and the nodes of the run with their seconds.

    Args:
        wall_step_s: seconds that a step is to take; a shorter step keeps its seconds.
    """
    ran: list[Execution] = []
    simulated_s = mean_step_s(play(scenario, ran.append).published_s)
    costs, queue = scenario.costs, scenario.costs.engine_queue()
    assert queue is not None
    return simulated_s, TimedStages(
        seconds={one.submit.node.address: one.finished_s - one.started_s for one in ran},
        rows={one.submit.node.address: one.lengths for one in ran if one.submit.node.stage == "generate"},
        queue=queue,
        refit_s=costs.refit_s(),
        after_rows_s=costs.after_rows_s(beside=False),
        factor=max(1.0, simulated_s / wall_step_s),
    )


@contextmanager
def virtual_cluster(config: RunConfig, stages: TimedStages) -> Iterator[Cluster]:
    """Yield the run's cluster, whose workers are in one process beside this one."""
    security = Security.temporary()
    options = [
        nanny_options(config, gang, index, security, shared=True, gpus=None) | {"host": "127.0.0.1"}
        for gang in config.gangs()
        for index in range(gang.workers)
    ]
    workers = [{name: value for name, value in one.items() if name != "env"} for one in options]
    command = [sys.executable, "-c", "from benchmarks.noop_runtime import serve; serve()"]
    with (
        Cluster(config, security, "127.0.0.1") as cluster,
        subprocess.Popen(command, stdin=subprocess.PIPE) as process,
    ):
        assert process.stdin is not None
        pickle.dump(VirtualHost(cluster.scheduler.address, workers, stages), process.stdin)
        process.stdin.flush()
        yield cluster  # the end of its standard input ends the process


@dataclass(frozen=True)
class Publication:
    """The driver's clocks when it hears of a publication."""

    at_s: float
    cpu_s: float
    """Processor seconds of its process: the executor's loop, Dask's client and the scheduler."""
    loop_s: float
    """Processor seconds of the executor's loop."""
    nodes: int
    """Nodes that are done."""


@dataclass(frozen=True)
class Measured:
    """A step of the real driver on virtual devices, as the mean of the steps after the warm-up."""

    step_s: float
    """Seconds of a step with the stages' whole seconds."""
    cpu_s: float
    loop_s: float
    nodes: float
    others: float
    """Share of this machine that other processes used."""


def run_on_devices(config: RunConfig, stages: TimedStages, simulated_s: float, checked: Preflight) -> Measured:
    """Run a config with stages that sleep. `checked`: the preflight of any run; the driver needs its tokenizer."""
    published: list[Publication] = []
    count = itertools.count(1)

    def counted(node: Node) -> None:
        number = next(count)
        if node.stage == "publish":
            published.append(Publication(time.perf_counter(), time.process_time(), time.thread_time(), number))

    replaced = {
        "check_run": lambda config, *, resume: checked,
        "begin_forkserver": lambda config: None,
        "start_cluster": lambda config: virtual_cluster(config, stages),
    }
    with measured_load() as load, computing_nothing(counted, **replaced):
        pipeline.driver.run.run(config, Console(file=StringIO()))
    first, last, steps = published[WARM_UP_STEPS], published[-1], len(published) - 1 - WARM_UP_STEPS
    return Measured(
        step_s=simulated_s + (last.at_s - first.at_s) / steps - simulated_s / stages.factor,
        cpu_s=(last.cpu_s - first.cpu_s) / steps,
        loop_s=(last.loop_s - first.loop_s) / steps,
        nodes=(last.nodes - first.nodes) / steps,
        others=load().others,
    )


def measure_devices(
    every: Sequence[int], steps: int, wall_step_s: float, repeats: int
) -> tuple[dict[str, float], list[tuple[str, ...]], list[str]]:
    """Return the figures by name, and a row and a note for each kind of scaling and number of devices."""
    found: dict[tuple[int, int], list[Measured]] = {}
    played: dict[tuple[int, int], tuple[float, TimedStages]] = {}
    kinds = {"strong": dict.fromkeys(every, STRONG_ROWS), "weak": {devices: WEAK_ROWS * devices for devices in every}}
    cases = list(dict.fromkeys(case for kind in kinds.values() for case in kind.items()))
    for devices, rows in cases:
        scenario = devices_scenario(devices_config(devices, rows, steps), devices)
        played[devices, rows] = timed_stages(scenario, wall_step_s)
    with tempfile.TemporaryDirectory() as folder:
        checked = preflight(long_config(Path(folder), 1, dashboard=False))
        for repeat, (devices, rows) in itertools.product(range(repeats), cases):
            simulated_s, stages = played[devices, rows]
            where = (f"runs_dir={folder}/{repeat}", "model.path=random:tiny")
            measured = run_on_devices(devices_config(devices, rows, steps, *where), stages, simulated_s, checked)
            found.setdefault((devices, rows), []).append(measured)
            print(f"{devices} devices, {rows} rows: {measured.step_s:.2f} s a step", file=sys.stderr, flush=True)
    figures, table, notes = dict[str, float](), list[tuple[str, ...]](), list[str]()
    for kind, rows_of in kinds.items():
        for devices, rows in rows_of.items():
            (simulated_s, stages), several = played[devices, rows], found[devices, rows]
            step_s = statistics.median(one.step_s for one in several)
            one = next(one for one in several if one.step_s == statistics.median_low(m.step_s for m in several))
            mine = {
                "rows": rows,
                "nodes": one.nodes,
                "simulated_s": simulated_s,
                "step_s": step_s,
                "difference": step_s / simulated_s - 1,
                "driver_share": one.cpu_s / step_s,
                "driver_ms_per_node": 1e3 * one.cpu_s / one.nodes,
                "loop_ms_per_node": 1e3 * one.loop_s / one.nodes,
                "rows_per_device_s": rows / step_s / devices,
                "factor": stages.factor,
                "others_load": max(one.others for one in several),
            }
            figures |= {f"{kind}/{devices}/{name}": float(value) for name, value in mine.items()}
            linear = mine["rows_per_device_s"] / figures[f"{kind}/{every[0]}/rows_per_device_s"]
            table.append(
                (f"{kind}, {devices}", str(rows), f"{simulated_s:.2f}", f"{step_s:.2f}", f"{mine['difference']:+.1%}",
                 f"{mine['driver_share']:.1%}", f"{linear:.0%}")
            )  # fmt: skip
            notes.append(
                f"{kind}, {devices}: {one.nodes:.0f} nodes a step, each {mine['driver_ms_per_node']:.1f} ms of the "
                f"driver; factor {stages.factor:.1f}; others' load {mine['others_load']:.0%}"
            )
    return figures, table, notes


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
    steps, every, of_each, wall_step_s = options.steps, options.devices, 5, options.step_s
    if options.quick:
        steps, every, of_each, wall_step_s = min(steps, 20), every[:2], 4, 1.0
    figures: dict[str, float] = {}
    if steps:
        with measured_load() as load:
            long, rows = measure_long(steps, options.dashboard)
            figures |= {**long, "limit/create_ms": create_ms()}
        notes = [f"{name}: {value:.4g}" for name, value in figures.items()]
        figures["others_load"] = load().others
        columns = ("long run", "ms a node", "driver MB", "workers MB")
        report(f"A run of {steps} steps whose stages compute nothing", columns, rows, notes)
    if every:
        devices, rows, notes = measure_devices(every, of_each, wall_step_s, 1 if options.quick else options.repeats)
        figures |= devices
        notes.append(f"of linear: rows a second and device, over those with {every[0]} devices")
        report("Steps on virtual devices", COLUMNS, rows, notes)
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
