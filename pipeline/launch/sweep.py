"""A sweep: one run for every combination of some settings. Pure functions."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from omegaconf import OmegaConf

from pipeline.config.errors import ConfigError
from storage.problems import LONGEST_NAME
from storage.redaction import redacted

_OPEN, _CLOSE = "[{(", "]})"
_IN_COMMON = ("name", "runs_dir")
"""Settings that must be the same for all runs of a sweep. All of section `tracking` must be, too."""


@dataclass(frozen=True)
class SweepPoint:
    """One run of a sweep."""

    suffix: str
    """Ending of the run's name."""
    settings: Mapping[str, str]
    """Settings of this run that differ within the sweep, by key."""

    def changes(self) -> list[str]:
        """Settings as `key=value`."""
        return [f"{key}={value}" for key, value in self.settings.items()]


def axes_of(changes: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the changes that hold for every run, and the values of each setting that varies. `seed=0,1` has two
    values, `betas=[0.8, 0.9]` has one.

    Raises:
        ConfigError: a setting is given twice, nothing differs, a value is repeated, or a setting differs that the runs
            of a sweep have in common.
    """
    fixed, axes, keys = [], dict[str, list[str]](), set[str]()
    for change in changes:
        key, _, text = change.partition("=")
        if key in keys:
            raise ConfigError(key, "is given twice")
        keys.add(key)
        values = list(_split(text))
        if len(values) == 1:
            fixed.append(change)
        elif key in _IN_COMMON or key.startswith("tracking."):
            need = "the runs of a sweep are in one directory and one experiment, and named after what they differ in"
            raise ConfigError(key, f"given {text!r}; {need}: one value")
        elif redacted({key: text}) != {key: text}:
            raise ConfigError(key, "a run of a sweep is named after what it differs in, and no name may hold a secret")
        elif "" in values or len({_meaning(value) for value in values}) < len(values):
            raise ConfigError(key, f"given {text!r}; the values of a sweep differ, and none is empty: seed=0,1")
        else:
            axes[key] = values
    if not axes:
        raise ConfigError("sweep", "nothing differs between the runs: give a setting several values, as in seed=0,1")
    return fixed, axes


def points(axes: Mapping[str, Sequence[str]], name: str) -> list[SweepPoint]:
    """Return every combination; the last setting's values change fastest. `name`: name of the run without them.

    Raises:
        ConfigError: two of them would have the same name, or one that is too long.
    """
    labels = {key: _label(key, [other for other in axes if other != key]) for key in axes}
    found = []
    for values in itertools.product(*axes.values()):
        settings = dict(zip(axes, values, strict=True))
        parts = [f"{labels[key]}{re.sub(r'[^A-Za-z0-9_.-]+', '_', value)}" for key, value in settings.items()]
        found.append(SweepPoint("-".join(parts), settings))
    if len({point.suffix for point in found}) < len(found):
        raise ConfigError("sweep", f"values that differ in marks alone would name the same run: {found[0].suffix}, …")
    longest = max((f"{name}-{point.suffix}" for point in found), key=len)
    if len(longest) > LONGEST_NAME:
        raise ConfigError(
            "name", f"given {name!r}; a run of the sweep would be called {longest}: at most {LONGEST_NAME}"
        )
    return found


def _meaning(value: str) -> str:
    """Return a value as the config reads it: 0 and 00 are one number. Invalid YAML is refused later."""
    try:
        return repr(OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value}"]), resolve=False))
    except Exception:  # yaml's errors have no common public base that omegaconf re-exports
        return value


def _label(key: str, others: Sequence[str]) -> str:
    """Return the end of a key that no other key of the sweep has."""
    parts = key.split(".")
    ends = (".".join(parts[-length:]) for length in range(1, len(parts) + 1))
    return next((end for end in ends if not any(f".{other}".endswith(f".{end}") for other in others)), key)


def _split(text: str) -> Iterator[str]:
    """Split at commas that are outside of brackets and quotes."""
    depth, quote, start = 0, "", 0
    for place, mark in enumerate(text):
        if quote:
            quote = "" if mark == quote else quote
        elif mark in "'\"":
            quote = mark
        elif mark in _OPEN:
            depth += 1
        elif mark in _CLOSE:
            depth -= 1
        elif mark == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()
