"""A finished run that several files read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.config.run import RunConfig
from tests.support.runs import finish_in


@pytest.fixture(scope="session", autouse=True)
def _judge_key() -> Iterator[None]:
    """Workers inherit the environment that their forkserver was started with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_JUDGE_KEY", "sk-not-to-be-written")
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def overlapped(folder: Path) -> RunConfig:
    """eta = 1, as shipped: an engine, a scorer and a trainer, with tracking and plots."""
    return finish_in(folder, "overlapped", f"tracking.uri=sqlite:///{folder}/mlflow.db", "export.every=2")
