"""Settings of all tests: one thread per process, no hub, skips that name what is missing, tiers, the order of files.

`make test` runs the quick tests, `make test-all` also those marked `full`. Both run three processes of pytest side by
side (the Makefile's WORKERS: `-n 3 --dist loadfile`), which keep two cores busy, since many tests wait. A process takes
the next file when it is done with one. A file's tests stay in one process, so that its fixtures are made once. No test
may count on having the machine to itself, and every file closes what it opens (`tests/support/leaks.py` checks it).
`python -m pytest` alone runs all tests in one process.
"""

from __future__ import annotations

import os
from collections.abc import Generator

# Before torch is imported, here and in the processes that tests start: two cores are shared by many of them, and
# OpenMP's spinning threads slow one another down 5 to 17 times.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    OMP_WAIT_POLICY="PASSIVE",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    MPLBACKEND="agg",
)

import pytest

from tests.support.paths import MOVIE_REVIEWS, ROOT, SMOLLM2

pytest_plugins = ("tests.support.leaks",)
pytest.register_assert_rewrite("tests.contracts.engine_contract", "tests.support.engines", "tests.support.runs")

LONGEST_FILES = (
    "test_benchmarks.py", "test_layouts.py", "test_requeued_jobs.py", "test_trace.py", "test_jobs_of_slurm.py",
    "test_migrated_rows.py", "test_run_on_object_store.py", "test_job_on_slurm.py",
)  # fmt: skip
"""Files that take minutes each, in the order in which they start, about the longest first. So no process is left alone
with one at the end. Files of Slurm mostly wait. They are apart, so that other files use the cores meanwhile."""
LONG_FIRST = ("contracts", "integration", "slurm", "browser")
"""Folders whose files take up to some minutes each. They start next."""
FULL = ("slurm", "browser", "gpu", "integration")
"""Folders whose tests are marked `full`, except QUICK_RUNS."""
FULL_FILES = (
    "test_engine_drafts.py", "test_engine_families.py", "test_engine_migration.py", "test_engine_ranks.py",
)  # fmt: skip
"""Other files whose tests are marked `full`: the engine's contract in every layout, family and kind of drafts."""
QUICK_RUNS = (
    "test_ended_early.py", "test_extending.py", "test_listening.py", "test_open_data.py", "test_run.py",
    "test_run_checkpoints.py", "test_worker_ports.py",
)  # fmt: skip
"""Integration tests that `make test` has too: whole runs with all stages, resume, refusals and reading of results."""


@pytest.fixture
def longest_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines draft as far as they can: by default they draft what pays on the machine at hand, maybe nothing."""
    monkeypatch.setattr("stages.engines.embedded.drafts.calibration.LENGTHS", "longest")


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by marker
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=_position)
    absent = [
        str(path.relative_to(ROOT)) for path in (SMOLLM2 / "model.safetensors", MOVIE_REVIEWS) if not path.exists()
    ]
    no_assets = pytest.mark.skip(reason=f"{', '.join(absent)} not there: run `make assets`")
    for item in items:
        if item.path.name in FULL_FILES or (_folder(item) in FULL and item.path.name not in QUICK_RUNS):
            item.add_marker(pytest.mark.full)
        if absent and item.get_closest_marker("smollm2"):
            item.add_marker(no_assets)


def _folder(item: pytest.Item) -> str:
    return item.path.relative_to(ROOT / "tests").parts[0]


def _position(item: pytest.Item) -> int:
    order = (*LONGEST_FILES, *LONG_FIRST)
    return next((order.index(name) for name in (item.path.name, _folder(item)) if name in order), len(order))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Generator[None]:
    """Print the end of each failure once more, below the list of skips: a log that is cut keeps its last lines."""
    yield
    for report in (*terminalreporter.getreports("failed"), *terminalreporter.getreports("error")):
        terminalreporter.write_line(f"{report.nodeid}, {report.when}:", red=True)
        terminalreporter.write_line("\n".join(report.longreprtext.splitlines()[-8:]))
