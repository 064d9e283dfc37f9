"""What changes the run's weights or gives them away: updates, exactly once; and publications, again where need be.

May import pipeline.workers, stages and storage.
"""

from __future__ import annotations

import shutil
import time

from pipeline.workers.bindings.binding import Settled
from pipeline.workers.messages import Call
from pipeline.workers.parts import WorkerParts, required
from stages.models.protocol import Role
from stages.publish import publish
from storage.ledger import Commit


def update_policy_once(parts: WorkerParts, call: Call) -> Settled:
    """Version `step` of the policy becomes `step + 1`."""
    return _update(parts, call, Role.POLICY)


def update_critic_once(parts: WorkerParts, call: Call) -> Settled:
    """Version `step` of the critic becomes `step + 1`."""
    return _update(parts, call, Role.CRITIC)


def _update(parts: WorkerParts, call: Call, role: Role) -> Settled:
    started = time.time()
    committed = False

    def commit(metrics: dict[str, float], digest: str) -> Commit:
        nonlocal committed
        committed = True
        with parts.clock.bookkeeping():
            return parts.store.commit_only(
                call.address,
                parts.provenance(call, started, (call.version,)),
                attempt=parts.attempt_name(call),
                metrics=metrics,
                digest=digest,
            )

    winner = required(parts.updates).update(role, call.address.step, commit)
    return Settled(winner, reused=winner is not None and not committed)


def publish_version(parts: WorkerParts, call: Call) -> Settled:
    """Makes a version of the policy readable, and exports it where its turn has come. Publishes again where the commit
    is there but the weights, which live in memory, are not."""
    version, config = call.version, parts.config
    started = time.time()
    host = required(parts.updates).at(Role.POLICY, version)
    found = parts.find(call.address)
    exported = version == config.steps or bool(config.export.every and version % config.export.every == 0)
    if exported and version:
        _export(parts, version)
    with parts.clock.bookkeeping():
        manifest = publish(host, parts.board, version)
        if manifest is None:
            return Settled(None, reused=False)
        if found is None:
            found = parts.store.commit_only(
                call.address,
                parts.provenance(call, started, (version,)),
                attempt=parts.attempt_name(call),
                metrics={"publish/bytes": float(manifest.num_bytes)},
                digest=manifest.digest,
            )
    return Settled(found, reused=False)


def _export(parts: WorkerParts, version: int) -> None:
    """The whole policy in Hugging Face layout; a half-written one never has the final name."""
    updates, target = required(parts.updates), parts.paths.weights(version)
    staged = target.with_name(f".{target.name}")

    def begin() -> bool:
        shutil.rmtree(staged, ignore_errors=True)  # of a process that died over it
        return target.is_dir()

    if updates.agree(begin):
        return
    updates.host.export(staged)
    if parts.spec.index == 0:
        staged.rename(target)
