"""A run's directory before its workers start: what the run is, what workers read, and order after an earlier driver.

    --from-checkpoint: what comes after it is archived ──► identity: stated, or the same as before ──► config, prompts
        ──► damaged records set aside, committed files put in their places

May import pipeline.config, pipeline.observe, the parts of pipeline.driver that it calls, and below.
"""

from __future__ import annotations

from dataclasses import dataclass

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
from storage import files
from storage.address import Address


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
    return PreparedRun(history, stated.identity, mended, stated.changed, (*warnings, *mended.warnings))
