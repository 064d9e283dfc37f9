"""The cost of a pass, fitted to measured times, and loads some passes later."""

from __future__ import annotations

import random

import pytest

from stages.engines.row_loads import EngineLoad, PassCost, RowLoad, fit_pass_cost


def test_times_on_a_line_give_the_line() -> None:
    line = {rows: [0.010 + 0.002 * rows] * 3 for rows in (1, 4, 16)}
    fitted = fit_pass_cost(line)
    assert fitted is not None
    assert (fitted.floor_s, fitted.row_s) == pytest.approx((0.010, 0.002))
    assert fitted.seconds(8) == pytest.approx(0.026)


def test_the_line_is_that_of_least_squares() -> None:
    """By hand: points (1, 1), (2, 3), (3, 2), the last one of two passes: mean 2.25 rows, 2 s; slope 1 / 2.75."""
    fitted = fit_pass_cost({1: [1.0], 2: [3.0], 3: [2.0, 2.0]})
    assert fitted is not None
    assert (fitted.floor_s, fitted.row_s) == pytest.approx((2 - 2.25 / 2.75, 1 / 2.75))


def test_interrupted_passes_do_not_matter() -> None:
    """Up to four of nine passes were a hundred times as long, because another process had the core."""
    rng = random.Random(0)
    times = {rows: [(0.01 + 0.001 * rows) * rng.uniform(0.95, 1.05) for _ in range(9)] for rows in range(1, 17)}
    for rows in times:
        for place in rng.sample(range(9), rng.randint(0, 4)):
            times[rows][place] *= 100
    fitted = fit_pass_cost(times)
    assert fitted is not None
    assert fitted.floor_s == pytest.approx(0.01, rel=0.1)
    assert fitted.row_s == pytest.approx(0.001, rel=0.1)


@pytest.mark.parametrize("times", [{}, {8: [0.02] * 9}, {8: [0.02] * 9, 6: [0.01]}])
def test_similar_numbers_of_rows_give_no_line(times: dict[int, list[float]]) -> None:
    assert fit_pass_cost(times) is None


def test_no_part_is_negative() -> None:
    """Times that fall with the rows have a floor only, the mean. Times that rise faster than the rows have no floor:
    the slope is that of the line through 0."""
    assert fit_pass_cost({1: [0.03], 4: [0.02], 7: [0.01]}) == PassCost(pytest.approx(0.02), 0.0)
    assert fit_pass_cost({1: [0.01], 2: [0.04]}) == PassCost(0.0, pytest.approx((0.01 + 2 * 0.04) / 5))


def test_a_load_grows_older() -> None:
    """A pass over two rows takes 20 ms: three passes in 70 ms. The second row has no keys yet, and nobody knows that
    it is done before the engine says so."""
    rows = (RowLoad((0, 0, 0), 100, 99, 10), RowLoad((0, 0, 1), 50, 0, 2))
    load = EngineLoad(3, 8, rows, 1024, PassCost(0.01, 0.005), 0.001)
    later = load.later(0.07)
    assert later.rows == (RowLoad((0, 0, 0), 103, 102, 7), RowLoad((0, 0, 1), 51, 0, 1))
    assert (later.version, later.cost) == (3, load.cost)
    unmeasured = EngineLoad(3, 8, rows, 1024, None, 0.001)
    assert unmeasured.later(0.07) == unmeasured
