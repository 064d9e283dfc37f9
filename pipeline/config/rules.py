"""The rules of a run's config across its sections, and the list of all problems. Reads no model and no data.

A rule about one setting stands with its field. A rule about several settings of a section stands beside the section's
dataclass. The other rules are here:

    the whole config       `_problems_across`
    rows and layouts       `_gang_problems`, `_reuse_problems`
    settings without use   `_unread_problems`, `_normalize_problems`; `length_notes` for allowed ones
    the engine's kind      `_engine_problems`
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import fields, is_dataclass
from typing import Any

from pipeline.config.placement import default_placement, placement_problems
from pipeline.config.run import RunConfig
from pipeline.config.sections import (
    alarms_problems,
    checkpoint_problems,
    cluster_problems,
    evaluate_problems,
    mismatch_problems,
    rollout_problems,
    tracking_problems,
)
from pipeline.config.slurm import slurm_placement_problems, slurm_problems
from pipeline.errors import refuse
from pipeline.graph.graph import Gang
from stages.engines.capabilities import Capabilities, able
from stages.engines.config import engine_problems
from stages.models.config import model_problems, sampling_problems
from stages.models.protocol import Role
from stages.models.spec import is_random
from stages.ppo.config import GROUPED, ppo_problems
from stages.rewards.config import REASONING_SCHEME, RewardConfig, judge_problems, reward_problems, source_problems
from storage.config import EvaluationPromptsConfig, PromptsConfig, prompts_problems
from storage.problems import Problem, divides, mentions, setting_problems, unread_problems


def validate(config: RunConfig) -> None:
    """Raise ConfigError with every value that cannot work. Reads no model and no data; `preflight` does."""
    refuse(run_problems(config))


def run_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of each setting and section, and then the problems across sections. A problem across sections
    is left out if it mentions a setting or section that has a problem already."""
    problems = _section_problems(config)
    yield from problems
    wrong = [problem.key for problem in problems]
    sound, replaced = _without_problems(config, wrong) if wrong else (config, [])
    for problem in _problems_across(sound):
        about = f"{problem.key}: {problem.need}"
        if not mentions(problem, wrong) and not any(f"{section}." in about for section in replaced):
            yield problem


def _without_problems(config: RunConfig, wrong: Sequence[str]) -> tuple[RunConfig, list[str]]:
    """Return a copy of the config without the known problems, so that problems between sections can be found, and the
    names of the sections that were replaced as a whole. A setting in `wrong` gets its default, or 1 if that number has
    a problem. A section is replaced if a wrong key has no default, or if the section still has problems."""
    sound, usual = deepcopy(config), _valid_config()
    replaced = {key.partition(".")[0] for key in wrong if not set_default(sound, key)}
    for section in replaced:
        setattr(sound, section, getattr(usual, section))
    for problem in _section_problems(sound):
        if type(problem.given) is int:  # a number that does not divide another one; 1 does
            set_default(sound, problem.key, 1)
    for section in {problem.key.partition(".")[0] for problem in _section_problems(sound)}:
        setattr(sound, section, getattr(usual, section))
        replaced.add(section)
    return sound, sorted(replaced)


def _valid_config() -> RunConfig:
    """Return a config in which every section is valid. Its sections can replace wrong sections of another config."""
    reward, placement = RewardConfig(kind="characters"), default_placement()
    return RunConfig(name="run", reward=reward, placement=placement)


def set_default(config: RunConfig, key: str, value: object = None) -> bool:
    """Set the setting `key` to its default, or to `value` if it is given. For an element of a list (`key[0]`), set the
    list. Return False, and change nothing, if no section has such a setting."""
    *path, name = key.partition("[")[0].split(".")
    owner: Any = config
    for part in path:
        owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
    if not is_dataclass(owner) or name not in {field.name for field in fields(owner)}:
        return False
    kind: Any = type(owner)
    setattr(owner, name, getattr(kind(), name) if value is None else value)
    return True


def _section_problems(config: RunConfig) -> list[Problem]:
    """Return the problems of each setting, and the problems inside each section."""
    return [
        *setting_problems(config),
        *model_problems(config.model),
        *prompts_problems(config.prompts),
        *rollout_problems(config.rollout),
        *sampling_problems(config.sampling),
        *engine_problems(config.engine),
        *reward_problems(config.reward),
        *ppo_problems(config.ppo),
        *placement_problems(config.placement, critic=config.has_critic),
        *evaluate_problems(config.evaluate),
        *mismatch_problems(config.mismatch),
        *alarms_problems(config.alarms),
        *checkpoint_problems(config.checkpoint),
        *tracking_problems(config.tracking),
        *cluster_problems(config.cluster),
        *slurm_problems(config.slurm),
    ]


