"""A reward that is given a key, as a user's own may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from stages.rewards.protocol import Sample


def keyed(samples: Sequence[Sample], api_key: str, headers: Mapping[str, str], expected: str) -> list[float]:
    """Score nothing where the key is not the one that is expected, which is given backwards."""
    right = api_key == expected[::-1] and headers["X-Anything"] == api_key
    return [float(right) * sum(c in "aeiou" for c in sample.response) for sample in samples]
