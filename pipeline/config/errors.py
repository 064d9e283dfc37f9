"""How a configuration is refused. May import storage.problems."""

from __future__ import annotations

from storage.problems import Problem


class ConfigError(ValueError):
    """A configuration that cannot work: `key` is the path, the message says what was given and what would work."""

    def __init__(self, key: str, message: str) -> None:
        super().__init__(f"{key}: {message}")
        self.key = key


def refusal(problem: Problem) -> ConfigError:
    """The error that names a problem."""
    return ConfigError(problem.key, f"given {problem.given!r}; {problem.need}")
