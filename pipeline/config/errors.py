"""How a configuration is refused. May import storage.problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from storage.problems import Problem


class ConfigError(ValueError):
    """A configuration that cannot work: `key` is the path, the message says what was given and what would work."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


def refusal(problem: Problem) -> ConfigError:
    """The error that names a problem."""
    return ConfigError(problem.key, f"given {problem.given!r}; {problem.need}")


def together(errors: Sequence[ConfigError]) -> ConfigError:
    """Several errors as one, a line each; its key is the first one's. Of each key the first thing is said."""
    by_key: dict[str, ConfigError] = {}
    for error in errors:
        by_key.setdefault(error.key, error)
    first, *others = by_key.values()
    if not others:
        return first
    message = str(first).removeprefix(f"{first.key}: ")
    return ConfigError(first.key, "\n".join([message, *map(str, others)]))


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """What these checks return. Raises ConfigError with what all of those say that refuse."""
    results, errors = [], []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            errors.append(error)
    if errors:
        raise together(errors)
    return results
