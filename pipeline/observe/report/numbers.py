"""Values for the page: rounded numbers (null if not finite), and a response as one piece of text per token. Pure
functions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from storage.rollout_root import Decode


def number(value: float | None, digits: int = 5) -> float | None:
    """Round to significant digits. Return None for a value that is not finite, because JSON cannot hold it."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


def numbers(values: Iterable[float], digits: int = 4) -> list[float | None]:
    return [number(float(value), digits) for value in values]


def evenly(total: int, most: int) -> list[int]:
    """Return a limited number of indices spread evenly over range(total), with both ends (of one: the last)."""
    if total <= most:
        return list(range(total))
    if most < 2:
        return [total - 1] * most
    return [round(i * (total - 1) / (most - 1)) for i in range(most)]


# ---- pieces ----------------------------------------------------------------------------------------------

_TORN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Tokens of a byte each that a character may take; what is longer torn is no text."""


def pieces(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """Return the text that each token adds to the tokens before it. If several tokens make one character, the last of
    them has it and the others are empty. Decoding works in windows: a token's text depends on the one before it
    (spaces), and decoding a whole response for each of its tokens would take quadratic time."""
    found: list[str] = []
    start = done = 0
    for end in range(1, len(tokens) + 1):
        before, text = decode(list(tokens[start:done])), decode(list(tokens[start:end]))
        if text.endswith(_TORN) and end < len(tokens) and end - done < _LONGEST_CHARACTER:
            found.append("")
            continue
        found.append(text[len(before) :])
        start, done = done, end
    return found
