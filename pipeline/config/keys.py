"""Which settings there are, what each takes, and what of a source (a file, a `key=value`) is none or cannot be one.

May import omegaconf and pipeline.config.errors.
"""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator
from dataclasses import field, is_dataclass, make_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from omegaconf import MISSING, DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.errors import ConfigError

MOVED = {"ppo.center_scores": ["reward.normalize.mean"]}
"""Settings that are elsewhere since."""
_HINTS: dict[Any, dict[str, Any]] = {}
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def _hints(section: Any) -> dict[str, Any]:
    """Setting -> type, of a section; kept, since they are looked up for every key."""
    if section not in _HINTS:
        _HINTS[section] = get_type_hints(section)
    return _HINTS[section]


def source_errors(source: Any, name: str, schema: type) -> list[ConfigError]:
    """Everything that keeps a source from being merged, by key: keys that no setting has, and values of another
    type. `name`: of the source, as a user knows it."""
    if not isinstance(source, DictConfig):
        return [ConfigError(name, "a config file is a mapping of keys to values")]
    unknown = list(_unknown_keys(source, OmegaConf.structured(schema), name, schema))
    prefixes = tuple(f"{error.key}." for error in unknown)
    leaves = ((key, value) for key, value in _leaves(source) if not f"{key}.".startswith(prefixes))
    return [*unknown, *(e for key, value in leaves for e in _type_errors(key, value, name, schema))]


def is_setting(word: str, schema: type) -> bool:
    """Whether this is the key path of a setting or a section, as far as it can be told without a config: a key below a
    mapping of names is."""
    hints = _hints(schema)
    head, _, rest = word.partition(".")
    if head not in hints or head.startswith("_"):
        return False
    kind = hints[head]
    if is_dataclass(kind) and isinstance(kind, type) and rest:
        return is_setting(rest, kind)
    return not rest or get_origin(kind) is dict


def _unknown_keys(source: Any, schema: Any, name: str, whole: type, prefix: str = "") -> Iterator[ConfigError]:
    """Names the whole path of a key that no setting has, and the settings that are spelt most like it, or have its name
    in a section below."""
    if not isinstance(schema, DictConfig):
        return
    if OmegaConf.get_type(schema) is dict:  # a mapping of names to sections, or to plain values
        section = schema._metadata.element_type
        for key in map(str, source) if isinstance(source, DictConfig) and is_dataclass(section) else ():
            yield from _unknown_keys(source[key], OmegaConf.structured(section), name, whole, f"{prefix}{key}.")
        return
    if not isinstance(source, DictConfig):
        settings = ", ".join(map(str, schema))
        yield ConfigError(prefix[:-1], f"given {source!r} (in {name}); it holds the settings {settings}")
        return
    for key in map(str, source):
        path = f"{prefix}{key}"
        if key not in schema.keys():  # noqa: SIM118  (`in` denies keys without a value)
            known = [str(k) for k in schema]
            deeper = [p for p in _paths(whole) if p.startswith(prefix) and p.rpartition(".")[2] == key]
            meant = MOVED.get(path, deeper) or [
                f"{prefix}{k}" for k in difflib.get_close_matches(key, known, n=3) or known
            ]
            yield ConfigError(path, f"no such key (in {name}); did you mean {', '.join(meant)}?")
        elif not OmegaConf.is_missing(source, key) and not OmegaConf.is_interpolation(source, key):
            kind = _type_of(path, whole)
            if _is_single(kind) and isinstance(source[key], DictConfig):
                given: Any = OmegaConf.to_container(source[key])
                hint = "; YAML takes a text that ends in : for a mapping" if [*given.values()] == [None] else ""
                yield ConfigError(path, f"given {given!r} (in {name}); must be {_need(kind)}{hint}")
                continue
            yield from _unknown_keys(source[key], schema._get_node(key), name, whole, f"{path}.")


def _paths(section: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a section and of those in it, mappings by name left out."""
    for name, kind in _hints(section).items():
        if not name.startswith("_"):
            yield f"{prefix}{name}"
            if is_dataclass(kind):
                yield from _paths(kind, f"{prefix}{name}.")


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
    """What keeps one value from being merged, in words of the setting."""
    section, inside = _innermost(key, schema)
    nested: Any = value
    for part in reversed(inside):
        nested = {part: nested}
    alone = make_dataclass("Setting", [(inside[0], _hints(section)[inside[0]], field(default=MISSING))])
    kind, container = _type_of(key, schema), isinstance(value, DictConfig | ListConfig)
    refused = "of another type" if kind in _WORDS and container else None  # omegaconf lets it pass in a new mapping
    try:
        OmegaConf.merge(OmegaConf.structured(alone), OmegaConf.create(nested))
    except (OmegaConfBaseException, TypeError) as error:  # the latter for a list in place of a mapping
        refused = first_line(error)
    if refused is not None:
        given = OmegaConf.to_container(value) if container else value
        what = "no value given" if given is None else f"given {given!r}"
        yield ConfigError(key, f"{what} (in {name}); must be {_need(kind) or refused}")


def _innermost(key: str, schema: Any) -> tuple[Any, list[str]]:
    """The smallest section that a key lies in, and the way to it from there. (To build a whole config for each key
    would take a second for a file.)"""
    parts = key.split(".")
    section, inside, kind = schema, parts, schema
    for number, part in enumerate(parts):
        if is_dataclass(kind):
            section, inside = kind, parts[number:]
            kind = _hints(kind).get(part)
        else:
            kind = get_args(kind)[1] if get_origin(kind) is dict else None
    return section, inside


def _type_of(key: str, schema: Any) -> Any:
    """The type of a setting; None below a mapping of plain values."""
    kind = schema
    for part in key.split("."):
        if is_dataclass(kind):
            kind = _hints(kind).get(part)
        elif get_origin(kind) is dict:
            kind = get_args(kind)[1]
        else:
            return None
    return kind


def _is_single(kind: Any) -> bool:
    """Whether a setting of this type is one value."""
    if get_origin(kind) in (Union, types.UnionType):
        return all(map(_is_single, get_args(kind)))
    return kind in _WORDS or kind is type(None) or get_origin(kind) is Literal


def _need(kind: Any) -> str:
    """What a setting of this type takes, for a person; empty where there is no word for it."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of {', '.join(map(str, arguments))}"
    if origin in (Union, types.UnionType):
        return ", or ".join("null" if a is type(None) else _need(a) for a in arguments)
    if origin in (list, tuple):
        one = _WORDS.get(arguments[0], "") if arguments else ""
        return f"a list, each of it {one}" if one else "a list"
    return "a mapping of names to settings" if origin is dict else _WORDS.get(kind, "")


def first_line(error: Exception) -> str:
    return str(getattr(error, "msg", None) or error).strip().splitlines()[0]
