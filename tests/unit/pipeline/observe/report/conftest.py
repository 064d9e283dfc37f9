"""One written run that tests only read."""

from __future__ import annotations

import pytest

from pipeline.observe.report.source import RunSource
from tests.support.report_runs import WrittenRun, write_run


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunSource:
    """4 steps of 8 rows, 3 evaluations, a score of two parts."""
    return write_run(tmp_path_factory.mktemp("plain"), WrittenRun(name="plain", parts=True, settings={"seed": 1}))
