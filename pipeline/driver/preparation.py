"""Prepare a run's directory before its workers start: identity, files that workers read, repairs of stored data.

    plan the rewind (--from-checkpoint) ──► make the identity, or compare it
        ──► write identity, config, prompts ──► archive what the rewind moves
        ──► set damaged records aside, move committed files into place

The function `prepare` does all of this, in this order. The identity describes what a run is computed with: config,
model files, prompts and software. It also has the numerics of each gang: facts on which the exact bits of a worker's
results depend, such as the processor. The identity is compared when the run resumes and when a worker is built:

    start    ──► config, model files, prompts, software ──► identity.json
    resume   ──► unchanged? ──no, in a way that is not allowed──► refused, naming the difference
                     │ yes, or in an allowed way
                     └► the changes are written and reported
    a worker is built ──► compare the worker's numerics with the first numerics of its gang
                          (first worker of a gang ever: compare its software with the driver's)

A node may run on any worker of its gang, so all workers of a gang must compute the same bits. Different gangs may run
on different kinds of processors, as long as each gang keeps its kind.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.config.identity import (
    FILE,
    GangNumerics,
    Identity,
    Statement,
    config_changes,
    config_sections,
    differences,
    fingerprint,
    read_identity,
    write_identity,
)
from pipeline.config.loading import config_hash, write_config
from pipeline.config.memory import gpus_here
from pipeline.config.paths import RunPaths
from pipeline.config.placement import gang_of_role
from pipeline.config.preflight import Preflight, device_notes, engine_device, engine_line, unproven_guarantees
from pipeline.config.run import RunConfig
from pipeline.config.stored import Claim, claim
from pipeline.driver.context import WorkerKey
from pipeline.driver.integrity import Repairs, execute_rewind, plan_rewind, quarantine_damaged_commits, repair_store
from pipeline.driver.results import open_history
from pipeline.driver.retention import check_evaluations
from pipeline.errors import ConfigError
from pipeline.observe.history import History
from pipeline.observe.journal import EventKind, Journal
from pipeline.observe.live import NOTHING_UNPROVEN, UNPROVEN_PREFIX
from pipeline.workers.messages import worker_name
from stages.engines.capabilities import Device
from stages.models.hf_files import Tokenizer, file_digests
from stages.models.protocol import Role
from stages.native.software import software
from stages.prompts import PromptTable
from storage.address import Address
from storage.ledger import Ledger
from storage.rollouts import BYTES, OFFSETS, Vocabulary, write_root

KEY = "cluster.same_numerics"
FROM_CHECKPOINT = "`stageline resume RUN --from-checkpoint`"


@dataclass(frozen=True)
class IdentityCheck:
    """The result of making or comparing a run's identity, with notes for the user. The identity describes what the run
    is computed with: config, model files, prompts, software, and the numerics of each gang."""

    identity: Identity
    changed: tuple[str, ...] = ()
    """One text per setting that has changed since the last start of a resumed run."""
    warnings: tuple[str, ...] = ()


def new_identity(config: RunConfig, prompts: PromptTable) -> IdentityCheck:
    """Return the identity of a run that starts: its config, software, and digests of model files and prompts. Writes
    nothing."""
    first = Statement(time.time(), "started", config_sections(config), config_hash(config), software())
    return IdentityCheck(Identity(_model_files(config), prompts.digest(), (first,)))


def check_identity(
    config: RunConfig, prompts: PromptTable, ledger: Ledger, archived: str | None = None
) -> IdentityCheck:
    """Return the identity of a run that resumes, extended by what has changed since its last start.

    Args:
        archived: the reason to write into the identity if the run resumes from a checkpoint and archives later commits;
            None otherwise.

    Raises:
        ConfigError: the model files, rubrics or prompts are not those that the run began with. Or the software has
            changed, `cluster.same_numerics` is `refuse`, and the run does not resume from a checkpoint. Or
            identity.json is missing, and the commits are of another config.
        StoreError: identity.json is damaged.
    """
    identity = read_identity(config.run_dir)
    if identity is None:
        return _replaced_identity(config, prompts, ledger)
    actual = _model_files(config)
    for name, stated in identity.models.items():
        changes = differences(stated, actual[name])
        if changes:
            key, path = _model_paths(config)[name]
            raise ConfigError(
                key, f"given {path!r}; its files are not those that the run began with: {_join_texts(changes)}"
            )
    if identity.prompts != prompts.digest():
        own = config.evaluate.prompts.url
        also = "" if own is None else f" and at evaluate.prompts.url={own}"
        need = f"what is read there{also} is not what {config.run_dir} began with, whose own copy (prompts.npz) is lost"
        raise ConfigError("prompts.url", f"given {config.prompts.url!r}; {need}")
    latest, here = identity.latest, software()
    changed = [str(change) for change in config_changes(latest.config, config_sections(config))]
    changes = differences(latest.software, here)
    warnings: tuple[str, ...] = ()
    if changes and archived is None:
        if config.cluster.same_numerics == "refuse":
            raise ConfigError(
                KEY, f"given 'refuse'; the software is not what the run was computed with: {_refusal_text(changes)}"
            )
        warnings = (f"other software: {_join_texts(changes)}. Updates that run again may differ ({KEY}=warn)",)
    same_digest = latest.config_hash == config_hash(config)  # differs if an earlier version hashed secrets too
    if not changed and not changes and archived is None and same_digest:
        return IdentityCheck(identity)
    statement = Statement(
        time=time.time(),
        why=archived or "resumed",
        config=config_sections(config),
        config_hash=config_hash(config),
        software=here,
        changed=(*changed, *changes),
        anew=archived is not None,
    )
    extended = replace(identity, statements=(*identity.statements, statement))
    return IdentityCheck(extended, tuple(changed), warnings)


def _replaced_identity(config: RunConfig, prompts: PromptTable, ledger: Ledger) -> IdentityCheck:
    """Return a new identity for a run whose identity.json is missing. Raises ConfigError if the run has commits of
    another config."""
    stated, made = new_identity(config, prompts), {commit.provenance.config_hash for commit in ledger.list()}
    others = sorted(made - {stated.identity.latest.config_hash})
    if others:
        raise ConfigError(
            str(config.run_dir / FILE),
            f"is missing, and the commits are of another config (digest {', '.join(others)}) than config.yaml "
            f"({stated.identity.latest.config_hash}); put it back",
        )
    if not made:
        return stated
    warning = f"{FILE} was missing: models, prompts and software are taken for the run's, unchecked"
    first = replace(stated.identity.latest, why="resumed without an identity")
    return IdentityCheck(replace(stated.identity, statements=(first,)), warnings=(warning,))


class NumericsWatch:
    """Owns a run's identity while the workers run, and adds the numerics of each gang to identity.json. Numerics are
    the facts on which the exact bits of a worker's results depend, such as the processor."""

    def __init__(
        self,
        config: RunConfig,
        identity: Identity,
        journal: Journal,
        set_tags: Callable[[Mapping[str, str]], None] = lambda values: None,
    ) -> None:
        """`set_tags`: sets tags (name -> text) of the tracked run. The tags that this class sets show the engine's
        capabilities and missing guarantees, so that runs can be compared."""
        self._config, self._tags = config, set_tags
        self._engine_gang = gang_of_role(config.placement, Role.GENERATE)
        self._engines: set[str] = set()
        """Texts about the engine's capabilities that were already reported."""
        self._run_dir = Path(config.run_dir)
        self._mode = config.cluster.same_numerics
        self._identity = identity
        self._journal = journal

    def on_worker_built(self, worker: WorkerKey, numerics: Mapping[str, str]) -> None:
        """Check a new worker's numerics, and add them to the identity. Do neither if the same numerics are recorded for
        its gang already. The numerics must be equal to those that were recorded first for the gang. If none are
        recorded yet, the worker must have the same versions of software as the driver. Under `cluster.same_numerics:
        warn` a difference is only reported. A worker without numerics is ignored.

        Also report the capabilities of the engine if the worker is in the generating gang.

        Raises:
            ConfigError: the numerics or the software differ, and `cluster.same_numerics` is `refuse`.
        """
        if not numerics:
            return
        gang, name = worker[0], worker_name(*worker)
        if gang == self._engine_gang:
            self._report_engine(engine_device(numerics))
        versions = {item: numerics[item] for item in self._identity.latest.software if item in numerics}
        known = self._identity.numerics_of(gang)
        short = fingerprint(numerics)
        if short in {one.fingerprint for one in known}:
            return
        changes = differences(known[0].items, numerics) if known else []
        changes += [] if known else differences(self._identity.latest.software, versions)
        if changes:
            than = f"{known[0].worker} had when the gang was built first" if known else "the driver has"
            if self._mode == "refuse":
                raise ConfigError(
                    KEY, f"given 'refuse'; worker {name} computes with others than {than}: {_refusal_text(changes)}"
                )
            detail = f"worker {name} computes with others than {than}: {_join_texts(changes)}. Its last bits may differ"
            self._journal.append_now(EventKind.WARNED, detail=detail)
        seen = GangNumerics(gang, short, dict(numerics), name, time.time(), len(self._identity.statements) - 1)
        self._identity = replace(self._identity, numerics=(*self._identity.numerics, seen))
        write_identity(self._run_dir, self._identity)

    def _report_engine(self, device: Device) -> None:
        """Report the engine's capabilities on a kind of device, and the guarantees that are not proven on it. The same
        capabilities are reported only once."""
        line, missing = engine_line(self._config, device), unproven_guarantees(self._config, device)
        if line in self._engines:
            return
        self._engines.add(line)
        unproven = "; ".join(missing) or NOTHING_UNPROVEN
        self._journal.append_now(EventKind.ENGINE, gang=self._engine_gang, detail=f"{line}{UNPROVEN_PREFIX}{unproven}")
        self._tags({"engine": line, "not_proven": unproven})


