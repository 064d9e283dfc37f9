"""`python -m tests.support.struck_driver RUN_DIR run|resume ...`: the command line, as a process that can be struck
itself, whose workers can (`tests/support/strikes.py`). They fork from a server that has imported what they need."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
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


def _arrange(striker: Striker) -> None:
    set_preload = forkserver.set_forkserver_preload

    def set_longer(names: Iterable[str]) -> None:
        set_preload([*names, *IMPORTED])

    forkserver.set_forkserver_preload = set_longer
    settings, conclude, append = pipeline.driver.run.ExecutorSettings, pipeline.driver.run.conclude, Journal.append

    def reaching(journal: Journal, event: Event) -> None:
        append(journal, event)
        striker.reach("event")

    def concluding(*arguments: Any, **named: Any) -> Any:
        striker.reach("concluding")
        return conclude(*arguments, **named)

    Journal.append = reaching  # type: ignore[method-assign]
    pipeline.driver.run.conclude = concluding
    pipeline.driver.run.ExecutorSettings = lambda **given: settings(**{**given, "runtime": RUNTIME})  # type: ignore[misc, assignment]


if __name__ == "__main__":
    _striker = Striker(DRIVER, RunPaths(Path(sys.argv[1])).logs)
    (_striker.folder / DRIVER_PID).write_text(str(os.getpid()))
    _arrange(_striker)
    sys.exit(main(sys.argv[2:]))
