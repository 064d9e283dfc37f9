"""Settings of an embedded engine, written flat."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from stages.engines.config import EmbeddedConfig, EngineConfig

_EMBEDDED = frozenset(field.name for field in fields(EmbeddedConfig))


def embedded(max_rows: int, **settings: Any) -> EngineConfig:
    """`settings` by the names of `EngineConfig` and of its section `embedded`."""
    section = EmbeddedConfig(**{key: value for key, value in settings.items() if key in _EMBEDDED})
    common = {key: value for key, value in settings.items() if key not in _EMBEDDED}
    return EngineConfig(max_rows=max_rows, embedded=section, **common)
