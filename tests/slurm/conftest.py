"""One Slurm for all tests of this folder, with four nodes of four CPUs; skipped where the machine has none."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.slurm_cluster import Node, SlurmCluster, missing

NODES = ("n1", "n2", "n3", "n4")


@pytest.fixture(scope="session")
def slurm() -> Iterator[SlurmCluster]:
    """Its commands are on the path, and jobs import this tree."""
    absent = missing()
    if absent is not None:
        pytest.skip(absent)
    with SlurmCluster({name: Node(cpus=4, gpus=2) for name in NODES}) as cluster, pytest.MonkeyPatch.context() as patch:
        for name in ("SLURM_CONF", "PATH"):
            patch.setenv(name, cluster.environment[name])
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
        yield cluster


@pytest.fixture(autouse=True)
def nothing_of_the_test_before(slurm: SlurmCluster) -> Iterator[None]:
    """A test that fails leaves its jobs and dead nodes to none of the others."""
    yield
    slurm.recover()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slurm-runs")
