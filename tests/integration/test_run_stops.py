"""Runs that end too early: a stage that fails, Ctrl-C and resume, a rank of an engine that dies. A continued run has
the results of a run that was never stopped."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.graph.graph import run_nodes
from pipeline.observe.journal import EventKind, read_events
from tests.support.paths import ROOT
from tests.support.processes import command_line
from tests.support.run_results import steps_of
from tests.support.runs import ONE_GANG, QUIET, arguments, configure
from tests.support.waiting import TIMEOUT_S, until

pytestmark = pytest.mark.processes


def digests(config: RunConfig) -> dict[str, list[str | None]]:
    """Return the digests of the weights after every update."""
    ledger = open_history(config).ledger
    return {stage: [commit.digest for commit in ledger.list(stage)] for stage in ("update_policy", "update_critic")}


def test_a_stage_that_raises_ends_the_run_with_code_3(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reward = ("reward.kind=tests.support.own_rewards:broken", f"reward.args={{gain: 2, while_there: {folder}}}")
    assert main(["run", *arguments(folder, "raises", *reward, "evaluate.every=0", ONE_GANG, *QUIET)]) == 3
    err = capsys.readouterr().err
    assert err.startswith("failed score/step_000000/shard_000")
    assert "no gain of 2 today" in err
    assert f"{folder}/runs/raises/logs" in err
    paths = RunPaths(folder / "runs" / "raises")
    assert not paths.board(None).exists()
    summary = json.loads(paths.summary.read_text())
    assert (summary["steps"], summary["reward"], summary["eval"]) == (0, [], None)
    failed = [e for e in read_events(paths.events) if e.kind is EventKind.FAILED]
    assert {e.stage for e in failed} == {"score"}
    said = re.search(r"^  inputs +(\S+); weights v0\n  run it alone +stageline (replay .* --stage score.*)$", err, re.M)
    assert said is not None, err
    assert said[1].startswith("generate/step_000000/shard_000")
    with pytest.raises(Exception, match="no gain of 2 today"):
        main(said[2].split())


@pytest.fixture(scope="module")
def interrupted(folder: Path) -> tuple[RunConfig, int, str, list[psutil.Process]]:
    """The same run as `overlapped`, stopped by Ctrl-C on its terminal when two policy updates are done: (config, exit
    code, what it said, its worker processes)."""
    config = configure(folder, "interrupted", *QUIET)
    with started(arguments(folder, "interrupted", *QUIET)) as driver:
        wait_until_finished(driver, RunPaths(config.run_dir).events, "update_policy", 1)
        processes = psutil.Process(driver.pid).children(recursive=True)
        os.killpg(driver.pid, signal.SIGINT)  # what a terminal does: to every process of the group
        said, _ = driver.communicate(timeout=TIMEOUT_S)
    return config, driver.returncode, said, processes


@contextlib.contextmanager
def started(arguments: list[str]) -> Iterator[subprocess.Popen[str]]:
    """`stageline run` as a command, in a process group of its own; killed if it is still there at the end."""
    command = [sys.executable, "-m", "pipeline.cli", "run", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    ) as driver:
        try:
            yield driver
        finally:
            driver.kill()


def is_alive(process: psutil.Process) -> bool:
    """Return True unless a process has ended. The forkserver ends shortly after its driver."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_finished(driver: subprocess.Popen[str], events: Path, stage: str, step: int) -> None:
    def finished() -> bool:
        if driver.poll() is not None:
            pytest.fail(f"the driver ended before {stage} {step}: {driver.communicate()[0]}")
        return events.exists() and any(
            (e.kind, e.stage, e.step) == (EventKind.FINISHED, stage, step) for e in read_events(events)
        )

    until(finished, f"{stage} {step}")


def test_an_engine_on_two_ranks_gives_the_same_weights_even_if_one_dies(folder: Path, overlapped: RunConfig) -> None:
    """Pipeline stages change no bit of what is generated; a rank that is killed takes its replica down, which is built
    anew."""
    changes = (*QUIET, "engine.pipeline_parallel=2")
    config = configure(folder, "stages", *changes)
    with started(arguments(folder, "stages", *changes)) as driver:
        wait_until_finished(driver, RunPaths(config.run_dir).events, "generate", 0)
        processes = psutil.Process(driver.pid).children(recursive=True)
        (rank,) = [one for one in processes if "stages.engines.embedded.ranks.processes" in command_line(one)]
        rank.kill()
        said, _ = driver.communicate(timeout=TIMEOUT_S)
    assert driver.returncode == 0, said
    assert "rank 1 of 2 of the engine" in (RunPaths(config.run_dir).logs / "generate-0.log").read_text()
    assert digests(config) == digests(overlapped)
    lost = [e for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.GANG_LOST]
    assert {e.gang for e in lost} == {"generate"}
    until(lambda: not any(map(is_alive, processes)), "every process of the run has ended")


def test_ctrl_c_stops_and_says_how_to_go_on(interrupted: tuple[RunConfig, int, str, list[psutil.Process]]) -> None:
    config, code, said, processes = interrupted
    assert code == 130, said
    assert f"interrupted; `stageline resume {config.run_dir}` continues this run" in said
    assert "Traceback" not in said
    assert len(processes) >= 3
    _, alive = psutil.wait_procs(processes, timeout=TIMEOUT_S)
    assert alive == []
    assert not RunPaths(config.run_dir).board(None).exists()
    done = json.loads(RunPaths(config.run_dir).summary.read_text())["steps"]
    assert 1 <= done < config.steps
    assert verify_run(config).faults == []


def test_a_resumed_run_ends_as_one_that_was_never_stopped(
    interrupted: tuple[RunConfig, int, str, list[psutil.Process]],
    overlapped: RunConfig,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also: two runs of one seed are equal bit for bit, asynchronous as they are."""
    config = interrupted[0]
    assert main(["resume", str(config.run_dir)]) == 0
    assert "held-out reward" in capsys.readouterr().out
    for ours, theirs in zip(steps_of(config, "generate"), steps_of(overlapped, "generate"), strict=True):
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        np.testing.assert_array_equal(ours.token_versions, theirs.token_versions)
    assert digests(config) == digests(overlapped)
    assert verify_run(config).faults == []
    nodes = {node.address for node in run_nodes(config.graph())}
    assert {commit.address for commit in open_history(config).ledger.list()} == nodes
    started = [e for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.RUN_STARTED]
    assert [e.detail for e in started] == ["start, ppo.proximal=recompute", "resume, ppo.proximal=recompute"]
