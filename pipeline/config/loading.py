"""Read and write configurations.

A config is merged from the dataclass defaults, the YAML files in the order given, and the `key=value` overrides. Later
values replace earlier ones. A source is one file or one override. `source_errors` finds unknown keys and values of a
wrong type in a source; the loaders report all errors at once.

The last part is about variants, which are trained on another run's recorded rollouts. `MAY_DIFFER` lists the settings
(patterns of `fnmatch`) in which a variant may differ from that run, its parent. Results of a variant are taken from the
parent or computed again:

    rollouts, scores, the reference's log-probs    taken as recorded, so the settings behind them are the parent's
    log-probs and values at the step's start       computed again, by the variant's own policy and critic
    advantages, both updates                       computed again
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import field, is_dataclass, make_dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.identity import Change, config_changes, config_sections, flatten_sections, has_no_effect
from pipeline.config.placement import DEFAULT_PLACEMENT
from pipeline.config.reward_model import (
    LabelConfig,
    RewardModelConfig,
    labelling_problems,
    reward_model_problems,
)
from pipeline.config.rules import run_problems, set_default, validate
from pipeline.config.run import RunConfig
from pipeline.errors import ConfigError, OtherProgramsConfig, join_errors, refusal, refuse, run_checks
from stages.engines.config import find_interpreter, interpreter
from stages.models.spec import cached_in_hub
from storage import files
from storage.config import Durability
from storage.problems import WORDS, Problem, mentions, setting_problems, type_text, value_text
from storage.redaction import redacted

SYNONYMS = {
    "model.path": ("model_name_or_path", "model_path", "sft_model_path", "pretrain"),
    "model.reference_path": ("ref_model", "ref_model_path", "ref.model_name_or_path"),
    "model.critic_path": ("critic.model.path", "critic.model_name_or_path"),
    "model.policy.lr": ("learning_rate", "actor_learning_rate", "actor.optim.lr"),
    "model.critic.lr": ("learning_rate", "critic_learning_rate", "critic.optim.lr"),
    "optimizer.lr": ("learning_rate",),
    "model.policy.warmup_steps": ("lr_warmup_steps", "warmup_ratio"),
    "model.policy.decay": ("lr_decay_style", "lr_scheduler_type"),
    "model.policy.betas": ("adam_beta1", "adam_beta2"),
    "model.policy.max_grad_norm": ("clip_grad",),
    "model.policy.micro_batch_tokens": (
        "gradient_accumulation_steps", "per_device_train_batch_size", "ppo_max_token_len_per_gpu", "max_tokens_per_gpu",
    ),
    "model.policy.micro_batch_rows": ("ppo_micro_batch_size_per_gpu",),
    "model.dtype": ("bf16", "fp16"),
    "model.lora.rank": ("lora_r", "lora_rank", "peft_config"),
    "model.lora.alpha": ("lora_alpha", "peft_config"),
    "model.lora.targets": ("target_modules", "peft_config"),
    "prompts.url": ("dataset", "prompt_dataset", "train_files"),
    "prompts.field": ("input_key", "prompt_key"),
    "prompts.max_tokens": ("max_prompt_length", "prompt_max_len"),
    "prompts.format=chat": ("apply_chat_template",),
    "prompts.too_long": ("filter_overlong_prompts", "truncation"),
    "rollout.rows": ("batch_size", "train_batch_size", "rollout_batch_size", "per_device_train_batch_size"),
    "rollout.responses_per_prompt": ("num_generations", "n_samples_per_prompt", "group_size", "n"),
    "rollout.versions=inflight": ("partial_rollout_enable",),
    "sampling.max_new_tokens": (
        "max_completion_length", "max_response_length", "max_tokens", "response_length", "generate_max_len",
    ),
    "reward.kind": ("reward_fn", "reward_func", "reward_funcs", "reward.remote_url"),
    "reward.kind=model with reward.args.path=DIR": (
        "reward_model", "reward_model_path", "reward.model_name_or_path", "reward_model.model_path",
    ),
    "reward.normalize.clip": ("reward.clip_range",),
    "reward.parts.NAME.weight": ("reward_weights",),
    "ppo.advantage": (
        "adv_estimator", "advantage_estimator", "advantage.estimator", "norm_adv_by_std_in_grpo", "scale_rewards",
    ),
    "ppo.aggregation": ("loss_agg_mode", "loss_type"),
    "ppo.epochs": ("num_iterations", "num_ppo_epochs", "ppo_epochs", "train.max_epochs"),
    "ppo.minibatches": ("num_mini_batches", "ppo_mini_batch_size", "train.batch_size"),
    "ppo.critic_warmup_steps": ("critic_warmup", "freezing_steps"),
    "ppo.truncated=mask": ("mask_truncated_completions",),
    "ppo.missing_eos_score": ("missing_eos_penalty",),
    "ppo.skip_equal_groups": ("filter_groups", "filter_groups.enable", "dynamic_filtering_enable"),
    "ppo.kl.coef": ("beta", "init_kl_coef", "kl_coef", "kl_loss_coef"),
    "ppo.kl.estimator": ("kl_estimator", "kl_loss_type"),
    "ppo.kl.where": ("use_kl_in_reward", "use_kl_loss"),
    "ppo.clip": ("clip_ratio", "cliprange", "epsilon", "eps_clip", "eps_clip_low_high"),
    "ppo.clip_high": ("clip_ratio_high", "epsilon_high", "eps_clip_low_high"),
    "ppo.dual_clip": ("clip_ratio_c", "delta"),
    "ppo.value_clip": ("cliprange_value",),
    "ppo.correction": ("vllm_importance_sampling_correction",),
    "ppo.correction_cap": ("rollout_is_threshold", "vllm_importance_sampling_clip_max"),
    "ppo.lam": ("gae_lambda", "lambd"),
    "ppo.entropy_coef": ("entropy_coeff",),
    "engine.kind": ("use_vllm", "vllm_mode", "rollout.name"),
    "engine.kv_budget_mb": ("gpu_memory_utilization",),
    "engine.max_rows": ("max_num_seqs",),
    "engine.tensor_parallel": ("tensor_model_parallel_size",),
    "placement.gangs.NAME.layout.recompute": ("gradient_checkpointing",),
    "placement.gangs.NAME.layout.distributed_optimizer": ("zero_stage",),
    "placement.gangs.NAME.layout.tensor": ("tensor_model_parallel_size",),
    "placement.device_sharing": ("hybrid_engine", "colocate_all", "enable_sleep"),
    "placement.gangs.NAME.workers": ("n_gpus_per_node", "nnodes", "num_engines"),
    "slurm.gangs.NAME.nodes": ("nnodes",),
    "slurm.command": ("container_image",),
    "slurm.environment": ("modules",),
    "slurm.sbatch": ("constraint", "qos"),
    "steps": ("max_steps", "num_train_epochs", "total_episodes", "total_epochs", "total_training_steps"),
    "staleness": ("async_enable", "async_queue_size", "max_off_policy_threshold", "trainer_mode"),
    "name": ("experiment_name", "run_name"),
    "runs_dir": ("output_dir",),
    "checkpoint.every": ("save_freq", "save_steps"),
    "evaluate.every": ("eval_steps", "eval.steps", "test_freq"),
    "evaluate.prompts.url": ("eval_dataset", "val_files"),
    "tracking.uri": ("report_to",),
    "tracking.also": ("report_to", "logger", "loggers"),
    "tracking.experiment": ("project_name",),
}  # fmt: skip
"""Key, or key with value -> names that other systems have for it (docs/coming-from.md). A name may begin with a
section, if the last part alone means another setting. NAME stands for any name, as in `setting_paths`."""
VALUE_SYNONYMS = {
    "grpo": "group",
    "dr_grpo": "group_mean",
    "reinforce_plus_plus": "reinforce_pp",
    "bf16": "bfloat16",
    "fp32": "float32",
    "low_var_kl": "k3",
    "token-mean": "token",
    "seq-mean-token-mean": "sequence",
}
"""Value of another system -> the value that Stageline has for it."""
_TRUNCATES = (
    "is left out on purpose: PPO needs the log-prob of a token under the distribution that sampled it, and trainer and "
    "engine would have to agree to the last bit on which tokens are cut off. Use sampling.temperature or "
    "sampling.suppress_token_ids, which both compute alike"
)
_CRITIC_WEIGHT = (
    "is not there: the critic has its own parameters and optimizer, so a weight of its loss would only scale its "
    "learning rate (model.critic.lr)"
)
_STOPS = "is not there: a response ends at a token. model.eos_token_ids names further tokens that end it"
UNSUPPORTED = {
    **dict.fromkeys(("top_p", "top_k", "min_p", "repetition_penalty"), _TRUNCATES),
    **dict.fromkeys(("stop", "stop_strings", "stop_token_ids"), _STOPS),
    "vf_coef": _CRITIC_WEIGHT,
}
"""Name of a setting that other systems have -> why Stageline does not have it, and what to use instead."""
_MAX_SUGGESTIONS = 3
_MIN_SIMILARITY = 0.8
"""Minimum similarity (the ratio of difflib) of an unknown key to a setting's name in any section, or to one of the
`SYNONYMS`, at which that setting is suggested."""
_HINTS: dict[Any, dict[str, Any]] = {}
_GIVEN = {int: 1, float: 1.0}
"""Type of a number -> value that a missing setting of this type gets while the other settings are checked. Missing
settings of other types get their key path as a text, so that a problem with this text mentions the setting."""


def _setting_types(section: Any) -> dict[str, Any]:
    """Return setting -> its type for a section's class. Cached, because the types are looked up for every key."""
    if section not in _HINTS:
        _HINTS[section] = get_type_hints(section)
    return _HINTS[section]


