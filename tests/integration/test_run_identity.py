"""Runs that continue under other conditions than they began: edited, with allowed changes, with lost or damaged files,
longer, on another machine."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from pipeline.cli.answers import read_saved_config
from pipeline.cli.main import main
from pipeline.cli.verification import verify_run
from pipeline.config.identity import FILE, Identity, read_identity
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.results import open_history
from pipeline.graph.graph import run_nodes
from pipeline.observe.journal import EventKind, read_events
from storage import files
from storage.address import Address
from storage.weights import WeightBoard
from tests.support.faulty_runtimes import INSTRUCTIONS
from tests.support.runs import ONE_GANG, QUIET, configure, finish, use_runtime

pytestmark = pytest.mark.processes

CONSTANT = ("model.policy.decay=constant", "model.critic.decay=constant")


@pytest.fixture(scope="module")
def short(folder: Path) -> RunConfig:
    """Two steps on one worker; checkpoints of both."""
    changes = (*QUIET, *CONSTANT, ONE_GANG, "steps=2", "checkpoint.every=1", "evaluate.every=0")
    return finish(configure(folder, "short", *changes))


@pytest.fixture
def copy(short: RunConfig, tmp_path: Path) -> Path:
    """A copy of the run's directory, which tests may move and change."""
    return Path(shutil.copytree(short.run_dir, tmp_path / "copy"))


def identity_of(run_dir: Path) -> Identity:
    identity = read_identity(run_dir)
    assert identity is not None
    return identity


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """Return what `stageline resume` says when it exits with 2: one refusal, after notes if any."""
    capsys.readouterr()
    assert main(["resume", *arguments]) == 2
    said = capsys.readouterr().err
    assert sum(line.startswith("refused") for line in said.splitlines()) == 1
    return said


def test_a_run_says_what_it_is_and_each_commit_under_what_it_was_made(short: RunConfig) -> None:
    identity = identity_of(short.run_dir)
    (first,) = identity.statements
    assert first.why == "started"
    assert set(identity.models) == {"policy", "reference", "critic"}
    assert {"python", "numpy", "torch", "megatron-core"} <= first.software.keys()
    (gang,) = identity.numerics
    named = {"instructions", "amx", "compiler", "compiler.flags", "model.kernels", "model.products", "engine.kernels"}
    assert named <= gang.items.keys()
    commits = open_history(short).ledger.list()
    assert {c.provenance.numerics for c in commits} == {gang.fingerprint}
    assert {c.provenance.config_hash for c in commits} == {first.config_hash}
    assert verify_run(short).faults == []


