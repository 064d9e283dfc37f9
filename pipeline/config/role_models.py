"""Check that the models of reference, critic and rewards fit the policy's model. A role that has the policy's own model
needs no check."""

from __future__ import annotations

import dataclasses
import json
from functools import partial
from importlib import import_module
from pathlib import Path

from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, refusal, refuse, run_checks
from stages.models.config import ModelConfig
from stages.models.hf_files import head_problem, is_classifier, read_vocabulary, weights_fault
from stages.models.layouts import blocks_problems, layout_problems
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import EMBEDDING, ModelSpec, is_random, layer_and_part, read_spec, tensor_shapes
from storage.exports import RECORD, export_faults, has_sums


def read_model(key: str, path: str, *, weights: bool = True) -> ModelSpec:
    """Return a model's architecture. Raises ConfigError, with `key` as its key, if the model cannot be used. `weights`:
    False if the model's config.json is enough, so that files of weights may be missing."""
    try:
        model = read_spec(path)
    except FileNotFoundError as error:
        raise ConfigError(key, f"given {path!r}; {error}. `make assets` fetches the demo's model") from error
    except json.JSONDecodeError as error:
        raise ConfigError(key, f"given {path!r}; its config.json is not JSON: {error}") from error
    except ValueError as error:
        raise ConfigError(key, f"given {path!r}; {error}") from error
    fault = weights_fault(path, model) if weights and not is_random(path) else None
    if fault is not None:
        raise ConfigError(key, f"given {path!r}; {fault}")
    return model


def model_paths(config: RunConfig) -> dict[str, str]:
    """Return directory -> key path of the first setting that names it, for the models of policy, reference, critic and
    rewards of kind `model`. Models with random weights are left out. Assumes that the config's rewards can be built."""
    model = config.model
    paths = [("model.path", model.path), ("model.reference_path", model.reference_path)]
    paths += [("model.critic_path", model.critic_path)] if config.has_critic else []
    paths += [(f"{where}.path", str(args["path"])) for where, args in config.reward_models().items()]
    keys: dict[str, str] = {}
    for key, path in paths:
        if path is not None and not is_random(path):
            keys.setdefault(path, key)
    return keys


def check_exported(key: str, path: str) -> None:
    """Check every byte of a model that this program exported. Raises ConfigError if a byte has changed. Other models
    are not checked."""
    for fault in export_faults(Path(path)) if has_sums(Path(path)) else ():
        changed = f"If it was changed on purpose, remove {RECORD}, which has the sums"
        raise ConfigError(key, f"given {path!r}; {fault}. Export it again. {changed}")


def check_output_layer(key: str, path: str) -> None:
    """Raise ConfigError if the model is a reward model, which has no output layer."""
    if is_classifier(path):
        raise ConfigError(
            key,
            f"given {path!r}; it is a reward model, which has no output layer: give the language model that it was "
            "trained from (model.critic_path may be a reward model)",
        )


def role_models(config: RunConfig, policy: ModelSpec, *, weights: bool = True) -> dict[Role, ModelSpec]:
    """Return role -> architecture of its model, for policy and reference, and for the critic if one is trained.
    `policy`: the architecture of the model at `model.path`. `weights`: False to read only each config.json, and to skip
    the checks that need weights.

    Raises:
        ConfigError: a model cannot be read, or does not suit the run. The reference must be a language model, and a
            head of the critic must give one score per row. Both need the policy's vocabulary, the policy's frozen
            blocks, and a context that is long enough for a row. `model.frozen_blocks` and `model.critic_blocks` must
            fit the number of blocks of the models.
    """
    others = (Role.REFERENCE, Role.CRITIC) if config.has_critic else (Role.REFERENCE,)
    specs = dict.fromkeys((Role.POLICY, *others), policy)
    own = [role for role in others if config.model.path_of(role) != config.model.path]
    models = run_checks(*(partial(_read_own_model, config, role, policy, weights=weights) for role in own))
    specs |= zip(own, models, strict=True)
    refuse(problem for role, spec in specs.items() for problem in blocks_problems(config.model, role, spec))
    return specs


def _read_own_model(config: RunConfig, role: Role, policy: ModelSpec, *, weights: bool) -> ModelSpec:
    """Return the architecture of a reference or critic that has another model than the policy. Arguments and errors are
    those of `role_models`."""
    key, path = f"model.{role}_path", config.model.path_of(role)
    other = read_model(key, path, weights=weights)
    if role is Role.REFERENCE:
        check_output_layer(key, path)
    wrong = head_problem(path, other) if weights and role is Role.CRITIC else None
    if wrong is not None:
        raise ConfigError(key, f"given {path!r}; {wrong}")
    _check_vocabulary(config, key, path, policy, other, exactly=role is Role.REFERENCE)
    if config.seq > other.max_positions:
        row = "a row of prompts.max_tokens + sampling.max_new_tokens"
        raise ConfigError(key, f"given {path!r}; {row} has {config.seq} tokens, its context is {other.max_positions}")
    if weights and config.model.frozen_blocks:
        _check_trunk(config, key, path, policy, other)
    return other


