"""Whole runs under `rollout.versions: latest`. Shards take newer weights than their edges ask for. Still the bound
holds, commits are complete, `check` and `replay` work, and a continued run keeps its versions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.cli.main import main
from pipeline.cli.replay import replay_node
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.errors import ConfigError, StageFailed
from pipeline.observe.journal import EventKind, read_events
from storage.address import Address
from tests.support.run_results import events_noted, outputs, steps_of
from tests.support.runs import QUIET, configure, finish, use_runtime

pytestmark = pytest.mark.processes

LATEST = ("rollout.versions=latest", "staleness=2", *QUIET)
EXACTLY = [0, 0, 0, 1]
"""Versions of steps 0 to 3 with eta = 2 under `exact`."""


def versions_of(config: RunConfig) -> list[list[int]]:
    """By step, the versions of its tokens."""
    rollouts = steps_of(config, "generate")
    return [np.unique(rollout.token_versions[rollout.response_mask]).tolist() for rollout in rollouts]


@pytest.fixture(scope="module")
def late(folder: Path) -> RunConfig:
    """Step 1 begins with version 0, and continues when version 1 is there, so that step 2 begins with version 1."""
    with pytest.MonkeyPatch.context() as patch:
        use_runtime(patch, "tests.support.faulty_runtimes:LateRuntime")
        return finish(configure(folder, "late", *LATEST, "evaluate.every=0"))


def test_a_shard_takes_newer_weights_than_its_edge_asks_for(late: RunConfig) -> None:
    found = versions_of(late)
    assert found[:3] == [[0], [0], [1]]
    assert all(oldest <= version <= step for step, oldest in enumerate(EXACTLY) for version in found[step])
    history = open_history(late)
    assert history.read_step_metrics(2)["staleness/mean"] == history.read_step_metrics(2)["staleness/max"] == 1.0
    handed_out = [e for e in read_events(RunPaths(late.run_dir).events) if e.kind is EventKind.SUBMITTED]
    of_step = {(e.step, e.version) for e in handed_out if e.stage == "generate"}
    assert {(1, 0), (2, 1)} <= of_step
    assert {e.version for e in handed_out if e.stage != "generate"} == {None}


def test_it_is_as_sound_as_any_run(late: RunConfig) -> None:
    report = verify_run(late)
    assert (report.faults, events_noted(report)) == ([], [])


def test_check_knows_what_each_mode_allows(late: RunConfig, folder: Path) -> None:
    """The same ledger, were it an `exact` run's, or one of a smaller bound."""
    config = configure(folder, "late", *LATEST, "evaluate.every=0", "rollout.versions=exact")
    place = Address("generate", 2)
    assert f"{place}: tokens of versions 1 to 1, allowed are 0 to 0" in verify_run(config).faults
    config = configure(folder, "late", *LATEST, "evaluate.every=0", "staleness=0")
    assert f"{place}: tokens of versions 1 to 1, allowed are 2 to 2" in verify_run(config).faults


def test_a_shard_is_replayed_with_the_version_that_it_had(late: RunConfig) -> None:
    replayed = replay_node(late, "generate", 2, 1)
    assert replayed.is_as_expected
    assert {d.name: d.num_different for d in replayed.differences}["token_versions"] == 0


def test_a_lost_commit_is_made_again_by_the_version_that_sampled_it(late: RunConfig) -> None:
    """Its record alone said which; its tokens, which nothing vouches for any more, still do, and what comes out is
    compared with what was made from it. All else stays as it is."""
    before = outputs(late)
    (late.run_dir / "ledger" / f"{Address('generate', 2, 1)}.json").unlink()
    assert main(["resume", str(late.run_dir)]) == 0
    assert outputs(late) == before
    assert verify_run(late).faults == []


def test_a_shard_that_is_made_anew_may_take_newer_weights(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It had begun with version 0 when its process died; version 1 is there when it begins again."""
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:DyingLateRuntime")
    config = finish(configure(folder, "late-killed", *LATEST, "evaluate.every=2"))
    lost = [e for e in read_events(RunPaths(config.run_dir).events) if e.kind is EventKind.GANG_LOST]
    assert [event.gang for event in lost] == ["generate"]
    rollout = open_history(config).store.read(Address("generate", 1))
    assert set(rollout.token_versions[rollout.response_mask].tolist()) == {1}
    report = verify_run(config)
    assert (report.faults, events_noted(report)) == ([], [])


def test_a_run_that_goes_on_keeps_what_is_committed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Published weights went with the driver: of them, only the newest is published again."""
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:FailingLateRuntime")
    config = configure(folder, "late-resumed", *LATEST, "evaluate.every=0", "mismatch.rows=0")
    with pytest.raises(StageFailed, match="as ordered"):
        finish(config)
    before = outputs(config)
    assert main(["resume", str(config.run_dir)]) == 0
    after = outputs(config)
    assert {address: after[address] for address in before} == before
    events = list(read_events(RunPaths(config.run_dir).events))
    resumed = max(i for i, event in enumerate(events) if event.kind is EventKind.RUN_STARTED)
    again = {
        e.step
        for e in events[resumed:]
        if e.kind is EventKind.PUBLISHED and f"{Address('publish', e.step or 0)}" in before
    }
    assert again <= {max(e.step or 0 for e in events[:resumed] if e.kind is EventKind.PUBLISHED)}
    report = verify_run(config)
    assert (report.faults, events_noted(report)) == ([], [])


def test_rows_in_flight_take_weights_as_they_are_published(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """There is one slot, so that no other shard can bring version 1: the driver's order does, in the middle of the rows
    of step 1. Such a shard cannot be repeated, and says so; if its commit is lost, the way is back to before it."""
    monkeypatch.setenv("COLUMNS", "300")
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:MidRowRuntime")
    one_slot = (
        "rollout.shards=1",
        "placement.gangs.generate.concurrent_shards=1",
        "evaluate.every=0",
        "mismatch.rows=0",
    )
    inflight = ("rollout.versions=inflight", "sampling.min_new_tokens=6", "engine.max_rows=16")
    config = finish(configure(folder, "late-inflight", *LATEST, *inflight, *one_slot))
    assert versions_of(config)[1] == [0, 1]
    rollout = open_history(config).store.read(Address("generate", 1))
    for row in range(rollout.num_rows):
        versions = rollout.token_versions[row][rollout.response_mask[row]]
        assert (np.diff(versions) >= 0).all(), "a row went back to older weights"
    metrics = open_history(config).read_step_metrics(1)
    assert 0 < metrics["staleness/mean"] < metrics["staleness/max"] == 1
    report = verify_run(config)
    assert (report.faults, events_noted(report)) == ([], [])
    with pytest.raises(ConfigError, match=r"sampled by v0, v1 as they came in .* cannot be repeated"):
        replay_node(config, "generate", 1, 0)
    (config.run_dir / "ledger" / f"{Address('generate', 1)}.json").unlink()
    assert main(["resume", str(config.run_dir)]) == 2
    assert "versions [0, 1], as they came" in capsys.readouterr().err
    exit_code = main(["resume", str(config.run_dir), "--from-checkpoint"])
    assert exit_code == 0, capsys.readouterr().err
    assert verify_run(config).faults == []


def test_without_staleness_both_modes_are_the_same_run(folder: Path) -> None:
    """Bit for bit: every array, and the digests of all weights."""
    exact, latest = (
        finish(configure(folder, f"fresh-{mode}", f"rollout.versions={mode}", "staleness=0", "steps=2", *QUIET))
        for mode in ("exact", "latest")
    )
    assert outputs(exact) == outputs(latest)
