"""Checkpoints of whole runs: one that cannot be used is reported and passed over, the run ends as if it had been whole;
and what was being written when a run died is none, or is made good."""

from __future__ import annotations

import io
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

import pipeline.driver.run
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.observe.journal import EventKind, read_events
from storage.checkpoints import Checkpoints
from tests.support.runs import ONE_GANG, QUIET, configure, finish, placement

pytestmark = pytest.mark.processes

CHANGES = (
    *QUIET, "staleness=0", "evaluate.every=0", "checkpoint.every=1", "checkpoint.keep=9", "export.every=1",
    "model.policy.decay=constant", "model.critic.decay=constant",
)  # fmt: skip
TWO_RANKS = placement("{pool: {}, train: {workers: 2}}", generate="pool", score="pool", others="train")


def digests(config: RunConfig) -> list[str | None]:
    """Return the digests of both models after every update."""
    ledger = open_history(config).ledger
    return [commit.digest for stage in ("update_policy", "update_critic") for commit in ledger.list(stage)]


def go_on(config: RunConfig) -> str:
    """Runs to the end, and gives what the terminal showed."""
    shown = io.StringIO()
    pipeline.driver.run.run(config, Console(file=shown, width=1000), resume=True)
    return shown.getvalue()


@pytest.fixture(scope="module", params=[ONE_GANG, TWO_RANKS], ids=["one rank", "two ranks"])
def placed(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_run_passes_over_a_checkpoint_with_a_flipped_bit(folder: Path, placed: str) -> None:
    """Nothing is trained on it. Journal, terminal and the worker's log report it, and the update after the earlier
    checkpoint runs again. An export that a killed process had begun is finished on the way."""
    name = f"flipped{'_ranks' if placed == TWO_RANKS else ''}"
    whole = finish(configure(folder, f"{name}_whole", *CHANGES, placed, "steps=3"))
    config = finish(configure(folder, name, *CHANGES, placed, "steps=2"))
    paths = RunPaths(config.run_dir)
    assert Checkpoints(paths.checkpoints).versions("policy") == [1, 2], "the last one is waited for"
    assert Checkpoints(paths.checkpoints).versions("critic") == [1, 2]
    for file in (paths.checkpoints / "policy" / "v000002").glob("*.distcp"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    shutil.move(paths.weights(1), paths.weights(1).with_name(".v000001"))

    shown = go_on(configure(folder, name, *CHANGES, placed, "steps=3"))
    longer = configure(folder, name, *CHANGES, placed, "steps=3")
    (warning,) = [e for e in read_events(paths.events) if e.kind is EventKind.WARNED]
    assert warning.detail is not None
    assert "checkpoint v2 of the policy CANNOT BE USED" in warning.detail
    assert "is not what was saved. Back to v1; the updates from there to v2 run again" in warning.detail
    assert f"WARNING: {warning.detail}" in shown
    assert warning.worker is not None
    assert warning.detail in (paths.logs / f"{warning.worker}.log").read_text()
    assert digests(longer) == digests(whole)
    (fault,) = verify_run(longer).faults
    assert fault.startswith("checkpoint v2 of the policy: ")
    assert verify_run(whole).faults == []
    assert sorted(path.name for path in paths.weights(0).parent.iterdir()) == ["v000001", "v000002", "v000003"]
    for version in (1, 2, 3):
        ours, theirs = (RunPaths(run.run_dir).weights(version) / "model.safetensors" for run in (longer, whole))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_run_passes_over_a_checkpoint_of_another_run(folder: Path) -> None:
    """That run has the same architecture and another seed: its bytes are sound, but its weights are not this run's."""
    other = finish(configure(folder, "foreign_other", *CHANGES, ONE_GANG, "steps=2", "seed=1"))
    config = finish(configure(folder, "foreign", *CHANGES, ONE_GANG, "steps=2"))
    place, foreign = (RunPaths(run.run_dir).checkpoints / "policy" / "v000002" for run in (config, other))
    shutil.rmtree(place)
    shutil.copytree(foreign, place)
    (fault,) = verify_run(config).faults
    assert re.fullmatch(r"checkpoint v2 of the policy: has weights of digest \S+, committed is \S+", fault)

    longer = configure(folder, "foreign", *CHANGES, ONE_GANG, "steps=3")
    assert re.search(r"checkpoint v2 of the policy CANNOT BE USED: .* Back to v1; ", go_on(longer))
    assert verify_run(longer).faults == [fault]
    assert len(digests(longer)) == 6
