"""`python -m tests.support.struck_driver RUN_DIR run|resume ...`: the command line, as a process that can be struck
itself, whose workers can (`tests/support/strikes.py`). They fork from a server that has imported what they need."""

from __future__ import annotations

import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterable
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pipeline.driver.run
from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.observe.journal import Event, Journal
from tests.support.strikes import DRIVER, DRIVER_PID, Striker

RUNTIME = "tests.support.struck_runtime:StruckRuntime"
IMPORTED = ("stages.models.host", "stages.engines.embedded.engine", "storage.rollouts", "omegaconf")


def _count_writes(striker: Striker, run_dir: Path) -> None:
    """Points of the driver's own writes into the run's directory: `preparing`, `concluding write` and `letting go`, by
    what it is doing. A text may be cut in half, a directory half removed; else it is struck before or after."""
    doing = ""

    def point() -> str:
        return "letting go" if threading.current_thread().name.startswith("retention") else doing

    def during(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            nonlocal doing
            doing = what
            try:
                return function(*arguments, **named)
            finally:
                doing = ""

        return wrapped

    def ours(*paths: Any) -> bool:
        return bool(point()) and any(str(path).startswith(str(run_dir)) for path in paths)

    def around(owner: Any, name: str) -> None:
        function = getattr(owner, name)

        def reaching(*arguments: Any, **named: Any) -> Any:
            counted = ours(*arguments[:2])
            if counted:
                striker.reach(point())
            result = function(*arguments, **named)
            if counted:
                striker.reach(point())
            return result

        setattr(owner, name, reaching)

    def torn(path: Path, data: str, *arguments: Any, **named: Any) -> int:
        if ours(path) and striker.due(point()):
            write_text(path, data[: len(data) // 2], *arguments, **named)
            striker.strike()
        return write_text(path, data, *arguments, **named)

    def half_removed(path: Any, *arguments: Any, **named: Any) -> None:
        if ours(path) and striker.due(point()):
            files = sorted(file for file in Path(path).rglob("*") if file.is_file())
            for file in files[: (len(files) + 1) // 2]:
                file.unlink()
            striker.strike()
        remove(path, *arguments, **named)

    write_text, remove = Path.write_text, shutil.rmtree
    Path.write_text = torn  # type: ignore[method-assign]
    shutil.rmtree = half_removed  # type: ignore[assignment]
    for name in ("replace", "rename", "link"):
        around(os, name)
    pipeline.driver.run.prepare = during("preparing", pipeline.driver.run.prepare)
    pipeline.driver.run.conclude_run = during("concluding write", pipeline.driver.run.conclude_run)


def _arrange(striker: Striker) -> None:
    set_preload = forkserver.set_forkserver_preload

    def set_longer(names: Iterable[str]) -> None:
        set_preload([*names, *IMPORTED])

    forkserver.set_forkserver_preload = set_longer
    settings, conclude, append = pipeline.driver.run.ExecutorSettings, pipeline.driver.run.conclude_run, Journal.append

    def reaching(journal: Journal, event: Event) -> None:
        append(journal, event)
        striker.reach("event")

    def concluding(*arguments: Any, **named: Any) -> Any:
        striker.reach("concluding")
        return conclude(*arguments, **named)

    Journal.append = reaching  # type: ignore[method-assign]
    pipeline.driver.run.conclude_run = concluding
    pipeline.driver.run.ExecutorSettings = lambda **given: settings(**{**given, "runtime": RUNTIME})  # type: ignore[misc, assignment]


if __name__ == "__main__":
    _striker = Striker(DRIVER, RunPaths(Path(sys.argv[1])).logs)
    (_striker.folder / DRIVER_PID).write_text(str(os.getpid()))
    _count_writes(_striker, Path(sys.argv[1]))
    _arrange(_striker)
    sys.exit(main(sys.argv[2:]))
