"""A run that generates with vLLM, whose server is killed and stopped on the way; skipped where there is no vLLM."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest

from pipeline.config.loading import load_config
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.observe.journal import EventKind, journal_exists, read_events
from storage.address import Address
from storage.ledger import Ledger
from tests.contracts.test_vllm_engine import PYTHON, pytestmark
from tests.support.paths import ROOT
from tests.support.processes import command_line
from tests.support.runs import finish
from tests.support.waiting import until

__all__ = ["pytestmark"]


def with_vllm(folder: Path, name: str, staleness: int) -> RunConfig:
    changes = [
        f"runs_dir={folder}", f"name={name}", "steps=2", f"staleness={staleness}", "engine.kind=vllm",
        f"engine.python={PYTHON}", "model.dtype=float32", "engine.dtype=float32",
        "evaluate.every=0", "tracking.uri=null", "tracking.report=false", "cluster.dashboard=null",
    ]  # fmt: skip
    return load_config([str(ROOT / "conf/run/demo.yaml")], changes)


def servers() -> list[psutil.Process]:
    """Return the engine servers of this process's workers."""
    found = psutil.Process().children(recursive=True)
    return [process for process in found if "serving.server" in command_line(process)]


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("number", "staleness", "reason"),
    [(signal.SIGKILL, 0, "ended with status -9"), (signal.SIGSTOP, 1, "sent nothing for 10 s")],
)
def test_a_lost_servers_shard_is_made_again(
    number: signal.Signals, staleness: int, reason: str, tmp_path: Path
) -> None:
    config = with_vllm(tmp_path, "struck", staleness)
    paths = RunPaths(config.run_dir)
    ended = threading.Event()

    def strike() -> None:
        def generating() -> bool:
            begun = read_events(paths.events) if journal_exists(paths.events) else iter(())
            return any(event.kind is EventKind.STARTED and event.stage == "generate" for event in begun)

        until(generating, "a shard that is generated", stop=ended)
        (server,) = servers()
        os.kill(server.pid, number)

    with ThreadPoolExecutor(1) as thread:
        struck = thread.submit(strike)
        try:
            finish(config)
        finally:
            ended.set()
    struck.result()
    assert not servers()
    lost = [event for event in read_events(paths.events) if event.kind is EventKind.GANG_LOST]
    assert [event.gang for event in lost] == ["generate"]
    assert reason in (lost[0].detail or "")
    ledger = Ledger(str(paths.root / "ledger"))
    for step in range(config.steps):
        if not staleness:
            metrics = ledger.get(Address("advantage", step)).metrics
            assert metrics["mismatch/fresh_fraction"] == 1.0
            assert metrics["mismatch/mean_abs"] < 1e-4  # nats: engine and trainer hold the same weights, refit or not
        # Under staleness the engine is given the tokens of older versions, and scores them with this one.
        assert ledger.get(Address("canary", step)).metrics["mismatch/canary_mean_abs"] < 1e-4
    (said,) = [event.detail for event in read_events(paths.events) if event.kind is EventKind.ENGINE]
    assert "engine vllm on cpu: draws are keyed; other rows of a batch change log-probs by rounding" in (said or "")
    assert "Not proven: the run repeats to rounding" in (said or "")
    assert np.isfinite(ledger.get(Address("update_policy", 1)).metrics["policy/grad_norm"])
