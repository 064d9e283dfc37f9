"""Rows that move between real processes: a run that moves them ends as one that does not, whoever dies."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.graph.graph import run_nodes
from pipeline.observe.journal import Event, EventKind, read_events
from tests.support.run_results import outputs, process_id
from tests.support.runs import QUIET, configure, finish, held_until, placement, use_runtime
from tests.support.waiting import until

pytestmark = pytest.mark.processes


def two_replicas(folder: Path, name: str, *overrides: str) -> RunConfig:
    """One shard of 8 rows each; a tail is when one has ended. Steps 0 and 1 have the same weights: it is the rows of
    step 1 that move first."""
    gangs = placement(
        "{generate: {workers: 2}, score: {}, train: {}}", generate="generate", score="score", others="train"
    )
    rows = ("steps=3", "sampling.max_new_tokens=160", "engine.max_rows=16", "evaluate.every=0")
    return configure(folder, name, gangs, *rows, *QUIET, *overrides)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:HeldRuntime")


def moves(config: RunConfig) -> list[Event]:
    """Return the events of migrations that took rows."""
    path = RunPaths(config.run_dir).events
    events = list(read_events(path)) if path.exists() else []
    return [e for e in events if e.kind is EventKind.ROWS_MIGRATED and not (e.detail or "").startswith("0 rows")]


def finished_elsewhere(config: RunConfig) -> float:
    commits = config.stored.ledger().list("generate")
    return sum(commit.metrics["generate/rows_finished_elsewhere"] for commit in commits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moved")


@pytest.fixture(scope="module")
def at_home(folder: Path) -> dict[str, Any]:
    """Results of a run whose rows do not migrate."""
    config = finish(two_replicas(folder, "home"))
    assert moves(config) == []
    return outputs(config)


@pytest.mark.usefixtures("held")
def test_a_run_with_moves_is_the_same_run(folder: Path, at_home: dict[str, Any]) -> None:
    config = two_replicas(folder, "moving", "cluster.migrate_rows_below=16")
    (config.run_dir / "control").mkdir(parents=True)
    finish(config)
    assert moves(config), "nothing moved"
    assert finished_elsewhere(config) > 0
    assert outputs(config) == at_home
    assert len(at_home) == len(list(run_nodes(config.graph())))
    assert verify_run(config).faults == []


@pytest.mark.usefixtures("held")
@pytest.mark.parametrize("fault", ["target killed", "target killed late", "target stopped", "source killed"])
def test_no_row_is_lost_with_a_process(folder: Path, at_home: dict[str, Any], fault: str) -> None:
    """The target computes nothing from the moment on that it has the rows, until the fault has happened. When it is
    killed (or stopped: silence), the source goes on with its rows; when the source is, its shard runs again. Late: the
    source has gone on to the next version meanwhile, so its shard runs again, too, in the same task."""
    name = fault.replace(" ", "-")
    config = two_replicas(folder, name, "cluster.migrate_rows_below=16", "cluster.deadline_s=12", "cluster.attempts=9")
    control = config.run_dir / "control"
    ledger = config.stored.ledger()

    def generated(step: int) -> bool:
        return any(commit.address.step == step for commit in ledger.list("generate"))

    def cause(stop: threading.Event) -> None:
        until(lambda: list(control.glob("taken@*")) and moves(config), "a move", stop=stop)
        [taken] = control.glob("taken@*")
        target, pid = taken.name.partition("@")[2], int(taken.read_text())
        source = "generate-0" if target == "generate-1" else "generate-1"
        events = RunPaths(config.run_dir).events
        assert {c.address.step for c in ledger.list("generate")} == {0}
        if fault == "source killed":
            os.kill(process_id(config, source), signal.SIGKILL)
            until(lambda: any(e.kind is EventKind.GANG_LOST for e in read_events(events)), "the loss", stop=stop)
        elif fault == "target killed":
            os.kill(pid, signal.SIGKILL)
        elif fault == "target killed late":
            until(lambda: generated(2), "a shard of step 2", stop=stop)
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: generated(1), "a shard of step 1", stop=stop)
            os.kill(pid, signal.SIGCONT)

    with held_until(cause, control):
        finish(config)
    assert outputs(config) == at_home
    assert verify_run(config).faults == []
    lost = {e.worker for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.GANG_LOST}
    assert len(lost) == (0 if fault == "target stopped" else 1), "nobody else is taken for lost"
