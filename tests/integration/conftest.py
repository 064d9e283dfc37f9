"""A finished run that several files read; and worker processes that start in a tenth of the time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch

from pipeline.config.run import RunConfig
from tests.support.runs import finish_in

IMPORTED = ("stages.models.host", "stages.engines.embedded.engine", "storage.rollouts", "omegaconf")
"""What a worker needs seconds to import, and what starts no thread: a process with threads must not fork."""


@pytest.fixture(scope="session", autouse=True)
def _forkserver_with_imports() -> Iterator[None]:
    """Workers fork from a server process that the driver starts once. Here it also imports torch, transformers and
    Megatron before it forks, which the shipped one leaves to each worker; so the settings of OpenMP that a worker gets
    by its environment come too late, but they are everybody's here (tests/conftest.py). Runs that are started as
    commands of their own (`python -m pipeline.cli`) have the server as shipped. Not with CUDA, which no fork
    survives once it has been asked for a device."""
    assert all(map(find_spec, IMPORTED)), "the server passes over what it cannot find"
    set_preload = forkserver.set_forkserver_preload

    def set_longer(names: Iterable[str]) -> None:
        set_preload([*names, *IMPORTED])

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_JUDGE_KEY", "sk-not-to-be-written")  # the server's environment is its processes'
        if not torch.cuda.is_available():
            patch.setattr(forkserver, "set_forkserver_preload", set_longer)
        yield


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="session")
def overlapped(folder: Path) -> RunConfig:
    """eta = 1, as shipped: an engine, a scorer and a trainer, with tracking and plots."""
    return finish_in(folder, "overlapped", f"tracking.uri=sqlite:///{folder}/mlflow.db", "export.every=2")