def _model_paths(config: RunConfig) -> dict[str, tuple[str, str]]:
    """Return name -> (config key of the path, path) of each model and rubric file. The name is the role, the key of the
    reward's arguments, or the rubric's key. A reference or critic without a path has the policy's."""
    model = config.model
    paths = {str(Role.POLICY): ("model.path", model.path)}
    for role, key, path in (
        (Role.REFERENCE, "model.reference_path", model.reference_path),
        (Role.CRITIC, "model.critic_path", model.critic_path),
    ):
        if role is Role.CRITIC and not config.has_critic:
            continue
        paths[str(role)] = paths[str(Role.POLICY)] if path is None else (key, path)
    rewards = {where: (f"{where}.path", str(args["path"])) for where, args in config.scoring_models().items()}
    return paths | rewards | {key: (key, file) for key, file in config.rubric_files().items()}


def _model_files(config: RunConfig) -> dict[str, dict[str, str]]:
    """Return name -> digests of the files of each model and each rubric. The names are those that the function
    `_model_paths` returns. The digests are a mapping: file name -> digest. For a rubric the only key of this mapping is
    the word `rubric`. If several names share a path, its files are read once."""
    by_path: dict[str, dict[str, str]] = {
        file: {"rubric": hashlib.sha256(Path(file).read_bytes()).hexdigest()} for file in config.rubric_files().values()
    }
    return {
        name: by_path[path] if path in by_path else by_path.setdefault(path, file_digests(path))
        for name, (_, path) in _model_paths(config).items()
    }


