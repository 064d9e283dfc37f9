"""`python -m benchmarks.noop_driver COMMAND...`: `stageline COMMAND...`, whose stages compute nothing.

Workers are as ever: the driver names the runtime that they are built with. What the driver's process takes (CPU
seconds, all of its threads and Dask's scheduler among them; resident memory) is sampled with every node that is done,
and written to `driver_cost.json` in the run's directory.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil

from pipeline.cli.main import main
from pipeline.graph.flow import Flow
from pipeline.graph.graph import Node

FILE = "driver_cost.json"


@dataclass
class DriverCost:
    """An entry for each node that was done."""

    at_s: list[float] = field(default_factory=list)
    """Times in seconds since the epoch."""
    cpu_s: list[float] = field(default_factory=list)
    """Processor seconds of the driver's process until then."""
    memory_bytes: int = 0
    """Resident, at the end."""

    def take(self) -> None:
        self.at_s.append(time.time())
        self.cpu_s.append(time.process_time())


@contextmanager
def computing_nothing(node_done: Callable[[Node], None], **replaced: object) -> Iterator[list[Path]]:
    """Make the drivers of this process build their workers with the runtime that computes nothing. Yield the
    directories of the runs that were started, as they come.

    Args:
        node_done: called after each node, in the driver's thread.
        replaced: replacements of further names of `pipeline.driver.run`.
    """
    driver, over = vars(importlib.import_module("pipeline.driver.run")), Flow.on_node_done
    settings = driver["_executor_settings"]
    run_dirs: list[Path] = []

    def noop_settings(config: Any) -> Any:
        run_dirs.append(config.run_dir)
        return replace(settings(config), runtime="benchmarks.noop_runtime:NoopRuntime")

    def told(self: Flow, node: Node) -> None:
        over(self, node)
        node_done(node)

    replaced["_executor_settings"] = noop_settings
    before = {name: driver[name] for name in replaced}
    try:
        driver.update(replaced)
        Flow.on_node_done = told  # type: ignore[method-assign]
        yield run_dirs
    finally:
        driver.update(before)
        Flow.on_node_done = over  # type: ignore[method-assign]


def command(arguments: list[str]) -> int:
    """Run one of Stageline's commands and return its exit code."""
    if arguments[:1] == ["worker"]:  # which needs no torch, and there are many
        return main(arguments)
    cost = DriverCost()
    with computing_nothing(lambda node: cost.take()) as run_dirs:
        code = main(arguments)
    if run_dirs:
        cost.memory_bytes = psutil.Process().memory_info().rss
        (run_dirs[0] / FILE).write_text(json.dumps(asdict(cost)))
    return code


if __name__ == "__main__":
    sys.exit(command(sys.argv[1:]))