def check_reward_models(config: RunConfig, policy: ModelSpec) -> None:
    """Check that each reward model can score this policy's rows, token by token, and that the process of a reward model
    or local judge holds no other model. Assumes that the config's rewards can be built.

    Raises:
        ConfigError: a vocabulary lacks tokens of the policy or numbers them differently; a context is too short for a
            row and an EOS; the gang that scores holds another model or an engine; or its layout cannot divide the
            model of a reward.
    """
    for where, args in config.reward_models().items():
        key, path = f"{where}.path", str(args["path"])
        model = read_spec(path)
        _check_vocabulary(config, key, path, policy, model, exactly=False)
        if config.seq + 1 > model.max_positions:
            row = "a row of prompts.max_tokens + sampling.max_new_tokens and an EOS"
            raise ConfigError(
                key, f"given {path!r}; {row} has {config.seq + 1} tokens, its context is {model.max_positions}"
            )
    for where, args in config.scoring_models().items():
        gang = next(gang for gang in config.gangs() if Role.SCORE in gang.roles)
        others = sorted(gang.roles & {Role.GENERATE, *MODEL_ROLES})
        if others:
            raise ConfigError(
                "placement.roles.score",
                f"given {gang.name!r}; {where.removesuffix('.args')} is a model of the scoring worker's own, whose "
                f"process can have no other, and that gang has {', '.join(others)}: a gang of its own (gangs: "
                "{score: {}}, roles: {score: score})",
            )
        check_scorer_layout(config, str(args["path"]), read_spec(str(args["path"])))


def check_scorer_layout(config: RunConfig, path: str, spec: ModelSpec) -> None:
    """Raise ConfigError if the layout of the gang that scores cannot divide a reward's model."""
    name = config.placement.roles[Role.SCORE]
    layout = config.placement.gangs[name].layout
    divided = any(gang.divides_scorers for gang in config.gangs() if gang.name == name)
    prefix = f"placement.gangs.{name}."
    for problem in layout_problems(ModelConfig(), Role.POLICY, spec, layout, prefix) if divided else ():
        raise refusal(dataclasses.replace(problem, need=f"{path!r} is scored with: {problem.need}"))


def _check_vocabulary(
    config: RunConfig, key: str, path: str, policy: ModelSpec, other: ModelSpec, *, exactly: bool
) -> None:
    """Raise ConfigError if another model's vocabulary lacks a token of the policy or numbers it differently. `exactly`:
    True to refuse a vocabulary with more tokens too, because the model would give some probability to these tokens."""
    mine, theirs = policy.vocab_size, other.vocab_size
    if theirs < mine or (exactly and theirs != mine):
        need = f"{mine}" if exactly else f"{mine} or more"
        raise ConfigError(
            key,
            f"given {path!r}; its vocabulary has {theirs} tokens, the policy ({config.model.path!r}) needs {need}",
        )
    own, its = read_vocabulary(config.model.path), read_vocabulary(path)
    if own is None or its is None:
        return  # without a tokenizer only the size of the vocabulary is known
    other_ids = [token for token, number in own.items() if its.get(token) != number]
    if other_ids:
        token = min(other_ids, key=own.__getitem__)
        raise ConfigError(
            key,
            f"given {path!r}; its vocabulary is another than the policy's ({config.model.path!r}): {token!r} is token "
            f"{own[token]} there and {its.get(token, 'none')} here, and {len(other_ids) - 1} more differ",
        )


def _check_trunk(config: RunConfig, key: str, path: str, policy: ModelSpec, other: ModelSpec) -> None:
    """Raise ConfigError unless the other model can share the policy's frozen blocks and embeddings: the same
    architecture but for the numbers of blocks and positions, the same weights there in `model.dtype`, and more blocks
    than the frozen ones."""
    frozen, own_path = config.model.frozen_blocks, config.model.path
    shared = f"model.frozen_blocks = {frozen} are shared with the policy ({own_path!r})"
    hint = f"use a model with the same lowest blocks, or model.frozen_blocks=0, or {key}=null"
    alike = dataclasses.replace(other, num_layers=policy.num_layers, max_positions=policy.max_positions)
    if alike != policy or other.num_layers <= frozen:
        raise ConfigError(key, f"given {path!r}; {shared}, but its architecture differs from the policy's: {hint}")
    names = [name for name in tensor_shapes(policy) if _is_frozen(name, frozen)]
    # Loads torch, which takes seconds, and few runs get here.
    weights = import_module("stages.models.hf_weights")
    difference = weights.first_difference(own_path, path, names, config.model.dtype)
    if difference is not None:
        raise ConfigError(key, f"given {path!r}; {shared}, but its {difference} differs from the policy's: {hint}")


def _is_frozen(name: str, frozen_blocks: int) -> bool:
    layer = layer_and_part(name)
    return name == EMBEDDING or (layer is not None and layer[0] < frozen_blocks)
