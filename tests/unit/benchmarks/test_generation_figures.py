"""The figures that `benchmarks/generation.py` computes from its repeats."""

from __future__ import annotations

import math

import pytest

from benchmarks.generation import lost_share


def test_a_repeats_two_sides_are_compared_with_each_other() -> None:
    """The machine is half as fast in the second repeat, which is nobody's loss."""
    share, error = lost_share([1.25, 2.5], [1.0, 2.0])
    assert share == pytest.approx(0.2)
    assert error == pytest.approx(0.0)


def test_the_error_is_that_of_the_mean_of_the_ratios_logarithms() -> None:
    share, error = lost_share([1.0, math.e**2, math.e], [1.0, 1.0, 1.0])
    assert share == pytest.approx(1 - 1 / math.e)
    assert error == pytest.approx(1 / math.sqrt(3))


def test_one_repeat_alone_has_no_error() -> None:
    assert lost_share([2.0], [1.0]) == (0.5, None)