def source_errors(source: Any, name: str, schema: type) -> list[ConfigError]:
    """Return all errors that keep a source from being merged: unknown keys, values of a wrong type, or a content that
    is no mapping. `name`: the source's name for users."""
    if not isinstance(source, DictConfig):
        return [ConfigError(name, "a config file is a mapping of keys to values")]
    unknown = list(_unknown_keys(source, OmegaConf.structured(schema), name, schema))
    prefixes = tuple(f"{error.key}." for error in unknown)
    leaves = ((key, value) for key, value in _leaves(source) if not f"{key}.".startswith(prefixes))
    return [*unknown, *(e for key, value in leaves for e in _type_errors(key, value, name, schema))]


def is_setting(word: str, schema: type) -> bool:
    """Return True if `word` is the key path of a setting or a section of `schema`. A key below a mapping whose keys are
    names (as in `placement.gangs`) always counts, because only a config knows these names."""
    hints = _setting_types(schema)
    head, _, rest = word.partition(".")
    if head not in hints or head.startswith("_"):
        return False
    kind = hints[head]
    if is_dataclass(kind) and isinstance(kind, type) and rest:
        return is_setting(rest, kind)
    return not rest or get_origin(kind) is dict


def _unknown_keys(source: Any, schema: Any, name: str, root_schema: type, prefix: str = "") -> Iterator[ConfigError]:
    """Yield an error for each unknown key. Also yield an error for a plain value given to a section, and for a mapping
    given to a setting with a single value."""
    if not isinstance(schema, DictConfig):
        return
    if OmegaConf.get_type(schema) is dict:  # a mapping of names to sections, or to plain values
        section = schema._metadata.element_type
        for key in map(str, source) if isinstance(source, DictConfig) and is_dataclass(section) else ():
            yield from _unknown_keys(source[key], OmegaConf.structured(section), name, root_schema, f"{prefix}{key}.")
        return
    if not isinstance(source, DictConfig):
        hint = f"it holds the settings {', '.join(map(str, schema))}"
        paths = [f"{prefix}{one}" for one in map(str, schema)] if isinstance(source, str | int | float) else []
        meant = next((path for path in paths if not any(_type_errors(path, source, name, root_schema))), None)
        if meant is not None:
            hint = f"did you mean {meant}={source if isinstance(source, str) else value_text(source)}?"
        yield ConfigError(prefix[:-1], f"given {value_text(source)} (in {name}); {hint}")
        return
    for key in map(str, source):
        path = f"{prefix}{key}"
        if key not in schema.keys():  # noqa: SIM118  (`in` is False for a key without a value)
            for inside, advice in _advice(key, source._get_node(key), prefix, schema, root_schema):
                yield ConfigError(f"{prefix}{inside}", f"no such key (in {name}){advice}")
        elif not OmegaConf.is_missing(source, key) and not OmegaConf.is_interpolation(source, key):
            kind = _type_of(path, root_schema)
            if _is_single(kind) and isinstance(source[key], DictConfig):
                content: Any = OmegaConf.to_container(source[key])
                hint = "; YAML takes a text that ends in : for a mapping" if [*content.values()] == [None] else ""
                yield ConfigError(path, f"given {value_text(content)} (in {name}); must be {type_text(kind)}{hint}")
                continue
            yield from _unknown_keys(source[key], schema._get_node(key), name, root_schema, f"{path}.")


