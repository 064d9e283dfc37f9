"""What of a config may differ in a variant that is trained on another run's recorded rollouts: the one list of it.

    rollouts, scores, the reference's log-probs    taken as they are recorded: whatever they depend on is the parent's
    log-probs and values at the step's start       computed anew, by the variant's own policy and critic
    advantages, both updates                       computed anew

Keys are patterns of `fnmatch`. May import the schema of a run, its errors, and pipeline.config.{changes, loading}.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase

from pipeline.config.changes import Change, changes, sections
from pipeline.config.errors import ConfigError, refusal
from pipeline.config.loading import load_yaml, to_yaml
from pipeline.config.run import RunConfig
from storage.problems import Problem

MAY_DIFFER = {
    "name": "the variant's own; it must be given",
    "runs_dir": "where its directory is made",
    "reward.normalize.*": "what is done with recorded scores before they are learnt from",
    "ppo.*": "KL, advantages, losses, epochs, minibatches",
    "placement.roles.critic": "none, or anywhere: it is trained in one process",
    "model.policy.*": "learning rate and the rest of the policy's optimizer",
    "model.critic.*": "likewise of the critic's",
    "model.loss_scale.*": "of float16",
    "tracking.*": "where its MLflow run is kept",
}
"""Key -> what it is of."""


def variant_of(parent: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, list[Change]]:
    """The parent's config with `key=value` changes, and what they change (name and place aside). Raises ConfigError for
    a key that a variant cannot differ in, and where it has no name of its own."""
    variant = load_yaml(to_yaml(parent), overrides)
    changed = changes(sections(parent), sections(variant))
    for problem in variant_problems(changed):
        raise refusal(problem)
    if variant.run_dir.resolve() == parent.run_dir.resolve():
        raise ConfigError("name", f"given {variant.name!r}, the run's own; a variant needs another: name=...")
    return variant, changed


def variant_problems(changed: Sequence[Change]) -> Iterator[Problem]:
    """What keeps a config from being a variant's."""
    for change in changed:
        if not any(fnmatchcase(change.key, pattern) for pattern in MAY_DIFFER):
            need = (
                f"the run's rollouts were recorded with {change.before!r} and are taken as they are; a variant may "
                f"differ in {', '.join(MAY_DIFFER)}"
            )
            yield Problem(change.key, change.after, need)
