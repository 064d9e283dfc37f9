"""Errors that end a command: `ConfigError` (exit code 2), with functions that report several problems as one error, and
`StageFailed` with its kinds (exit code 3). The module is light to import, because every command imports it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from storage.problems import Problem, value_text
from storage.redaction import redacted


class ConfigError(ValueError):
    """A configuration that cannot work. `key` is the key path of the setting, or the file. The message says what was
    given and what would work."""

    def __init__(self, key: str, message: str, others: Sequence[ConfigError] = ()) -> None:
        """`others`: further errors, whose messages are appended on further lines."""
        super().__init__("\n".join([f"{key}: {message}", *map(str, others)]))
        self.key = key
        self._alone, self._others = message, tuple(others)

    @property
    def message(self) -> str:
        """The error's text without its key. If the error combines several errors, this is the text of the first error,
        followed by the keys and texts of all others."""
        return str(self).removeprefix(f"{self.key}: ")

    @property
    def errors(self) -> list[ConfigError]:
        """All errors that this error combines: the first error, then `others`."""
        return [ConfigError(self.key, self._alone), *self._others] if self._others else [self]

    @property
    def keys(self) -> list[str]:
        """Keys of all errors that this error combines."""
        return [error.key for error in self.errors]


class OtherProgramsConfig(ConfigError):
    """The config in a directory belongs to another program, so the directory is not the directory of a run."""


def refusal(problem: Problem) -> ConfigError:
    """Return the error that reports a problem. Secrets in the given value are redacted."""
    [given] = redacted({problem.key: problem.given}).values()
    return ConfigError(problem.key, f"given {value_text(given)}; {problem.need}")


def refuse(problems: Iterable[Problem]) -> None:
    """Raise one ConfigError that reports all problems. Do nothing if there is no problem."""
    if errors := [refusal(problem) for problem in problems]:
        raise join_errors(errors)


def join_errors(errors: Sequence[ConfigError]) -> ConfigError:
    """Combine errors into one error, whose message has a line for each. The key of the first error becomes its key. If
    several errors have the same key, only the first of them is kept."""
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
    """Run all checks and return the ConfigErrors that they raised. Empty if every check passes."""
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
    """A stage raised an error, or a node or worker was lost too often."""

    def __init__(self, message: str, further: Mapping[str, str] = MappingProxyType({})) -> None:
        """`further`: label -> a path or a command that helps to find the cause. The command line prints each entry on a
        line of its own."""
        super().__init__(message)
        self.further = dict(further)


class WorkersMissing(StageFailed):
    """A worker that the run needs did not start in time. The worker may be able to start on other nodes of the
    cluster."""


class StoredWrongly(StageFailed):
    """Stored data was found damaged or inconsistent during the run."""