def _advice(key: str, value: Any, prefix: str, schema: DictConfig, root_schema: type) -> Iterator[tuple[str, str]]:
    """Yield (key path below the section, end of the error's message) for an unknown key, or for each key in it if it is
    a section of another system. The text says what to use instead, why there is no such setting, or what the section
    has. `prefix`: key path of the section, with a dot at its end. `schema`: the section's settings."""
    settings = [*map(str, schema)]
    sections = [name for name in settings if isinstance(schema._get_node(name), DictConfig)]
    is_misspelt = bool(difflib.get_close_matches(key.lower(), sections, 1, _MIN_SIMILARITY))
    if isinstance(value, DictConfig) and len(value) and not is_misspelt:
        content: Any = OmegaConf.to_container(value)
        inner, siblings, otherwise = [*flatten_sections(content, f"{key}.")], [], ""
    else:
        inner, siblings, otherwise = [key], settings, f"{prefix[:-1] or 'a config'} has {', '.join(settings)}"
    if not prefix:
        otherwise = "; ".join(filter(None, [otherwise, "docs/coming-from.md has the names that other systems use"]))
    for inside in inner:
        word = inside.rpartition(".")[2].lower()
        meant = _suggestions(f"{prefix}{inside}", prefix, siblings, root_schema)
        unsupported = difflib.get_close_matches(word, UNSUPPORTED, 1, _MIN_SIMILARITY)
        if meant:
            yield inside, f"; did you mean {', '.join(meant)}?"
        elif unsupported:
            yield inside, f": {'it' if word in UNSUPPORTED else unsupported[0]} {UNSUPPORTED[unsupported[0]]}"
        else:
            yield inside, f"; {otherwise}" if otherwise else ""


