"""The contract of every rollout store on any filesystem; on a local one also under races and SIGKILL."""

from __future__ import annotations

import signal
import subprocess
import uuid
import warnings
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pytest
import zarr

from storage import files
from storage.address import Address
from storage.commits import encode, provenance_here
from storage.config import Layout, Layouts
from storage.errors import DroppedOutput, MissingOutput, StoreError
from storage.ledger import Ledger
from storage.records import Advantages, PolicyLogprobs, Record, ReferenceLogprobs, Rollout, Scores
from storage.rollouts import RolloutStore, in_attempt
from tests.support.processes import exit_status, start_python
from tests.support.sampled_rows import rollout_of

SHARDS, ROWS, SEQ = 3, 4, 6
LAYOUTS = Layouts(step=Layout(SHARDS, ROWS, SEQ), evaluate=Layout(2, 2, SEQ))
PROVENANCE = provenance_here(seed=1, config_hash="c")
HERE = f"""
import os, signal, sys
import numpy as np
from storage.address import Address
from storage.commits import provenance_here
from storage.ledger import Ledger
from storage.records import Scores
from storage.rollouts import RolloutStore
from storage.config import Layout, Layouts
ledger = Ledger(sys.argv[1] + "/ledger")
store = RolloutStore(sys.argv[1], ledger, Layouts(Layout({SHARDS}, {ROWS}, {SEQ})))
provenance = provenance_here(seed=1, config_hash="c")
"""


def rollout(seed: int = 0, rows: int = ROWS) -> Rollout:
    """Two prompt tokens, three sampled ones, one of padding; every number random."""
    g = np.random.default_rng(seed)
    mask = np.zeros((rows, SEQ), bool)
    mask[:, 2:5] = True
    return rollout_of(
        g.integers(0, 50_000, (rows, SEQ)), mask, version=5, prompt_index=g.integers(0, 1000, rows),
        sampler_logprobs=np.where(mask, -g.random((rows, SEQ)), 0).astype(np.float32),
        finish_reason=np.ones(rows, np.int8),
    )  # fmt: skip


def advantages(seed: int = 9) -> Advantages:
    g = np.random.default_rng(seed)
    a, b, c = (g.standard_normal((SHARDS * ROWS, SEQ)).astype(np.float32) for _ in range(3))
    return Advantages(a, b, c, g.random((SHARDS * ROWS, SEQ)) < 0.5)


def assert_same(found: Record, expected: Record) -> None:
    assert type(found) is type(expected)
    for name, array in expected.arrays().items():
        np.testing.assert_array_equal(found.arrays()[name], array, err_msg=name, strict=True)


