"""A run over four hosts, which are namespaces: the driver on one without workers, a rank of the gang on each of two,
the engine and the scorer on the fourth. Nothing crosses but by the network and the directory that all see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.answers import DONE
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.graph.graph import weight_readers
from storage.ledger import Ledger
from tests.support.attached import Commands, commands
from tests.support.namespaces import Host, separate_hosts
from tests.support.run_results import outputs
from tests.support.runs import QUIET, arguments, configure, finish, placement

pytestmark = [pytest.mark.processes, pytest.mark.root]

GANGS = placement(
    "{generate: {concurrent_shards: 2}, score: {}, train: {workers: 2}}",
    generate="generate",
    score="score",
    others="train",
)
WHERE = {"train-0": "n1", "train-1": "n2", "generate-0": "n3", "score-0": "n3"}


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, Host]]:
    with separate_hosts(["n0", "n1", "n2", "n3"], tmp_path) as made:
        yield made


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Commands]:
    with commands(tmp_path) as owned:
        yield owned


def fetched_bytes(config: RunConfig) -> float:
    commits = Ledger(str(RunPaths(config.run_dir).ledger)).list()
    return sum(commit.metrics.get("engine/fetched_bytes", 0.0) for commit in commits)


def test_hosts_that_share_nothing_but_a_directory(started: Commands, hosts: dict[str, Host], tmp_path: Path) -> None:
    local = outputs(finish(configure(tmp_path, "local", GANGS, *QUIET)))
    given = (GANGS, *QUIET, "cluster.kind=attached", "cluster.arrival_timeout_s=120")
    driver = (f"cluster.address={hosts['n0'].address}",)
    config = configure(tmp_path, "attached", *given, *driver)
    started.start("driver", "run", *arguments(tmp_path, "attached", *given, *driver), prefix=hosts["n0"].prefix)
    for name, where in WHERE.items():
        gang, _, index = name.rpartition("-")
        place = (str(config.run_dir), "--gang", gang, "--index", index)
        started.start(name, "worker", *place, prefix=hosts[where].prefix)
    assert started.exit_code("driver") == DONE, started.said("driver")
    for name, where in WHERE.items():
        assert started.exit_code(name) == DONE, started.said(name)
        assert f"{name} on host {where}: joined" in started.said(name)
    assert outputs(config) == local
    assert verify_run(config).faults == []
    versions = [version for version in range(config.steps + 1) if weight_readers(config.graph(), version)]
    sizes = {
        c.address.step: c.metrics["publish/bytes"] for c in Ledger(str(RunPaths(config.run_dir).ledger)).list("publish")
    }
    assert fetched_bytes(config) == sum(sizes[version] for version in versions), "the weights did not cross"
