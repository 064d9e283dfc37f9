"""Distributions of the lengths of responses."""

from __future__ import annotations

from statistics import fmean, median

import pytest

from pipeline.errors import ConfigError
from pipeline.plan.lengths import (
    EmpiricalLengths,
    FixedLengths,
    Lengths,
    LognormalLengths,
    lognormal_with_mean,
    parse_lengths,
)


@pytest.mark.parametrize("lengths", [LognormalLengths(50.0, 0.8, 64, seed=3), EmpiricalLengths(range(1, 200), seed=3)])
def test_lengths_are_a_function_of_seed_step_and_shard(lengths: Lengths) -> None:
    rows = lengths.rows(4, 2, 16)
    assert rows == lengths.rows(4, 2, 16)
    assert rows != lengths.rows(4, 3, 16)
    assert rows != lengths.rows(5, 2, 16)


def test_lognormal_lengths_are_cut() -> None:
    rows = LognormalLengths(100.0, 1.0, 120).rows(0, 0, 4000)
    assert min(rows) >= 1
    assert max(rows) == 120
    assert median(rows) == pytest.approx(100, rel=0.05)


@pytest.mark.parametrize("most", [60, 150, 10_000])
def test_the_mean_after_the_cut_is_that_of_a_sample(most: int) -> None:
    lengths = LognormalLengths(100.0, 0.7, most)
    assert lengths.mean == pytest.approx(fmean(lengths.rows(0, 0, 40_000)), rel=0.02)


def test_a_lognormal_with_a_given_mean_has_it() -> None:
    assert lognormal_with_mean(340, 0.9, 1024).mean == pytest.approx(340)
    assert lognormal_with_mean(1000, 0.9, 1024).mean == pytest.approx(1000)


def test_empirical_lengths_are_those_of_the_run() -> None:
    assert set(EmpiricalLengths([3, 7]).rows(0, 0, 100)) == {3, 7}


def test_texts_name_distributions() -> None:
    assert parse_lengths("fixed:12", 64) == FixedLengths(12)
    found = parse_lengths("lognormal:30,0.5", 64, seed=2)
    assert isinstance(found, LognormalLengths)
    assert (found.mean, found.sigma, found.most, found.seed) == (pytest.approx(30), 0.5, 64, 2)


@pytest.mark.parametrize(
    "text",
    ["12", "fixed:0", "fixed:65", "fixed:1.5", "fixed:nan", "lognormal:30", "lognormal:64,1", "lognormal:8,0", "x:1"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_lengths(text, 64)
    assert caught.value.key == "--lengths"
