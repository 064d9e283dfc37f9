"""How a configuration is refused. May import storage.problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from storage.problems import Problem


class ConfigError(ValueError):
    """A configuration that cannot work: `key` is the path, the message says what was given and what would work."""

    def __init__(self, key: str, message: str, others: Sequence[ConfigError] = ()) -> None:
        """`others`: further errors, whose messages this one's has below its own."""
        super().__init__("\n".join([f"{key}: {message}", *map(str, others)]))
        self.key = key
        self._alone, self._others = message, tuple(others)

    @property
    def message(self) -> str:
        """All that it says, less the first error's key."""
        return str(self).removeprefix(f"{self.key}: ")

    @property
    def each(self) -> list[ConfigError]:
        """The errors that this one stands for."""
        return [ConfigError(self.key, self._alone), *self._others] if self._others else [self]


class OtherProgramsConfig(ConfigError):
    """What a directory holds is the config of another program than a run."""


def refusal(problem: Problem) -> ConfigError:
    """The error that names a problem."""
    return ConfigError(problem.key, f"given {problem.given!r}; {problem.need}")


def together(errors: Sequence[ConfigError]) -> ConfigError:
    """Several errors as one, a line each; its key is the first one's. Of each key the first thing is said."""
    by_key: dict[str, ConfigError] = {}
    for error in (one for several in errors for one in several.each):
        by_key.setdefault(error.key, error)
    first, *others = by_key.values()
    return ConfigError(first.key, first.message, others) if others else first


def all_of(*checks: Callable[[], Any]) -> list[Any]:
    """What these checks return. Raises ConfigError with what all of those say that refuse."""
    results, errors = _tried(checks)
    if errors:
        raise together(errors)
    return results


def refusals(*checks: Callable[[], Any]) -> list[ConfigError]:
    """What those of these checks say that refuse."""
    return _tried(checks)[1]


def _tried(checks: Sequence[Callable[[], Any]]) -> tuple[list[Any], list[ConfigError]]:
    results, errors = [], []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            errors.append(error)
    return results, errors
