"""Generation on a host that is not the trainer's: gangs with boards of their own share no published weights, so each
version is fetched. A run ends as one whose gangs share a board, whoever dies."""

from __future__ import annotations

import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed import Client
from rich.console import Console

import pipeline.driver.orders
import pipeline.driver.run
from pipeline.cli.verification import verify_run
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.context import ExecutorSettings
from pipeline.graph.graph import run_nodes, weight_readers
from pipeline.observe.journal import EventKind, read_events
from pipeline.workers.weight_transfer import order_fetch, remove_boards
from storage.ledger import Ledger
from storage.weight_copies import IncomingVersion, OutgoingVersion
from storage.weights import WeightBoard
from tests.support.held_sender import HELD_BYTES
from tests.support.run_results import outputs, until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]


def configure(folder: Path, name: str, *overrides: str) -> RunConfig:
    fixed = (
        f"runs_dir={folder}/runs", f"name={name}", f"prompts.url={ROOT}/conf/data/tiny_prompts.jsonl",
        f"cluster.weights_dir={folder}/trainer", "tracking.uri=null", "tracking.plots=false", "cluster.dashboard=null",
    )  # fmt: skip
    return load_config([ROOT / "conf/run/tiny.yaml"], [*fixed, *overrides])


def apart(folder: Path, name: str, *overrides: str) -> RunConfig:
    """Generation has a board of its own."""
    return configure(folder, name, f"placement.gangs.generate.weights_dir={folder}/generator", *overrides)


def finish(config: RunConfig) -> RunConfig:
    pipeline.driver.run.run(config, Console(file=io.StringIO()))
    return config


def read_versions(config: RunConfig) -> list[int]:
    return [version for version in range(config.steps + 1) if weight_readers(config.graph(), version)]


def fetched_bytes(config: RunConfig) -> float:
    commits = Ledger(str(RunPaths(config.run_dir).ledger)).list()
    return sum(commit.metrics.get("engine/fetched_bytes", 0.0) for commit in commits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("weights")


@pytest.fixture(scope="module")
def together(folder: Path) -> dict[str, Any]:
    """Of a run whose gangs share a board."""
    config = finish(configure(folder, "together"))
    assert fetched_bytes(config) == 0
    return outputs(config)


def boards(config: RunConfig) -> dict[str, WeightBoard]:
    """Those of the trainer and of the generator."""
    paths = RunPaths(config.run_dir)
    return {gang: WeightBoard(paths.board(config.weights_dir(gang))) for gang in ("train", "generate")}


def test_a_run_with_a_board_per_host_is_the_same_run(
    folder: Path, together: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is read is ordered as soon as it is published, and what nobody reads any more goes from both boards (the
    orders may still be on their way when the run ends)."""
    config = apart(folder, "apart")
    left: dict[str, list[int]] = {}
    ordered: list[int] = []

    def note_and_order(client: Client, workers: list[str], version: int) -> None:
        assert len(workers) == 1
        ordered.append(version)
        order_fetch(client, workers, version)

    def look_and_remove(*what: Any) -> None:
        unread = sorted(set(range(config.steps + 1)) - set(read_versions(config)))
        until(lambda: boards(config)["generate"].available() == [], threading.Event())
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
    published = Ledger(str(RunPaths(config.run_dir).ledger)).list("publish")
    sizes = {c.address.step: c.metrics["publish/bytes"] for c in published}
    assert fetched_bytes(config) == sum(sizes[version] for version in read_versions(config))
    assert verify_run(config).faults == []
    assert list(folder.glob("trainer/*")) == list(folder.glob("generator/*")) == [], "weights were left in memory"


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run `tests.support.held_sender`."""
    runtime = "tests.support.held_sender:HeldSender"
    monkeypatch.setattr(
        pipeline.driver.run, "ExecutorSettings", lambda **settings: ExecutorSettings(**{**settings, "runtime": runtime})
    )


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("fault", ["publisher killed", "reader killed"])
def test_whoever_dies_over_a_transfer(folder: Path, together: dict[str, Any], fault: str) -> None:
    """The publisher stops after the first pieces, until one of the two has been killed. A publisher that comes back
    sends the rest; a reader that comes back begins again."""
    config = apart(folder, fault.replace(" ", "-"))
    control = config.run_dir / "control"
    control.mkdir(parents=True)
    (control / "hold").touch()
    arrived: list[int] = []
    stop = threading.Event()
    errors: list[BaseException] = []

    def cause() -> None:
        try:
            copies = boards(config)["generate"].directory
            until(lambda: (control / "sending").exists() and list(copies.glob("*.copy")), stop)
            [copy] = copies.glob("*.copy")
            until(lambda: copy.stat().st_size == HELD_BYTES, stop)
            arrived.append(copy.stat().st_size)
            os.kill(pid_of(config, "train-0" if fault == "publisher killed" else "generate-0"), signal.SIGKILL)
        except BaseException as error:
            errors.append(error)
        (control / "hold").unlink()

    thread = threading.Thread(target=cause)
    thread.start()
    try:
        finish(config)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert arrived == [HELD_BYTES]
    assert outputs(config) == together
    assert verify_run(config).faults == []
    lost = [e.worker for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.GANG_LOST]
    assert lost == ["train-0" if fault == "publisher killed" else "generate-0"], "nobody else is taken for lost"
    assert list(folder.glob("trainer/*")) == list(folder.glob("generator/*")) == []


def pid_of(config: RunConfig, worker: str) -> int:
    """From the head of its log."""
    lines = (RunPaths(config.run_dir).logs / f"{worker}.log").read_text().splitlines()
    return int(next(line for line in reversed(lines) if line.startswith("----")).rpartition(" ")[2])


def test_copies_that_a_killed_run_left_are_not_used(folder: Path, together: dict[str, Any]) -> None:
    """Another run's weights under the same numbers, on both boards, and what was arriving when it was killed."""
    config = apart(folder, "again")
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