def _suggestions(key: str, prefix: str, siblings: Sequence[str], root_schema: type) -> list[str]:
    """Return at most three settings that a user may have meant by the unknown `key`, given in the section `prefix`. The
    first of these ways that finds a setting decides:

    1. settings below `prefix` with the longest known end of the key (`eval.steps` before `steps`), by their own name or
       another system's (`SYNONYMS`)
    2. such settings in any section
    3. similar names in this section
    4. very similar names in any section
    """
    ends = [*accumulate(reversed(key.lower().split(".")), lambda end, part: f"{part}.{end}")]
    word, paths = ends[0], [*setting_paths(root_schema)]
    if word in UNSUPPORTED:
        return []
    named: dict[str, list[str]] = {}
    for path in paths:
        named.setdefault(path.rpartition(".")[2], []).append(path)
    for path, names in SYNONYMS.items():
        for called in names if path.partition("=")[0] in paths else ():
            named.setdefault(called, []).append(path)
    everywhere = next((named[end] for end in reversed(ends) if end in named), [])
    meant = [path for path in everywhere if path.startswith(prefix)] or everywhere
    meant = meant or [f"{prefix}{name}" for name in difflib.get_close_matches(word, siblings)]
    if not meant:
        meant = [
            path for called in difflib.get_close_matches(word, named, cutoff=_MIN_SIMILARITY) for path in named[called]
        ]
    return [*dict.fromkeys(meant)][:_MAX_SUGGESTIONS]


