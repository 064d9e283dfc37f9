"""A score or a KL in words: one way of writing them for tables, headlines and descriptions. Pure. Standard library
only."""

from __future__ import annotations

_SMALLEST, _LARGEST = 0.0005, 1e6
"""Between them three decimals say something and are not too many."""
_NOTHING = 1e-6
"""Less is rounding: the KL of weights to themselves is 1e-8, not 0."""


def three(value: float, *, sign: bool = False) -> str:
    """With three decimals; what would be 0.000 though it is more than rounding, or have more than six digits before
    the point, with three significant ones: 0.250, 3.1e-05, 1.25e+30, nan. `sign`: + in front of what is not below 0."""
    if abs(value) < _NOTHING:
        value = 0.0  # and not -0.000
    kind = ".3f" if value == 0 or _SMALLEST <= abs(value) < _LARGEST else ".3g"
    return f"{value:{'+' if sign else ''}{kind}}"
