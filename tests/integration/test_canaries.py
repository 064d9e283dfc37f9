"""A refit that goes wrong under staleness: only the canaries see it. Where all is well they say so, too."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

import pipeline.driver.run
from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import StageFailed
from pipeline.observe.journal import EventKind, read_events
from stages.forward import CANARY_TOKENS
from storage.address import Address
from tests.support.faulty_runtimes import DAMAGED
from tests.support.runs import ONE_GANG, QUIET, configure, finish, use_runtime

pytestmark = pytest.mark.processes

PERTURBED = "tests.support.faulty_runtimes:PerturbedBoardRuntime"
STALE = "tests.support.faulty_runtimes:StaleBoardRuntime"
CHANGES = ("evaluate.every=0", *QUIET)


def metrics_of(config: RunConfig) -> list[dict[str, float]]:
    history = open_history(config)
    return [history.read_step_metrics(step) for step in range(config.steps)]


def alarms_of(config: RunConfig) -> list[int | None]:
    return [e.step for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.ALARM]


def test_a_healthy_run_under_staleness_has_no_alarm(overlapped: RunConfig) -> None:
    """eta = 1: no row is fresh after step 0, and at one version trainer and engine agree as float32 does."""
    found = metrics_of(overlapped)
    assert [metrics["mismatch/alarm"] for metrics in found] == [0.0] * overlapped.steps
    assert max(metrics["mismatch/canary_max_abs"] for metrics in found) < 1e-4
    assert min(metrics["mismatch/mean_abs_all"] for metrics in found[2:]) > 1e-2, "staleness is no mismatch"
    assert min(metrics["mismatch/canary_moved"] for metrics in found[2:]) > 1e-2
    assert alarms_of(overlapped) == []
    store, rows = open_history(overlapped).store, overlapped.mismatch.rows
    rollout = store.read(Address("generate", 2))
    canary = store.read(Address("canary", 2))
    lengths = np.minimum(rollout.response_lengths[:rows], CANARY_TOKENS)
    assert (canary.canary_logprobs != 0).sum(axis=1).tolist() == [*lengths, *[0] * (rollout.num_rows - rows)]


def test_replay_scores_a_canary_again(overlapped: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(overlapped.run_dir), "--step", "2", "--stage", "canary"]) == 0
    assert "canary_logprobs" in capsys.readouterr().out


def test_recomputed_logprobs_add_nothing_to_updates_of_one_step(folder: Path) -> None:
    """With the KL in the loss `ppo.proximal: auto` leaves their nodes out, and the policy trains on the same losses.
    eta = 1: the second step's rows are stale, and w is not 1."""
    found = []
    for name, proximal in (("left-out", "auto"), ("kept", "recompute")):
        changes = ("steps=3", "ppo.minibatches=1", "ppo.kl.where=loss", f"ppo.proximal={proximal}", ONE_GANG, *CHANGES)
        config = finish(configure(folder, name, *changes))
        found.append(metrics_of(config))
        recomputed = proximal == "recompute"
        assert len(open_history(config).ledger.list("logprob")) == (3 * config.rollout.shards if recomputed else 0)
        assert [metrics["policy/proximal_recomputed"] for metrics in found[-1]] == [float(recomputed)] * 3
        assert max(metrics["mismatch/canary_max_abs"] for metrics in found[-1]) < 1e-4
        started = next(read_events(RunPaths(config.run_dir).events))
        assert started.detail == f"start, ppo.proximal={'recompute' if recomputed else 'loglinear'}"
    names = ("policy/loss", "policy/grad_norm", "policy/weight_mean", "policy/kl_ref", "critic/loss", "reward/mean")
    assert found[0][2]["policy/weight_max"] > 1.01
    for left_out, kept in zip(*found, strict=True):
        assert {n: left_out[n] for n in names} == pytest.approx({n: kept[n] for n in names}, abs=1e-4)


@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_a_broken_refit_raises_the_alarm(folder: Path, monkeypatch: pytest.MonkeyPatch, proximal: str) -> None:
    """It does so with the log-probs of whole shards, and with those of the canaries alone."""
    config = configure(folder, f"broken-{proximal}", f"ppo.proximal={proximal}", *CHANGES)
    use_runtime(monkeypatch, PERTURBED)
    said = io.StringIO()
    pipeline.driver.run.run(config, Console(file=said, width=200))
    found = metrics_of(config)
    assert [metrics["mismatch/alarm"] for metrics in found] == [float(v == DAMAGED) for v in range(config.steps)]
    assert found[DAMAGED]["mismatch/canary_mean_abs"] > 0.1
    assert alarms_of(config) == [DAMAGED]
    assert f"nats a token at version {DAMAGED} of the weights" in said.getvalue()
    assert json.loads(RunPaths(config.run_dir).summary.read_text())["alarms"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_a_version_behind_raises_the_alarm(folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """An engine that kept the weights before these: nothing is wrong with them but their age. In bfloat16 the engines
    differ by rounding at version 0, and the limit follows from that."""
    settings = (f"model.dtype={dtype}", f"engine.dtype={dtype}", "model.policy.lr=0.003")
    config = configure(folder, f"stale-{dtype}", *settings, *CHANGES)
    use_runtime(monkeypatch, STALE)
    pipeline.driver.run.run(config, Console(file=io.StringIO(), width=200))
    found = metrics_of(config)
    assert [metrics["mismatch/alarm"] for metrics in found] == [float(v == DAMAGED) for v in range(config.steps)]
    assert found[DAMAGED]["mismatch/canary_moved"] < 1e-6
    assert alarms_of(config) == [DAMAGED]


def test_an_alarm_may_end_the_run_and_a_good_refit_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(folder, "stopped-by-canary", "alarms.stop=[mismatch]", *CHANGES)
    with monkeypatch.context() as patch:
        use_runtime(patch, PERTURBED)
        with pytest.raises(StageFailed, match=rf"canary/step_00000{DAMAGED}.*raised.*nats a token"):
            pipeline.driver.run.run(config, Console(file=io.StringIO()))
    assert open_history(config).ledger.find(Address("canary", DAMAGED)) is None
    pipeline.driver.run.run(config, Console(file=io.StringIO()), resume=True)
    assert [metrics["mismatch/alarm"] for metrics in metrics_of(config)] == [0.0] * config.steps
