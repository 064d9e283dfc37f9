"""The models of policy, reference, critic and rewards, where they are not the policy's: do they fit together?

May import torch, stages.models (spec, hf_config, hf_files, layouts, protocol, reward_files), storage.exports and the
schema of a run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path

import torch

from pipeline.config.errors import ConfigError, refusal
from pipeline.config.run import RunConfig
from stages.models.hf_config import RANDOM_TINY
from stages.models.hf_files import read_some_weights, read_vocabulary
from stages.models.layouts import blocks_problems
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.reward_files import head_problem, is_classifier
from stages.models.spec import EMBEDDING, ModelSpec, layer_and_part, read_spec, tensor_shapes
from storage.exports import RECORD, export_faults, has_sums


def read_model(key: str, path: str) -> ModelSpec:
    """The architecture of a model that can be used. Raises ConfigError, naming `key`."""
    try:
        model = read_spec(path)
    except FileNotFoundError as error:
        raise ConfigError(key, f"given {path!r}; {error}. `make assets` fetches the demo's model") from error
    except json.JSONDecodeError as error:
        raise ConfigError(key, f"given {path!r}; its config.json is not JSON: {error}") from error
    except ValueError as error:
        raise ConfigError(key, f"given {path!r}; {error}") from error
    if path != RANDOM_TINY and not any(Path(path).glob("*.safetensors")):
        raise ConfigError(key, f"given {path!r}; it holds no .safetensors file")
    return model


def model_paths(config: RunConfig) -> dict[str, str]:
    """The directories that models are read from, and the key that names each first. For rewards that can be built."""
    model = config.model
    given = [("model.path", model.path), ("model.reference_path", model.reference_path)]
    given += [("model.critic_path", model.critic_path)] if config.has_critic else []
    given += [(f"{where}.path", str(args["path"])) for where, args in config.reward_models().items()]
    found: dict[str, str] = {}
    for key, path in given:
        if path is not None and path != RANDOM_TINY:
            found.setdefault(path, key)
    return found


def check_exported(key: str, path: str) -> None:
    """Reads every byte of a model that this program has exported. Raises ConfigError where one is another now."""
    for fault in export_faults(Path(path)) if has_sums(Path(path)) else ():
        changed = f"If it was changed on purpose, remove {RECORD}, which has the sums"
        raise ConfigError(key, f"given {path!r}; {fault}. Export it again. {changed}")


def check_output_layer(key: str, path: str) -> None:
    """Raises ConfigError for a reward model where one is needed that gives tokens."""
    if is_classifier(path):
        raise ConfigError(
            key,
            f"given {path!r}; it is a reward model, which has no output layer: give the language model that it was "
            "trained from (model.critic_path may be a reward model)",
        )


def role_models(config: RunConfig, policy: ModelSpec) -> dict[Role, ModelSpec]:
    """The architecture of each role's model, the critic's where one is trained; `policy`: that of `model.path`.

    Raises:
        ConfigError: another model is none, has a head that does not fit, has another vocabulary, is too short for a
            row, or, where blocks are frozen and shared, has other blocks there; or `model.critic_blocks` does not suit
            the critic's.
    """
    others = (Role.REFERENCE, Role.CRITIC) if config.has_critic else (Role.REFERENCE,)
    found = dict.fromkeys((Role.POLICY, *others), policy)
    for role in others:
        key, path = f"model.{role}_path", config.model.path_of(role)
        if path == config.model.path:
            continue
        found[role] = other = read_model(key, path)
        if role is Role.REFERENCE:
            check_output_layer(key, path)
        wrong = head_problem(path, other) if role is Role.CRITIC else None
        if wrong is not None:
            raise ConfigError(key, f"given {path!r}; {wrong}")
        _check_vocabulary(config, key, path, policy, other, exactly=role is Role.REFERENCE)
        if config.seq > other.max_positions:
            row = "a row of prompts.max_tokens + sampling.max_new_tokens"
            raise ConfigError(
                key, f"given {path!r}; {row} has {config.seq} tokens, its context is {other.max_positions}"
            )
        if config.model.frozen_blocks:
            _check_trunk(config, key, path, policy, other)
    for role, spec in found.items():
        for problem in blocks_problems(config.model, role, spec):
            raise refusal(problem)
    return found


def check_reward_models(config: RunConfig, policy: ModelSpec) -> None:
    """Whether each reward model can score this policy's rows, token by token, and each, or a local judge, has a process
    to itself. For rewards that can be built.

    Raises:
        ConfigError: one has another vocabulary than the policy, or is too short for a row and an EOS; or the gang that
            scores holds another model or an engine.
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
    for where in config.scoring_models():
        gang = next(gang for gang in config.gangs() if Role.SCORE in gang.roles)
        others = sorted(gang.roles & {Role.GENERATE, *MODEL_ROLES})
        if others:
            raise ConfigError(
                "placement.roles.score",
                f"given {gang.name!r}; {where.removesuffix('.args')} is a model of the scoring worker's own, whose "
                f"process can have no other, and that gang has {', '.join(others)}: a gang of its own (gangs: "
                "{score: {}}, roles: {score: score})",
            )


