"""How a configuration is read: dataclass defaults <- YAML files in the order given <- `key=value`; and written.

May import omegaconf, the schemas of a run, of a reward model's training and of a labelling,
pipeline.config.{changes, errors, keys, placement}, stages.engines.config and storage.problems.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.changes import decides_nothing, sections, settings
from pipeline.config.errors import ConfigError, OtherProgramsConfig, all_of, refusal, together
from pipeline.config.keys import first_line, source_errors
from pipeline.config.labelling import LabelConfig, labelling_problems, validate_labelling
from pipeline.config.placement import DEFAULT_PLACEMENT
from pipeline.config.reward_model import RewardModelConfig, reward_model_problems, validate_reward_model
from pipeline.config.run import RunConfig, section_problems, validate
from stages.engines.config import interpreter
from storage.problems import Problem

_WAY_ON = "Put it back, or remove the file, which is then written anew from identity.json"
_OTHER_PROGRAMS = {
    "a reward model's training": {"data", "train", "optimizer"},
    "a labelling": {"judge", "responses"},
}
"""What a directory may hold the config of, and the sections that tell it from a run's."""
_COMMANDS: dict[type, tuple[str, str]] = {
    RunConfig: ("a run", "stageline run"),
    RewardModelConfig: ("a reward model's training", "stageline reward train"),
    LabelConfig: ("a labelling", "stageline reward label"),
}
"""What a file may be the config of, and which command reads it."""
_PROBLEMS: dict[type, Callable[[Any], Iterable[Problem]]] = {
    RunConfig: section_problems,
    RewardModelConfig: reward_model_problems,
    LabelConfig: labelling_problems,
}
"""What cannot work of a config by itself."""
Source = tuple[str, Any]
"""(what a user knows it by, its content as omegaconf has it)."""


def load_config(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()) -> RunConfig:
    """Merges defaults, YAML files in the order given and `key=value` overrides, and refuses what cannot work.

    Raises:
        ConfigError: unreadable files; or every unknown key, wrong type, missing value and value that cannot work by
            itself; or, where there is none of these, what does not go together.
    """
    return _finish(_loaded(RunConfig, _sources(files, overrides)))


def load_reward_model_config(
    files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()
) -> RewardModelConfig:
    """The same of a reward model's training."""
    config = _loaded(RewardModelConfig, _sources(files, overrides))
    assert isinstance(config, RewardModelConfig)
    validate_reward_model(config)
    return config


def load_label_config(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()) -> LabelConfig:
    """The same of a labelling."""
    config = _loaded(LabelConfig, _sources(files, overrides))
    assert isinstance(config, LabelConfig)
    validate_labelling(config)
    return config


def _sources(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str]) -> list[Source]:
    reading = [*(partial(_read_file, file) for file in files), *(partial(_read_override, word) for word in overrides)]
    return all_of(*reading)


def load_yaml(text: str, overrides: Iterable[str] = (), *, where: str = "the saved config") -> RunConfig:
    """The config that `to_yaml` wrote, with `key=value` overrides. Raises ConfigError, naming `where`, if it is damaged
    or was written by a version with other settings."""
    return _finish(_loaded(RunConfig, [(where, _parse(text, where)), *_sources([], overrides)]))


