"""Settings of rewards: what a score is made of, and what of that cannot work by itself. Builds no reward.

    training     `reward`            the weighted sum of its parts is what is learnt from
    evaluation   `evaluate.reward`   what held-out responses are scored by; where it is empty: `reward`

May import stages.ppo.config and storage.problems.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.ppo.config import NormalizeConfig, normalize_problems
from storage.problems import Problem, above, plain_name

JUDGES = ("judge", "local_judge")
"""Kinds that ask a language model."""
TIMEOUT_S, PATIENCE_S = 60.0, 300.0
"""Of a judge: of one request, and how long it may answer nothing; where the config has none."""
REASONING_SCHEME = "reasoning-gym:"
"""What a prompt source begins with whose problems are made by seed (stages/rewards/reasoning.py)."""


TIMEOUT_S = 60.0
"""Of a user's own reward, where nothing is said."""


@dataclass
class PartConfig:
    """One part of a score."""

    kind: str = "???"
    """Name of a registered reward (stages/rewards/registry.py), or the user's own as `module:function` or
    `module:Class`, from the working directory or an installed package."""
    weight: float = 1.0
    """Factor in the sum; 0: only measured."""
    args: dict[str, Any] = field(default_factory=dict)
    timeout_s: float = TIMEOUT_S
    """Of a user's own: the longest that a batch may take."""


@dataclass
class RewardPartsConfig:
    """What a score is the weighted sum of: `parts`, or, for one part of weight 1, its `kind` and `args` right here."""

    kind: str | None = None
    args: dict[str, Any] = field(default_factory=dict)
    parts: dict[str, PartConfig] = field(default_factory=dict)

    @property
    def given(self) -> bool:
        return bool(self.kind is not None or self.args or self.parts)

    def named(self, key: str) -> Mapping[str, tuple[str, PartConfig]]:
        """Name of each part -> (the key path of its settings, the settings). The short form's part is named after its
        kind. `key`: of this section."""
        if self.kind is not None:
            name = self.kind.rpartition(":")[2].rpartition(".")[2]
            return {name: (key, PartConfig(self.kind, args=self.args))}
        return {name: (f"{key}.parts.{name}", part) for name, part in self.parts.items()}


@dataclass
class RewardConfig(RewardPartsConfig):
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)


def reward_problems(config: RewardConfig) -> Iterator[Problem]:
    """What of the section `reward` cannot work by itself."""
    if not config.given:
        need = (
            "a run needs a reward: reward.kind=NAME for one part, or reward.parts={NAME: {kind: .., weight: .., args: "
            "{..}}, ..}"
        )
        yield Problem("reward.parts", {}, need)
    yield from parts_problems(config, "reward")
    yield from normalize_problems(config.normalize)


def source_problems(config: RewardPartsConfig, key: str, prompts_url: str) -> Iterator[Problem]:
    """Whether the prompts are what the parts check answers of."""
    for where, part in config.named(key).values():
        if part.kind == "reasoning_gym" and not prompts_url.startswith(REASONING_SCHEME):
            need = f"needs prompts.url={REASONING_SCHEME}TASK (given {prompts_url!r}); `answer` is for any source"
            yield Problem(f"{where}.kind", part.kind, need)


def reward_model_parts(
    config: RewardPartsConfig, key: str, kinds: tuple[str, ...] = ("model",)
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """(key path of the arguments, the arguments) of every part that is a reward model, or of other `kinds`, also within
    ensembles."""
    for where, part in config.named(key).values():
        yield from _models_of({"kind": part.kind, "args": part.args}, where, kinds)


def judge_problems(config: RewardPartsConfig, key: str, responses: int, deadline_s: float) -> Iterator[Problem]:
    """What of the section's judges cannot work in a run with so many responses to a prompt in what is scored, whose
    nodes may take so long."""
    for where, args in reward_model_parts(config, key, JUDGES):
        if args.get("against") == "group" and responses < 2:
            need = (
                "compares the responses to a prompt, of which there is one here: rollout.responses_per_prompt of 2 or "
                "more, and for evaluations, which sample one response, an evaluate.reward of its own"
            )
            yield Problem(f"{where}.against", "group", need)
        waits = [args.get("patience_s", PATIENCE_S), args.get("timeout_s", TIMEOUT_S)]
        if "url" in args and all(isinstance(s, int | float) for s in waits) and sum(waits) >= deadline_s:
            need = (
                f"with timeout_s = {waits[1]:g} must be less than cluster.deadline_s = {deadline_s:g}, after which the "
                "node is taken for lost"
            )
            yield Problem(f"{where}.patience_s", waits[0], need)


def _models_of(part: Mapping[str, Any], where: str, kinds: tuple[str, ...]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    args = part.get("args", {})
    if part.get("kind") in kinds:
        yield f"{where}.args", args
    elif part.get("kind") == "ensemble":
        for name, member in args.get("members", {}).items():
            yield from _models_of(member, f"{where}.args.members.{name}", kinds)


def parts_problems(config: RewardPartsConfig, key: str) -> Iterator[Problem]:
    """What of a section with parts, if any are given, cannot work by itself."""
    if config.kind is not None and config.parts:
        need = f"{key}.kind is the short form of a single part: give either that or {key}.parts"
        yield Problem(f"{key}.kind", config.kind, need)
    elif config.kind is None and config.args:
        need = f"without {key}.kind they are nobody's: set it, or {key}.parts.NAME.args"
        yield Problem(f"{key}.args", config.args, need)
    for name, part in config.parts.items():
        yield from plain_name(f"{key}.parts.{name}", name, dots=False)
        if not math.isfinite(part.weight):
            yield Problem(f"{key}.parts.{name}.weight", part.weight, "must be finite (0: only measured)")
        yield from above(0, {f"{key}.parts.{name}.timeout_s": part.timeout_s})
        if ":" not in part.kind and part.timeout_s != TIMEOUT_S:
            need = (
                f"{part.kind} runs in the scoring worker itself, where nothing ends it: leave it out (it is for "
                "rewards of your own, module:function"
                + (", each member of an ensemble having its own in args)" if part.kind == "ensemble" else ")")
            )
            yield Problem(f"{key}.parts.{name}.timeout_s", part.timeout_s, need)
    if config.parts and not any(part.weight for part in config.parts.values()):
        weights = {name: part.weight for name, part in config.parts.items()}
        yield Problem(f"{key}.parts", weights, "every weight is 0, so that every score would be: set one that is not")