def _problems_across(config: RunConfig) -> Iterator[Problem]:
    yield from source_problems(config.reward, "reward", config.prompts.url)
    scored = config.evaluation_source or config.prompts
    where = "prompts.url" if scored is config.prompts else "evaluate.prompts.url"
    key, held_out_reward = config.held_out_reward
    yield from source_problems(held_out_reward, key, scored.url, where)
    responses, deadline_s = config.rollout.responses_per_prompt, config.cluster.deadline_s
    yield from judge_problems(config.reward, "reward", responses, deadline_s)
    if config.evaluate.every:
        key, held_out_reward = config.held_out_reward
        yield from judge_problems(held_out_reward, key, 1, deadline_s)
    yield from divides("ppo.minibatches", config.ppo.minibatches, "rollout.rows", config.rollout.rows)
    if config.ppo.advantage in GROUPED and config.rollout.responses_per_prompt < 2:
        need = (
            f"ppo.advantage={config.ppo.advantage} compares the responses to a prompt: 2 or more (4 to 16 are usual), "
            "or ppo.advantage=reinforce_pp, which compares with the whole step"
        )
        yield Problem("rollout.responses_per_prompt", config.rollout.responses_per_prompt, need)
    if config.ppo.advantage == "group" and config.ppo.kl.where == "reward" and config.ppo.kl.coef:
        # Not a problem of section `ppo` alone, which would hide the problem above from who tries GRPO first.
        need = (
            "ppo.advantage=group divides by the deviation of a prompt's rewards; if all scores are equal, only the KL "
            "is left in it: ppo.kl.where=loss (as GRPO has it), ppo.advantage=group_mean or ppo.kl.coef=0"
        )
        yield Problem("ppo.kl.where", config.ppo.kl.where, need)
    yield from _normalize_problems(config)
    yield from _unread_problems(config)
    yield from _reuse_problems(config)
    yield from slurm_placement_problems(config.slurm, config.placement, config.gangs())
    warmup = config.ppo.critic_warmup_steps
    if warmup >= config.steps:
        need = f"must be below steps = {config.steps}: in no other step is the policy trained"
        yield Problem("ppo.critic_warmup_steps", warmup, need)
    if config.evaluate.every != 0:
        key, held_out = "prompts.held_out", config.prompts.held_out
        if config.evaluation_source is not None:
            if held_out:
                need = "the evaluated prompts are those of evaluate.prompts.url: give prompts.held_out=0 too"
                yield Problem(key, held_out, need)
            key, held_out = "evaluate.prompts.max", config.evaluate.prompts.max
        if held_out is not None:
            if held_out < 2:
                need = "evaluation needs 2 or more (evaluate.every=0: none)"
                yield Problem(key, held_out, need)
            yield from divides("evaluate.shards", config.evaluate.shards, key, held_out)
        heat = config.evaluate.temperature
        if config.evaluate.select.max_kl is not None and heat not in (None, config.sampling.temperature):
            need = (
                f"must be null or sampling.temperature ({config.sampling.temperature:g}) under evaluate.select.max_kl: "
                "else the KL of held-out responses is not the policy's"
            )
            yield Problem("evaluate.temperature", heat, need)
    for gang in config.gangs():
        if gang.is_ordered:
            yield from _gang_problems(config, gang)
    yield from _engine_problems(config)
    if config.alarms.staleness_steps is not None and config.rollout.versions == "exact":
        need = "every row is at the bound by design under rollout.versions=exact: latest, or null"
        yield Problem("alarms.staleness_steps", config.alarms.staleness_steps, need)
    generating = config.placement.roles[Role.GENERATE]
    workers = config.placement.gangs[generating].workers
    if config.cluster.migrate_rows and workers == 1:
        key = f"placement.gangs.{generating}.workers"
        need = f"needs {key} of 2 or more (given {workers}); with one replica: false"
        yield Problem("cluster.migrate_rows", True, need)


