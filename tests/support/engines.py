"""Helpers for tests of the embedded engine: models, engines and comparisons."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable, Mapping

import numpy as np

from stages.engines.embedded.rows import GenerateCall, Row
from stages.engines.protocol import Completion, Request


def row_of(request: Request) -> Row:
    """As the engine accepts it, from a caller of its own."""
    return Row(request, GenerateCall(queue.SimpleQueue(), threading.Event()), frozenset())


def by_row(completions: Iterable[Completion]) -> dict[int, Completion]:
    return {completion.row: completion for completion in completions}


def assert_same_bits(got: Mapping[int, Completion], expected: Mapping[int, Completion]) -> None:
    assert got.keys() == expected.keys()
    for row, completion in got.items():
        np.testing.assert_array_equal(completion.tokens, expected[row].tokens)
        np.testing.assert_array_equal(completion.logprobs, expected[row].logprobs)
        np.testing.assert_array_equal(completion.versions, expected[row].versions)
        assert completion.finish_reason is expected[row].finish_reason
