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
    """One shard of 8 rows each. Steps 0 and 1 have the same weights, and no row moves while a shard with its weights
    waits: rows of step 1 or 2 move first, when one replica has fewer than the other; on a busy machine later ones.
    """
    gangs = placement(
        "{generate: {workers: 2}, score: {}, train: {}}", generate="generate", score="score", others="train"
    )
    rows = ("steps=8", "sampling.max_new_tokens=160", "engine.max_rows=16", "evaluate.every=0")
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
    config = two_replicas(folder, "moving", "cluster.migrate_rows=true")
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
    """From the moment it has the rows, the target computes nothing until the fault has happened. When it is killed (or
    stopped: silence), the source continues its rows. When the source is killed, its shard runs again. `late`: the
    source has loaded the next version meanwhile, so its shard runs again too, in the same task."""
    name = fault.replace(" ", "-")
    config = two_replicas(folder, name, "cluster.migrate_rows=true", "cluster.deadline_s=12", "cluster.attempts=9")
    control = config.run_dir / "control"
    ledger = config.stored.ledger()

    def generated(step: int) -> int:
        return sum(commit.address.step == step for commit in ledger.list("generate"))

    def cause(stop: threading.Event) -> None:
        until(lambda: list(control.glob("taken@*")) and moves(config), "a move", stop=stop)
        [taken] = control.glob("taken@*")
        target, pid = taken.name.partition("@")[2], int(taken.read_text())
        source = "generate-0" if target == "generate-1" else "generate-1"
        events = RunPaths(config.run_dir).events
        step = next(step for step in range(config.steps) if generated(step) < 2)  # the shard of the rows is open
        before = generated(step)
        if fault == "source killed":
            os.kill(process_id(config, source), signal.SIGKILL)
            until(lambda: any(e.kind is EventKind.GANG_LOST for e in read_events(events)), "the loss", stop=stop)
        elif fault == "target killed":
            os.kill(pid, signal.SIGKILL)
        elif fault == "target killed late":
            until(lambda: generated(step + 1), "a shard of the next step", stop=stop)
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: generated(step) > before, "the shard of the rows", stop=stop)
            os.kill(pid, signal.SIGCONT)

    with held_until(cause, control):
        finish(config)
    assert outputs(config) == at_home
    assert verify_run(config).faults == []
    lost = {e.worker for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.GANG_LOST}
    assert len(lost) == (0 if fault == "target stopped" else 1), "nobody else is taken for lost"


@pytest.mark.parametrize("fault", ["target killed", "target stopped", "source killed"])
def test_nothing_has_happened_to_a_row_that_is_copied(
    folder: Path, at_home: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """The target has a part of a row and is killed, or says nothing more: the row has never stopped at its source.
    When the source is killed its shard runs again."""
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:HeldCopyRuntime")
    name = f"{fault.replace(' ', '-')}-in-a-copy"
    config = two_replicas(folder, name, "cluster.migrate_rows=true", "cluster.deadline_s=12", "cluster.attempts=9")
    control, events = config.run_dir / "control", RunPaths(config.run_dir).events
    ledger = config.stored.ledger()

    def cause(stop: threading.Event) -> None:
        until(lambda: list(control.glob("copying@*")), "a copy", stop=stop)
        [copying] = control.glob("copying@*")
        target, pid = copying.name.partition("@")[2], int(copying.read_text())
        source = "generate-0" if target == "generate-1" else "generate-1"
        before = len(ledger.list("generate"))
        assert moves(config) == []
        if fault == "source killed":
            os.kill(process_id(config, source), signal.SIGKILL)
            until(lambda: any(e.kind is EventKind.GANG_LOST for e in read_events(events)), "the loss", stop=stop)
        elif fault == "target killed":
            os.kill(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGSTOP)
            until(lambda: len(ledger.list("generate")) > before, "the shard of the row", stop=stop)
            os.kill(pid, signal.SIGCONT)

    with held_until(cause, control):
        finish(config)
    assert outputs(config) == at_home
    assert verify_run(config).faults == []
    lost = {e.worker for e in read_events(events) if e.kind is EventKind.GANG_LOST}
    assert len(lost) == (0 if fault == "target stopped" else 1), "nobody else is taken for lost"


def test_rows_of_three_replicas_move_and_keep_their_bits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    three = "placement.gangs.generate.workers=3", "rollout.shards=3", "rollout.rows=24"
    expected = outputs(finish(two_replicas(folder, "three-home", *three)))
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:HeldRuntime")
    config = two_replicas(folder, "three-moving", *three, "cluster.migrate_rows=true")
    (config.run_dir / "control").mkdir(parents=True)
    finish(config)
    assert finished_elsewhere(config) > 0
    assert outputs(config) == expected