def length_notes(config: RunConfig) -> Iterator[str]:
    """Yield notes about settings that are allowed, but larger than the number of steps can use."""
    trained = {Role.POLICY: config.model.policy} | ({Role.CRITIC: config.model.critic} if config.has_critic else {})
    for role, optimizer in trained.items():
        if optimizer.warmup_steps > config.steps:
            yield (
                f"model.{role}.warmup_steps={optimizer.warmup_steps} is more than steps={config.steps}: the learning "
                f"rate ends at {config.steps / optimizer.warmup_steps:.0%} of model.{role}.lr"
            )
    most = max(config.steps - 1, 1)
    if config.staleness > most:
        yield f"staleness={config.staleness} has the effect of staleness={most}, because steps={config.steps}"


def _unread_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each given setting that has no effect because of other settings."""
    if "critic" in config.alarms.stop and not config.has_critic:
        need = f"ppo.advantage={config.ppo.advantage} trains no critic: leave it out"
        yield Problem("alarms.stop", "critic", need)
    if config.ppo.advantage not in GROUPED:
        need = f"ppo.advantage={config.ppo.advantage} compares no groups: leave it out"
        for rule in {"equal_groups", "cut_responses"} & {*config.alarms.stop}:
            yield Problem("alarms.stop", rule, need)
    if "mismatch" in config.alarms.stop and not config.mismatch.rows:
        need = "without canaries (mismatch.rows=0) there is no alarm to stop at: set mismatch.rows, or leave it out"
        yield Problem("alarms.stop", "mismatch", need)
    gpus = {gang.name: gang.gpus for gang in config.gangs()}
    for number, group in enumerate(config.placement.device_sharing):
        for name in group:
            if gpus.get(name) == 0:
                need = "computes nothing on GPUs: it has no models, or placement.gangs.*.device is cpu; leave it out"
                yield Problem(f"placement.device_sharing.{number}", name, need)
    for name, settings in config.placement.gangs.items():
        if settings.device == "cpu" and not config.scoring_models():
            yield Problem(f"placement.gangs.{name}.device", "cpu", "no reward has a model: auto")
    sources: dict[str, PromptsConfig | EvaluationPromptsConfig] = {
        "prompts": config.prompts,
        "evaluate.prompts": config.evaluate.prompts,
    }
    for key, source in sources.items():
        if source.url is not None and source.url.startswith(REASONING_SCHEME):
            why = f"problems of {REASONING_SCHEME} are made, not read from a field: a file as {key}.url"
            yield from unread_problems(key, source, why, ("field",))
    if is_random(config.model.path) and config.model.pad_token is not None:
        need = f"{config.model.path} has its own tokenizer, which pads with byte 0: leave it out"
        yield Problem("model.pad_token", config.model.pad_token, need)


def _normalize_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each setting of `reward.normalize` whose effect `ppo.advantage` cancels."""
    normalize, ppo = config.reward.normalize, config.ppo
    if normalize.scale and normalize.clip is None and ppo.advantage == "group":
        need = (
            "ppo.advantage=group divides by the deviation of each prompt's rewards, so that another division before it "
            "changes nothing: false, a reward.normalize.clip, or ppo.advantage=group_mean"
        )
        yield Problem("reward.normalize.scale", True, need)
    if normalize.mean and normalize.clip is None and ppo.advantage in GROUPED:
        need = (
            f"ppo.advantage={config.ppo.advantage} subtracts the mean of each prompt's responses, so that another one "
            "before it changes nothing: false, or a reward.normalize.clip, which is around that mean"
        )
        yield Problem("reward.normalize.mean", True, need)


