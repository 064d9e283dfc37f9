"""Workers that `stageline worker` starts, as commands of their own, join a driver that is one, too. Whoever dies, the
run ends as one with local workers does, bit for bit; and nothing is left."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from distributed.security import Security

from pipeline.cli.answers import BAD_INPUT, DRIVER_LOST, INTERRUPTED, STAGE_FAILED, SUCCESS
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.journal import EventKind, read_events
from pipeline.workers.scheduler_file import host_name
from storage.host import process_alive
from storage.ledger import Ledger
from tests.support.attached import ATTACHED, Commands, commands, scheduler_file, with_other_content
from tests.support.run_results import outputs, process_id
from tests.support.runs import QUIET, arguments, configure, finish, placement
from tests.support.waiting import until

pytestmark = pytest.mark.processes

STEPS = "steps=6"
GANGS = placement(
    "{generate: {concurrent_shards: 2}, score: {}, train: {workers: 2}}",
    generate="generate",
    score="score",
    others="train",
)
WORKERS = ("generate-0", "score-0", "train-0", "train-1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attached")


@pytest.fixture(scope="module")
def local(folder: Path) -> dict[str, Any]:
    """Results of a run with the same placement and local workers."""
    return outputs(finish(configure(folder, "local", GANGS, STEPS, *QUIET)))


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Commands]:
    with commands(tmp_path) as owned:
        yield owned


def begin(started: Commands, folder: Path, name: str) -> RunConfig:
    """The driver alone."""
    given = (GANGS, STEPS, *QUIET, *ATTACHED)
    started.start("driver", "run", *arguments(folder, name, *given))
    return configure(folder, name, *given)


def committed(config: RunConfig, stage: str) -> int:
    ledger = config.run_dir / "ledger"
    return len(Ledger(str(ledger)).list(stage)) if ledger.exists() else 0


def assert_ended_well(started: Commands, config: RunConfig, local: dict[str, Any]) -> None:
    assert started.exit_code("driver") == SUCCESS, started.said("driver")
    for name in WORKERS:
        assert started.exit_code(name) == SUCCESS, started.said(name)
        assert "the run has ended" in started.said(name)
        assert not process_alive(process_id(config, name)), f"the worker process of {name} was left"
    assert outputs(config) == local
    assert verify_run(config).faults == []
    board = RunPaths(config.run_dir).board(None)
    assert list(board.parent.glob(f"{board.name}*")) == [], "weights were left in memory"
    assert scheduler_file(config) is None, "the certificate was left"


def test_attached_workers_make_the_same_run_as_local(started: Commands, folder: Path, local: dict[str, Any]) -> None:
    """Workers may be there before the driver. On the way: what is secret is for this user alone; a second worker of the
    same index is refused, and disturbs nobody; so is one with another certificate."""
    config = configure(folder, "attached", GANGS, STEPS, *QUIET, *ATTACHED)
    started.workers(config)
    begin(started, folder, "attached")
    file = until(lambda: scheduler_file(config), "the scheduler file")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    until(lambda: "joined" in started.said("score-0"), "a worker has joined")
    second = started.start("second", "worker", str(config.run_dir), "--gang", "score", "--index", "0")
    own = Security.temporary().get_tls_config_for_role("worker")
    forged = with_other_content(file, folder / "forged.json", certificate=own["cert"], key=own["key"])
    stranger = ("--gang", "score", "--index", "0", "--wait", "0")
    started.start("stranger", "worker", "--scheduler-file", str(forged), *stranger)
    assert started.exit_code("second") == BAD_INPUT
    assert f"score-0 is there already: process {started.started['score-0'].pid}" in started.said("second")
    assert second.pid != started.started["score-0"].pid
    assert started.exit_code("stranger") == BAD_INPUT
    assert "does not answer" in started.said("stranger")
    assert_ended_well(started, config, local)
    warned = [e.detail for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.WARNED]
    assert len([text for text in warned if text and "score-0 is there already" in text]) == 1


def test_whoever_is_killed_comes_back_or_is_replaced(started: Commands, folder: Path, local: dict[str, Any]) -> None:
    """A worker's process: its nanny starts another. A whole `stageline worker`: somebody starts another. A rank takes
    its gang with it, which meets anew."""
    config = begin(started, folder, "struck")
    started.workers(config)
    until(lambda: committed(config, "update_policy"), "the first update")
    os.kill(process_id(config, "train-1"), signal.SIGKILL)
    started.kill_group("generate-0")
    assert started.exit_code("generate-0") == -signal.SIGKILL
    started.worker(config, "generate", 0)
    assert_ended_well(started, config, local)
    events = [*read_events(RunPaths(config.run_dir).events)]
    lost = {event.worker: str(event.detail) for event in events if event.kind is EventKind.GANG_LOST}
    assert "generate-0" in lost
    assert {"train-0", "train-1"} & lost.keys()
    assert all(f"(host {host_name()})" in why for why in lost.values())


def test_workers_that_still_start_end_with_the_run(started: Commands, folder: Path) -> None:
    """One that does not come ends the run while the others import torch."""
    given = (GANGS, STEPS, *QUIET, *ATTACHED, "cluster.arrival_timeout_s=1")
    started.start("driver", "run", *arguments(folder, "incomplete", *given))
    config = configure(folder, "incomplete", *given)
    for gang, index in (("generate", 0), ("score", 0), ("train", 0)):
        started.worker(config, gang, index)
    assert started.exit_code("driver") == STAGE_FAILED
    assert "did not join within cluster.arrival_timeout_s = 1" in started.said("driver")
    for name in ("generate-0", "score-0", "train-0"):
        started.exit_code(name)
        assert "Traceback" not in started.said(name), started.said(name)


def test_workers_end_with_their_driver_others_join_the_next(
    started: Commands, folder: Path, local: dict[str, Any]
) -> None:
    """A driver that is killed leaves its scheduler file: who reads it waits for the next driver's. A worker that is
    terminated ends with its process."""
    config = begin(started, folder, "orphans")
    started.workers(config)
    until(lambda: committed(config, "update_policy"), "the first update")
    processes = {name: process_id(config, name) for name in WORKERS}
    first = until(lambda: scheduler_file(config), "the scheduler file")
    started.kill_group("driver")
    for name in WORKERS:
        assert started.exit_code(name) == DRIVER_LOST, started.said(name)
        assert "the driver is gone" in started.said(name)
        until(lambda name=name: not process_alive(processes[name]), f"the process of {name} is gone")
    started.workers(config)  # finds a file that nobody listens for
    started.start("terminated", "worker", str(config.run_dir), "--gang", "score", "--index", "0")
    started.kill_group("terminated", signal.SIGTERM)
    started.start("driver", "resume", str(config.run_dir))
    assert started.exit_code("terminated") in (INTERRUPTED, -signal.SIGTERM)
    second = until(lambda: (found := scheduler_file(config)) != first and found, "the next driver's file")
    assert second.name == "scheduler-000002.json"
    assert_ended_well(started, config, local)
