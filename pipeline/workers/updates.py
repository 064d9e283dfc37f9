"""Make every update happen exactly once per version (law 3 of docs/architecture.md).

The policy and the critic in memory each have a version. Before a node that needs version i runs, `model_at` brings the
model to this version. Usually the model already has it. If not, `model_at` begins with the newest version c <= i that
it can get: the model in memory, a checkpoint, or the start weights. (In a new process, or after an update that failed
half-way, the model in memory cannot be used.) From there the updates c .. i-1 run again on their stored inputs. If the
layout of the models has not changed, each of these updates must give the digest in its commit.

A checkpoint must pass four tests:

    newest checkpoint c <= i ──► Is its recorded digest the digest that update c-1 committed?
                             ──► Is every byte as it was saved?
                             ──► Can it be loaded as version c?
                             ──► Do the loaded weights have the recorded digest?
                                   │ four times yes ──► run updates c .. i-1 again
                                   └ any no ──► print a warning, and test the checkpoint before it

The weights are copied in memory between two updates. The copy is written as a checkpoint while the next updates run. If
the process dies meanwhile, the unfinished files are ignored.

In a gang all ranks do this together. Only rank 0 reads the ledger and lists the checkpoints, and it broadcasts its
decision. If two ranks looked at different moments, they could decide differently. Every rank checks a share of a
checkpoint's bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from pipeline.graph.graph import UPDATE_STAGE
from pipeline.workers.exports import BackgroundWriter
from pipeline.workers.messages import ReplayMismatch
from stages.models.checkpoint_metadata import pickle_fault
from stages.models.protocol import CriticBatch, ModelHost, PolicyBatch, Role, StateError
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.commits import Commit
from storage.errors import MissingOutput, StoreError
from storage.ledger import Ledger
from storage.records import Advantages
from storage.rollouts import RolloutStore


def expected_meta(ledger: Ledger, role: Role, version: int) -> dict[str, Any] | None:
    """Return the meta data that a checkpoint of this version must have. Return None for version 0, and if the update
    that made the version has no commit. The meta data hold the digest in that commit, so another run's complete
    checkpoint is refused. The digest covers the whole model in any layout."""
    commit = ledger.find(Address(UPDATE_STAGE[role], version - 1)) if version else None
    return None if commit is None else _meta(str(commit.digest))


def is_usable(checkpoints: Checkpoints, ledger: Ledger, role: Role, version: int) -> bool:
    """Return True if every byte of a checkpoint is as it was saved, its weights are the committed ones, and its pickles
    hold only data."""
    expected = expected_meta(ledger, role, version)
    if expected is None:
        return False
    try:
        checkpoints.fetch(role, version)
        checkpoints.verify(role, version, expected=expected)
    except StoreError:
        return False
    return pickle_fault(checkpoints.place(role, version)) is None


def _meta(digest: str) -> dict[str, Any]:
    return {"digest": digest}


def broadcast_from_rank_0(read: Callable[[], Any], *, rank: int, ranks: int) -> Any:
    """Call `read()` on rank 0 only, and return its result on every rank of this process's gang."""
    if ranks == 1:
        return read()
    box = [read() if rank == 0 else None]
    dist.broadcast_object_list(box, src=0)
    return box[0]


