"""What of a config cannot work: the form in which every section's checks say it, and the checks that several share.

A section's checks are a pure function beside its dataclass, `NAME_problems(config)`, that yields a `Problem` for each
value that cannot work. Standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """A value that cannot work."""

    key: str
    """Path of the setting, as a user writes it: `engine.slots`."""
    given: object
    need: str
    """What would work."""


def at_least(least: int, values: Mapping[str, float | None], hint: str = "") -> Iterator[Problem]:
    """Of numbers by their keys: those below `least`, and those that are not finite. None is no number."""
    for key, value in values.items():
        if value is not None and not (math.isfinite(value) and value >= least):
            yield Problem(key, value, f"must be {_finite(value)}{least} or more{hint}")


def above(bound: int, values: Mapping[str, float | None], hint: str = "") -> Iterator[Problem]:
    """Of numbers by their keys: those not above `bound`, and those that are not finite. None is no number."""
    for key, value in values.items():
        if value is not None and not (math.isfinite(value) and value > bound):
            yield Problem(key, value, f"must be {_finite(value)}above {bound}{hint}")


def finite(values: Mapping[str, float | None], hint: str = "") -> Iterator[Problem]:
    """Of numbers by their keys: infinities, and what is no number at all. None is none of them."""
    for key, value in values.items():
        if value is not None and not math.isfinite(value):
            yield Problem(key, value, f"must be finite{hint}")


def _finite(value: float) -> str:
    return "" if math.isfinite(value) else "finite, and "


def divides(key: str, part: int, whole_key: str, whole: int) -> Iterator[Problem]:
    """A `part` of 1 or more that does not divide the `whole`."""
    if part >= 1 and whole % part:
        divisors = ", ".join(str(number) for number in range(1, whole + 1) if whole % number == 0)
        yield Problem(key, part, f"must divide {whole_key} = {whole}: one of {divisors}")