def _check_vocabulary(
    config: RunConfig, key: str, path: str, policy: ModelSpec, other: ModelSpec, *, exactly: bool
) -> None:
    """Whether the policy's tokens mean the same to another model; `exactly`: and it has no others, since its
    distribution is over all of them."""
    mine, theirs = policy.vocab_size, other.vocab_size
    if theirs < mine or (exactly and theirs != mine):
        need = f"{mine}" if exactly else f"{mine} or more"
        raise ConfigError(
            key,
            f"given {path!r}; its vocabulary has {theirs} tokens, the policy ({config.model.path!r}) needs {need}",
        )
    own, its = read_vocabulary(config.model.path), read_vocabulary(path)
    if own is None or its is None:
        return  # a model without a tokenizer of its own says no more than its size
    other_ids = [token for token, number in own.items() if its.get(token) != number]
    if other_ids:
        token = min(other_ids, key=own.__getitem__)
        raise ConfigError(
            key,
            f"given {path!r}; its vocabulary is another than the policy's ({config.model.path!r}): {token!r} is token "
            f"{own[token]} there and {its.get(token, 'none')} here, and {len(other_ids) - 1} more differ",
        )


def _check_trunk(config: RunConfig, key: str, path: str, policy: ModelSpec, other: ModelSpec) -> None:
    """Whether the frozen blocks that all roles share are the same in both models."""
    frozen, own_path = config.model.frozen_blocks, config.model.path
    shared = f"model.frozen_blocks = {frozen} are shared with the policy ({own_path!r})"
    hint = f"use a model with the same lowest blocks, or model.frozen_blocks=0, or {key}=null"
    alike = dataclasses.replace(other, num_layers=policy.num_layers, max_positions=policy.max_positions)
    if alike != policy or other.num_layers <= frozen:
        raise ConfigError(key, f"given {path!r}; {shared}, but its architecture is another: {hint}")
    names = [name for name in tensor_shapes(policy) if _is_frozen(name, frozen)]
    difference = _first_difference(read_some_weights(own_path, names), read_some_weights(path, names))
    if difference is not None:
        raise ConfigError(key, f"given {path!r}; {shared}, but its {difference} is another: {hint}")


def _is_frozen(name: str, frozen_blocks: int) -> bool:
    layer = layer_and_part(name)
    return name == EMBEDDING or (layer is not None and layer[0] < frozen_blocks)


def _first_difference(mine: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> str | None:
    """Name of the first tensor that the other lacks or has other numbers in."""
    for name, tensor in mine.items():
        other = theirs.get(name)
        if other is None or not torch.equal(tensor.float(), other.float()):
            return name
    return None
