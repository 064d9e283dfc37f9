"""A run over four hosts, which are namespaces: the driver on one without workers, half of the trainers' ranks on each
of two, the engine and the scorer on the fourth. Nothing crosses but by the network and the directory that all see."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipeline.cli.answers import SUCCESS
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.graph.graph import weight_readers
from pipeline.observe.journal import EventKind, read_events
from tests.support.attached import Commands, commands
from tests.support.namespaces import Host, separate_hosts
from tests.support.run_results import outputs
from tests.support.runs import QUIET, arguments, configure, finish, placement

LONGEST_S = 900.0
"""Maximum duration of a run, in seconds. Seven processes import torch and three are lost, on two slow cores."""
pytestmark = [pytest.mark.processes, pytest.mark.root, pytest.mark.timeout(2 * LONGEST_S)]

STRUCK = "tests.support.faulty_runtimes:StruckStagesRuntime"


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[dict[str, Host]]:
    with separate_hosts(["n0", "n1", "n2", "n3"], tmp_path) as made:
        yield made


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Commands]:
    with commands(tmp_path) as owned:
        yield owned


def fetched_bytes(config: RunConfig) -> float:
    commits = config.stored.ledger().list()
    return sum(commit.metrics.get("engine/fetched_bytes", 0.0) for commit in commits)


@pytest.mark.parametrize(
    ("ranks", "layout", "engine_ranks", "runtime"),
    [
        pytest.param(2, "{}", 1, None, id="DP2"),
        pytest.param(2, "{pipeline: 2}", 2, STRUCK, id="PP2 to TP2, struck", marks=pytest.mark.full),
        pytest.param(4, "{tensor: 2, pipeline: 2}", 2, STRUCK, id="TP2 x PP2 to TP2, struck", marks=pytest.mark.full),
    ],
)
def test_hosts_that_share_nothing_but_a_directory(
    started: Commands,
    hosts: dict[str, Host],
    tmp_path: Path,
    ranks: int,
    layout: str,
    engine_ranks: int,
    runtime: str | None,
) -> None:
    """Each pipeline stage of the trainers is on a host of its own. A run in which a sender, a writer and a rank of the
    engine are killed has the bits of an undisturbed run on one host."""
    gangs = f"{{generate: {{concurrent_shards: 2}}, train: {{workers: {ranks}, layout: {layout}}}}}"
    where = {f"train-{index}": f"n{1 + 2 * index // ranks}" for index in range(ranks)}
    where["generate-0"] = "n3"
    settings = (
        placement(gangs, generate="generate", score="generate", others="train"),
        f"engine.tensor_parallel={engine_ranks}",
        *QUIET,
    )
    local = outputs(finish(configure(tmp_path, "local", *settings)))
    given = (*settings, "cluster.kind=attached", "cluster.arrival_timeout_s=300")
    driver = (f"cluster.address={hosts['n0'].address}",)
    config = configure(tmp_path, "attached", *given, *driver)
    command = ("run", *arguments(tmp_path, "attached", *given, *driver))
    started.start("driver", *command, prefix=hosts["n0"].prefix, runtime=runtime)
    for name, host in where.items():
        gang, _, index = name.rpartition("-")
        place = (str(config.run_dir), "--gang", gang, "--index", index)
        started.start(name, "worker", *place, prefix=hosts[host].prefix)
    assert started.exit_code("driver", LONGEST_S) == SUCCESS, started.said("driver")
    for name, host in where.items():
        assert started.exit_code(name) == SUCCESS, started.said(name)
        assert f"{name} on host {host}: joined" in started.said(name)
    assert outputs(config) == local
    assert verify_run(config).faults == []
    killed = {path.name for path in config.run_dir.glob("control/killed *")}
    lost = [event.worker for event in read_events(RunPaths(config.run_dir).events) if event.kind is EventKind.GANG_LOST]
    if runtime is not None:
        assert killed == {"killed sender", "killed writer", "killed engine rank"}
        assert lost == [f"train-{ranks - 1}", "generate-0"], "a sender's death costs no worker"
        return
    versions = [version for version in range(config.steps + 1) if weight_readers(config.graph(), version)]
    sizes = {c.address.step: c.metrics["publish/bytes"] for c in config.stored.ledger().list("publish")}
    assert fetched_bytes(config) == sum(sizes[version] for version in versions), "the weights did not cross"
