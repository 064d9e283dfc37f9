"""Law 3 on a small model with real arithmetic. Whatever happens, the weights of version v are the result of v updates,
bit for bit, and each update is committed once."""

from __future__ import annotations

import hashlib
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from pipeline.workers.messages import ReplayMismatch
from pipeline.workers.updates import ExactlyOnceUpdates
from stages.models.protocol import CriticBatch, PolicyBatch, Role, StateError
from storage.address import Address
from storage.checkpoints import Checkpoints, FileSum, sum_file
from storage.commits import Commit, new_attempt, provenance_here
from storage.config import Layout, Layouts
from storage.errors import MissingOutput
from storage.ledger import Ledger
from storage.records import Advantages, PolicyLogprobs, Record, ReferenceLogprobs, Rollout, Values
from storage.rollouts import RolloutStore

ROWS, SEQ, SHARDS, STEPS = 4, 3, 2, 6


class FakeHost:
    """Owns two vectors of float64. An update is w <- w cos(mean of the inputs + step) + w_0 / 7: any step left out,
    repeated or fed from other inputs shows in the last bits."""

    def __init__(self) -> None:
        self.weights = {role: start(role) for role in (Role.POLICY, Role.CRITIC)}
        self.versions = dict.fromkeys(self.weights, 0)
        self.dirty_roles: set[Role] = set()
        self.log: list[str] = []
        self.fail_at: int | None = None
        self.error = 0.0
        self.may_write = threading.Event()
        self.may_write.set()
        self.disk_full = False

    def _train(self, role: Role, step: int, number: float) -> dict[str, float]:
        assert role not in self.dirty_roles, "a dirty model was trained"
        assert self.versions[role] == step, f"{role} is at {self.versions[role]}, not {step}"
        self.dirty_roles.add(role)
        self.log.append(f"{role} train {step}")
        self.weights[role] = self.weights[role] * np.cos(number + step) + start(role) / 7 + self.error
        self.versions[role] = step + 1
        if self.fail_at == step:
            self.fail_at = None
            raise RuntimeError("half-way")
        return {"loss": number}

    def update_policy(self, step: int, batch: PolicyBatch) -> dict[str, float]:
        number = batch.advantages.advantages.mean() + batch.reference.ref_logprobs.sum() + batch.kl_coef
        number += 0.0 if batch.policy is None else batch.policy.policy_logprobs.sum()
        return self._train(Role.POLICY, step, float(number))

    def update_critic(self, step: int, batch: CriticBatch) -> dict[str, float]:
        return self._train(Role.CRITIC, step, float(batch.advantages.returns.mean() + batch.values.values.sum()))

    def last_update(self, role: Role) -> dict[str, float]:
        return {"mfu": 0.5} if role is Role.CRITIC else {}

    def trunk_counts(self) -> dict[str, float]:
        return {"trunk/rows": 3.0}

    def version(self, role: Role) -> int:
        return self.versions[role]

    def dirty(self, role: Role) -> bool:
        return role in self.dirty_roles

    def mark_clean(self, role: Role) -> None:
        self.dirty_roles.discard(role)

    def digest(self, role: Role) -> str:
        return hashlib.sha256(self.weights[role].tobytes()).hexdigest()

    def save(self, role: Role, directory: Path) -> Callable[[], dict[str, FileSum]]:
        assert role not in self.dirty_roles
        weights, version = self.weights[role].copy(), self.versions[role]

        def write() -> dict[str, FileSum]:
            self.may_write.wait(timeout=60)
            if self.disk_full:
                raise OSError("no space left on device")
            np.savez(directory / "w.npz", w=weights, version=version)
            return {"w.npz": sum_file(directory / "w.npz")}

        return write

    def load(self, role: Role, directory: Path | None) -> None:
        if directory is None:
            self.weights[role], self.versions[role] = start(role), 0
        else:
            with np.load(directory / "w.npz") as saved:
                if saved["w"].shape != self.weights[role].shape:
                    self.dirty_roles.add(role)
                    raise StateError("another architecture")
                self.weights[role], self.versions[role] = saved["w"], int(saved["version"])
        self.dirty_roles.discard(role)
        self.log.append(f"{role} load {self.versions[role]}")

    def close(self) -> None: ...


def start(role: Role) -> np.ndarray:
    return np.random.default_rng(sum(role.encode())).normal(size=5)


