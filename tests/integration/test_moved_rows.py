"""Rows that move between real processes: a run that moves them ends as one that does not, whoever dies."""

from __future__ import annotations

import io
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import pipeline.driver.run
from pipeline.cli.verification import verify_run
from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.context import ExecutorSettings
from pipeline.graph.graph import run_nodes
from pipeline.observe.journal import Event, EventKind, read_events
from storage.ledger import Ledger
from tests.support.run_results import outputs, until

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PLACEMENT = (
    "placement={gangs: {generate: {workers: 2}, score: {}, train: {}}, "
    "roles: {generate: generate, score: score, reference: train, policy: train, critic: train}}"
)


def configure(folder: Path, name: str, *overrides: str) -> RunConfig:
    """Two replicas, one shard of 8 rows each; a tail is when one has ended. Steps 0 and 1 have the same weights: it is
    the rows of step 1 that move first."""
    lines = (ROOT / "conf/run/tiny.yaml").read_text().splitlines()
    start = lines.index("placement:")
    end = next(i for i, line in enumerate(lines) if i > start and not line.startswith(" "))
    file = folder / "bare.yaml"  # a test's gangs would be added to the file's own
    file.write_text("\n".join(lines[:start] + lines[end:]) + "\n")
    fixed = (
        f"runs_dir={folder}/runs", f"name={name}", f"prompts.url={ROOT}/conf/data/tiny_prompts.jsonl", "steps=3",
        "sampling.max_new_tokens=160", "engine.slots=16", "evaluate.every=0", "tracking.uri=null",
        "tracking.plots=false", "cluster.dashboard=null", PLACEMENT,
    )  # fmt: skip
    return load_config([file], [*fixed, *overrides])


def finish(config: RunConfig) -> RunConfig:
    (config.run_dir / "control").mkdir(parents=True, exist_ok=True)
    pipeline.driver.run.run(config, Console(file=io.StringIO()))
    return config


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers run `tests.support.held_runtime`."""
    runtime = "tests.support.held_runtime:HeldRuntime"
    monkeypatch.setattr(
        pipeline.driver.run, "ExecutorSettings", lambda **settings: ExecutorSettings(**{**settings, "runtime": runtime})
    )


def moves(config: RunConfig) -> list[Event]:
    """Those in which rows were taken."""
    path = RunPaths(config.run_dir).events
    events = list(read_events(path)) if path.exists() else []
    return [e for e in events if e.kind is EventKind.ROWS_MOVED and not (e.detail or "").startswith("0 rows")]


def finished_elsewhere(config: RunConfig) -> float:
    commits = Ledger(str(RunPaths(config.run_dir).ledger)).list("generate")
    return sum(commit.metrics["generate/rows_finished_elsewhere"] for commit in commits)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("moved")


@pytest.fixture(scope="module")
def at_home(folder: Path) -> dict[str, Any]:
    """Of a run whose rows stay where they are."""
    config = finish(configure(folder, "home"))
    assert moves(config) == []
    return outputs(config)


@pytest.mark.usefixtures("held")
def test_a_run_with_moves_is_the_same_run(folder: Path, at_home: dict[str, Any]) -> None:
    config = finish(configure(folder, "moving", "cluster.move_rows_below=16"))
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
    config = configure(folder, name, "cluster.move_rows_below=16", "cluster.deadline_s=12", "cluster.attempts=9")
    control = config.run_dir / "control"
    control.mkdir(parents=True)
    (control / "hold").touch()
    ledger = Ledger(str(RunPaths(config.run_dir).ledger))
    stop = threading.Event()
    errors: list[BaseException] = []

    def cause() -> None:
        try:
            until(lambda: list(control.glob("taken@*")) and moves(config), stop)
            [taken] = control.glob("taken@*")
            target, pid = taken.name.partition("@")[2], int(taken.read_text())
            source = "generate-0" if target == "generate-1" else "generate-1"
            events = RunPaths(config.run_dir).events
            assert {c.address.step for c in ledger.list("generate")} == {0}
            if fault == "source killed":
                os.kill(pid_of(config, source), signal.SIGKILL)
                until(lambda: any(e.kind is EventKind.GANG_LOST for e in read_events(events)), stop)
            elif fault == "target killed":
                os.kill(pid, signal.SIGKILL)
            elif fault == "target killed late":
                until(lambda: any(c.address.step == 2 for c in ledger.list("generate")), stop)
                os.kill(pid, signal.SIGKILL)
            else:
                os.kill(pid, signal.SIGSTOP)
                until(lambda: any(c.address.step == 1 for c in ledger.list("generate")), stop)
                os.kill(pid, signal.SIGCONT)
            (control / "hold").unlink()
        except BaseException as error:
            errors.append(error)
            (control / "hold").unlink(missing_ok=True)

    thread = threading.Thread(target=cause)
    thread.start()
    try:
        finish(config)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert outputs(config) == at_home
    assert verify_run(config).faults == []
    lost = {e.worker for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.GANG_LOST}
    assert len(lost) == (0 if fault == "target stopped" else 1), "nobody else is taken for lost"


def pid_of(config: RunConfig, worker: str) -> int:
    """From the head of its log."""
    lines = (RunPaths(config.run_dir).logs / f"{worker}.log").read_text().splitlines()
    return int(next(line for line in reversed(lines) if line.startswith("----")).rpartition(" ")[2])
