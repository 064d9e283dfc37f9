"""What all tests share: one thread per process, no hub, skips that say what is missing, and the order in which several
processes take the files.

`make test` runs two processes of pytest side by side (`-n 2 --dist loadfile`): each takes the next file as soon as it
has done its last one, and a file's tests stay in one process, so that its fixtures are made once. No test may count on
having the machine to itself. `python -m pytest` alone runs everything in one process.
"""

from __future__ import annotations

import os

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

pytest.register_assert_rewrite("tests.contracts.engine_contract", "tests.support.engines", "tests.support.runs")

LONGEST_FIRST = ("slurm", "integration", "browser", "contracts")
"""Folders whose files take a minute: begun last, one of them would keep one process busy while the other is done."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=_turn)
    absent = [
        str(path.relative_to(ROOT)) for path in (SMOLLM2 / "model.safetensors", MOVIE_REVIEWS) if not path.exists()
    ]
    no_assets = pytest.mark.skip(reason=f"{', '.join(absent)} not there: run `make assets`")
    for item in items:
        if absent and item.get_closest_marker("smollm2"):
            item.add_marker(no_assets)


def _turn(item: pytest.Item) -> int:
    folder = item.path.relative_to(ROOT / "tests").parts[0]
    return LONGEST_FIRST.index(folder) if folder in LONGEST_FIRST else len(LONGEST_FIRST)
