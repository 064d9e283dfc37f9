"""The cost of the driver with many workers on Slurm: one job, one `srun` for a pool of many replicas, stages that
compute nothing, through the real script, driver, TLS, ledger and journal.

Needs a Slurm whose commands are on the path, and this directory on a filesystem that its nodes mount (`--runs-dir`).
Reported, of one run:

    wall time a node     from the last worker's build to the last node that is done, over the nodes in between: what
                         workers take to answer is in it, and where they are on the driver's machine, whatever they do
    driver's CPU a node  CPU seconds of the driver's process (its scheduler in it) in the same time, over the same nodes
    driver's memory      resident, at the end
    first node           from Slurm's start of the job (whole seconds) to the first node that is submitted; likewise
                         until the last worker is built
    others_load          of this machine's cores, in the five seconds before: the job's own processes are not ours
"""

from __future__ import annotations

import argparse
import bisect
import json
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import noop_driver
from benchmarks.harness import arguments, measured_load, report, write_json
from pipeline.config.loading import load_config, to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.launch.commands import cancel, job_state, require_slurm
from pipeline.launch.submission import submit_run
from pipeline.observe.journal import EventKind, read_events

ROOT = Path(__file__).resolve().parents[1]
_LOOK_S = 1.0
_BEFORE_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=64, help="replicas of the pool that generates (default 64)")
    parser.add_argument("--nodes", type=int, default=4, help="on so many nodes (default 4), beside the batch node")
    parser.add_argument("--steps", type=int, default=20, help="with a shard for each replica (default 20)")
    parser.add_argument("--runs-dir", type=Path, default=Path("runs"), help="default: runs")
    parser.add_argument("--local", action="store_true", help="the same on this host without Slurm, for comparison")


def noop_config(folder: Path, workers: int, nodes: int, steps: int, *, kind: str) -> RunConfig:
    """Return a run whose pool has that many replicas, each with a shard of every step."""
    changes = [
        f"runs_dir={folder}", f"name=noop-{kind}", f"steps={steps}", "evaluate.every=0", "tracking.uri=null",
        "tracking.report=false", "cluster.dashboard=null", f"cluster.kind={kind}",
        "cluster.start_timeout_s=1200", *(["cluster.arrival_timeout_s=1200"] if kind == "attached" else []),
        f"prompts.url={ROOT}/conf/data/tiny_prompts.jsonl",
        f"placement.gangs.generate={{workers: {workers}, concurrent_shards: 1}}",
        f"rollout={{rows: {workers}, shards: {workers}}}",
        "ppo.minibatches=1", "slurm.gres=null", "slurm.time_limit=0-01:00:00",
        f"slurm.gangs={{generate: {{nodes: {nodes}}}}}",
        f"slurm.command='{shlex.quote(sys.executable)} -m benchmarks.noop_driver'",
    ]  # fmt: skip
    return load_config([str(ROOT / "conf/run/tiny.yaml")], changes)


def run_on_slurm(config: RunConfig) -> float:
    """Submit it and wait for its end. Return the time at which Slurm started it.

    Raises:
        SystemExit: it did not end well; with what it printed.
    """
    job = submit_run(config)
    try:
        while (state := job_state(job.job_id)) is not None and not state.is_over:
            time.sleep(_LOOK_S)
    except KeyboardInterrupt:
        cancel(job.job_id)
        raise
    if state is None or state.state != "COMPLETED":
        raise SystemExit(f"job {job.job_id}: {state}\n{job.output.read_text()}")
    return time.mktime(time.strptime(state.start, "%Y-%m-%dT%H:%M:%S"))


def run_here(config: RunConfig) -> float:
    """Run it with workers of the driver's own. Return the time at which its process was started. Raises
    CalledProcessError."""
    file = RunPaths(config.run_dir).job / "config.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(to_yaml(config))
    started = time.time()
    command = [sys.executable, "-m", "benchmarks.noop_driver", "run", str(file)]
    subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
    return started


def figures_of(config: RunConfig, started: float, prefix: str) -> dict[str, float]:
    """Return the figures of a finished run. `started`: seconds since the epoch."""
    cost = noop_driver.DriverCost(**json.loads((config.run_dir / noop_driver.FILE).read_text()))
    events = list(read_events(RunPaths(config.run_dir).events))
    last_built = max(event.t for event in events if event.kind is EventKind.GANG_BUILT)
    first = bisect.bisect(cost.at_s, last_built)
    nodes = len(cost.at_s) - 1 - first
    if nodes < 1:
        raise SystemExit(f"all {len(cost.at_s)} nodes were done before the last worker was built: more --steps")
    wall, spent = cost.at_s[-1] - cost.at_s[first], cost.cpu_s[-1] - cost.cpu_s[first]
    gang = config.placement.gangs["generate"]
    return {
        f"{prefix}/workers": float(gang.workers),
        f"{prefix}/steps": float(config.steps),
        f"{prefix}/nodes": float(len(cost.at_s)),
        f"{prefix}/nodes_with_all_workers": float(nodes),
        f"{prefix}/wall_ms_per_node": 1e3 * wall / nodes,
        f"{prefix}/driver_cpu_ms_per_node": 1e3 * spent / nodes,
        f"{prefix}/driver_mb": cost.memory_bytes / 1e6,
        f"{prefix}/first_node_s": next(event.t for event in events if event.kind is EventKind.SUBMITTED) - started,
        f"{prefix}/last_built_s": last_built - started,
    }


def main() -> None:
    options = arguments(__doc__ or "", add_arguments)
    require_slurm()
    workers, nodes, steps = (4, 2, 4) if options.quick else (options.workers, options.nodes, options.steps)
    options.runs_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="slurm-scale-", dir=options.runs_dir.absolute()) as folder:
        with measured_load() as load:
            time.sleep(_BEFORE_S)
        config = noop_config(Path(folder), workers, nodes, steps, kind="attached")
        figures = figures_of(config, run_on_slurm(config), "slurm")
        if options.local:
            config = noop_config(Path(folder), workers, nodes, steps, kind="local")
            figures |= figures_of(config, run_here(config), "local")
    figures["others_load"] = load().others
    rows = [(name, f"{value:.4g}") for name, value in figures.items()]
    title = f"{workers} replicas on {nodes} nodes of Slurm, and a scorer and a trainer, whose stages compute nothing"
    report(title, ("", "figure"), rows, [])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
