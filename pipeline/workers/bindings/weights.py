"""What changes the run's weights or gives them away: updates, exactly once; and publications, again where need be.

May import pipeline.config, pipeline.graph, pipeline.workers, stages and storage.
"""

from __future__ import annotations

import time
from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.graph.graph import evaluated
from pipeline.workers.bindings.binding import Settled
from pipeline.workers.messages import Call
from pipeline.workers.model_card import describe_export
from pipeline.workers.parts import WorkerParts, required
from stages.models.protocol import Role
from stages.publish import publish
from storage.commits import Commit

EXPORT = "export"
"""The name of its work in the background."""


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

    updates = required(parts.updates)
    winner = updates.update(role, call.address.step, commit)
    if call.address.step + 1 == parts.config.steps:
        updates.background.settle_all()  # nothing may come after this that would wait for it
    return Settled(winner, reused=winner is not None and not committed)


def publish_version(parts: WorkerParts, call: Call) -> Settled:
    """Makes a version of the policy readable, and exports it where its turn has come. Publishes again where the commit
    is there but the weights, which live in memory, are not."""
    version, config = call.version, parts.config
    started = time.time()
    host = required(parts.updates).at(Role.POLICY, version)
    found = parts.find(call.address)
    exported = bool(version and _is_exported(config, version)) and _begin_export(parts, version)
    with parts.clock.bookkeeping():
        manifest = publish(host, parts.board, version)
    if version == config.steps:  # nobody would make good what is owed after this commit: a resume has no node left
        _write_exports(parts, version, exported)
        required(parts.updates).background.settle_all()
    if manifest is not None and found is None:
        with parts.clock.bookkeeping():
            found = parts.store.commit_only(
                call.address,
                parts.provenance(call, started, (version,)),
                attempt=parts.attempt_name(call),
                metrics={"publish/bytes": float(manifest.num_bytes)},
                digest=manifest.digest,
            )
    if version != config.steps:
        _write_exports(parts, version, exported)
    return Settled(None if manifest is None else found, reused=False)


def _write_exports(parts: WorkerParts, version: int, exported: bool) -> None:
    """Begins to write what has been begun: this version's export, and those that dead processes owe."""
    if exported:
        _export(parts, version)
    if exported or version == parts.config.steps:
        # the export before this one, if there was any, is over: whatever has begun is a dead process's
        for owed in required(parts.updates).agree(lambda: _begun_exports(parts, version)):
            _export(parts, owed)


def _is_exported(config: RunConfig, version: int) -> bool:
    """Whether a version is written when it is published: the last, every so many; and, where what it could be rebuilt
    from will be dropped, one that is evaluated, since it may turn out to be the best."""
    if version == config.steps or (config.export.every and version % config.export.every == 0):
        return True
    return config.storage.keep.rollouts is not None and evaluated(config.graph(), version)


def _begin_export(parts: WorkerParts, version: int) -> bool:
    """Whether a version is still to be exported. Its directory under a name that is not final says from now on that it
    is: what a process that dies over it owes is made good when the next version is exported."""
    target = parts.paths.weights(version)

    def begin() -> bool:
        if target.is_dir():
            return False
        _staged(target).mkdir(parents=True, exist_ok=True)
        return True

    return bool(required(parts.updates).agree(begin))


def _begun_exports(parts: WorkerParts, but: int) -> list[int]:
    """Versions whose exports were begun, by a process that died, and are not there."""
    begun = parts.paths.weights(0).parent.glob(".v*")
    versions = {int(path.name[2:]): path for path in begun if path.name[2:].isdecimal()}
    return sorted(v for v in versions if v != but and not parts.paths.weights(v).is_dir())


def _export(parts: WorkerParts, version: int) -> None:
    """The whole policy in Hugging Face layout, from a copy and while the run goes on; a half-written one never has the
    final name."""
    updates, target = required(parts.updates), parts.paths.weights(version)
    staged = _staged(target)
    write = updates.at(Role.POLICY, version).export(staged)

    def work() -> None:
        write()
        if parts.spec.index == 0:
            describe_export(staged, parts.config, version, parts.config_hash)
            staged.rename(target)

    updates.background.submit(EXPORT, work)


def _staged(target: Path) -> Path:
    return target.with_name(f".{target.name}")
