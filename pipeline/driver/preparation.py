"""Prepare a run's directory before its workers start: identity, files that workers read, repairs of stored data.

    plan the rewind (--from-checkpoint) ──► state the identity, or compare it ──► write identity, config, prompts
        ──► archive what the rewind moves ──► set damaged records aside, move committed files into place

`prepare` does all of it, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.identity import Identity, write_identity
from pipeline.config.loading import write_config
from pipeline.config.memory import gpus_here
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import Preflight, device_notes
from pipeline.config.run import RunConfig
from pipeline.driver.identity import state, state_again
from pipeline.driver.integrity import Repairs, carry_out, mend, plan_rewind, set_damaged_aside
from pipeline.driver.results import open_history
from pipeline.driver.retention import check_evaluations
from pipeline.observe.history import History
from stages.models.hf_files import Tokenizer
from storage import files
from storage.address import Address
from storage.rollout_root import BYTES, OFFSETS, Vocabulary, write_root


@dataclass(frozen=True)
class PreparedRun:
    """A run whose workers can start."""

    history: History
    identity: Identity
    repairs: Repairs
    changed: tuple[str, ...]
    """Settings that a resumed run has changed."""
    warnings: tuple[str, ...]
    """Warnings for the user."""


def prepare(config: RunConfig, checked: Preflight, *, resume: bool, from_checkpoint: bool) -> PreparedRun:
    """Do everything that precedes the start of the workers.

    Raises:
        ConfigError: a resumed run has changed in a way that is not allowed.
        StoreError: the stored data is inconsistent.
    """
    paths, history = RunPaths(config.run_dir), open_history(config)
    rewind = None
    warnings = [*device_notes(config, gpus_here()), *config.judge_notes()]
    aside: dict[Address, str] = {}
    if from_checkpoint:
        aside = set_damaged_aside(history.ledger, paths)
        history.store.recover()
        rewind = plan_rewind(history, paths)
    if resume:
        stated = state_again(config, checked.prompts, history.ledger, None if rewind is None else str(rewind))
    else:
        stated = state(config, checked.prompts)
    re_evaluated = any(change.startswith("evaluate.every=") for change in stated.changed)
    if re_evaluated:
        check_evaluations(config, history)
    paths.plots.mkdir(exist_ok=True)
    warnings += stated.warnings
    if not resume or checked.lost_prompts is not None:
        checked.prompts.save(paths.prompts)
    if checked.lost_prompts is not None:
        warnings.append(f"{checked.lost_prompts}: the prompts were read from {config.prompts.url} again")
    write_identity(paths.root, stated.identity)
    root = files.open_root(str(paths.root), config.storage.durability())
    write_config(paths.config, config, config.storage.durability())
    if rewind is not None:
        carry_out(rewind, history, paths)
        warnings.append(str(rewind))
    if re_evaluated:  # new evaluations open steps that were over
        history.ledger.reopen(history.ledger.addresses())
    repairs = mend(history, paths, aside)
    write_root(root, store_attributes(config, stated.identity), _vocabulary(checked.tokenizer))
    return PreparedRun(history, stated.identity, repairs, stated.changed, (*warnings, *repairs.warnings))


def store_attributes(config: RunConfig, identity: Identity) -> dict[str, Any]:
    """Return the attributes that explain the rollout store to people who open it without Stageline. They depend only on
    config and identity, so a resumed run writes the same."""
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
    """Return the arrays of token texts. Empty if a token's text depends on its place."""
    tokens = tokenizer.token_bytes()
    return {} if tokens is None else Vocabulary.of(tokens).arrays()