class Run:
    """Owns a run's store with the inputs of every step, and makes processes that share it."""

    def __init__(self, root: Path) -> None:
        self.ledger = Ledger(str(root / "ledger"))
        self.store = RolloutStore(str(root), self.ledger, Layouts(Layout(SHARDS, ROWS // SHARDS, SEQ)))
        self.checkpoints = Checkpoints(root / "checkpoints")
        self.warnings: list[str] = []

    def write_inputs(self) -> None:
        for step in range(STEPS):
            rng = np.random.default_rng(step)

            def floats(rng: np.random.Generator = rng, rows: int = ROWS // SHARDS) -> np.ndarray:
                return rng.normal(size=(rows, SEQ)).astype(np.float32)

            for shard in range(SHARDS):
                rows = np.arange(2, dtype=np.int64) + 2 * shard
                ones = np.ones(2, np.int32)
                mask = np.tile(np.array([False, True, True]), (2, 1))
                rollout = Rollout(
                    rows, rows, ones[:, None] * np.int32([[3, 4, 5]]), ones, 2 * ones, mask, floats(),
                    np.where(mask, step, -1).astype(np.int32), np.zeros(2, np.int8),
                )  # fmt: skip
                self._put("generate", step, shard, rollout)
                self._put("reference", step, shard, ReferenceLogprobs(floats()))
                self._put("logprob", step, shard, PolicyLogprobs(floats(), floats()))
                self._put("value", step, shard, Values(floats(), np.zeros(2, np.float32)))
            whole = [floats(rows=ROWS) for _ in range(3)]
            state = {"step_kl_coef": 0.1 * step}
            self._put("advantage", step, 0, Advantages(*whole, np.ones((ROWS, SEQ), np.bool_)), state)

    def _put(self, stage: str, step: int, shard: int, record: Record, state: dict[str, float] | None = None) -> None:
        where = provenance_here(seed=0, config_hash="test")
        self.store.write(Address(stage, step, shard), record, where, state=state)

    def process(
        self, every: int = 100, keep: int = 2, staleness: int = 0, same_layout: bool = True
    ) -> ExactlyOnceUpdates:
        return ExactlyOnceUpdates(
            FakeHost(),
            rank=0,
            ranks=1,
            store=self.store,
            ledger=self.ledger,
            checkpoints=self.checkpoints,
            shards=SHARDS,
            recompute_logprobs=True,
            checkpoint_every=every,
            checkpoint_keep=keep,
            staleness=staleness,
            same_layout=same_layout,
            warn=self.warnings.append,
        )

    def update(self, updates: ExactlyOnceUpdates, role: Role, step: int, *, settle: bool = True) -> Commit:
        """Return the commit of an update. With `settle` a due checkpoint is on the disk afterwards."""
        stage = {Role.POLICY: "update_policy", Role.CRITIC: "update_critic"}[role]

        def commit(metrics: dict[str, float], digest: str) -> Commit:
            where = provenance_here(seed=0, config_hash="test")
            return self.store.commit_only(Address(stage, step), where, metrics=metrics, digest=digest)

        found = updates.update(role, step, commit)
        assert found is not None
        if settle:
            updates.background.wait_for_all()
        return found


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's directory before its first update: written once, copied for each test."""
    root = tmp_path_factory.mktemp("inputs")
    Run(root).write_inputs()
    return root


@pytest.fixture
def run(inputs: Path, tmp_path: Path) -> Run:
    shutil.copytree(inputs, tmp_path, dirs_exist_ok=True)
    return Run(tmp_path)


@pytest.fixture(scope="module")
def digests(inputs: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[Role, list[str]]:
    """Digests of version 0, 1, 2, ... of an undisturbed run."""
    run = Run(shutil.copytree(inputs, tmp_path_factory.mktemp("undisturbed"), dirs_exist_ok=True))
    updates = run.process()
    found = {role: [updates.host.digest(role)] for role in (Role.POLICY, Role.CRITIC)}
    for step in range(STEPS):
        for role, list_of in found.items():
            list_of.append(str(run.update(updates, role, step).digest))
    assert len({d for list_of in found.values() for d in list_of}) == 2 * (STEPS + 1)
    return found


def fake(updates: ExactlyOnceUpdates) -> FakeHost:
    host = updates.host
    assert isinstance(host, FakeHost)
    return host


def log(updates: ExactlyOnceUpdates) -> list[str]:
    return fake(updates).log


def test_an_update_runs_once(run: Run, digests: dict[Role, list[str]]) -> None:
    updates = run.process()
    first = run.update(updates, Role.POLICY, 0)
    again = run.update(updates, Role.POLICY, 0)
    assert again == first
    assert first.digest == digests[Role.POLICY][1]
    assert first.metrics.keys() == {"loss", "trunk/rows"}
    assert run.update(updates, Role.CRITIC, 0).metrics["update_critic/mfu"] == 0.5
    assert log(updates) == ["policy train 0", "critic train 0"]
    assert not updates.host.dirty(Role.POLICY)


def test_policy_and_critic_have_versions_of_their_own(run: Run, digests: dict[Role, list[str]]) -> None:
    updates = run.process()
    for step in range(3):
        run.update(updates, Role.POLICY, step)
    run.update(updates, Role.CRITIC, 0)
    assert (updates.host.version(Role.POLICY), updates.host.version(Role.CRITIC)) == (3, 1)
    assert updates.host.digest(Role.POLICY) == digests[Role.POLICY][3]
    assert updates.host.digest(Role.CRITIC) == digests[Role.CRITIC][1]


def test_a_new_process_replays_from_the_start(run: Run, digests: dict[Role, list[str]]) -> None:
    before = run.process()
    for step in range(3):
        run.update(before, Role.POLICY, step)
    after = run.process()
    after.model_at(Role.POLICY, 3)
    assert log(after) == ["policy train 0", "policy train 1", "policy train 2"]
    assert after.host.digest(Role.POLICY) == digests[Role.POLICY][3]
    assert not after.host.dirty(Role.POLICY)


def test_a_new_process_replays_from_the_newest_usable_checkpoint(run: Run, digests: dict[Role, list[str]]) -> None:
    before = run.process(every=2, keep=9)
    for step in range(5):
        run.update(before, Role.POLICY, step)
    assert run.checkpoints.versions("policy") == [2, 4]
    after = run.process()
    after.model_at(Role.POLICY, 5)
    assert log(after) == ["policy load 4", "policy train 4"]
    assert after.host.digest(Role.POLICY) == digests[Role.POLICY][5]
    older = run.process()
    older.model_at(Role.POLICY, 3)
    assert log(older) == ["policy load 2", "policy train 2"]
    assert older.host.digest(Role.POLICY) == digests[Role.POLICY][3]


def test_going_back_reloads(run: Run, digests: dict[Role, list[str]]) -> None:
    """A resumed run publishes an old version again, and then continues."""
    updates = run.process(every=2)
    for step in range(4):
        run.update(updates, Role.POLICY, step)
    log(updates).clear()
    assert updates.model_at(Role.POLICY, 1).digest(Role.POLICY) == digests[Role.POLICY][1]
    assert log(updates) == ["policy load 0", "policy train 0"]
    log(updates).clear()
    assert updates.model_at(Role.POLICY, 4).digest(Role.POLICY) == digests[Role.POLICY][4]
    assert log(updates) == ["policy load 4"]


def test_a_committed_update_is_replayed_and_not_repeated(run: Run, digests: dict[Role, list[str]]) -> None:
    """The process died between the commit and the answer: the next one finds the commit, and catches up."""
    first = run.update(run.process(), Role.POLICY, 0)
    after = run.process()
    assert run.update(after, Role.POLICY, 0) == first
    assert after.host.version(Role.POLICY) == 1
    assert run.update(after, Role.POLICY, 1).digest == digests[Role.POLICY][2]


def test_a_dirty_model_is_reloaded(run: Run, digests: dict[Role, list[str]]) -> None:
    updates = run.process(every=1)
    run.update(updates, Role.POLICY, 0)
    host = fake(updates)
    host.fail_at = 1
    with pytest.raises(RuntimeError, match="half-way"):
        run.update(updates, Role.POLICY, 1)
    assert host.dirty(Role.POLICY)
    assert run.ledger.find(Address("update_policy", 1)) is None
    assert run.update(updates, Role.POLICY, 1).digest == digests[Role.POLICY][2]
    assert host.log == ["policy train 0", "policy train 1", "policy load 1", "policy train 1"]


def test_a_commit_that_fails_leaves_the_model_dirty(run: Run, digests: dict[Role, list[str]]) -> None:
    updates = run.process()

    def disk_full(metrics: dict[str, float], digest: str) -> Commit:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        updates.update(Role.CRITIC, 0, disk_full)
    assert updates.host.dirty(Role.CRITIC)
    assert run.update(updates, Role.CRITIC, 0).digest == digests[Role.CRITIC][1]


def test_other_weights_than_the_committed_ones_are_refused(run: Run) -> None:
    run.update(run.process(), Role.POLICY, 0)
    updates = run.process()
    host = fake(updates)
    host.error = 1e-9
    with pytest.raises(ReplayMismatch, match=r"update_policy/step_000000.*committed weights have digest"):
        updates.model_at(Role.POLICY, 1)
    assert host.dirty(Role.POLICY)
    host.error = 0.0
    assert updates.model_at(Role.POLICY, 1).version(Role.POLICY) == 1


def test_another_layout_is_not_held_to_digests(run: Run) -> None:
    before = run.process()
    for step in range(2):
        run.update(before, Role.POLICY, step)
    updates = run.process(same_layout=False)
    host = fake(updates)
    host.error = 1e-9
    updates.model_at(Role.POLICY, 2)
    assert host.log == ["policy train 0", "policy train 1"]
    np.testing.assert_allclose(host.weights[Role.POLICY], fake(before).weights[Role.POLICY], atol=1e-8)


def test_another_layout_loads_checkpoints(run: Run, digests: dict[Role, list[str]]) -> None:
    """Checkpoints hold the same bits for every layout; later updates may differ."""
    before = run.process(every=2)
    for step in range(3):
        run.update(before, Role.POLICY, step)
    updates = run.process(same_layout=False)
    fake(updates).error = 1e-9
    assert updates.model_at(Role.POLICY, 2).digest(Role.POLICY) == digests[Role.POLICY][2]
    updates.model_at(Role.POLICY, 3)
    assert log(updates) == ["policy load 2", "policy train 2"]


def test_a_version_that_no_update_made_is_refused(run: Run) -> None:
    with pytest.raises(MissingOutput, match=r"update_critic/step_000000.*no version 1 of the critic"):
        run.process().model_at(Role.CRITIC, 1)


def test_two_trainers_race_for_one_update(run: Run, digests: dict[Role, list[str]]) -> None:
    """A process was stopped, and another has made its update meanwhile. When it comes back, both try to commit. One
    commit wins, and the loser verifies the winner's digest against its own weights and continues."""
    processes = [run.process(), run.process()]
    meet = threading.Barrier(2)
    attempts: list[str] = []
    winners: list[Commit | None] = [None, None]

    def race(i: int) -> None:
        def commit(metrics: dict[str, float], digest: str) -> Commit:
            attempt = new_attempt(i)
            attempts.append(attempt)
            meet.wait(timeout=60)  # both have trained, neither has committed
            where = provenance_here(seed=0, config_hash="test")
            return run.store.commit_only(Address("update_policy", 0), where, attempt=attempt, digest=digest)

        winners[i] = processes[i].update(Role.POLICY, 0, commit)

    threads = [threading.Thread(target=race, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(attempts)) == 2
    assert winners[0] is not None
    assert winners[0] == winners[1] == run.ledger.find(Address("update_policy", 0))
    for updates in processes:
        assert not updates.host.dirty(Role.POLICY)
        assert updates.host.digest(Role.POLICY) == digests[Role.POLICY][1]


def test_the_loser_of_a_race_with_other_weights_is_refused(run: Run) -> None:
    updates = run.process()

    def lose(metrics: dict[str, float], digest: str) -> Commit:
        where = provenance_here(seed=0, config_hash="test")
        winner = Commit(Address("update_policy", 0), "a0-other", None, 0, {}, where, time.time(), digest="0" * 64)
        return run.ledger.commit(winner)

    with pytest.raises(ReplayMismatch, match=r"0{64}"):
        updates.update(Role.POLICY, 0, lose)
    assert updates.host.dirty(Role.POLICY)


def test_a_late_update_with_other_weights_saves_no_checkpoint(run: Run) -> None:
    """Its step is closed, so the store takes its commit at first. Its checkpoint would replace one that counts."""
    where, address = provenance_here(seed=0, config_hash="test"), Address("update_policy", 0)
    run.ledger.commit(Commit(address, "a0-other", None, 0, {}, where, time.time(), digest="0" * 64))
    run.ledger.close(0, [address])
    updates = run.process(every=1)

    def commit(metrics: dict[str, float], digest: str) -> Commit:
        late = Commit(address, "a0-late", None, 0, {}, where, time.time(), digest=digest)
        return run.ledger.commit(late, closed=False)

    with pytest.raises(ReplayMismatch, match=r"0{64}"):
        updates.update(Role.POLICY, 0, commit, is_first=True)
    assert updates.host.dirty(Role.POLICY)
    assert run.checkpoints.versions("policy") == []


def test_an_update_that_is_not_looked_for_is_trained_and_an_earlier_commit_wins(
    run: Run, digests: dict[Role, list[str]]
) -> None:
    """A driver knows of no commit when it hands a node out for the first time. A worker of an earlier driver may still
    have made one: the update is committed once, and the weights are the same."""
    earlier = run.update(run.process(), Role.POLICY, 0)
    updates = run.process()

    def commit(metrics: dict[str, float], digest: str) -> Commit:
        where = provenance_here(seed=0, config_hash="test")
        return run.store.commit_only(Address("update_policy", 0), where, attempt="a0-late", digest=digest)

    assert updates.update(Role.POLICY, 0, commit, is_first=True) == earlier
    assert run.ledger.find(Address("update_policy", 0)) == earlier
    assert not updates.host.dirty(Role.POLICY)
    assert updates.host.digest(Role.POLICY) == digests[Role.POLICY][1]


def test_checkpoints_come_at_their_cadence_and_go(run: Run) -> None:
    updates = run.process(every=2, keep=1)
    for step in range(STEPS):
        run.update(updates, Role.POLICY, step)
        newest = (step + 1) // 2 * 2
        assert run.checkpoints.versions("policy") == ([newest] if newest else [])
    assert run.checkpoints.versions("critic") == []


def test_the_checkpoint_that_an_open_generation_is_rebuilt_from_stays(run: Run) -> None:
    """With eta = 3, version 6 is trained while version 3 may still have to be published again: however few
    checkpoints are kept, one at or below 3 must be among them."""
    updates = run.process(every=1, keep=1, staleness=3)
    for step in range(STEPS):
        run.update(updates, Role.POLICY, step)
    assert run.checkpoints.versions("policy") == [3, 4, 5, 6]


# ---- checkpoints that cannot be used -------------------------------------------------------------------------------


def flip(file: Path) -> None:
    """One bit."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def save_again(run: Run, version: int, weights: np.ndarray, says: int, digest: str | None = None) -> None:
    """Puts a checkpoint that is whole, but not this run's, in the place of a version's; `digest`: that its manifest
    names, if not the run's own."""
    place = run.checkpoints.place("policy", version)
    meta = run.checkpoints.verify("policy", version)
    shutil.rmtree(place)
    path = run.checkpoints.begin("policy", version)
    np.savez(path / "w.npz", w=weights, version=says)
    run.checkpoints.finish("policy", version, path, meta if digest is None else {"digest": digest})


def anothers(run: Run) -> None:
    """A checkpoint of another run with the same architecture and another seed: only the digest tells them apart."""
    weights = np.arange(5.0)
    save_again(run, 4, weights, 4, hashlib.sha256(weights.tobytes()).hexdigest())


DAMAGES: dict[str, tuple[Callable[[Run], None], str]] = {
    "corrupt": (lambda run: flip(run.checkpoints.place("policy", 4) / "w.npz"), "w.npz: is not what was saved"),
    "another architecture": (lambda run: save_again(run, 4, np.zeros(7), 4), "another architecture"),
    "another version": (lambda run: save_again(run, 4, np.zeros(5), 3), "it holds version 3"),
    "other weights": (lambda run: save_again(run, 4, np.zeros(5), 4), "its weights have digest"),
    "another run": (anothers, r"was saved with digest \w+, and this run's is \w+"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_an_unusable_checkpoint_is_reported_and_skipped(run: Run, digests: dict[Role, list[str]], name: str) -> None:
    before = run.process(every=2, keep=9)
    for step in range(5):
        run.update(before, Role.POLICY, step)
    damage, message = DAMAGES[name]
    damage(run)
    after = run.process(every=2, keep=1)
    assert after.model_at(Role.POLICY, 5).digest(Role.POLICY) == digests[Role.POLICY][5]
    loads = [line for line in log(after) if "load" in line]
    assert loads[-1] == "policy load 2"
    assert [line for line in log(after) if "train" in line] == [f"policy train {step}" for step in (2, 3, 4)]
    (warning,) = run.warnings
    assert re.search(message, warning)
    assert "checkpoint v4 of the policy CANNOT BE USED" in warning
    assert "Back to v2; the updates from there to v5 run again" in warning
    run.update(after, Role.POLICY, 5)
    assert run.checkpoints.versions("policy") == [6], "one that cannot be used is not among those that are kept"


def test_where_no_checkpoint_can_be_used_the_start_weights_are(run: Run, digests: dict[Role, list[str]]) -> None:
    before = run.process(every=1, keep=9)
    for step in range(2):
        run.update(before, Role.POLICY, step)
    for version in (1, 2):
        flip(run.checkpoints.place("policy", version) / "w.npz")
    after = run.process()
    assert after.model_at(Role.POLICY, 2).digest(Role.POLICY) == digests[Role.POLICY][2]
    assert log(after) == ["policy train 0", "policy train 1"], "nothing was touched: it is still at version 0"
    assert len(run.warnings) == 2
    assert all("Back to v0" in warning for warning in run.warnings)


# ---- checkpoints written while the run goes on ---------------------------------------------------------------------


def test_an_update_does_not_wait_for_the_disk(run: Run, digests: dict[Role, list[str]]) -> None:
    """Version 2 is trained while version 1 is written, which holds version 1 all the same; the save after it waits."""
    updates = run.process(every=2, keep=9)
    fake(updates).may_write.clear()
    for step in range(3):
        run.update(updates, Role.POLICY, step, settle=False)
    assert updates.host.version(Role.POLICY) == 3
    assert run.checkpoints.newest_first("policy", 9) == []
    other = run.process()
    assert other.model_at(Role.POLICY, 3).digest(Role.POLICY) == digests[Role.POLICY][3], "one half-written is none"
    assert run.warnings == []
    fake(updates).may_write.set()
    updates.close()
    assert run.checkpoints.versions("policy") == [2]
    after = run.process()
    assert after.model_at(Role.POLICY, 2).digest(Role.POLICY) == digests[Role.POLICY][2]
    assert log(after) == ["policy load 2"]


@pytest.mark.parametrize("when", ["the next save", "close"])
def test_a_save_that_failed_is_never_silent(run: Run, when: str) -> None:
    updates = run.process(every=2)
    fake(updates).disk_full = True
    for step in range(3):
        run.update(updates, Role.POLICY, step, settle=False)
    act = updates.close if when == "close" else lambda: run.update(updates, Role.POLICY, 3, settle=False)
    with pytest.raises(OSError, match="no space left"):
        act()
    assert run.checkpoints.versions("policy") == []


def test_a_model_that_must_be_loaded_waits_for_what_is_being_written(run: Run, digests: dict[Role, list[str]]) -> None:
    updates = run.process(every=1)
    host = fake(updates)
    host.may_write.clear()
    run.update(updates, Role.POLICY, 0, settle=False)
    host.fail_at = 1
    with pytest.raises(RuntimeError, match="half-way"):
        run.update(updates, Role.POLICY, 1, settle=False)
    host.may_write.set()
    assert run.update(updates, Role.POLICY, 1).digest == digests[Role.POLICY][2]
    assert "policy load 1" in host.log


def test_replay_compares_with_the_commit(run: Run, digests: dict[Role, list[str]]) -> None:
    updates = run.process()
    for step in range(2):
        run.update(updates, Role.POLICY, step)
    assert run.process().replay(Role.POLICY, 1) == (digests[Role.POLICY][2], digests[Role.POLICY][2])
    with pytest.raises(MissingOutput, match="nothing to compare"):
        run.process().replay(Role.POLICY, 2)


def test_an_update_that_was_not_committed_can_be_trained_alone(run: Run, digests: dict[Role, list[str]]) -> None:
    """It shows the error of such an update; nothing is written."""
    run.update(run.process(), Role.POLICY, 0)
    alone = run.process()
    alone.train_without_commit(Role.POLICY, 1)
    assert fake(alone).digest(Role.POLICY) == digests[Role.POLICY][2]
    with pytest.raises(MissingOutput, match="nothing to compare"):
        run.process().replay(Role.POLICY, 1)
