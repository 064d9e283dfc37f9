"""A variant's policy against its parent's, by hand."""

from __future__ import annotations

import pytest

from pipeline.observe.variants import compare


def test_policies_are_compared_prompt_by_prompt() -> None:
    """Differences 1, 1, -0.5, 0: mean 0.375, squared deviations 2 * 0.390625 + 0.765625 + 0.140625 = 1.6875, so that
    sd = 0.75 and t = 0.375 / (0.75 / 2) = 1."""
    found = compare({3: 0.0, 5: 1.0, 7: 0.5, 9: 2.0}, {3: 1.0, 5: 2.0, 7: 0.0, 9: 2.0})
    assert (found.num_prompts, found.better, found.worse) == (4, 2, 1)
    assert (found.parent, found.variant, found.difference) == (0.875, 1.25, 0.375)
    assert found.paired_t == pytest.approx(1.0)


def test_equal_scores_have_no_t() -> None:
    assert compare({1: 0.5, 2: 0.5}, {1: 0.5, 2: 0.5}).paired_t is None
