"""Records for planning migrations: an engine's rows in flight, and the rows that it shall give away.

Standard library only: the driver, which plans migrations, does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

RowKey = tuple[int, int, int]
"""(seed, step, row): a row's name, and the key of its noise."""


@dataclass(frozen=True)
class RowLoad:
    """A row in flight."""

    key: RowKey
    tokens: int
    """Tokens of the prompt and of the response so far."""
    cached: int
    """Positions whose keys and values are cached."""
    left: int
    """Most tokens that it may still get."""


@dataclass(frozen=True)
class EngineLoad:
    """The rows that an engine has in flight, and its measured speed."""

    version: int
    max_rows: int
    rows: tuple[RowLoad, ...]
    position_bytes: int
    """Bytes of one position's keys and values in all layers."""
    pass_s: float
    """Recent seconds of a pass that decodes rows; 0 before the first."""
    prefill_s: float
    """Recent seconds per prefilled token; 0 before the first."""


@dataclass(frozen=True)
class MigrationRequest:
    """A row that an engine shall give away."""

    key: RowKey
    with_cache: bool
    """True: send its keys and values. False: the target computes them again."""
    min_left: int = 0
    """The row stays if it can get fewer tokens than this: it may be nearly done by then."""