def _refusal_text(differences: list[str]) -> str:
    """Return the end of the message that refuses a resume or a worker: the differences, and how to continue."""
    return (
        f"{_join_texts(differences)}. Go back to that; or set {KEY}=warn, with which updates that run again may "
        f"differ; or have what came after the newest checkpoint computed anew, here: {FROM_CHECKPOINT}"
    )


def _join_texts(items: list[str]) -> str:
    return "; ".join(items)


@dataclass(frozen=True)
class PreparedRun:
    """A run whose workers can start."""

    history: History
    claim: Claim
    identity: Identity
    repairs: Repairs
    changed: tuple[str, ...]
    """One text per setting that has changed since the last start of a resumed run."""
    warnings: tuple[str, ...]
    """Warnings for the user."""


def prepare(config: RunConfig, checked: Preflight, *, resume: bool, from_checkpoint: bool) -> PreparedRun:
    """Do everything that precedes the start of the workers.

    Raises:
        ConfigError: a resumed run has changed in a way that is not allowed.
        StoreError: the stored data is inconsistent.
    """
    paths, stored, history = RunPaths(config.run_dir), config.stored, open_history(config)
    rewind = None
    warnings = [*device_notes(config, gpus_here(), os.cpu_count() or 1), *config.judge_notes()]
    aside: dict[Address, str] = {}
    if resume:
        history.ledger.remove_closed_records()
    if from_checkpoint:
        aside = quarantine_damaged_commits(history.ledger, stored)
        history.store.recover()
        rewind = plan_rewind(history, stored)
    if resume:
        stated = check_identity(config, checked.prompts, history.ledger, None if rewind is None else str(rewind))
    else:
        stated = new_identity(config, checked.prompts)
    re_evaluated = any(change.startswith("evaluate.every=") for change in stated.changed)
    if re_evaluated:
        check_evaluations(config, history)
    paths.plots.mkdir(exist_ok=True)
    warnings += stated.warnings
    if not resume or checked.lost_prompts is not None:
        checked.prompts.save(paths.prompts)
    if checked.lost_prompts is not None:
        warnings.append(f"{checked.lost_prompts}: the prompts were read from {config.prompts.url} again")
    claimed = claim(stored)
    write_identity(paths.root, stated.identity)
    write_config(paths.config, config, config.storage.durability())
    if rewind is not None:
        execute_rewind(rewind, history, stored)
        warnings.append(str(rewind))
    if re_evaluated:  # new evaluations open steps that were over
        history.ledger.reopen(history.ledger.addresses())
    repairs = repair_store(history, stored, aside)
    write_root(stored.root, store_attributes(config, stated.identity), _vocabulary(checked.tokenizer))
    return PreparedRun(history, claimed, stated.identity, repairs, stated.changed, (*warnings, *repairs.warnings))


