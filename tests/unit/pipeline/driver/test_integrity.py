"""A driver's actions on damaged stored data, without processes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.paths import RunPaths
from pipeline.config.stored import RunStorage
from pipeline.driver.integrity import (
    UnreadVersions,
    check_recomputed,
    clean_up_after,
    newest_sampled,
    plan_rewind,
    quarantine_damaged_commits,
    repair_store,
)
from pipeline.driver.retention import LedgerCompactor, is_complete
from pipeline.errors import StageFailed
from pipeline.graph.graph import GraphSpec, run_nodes, step_nodes
from pipeline.observe.history import History
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import Commit, provenance_here
from storage.config import Durability, Layout, Layouts
from storage.errors import DamagedCommit, StoreError
from storage.ledger import SPAN, Ledger, first_step, segment_key
from storage.records import Scores
from storage.rollouts import RolloutStore
from storage.weights import WeightBoard
from tests.support.commits import save_checkpoint
from tests.support.sampled_rows import rollout_of

FIRST, SECOND = Address("score", 0), Address("score", 1)


@pytest.fixture
def history(tmp_path: Path) -> History:
    ledger = Ledger(str(tmp_path / "ledger"))
    store = RolloutStore(str(tmp_path), ledger, Layouts(Layout(1, 2, 3)))
    return History(GraphSpec(steps=2, shards=1, staleness=0), ledger, store, rows_per_step=2)


@pytest.fixture
def paths(tmp_path: Path) -> RunPaths:
    return RunPaths(tmp_path)


def scores(history: History, address: Address, value: float, *inputs: Commit) -> Commit:
    provenance = provenance_here(inputs=inputs, seed=0, config_hash="")
    return history.store.write(address, Scores(np.full(2, value, np.float32)), provenance)


def damage(paths: RunPaths, address: Address) -> None:
    file = paths.root / "ledger" / f"{address}.json"
    document = json.loads(file.read_text())
    document["arrays"]["scores"]["crc32"] ^= 1
    file.write_text(json.dumps(document))


def test_a_sound_run_needs_nothing(history: History, paths: RunPaths) -> None:
    scores(history, SECOND, 2, scores(history, FIRST, 1))
    repairs = repair_store(history, RunStorage(paths.root))
    assert (repairs.warnings, dict(repairs.expected_digests)) == ((), {})
    assert not (paths.root / "damaged").exists()


def test_a_damaged_record_is_set_aside_and_made_again(history: History, paths: RunPaths) -> None:
    """Outputs that were made from it name its content: if it is made again with the same content, they stay valid;
    otherwise the run ends."""
    scores(history, SECOND, 2, scores(history, FIRST, 1))
    damage(paths, FIRST)
    repairs = repair_store(history, RunStorage(paths.root))
    (warning,) = repairs.warnings
    assert warning.startswith(f"{paths.root}/ledger/{FIRST}.json: is not what was written (its bytes ")
    assert warning.endswith(f"; {FIRST} runs again")
    assert len([path for path in (paths.root / "damaged").rglob("*") if path.is_file()]) == 1, (
        "it is moved, not removed"
    )
    assert list(repairs.expected_digests) == [FIRST]
    scores(history, FIRST, 1)
    check_recomputed(history, repairs, FIRST)
    check_recomputed(history, repairs, SECOND)
    assert repair_store(history, RunStorage(paths.root)).warnings == ()


@pytest.mark.parametrize("damaged", ["zarr.json", "step_000000/zarr.json", "step_000000/scores/zarr.json"])
@pytest.mark.parametrize("missing", [True, False])
def test_zarrs_own_metadata_is_written_again(history: History, paths: RunPaths, damaged: str, missing: bool) -> None:
    commit, file = scores(history, FIRST, 1), paths.root / "rollouts.zarr" / damaged
    whole = file.read_bytes()
    file.unlink() if missing else file.write_bytes(whole[:20])
    assert list(history.store.plain_faults(commit)) != []
    repair_store(history, RunStorage(paths.root))
    assert list(history.store.plain_faults(commit)) == []
    assert file.read_bytes() == whole
    assert not history.store.attempts()


def test_one_that_comes_out_differently_is_named(history: History, paths: RunPaths) -> None:
    scores(history, SECOND, 2, scores(history, FIRST, 1))
    damage(paths, FIRST)
    repairs = repair_store(history, RunStorage(paths.root))
    scores(history, FIRST, 1.5)
    with pytest.raises(
        StageFailed, match=f"{FIRST} was computed again, and differs from the output that later commits used"
    ):
        check_recomputed(history, repairs, FIRST)
    with pytest.raises(StoreError, match=f"cannot go on: {SECOND}: was made from {FIRST} of attempt "):
        repair_store(history, RunStorage(paths.root))


def test_the_books_are_closed_however_a_run_ends(history: History, paths: RunPaths) -> None:
    """After an error what is committed is in its place, and what may yet be committed stays."""

    def leave(address: Address, attempt: str) -> Commit:
        record, provenance = Scores(np.ones(2, np.float32)), provenance_here(seed=0, config_hash="")
        return history.store.prepare(address, record, provenance, attempt=attempt)

    history.ledger.commit(leave(FIRST, "a0-1"))
    leave(SECOND, "a0-2")
    with pytest.raises(KeyboardInterrupt), clean_up_after(history):
        raise KeyboardInterrupt
    assert history.store.attempts() == [(SECOND, "a0-2")]
    (paths.root / "ledger" / "score/.shard_0000.json.0123456789ab").write_text("torn")
    with clean_up_after(history):
        history.ledger.commit(leave(SECOND, "a0-3"))
    assert not (paths.root / "attempts").exists()
    assert history.ledger.unknown_files() == []
    assert all(list(history.store.plain_faults(commit)) == [] for commit in history.ledger.list())


def test_a_version_that_was_leased_is_released_later(tmp_path: Path) -> None:
    with WeightBoard(tmp_path / "board") as board:
        for version in range(3):
            board.publish(version, {"w": np.full(3, version, np.float32)})
        unread, lease = UnreadVersions(board), board.open(0)
        unread.release(0)
        unread.release_unleased()
        assert board.available() == [0, 1, 2]
        lease.close()
        unread.release(1)
        assert board.available() == [2]


def test_what_runs_again_at_the_edge_of_the_books_finds_its_weights(history: History, paths: RunPaths) -> None:
    """A shard or an evaluation of the first open step reads a version that a node of a closed step publishes: that
    step is opened, too, or nobody would publish it."""
    commits: list[Commit] = []
    for step in range(SPAN + 2):
        commits.append(scores(history, Address("score", step), 1, *commits[-1:]))
    history.ledger.close(0, [commit.address for commit in commits[:SPAN]])
    assert repair_store(history, RunStorage(paths.root)).expected_digests == {}
    assert history.ledger.closed_until() == SPAN
    (paths.root / "ledger" / f"{Address('score', SPAN)}.json").unlink()
    assert list(repair_store(history, RunStorage(paths.root)).expected_digests) == [Address("score", SPAN)]
    assert history.ledger.closed_until() == 0


SHARD = Address("generate", 2)


@pytest.fixture
def latest(tmp_path: Path) -> History:
    ledger = Ledger(str(tmp_path / "ledger"))
    store = RolloutStore(str(tmp_path), ledger, Layouts(Layout(1, 2, 3)))
    return History(GraphSpec(steps=4, shards=1, staleness=2, uses_latest=True), ledger, store, rows_per_step=2)


def sampled(history: History, versions: list[int]) -> Commit:
    """A shard of two rows of one prompt token and two sampled ones, of these versions."""
    mask = np.array([[False, True, True]] * 2)
    rollout = rollout_of(
        np.ones((2, 3)), mask, prompt_index=np.zeros(2, int), token_versions=np.array([[-1, *versions]] * 2, np.int32)
    )
    return history.store.write(SHARD, rollout, provenance_here(inputs=(), seed=0, config_hash=""), mask=mask)


def test_a_lost_shard_says_which_version_sampled_it(latest: History, paths: RunPaths) -> None:
    """Under `latest` the graph does not; its tokens do, though nothing vouches for them any more."""
    scores(latest, Address("score", 2), 1, sampled(latest, [1, 1]))
    (paths.root / "ledger" / f"{SHARD}.json").unlink()
    repairs = repair_store(latest, RunStorage(paths.root))
    assert dict(repairs.sampled_versions) == {SHARD: 1}
    assert list(repairs.expected_digests) == [SHARD]


def test_a_lost_shard_of_several_versions_is_refused(latest: History, paths: RunPaths) -> None:
    scores(latest, Address("score", 2), 1, sampled(latest, [1, 2]))
    (paths.root / "ledger" / f"{SHARD}.json").unlink()
    with pytest.raises(StoreError, match=rf"{SHARD} is lost, .* versions \[1, 2\], as they came, .* --from-checkpoint"):
        repair_store(latest, RunStorage(paths.root))
    assert newest_sampled(latest, latest.ledger.addresses()) == {SHARD: None}


# ---- what was lost of steps whose arrays were let go --------------------------------------------------------------

LONG = GraphSpec(steps=2 * SPAN + 12, shards=1, staleness=0, eval_every=6)
DROPPED, SAVED = 2 * SPAN, (12, 2 * SPAN + 2, 2 * SPAN + 6)


@pytest.fixture
def lean(tmp_path: Path) -> History:
    """All of a run of 44 steps is committed, two segments are closed, the arrays of the steps before 32 were let go,
    and there are checkpoints of versions 12 (`checkpoint.keep_every`), 34 and 38."""
    ledger = Ledger(str(tmp_path / "ledger"), Durability(fsync=False))
    store = RolloutStore(str(tmp_path), ledger, Layouts(Layout(1, 2, 3), Layout(1, 2, 3)))
    before: dict[str, Commit] = {}
    for node in run_nodes(LONG):
        inputs = (
            [before["advantage"]] if node.stage in ("advantage", "update_policy") and before.get("advantage") else []
        )
        before[node.stage] = store.commit_only(
            node.address, provenance_here(inputs=inputs, seed=0, config_hash=""), digest=str(node.address)
        )
    books = LedgerCompactor(LONG, ledger)
    for step in range(LONG.steps):
        books.on_step_finished(step, [node.address for node in step_nodes(LONG, step)])
    assert ledger.closed_until() == 2 * SPAN
    store.drop(DROPPED)
    checkpoints = Checkpoints(RunPaths(tmp_path).checkpoints)
    for role in ("policy", "critic"):
        for version in SAVED:
            save_checkpoint(checkpoints, role, version, str(ledger.get(Address(f"update_{role}", version - 1)).digest))
    return History(LONG, ledger, store, rows_per_step=2)


def flip(paths: RunPaths, address: Address) -> None:
    """Damages a record where it is: in its segment, or its file."""
    file = paths.root / "ledger" / f"{address}.json"
    if not file.exists():
        file = paths.root / "ledger" / segment_key(first_step(address.step))
    data = bytearray(file.read_bytes())
    data[data.rindex(f'"digest": "{address}"'.encode()) + 12] ^= 1
    file.write_bytes(bytes(data))


OUTLIVED = (
    Address("advantage", 3), Address("update_policy", 2), Address("publish", SPAN + 3), Address("evaluate", 6),
    Address("generate", 2 * SPAN), Address("update_critic", 2 * SPAN), Address("publish", DROPPED + 1),
)  # fmt: skip
"""In the first segment, the second and none; of steps whose arrays are gone, and such as only the trainer is past."""


@pytest.mark.parametrize("lost", OUTLIVED, ids=str)
def test_a_damaged_record_of_a_dropped_output_is_not_needed(lean: History, paths: RunPaths, lost: Address) -> None:
    """It cannot be made again, since its inputs were deleted. The run continues without it."""
    flip(paths, lost)
    history = replace(lean, ledger=Ledger(str(paths.root / "ledger")))
    repairs = repair_store(history, RunStorage(paths.root))
    warning, *more = repairs.warnings
    assert str(lost) in warning
    assert "is not what was written" in warning
    assert warning.endswith("nobody needs it any more (storage.keep.rollouts has let go what it was made from)")
    assert more == []
    assert repairs.unneeded_outputs == {lost}
    assert not repairs.expected_digests
    assert history.ledger.closed_until() == 2 * SPAN, "what was closed is closed again"
    assert is_complete(LONG, history.ledger, repairs.unneeded_outputs)
    assert LedgerCompactor(LONG, history.ledger, repairs.unneeded_outputs).first_step == 2 * SPAN
    again = repair_store(replace(lean, ledger=Ledger(str(paths.root / "ledger"))), RunStorage(paths.root))
    assert len(again.warnings) == (lost.step >= 2 * SPAN), "of a closed step nobody asks any more"
    assert {*range(DROPPED)} <= {*history.finished_steps()}


@pytest.mark.parametrize(
    "needed",
    [
        Address("advantage", SAVED[1]),
        Address("update_critic", SAVED[1]),
        Address("evaluate_score", 6),
        Address("evaluate", 0),
        Address("evaluate", SAVED[0]),
        Address("publish", SAVED[0]),
    ],
    ids=str,
)
def test_what_a_recovery_may_need_runs_again(lean: History, paths: RunPaths, needed: Address) -> None:
    """Updates from the oldest checkpoint before the gap may run again. Evaluated rows are never deleted. If a
    version's weights exist, everything else can be made."""
    flip(paths, needed)
    repairs = repair_store(replace(lean, ledger=Ledger(str(paths.root / "ledger"))), RunStorage(paths.root))
    assert not repairs.unneeded_outputs
    (warning,) = repairs.warnings
    assert warning.endswith(f"; {needed} runs again")


