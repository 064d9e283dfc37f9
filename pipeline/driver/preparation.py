"""A run's directory before its workers start: what the run is, what workers read, and order after an earlier driver.

    --from-checkpoint: what comes after it is archived ──► identity: stated, or the same as before ──► config, prompts
        ──► damaged records set aside, committed files put in their places

May import pipeline.config, pipeline.observe, the parts of pipeline.driver that it calls, and below.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.config.identity import Identity, write_identity
from pipeline.config.loading import to_yaml
from pipeline.config.paths import RunPaths
from pipeline.config.preflight import Preflight
from pipeline.config.run import RunConfig
from pipeline.driver.identity import state, state_again
from pipeline.driver.integrity import Mended, mend, set_damaged_aside
from pipeline.driver.results import open_history
from pipeline.driver.retention import check_evaluations
from pipeline.driver.rewind import carry_out, plan_rewind
from pipeline.observe.history import History
from stages.models.hf_files import Tokenizer
from storage import files
from storage.address import Address
from storage.store_root import write_root
from storage.vocabulary import BYTES, OFFSETS, Vocabulary


@dataclass(frozen=True)
class PreparedRun:
    """A run that can start or go on."""

    history: History
    identity: Identity
    mended: Mended
    changed: tuple[str, ...]
    """Settings that it goes on with otherwise than before."""
    warnings: tuple[str, ...]
    """What a person should know."""


def prepare(config: RunConfig, checked: Preflight, *, resume: bool, from_checkpoint: bool) -> PreparedRun:
    """Everything that precedes the workers.

    Raises:
        ConfigError: the run would go on with what it did not begin with.
        StoreError: what is stored does not fit together.
    """
    paths, history = RunPaths(config.run_dir), open_history(config)
    rewind = None
    warnings: list[str] = []
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
    files.write(root, paths.config.name, to_yaml(config).encode())
    if rewind is not None:
        carry_out(rewind, history, paths)
        warnings.append(str(rewind))
    if re_evaluated:  # steps that were over are not any more
        history.ledger.reopen(history.ledger.addresses())
    mended = mend(history, paths, aside)
    write_root(root, store_attributes(config, stated.identity), _vocabulary(checked.tokenizer))
    return PreparedRun(history, stated.identity, mended, stated.changed, (*warnings, *mended.warnings))


def store_attributes(config: RunConfig, identity: Identity) -> dict[str, Any]:
    """What the rollout store says of itself to whoever opens it without this project: a function of the config, so that
    a run that goes on writes the same."""
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
    """None for a tokenizer whose tokens stand for something else in another place."""
    tokens = tokenizer.token_bytes()
    return {} if tokens is None else Vocabulary.of(tokens).arrays()
