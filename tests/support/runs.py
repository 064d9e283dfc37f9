"""Whole runs on the random tiny model: their configs, running one to its end, and doing something to it meanwhile."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

import pipeline.driver.run
from pipeline.config.loading import load_config
from pipeline.config.run import RunConfig
from tests.support.paths import TINY, TINY_PROMPTS

ALL_ROLES = ("generate", "score", "reference", "policy", "critic")
QUIET = ("tracking.uri=null", "tracking.report=false")


def placement(gangs: str, **roles: str) -> str:
    """An override: gangs as YAML, and the gang of each role (in `ALL_ROLES`; `others` for those not named)."""
    others = roles.pop("others", None)
    where = ", ".join(f"{role}: {roles.get(role, others)}" for role in ALL_ROLES)
    return f"placement={{gangs: {gangs}, roles: {{{where}}}}}"


ONE_GANG = placement("{all: {}}", others="all")


def arguments(folder: Path, name: str, *overrides: str) -> list[str]:
    """Return the arguments of `stageline run` for a run that writes everything below `folder`."""
    fixed = (f"runs_dir={folder}/runs", f"name={name}", f"prompts.url={TINY_PROMPTS}", "cluster.dashboard=null")
    return [str(TINY), *fixed, *overrides]


def configure(folder: Path, name: str, *overrides: str) -> RunConfig:
    file, *changes = arguments(folder, name, *overrides)
    return load_config([file], changes)


def finish(config: RunConfig, printed: io.StringIO | None = None) -> RunConfig:
    """Runs to the end, with the driver in this process. `printed`: takes what it prints, not folded."""
    pipeline.driver.run.run(config, Console(file=printed or io.StringIO(), width=1000))
    return config


def finish_in(folder: Path, name: str, *overrides: str, printed: io.StringIO | None = None) -> RunConfig:
    """The same with `folder` as working directory and a relative runs_dir, as the shipped configs have; returns the
    config with an absolute one."""
    with chdir(folder):
        finish(configure(folder, name, *overrides, "runs_dir=runs"), printed)
    return configure(folder, name, *overrides)


def use_runtime(patch: pytest.MonkeyPatch, runtime: str) -> None:
    """Workers of the runs to come are built with another runtime (`module:Class`)."""
    settings = pipeline.driver.run.ExecutorSettings
    patch.setattr(pipeline.driver.run, "ExecutorSettings", lambda **given: settings(**{**given, "runtime": runtime}))


@contextmanager
def held_until(act: Callable[[threading.Event], None], control: Path) -> Iterator[None]:
    """Puts the file `hold` into a run's `control/` directory; while the body runs that run, `act` waits for something
    and does something in a thread, after which the file goes. `act` is given an event that says that the run has ended;
    what it raises is raised here."""
    control.mkdir(parents=True)
    (control / "hold").touch()
    stop = threading.Event()

    def work() -> None:
        try:
            act(stop)
        finally:
            (control / "hold").unlink()

    with ThreadPoolExecutor(1) as thread:
        acting = thread.submit(work)
        try:
            yield
        finally:
            stop.set()
    acting.result()
