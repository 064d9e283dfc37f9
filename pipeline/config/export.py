"""The section `export`: which versions are written in Hugging Face layout. May import storage.problems."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from storage.problems import Problem, at_least


@dataclass
class ExportConfig:
    every: int = 0
    """Versions between exports in Hugging Face layout; the last is always exported. 0: only the last."""


def export_problems(config: ExportConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    yield from at_least(0, {"export.every": config.every})