def test_an_edited_config_is_refused_with_both_values(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / "config.yaml"
    file.write_text(file.read_text().replace("clip: 0.2", "clip: 0.3"))
    said = refused([str(copy)], capsys)
    assert "ppo.clip=0.3 (was 0.2)" in said
    assert any("ppo.clip=0.3" in fault for fault in verify_run(read_saved_config(str(copy))).faults)
    file.unlink()
    assert main(["resume", str(copy)]) == 0, "the identity has it too"
    assert "clip: 0.2" in file.read_text()


def test_changes_that_decide_what_is_computed_are_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused([str(copy), "model.policy.lr=0.5", "seed=7", "cluster.attempts=9"], capsys)
    assert said.startswith("refused model.policy.lr: ")
    for part in ("model.policy.lr: given 0.5; the run has 0.001", "\nseed: given 7; the run has 0", "name=... seed="):
        assert part in said
    assert "cluster.attempts" not in said
    assert "did you mean" in refused([str(copy), "stepz=9"], capsys)
    wrong = refused([str(copy), "seed=7", "stepz=9", "alarms.kl_above=0", "name=x", f"runs_dir={copy}"], capsys)
    keys = [line.removeprefix("refused ").partition(":")[0] for line in wrong.splitlines()]
    assert keys == ["name", "runs_dir", "stepz", "alarms.kl_above", "seed"]
    assert len(identity_of(copy).statements) == 1


@pytest.mark.parametrize("content", ["", "name: [", "name: short\nsteps: 2\n"])
def test_a_damaged_config_is_refused(copy: Path, capsys: pytest.CaptureFixture[str], content: str) -> None:
    (copy / "config.yaml").write_text(content)
    assert "Traceback" not in refused([str(copy)], capsys)


def test_a_damaged_identity_is_refused(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = copy / FILE
    file.write_text(file.read_text()[:-40])
    assert "identity.json: is not what was written" in refused([str(copy)], capsys)
    assert any("identity.json" in fault for fault in verify_run(read_saved_config(str(copy))).faults)


@pytest.mark.parametrize("lost", ["prompts.npz", "prompts.jsonl"])
@pytest.mark.parametrize("damage", ["missing", "truncated"])
def test_lost_prompts_are_read_again_if_they_are_the_same(
    copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], lost: str, damage: str
) -> None:
    file = copy / lost
    whole = file.read_bytes()
    file.unlink() if damage == "missing" else file.write_bytes(whole[: len(whole) // 2])
    gone = refused([str(copy), f"prompts.url={tmp_path}/gone.jsonl"], capsys)
    assert "gone.jsonl" in gone
    assert lost in gone
    (tmp_path / "others.jsonl").write_text("".join(json.dumps({"prompt": f"p {i}"}) + "\n" for i in range(40)))
    assert "is not what" in refused([str(copy), f"prompts.url={tmp_path}/others.jsonl"], capsys)
    assert main(["resume", str(copy)]) == 0
    if lost.endswith("jsonl"):
        assert file.read_bytes() == whole


def test_full_disk_at_resume(copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "there")

    monkeypatch.setattr(files, "write", full)
    said = refused([str(copy)], capsys)
    assert said.startswith("refused runs_dir: ")
    assert "cannot write there: No space left on device" in said


def test_a_journal_without_room_ends_the_run_which_can_be_resumed(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = (copy / "events.jsonl").read_bytes()
    with monkeypatch.context() as disk:
        disk.setattr(os, "pwrite", full)
        assert main(["resume", str(copy), "steps=3"]) == 3
    said = capsys.readouterr().err
    assert "events.jsonl: No space left on device" in said
    assert f"`stageline resume {copy}` continues this run" in said
    assert (copy / "events.jsonl").read_bytes() == before
    with (copy / "events.jsonl").open("a") as torn:
        torn.write('{"t":1.0,"ki')
    assert main(["resume", str(copy)]) == 0
    assert len(open_history(read_saved_config(str(copy))).ledger.list("update_policy")) == 3
    assert [e for e in read_events(copy / "events.jsonl") if e.kind is EventKind.RUN_FINISHED]


def test_weights_of_a_run_that_died_at_its_end_are_let_go(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    board = RunPaths(copy).board(None)
    WeightBoard(board).directory.joinpath("spare.bin").write_bytes(b"left")
    assert main(["resume", str(copy)]) == 0
    assert not board.exists()
    assert f"complete: {copy} has all 2 steps, and nothing was left to compute" in capsys.readouterr().out


def test_a_run_goes_on_longer_and_evaluates(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The changes are stated, and commits of both configs belong to the run. Earlier versions are published again
    for the evaluation."""
    changes = ["steps=3", "evaluate.every=2", "checkpoint.every=2", "cluster.attempts=5"]
    assert main(["resume", str(copy), *changes]) == 0
    assert "the learning rates stay constant, as they were" in " ".join(capsys.readouterr().out.split())
    config = read_saved_config(str(copy))
    assert (config.steps, config.checkpoint.every) == (3, 2)
    first, second = identity_of(copy).statements
    assert first.config_hash != second.config_hash
    assert sorted(second.changed) == [
        "checkpoint.every=2 (was 1)",
        "cluster.attempts=5 (was 3)",
        "evaluate.every=2 (was 0)",
        "steps=3 (was 2)",
    ]
    started = [e.detail for e in read_events(copy / "events.jsonl") if e.kind is EventKind.RUN_STARTED]
    assert started[-1] == ", ".join(["resume", "ppo.proximal=recompute", *second.changed])
    history = open_history(config)
    assert {commit.address for commit in history.ledger.list()} == {n.address for n in run_nodes(config.graph())}
    assert [evaluation.version for evaluation in history.read_evaluations()] == [0, 2, 3]
    made = {c.provenance.config_hash for c in history.ledger.list()}
    assert made == {first.config_hash, second.config_hash}
    assert verify_run(config).faults == []
    assert main(["resume", str(copy), "evaluate.every=0"]) == 0
    assert verify_run(read_saved_config(str(copy))).faults == []


def test_a_run_that_goes_on_elsewhere_begins_anew_at_a_checkpoint(
    copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another machine is refused. If the user allows it, the run finds that an update gives other weights, and names
    the way out, which keeps what it replaces. The checkpoint of version 2 is lost, so that the update that made it runs
    again."""
    for role in ("policy", "critic"):
        shutil.rmtree(copy / "checkpoints" / role / "v000002")
    history = open_history(read_saved_config(str(copy)))
    before = {commit.address: commit for commit in history.ledger.list()}
    kept = history.store.read(Address("generate", 1))
    use_runtime(monkeypatch, "tests.support.faulty_runtimes:OtherBits")
    said = refused([str(copy), "steps=3"], capsys)
    assert f"instructions: {INSTRUCTIONS}" in said
    assert "--from-checkpoint" in said
    assert main(["resume", str(copy), "cluster.same_numerics=warn"]) == 3
    said = capsys.readouterr().err
    assert "update_policy/step_000001" in said
    assert "`stageline resume RUN --from-checkpoint`" in said

    assert main(["resume", str(copy), "--from-checkpoint", "cluster.same_numerics=refuse"]) == 0
    config = read_saved_config(str(copy))
    latest = identity_of(copy).latest
    assert latest.anew
    assert latest.why.startswith("resumed from checkpoint v1: ")
    history = open_history(config)
    after = {commit.address: commit for commit in history.ledger.list()}
    assert after.keys() == {node.address for node in run_nodes(config.graph())}
    stand = {address for address in before if after[address].attempt == before[address].attempt}
    assert {Address("update_policy", 0), Address("generate", 1), Address("advantage", 1)} <= stand
    assert Address("update_policy", 1) not in stand
    assert after[Address("update_policy", 1)].digest != before[Address("update_policy", 1)].digest
    assert history.store.read(Address("generate", 1)).tokens.tolist() == kept.tokens.tolist()
    (archive,) = (copy / "archive").iterdir()
    archived = {path.relative_to(archive / "ledger").as_posix() for path in (archive / "ledger").rglob("*.json")}
    assert archived == {f"{address}.json" for address in before.keys() - stand}
    assert not (archive / "rollouts.zarr" / "step_000001" / "tokens").exists()
    assert verify_run(config).faults == []
    warned = [e.detail for e in read_events(copy / "events.jsonl") if e.kind is EventKind.WARNED]
    assert any(detail and "resumed from checkpoint v1" in detail for detail in warned)
