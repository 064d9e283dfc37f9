"""`python -m benchmarks.noop_driver COMMAND...`: `stageline COMMAND...`, whose stages compute nothing.

Workers are as ever: the driver names the runtime that they are built with. What the driver's process takes (CPU seconds,
all of its threads and Dask's scheduler among them; resident memory) is sampled with every node that is done, and written
to `driver_cost.json` in the directory of the run.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

import pipeline.driver.run
from pipeline.cli.main import main
from pipeline.config.run import RunConfig
from pipeline.driver.context import ExecutorSettings
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node

FILE = "driver_cost.json"


@dataclass
class DriverCost:
    """From one node that was done to another."""

    at_s: list[float] = field(default_factory=list)
    """Of the first node that was done, and of the newest: since the epoch."""
    cpu_s: list[float] = field(default_factory=list)
    """Of the driver's process until then."""
    nodes: int = 0
    """Done after the first one."""
    memory_bytes: int = 0
    """Resident, at the newest."""

    def take(self) -> None:
        now, spent = time.time(), time.process_time()
        if self.at_s:
            self.at_s[1:], self.cpu_s[1:] = [now], [spent]
            self.nodes += 1
        else:
            self.at_s, self.cpu_s = [now, now], [spent, spent]


def command(arguments: list[str]) -> int:
    """Runs one of Stageline's commands; returns its exit code."""
    settings, over, cost = pipeline.driver.run._executor_settings, Flow.done, DriverCost()
    run_dirs: list[Path] = []

    def noop_settings(config: RunConfig) -> ExecutorSettings:
        run_dirs.append(config.run_dir)
        return ExecutorSettings(**{**vars(settings(config)), "runtime": "benchmarks.noop_runtime:NoopRuntime"})

    def counted(flow: Flow, node: Node) -> None:
        over(flow, node)
        cost.take()

    pipeline.driver.run._executor_settings = noop_settings  # type: ignore[assignment]
    Flow.done = counted  # type: ignore[method-assign]
    code = main(arguments)
    if run_dirs:
        cost.memory_bytes = psutil.Process().memory_info().rss
        (run_dirs[0] / FILE).write_text(json.dumps(asdict(cost)))
    return code


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