class StoreContract:
    """Subclasses say where the run's directory is."""

    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        raise NotImplementedError

    @pytest.fixture
    def ledger(self, url: str) -> Ledger:
        return Ledger(f"{url}/ledger")

    @pytest.fixture
    def store(self, url: str, ledger: Ledger) -> RolloutStore:
        return RolloutStore(url, ledger, LAYOUTS)

    def attempts(self, url: str) -> list[str]:
        fs, path = fsspec.core.url_to_fs(f"{url}/attempts")
        return list(fs.find(path))

    def test_a_record_is_read_back_bit_for_bit_by_another_store(self, store: RolloutStore, url: str) -> None:
        commit = store.write(Address("generate", 12, 1), rollout(), PROVENANCE, metrics={"m": 1.0}, state={"s": 2})
        other = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS)
        assert_same(other.read(Address("generate", 12, 1)), rollout())
        assert (commit.kind, commit.rows) == ("rollout", ROWS)
        assert commit.ref().metrics == {"m": 1.0}
        assert Ledger(f"{url}/ledger").find(commit.address) == commit
        assert self.attempts(url) == []

    def test_plain_zarr_reads_the_same_numbers_while_the_step_is_incomplete(self, store: RolloutStore) -> None:
        store.write(Address("generate", 12, 1), rollout(1), PROVENANCE)
        store.write(Address("reference", 12, 1), ReferenceLogprobs(rollout(2).sampler_logprobs), PROVENANCE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            root = zarr.open_group(store.url, mode="r")
            assert [name for name, _ in root.members()] == ["step_000012"]
            names = {name for name, _ in root["step_000012"].members()}
        assert names == {*rollout().arrays(), "ref_logprobs"}
        for name, array in rollout(1).arrays().items():
            whole = root[f"step_000012/{name}"]
            assert whole.shape == (SHARDS * ROWS, *array.shape[1:])
            assert whole.shards[0] == ROWS
            assert whole.metadata.dimension_names == ("row", "token")[: array.ndim]
            np.testing.assert_array_equal(whole[ROWS : 2 * ROWS], array, err_msg=name, strict=True)
        # What is not committed does not look like data.
        assert np.isnan(root["step_000012/sampler_logprobs"][:ROWS]).all()
        assert (root["step_000012/tokens"][:ROWS] == -1).all()

    def test_the_parts_of_a_score_are_arrays_under_their_names(self, store: RolloutStore) -> None:
        def scores(shard: int) -> Scores:
            one = np.full(ROWS, shard, np.float32)
            return Scores(one * 3, {"a": one, "b.x": one + 1}, {"a": one / 2})

        for shard in range(SHARDS):
            store.write(Address("score", 4, shard), scores(shard), PROVENANCE)
        assert_same(store.read(Address("score", 4, 1)), scores(1))
        whole = store.read_step("score", 4, SHARDS)
        assert (list(whole.parts), list(whole.disagreement)) == (["a", "b.x"], ["a"])
        root = zarr.open_group(store.url, mode="r")["step_000004"]
        names = {"scores", "scores.a", "scores.b.x", "disagreement.a"}
        assert {name for name, _ in root.members()} == names
        np.testing.assert_array_equal(root["scores.b.x"][:], whole.parts["b.x"])

    def test_shards_join_to_a_step(self, store: RolloutStore) -> None:
        for shard in (2, 0, 1):
            store.write(Address("generate", 0, shard), rollout(shard), PROVENANCE)
        step = store.read_step("generate", 0, SHARDS)
        np.testing.assert_array_equal(step.tokens, np.concatenate([rollout(s).tokens for s in range(SHARDS)]))

    def test_a_record_of_the_whole_step_fills_all_shards(self, store: RolloutStore) -> None:
        store.write(Address("advantage", 3), advantages(), PROVENANCE)
        assert_same(store.read(Address("advantage", 3)), advantages())
        plain = zarr.open_group(store.url, mode="r")["step_000003/returns"]
        np.testing.assert_array_equal(plain[:], advantages().returns)

    def test_evaluations_have_a_group_and_a_layout_of_their_own(self, store: RolloutStore) -> None:
        store.write(Address("evaluate", 12, 1), rollout(3, rows=2), PROVENANCE)
        assert_same(store.read(Address("evaluate", 12, 1)), rollout(3, rows=2))
        plain = zarr.open_group(store.url, mode="r")["evaluate_000012/tokens"]
        np.testing.assert_array_equal(plain[2:], rollout(3, rows=2).tokens)

    def test_what_was_let_go_says_so_and_its_commit_stays(self, store: RolloutStore, ledger: Ledger, url: str) -> None:
        kept = [Address("generate", 2), Address("evaluate", 0)]
        for address in (Address("generate", 0), Address("generate", 1), *kept):
            store.write(address, rollout(rows=2 if address.stage == "evaluate" else ROWS), PROVENANCE)
        assert (store.dropped_before(), store.drop(2), store.drop(2), store.drop(1)) == (0, 2, 0, 0)
        other = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS)
        assert other.dropped_before() == 2
        with pytest.raises(
            DroppedOutput, match=r"generate/step_000001/shard_0000.* dropped by storage\.keep\.rollouts"
        ):
            other.read(Address("generate", 1))
        assert ledger.find(Address("generate", 1)) is not None
        for address in kept:
            assert other.read(address).num_rows
        assert sorted(name for name, _ in zarr.open_group(store.url, mode="r").members()) == [
            "evaluate_000000",
            "step_000002",
        ]
        other.make_anew(1)
        assert other.dropped_before() == 1
        with pytest.raises(StoreError, match="committed but its file is missing"):
            other.read(Address("generate", 1))

    def test_what_a_dead_process_left_of_a_step_that_was_let_go_is_not_put_in_its_place(
        self, store: RolloutStore, ledger: Ledger, url: str
    ) -> None:
        ledger.commit(store.prepare(Address("generate", 0), rollout(), PROVENANCE, attempt="a0-dead"))
        store.drop(1)
        assert store.recover() == 0
        assert self.attempts(url) == []
        with pytest.raises(DroppedOutput):
            store.read(Address("generate", 0))

    def test_values_equal_to_the_fill_value_are_data(self, store: RolloutStore) -> None:
        """Zarr leaves out chunks that hold nothing but the fill value; then they could not be told from missing."""
        blank = replace(rollout(), token_versions=np.full((ROWS, SEQ), -1, np.int32))
        store.write(Address("generate", 0), blank, PROVENANCE)
        assert_same(store.read(Address("generate", 0)), blank)

    def test_the_second_attempt_loses_and_leaves_nothing(self, store: RolloutStore, url: str) -> None:
        first = store.write(Address("score", 0), Scores(np.full(ROWS, 1, np.float32)), PROVENANCE)
        second = store.write(Address("score", 0), Scores(np.full(ROWS, 2, np.float32)), PROVENANCE)
        assert second == first
        assert_same(store.read(Address("score", 0)), Scores(np.full(ROWS, 1, np.float32)))
        assert self.attempts(url) == []

    def test_an_attempt_without_a_commit_does_not_exist(self, store: RolloutStore, url: str) -> None:
        store.prepare(Address("score", 0), Scores(np.ones(ROWS, np.float32)), PROVENANCE, attempt="a0-11111111")
        with pytest.raises(MissingOutput, match="score/step_000000/shard_0000"):
            store.read(Address("score", 0))
        assert store.recover() == 0
        assert self.attempts(url), "its process may still be alive and about to commit"

    def test_a_committed_attempt_is_readable_before_it_is_settled(
        self, store: RolloutStore, ledger: Ledger, url: str
    ) -> None:
        loser = store.prepare(Address("advantage", 0), advantages(), PROVENANCE, attempt="a0-11111111")
        winner = store.prepare(Address("advantage", 0), advantages(), PROVENANCE, attempt="a1-22222222")
        assert ledger.commit(winner) == winner
        assert ledger.commit(loser) == winner
        assert_same(store.read(Address("advantage", 0)), advantages())
        assert store.recover() == 1
        assert self.attempts(url) == []
        assert_same(store.read(Address("advantage", 0)), advantages())
        store.settle(winner)
        assert_same(store.read(Address("advantage", 0)), advantages())

    def test_arrays_of_an_archived_commit_do_not_hide_an_attempt_that_is_not_settled(
        self, store: RolloutStore, ledger: Ledger, url: str
    ) -> None:
        """A resume from a checkpoint archives the commit of a shard, and samples it again with other weights."""
        address = Address("score", 0)
        store.write(address, Scores(np.full(ROWS, 1, np.float32)), PROVENANCE)
        ledger.set_aside(address, f"{url}/archive")
        fresh = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS)
        anew = fresh.prepare(address, Scores(np.full(ROWS, 2, np.float32)), PROVENANCE, attempt="a1-22222222")
        assert Ledger(f"{url}/ledger").commit(anew) == anew
        assert_same(fresh.read(address), Scores(np.full(ROWS, 2, np.float32)))
        reader = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS)
        assert_same(reader.read(address), Scores(np.full(ROWS, 2, np.float32)))

    @pytest.mark.parametrize("settled", [False, True])
    def test_a_late_attempt_at_a_closed_step_is_withdrawn(
        self, store: RolloutStore, ledger: Ledger, url: str, settled: bool
    ) -> None:
        """The record's file name is free again once its step is in a segment. The late process dies right after it has
        created the file. The first attempt's files may not have moved yet, and a second late attempt may follow."""
        address, late = Address("score", 0), Scores(np.ones(ROWS, np.float32))
        first = Scores(np.arange(ROWS, dtype=np.float32))
        original = store.prepare(address, first, PROVENANCE, attempt="a0-11111111")
        ledger.commit(original)
        if settled:
            store.settle(original)
        ledger.close(0, [address])

        def create_and_die(attempt: str) -> None:
            record = encode(store.prepare(address, late, PROVENANCE, attempt=attempt))
            assert files.write_new(files.open_root(f"{url}/ledger"), f"{address}.json", record)

        create_and_die("a1-22222222")
        second = store.prepare(address, late, PROVENANCE, attempt="a2-33333333")
        assert Ledger(f"{url}/ledger").commit(second) == original
        create_and_die("a3-44444444")
        assert store.recover() == (not settled)
        assert self.attempts(url) == []
        assert_same(RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).read(address), first)

    def test_a_late_commit_does_not_win(self, store: RolloutStore, ledger: Ledger, url: str) -> None:
        address, first = Address("score", 0), Scores(np.arange(ROWS, dtype=np.float32))
        commit = store.write(address, first, PROVENANCE)
        ledger.close(0, [address])
        other = RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS)
        assert other.write(address, Scores(np.ones(ROWS, np.float32)), PROVENANCE) == commit
        assert self.attempts(url) == []
        assert_same(RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).read(address), first)

    def test_a_late_commit_is_withdrawn_by_the_writeback(self, store: RolloutStore, ledger: Ledger, url: str) -> None:
        """A worker does not wait for the look into the segment. Nobody waits for its output either."""
        arrays, update = Address("score", 0), Address("update_policy", 0)
        first = Scores(np.arange(ROWS, dtype=np.float32))
        commits = [store.write(arrays, first, PROVENANCE), store.commit_only(update, PROVENANCE)]
        ledger.close(0, [arrays, update])
        others, writeback = Ledger(f"{url}/ledger"), files.Writeback()
        late = RolloutStore(url, others, LAYOUTS, writeback=writeback)
        late.write(arrays, Scores(np.ones(ROWS, np.float32)), PROVENANCE)
        late.commit_only(update, PROVENANCE)
        writeback.close()
        assert Ledger(f"{url}/ledger").open_addresses() == []
        assert [others.find(arrays), others.find(update)] == commits
        assert self.attempts(url) == []
        assert_same(RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).read(arrays), first)

    def test_plain_readers_miss_what_was_not_moved(self, store: RolloutStore, ledger: Ledger, url: str) -> None:
        """Stageline reads it, and so must every other reader, sooner or later: `check` says so until then."""
        commit = store.prepare(Address("advantage", 0), advantages(), PROVENANCE, attempt="a0-11111111")
        ledger.commit(commit)
        assert_same(store.read(Address("advantage", 0)), advantages())
        assert [fault.split(":")[0].rpartition("rollouts.zarr/")[2] for fault in store.plain_faults(commit)] == [
            "zarr.json",
            "step_000000/zarr.json",
            *(f"array {name} of advantage/step_000000/shard_0000" for name in advantages().arrays()),
        ]
        assert store.attempts() == [(Address("advantage", 0), "a0-11111111")]
        assert store.recover(discard=False) == 1
        assert list(store.plain_faults(commit)) == []
        fs, path = fsspec.core.url_to_fs(f"{url}/rollouts.zarr/step_000000/returns/c.1.0")
        fs.rm(path)
        (fault,) = store.plain_faults(commit)
        assert fault.startswith("array returns of advantage/step_000000/shard_0000: plain Zarr sees other numbers")

    def test_the_end_leaves_nothing_of_any_attempt(self, store: RolloutStore, ledger: Ledger, url: str) -> None:
        """A winner that was not moved, a loser, and one that never came to its commit; during a run only the first is
        touched: the others' processes may be alive."""
        scores = Scores(np.ones(ROWS, np.float32))
        winner = store.prepare(Address("score", 0), scores, PROVENANCE, attempt="a0-11111111")
        ledger.commit(winner)
        store.prepare(Address("score", 0), scores, PROVENANCE, attempt="a0-22222222")
        store.prepare(Address("score", 1), scores, PROVENANCE, attempt="a0-33333333")
        assert store.recover(discard=False) == 1
        assert [attempt for _, attempt in store.attempts()] == ["a0-22222222", "a0-33333333"]
        store.finalise()
        assert self.attempts(url) == []
        assert_same(store.read(Address("score", 0)), scores)

    def test_a_missing_shard_is_an_error_not_zeros(self, store: RolloutStore, url: str) -> None:
        store.write(Address("advantage", 0), advantages(), PROVENANCE)
        fs, path = fsspec.core.url_to_fs(f"{url}/rollouts.zarr/step_000000/returns/c.1.0")
        fs.rm(path)
        with pytest.raises(StoreError, match=r"array returns of advantage/step_000000/shard_0000: shard 1 .* missing"):
            store.read(Address("advantage", 0))

    def test_every_flipped_byte_is_detected(self, store: RolloutStore, url: str) -> None:
        store.write(Address("score", 0), Scores(np.arange(ROWS, dtype=np.float32)), PROVENANCE)
        fs, path = fsspec.core.url_to_fs(f"{url}/rollouts.zarr/step_000000/scores/c.0")
        good = fs.cat_file(path)
        for position in range(len(good)):
            fs.pipe_file(path, good[:position] + bytes([good[position] ^ 0x10]) + good[position + 1 :])
            with pytest.raises(StoreError, match="array scores of score/step_000000/shard_0000"):
                store.read(Address("score", 0))

    def test_another_shard_s_valid_file_is_detected(self, store: RolloutStore, url: str) -> None:
        """Zarr's own checksums pass; the commit's does not."""
        for shard in range(2):
            store.write(Address("score", 0, shard), Scores(np.full(ROWS, shard, np.float32)), PROVENANCE)
        fs, path = fsspec.core.url_to_fs(f"{url}/rollouts.zarr/step_000000/scores/c")
        fs.pipe_file(f"{path}.1", fs.cat_file(f"{path}.0"))
        with pytest.raises(StoreError, match=r"array scores of score/step_000000/shard_0001: CRC-32"):
            store.read(Address("score", 0, 1))

    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_a_number_that_is_not_finite_is_refused(self, store: RolloutStore, url: str, value: float) -> None:
        logprobs, entropy = np.full((ROWS, SEQ), -1, np.float32), np.zeros((ROWS, SEQ), np.float32)
        entropy[2, 5] = value
        with pytest.raises(ValueError, match=r"policy\.entropy: row 2 holds"):
            store.write(Address("logprob", 0), PolicyLogprobs(logprobs, entropy), PROVENANCE)
        assert self.attempts(url) == []
        with pytest.raises(MissingOutput):
            store.read(Address("logprob", 0))

    def test_logprobs_that_were_never_filled_in_are_refused(self, store: RolloutStore) -> None:
        empty = rollout().sampler_logprobs.copy()
        empty[3, 2:5] = 0
        with pytest.raises(ValueError, match=r"rollout\.sampler_logprobs: row 3 is zero on all of its 3 sampled"):
            store.write(Address("generate", 0), replace(rollout(), sampler_logprobs=empty), PROVENANCE)
        mask = rollout().response_mask
        with pytest.raises(ValueError, match=r"reference\.ref_logprobs: row 3"):
            store.write(Address("reference", 0), ReferenceLogprobs(empty), PROVENANCE, mask=mask)
        # One number that is not zero is enough, and so is a row without sampled tokens.
        empty[3, 2] = -0.5
        mask[0] = False
        empty[0] = 0
        store.write(Address("reference", 0), ReferenceLogprobs(empty), PROVENANCE, mask=mask)

    @pytest.mark.parametrize(
        ("address", "rows"), [(Address("score", 0), ROWS + 1), (Address("score", 0, SHARDS), ROWS)]
    )
    def test_rows_that_fit_no_shard_are_refused(self, store: RolloutStore, address: Address, rows: int) -> None:
        with pytest.raises(ValueError, match=f"{rows} rows, but a shard has 4"):
            store.write(address, Scores(np.ones(rows, np.float32)), PROVENANCE)

    def test_another_seq_is_refused_and_leaves_nothing(self, store: RolloutStore, url: str) -> None:
        with pytest.raises(ValueError, match=r"ref_logprobs: shape \(4, 5\), but the layout's seq is 6"):
            store.write(Address("reference", 0), ReferenceLogprobs(np.ones((ROWS, 5), np.float32)), PROVENANCE)
        assert self.attempts(url) == []

    def test_outputs_without_arrays(self, store: RolloutStore, ledger: Ledger) -> None:
        commit = store.commit_only(Address("publish", 12), PROVENANCE, digest="d1", metrics={"s": 2.0})
        assert store.commit_only(Address("publish", 12), PROVENANCE, digest="d2") == commit
        assert ledger.find(Address("publish", 12)) == commit
        with pytest.raises(MissingOutput, match="without arrays"):
            store.read(Address("publish", 12))


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return f"memory://{uuid.uuid4().hex}/run"


