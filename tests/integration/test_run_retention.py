"""Runs that let go what they need no more: they come to what a run comes to that keeps everything, also when they are
resumed, and `check` and `inspect` say what is gone."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import Commit
from storage.errors import DroppedOutput
from tests.support.runs import ONE_GANG, QUIET, configure, finish

pytestmark = pytest.mark.processes

CHANGES = (
    *QUIET, ONE_GANG, "staleness=0", "evaluate.every=0", "checkpoint.every=2", "model.policy.decay=constant",
    "model.critic.decay=constant",
)  # fmt: skip
KEEP = ("storage.keep.rollouts=1", "storage.keep.exports=2", "checkpoint.keep_every=4", "export.every=1")
STEPS = 9


def contents(config: RunConfig) -> dict[Address, str]:
    """Return the CRCs of the arrays and the digests of the weights of everything that was committed."""
    return {commit.address: commit.content for commit in commits(config)}


def commits(config: RunConfig) -> list[Commit]:
    return open_history(config).ledger.list()


@pytest.fixture(scope="module")
def whole(folder: Path) -> RunConfig:
    return finish(configure(folder, "keeping", *CHANGES, f"steps={STEPS + 1}"))


@pytest.fixture(scope="module")
def lean(folder: Path) -> RunConfig:
    return finish(configure(folder, "lean", *CHANGES, *KEEP, f"steps={STEPS}"))


def test_a_run_lets_go_what_no_recovery_needs(lean: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine steps: the last four are the margin; checkpoints of versions 6 and 8 are the newest, and that of 4 stays."""
    paths, history = RunPaths(lean.run_dir), open_history(lean)
    assert history.store.dropped_before() == 5
    assert sorted(path.name for path in (paths.root / "rollouts.zarr").glob("step_*")) == [
        f"step_{s:06d}" for s in range(5, STEPS)
    ]
    assert Checkpoints(paths.checkpoints).versions("policy") == [4, 6, 8]
    assert sorted(path.name for path in paths.weights(0).parent.iterdir()) == ["v000008", "v000009"]
    report = verify_run(lean)
    assert report.faults == []
    assert any("of the steps before 5 were dropped by storage.keep.rollouts" in note for note in report.notes)
    with pytest.raises(DroppedOutput):
        history.store.read(Address("generate", 4))
    assert main(["inspect", str(lean.run_dir), "--step", "1"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "dropped by storage.keep.rollouts" in said
    assert "advantage/step_000001" in said
    assert main(["replay", str(lean.run_dir), "--step", "1", "--stage", "score"]) == 2
    assert "dropped by storage.keep.rollouts" in " ".join(capsys.readouterr().err.split())


def test_a_file_that_is_missing_all_the_same_is_a_fault(folder: Path, lean: RunConfig) -> None:
    copy = configure(folder, "holed", *CHANGES, *KEEP, f"steps={STEPS}")
    shutil.copytree(lean.run_dir, copy.run_dir)
    shutil.rmtree(copy.run_dir / "rollouts.zarr" / "step_000005" / "tokens")
    assert any("committed but its file is missing" in fault for fault in verify_run(copy).faults)


def test_a_resumed_run_goes_on_from_what_was_kept(folder: Path, lean: RunConfig, whole: RunConfig) -> None:
    """The newest checkpoint of each model cannot be used: the updates since the one before it run again."""
    config = configure(folder, "resumed", *CHANGES, *KEEP, f"steps={STEPS + 1}")
    shutil.copytree(lean.run_dir, config.run_dir)
    for role in ("policy", "critic"):
        shutil.rmtree(RunPaths(config.run_dir).checkpoints / role / "v000008")
    assert main(["resume", str(config.run_dir), f"steps={STEPS + 1}"]) == 0
    assert contents(config) == contents(whole)
    assert verify_run(config).faults == []


def test_without_any_checkpoint_the_way_on_is_named_and_works(
    folder: Path, lean: RunConfig, whole: RunConfig, capsys: pytest.CaptureFixture[str]
) -> None:
    config = configure(folder, "anew", *CHANGES, *KEEP, f"steps={STEPS + 1}")
    shutil.copytree(lean.run_dir, config.run_dir)
    shutil.rmtree(RunPaths(config.run_dir).checkpoints)
    assert main(["resume", str(config.run_dir), f"steps={STEPS + 1}"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "dropped by storage.keep.rollouts" in said
    assert "--from-checkpoint" in said
    assert main(["resume", str(config.run_dir), "--from-checkpoint"]) == 0
    assert contents(config) == contents(whole)
    assert verify_run(config).faults == []


def test_records_of_what_was_let_go_may_be_damaged(folder: Path, lean: RunConfig, whole: RunConfig) -> None:
    """They cannot be made again, and nobody needs them. `check` names them, and the run continues without them."""
    config = configure(folder, "scratched", *CHANGES, *KEEP, f"steps={STEPS + 1}")
    shutil.copytree(lean.run_dir, config.run_dir)
    lost = [Address("generate", 1), Address("advantage", 3), Address("update_policy", 2), Address("publish", 3)]
    for address in lost:
        file = config.run_dir / "ledger" / f"{address}.json"
        file.write_bytes(file.read_bytes().replace(b'"rows": ', b'"rows":  '))
    for steps in (STEPS, STEPS + 1):
        report = verify_run(configure(folder, "scratched", *CHANGES, *KEEP, f"steps={steps}"))
        assert report.faults == []
        named = [note for note in report.notes if "nobody needs it any more" in note]
        assert [address for address in lost if any(str(address) in note for note in named)] == lost
        assert main(["resume", str(config.run_dir), f"steps={STEPS + 1}"]) == 0
    expected = contents(whole)
    assert contents(config) == {address: expected[address] for address in expected if address not in lost}
    assert main(["export", str(config.run_dir), "--to", str(folder / "scratched-export")]) == 0