def _reuse_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems of `reuse_forward`. An update can reuse a forward pass only if both have the same
    micro-batches."""
    for role in (Role.POLICY, Role.CRITIC):
        if role not in config.model.reuse_forward or (role is Role.CRITIC and not config.has_critic):
            continue
        gang = config.placement.gangs[config.placement.roles[role]]
        needs: dict[str, tuple[object, object]] = {
            "ppo.minibatches": (config.ppo.minibatches, 1),
            "rollout.shards": (config.rollout.shards, 1),
            "its gang's layout.pipeline": (gang.layout.pipeline, 1),
            "its gang's offload": (gang.offload, "none"),
        }
        if role is Role.POLICY:
            needs["ppo.proximal"] = (config.ppo.proximal, "recompute")
        for key, (given, wanted) in needs.items():
            if given != wanted:
                need = (
                    f"the update's micro-batches must be those that were computed: needs {key}={wanted} (given {given})"
                )
                yield Problem("model.reuse_forward", str(role), need)


def _gang_problems(config: RunConfig, gang: Gang) -> Iterator[Problem]:
    """Yield the problems of an ordered gang, whose workers act as one parallel group. Its data-parallel ranks must
    divide the rows, a layout for rewards needs a reward with a model, and `offload: idle` does not go with LoRA."""
    key, layout = f"placement.gangs.{gang.name}", config.placement.gangs[gang.name].layout
    if gang.divides_scorers:  # its ranks divide a shard's rows by tokens, so any number of rows will do
        if not config.scoring_models():
            need = "that gang's rewards have no model to divide (kind: model, local_judge): leave the layout out"
            yield Problem(f"{key}.layout", {"tensor": layout.tensor, "pipeline": layout.pipeline}, need)
        return
    data = gang.workers // (layout.tensor * layout.pipeline)
    minibatch_rows = config.rollout.rows // config.ppo.minibatches
    if minibatch_rows % data or config.rows_per_shard % data:
        yield Problem(
            f"{key}.workers",
            gang.workers,
            f"gives {data} data-parallel ranks, which must divide the rows of a shard ({config.rows_per_shard}) and of "
            f"a minibatch ({minibatch_rows})",
        )
    if config.model.lora.rank and config.placement.gangs[gang.name].offload == "idle":
        need = (
            "the roles share their frozen weights under model.lora.rank > 0, so that none can leave: none or gradients"
        )
        yield Problem(f"{key}.offload", "idle", need)


# ---- What the engine can do ------------------------------------------------------------------------------

PLAIN_TEMPERATURES = (0.0, 1.0)
"""Evaluation temperatures that are allowed if the engine computes log-probs only for temperature 1. At 1 a token is
drawn from the softmax of the logits. At 0 it is the arg max of the logits."""


def _engine_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that the engine's capabilities do not allow. The checked capabilities do not
    depend on the device. (`preflight.py` lists the guarantees that an accepted run lacks.)"""
    can = config.capabilities()
    if config.in_flight and "inflight" not in can.updates:
        others = _other_engines_text(config, lambda c: "inflight" in c.updates)
        need = f"it cannot load new weights under rows in flight: must be exact or latest{others}"
        yield _engine_problem(config, "rollout.versions", config.rollout.versions, need)
    if config.cluster.migrate_rows and not can.migration:
        need = (
            f"its rows cannot move between replicas: must be false{_other_engines_text(config, lambda c: c.migration)}"
        )
        yield _engine_problem(config, "cluster.migrate_rows", True, need)
    if is_random(config.model.path) and "tensors" not in can.sources:
        need = "it reads the model from files: needs a Hugging Face directory"
        yield _engine_problem(config, "model.path", config.model.path, need)
    if can.distributions == "plain":
        yield from _plain_problems(config)
    if "mismatch" in config.alarms.stop and config.staleness > 0 and not can.scores:
        need = "it cannot score given tokens, so stale rows have no canaries to stop at: leave it out, or staleness=0"
        yield _engine_problem(config, "alarms.stop", "mismatch", need)


def _plain_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield a problem for each setting that changes the logits before a token is drawn. Call this only for an engine
    whose log-probs ignore such changes (`Capabilities.distributions` is plain)."""
    sampling, other = config.sampling, _other_engines_text(config, lambda c: c.distributions == "any")
    if sampling.temperature != 1:
        need = f"its log-probs are for temperature 1 even if it draws at another: must be 1{other}"
        yield _engine_problem(config, "sampling.temperature", sampling.temperature, need)
    if sampling.suppress_token_ids:
        need = f"its log-probs do not exclude suppressed tokens: must be []{other}"
        yield _engine_problem(config, "sampling.suppress_token_ids", sampling.suppress_token_ids, need)
    if sampling.min_new_tokens:
        need = f"its log-probs do not exclude an EOS that comes too early: must be 0{other}"
        yield _engine_problem(config, "sampling.min_new_tokens", sampling.min_new_tokens, need)
    heat = config.evaluate.temperature
    if config.evaluate.every != 0 and heat not in (None, *PLAIN_TEMPERATURES):
        need = f"its log-probs are for temperature 1: must be 0, 1 or null{other}"
        yield _engine_problem(config, "evaluate.temperature", heat, need)


def _engine_problem(config: RunConfig, key: str, given: object, need: str) -> Problem:
    return Problem(key, given, f"engine.kind={config.engine.kind}: {need}")


def _other_engines_text(config: RunConfig, can: Callable[[Capabilities], bool]) -> str:
    """Return the part of a message that suggests engines with a capability, or ""."""
    others = able(config.engine, "cpu", can)
    return f" (or engine.kind={' or '.join(others)})" if others else ""
