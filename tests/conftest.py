"""What all tests share: one thread per process, no hub, and skips that say what is missing."""

from __future__ import annotations

import os
from pathlib import Path

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
import torch

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2_FILES = (
    ROOT / "assets/smollm2-135m-instruct/model.safetensors",
    ROOT / "assets/movie_reviews.tsv",
)

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what this machine cannot run, visibly: pytest prints the reasons (-rs)."""
    no_gpu = pytest.mark.skip(reason="no CUDA device")
    absent = [str(path.relative_to(ROOT)) for path in SMOLLM2_FILES if not path.exists()]
    no_assets = pytest.mark.skip(reason=f"{', '.join(absent)} not there: run `make assets`")
    cuda = torch.cuda.is_available()
    for item in items:
        if not cuda and item.get_closest_marker("gpu"):
            item.add_marker(no_gpu)
        if absent and item.get_closest_marker("smollm2"):
            item.add_marker(no_assets)
