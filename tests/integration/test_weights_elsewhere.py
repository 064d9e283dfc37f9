"""Generation on a host that is not the trainer's: gangs with boards of their own share no published weights, so each
version is fetched. A run ends as one whose gangs share a board, whoever dies."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client

import pipeline.driver.orders
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.graph.graph import run_nodes, weight_readers
from pipeline.observe.journal import EventKind, read_events
from pipeline.workers.weight_transfer import order_fetch, remove_boards
from storage.weight_copies import IncomingVersion, OutgoingVersion
from storage.weights import WeightBoard
from tests.support.faulty_sender import HELD_BYTES
from tests.support.run_results import outputs, process_id
from tests.support.runs import QUIET, configure, finish, held_until, use_runtime
from tests.support.waiting import until

pytestmark = pytest.mark.processes


def one_board(folder: Path, name: str, *overrides: str) -> RunConfig:
    return configure(folder, name, f"cluster.weights_dir={folder}/trainer", *QUIET, *overrides)


def two_boards(folder: Path, name: str) -> RunConfig:
    """Generation has one of its own."""
    return one_board(folder, name, f"placement.gangs.generate.weights_dir={folder}/generator")


def read_versions(config: RunConfig) -> list[int]:
    return [version for version in range(config.steps + 1) if weight_readers(config.graph(), version)]


def fetched_bytes(config: RunConfig) -> float:
    commits = config.stored.ledger().list()
    return sum(commit.metrics.get("engine/fetched_bytes", 0.0) for commit in commits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[str, Any]:
    """Return the results of a run whose gangs share a board."""
    config = finish(one_board(folder, "together"))
    assert fetched_bytes(config) == 0
    return outputs(config)


def boards(config: RunConfig) -> dict[str, WeightBoard]:
    """Return the boards of the trainer and of the generator."""
    paths = RunPaths(config.run_dir)
    return {gang: WeightBoard(paths.board(config.weights_dir(gang))) for gang in ("train", "generate")}


def test_a_board_per_host_is_the_same_run(
    folder: Path, together: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A version with readers is ordered as soon as it is published. A version that nobody reads any more is removed
    from both boards (the orders may still be on their way when the run ends)."""
    config = two_boards(folder, "apart")
    left: dict[str, list[int]] = {}
    ordered: list[int] = []

    def note_and_order(client: Client, workers: list[str], version: int) -> None:
        assert len(workers) == 1
        ordered.append(version)
        order_fetch(client, workers, version)

    def look_and_remove(*what: Any) -> None:
        unread = sorted(set(range(config.steps + 1)) - set(read_versions(config)))
        until(lambda: boards(config)["generate"].available() == [], "the generator's board is empty")
        left.update({gang: board.available() for gang, board in boards(config).items()})
        assert left == {"train": unread, "generate": []}
        remove_boards(*what)

    monkeypatch.setattr(pipeline.driver.orders, "remove_boards", look_and_remove)
    monkeypatch.setattr(pipeline.driver.orders, "order_fetch", note_and_order)
    finish(config)
    assert left, "nobody looked"
    assert ordered == read_versions(config)
    assert outputs(config) == together
    assert len(together) == len(list(run_nodes(config.graph())))
    published = config.stored.ledger().list("publish")
    sizes = {c.address.step: c.metrics["publish/bytes"] for c in published}
    assert fetched_bytes(config) == sum(sizes[version] for version in read_versions(config))
    assert verify_run(config).faults == []
    assert list(folder.glob("trainer/*")) == list(folder.glob("generator/*")) == [], "weights were left in memory"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:HeldSender")


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("fault", ["publisher killed", "reader killed"])
def test_whoever_dies_over_a_transfer(folder: Path, together: dict[str, Any], fault: str) -> None:
    """The publisher stops after the first pieces, until one of the two has been killed. A publisher that comes back
    sends the rest; a reader that comes back begins again."""
    config = two_boards(folder, fault.replace(" ", "-"))
    control = config.run_dir / "control"
    victim = "train-0" if fault == "publisher killed" else "generate-0"
    arrived: list[int] = []

    def cause(stop: threading.Event) -> None:
        copies = boards(config)["generate"].directory
        until(lambda: (control / "sending").exists() and list(copies.glob("*.copy")), "a transfer", stop=stop)
        [copy] = copies.glob("*.copy")
        until(lambda: copy.stat().st_size == HELD_BYTES, "all that is sent so far", stop=stop)
        arrived.append(copy.stat().st_size)
        os.kill(process_id(config, victim), signal.SIGKILL)

    with held_until(cause, control):
        finish(config)
    assert arrived == [HELD_BYTES]
    assert outputs(config) == together
    assert verify_run(config).faults == []
    lost = [e.worker for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.GANG_LOST]
    assert lost == [victim], "nobody else is taken for lost"
    assert list(folder.glob("trainer/*")) == list(folder.glob("generator/*")) == []


def test_copies_that_a_killed_run_left_are_not_used(folder: Path, together: dict[str, Any]) -> None:
    """Another run's weights under the same numbers, on both boards, and what was arriving when it was killed."""
    config = two_boards(folder, "again")
    there, here = boards(config).values()
    for version in read_versions(config):
        manifest = there.publish(version, {"w": np.full(10, version, np.float32)})
        with OutgoingVersion(there, version) as outgoing, IncomingVersion(here, manifest) as incoming:
            incoming.append(outgoing.read(0, manifest.file_bytes))
            incoming.finish()
    (here.directory / "v000009-4194305-deadbeef.copy").touch()
    finish(config)
    assert outputs(config) == together
    assert list(folder.glob("trainer/*")) == list(folder.glob("generator/*")) == []
