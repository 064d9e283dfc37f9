"""A job that ends before its run's last step, and is started again, spends no time on plots, report and summary;
whoever finishes the run writes them. What ends it is put in the place of the run itself."""

from __future__ import annotations

import io
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest
from rich.console import Console

import pipeline.driver.run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.errors import WorkersMissing
from pipeline.driver.session import EndedEarly
from tests.support.runs import configure

JOB = (signal.SIGUSR1,)


def ended_by(error: BaseException) -> Callable[..., NoReturn]:
    def end(*_: object, **__: object) -> NoReturn:
        raise error

    return end


def results(config: RunConfig) -> list[bool]:
    paths = RunPaths(config.run_dir)
    return [paths.summary.exists(), paths.report.exists()]


@pytest.mark.parametrize(
    "error", [EndedEarly(), WorkersMissing("worker train-0 did not join")], ids=["asked", "missing"]
)
def test_a_run_that_goes_on_is_not_concluded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    config, console = configure(tmp_path, "early", "tracking.uri=null"), Console(file=io.StringIO())
    monkeypatch.setattr(pipeline.driver.run, "_run", ended_by(error))
    with pytest.raises(type(error)):
        pipeline.driver.run.run(config, console, at_once=JOB)
    assert results(config) == [False, False]
    monkeypatch.setattr(pipeline.driver.run, "_run", lambda *_, **__: None)
    pipeline.driver.run.run(config, console, resume=True, at_once=JOB)
    assert results(config) == [True, True]


def test_a_run_that_nobody_starts_again_says_how_far_it_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same loss outside a job."""
    config, console = configure(tmp_path, "alone", "tracking.uri=null"), Console(file=io.StringIO())
    monkeypatch.setattr(pipeline.driver.run, "_run", ended_by(WorkersMissing("worker train-0 did not join")))
    with pytest.raises(WorkersMissing):
        pipeline.driver.run.run(config, console)
    assert results(config) == [True, True]
