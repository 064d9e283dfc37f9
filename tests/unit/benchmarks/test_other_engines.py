"""The peers of the generation benchmark."""

from __future__ import annotations

import sys

import pytest

from benchmarks.other_engines import vllm_process


def test_a_peer_that_ends_is_told_of_with_its_last_words() -> None:
    """Here for want of vLLM; where it is installed, for want of a model."""
    words = r"ended with 1; it said last:\n(?s:.*)('vllm'|'model')"
    with pytest.raises(RuntimeError, match=words), vllm_process(sys.executable, {"draws": "own", "threads": 1}):
        pass
