"""Records for planning migrations, i.e. moves of rows between engines: the rows that an engine has in flight, the cost
of its passes, and the requests to give rows to another engine.

Uses only the standard library, since the driver, which plans migrations, does not load torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median

RowKey = tuple[int, int, int]
"""(seed, step, row): the identity of a row, and a part of the key of its noise."""
COPY_POSITIONS = 128
"""Maximum number of positions whose keys and values are copied between two passes. A whole number of cache blocks."""
SMALLEST_SPREAD = 1.5
"""Minimum spread of the numbers of rows in the measured passes: the largest number divided by the smallest. With less
spread the function `fit_pass_cost` fits no line, since the slope would depend mostly on the scatter of the measured
times."""


@dataclass(frozen=True)
class PassCost:
    """Seconds of a decoding pass as a function of its rows: floor_s + row_s * rows."""

    floor_s: float
    """Seconds that a pass takes even with very few rows, mainly to read the weights."""
    row_s: float
    """Seconds that each row adds to a decoding pass."""

    def seconds(self, rows: int) -> float:
        """Return the seconds of a pass over this many rows."""
        return self.floor_s + self.row_s * rows


def can_fit_line(numbers: Collection[int]) -> bool:
    """Return True if these numbers of rows are far enough apart to fit a line to the times of their passes: the largest
    is at least `SMALLEST_SPREAD` times the smallest. Return False if there are no numbers."""
    return bool(numbers) and max(numbers) >= SMALLEST_SPREAD * min(numbers)


def fit_pass_cost(seconds: Mapping[int, Collection[float]]) -> PassCost | None:
    """Fit seconds = floor_s + row_s * rows to measured passes. Return None if their numbers of rows are too similar.

    For each number of rows the fit uses the median of the seconds, so a pass that was interrupted does not matter. The
    result is the least-squares line through these medians, each weighted by its number of passes. If a coefficient of
    this line is negative, it is set to 0 and the other coefficient is fitted alone.

    Args:
        seconds: number of rows -> seconds of each measured pass with that many rows.
    """
    points = [(rows, median(times), len(times)) for rows, times in seconds.items()]
    if not can_fit_line([rows for rows, _, _ in points]):
        return None
    weight = sum(w for _, _, w in points)
    mean_rows = sum(w * rows for rows, _, w in points) / weight
    mean_s = sum(w * s for _, s, w in points) / weight
    slope = sum(w * (rows - mean_rows) * (s - mean_s) for rows, s, w in points)
    slope /= sum(w * (rows - mean_rows) ** 2 for rows, _, w in points)
    if slope < 0:
        return PassCost(mean_s, 0.0)
    if mean_s < slope * mean_rows:
        return PassCost(0.0, sum(w * rows * s for rows, s, w in points) / sum(w * rows**2 for rows, _, w in points))
    return PassCost(mean_s - slope * mean_rows, slope)


@dataclass(frozen=True)
class RowLoad:
    """Facts about a row in flight that the planning of migrations needs."""

    key: RowKey
    tokens: int
    """Number of tokens of the prompt and of the response so far."""
    cached: int
    """Number of positions whose keys and values are cached."""
    left: int
    """Maximum number of tokens that can still be sampled for the row."""


@dataclass(frozen=True)
class EngineLoad:
    """The rows that an engine has in flight and may give to another engine, and the engine's measured speed."""

    version: int
    max_rows: int
    rows: tuple[RowLoad, ...]
    position_bytes: int
    """Bytes of one position's keys and values in all layers."""
    cost: PassCost | None
    """Cost of a pass that only decodes. None until the measured passes differ enough in their numbers of rows (see
    `can_fit_line`)."""
    prefill_s: float
    """Running mean of the seconds that feeding one prompt token takes; 0 before the first measurement."""

    @property
    def pass_s(self) -> float:
        """Seconds of a pass over the rows that run now. Only for a load whose `cost` is known."""
        assert self.cost is not None
        return self.cost.seconds(min(len(self.rows), self.max_rows))

    def later(self, seconds: float) -> EngineLoad:
        """Return the load after this many seconds of passes over the same rows. It is assumed that no row finishes, so
        each keeps at least one token to sample."""
        if self.cost is None or not self.rows:
            return self
        passes = int(seconds / self.pass_s)
        return replace(self, rows=tuple(_advance_row(row, min(passes, row.left - 1)) for row in self.rows))


def _advance_row(row: RowLoad, passes: int) -> RowLoad:
    cached = row.cached + passes if row.cached else 0
    return replace(row, tokens=row.tokens + passes, cached=cached, left=row.left - passes)


@dataclass(frozen=True)
class MigrationRequest:
    """A request to an engine to give a row to another engine."""

    key: RowKey
    with_cache: bool
    """True to send the row's keys and values. If False, the other engine computes the keys and values again."""
    min_left: int = 0
    """Minimum number of tokens that must be left to sample; 0: no minimum. It is checked when the engine handles this
    migration request. A row with fewer tokens left is not migrated, since it will finish soon."""