def setting_paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Yield the key path of every setting and section in a section's class. NAME stands for the names in a mapping of
    names to sections: `placement.gangs.NAME.workers`."""
    for name, kind in _setting_types(section).items():
        if name.startswith("_"):
            continue
        yield f"{prefix}{name}"
        if is_dataclass(kind):
            yield from setting_paths(kind, f"{prefix}{name}.")
        elif get_origin(kind) is dict and is_dataclass(get_args(kind)[1]):
            yield from setting_paths(get_args(kind)[1], f"{prefix}{name}.NAME.")


def _leaves(source: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key in map(str, source):
        path = f"{prefix}{key}"
        if OmegaConf.is_missing(source, key) or OmegaConf.is_interpolation(source, key):
            continue
        value = source[key]
        if isinstance(value, DictConfig) and len(value):
            yield from _leaves(value, f"{path}.")
        else:
            yield path, value


def _type_errors(key: str, value: Any, name: str, schema: type) -> Iterator[ConfigError]:
    """Yield an error if `value` has the wrong type for the setting `key`. The error says which values the setting
    takes. `name`: the config file or the `key=value` override with the value, as errors name it. `schema`: class of the
    whole config."""
    section, inside = _innermost(key, schema)
    nested: Any = value
    for part in reversed(inside):
        nested = {part: nested}
    alone = make_dataclass("Setting", [(inside[0], _setting_types(section)[inside[0]], field(default=MISSING))])
    kind, container = _type_of(key, schema), isinstance(value, DictConfig | ListConfig)
    unquoted = _is_unquoted(key, value, name, schema)
    # omegaconf accepts a container in a new mapping
    refused = "of another type" if unquoted or (kind in WORDS and container) else None
    try:
        OmegaConf.merge(OmegaConf.structured(alone), OmegaConf.create(nested))
    except (OmegaConfBaseException, TypeError) as error:  # TypeError: a list in place of a mapping
        refused = first_line(error)
    if refused is not None:
        given = OmegaConf.to_container(value) if container else value
        what = "no value given" if given is None else f"given {value_text(given)}"
        expected = (type_text(kind) or refused) + (": put it in quotes" if unquoted else "")
        meant = VALUE_SYNONYMS.get(str(given).lower(), "")
        hint = f" ({given} is called {meant} here)" if meant in expected.replace(",", "").split() else ""
        yield ConfigError(key, f"{what} (in {name}); must be {expected}{hint}")


def _is_unquoted(key: str, value: Any, name: str, schema: Any) -> bool:
    """Return True if a text setting has a value that YAML did not read as a text, and that may have been written in
    another way: `off` becomes False, and the name 007 becomes 7. `name`: the source of the value."""
    if not isinstance(value, bool) and not (
        key == "name" and isinstance(value, int | float) and name != f"{key}={value}"
    ):
        return False
    kind = _type_of(key, schema)
    return kind is str or str in get_args(kind)


def _innermost(key: str, schema: Any) -> tuple[Any, list[str]]:
    """Return the class of the innermost section that contains a key, and the key's path within this section. A value is
    checked against this section alone, because building a whole config for each key would take a second per file."""
    parts = key.split(".")
    section, inside, kind = schema, parts, schema
    for number, part in enumerate(parts):
        if is_dataclass(kind):
            section, inside = kind, parts[number:]
            kind = _setting_types(kind).get(part)
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
    return section, inside


def _type_of(key: str, schema: Any) -> Any:
    """Return the type of the setting `key`, or None if there is no such setting. For example, `seed.x` is no setting,
    because `seed` is a number. `schema`: class of the config."""
    kind = schema
    for part in key.split("."):
        if is_dataclass(kind):
            kind = _setting_types(kind).get(part)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return None
    return kind


def _is_single(kind: Any) -> bool:
    """Return True if a setting of this type takes a single value and no list, mapping or section."""
    if get_origin(kind) in (Union, UnionType):
        return all(map(_is_single, get_args(kind)))
    return kind in WORDS or kind is type(None) or get_origin(kind) is Literal


def first_line(error: Exception) -> str:
    text = str(getattr(error, "msg", None) or error).strip().splitlines()[0]
    return re.sub(r'^\w+ raised while resolving interpolation: "?(.*?)"?$', r"\1", text)


# ---- Loading and writing ---------------------------------------------------------------------------------

_REPAIR_HINT = "Restore it, or remove the file: it is then written again from identity.json"
_OTHER_PROGRAMS = {
    "a reward model's training": {"data", "train", "optimizer"},
    "a labelling": {"judge", "responses"},
}
"""Name of another program -> top-level sections that all configs of this program have. No config of a run has all of
them. So a config file with these sections shows that its directory belongs to the other program."""
_COMMANDS: dict[type, tuple[str, str]] = {
    RunConfig: ("a run", "stageline run"),
    RewardModelConfig: ("a reward model's training", "stageline reward train"),
    LabelConfig: ("a labelling", "stageline reward label"),
}
"""Class of a config -> what such a config describes, and the command that reads it."""
_PROBLEMS: dict[type, Callable[[Any], Iterable[Problem]]] = {
    RunConfig: run_problems,
    RewardModelConfig: reward_model_problems,
    LabelConfig: labelling_problems,
}
"""Class of a config -> the function that returns its problems."""
Source = tuple[str, Any]
"""A source of a config: (name for users, content as an omegaconf object)."""


def load_config(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()) -> RunConfig:
    """Return the run's config: defaults, YAML files in the order given and `key=value` overrides, merged and validated.

    Raises:
        ConfigError: a file is unreadable, or settings are wrong. The error lists every unknown key, wrong type, missing
            value, impossible value and contradiction between settings.
    """
    return _to_run_config(_load(RunConfig, _sources(files, overrides)))


def readable_config(
    files: Iterable[str | os.PathLike[str]], overrides: Iterable[str], refused: Collection[str]
) -> RunConfig | None:
    """Return a provisional config from sources that `load_config` refuses because of wrong settings. With it, the
    caller can still check the model, the prompts and the rewards, so that the user sees all errors at once. Return None
    if no config can be made of the sources.

    `refused`: key paths of the wrong settings. They get their defaults, if they have any. A setting without a value
    gets the text "given" as a placeholder.
    """
    try:
        merged, _ = _merge(RunConfig, _sources(files, overrides))
        for key in OmegaConf.missing_keys(merged):
            OmegaConf.update(merged, key, "given")
        config: RunConfig = _to_object(merged)
    except (ConfigError, OmegaConfBaseException):
        return None
    for key in refused:
        set_default(config, key)
    return config


def load_reward_model_config(
    files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()
) -> RewardModelConfig:
    """Return the config of a reward model's training. Arguments and errors are the same as for `load_config`."""
    config = _load(RewardModelConfig, _sources(files, overrides))
    assert isinstance(config, RewardModelConfig)
    config.model.path = cached_in_hub(config.model.path)
    config.teacher.paths = [cached_in_hub(path) for path in config.teacher.paths]
    refuse(reward_model_problems(config))
    return config


def load_label_config(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()) -> LabelConfig:
    """Return the config of a labelling. Arguments and errors are the same as for `load_config`."""
    config = _load(LabelConfig, _sources(files, overrides))
    assert isinstance(config, LabelConfig)
    config.responses.model = config.responses.model and cached_in_hub(config.responses.model)
    refuse(labelling_problems(config))
    return config


def load_file(schema: type, file: str | os.PathLike[str]) -> tuple[Any, list[str]]:
    """Return the content of one file as an object of the dataclass `schema`, and the file's top-level keys. Raises
    ConfigError if the file cannot be read, or has an unknown key, a value of a wrong type or a missing value. Nothing
    else is checked."""
    ((_, content),) = sources = _sources([file], [])
    return _load(schema, sources), [*map(str, content)]


def _sources(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str]) -> list[Source]:
    reading = [*(partial(_read_file, file) for file in files), *(partial(_read_override, word) for word in overrides)]
    return run_checks(*reading)


def load_yaml(text: str, overrides: Iterable[str] = (), *, source_name: str = "the saved config") -> RunConfig:
    """Return the config in `text`, which `to_yaml` wrote, changed by `key=value` overrides. `source_name`: name of the
    text in errors.

    Raises:
        ConfigError: the text is damaged, an override is wrong, or the text is from another version of Stageline, which
            had a different set of settings.
    """
    return _to_run_config(_load(RunConfig, [(source_name, _parse(text, source_name)), *_sources([], overrides)]))


