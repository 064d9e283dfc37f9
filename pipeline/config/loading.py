"""How a configuration is read: dataclass defaults <- YAML files in the order given <- `key=value`; and written.

May import omegaconf, the schemas of a run, of a reward model's training and of a labelling, errors and
pipeline.config.changes.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_type_hints

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.changes import decides_nothing, sections, settings
from pipeline.config.errors import ConfigError
from pipeline.config.labelling import LabelConfig, validate_labelling
from pipeline.config.reward_model import RewardModelConfig, validate_reward_model
from pipeline.config.run import RunConfig, validate

_WAY_ON = "Put it back, or remove the file, which is then written anew from identity.json"
_OTHER_PROGRAMS = {
    "a reward model's training": {"data", "train", "optimizer"},
    "a labelling": {"judge", "responses"},
}
"""What a directory may hold the config of, and the sections that tell it from a run's."""
MOVED = {"ppo.center_scores": ["reward.normalize.mean"]}
"""Settings that are elsewhere since."""


def load_config(files: Iterable[str | os.PathLike[str]], overrides: Iterable[str] = ()) -> RunConfig:
    """Merges defaults, YAML files in the order given and `key=value` overrides, and refuses what cannot work.

    Raises:
        ConfigError: unreadable file, unknown key, wrong type, missing value, or a value that `validate` refuses.
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
    sources = [*map(_read_file, files), *map(_read_override, overrides)]
    merged: Any = OmegaConf.structured(schema)
    for name, source in sources:
        merged = _merge(merged, name, source, schema)
    return merged


def load_yaml(text: str, overrides: Iterable[str] = (), *, where: str = "the saved config") -> RunConfig:
    """The config that `to_yaml` wrote, with `key=value` overrides. Raises ConfigError, naming `where`, if it is damaged
    or was written by a version with other settings."""
    merged = _merge(OmegaConf.structured(RunConfig), where, _parse(text, where))
    for name, source in map(_read_override, overrides):
        merged = _merge(merged, name, source)
    return _finish(merged)


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
        raise ConfigError(str(path), "no such config file; `ls conf/run` shows the ones that ship with Stageline")
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


def _merge(merged: Any, name: str, source: Any, whole: type = RunConfig) -> Any:
    if not isinstance(source, DictConfig):
        raise ConfigError(name, "a config file is a mapping of keys to values")
    _refuse_unknown_keys(source, OmegaConf.structured(whole), name, whole)
    try:
        return OmegaConf.merge(merged, source)
    except OmegaConfBaseException as error:
        raise ConfigError(_key_of(error), f"{_first_line(error)} (in {name})") from error


def _refuse_unknown_keys(source: Any, schema: Any, name: str, whole: type, prefix: str = "") -> None:
    """Names the whole path of a key that no setting has, and the settings that are spelt most like it, or have its name
    in a section below."""
    if not isinstance(schema, DictConfig):
        return
    if OmegaConf.get_type(schema) is dict:  # a mapping of names to sections, or to plain values
        section = schema._metadata.element_type
        for key in map(str, source) if isinstance(source, DictConfig) and is_dataclass(section) else ():
            _refuse_unknown_keys(source[key], OmegaConf.structured(section), name, whole, f"{prefix}{key}.")
        return
    if not isinstance(source, DictConfig):
        settings = ", ".join(map(str, schema))
        raise ConfigError(prefix[:-1], f"given {source!r} (in {name}); it holds the settings {settings}")
    for key in map(str, source):
        path = f"{prefix}{key}"
        if key not in schema.keys():  # noqa: SIM118  (`in` denies keys without a value)
            known = [str(k) for k in schema]
            deeper = [p for p in _paths(whole) if p.startswith(prefix) and p.rpartition(".")[2] == key]
            meant = MOVED.get(path, deeper) or [
                f"{prefix}{k}" for k in difflib.get_close_matches(key, known, n=3) or known
            ]
            raise ConfigError(path, f"no such key (in {name}); did you mean {', '.join(meant)}?")
        if not OmegaConf.is_missing(source, key) and not OmegaConf.is_interpolation(source, key):
            _refuse_unknown_keys(source[key], schema._get_node(key), name, whole, f"{path}.")


def _paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a section and of those in it, mappings by name left out."""
    for field, kind in get_type_hints(section).items():
        if not field.startswith("_"):
            yield f"{prefix}{field}"
            if is_dataclass(kind):
                yield from _paths(kind, f"{prefix}{field}.")


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
            raise ConfigError(missing[0], f"has no value; set it in the config file or as {missing[0]}=...")
        OmegaConf.resolve(merged)
        return OmegaConf.to_object(merged)
    except OmegaConfBaseException as error:
        raise ConfigError(_key_of(error), _first_line(error)) from error


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


def _first_line(error: OmegaConfBaseException) -> str:
    return str(getattr(error, "msg", None) or error).strip().splitlines()[0]


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
