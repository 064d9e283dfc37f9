"""A finished run that several files read."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.config.run import RunConfig
from tests.support.runs import finish_in


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def overlapped(folder: Path) -> RunConfig:
    """eta = 1, as shipped: an engine, a scorer and a trainer, with tracking and plots."""
    return finish_in(folder, "overlapped", f"tracking.uri=sqlite:///{folder}/mlflow.db", "export.every=2")
