"""A job that ends before its run's last step, and is started again, spends no time on plots, report and summary;
whoever finishes the run writes them. What ends it comes before its workers."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from rich.console import Console

import pipeline.driver.run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.run import Run
from pipeline.driver.session import TerminatedEarly
from pipeline.errors import WorkersMissing
from tests.support.runs import configure

JOB = (signal.SIGUSR1,)


def started(error: BaseException | None = None) -> Callable[[Run], AbstractContextManager[None]]:
    """Return a stand-in for `_started`: nothing is left to compute, or an error comes before the workers."""

    @contextmanager
    def start(run: Run) -> Iterator[None]:
        if error is not None:
            raise error
        yield None

    return start


def results(config: RunConfig) -> list[bool]:
    paths = RunPaths(config.run_dir)
    return [paths.summary.exists(), paths.report.exists()]


@pytest.mark.parametrize(
    "error", [TerminatedEarly(), WorkersMissing("worker train-0 did not join")], ids=["asked", "missing"]
)
def test_a_run_that_goes_on_is_not_concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    config, console = (
        configure(tmp_path, "early", "tracking.uri=null", "tracking.report=true"),
        Console(file=io.StringIO()),
    )
    monkeypatch.setattr(pipeline.driver.run, "_start_run", started(error))
    with pytest.raises(type(error)):
        pipeline.driver.run.run(config, console, immediate_signals=JOB)
    assert results(config) == [False, False]
    monkeypatch.setattr(pipeline.driver.run, "_start_run", started())
    pipeline.driver.run.run(config, console, resume=True, immediate_signals=JOB)
    assert results(config) == [True, True]


def test_a_run_that_nobody_starts_again_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss outside a job."""
    config, console = (
        configure(tmp_path, "alone", "tracking.uri=null", "tracking.report=true"),
        Console(file=io.StringIO()),
    )
    monkeypatch.setattr(pipeline.driver.run, "_start_run", started(WorkersMissing("worker train-0 did not join")))
    with pytest.raises(WorkersMissing):
        pipeline.driver.run.run(config, console)
    assert results(config) == [True, True]
