"""Records for planning migrations: the rows that an engine has in flight, and the rows that it shall give to another
engine.

Uses only the standard library, since the driver, which plans migrations, does not load torch.
"""

from __future__ import annotations

from dataclasses import dataclass

RowKey = tuple[int, int, int]
"""(seed, step, row): the identity of a row, and a part of the key of its noise."""


@dataclass(frozen=True)
class RowLoad:
    """A row in flight, as planning needs it."""

    key: RowKey
    tokens: int
    """Number of tokens of the prompt and of the response so far."""
    cached: int
    """Number of positions whose keys and values are cached."""
    left: int
    """Maximum number of tokens that the row can still get."""


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
    """A request to an engine to give a row to another engine."""

    key: RowKey
    with_cache: bool
    """True to send the row's keys and values. If False, the other engine computes them again."""
    min_left: int = 0
    """Minimum number of tokens left to sample. If fewer are left, the row stays, since it has come close to its end
    after the request was made."""