def store_attributes(config: RunConfig, identity: Identity) -> dict[str, Any]:
    """Return the attributes that explain the rollout store to people who open it without Stageline. The attributes
    depend only on config and identity, so a resumed run writes the same."""
    stated = identity.latest
    return {
        "title": f"rollouts of the Stageline run {config.name}",
        "run": config.name,
        "config_hash": stated.config_hash,
        "seed": config.seed,
        "staleness_bound": config.staleness,
        "model": config.model.path,
        "tokenizer": config.model.path,
        "software": dict(stated.software),
        "groups": "step_NNNNNN: the rows of a PPO step; evaluate_NNNNNN: held-out rows of that version of the weights",
        "dimensions": "row: a prompt with one response; token: the prompt's tokens, the response's, padding",
        "missing": "NaN, -1 or False where nothing is in place; ledger/ says what is committed",
        "text": f"{BYTES}, {OFFSETS}: what each token stands for, unless the tokenizer has no such table",
    }


def _vocabulary(tokenizer: Tokenizer) -> Mapping[str, tuple[str, np.ndarray]]:
    """Return the arrays that give the bytes of each token. Empty if the tokenizer has no table of token bytes."""
    tokens = tokenizer.token_bytes()
    return {} if tokens is None else Vocabulary.of(tokens).arrays()
