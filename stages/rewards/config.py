"""Settings of rewards, and their checks. Builds no reward.

training     `reward`            the policy learns from the weighted sum of its parts
evaluation   `evaluate.reward`   scores held-out responses; if it is not given, `reward` scores them
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from stages.ppo.config import NormalizeConfig
from storage.problems import Problem, above, finite, plain_name, setting

JUDGES = ("judge", "local_judge")
"""Kinds of rewards that ask a language model."""
SCORING_MODELS = ("model", "local_judge")
"""Kinds of rewards that score with a model in the scoring worker. Their argument `path` is the model's directory."""
EARLY_KINDS = ("ensemble", "judge", "reasoning_gym")
"""Built-in kinds whose rewards may be `early` (`Reward.early`). A user's own reward may be too."""
JUDGE_BUDGET = ("max_requests", "max_cost", "prompt_price", "completion_price")
"""Arguments of a judge that limit its requests and costs. They do not change any score."""
TIMEOUT_S, RETRY_S = 60.0, 300.0
"""Defaults in seconds. `TIMEOUT_S`: time limit of a request to a judge, and of a batch in a user's own reward.
`RETRY_S`: longest time without an answer from a judge."""
REASONING_SCHEME = "reasoning-gym:"
"""Prefix of prompt sources that generate problems from a seed (stages/rewards/reasoning.py)."""


@dataclass
class PartConfig:
    """One part of a score."""

    kind: str = "???"
    """A reward that ships with Stageline (stages/rewards/registry.py), or your own. Your own is `module:function` or
    `module:Class`, from the working directory or an installed package."""
    weight: float = setting(1.0, finite(" (0: only measured)"))
    """Factor of the part in the score, which is the weighted sum of the parts. 0: the part is only measured."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the reward."""
    timeout_s: float = setting(TIMEOUT_S, above(0))
    """Time limit of a batch in your own reward, in seconds. Rewards that ship with Stageline have no such limit;
    `format` and `reasoning_gym` have `args.timeout_s` for one answer."""
    network: bool = False
    """true: a reward function or class of your own may use the network."""
    environment: list[str] = field(default_factory=list)
    """For your own reward: names of further environment variables that it gets."""
    writes: list[str] = field(default_factory=list)
    """For your own reward: files and folders that it may write, besides a scratch folder."""


@dataclass(frozen=True)
class Permissions:
    """Permissions that the config gives to the sandboxed code of one component of the reward. The code also has the
    permissions that every sandbox has."""

    network: bool = False
    environment: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    trust_answers: bool = False


NO_PERMISSIONS = Permissions()


@dataclass
class RewardPartsConfig:
    """The parts of a score, which is their weighted sum. A single part of weight 1 may be given as `kind` and `args`
    instead of `parts`."""

    kind: str | None = None
    """Kind of the reward, if it consists of a single part. The section then has `kind` and `args`, and no `parts`. The
    part is named after its kind, or after the function or class of your own reward. null: `parts` lists the parts."""
    args: dict[str, Any] = field(default_factory=dict)
    """Arguments of the single part, if the section has `kind` instead of `parts`."""
    parts: dict[str, PartConfig] = field(default_factory=dict)
    """Parts by name; the score is their weighted sum."""

    @property
    def is_given(self) -> bool:
        return bool(self.kind is not None or self.args or self.parts)

    def parts_by_name(self, key: str) -> Mapping[str, tuple[str, PartConfig]]:
        """Return name -> (key path of the settings, the settings) of every part. In the short form, the part is named
        after its kind, or after the function of a user's own reward. `key`: key path of this section."""
        if self.kind is not None:
            name = self.kind.rpartition(":")[2].rpartition(".")[2]
            return {name: (key, PartConfig(self.kind, args=self.args))}
        return {name: (f"{key}.parts.{name}", part) for name, part in self.parts.items()}


@dataclass
class RewardConfig(RewardPartsConfig):
    """The reward of a response: the weighted sum of its parts, normalised over the run."""

    trust_answers: bool = False
    """true: score even if this host's kernel cannot confine code that evaluates sampled text. This holds for
    `evaluate.reward` too."""
    normalize: NormalizeConfig = field(default_factory=NormalizeConfig)


def reward_problems(config: RewardConfig) -> Iterator[Problem]:
    """Yield the problems of section `reward` that do not depend on other sections."""
    if not config.is_given:
        need = (
            "a run needs a reward: reward.kind=NAME for one part, or reward.parts={NAME: {kind: .., weight: .., args: "
            "{..}}, ..}"
        )
        yield Problem("reward.parts", {}, need)
    yield from parts_problems(config, "reward")


def source_problems(
    config: RewardPartsConfig, key: str, prompts_url: str, url_key: str = "prompts.url"
) -> Iterator[Problem]:
    """Yield a problem for each reward part of kind `reasoning_gym` if the prompts have another source than
    reasoning-gym. `url_key`: key path of `prompts_url`."""
    for where, part in config.parts_by_name(key).values():
        if part.kind == "reasoning_gym" and not prompts_url.startswith(REASONING_SCHEME):
            need = f"needs {url_key}={REASONING_SCHEME}TASK (given {prompts_url!r}); `answer` is for any source"
            yield Problem(f"{where}.kind", part.kind, need)