class ExactlyOnceUpdates:
    """Owns one rank's model host, and brings its policy and critic from version to version."""

    def __init__(
        self,
        host: ModelHost,
        *,
        rank: int,
        ranks: int,
        store: RolloutStore,
        ledger: Ledger,
        checkpoints: Checkpoints,
        shards: int,
        recompute_logprobs: bool,
        checkpoint_every: int,
        checkpoint_keep: int,
        checkpoint_keep_every: int | None = None,
        staleness: int,
        same_layout: bool = True,
        bookkeeping: Callable[[], AbstractContextManager[None]] = nullcontext,
        warn: Callable[[str], None] = print,
    ) -> None:
        """`same_layout`: True if the models have the layout that made the commits, so that a replayed update must give
        the committed digest. Checkpoints are loaded in either case. `bookkeeping`: context in which the store is read,
        so that the time of reading does not count as training. `warn`: called on rank 0 with a warning for people."""
        self.host = host
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._shards = shards
        self._recompute_logprobs = recompute_logprobs
        self._every = checkpoint_every
        self._keep, self._keep_every = checkpoint_keep, checkpoint_keep_every
        self._staleness = staleness
        self._same_layout = same_layout
        self._bookkeeping = bookkeeping
        self._warn = warn
        self._damaged: dict[Role, set[int]] = {}
        """Role -> versions whose checkpoints this process could not use."""
        self._replayed: dict[Role, int] = {}
        """Role -> number of updates that ran again since the role's last new update."""
        self.background = BackgroundWriter()

    def broadcast_from_rank_0(self, read: Callable[[], Any]) -> Any:
        """Call `read()` on rank 0 only, and return its result on every rank."""
        return broadcast_from_rank_0(read, rank=self._rank, ranks=self._ranks)

    def model_at(self, role: Role, version: int) -> ModelHost:
        """Bring the model of `role` to `version`, and return the host that holds the models.

        Raises:
            ReplayMismatch: an update that was run again gave another digest than its commit holds. Digests are compared
                only if this object was made with `same_layout`.
            MissingOutput: one of the updates that lead to `version` has no commit.
        """
        host = self.host
        if host.dirty(role) or host.version(role) != version:
            self._load_newest_until(role, version)
        while host.version(role) < version:
            step = host.version(role)
            address = Address(UPDATE_STAGE[role], step)
            commit = self.broadcast_from_rank_0(partial(self._ledger.await_seen, address))
            if commit is None:
                raise MissingOutput(f"{address} has no commit, so there is no version {version} of the {role}")
            self._train(role, step)
            self._verify(commit, host.digest(role))
            host.mark_clean(role)
            self._replayed[role] = self._replayed.get(role, 0) + 1
        return host

    def update(
        self, role: Role, step: int, commit: Callable[[dict[str, float], str], Commit], *, is_first: bool = False
    ) -> Commit | None:
        """Make version `step + 1` resident. If the update has no commit yet, train it and commit it with `commit`.
        Return the commit on rank 0, and None on other ranks. `is_first`: train without looking for a commit
        (`Call.is_first`). If there is one all the same, it wins, and must have the digest that was trained."""
        if not is_first:
            committed = self.broadcast_from_rank_0(lambda: self._ledger.find(Address(UPDATE_STAGE[role], step)))
            if committed is not None:
                self.model_at(role, step + 1)
                return committed if self._rank == 0 else None
        self.model_at(role, step)
        metrics = self._train(role, step)
        metrics |= {f"{UPDATE_STAGE[role]}/{name}": value for name, value in self.host.last_update(role).items()}
        metrics |= self.host.trunk_counts()
        if role in self._replayed:
            metrics[f"{role}/replayed_updates"] = float(self._replayed.pop(role))
        digest = self.host.digest(role)
        is_saved = (step + 1) % self._every == 0

        def committed_winner() -> Commit:
            winner = commit(metrics, digest)
            # A driver that was superseded may commit late. Its checkpoint must not replace the one that counts.
            return (is_saved and self._ledger.closed_winner(Address(UPDATE_STAGE[role], step))) or winner

        winner = self.broadcast_from_rank_0(committed_winner)
        self._verify(winner, digest)
        self.host.mark_clean(role)
        if is_saved:
            self._save(role, step + 1, digest)
        return winner if self._rank == 0 else None

    def replay(self, role: Role, step: int) -> tuple[str, str]:
        """Run the update of `step` once more on its stored inputs. Return (the committed digest, the digest now). Works
        with one rank only."""
        ((_, committed, made),) = self.replay_all(role, range(step, step + 1))
        return committed, made

    def replay_all(self, role: Role, steps: range) -> Iterator[tuple[int, str, str]]:
        """Run the updates of these steps once more on their stored inputs, in the order of the steps. Yield (step,
        digest in the commit, digest now). Works with one rank only.

        If this object was made with `same_layout`, stop after the first difference, because the run's later updates
        started from weights that differ from those here. In another layout the digests may differ by rounding, and all
        steps are run.

        Raises MissingOutput if an update has no commit.
        """
        for step in steps:
            commit = self._ledger.find(Address(UPDATE_STAGE[role], step))
            if commit is None:
                stage = UPDATE_STAGE[role]
                raise MissingOutput(f"{stage} of step {step} has no commit: there is nothing to compare with")
            self.model_at(role, step)
            self._train(role, step)
            digest = self.host.digest(role)
            yield step, str(commit.digest), digest
            if self._same_layout and digest != commit.digest:
                return
            self.host.mark_clean(role)

    def _train(self, role: Role, step: int) -> dict[str, float]:
        address = Address("advantage", step)
        with self._bookkeeping():
            rollout = self._store.read_step("generate", step, self._shards)
            advantages: Advantages = self._store.read(address)
            commit = self._ledger.get(address)
        if role is Role.CRITIC:
            with self._bookkeeping():
                values = self._store.read_step("value", step, self._shards)
            return self.host.update_critic(step, CriticBatch(rollout, advantages, values))
        with self._bookkeeping():
            reference = self._store.read_step("reference", step, self._shards)
            policy = self._store.read_step("logprob", step, self._shards) if self._recompute_logprobs else None
        batch = PolicyBatch(rollout, advantages, policy, reference, commit.state["step_kl_coef"])
        return self.host.update_policy(step, batch)

    def train_without_commit(self, role: Role, step: int) -> None:
        """Run the update of `step` on its stored inputs, whether or not the update is committed. Write nothing."""
        self.model_at(role, step)
        self._train(role, step)

    def _verify(self, commit: Commit, digest: str) -> None:
        if self._same_layout and commit.digest != digest:
            raise ReplayMismatch(
                f"{commit.address}: committed weights have digest {commit.digest}, these have {digest}: another "
                "layout, thread count, processor or library version than the one that committed them? Continue there; "
                "or `stageline resume RUN --from-checkpoint` archives all commits after the newest checkpoint, and "
                "computes them again here"
            )

    def _load_newest_until(self, role: Role, version: int) -> None:
        """Bring the role's model to the newest version, up to `version`, that needs no training: the resident version,
        a checkpoint's version, or 0. Afterwards the model is not dirty (see `ModelHost`)."""
        self.background.wait_for(f"checkpoint of the {role}")
        host = self.host
        resident = -1 if host.dirty(role) or host.version(role) > version else host.version(role)
        refused: list[tuple[int, str]] = []
        for saved in self.broadcast_from_rank_0(lambda: self._checkpoints.newest_first(str(role), version)):
            if saved <= resident:
                break
            fault, meta = self._check_checkpoint(role, saved)
            if fault is None:
                resident = -1  # a load that fails leaves no usable weights
                fault = self._load_checkpoint(role, saved, meta)
            if fault is None:
                resident = saved
                break
            refused.append((saved, fault))
        if resident < 0:
            host.load(role, None)
        self._damaged.setdefault(role, set()).update(saved for saved, _ in refused)
        if self._rank == 0:
            for saved, fault in refused:
                self._warn(
                    f"checkpoint v{saved} of the {role} CANNOT BE USED: {fault}. Back to v{host.version(role)}; the "
                    f"updates from there to v{version} run again"
                )

    def _check_checkpoint(self, role: Role, saved: int) -> tuple[str | None, dict[str, Any]]:
        """Return two things: the fault of a checkpoint, and its saved meta data. The fault is None if the checkpoint's
        bytes are undamaged and hold the weights that this run committed. Each rank checks a share of the bytes."""

        def fetched() -> str | None:
            try:
                self._checkpoints.fetch(str(role), saved)
            except StoreError as error:
                return str(error)
            return None

        expected = self.broadcast_from_rank_0(lambda: expected_meta(self._ledger, role, saved))
        fault = self.broadcast_from_rank_0(fetched)
        if fault is not None:
            return fault, {}
        try:
            meta = self._checkpoints.verify(str(role), saved, (self._rank, self._ranks), expected)
            fault = None
        except (StoreError, OSError) as error:
            meta, fault = {}, str(error)
        return self._first_fault_of_ranks(fault), meta

    def _load_checkpoint(self, role: Role, saved: int, meta: dict[str, Any]) -> str | None:
        """Load a checkpoint. Return its fault if it cannot be loaded or does not hold this version, else None."""
        try:
            self.host.load(role, self._checkpoints.place(str(role), saved))
            fault = None
        except StateError as error:
            fault = str(error)
        fault = self._first_fault_of_ranks(fault)
        if fault is None and self.host.version(role) != saved:
            fault = f"it holds version {self.host.version(role)}"
        if fault is None and (digest := self.host.digest(role)) != meta.get("digest"):
            fault = f"its weights have digest {digest}, and had {meta.get('digest')} when they were saved"
        return fault

    def _first_fault_of_ranks(self, fault: str | None) -> str | None:
        """Return, on every rank, the fault of the first rank that has one. Return None if no rank has a fault."""
        if self._ranks == 1:
            return fault
        faults: list[str | None] = [None] * self._ranks
        dist.all_gather_object(faults, fault)
        return next((each for each in faults if each is not None), None)

    def _save(self, role: Role, version: int, digest: str) -> None:
        name = f"checkpoint of the {role}"
        self.background.wait_for(name)  # before the next copy is made, in the same memory
        path = Path(self.broadcast_from_rank_0(lambda: str(self._checkpoints.begin(str(role), version))))
        write, damaged = self.host.save(role, path), frozenset(self._damaged.get(role, ()))

        def work() -> None:
            sums = write()
            if sums is None:
                return
            self._checkpoints.finish(str(role), version, path, _meta(digest), sums)
            # A resumed run may have to publish the version that the oldest open generation reads. So the checkpoint to
            # rebuild it from stays, even if `checkpoint.keep` is smaller.
            oldest = max(0, version - self._staleness)
            newer = [v for v in self._checkpoints.versions(str(role)) if v > oldest and v not in damaged]
            self._checkpoints.prune(str(role), max(self._keep, len(newer) + 1), damaged, self._keep_every)

        self.background.submit(name, work)

    def close(self) -> None:
        """Wait for unfinished writes, and close the models. Raises the error of a write that failed."""
        try:
            self.background.close()
        finally:
            self.host.close()
