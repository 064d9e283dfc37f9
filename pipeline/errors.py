"""Errors that end a command: `ConfigError` (exit code 2), with functions that report several problems as one error, and
`StageFailed` with its kinds (exit code 3). Light to import, because every command imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from storage.problems import Problem
from storage.redaction import redacted


class ConfigError(ValueError):
    """A configuration that cannot work: `key` is the path, the message says what was given and what would work."""

    def __init__(self, key: str, message: str, others: Sequence[ConfigError] = ()) -> None:
        """`others`: further errors; their messages follow below this one's."""
        super().__init__("\n".join([f"{key}: {message}", *map(str, others)]))
        self.key = key
        self._alone, self._others = message, tuple(others)

    @property
    def message(self) -> str:
        """The whole message without the first error's key."""
        return str(self).removeprefix(f"{self.key}: ")

    @property
    def errors(self) -> list[ConfigError]:
        """The errors that this one stands for."""
        return [ConfigError(self.key, self._alone), *self._others] if self._others else [self]


class OtherProgramsConfig(ConfigError):
    """Error: a directory holds the config of another program, not a run's."""


def refusal(problem: Problem) -> ConfigError:
    """Return the error of a problem, without secrets in the given value."""
    [given] = redacted({problem.key: problem.given}).values()
    return ConfigError(problem.key, f"given {given!r}; {problem.need}")


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with all of these problems, if there are any."""
    if errors := [refusal(problem) for problem in problems]:
        raise join_errors(errors)


def join_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """Return several errors as one, a line each. Its key is the first error's. Only the first error of each key is
    kept."""
    by_key: dict[str, ConfigError] = {}
    for error in (one for several in errors for one in several.errors):
        by_key.setdefault(error.key, error)
    first, *others = by_key.values()
    return ConfigError(first.key, first.message, others) if others else first


def run_checks(*checks: Callable[[], Any]) -> list[Any]:
    """Run all checks and return their results. Raises ConfigError with the errors of all checks that fail."""
    results, errors = _tried(checks)
    if errors:
        raise join_errors(errors)
    return results


def refusals(*checks: Callable[[], Any]) -> list[ConfigError]:
    """Run all checks and return the errors of those that fail."""
    return _tried(checks)[1]


def _tried(checks: Sequence[Callable[[], Any]]) -> tuple[list[Any], list[ConfigError]]:
    results, errors = [], []
    for check in checks:
        try:
            results.append(check())
        except ConfigError as error:
            errors.append(error)
    return results, errors


class StageFailed(RuntimeError):
    """A stage raised, or a node or worker was lost too often."""

    def __init__(self, message: str, further: Mapping[str, str] = MappingProxyType({})) -> None:
        """`further`: label -> a path or a command that helps to find the cause. Commands print each on its own line."""
        super().__init__(message)
        self.further = dict(further)


class WorkersMissing(StageFailed):
    """A worker that the run needs is missing. It may start on other nodes of the cluster."""


class StoredWrongly(StageFailed):
    """Stored data was found damaged or inconsistent during the run."""
