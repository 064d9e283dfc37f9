"""The settings that may change when a run is resumed. This is the only list of them.

    DECIDES_NOTHING        left out of the config's digest; may change
    MAY_CHANGE             in the digest; may change, each for its own reason
    steps                  may grow; OF_POOLS, a pool's workers and concurrent_shards, may grow or shrink
    everything else        decides what is computed: another value needs another run

Keys are patterns of `fnmatch`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.reward_model import LabelConfig, RewardModelConfig
from pipeline.config.run import RunConfig
from storage.problems import Problem
from storage.redaction import redacted

DECIDES_NOTHING = (
    "name",
    "runs_dir",
    "tracking.*",
    "alarms.*",
    "cluster.*",
    "slurm.*",
    "export.*",
    "checkpoint.*",
    "storage.*",
    "engine.python",
    "engine.tensorrt_llm.*",
    "placement.share_devices",
    "placement.device_sharing",
    "placement.gangs.*.weights_dir",
    "placement.gangs.*.offload",
    "reward.trust_answers",
    *(
        f"{section}.parts.*.{key}"
        for section in ("reward", "evaluate.reward")
        for key in ("timeout_s", "network", "environment", "writes")
    ),
    "evaluate.select.*",
)
"""Settings that do not change what is computed: names, directories, tracking, alarms, processes, timeouts, exports, the
choice of the best version. (Judges' budgets belong here too; their keys depend on the parts.)"""
MAY_CHANGE = {
    "model.path": "where the model is: its files must be the same",
    "model.reference_path": "likewise",
    "model.critic_path": "likewise",
    "prompts.url": "a run keeps its prompts; they are read again only where they are lost, and must be the same",
    "model.peak_tflops": "what a metric is a share of",
    "evaluate.every": "which versions are evaluated; those that are past are made again for it",
    "mismatch.alarm_nats": "when somebody is told",
}
"""Settings in the digest that may change -> the reason."""
OF_POOLS = ("placement.gangs.*.workers", "placement.gangs.*.concurrent_shards")
"""Settings that may change if the gang is a pool: a row's result does not depend on its replica or on other rows."""
_WHERE = frozenset({"name", "runs_dir"})
"""Settings that follow from the place of a run's directory, whatever its files say."""


@dataclass(frozen=True)
class Change:
    """A setting whose value has changed; None on a side that lacks the key."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}={_written(self.after)} (was {_written(self.before)})"


def sections(config: RunConfig | RewardModelConfig | LabelConfig) -> dict[str, Any]:
    """Return a config as nested sections and keys, with values as JSON reads them back."""
    content = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(json.loads(json.dumps(content)))


def settings(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the key paths and values of nested sections. An empty section is a value."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Return the changes between two configs in the form of `sections`, by key. The directory's place and secrets are
    ignored: a secret decides nothing, and recorded configs have none."""
    old, new = settings(redacted(before)), settings(redacted(after))
    keys = sorted((old.keys() | new.keys()) - _WHERE)
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def decides_nothing(key: str, config: RunConfig) -> bool:
    """Return True if a setting is left out of the digest of this config. `steps` is left out if no learning rate
    depends on it."""
    if key == "steps":
        trained = [config.model.policy, *([config.model.critic] if config.has_critic else [])]
        return all(optimizer.decay == "constant" for optimizer in trained)
    return any(fnmatchcase(key, pattern) for pattern in DECIDES_NOTHING) or key in config.judge_budgets()


def change_problems(before: Mapping[str, Any], config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each change that keeps a run recorded as `before` from being resumed as `config`."""
    pools = {gang.name for gang in config.gangs() if not gang.ordered}
    for change in changes(before, sections(config)):
        key = change.key
        if key == "steps":
            yield from _steps_problems(change, config)
        elif any(fnmatchcase(key, pattern) for pattern in OF_POOLS):
            if key.split(".")[2] not in pools:
                yield _refused(change, "its ranks act together, and sums depend on how many they are")
        elif not (decides_nothing(key, config) or key in MAY_CHANGE):
            yield _refused(change, "it decides what is computed")


def _steps_problems(change: Change, config: RunConfig) -> Iterator[Problem]:
    if not decides_nothing("steps", config):
        why = "the learning rates depend on it, unless model.policy.decay and model.critic.decay are constant"
        yield _refused(change, why)
    elif change.after < change.before:
        yield _refused(change, "a run may become longer, not shorter")


def _refused(change: Change, why: str) -> Problem:
    need = f"the run has {_written(change.before)}: {why}"
    return Problem(change.key, change.after, need)


def _written(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else repr(value)
