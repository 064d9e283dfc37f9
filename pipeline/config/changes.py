"""What of a run's config may change when the run goes on, and what may not: the one list of it.

    decides nothing        left out of the config's digest; may change
    may change all the same   in the digest; each for its own reason
    a number that may grow    `steps`, and a pool's workers and slots either way
    everything else        decides what is computed: another value is another run

Keys are patterns of `fnmatch`. May import omegaconf, pipeline.graph.dispatch, the schema of a run and storage.problems.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from omegaconf import OmegaConf

from pipeline.config.labelling import LabelConfig
from pipeline.config.reward_model import RewardModelConfig
from pipeline.config.run import RunConfig
from storage.problems import Problem

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
    "engine.start_s",
    "engine.silence_s",
    "engine.tensorrt_llm.*",
    "placement.share_devices",
    "placement.turns",
    "placement.gangs.*.weights_dir",
    "placement.gangs.*.offload",
    "reward.parts.*.timeout_s",
    "evaluate.reward.parts.*.timeout_s",
    "evaluate.select.*",
)
"""What a run is called, where it keeps its files, how it shows itself and warns, where its processes are and how long
it waits, what it writes beside, which version it names the best."""
MAY_CHANGE = {
    "model.path": "where the model is: its files must be the same",
    "model.reference_path": "likewise",
    "model.critic_path": "likewise",
    "prompts.url": "a run keeps its prompts; they are read again only where they are lost, and must be the same",
    "model.peak_tflops": "what a metric is a share of",
    "evaluate.every": "which versions are evaluated; those that are past are made again for it",
    "mismatch.alarm_nats": "when somebody is told",
    "mismatch.stop": "likewise",
}
"""What is in the digest, and may change: why."""
OF_POOLS = ("placement.gangs.*.workers", "placement.gangs.*.slots")
"""May change where the gang is a pool: what a row becomes does not depend on the replica or on the rows beside it."""
_WHERE = frozenset({"name", "runs_dir"})
"""What a run's directory says by where it lies, whatever was written into it."""


@dataclass(frozen=True)
class Change:
    """A setting with another value than before; None where one of the two has no such key."""

    key: str
    before: Any
    after: Any

    def __str__(self) -> str:
        return f"{self.key}={_written(self.after)} (was {_written(self.before)})"


def sections(config: RunConfig | RewardModelConfig | LabelConfig) -> dict[str, Any]:
    """A config as sections and keys, as JSON gives them back."""
    content = OmegaConf.to_container(OmegaConf.structured(config), enum_to_str=True)
    return dict(json.loads(json.dumps(content)))


def settings(content: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Key paths and values of nested sections; an empty section is a value."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        if isinstance(value, Mapping) and value:
            flat |= settings(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    """Between two configs as `sections` has them, by key; where the run's directory lies is none."""
    old, new = settings(before), settings(after)
    keys = sorted((old.keys() | new.keys()) - _WHERE)
    return [Change(key, old.get(key), new.get(key)) for key in keys if old.get(key) != new.get(key)]


def decides_nothing(key: str, config: RunConfig) -> bool:
    """Whether a setting is left out of the digest of this config. `steps` is where no learning rate depends on it."""
    if key == "steps":
        trained = [config.model.policy, *([config.model.critic] if config.has_critic else [])]
        return all(optimizer.decay == "constant" for optimizer in trained)
    return any(fnmatchcase(key, pattern) for pattern in DECIDES_NOTHING)


def change_problems(before: Mapping[str, Any], config: RunConfig) -> Iterator[Problem]:
    """What keeps a run that was stated as `before` from going on as `config`."""
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