class TestLocalStore(StoreContract):
    @pytest.fixture
    def url(self, tmp_path: Path) -> str:
        return str(tmp_path / "run")

    def test_arrays_of_an_archived_commit_do_not_mix_with_those_of_an_attempt_that_moves_there(
        self, store: RolloutStore, ledger: Ledger, url: str
    ) -> None:
        """While the attempt's files move, one after the other, to the places where the archived commit's still are."""
        address = Address("advantage", 0)
        store.write(address, advantages(0), PROVENANCE)
        ledger.set_aside(address, f"{url}/archive")
        anew = store.prepare(address, advantages(1), PROVENANCE, attempt="a1-22222222")
        assert Ledger(f"{url}/ledger").commit(anew) == anew
        files_of_attempt = [Path(name) for name in self.attempts(url)]
        assert len(files_of_attempt) > 1
        for path in files_of_attempt:
            place = next(key for key in store.keys_of(anew) if in_attempt(key).endswith(path.name))
            files.move(files.open_root(url), str(path.relative_to(url)), place)
            assert_same(RolloutStore(url, Ledger(f"{url}/ledger"), LAYOUTS).read(address), advantages(1))

    @pytest.mark.processes
    def test_of_racing_processes_one_wins_and_the_others_leave_nothing(self, store: RolloutStore, url: str) -> None:
        """Both processes wait at the commit before either may continue, for forty addresses in turn."""
        script = (
            HERE
            + """
value = float(sys.argv[2])
for step in range(40):
    print("ready", flush=True)
    sys.stdin.readline()
    record = Scores(np.full(4, value, np.float32))
    commit = store.write(Address("score", step, 1), record, provenance, attempt=f"a{sys.argv[2]}-{step:08d}")
    print(commit.attempt, flush=True)
"""
        )
        racers = [start_python(script, url, number) for number in (1, 2)]
        for step in range(40):
            for racer in racers:
                assert line(racer) == "ready"
            for racer in racers:
                racer.stdin.write("go\n")
                racer.stdin.flush()
            answers = {line(racer) for racer in racers}
            assert len(answers) == 1, "each believes another winner"
            winner = int(answers.pop()[1])
            found = store.read(Address("score", step, 1))
            assert_same(found, Scores(np.full(ROWS, winner, np.float32)))
        for racer in racers:
            assert racer.wait() == 0
        assert self.attempts(url) == []

    @pytest.mark.processes
    def test_a_process_killed_between_commit_and_settle_loses_nothing(self, store: RolloutStore, url: str) -> None:
        script = (
            HERE
            + """
commit = store.prepare(Address("score", 0, 1), Scores(np.arange(4, dtype=np.float32)), provenance, attempt="a0-1")
ledger.commit(commit)
os.kill(os.getpid(), signal.SIGKILL)
"""
        )
        assert exit_status(script, url) == -signal.SIGKILL
        expected = Scores(np.arange(ROWS, dtype=np.float32))
        assert not Path(url, "rollouts.zarr").exists()
        assert_same(store.read(Address("score", 0, 1)), expected)
        assert store.write(Address("score", 0, 1), Scores(np.ones(ROWS, np.float32)), PROVENANCE).attempt == "a0-1"
        assert store.recover() == 1
        assert self.attempts(url) == []
        assert_same(store.read(Address("score", 0, 1)), expected)
        plain = zarr.open_group(store.url, mode="r")["step_000000/scores"]
        np.testing.assert_array_equal(plain[ROWS : 2 * ROWS], expected.scores)

    @pytest.mark.processes
    def test_a_process_killed_while_settling_loses_nothing(self, store: RolloutStore, url: str) -> None:
        """It dies at the second of three shard files: one is in place, two are not."""
        script = (
            HERE
            + """
from storage import files
moved, move = [], files.move
def dying_move(root, source, target):
    if "/c." in target:
        moved.append(target)
        if len(moved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
    return move(root, source, target)
files.move = dying_move
store.write(Address("score", 0), Scores(np.arange(12, dtype=np.float32)), provenance)
"""
        )
        assert exit_status(script, url) == -signal.SIGKILL
        assert [p.name for p in Path(url, "rollouts.zarr/step_000000/scores").glob("c.*")] == ["c.0"]
        expected = Scores(np.arange(SHARDS * ROWS, dtype=np.float32))
        assert_same(store.read(Address("score", 0)), expected)
        assert store.recover() == 1
        np.testing.assert_array_equal(zarr.open_group(store.url, mode="r")["step_000000/scores"][:], expected.scores)


def line(process: subprocess.Popen[str]) -> str:
    return process.stdout.readline().strip()
