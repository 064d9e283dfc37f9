"""A response as one piece of text for each token. Pure functions; may import storage.vocabulary for a type."""

from __future__ import annotations

from collections.abc import Sequence

from storage.vocabulary import Decode

_TORN = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 4
"""Tokens of a byte each that a character may take; what is longer torn is no text."""


def pieces(decode: Decode, tokens: Sequence[int]) -> list[str]:
    """What each token adds to the text of those before it. Of a character of several tokens the last one has it, and
    the others are empty. Decoded in windows, since a token's text depends on the one before it (spaces) and decoding
    all of a response for each of its tokens would take the square of its length."""
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
