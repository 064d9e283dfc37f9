"""What an engine says of its rows in flight, and what it is asked to give away.

Standard library only: whoever decides on migrations needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

RowKey = tuple[int, int, int]
"""(seed, step, row): what the noise of a row is keyed by, and what rows are named by."""


@dataclass(frozen=True)
class RowLoad:
    """A row in flight."""

    key: RowKey
    tokens: int
    """Prompt and response so far."""
    cached: int
    """Positions whose keys and values it holds."""
    left: int
    """Tokens that it may still get: it may end sooner."""


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has in flight, and what it has measured."""

    version: int
    slots: int
    rows: tuple[RowLoad, ...]
    position_bytes: int
    """Of keys and values, all layers."""
    pass_s: float
    """Seconds of a pass with rows that decode, lately; 0 before the first."""
    prefill_s: float
    """Seconds per token that is fed in bulk, lately; 0 before the first."""


@dataclass(frozen=True)
class MigrationRequest:
    """A row to be given away."""

    key: RowKey
    with_cache: bool
    """Whether its keys and values travel, or it is fed again."""
    min_left: int = 0
    """It stays if it can get fewer tokens than these: by the time it is asked for it may be nearly done."""
