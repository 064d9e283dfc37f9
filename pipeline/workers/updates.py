"""Law 3: an update happens exactly once, by version.

The resident policy and critic each have a version. Before a node that needs version i runs, `at` brings the model
there: nothing to do in the ordinary case; otherwise (this process is new, or an update failed half-way) the newest
checkpoint c <= i is loaded, or the start weights, and updates c .. i-1 run again on their stored inputs. A replayed
update must give the digest that its commit holds.

In a gang every rank does this together; rank 0's view of ledger and checkpoints decides and is broadcast, since two
ranks could look at different moments.

May import torch.distributed, stages and storage.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from stages.models.protocol import ModelHost, Role
from stages.update import update_critic, update_policy
from storage.address import Address
from storage.checkpoints import Checkpoints
from storage.errors import MissingOutput
from storage.ledger import Commit, Ledger
from storage.records import Advantages
from storage.rollouts import RolloutStore

UPDATE_STAGE = {Role.POLICY: "update_policy", Role.CRITIC: "update_critic"}


class ReplayMismatch(RuntimeError):
    """An update run again from its stored inputs gave other weights than the ones that were committed."""


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
        checkpoints: Checkpoints | None,
        shards: int,
        recompute_logprobs: bool,
        checkpoint_every: int,
        checkpoint_keep: int,
        staleness: int,
        bookkeeping: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        """`checkpoints`: None where the models are laid out in another way than those that made the commits: neither
        their checkpoints nor their digests can then be used. `bookkeeping`: entered while the store is read, so that
        its time does not count as training."""
        self.host = host
        self._rank = rank
        self._ranks = ranks
        self._store = store
        self._ledger = ledger
        self._checkpoints = checkpoints
        self._shards = shards
        self._recompute_logprobs = recompute_logprobs
        self._every = checkpoint_every
        self._keep = checkpoint_keep
        self._staleness = staleness
        self._bookkeeping = bookkeeping

    def agree(self, look: Callable[[], Any]) -> Any:
        """What `look()` gives on rank 0, on every rank; the others do not call it."""
        if self._ranks == 1:
            return look()
        box = [look() if self._rank == 0 else None]
        dist.broadcast_object_list(box, src=0)
        return box[0]

    def at(self, role: Role, version: int) -> ModelHost:
        """The host with `role` resident at `version`.

        Raises:
            ReplayMismatch: see there.
            MissingOutput: an update in between was never committed.
        """
        host = self.host
        if host.dirty(role) or host.version(role) != version:
            unusable = host.dirty(role) or host.version(role) > version
            saved = self._checkpoints
            found = None if saved is None else self.agree(lambda: saved.latest(str(role), version))
            if found is not None and (unusable or found[0] > host.version(role)):
                host.load(role, found[1])
            elif unusable:
                host.load(role, None)
        while host.version(role) < version:
            step = host.version(role)
            address = Address(UPDATE_STAGE[role], step)
            commit = self.agree(partial(self._ledger.find, address))
            if commit is None:
                raise MissingOutput(f"{address} has no commit, so there is no version {version} of the {role}")
            self._train(role, step)
            self._verify(commit, host.digest(role))
            host.mark_clean(role)
        return host

    def update(self, role: Role, step: int, commit: Callable[[dict[str, float], str], Commit]) -> Commit | None:
        """Makes version `step + 1` exist: trains and commits it, or finds that it is committed and makes sure that it
        is resident. Returns the commit on rank 0."""
        found = self.agree(lambda: self._ledger.find(Address(UPDATE_STAGE[role], step)))
        if found is not None:
            self.at(role, step + 1)
            return found if self._rank == 0 else None
        self.at(role, step)
        metrics = self._train(role, step)
        metrics |= {f"{UPDATE_STAGE[role]}/{name}": value for name, value in self.host.last_update(role).items()}
        metrics |= self.host.trunk_counts()
        digest = self.host.digest(role)
        winner = self.agree(lambda: commit(metrics, digest))
        self._verify(winner, digest)
        self.host.mark_clean(role)
        if self._checkpoints is not None and (step + 1) % self._every == 0:
            self._save(role, step + 1, self._checkpoints)
        return winner if self._rank == 0 else None

    def replay(self, role: Role, step: int) -> tuple[str, str]:
        """Trains version `step` once more from the stored inputs; (digest that was committed, digest now). One rank."""
        commit = self._ledger.find(Address(UPDATE_STAGE[role], step))
        if commit is None:
            raise MissingOutput(f"{UPDATE_STAGE[role]} of step {step} has no commit: there is nothing to compare with")
        self.at(role, step)
        self._train(role, step)
        return str(commit.digest), self.host.digest(role)

    def _train(self, role: Role, step: int) -> dict[str, float]:
        address = Address("advantage", step)
        with self._bookkeeping():
            rollout = self._store.read_step("generate", step, self._shards)
            advantages: Advantages = self._store.read(address)
            commit = self._ledger.find(address)
        assert commit is not None  # read() raises where there is none
        if role is Role.CRITIC:
            with self._bookkeeping():
                values = self._store.read_step("value", step, self._shards)
            return update_critic(self.host, step, rollout=rollout, advantages=advantages, values=values)
        with self._bookkeeping():
            reference = self._store.read_step("reference", step, self._shards)
            policy = self._store.read_step("logprob", step, self._shards) if self._recompute_logprobs else None
        return update_policy(
            self.host,
            step,
            rollout=rollout,
            advantages=advantages,
            reference=reference,
            policy=policy,
            kl_coef=commit.metrics["kl/coef"],
        )

    def _verify(self, commit: Commit, digest: str) -> None:
        if self._checkpoints is not None and commit.digest != digest:
            raise ReplayMismatch(
                f"{commit.address}: committed weights have digest {commit.digest}, these have {digest}: another "
                "layout, thread count or library version than the one that committed them?"
            )

    def _save(self, role: Role, version: int, checkpoints: Checkpoints) -> None:
        path = Path(self.agree(lambda: str(checkpoints.begin(str(role), version))))
        self.host.save(role, path)
        if self._ranks > 1:
            dist.barrier()  # every rank has written
        if self._rank == 0:
            checkpoints.finish(str(role), version, path, {})
            # A resumed run may have to publish the version that the oldest open generation reads: the checkpoint that
            # it is rebuilt from stays, however few are to be kept.
            oldest = max(0, version - self._staleness)
            newer = [v for v in checkpoints.versions(str(role)) if v > oldest]
            checkpoints.prune(str(role), max(self._keep, len(newer) + 1))

    def close(self) -> None:
        self.host.close()