def check_again(config: RunConfig) -> RunConfig:
    """Return a checked copy of a config that Python code may have changed. Raises ConfigError as for a file with the
    same content: an attribute that is no setting counts as an unknown key."""
    source = OmegaConf.create(_content(config), flags={"allow_objects": True})  # `source_errors` reports the objects
    checked = _load(RunConfig, [("the given config", source)])
    try:
        to_yaml(checked)
    except OmegaConfBaseException as error:  # an object in the arguments of a reward, which may be of any type
        raise ConfigError(_key_of(error), first_line(error)) from error
    return _to_run_config(checked)


def _content(value: Any) -> Any:
    """Return a value of a config as mappings and lists. A section becomes the mapping of all its attributes, also of
    those that are no settings."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        return {str(key): _content(inside) for key, inside in value.items()}
    return [*map(_content, value)] if isinstance(value, list | tuple) else value


def read_run_config(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Return the config in the file `path` of a run's directory, with `key=value` overrides.

    Raises:
        OtherProgramsConfig: the file is the config of another program.
        ConfigError: the file cannot be read or lacks a setting, or an override is wrong. A written config has all
            settings, so a missing setting means damage, and its default may not be the run's value.
    """
    where = str(path)
    try:
        text = path.read_text("utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"cannot be read: {_one_line(error)}. {_REPAIR_HINT}") from error
    saved = _parse(text, where, f". {_REPAIR_HINT}")
    content: Any = OmegaConf.to_container(saved) if isinstance(saved, DictConfig) else {}
    for program, own in _OTHER_PROGRAMS.items():
        if own <= content.keys():
            need = f"{path.parent} is the directory of {program}: for a run choose another name=..., or runs_dir=..."
            raise OtherProgramsConfig(where, f"is not the config of a run; {need}")
    there = [f"{key}." for key in flatten_sections(content)]
    lost = [
        key
        for key in flatten_sections(config_sections(RunConfig()))
        if not any(had.startswith(f"{key}.") for had in there)
    ]
    if lost:
        named = ", ".join(lost[:5]) + (f" and {len(lost) - 5} others" if len(lost) > 5 else "")
        raise ConfigError(where, f"is damaged, or of another version of Stageline: it has no {named}. {_REPAIR_HINT}")
    return load_yaml(text, overrides, source_name=where)


def _parse(text: str, source_name: str, repair_hint: str = "") -> Any:
    try:
        return OmegaConf.create(text)
    except Exception as error:  # as in `_read_file`
        raise ConfigError(source_name, f"not readable as YAML: {_one_line(error)}{repair_hint}") from error


def _read_file(file: str | os.PathLike[str]) -> tuple[str, Any]:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(str(path), "no such config file; `ls conf/*` shows the ones that ship with Stageline")
    try:
        return str(path), OmegaConf.load(path)
    except Exception as error:  # yaml's errors have no common public base that omegaconf re-exports
        raise ConfigError(str(path), f"not readable as YAML: {error}") from error


def _read_override(override: str) -> tuple[str, Any]:
    if "=" not in override or override.startswith("="):
        raise ConfigError(override, "not an override; write key=value, for example staleness=2")
    try:
        return override, OmegaConf.from_dotlist([override])
    except Exception as error:  # as above
        raise ConfigError(override, f"not an override that YAML can read: {error}") from error


def _load(schema: type, sources: Sequence[Source]) -> Any:
    """Return the config merged from defaults and sources. Raises ConfigError if the merge has errors or values are
    missing; the error also lists the problems of the other settings (`_other_problems`)."""
    merged, errors = _merge(schema, sources)
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
    except OmegaConfBaseException as error:  # a reference to a missing key
        raise join_errors([*errors, ConfigError(_key_of(error), first_line(error))]) from error
    for key in missing:
        if not any(key in str(error) for error in errors):  # an earlier error is about the key, or suggests it
            errors.append(ConfigError(key, f"has no value; set it in the config file or as {key}=..."))
    if errors:
        raise join_errors([*errors, *_other_problems(schema, merged, missing, [error.key for error in errors])])
    return _to_object(merged)


def _merge(schema: type, sources: Sequence[Source]) -> tuple[Any, list[ConfigError]]:
    """Merge the sources into the defaults, without the keys that make this fail. Return the merged config, and an error
    for each such key. Raises ConfigError if a file is the config of another command, or if no keys at fault can be
    found."""
    try:
        return _merge_one_by_one(schema, sources), []
    except (OmegaConfBaseException, TypeError) as error:  # TypeError: a list in place of a mapping
        failed = first_line(error)
    meant = [error for name, source in sources for error in _other_command_error(source, name, schema)]
    errors_by_source = [source_errors(source, name, schema) for name, source in sources]
    errors = [error for of_source in errors_by_source for error in of_source]
    if meant or not errors:
        raise join_errors(meant or [ConfigError("config", f"these files and settings do not go together: {failed}")])
    sound = [
        (name, OmegaConf.create(_without(OmegaConf.to_container(source), _outermost(of_source, schema))))
        for (name, source), of_source in zip(sources, errors_by_source, strict=True)
        if isinstance(source, DictConfig)
    ]
    try:
        return _merge_one_by_one(schema, sound), errors
    except (OmegaConfBaseException, TypeError):
        raise join_errors(errors) from None


def _merge_one_by_one(schema: type, sources: Sequence[Source]) -> Any:
    """Return the defaults of `schema`, with the sources merged into them one after the other. Raises
    OmegaConfBaseException or TypeError."""
    merged: Any = OmegaConf.structured(schema)
    overrides: Any = OmegaConf.create()
    for name, source in [*([("", _default_placement(sources))] if schema is RunConfig else []), *sources]:
        if not isinstance(source, DictConfig):
            raise TypeError("not a mapping")
        content: Any = OmegaConf.to_container(source)
        if any(_is_unquoted(key, value, name, schema) for key, value in flatten_sections(content).items()):
            raise TypeError("not a text")
        if schema is RunConfig:
            _drop_replaced_rewards(merged, source, overrides)
        merged = OmegaConf.merge(merged, source)  # one call for all would not check types in mappings
        if "=" in name:
            overrides = OmegaConf.merge(overrides, source)
    return merged


def _drop_replaced_rewards(merged: DictConfig, source: DictConfig, overrides: DictConfig) -> None:
    """Remove from `merged` what belongs to a reward that `source` replaces: the arguments of a part whose kind changes,
    all parts if `source` has the short form (`kind`), and the short form if it has a part with a kind. Arguments in
    earlier `key=value` `overrides` stay, because they may be meant for the new kind."""
    for section in ("reward", "evaluate.reward"):
        new, old = OmegaConf.select(source, section), OmegaConf.select(merged, section)
        if not isinstance(new, DictConfig):
            continue
        parts = new.get("parts")
        if _kind_changes(new, old):
            old.args, old.parts = OmegaConf.select(overrides, f"{section}.args") or {}, {}
        elif isinstance(parts, DictConfig) and any(isinstance(p, DictConfig) and p.get("kind") for p in parts.values()):
            old.kind, old.args = None, {}
        for name, part in parts.items() if isinstance(parts, DictConfig) else ():
            if name in old.parts and isinstance(part, DictConfig) and _kind_changes(part, old.parts[name]):
                old.parts[name].args = OmegaConf.select(overrides, f"{section}.parts.{name!s}.args") or {}


def _kind_changes(new: DictConfig, old: DictConfig) -> bool:
    """Return True if the settings `new` of a reward give a kind, and `old` has another kind or none."""
    return new.get("kind") is not None and new.kind != old.get("kind")


def _outermost(errors: Iterable[ConfigError], schema: type) -> set[str]:
    """Return the key paths to leave out of a source with these errors: a key's own, or that of its unknown section."""
    return {
        next((path for path in accumulate(key.split("."), "{}.{}".format) if _type_of(path, schema) is None), key)
        for key in (error.key for error in errors)
    }


def _without(content: Any, keys: Collection[str], prefix: str = "") -> Any:
    """Return the nested mapping `content` without the key paths `keys`."""
    return {
        key: _without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in content.items()
        if f"{prefix}{key}" not in keys
    }


def _other_problems(schema: type, merged: Any, missing: Sequence[str], refused: Sequence[str]) -> Iterator[ConfigError]:
    """Yield further problems of a config that has errors already. A problem that mentions a missing or refused setting
    is skipped, because its provisional value in `merged` may be the cause. Nothing is yielded if a value refers to a
    refused setting (`${...}`)."""
    OmegaConf.set_readonly(merged, False)  # a frozen dataclass makes it read-only
    for key in missing:
        OmegaConf.update(merged, key, _GIVEN.get(_type_of(key, schema), key))
    try:
        config = _to_object(merged)
    except ConfigError:  # a reference to a refused key
        return
    for problem in _PROBLEMS.get(schema, setting_problems)(config):
        if not mentions(problem, [*refused, *missing]):
            yield refusal(problem)


def _other_command_error(source: Any, name: str, schema: type) -> Iterator[ConfigError]:
    """Yield an error if a file is the config of another command: all its top-level keys are keys of that command's
    config, and not all of them are keys of `schema`."""
    if not isinstance(source, DictConfig) or "=" in name:
        return
    sections_of = {kind: {field.name for field in dataclasses.fields(kind)} for kind in (*_COMMANDS, schema)}
    keys = {*map(str, source)}
    for kind, (what, command) in _COMMANDS.items():
        if kind is not schema and keys <= sections_of[kind] and not keys <= sections_of[schema]:
            yield ConfigError(name, f"is the config of {what}: `{command} {name}`")


def _default_placement(sources: Sequence[Source]) -> DictConfig:
    """Return the default placement, or an empty config if a source has a whole section `placement.roles`: it must then
    place all roles except `advantage`. An override of one role (`placement.roles.critic=other`) only changes the
    default."""
    named: set[str] = set()
    for name, source in sources:
        placement = source.get("placement") if isinstance(source, DictConfig) else None
        roles = placement.get("roles") if isinstance(placement, DictConfig) else None
        if isinstance(roles, DictConfig) and not name.startswith("placement.roles."):
            named |= {*map(str, roles)}
    return OmegaConf.create({} if named - {"advantage"} else {"placement": DEFAULT_PLACEMENT})


def _to_run_config(config: Any) -> RunConfig:
    assert isinstance(config, RunConfig)
    if config.engine.python is None:
        config.engine.python = find_interpreter(config.engine.kind)
    model = config.model
    model.path = cached_in_hub(model.path)  # now, because the name may later mean another directory
    model.reference_path = model.reference_path and cached_in_hub(model.reference_path)
    model.critic_path = model.critic_path and cached_in_hub(model.critic_path)
    validate(config)
    for args in config.scoring_models().values():
        cast(dict[str, Any], args)["path"] = cached_in_hub(args["path"])
    config.ppo.proximal = config.proximal  # write, hash and send to workers the resolved value, not "auto"
    if config.engine.python is not None:
        # Make the path absolute: workers, and a resumed driver, have other working directories.
        config.engine.python = interpreter(config.engine.python)
    return config


def _to_object(merged: Any) -> Any:
    try:
        OmegaConf.resolve(merged)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_key_of(error), first_line(error)) from error