def reward_model_parts(
    config: RewardPartsConfig, key: str, kinds: tuple[str, ...] = ("model",)
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (key path of the arguments, the arguments) of every part of these kinds, inside ensembles too."""
    for where, part in config.parts_by_name(key).values():
        yield from _model_arguments({"kind": part.kind, "args": part.args}, where, kinds)


def arguments_problems(kind: object, args: Mapping[str, Any], key: str) -> Iterator[Problem]:
    """Yield the problems of a reward's arguments without which `reward_model_parts` cannot find the models: a scoring
    model must have a path, and the members of an ensemble must be rewards. `key`: key path of the arguments."""
    if kind in SCORING_MODELS and not isinstance(args.get("path"), str):
        yield Problem(f"{key}.path", args.get("path"), "must be given, as the directory of the model that scores")
    elif kind == "ensemble":
        yield from members_problems(args.get("members"), f"{key}.members")


def members_problems(members: object, key: str) -> Iterator[Problem]:
    """Yield the problems of an ensemble's members. `key`: key path of the members."""
    if not isinstance(members, Mapping) or len(members) < 2:
        yield Problem(key, members, "an ensemble has 2 members or more, as NAME: {kind: .., args: ..}")
        return
    for name, member in members.items():
        if _is_member(member):
            yield from arguments_problems(member["kind"], member.get("args", {}), f"{key}.{name}.args")
        else:
            yield Problem(f"{key}.{name}", member, "must have a kind and may have args, nothing else")


def _is_member(given: object) -> bool:
    return (
        isinstance(given, Mapping)
        and {"kind"} <= given.keys() <= {"kind", "args"}
        and isinstance(given.get("args", {}), Mapping)
    )


def judge_problems(config: RewardPartsConfig, key: str, responses: int, deadline_s: float) -> Iterator[Problem]:
    """Yield the problems of the section's judges. `responses`: number of responses to each prompt. `deadline_s`: time
    limit of a node, in seconds."""
    for where, args in reward_model_parts(config, key, JUDGES):
        if args.get("against") == "group" and responses < 2:
            need = (
                "compares the responses to a prompt, and there is only one: set rollout.responses_per_prompt to 2 or "
                "more; evaluations sample one response and need an evaluate.reward of their own"
            )
            yield Problem(f"{where}.against", "group", need)
        waits = [args.get("retry_s", RETRY_S), args.get("timeout_s", TIMEOUT_S)]
        if "url" in args and all(isinstance(s, int | float) for s in waits) and sum(waits) >= deadline_s:
            need = (
                f"with timeout_s = {waits[1]:g} must be less than cluster.deadline_s = {deadline_s:g}, after which the "
                "node counts as lost"
            )
            yield Problem(f"{where}.retry_s", waits[0], need)


def judge_notes(config: RewardPartsConfig, key: str) -> Iterator[str]:
    """Yield a warning for each judge of this section whose arguments have `delimit: false`. Such a judge cannot tell
    the response from the rubric. `key`: key path of the section."""
    for where, args in reward_model_parts(config, key, JUDGES):
        if args.get("delimit") is False:
            yield undelimited_note(where)


def undelimited_note(key: str) -> str:
    """Return the warning about a judge with `delimit: false`: it cannot tell the response from the rubric. `key`: key
    path of the judge's arguments."""
    return (
        f"{key}.delimit is false: the judge cannot tell a response from its rubric, unless the rubric has its own "
        "delimiters that no response can contain (docs/judges.md)"
    )


def _model_arguments(
    part: Mapping[str, Any], key: str, kinds: tuple[str, ...]
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    args = part.get("args", {})
    if part.get("kind") in kinds:
        yield f"{key}.args", args
    elif part.get("kind") == "ensemble":
        for name, member in args.get("members", {}).items():
            yield from _model_arguments(member, f"{key}.args.members.{name}", kinds)


def parts_problems(config: RewardPartsConfig, key: str) -> Iterator[Problem]:
    """Yield the problems of a section's parts. Only settings of this section are checked."""
    if config.kind is not None and config.parts:
        need = f"{key}.kind is the short form for a single part: give either it or {key}.parts"
        yield Problem(f"{key}.kind", config.kind, need)
    elif config.kind is None and config.args:
        need = f"need {key}.kind; or set {key}.parts.NAME.args"
        yield Problem(f"{key}.args", config.args, need)
    for where, part in config.parts_by_name(key).values():
        yield from arguments_problems(part.kind, part.args, f"{where}.args")
    for name, part in config.parts.items():
        yield from plain_name(dots=False).problems({f"{key}.parts.{name}": name})
        if ":" not in part.kind and part.timeout_s != TIMEOUT_S:
            need = (
                f"{part.kind} has no time-out for a batch: leave it out (it is for your own rewards, module:function"
                + {
                    "ensemble": "; members of an ensemble have theirs in args)",
                    "format": "; args.timeout_s bounds one answer)",
                    "reasoning_gym": "; args.timeout_s bounds one answer)",
                }.get(part.kind, ")")
            )
            yield Problem(f"{key}.parts.{name}.timeout_s", part.timeout_s, need)
        if ":" not in part.kind and part.kind != "ensemble":
            for setting in ("network", "environment", "writes"):
                if given := getattr(part, setting):
                    need = f"is for your own rewards (module:function); leave it out for {part.kind}"
                    yield Problem(f"{key}.parts.{name}.{setting}", given, need)
    if config.parts and not any(part.weight for part in config.parts.values()):
        weights = {name: part.weight for name, part in config.parts.items()}
        yield Problem(
            f"{key}.parts", weights, "all weights are 0, so all scores would be 0: set at least one that is not"
        )
