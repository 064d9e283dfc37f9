"""Numbers as they go into the page: finite or null, and no longer than a reader needs. Pure functions. Standard
library only."""

from __future__ import annotations

import math
from collections.abc import Iterable


def number(value: float | None, digits: int = 5) -> float | None:
    """To so many significant digits; None for what is not finite, which JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    return [number(float(value), digits) for value in values]


def evenly(total: int, most: int) -> list[int]:
    """At most so many of 0..total-1, spread evenly, the first and the last among them (of one: the last)."""
    if total <= most:
        return list(range(total))
    if most < 2:
        return [total - 1] * most
    return [round(i * (total - 1) / (most - 1)) for i in range(most)]