def test_a_run_closes_its_books_without_what_is_lost(lean: History, paths: RunPaths) -> None:
    """It does so too if the step was still open when its record was damaged."""
    lost = Address("advantage", 2 * SPAN)
    flip(paths, lost)
    longer = replace(LONG, steps=3 * SPAN + 12)
    history = replace(lean, spec=longer, ledger=Ledger(str(paths.root / "ledger")))
    repairs = repair_store(history, RunStorage(paths.root))
    books = LedgerCompactor(longer, history.ledger, repairs.unneeded_outputs)
    for step in range(books.first_step, longer.steps):
        for node in step_nodes(longer, step):
            if node.address != lost:
                history.store.commit_only(node.address, provenance_here(seed=0, config_hash=""))
        books.on_step_finished(step, [node.address for node in step_nodes(longer, step)])
    assert history.ledger.closed_until() == 3 * SPAN
    assert is_complete(longer, history.ledger)
    assert history.newest_version() == longer.steps


def test_a_run_goes_back_to_a_checkpoint_over_what_is_lost(lean: History, paths: RunPaths) -> None:
    """Without its record a generation looks like one that has yet to read its version."""
    flip(paths, Address("generate", 3))
    history = replace(lean, ledger=Ledger(str(paths.root / "ledger")))
    assert quarantine_damaged_commits(history.ledger, RunStorage(paths.root)).keys() == {Address("generate", 3)}
    assert plan_rewind(history, RunStorage(paths.root)).version == SAVED[-1]


def test_a_running_driver_passes_over_it(lean: History, paths: RunPaths) -> None:
    """Its summary reads every step; only data that may still be needed stops it."""
    flip(paths, Address("generate", 3))
    history = replace(lean, ledger=Ledger(str(paths.root / "ledger")))
    assert history.read_step_numbers(3) is None, "no metrics here, and no error"
    flip(paths, Address("generate", DROPPED))
    with pytest.raises(DamagedCommit):
        history.read_step_numbers(DROPPED)
