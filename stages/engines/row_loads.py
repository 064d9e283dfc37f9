"""Records for planning migrations: the rows in flight of an engine, and the rows that it is to give to another engine.

Standard library only: the driver, which plans migrations, does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

RowKey = tuple[int, int, int]
"""(seed, step, row): identifies a row, and keys its noise."""


@dataclass(frozen=True)
class RowLoad:
    """A row in flight."""

    key: RowKey
    tokens: int
    """Number of tokens of the prompt and of the response so far."""
    cached: int
    """Number of positions whose keys and values are cached."""
    left: int
    """Most tokens that the row may still get."""


@dataclass(frozen=True)
class EngineLoad:
    """The rows that an engine has in flight, and its measured speed."""

    version: int
    max_rows: int
    rows: tuple[RowLoad, ...]
    position_bytes: int
    """Bytes of one position's keys and values in all layers."""
    pass_s: float
    """Running mean of the seconds of a pass that only decodes; 0 before the first one."""
    prefill_s: float
    """Running mean of the seconds per prompt token that is fed; 0 before the first one."""


@dataclass(frozen=True)
class MigrationRequest:
    """A row that an engine is to give to another engine."""

    key: RowKey
    with_cache: bool
    """True: send its keys and values. False: the target computes them again."""
    min_left: int = 0
    """The row stays if fewer tokens than this are left to sample, since it may have come close to its end meanwhile."""