def read_saved(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config in a run's directory, with `key=value` overrides.

    Raises:
        OtherProgramsConfig: it is that of another program.
        ConfigError: it cannot be read, or lacks a setting: what was written has all of them, and the default of one
            that a damaged file has lost is not what the run had.
    """
    where = str(path)
    try:
        text = path.read_text("utf8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(where, f"cannot be read: {_one_line(error)}. {_WAY_ON}") from error
    saved = _parse(text, where, f". {_WAY_ON}")
    content: Any = OmegaConf.to_container(saved) if isinstance(saved, DictConfig) else {}
    for program, own in _OTHER_PROGRAMS.items():
        if own <= content.keys():
            need = f"{path.parent} is the directory of {program}: for a run choose another name=..., or runs_dir=..."
            raise OtherProgramsConfig(where, f"is not that of a run; {need}")
    there = [f"{key}." for key in settings(content)]
    lost = [key for key in settings(sections(RunConfig())) if not any(had.startswith(f"{key}.") for had in there)]
    if lost:
        named = ", ".join(lost[:5]) + (f" and {len(lost) - 5} others" if len(lost) > 5 else "")
        raise ConfigError(where, f"is damaged, or of another version of Stageline: it has no {named}. {_WAY_ON}")
    return load_yaml(text, overrides, where=where)


def _parse(text: str, where: str, way_on: str = "") -> Any:
    try:
        return OmegaConf.create(text)
    except Exception as error:  # as in `_read_file`
        raise ConfigError(where, f"not readable as YAML: {_one_line(error)}{way_on}") from error


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


def _loaded(schema: type, sources: Sequence[Source]) -> Any:
    """The config of defaults and sources. Raises ConfigError for all that keeps them from being merged, all that has
    no value, and then also for all else that cannot work, whatever stands in the place of those."""
    merged, errors = _merge(schema, sources)
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
    except OmegaConfBaseException as error:  # a reference to what there is not
        raise together([*errors, ConfigError(_key_of(error), first_line(error))]) from error
    for key in missing:
        if not any(key in str(error) for error in errors):  # it was refused, or was meant by what was
            errors.append(ConfigError(key, f"has no value; set it in the config file or as {key}=..."))
    if errors:
        raise together([*errors, *_wrong_beside(schema, merged, missing, [error.key for error in errors])])
    return _to_object(merged)


def _merge(schema: type, sources: Sequence[Source]) -> tuple[Any, list[ConfigError]]:
    """Defaults and sources as one, without what keeps them from being merged; and that, if anything."""
    try:
        return _in_turn(schema, sources), []
    except (OmegaConfBaseException, TypeError) as error:  # the latter for a list in place of a mapping
        failed = first_line(error)
    meant = [error for name, source in sources for error in _of_another_command(source, name, schema)]
    found = [source_errors(source, name, schema) for name, source in sources]
    errors = [error for of_source in found for error in of_source]
    if meant or not errors:
        raise together(meant or [ConfigError("config", f"these files and settings do not go together: {failed}")])
    sound = [
        (name, OmegaConf.create(_without(OmegaConf.to_container(source), {error.key for error in of_source})))
        for (name, source), of_source in zip(sources, found, strict=True)
        if isinstance(source, DictConfig)
    ]
    try:
        return _in_turn(schema, sound), errors
    except (OmegaConfBaseException, TypeError):
        raise together(errors) from None


def _in_turn(schema: type, sources: Sequence[Source]) -> Any:
    """Raises OmegaConfBaseException or TypeError."""
    merged: Any = OmegaConf.structured(schema)
    for _, source in [*([("", _placed(sources))] if schema is RunConfig else []), *sources]:
        if not isinstance(source, DictConfig):
            raise TypeError("not a mapping")
        merged = OmegaConf.merge(merged, source)  # all in one call leaves types of mappings unchecked
    return merged


def _without(content: Any, keys: Collection[str], prefix: str = "") -> Any:
    """A mapping less some key paths."""
    return {
        key: _without(value, keys, f"{prefix}{key}.") if isinstance(value, dict) else value
        for key, value in content.items()
        if f"{prefix}{key}" not in keys
    }


def _wrong_beside(schema: type, merged: Any, missing: Sequence[str], refused: Sequence[str]) -> Iterator[ConfigError]:
    """What cannot work by itself beside what is `refused`; nothing that has to do with that, whose place a default or
    an earlier source's value has taken."""
    for key in missing:
        OmegaConf.update(merged, key, "given")  # all that have no default are texts
    try:
        config = _to_object(merged)
    except ConfigError:  # a reference to what was refused
        return
    about = re.compile("|".join(rf"(?<![\w.]){re.escape(key)}(?!\w)" for key in [*refused, *missing]))
    for problem in _PROBLEMS[schema](config):
        error = refusal(problem)
        if not about.search(str(error)):
            yield error


def _of_another_command(source: Any, name: str, schema: type) -> Iterator[ConfigError]:
    """A file whose sections are those of another command's config, and of no other."""
    if not isinstance(source, DictConfig) or "=" in name:
        return
    sections_of = {kind: {field.name for field in dataclasses.fields(kind)} for kind in _COMMANDS}
    given = {*map(str, source)}
    for kind, (what, command) in _COMMANDS.items():
        if kind is not schema and given <= sections_of[kind] and not given <= sections_of[schema]:
            yield ConfigError(name, f"is the config of {what}: `{command} {name}`")


def _placed(sources: Sequence[Source]) -> DictConfig:
    """The default placement, which lies beneath what is given unless a source has roles of its own: of those it must
    have all, but for `advantage`. A single role that is changed (`placement.roles.critic=other`) is changed in it."""
    named: set[str] = set()
    for name, source in sources:
        placement = source.get("placement") if isinstance(source, DictConfig) else None
        roles = placement.get("roles") if isinstance(placement, DictConfig) else None
        if isinstance(roles, DictConfig) and not name.startswith("placement.roles."):
            named |= {*map(str, roles)}
    return OmegaConf.create({} if named - {"advantage"} else {"placement": DEFAULT_PLACEMENT})


def _finish(config: Any) -> RunConfig:
    assert isinstance(config, RunConfig)
    validate(config)
    config.ppo.proximal = config.proximal  # what is written down, hashed and given to workers is what is done
    if config.engine.python is not None:
        # Workers, and a resume, have other working directories.
        config.engine.python = interpreter(config.engine.python)
    return config


def _to_object(merged: Any) -> Any:
    try:
        OmegaConf.resolve(merged)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_key_of(error), first_line(error)) from error


def to_yaml(config: RunConfig | RewardModelConfig | LabelConfig) -> str:
    """The resolved config, as it is kept in the run's directory."""
    return OmegaConf.to_yaml(OmegaConf.structured(config), sort_keys=False)


def flatten(config: RunConfig | RewardModelConfig | LabelConfig) -> dict[str, str]:
    """Key paths and values as strings, for MLflow's parameters."""
    return {key: str(value) for key, value in settings(sections(config)).items() if value != {}}


def config_hash(config: RunConfig) -> str:
    """Digest of everything that decides what is computed: two runs with the same digest may share a directory. What is
    left out is said in `changes`."""
    content = {key: value for key, value in settings(sections(config)).items() if not decides_nothing(key, config)}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def _key_of(error: OmegaConfBaseException) -> str:
    return str(getattr(error, "full_key", None) or getattr(error, "key", None) or "config")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