def to_yaml(config: RunConfig | RewardModelConfig | LabelConfig) -> str:
    """Return a config as YAML, secrets included. Workers get this text, and `write_config` writes it to a file."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), sort_keys=False)


def write_config(
    path: Path, config: RunConfig | RewardModelConfig | LabelConfig, durability: Durability = files.DEFAULT
) -> None:
    """Write the resolved config atomically. The file may hold secrets, so no other user may read it."""
    files.write_local(path, to_yaml(config).encode(), durability, private=True)


def flatten(config: RunConfig | RewardModelConfig | LabelConfig) -> dict[str, str]:
    """Return key path -> value, both as text, for MLflow's parameters. Secrets and empty mappings are left out."""
    return {
        key: str(value) for key, value in flatten_sections(redacted(config_sections(config))).items() if value != {}
    }


def config_hash(config: RunConfig) -> str:
    """Return a digest of all settings that decide what is computed. Each commit stores the digest.
    `check_run_directory` compares digests to find out if a directory holds a run with another config. `identity.py`
    lists the settings that are left out. Secrets are left out too: they may be replaced, and a public digest could help
    to guess them."""
    stated = flatten_sections(redacted(config_sections(config)))
    content = {key: value for key, value in stated.items() if not has_no_effect(key, config)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _key_of(error: OmegaConfBaseException) -> str:
    return str(getattr(error, "full_key", None) or getattr(error, "key", None) or "config")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


# ---- Variants: training on another run's rollouts --------------------------------------------------------

MAY_DIFFER = {
    "name": "the variant's own; it must be given",
    "runs_dir": "where its directory is made",
    "reward.normalize.*": "what is done with recorded scores before they are learnt from",
    "ppo.*": "KL, advantages, losses, epochs, minibatches",
    "placement.roles.critic": "none, or anywhere: it is trained in one process",
    "model.policy.*": "learning rate and the rest of the policy's optimizer",
    "model.critic.*": "likewise of the critic's",
    "tracking.*": "where its MLflow run is kept",
}
"""Pattern of setting names -> note on what these settings decide, or which values they may have. Only these settings of
a variant may differ from the settings of its parent run."""


def variant_config(parent: RunConfig, overrides: Sequence[str]) -> tuple[RunConfig, list[Change]]:
    """Return the parent's config with `key=value` overrides, and the list of all changes except changes of `name` and
    `runs_dir`. Raises ConfigError if an override is wrong, if it changes a setting that no pattern in `MAY_DIFFER`
    matches, or if the variant would have its parent's directory."""
    variant = load_yaml(to_yaml(parent), overrides)
    changed = config_changes(config_sections(parent), config_sections(variant))
    refuse(variant_problems(changed))
    if variant.run_dir.resolve() == parent.run_dir.resolve():
        raise ConfigError("name", f"given {variant.name!r}, the run's own; a variant needs another: name=...")
    return variant, changed


def variant_problems(changed: Sequence[Change]) -> Iterator[Problem]:
    """Yield a problem for each changed setting that a variant may not change: its key matches no pattern in
    `MAY_DIFFER`. A variant is a run that is trained on the recorded rollouts of another run."""
    for change in changed:
        if not any(fnmatchcase(change.key, pattern) for pattern in MAY_DIFFER):
            need = (
                f"the run's rollouts were recorded with {change.before!r} and are taken as they are; a variant may "
                f"differ in {', '.join(MAY_DIFFER)}"
            )
            yield Problem(change.key, change.after, need)
