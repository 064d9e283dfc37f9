"""How a configuration is read: dataclass defaults <- YAML files in the order given <- `key=value`; and written.

May import omegaconf, the schemas of a run, of a reward model's training and of a labelling, and
pipeline.config.{changes, errors, keys, placement}.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.changes import decides_nothing, sections, settings
from pipeline.config.errors import ConfigError, together
from pipeline.config.keys import first_line, source_errors
from pipeline.config.labelling import LabelConfig, validate_labelling
from pipeline.config.placement import DEFAULT_PLACEMENT
from pipeline.config.reward_model import RewardModelConfig, validate_reward_model
from pipeline.config.run import RunConfig, validate

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


def load_config(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()) -> RunConfig:
    """Merges defaults, YAML files in the order given and `key=value` overrides, and refuses what cannot work.

    Raises:
        ConfigError: unreadable file; every unknown key and wrong type; every missing value; or every value that
            `validate` refuses.
    """
    return _finish(_merged(RunConfig, files, overrides))


def load_reward_model_config(
    files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()
) -> RewardModelConfig:
    """The same of a reward model's training."""
    config = _to_object(_merged(RewardModelConfig, files, overrides))
    assert isinstance(config, RewardModelConfig)
    validate_reward_model(config)
    return config


def load_label_config(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()) -> LabelConfig:
    """The same of a labelling."""
    config = _to_object(_merged(LabelConfig, files, overrides))
    assert isinstance(config, LabelConfig)
    validate_labelling(config)
    return config


def _merged(schema: type, files: Iterable[str | os.PathLike[str]], overrides: Iterable[str]) -> Any:
    """Defaults, files and overrides as one."""
    return _merge(schema, [*map(_read_file, files), *map(_read_override, overrides)])


def load_yaml(text: str, overrides: Iterable[str] = (), *, where: str = "the saved config") -> RunConfig:
    """The config that `to_yaml` wrote, with `key=value` overrides. Raises ConfigError, naming `where`, if it is damaged
    or was written by a version with other settings."""
    return _finish(_merge(RunConfig, [(where, _parse(text, where)), *map(_read_override, overrides)]))


def read_saved(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """The config in a run's directory, with `key=value` overrides.

    Raises:
        ConfigError: it cannot be read, is that of another program, or lacks a setting: what was written has all of
            them, and the default of one that a damaged file has lost is not what the run had.
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
            raise ConfigError(where, f"is not that of a run; {need}")
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


def _merge(schema: type, sources: Sequence[tuple[str, Any]]) -> Any:
    """Defaults and sources as one. Raises ConfigError for all that keeps them from being merged."""
    merged: Any = OmegaConf.structured(schema)
    try:
        given = [source for _, source in sources if isinstance(source, DictConfig)]
        for source in [*([_placed(sources)] if schema is RunConfig else []), *given]:
            merged = OmegaConf.merge(merged, source)  # all in one call leaves types of mappings unchecked
        failed = "" if len(given) == len(sources) else "not a mapping"
    except (OmegaConfBaseException, TypeError) as error:  # the latter for a list in place of a mapping
        failed = first_line(error)
    if failed:
        meant = [error for name, source in sources for error in _of_another_command(source, name, schema)]
        errors = [error for name, source in sources for error in source_errors(source, name, schema)]
        raise together(
            meant or errors or [ConfigError("config", f"these files and settings do not go together: {failed}")]
        )
    return merged


def _of_another_command(source: Any, name: str, schema: type) -> Iterator[ConfigError]:
    """A file whose sections are those of another command's config, and of no other."""
    if not isinstance(source, DictConfig) or "=" in name:
        return
    sections_of = {kind: {field.name for field in dataclasses.fields(kind)} for kind in _COMMANDS}
    given = {*map(str, source)}
    for kind, (what, command) in _COMMANDS.items():
        if kind is not schema and given <= sections_of[kind] and not given <= sections_of[schema]:
            yield ConfigError(name, f"is the config of {what}: `{command} {name}`")


def _placed(sources: Sequence[tuple[str, Any]]) -> DictConfig:
    """The default placement, which lies beneath what is given unless a source has roles of its own: of those it must
    have all, but for `advantage`. A single role that is changed (`placement.roles.critic=other`) is changed in it."""
    named: set[str] = set()
    for name, source in sources:
        placement = source.get("placement") if isinstance(source, DictConfig) else None
        roles = placement.get("roles") if isinstance(placement, DictConfig) else None
        if isinstance(roles, DictConfig) and not name.startswith("placement.roles."):
            named |= {*map(str, roles)}
    return OmegaConf.create({} if named - {"advantage"} else {"placement": DEFAULT_PLACEMENT})


def _finish(merged: Any) -> RunConfig:
    config = _to_object(merged)
    assert isinstance(config, RunConfig)
    validate(config)
    config.ppo.proximal = config.proximal  # what is written down, hashed and given to workers is what is done
    return config


def _to_object(merged: Any) -> Any:
    try:
        missing = sorted(OmegaConf.missing_keys(merged))
        if missing:
            need = "has no value; set it in the config file or as"
            raise together([ConfigError(key, f"{need} {key}=...") for key in missing])
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
