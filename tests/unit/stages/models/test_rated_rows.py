"""The human ratings of the demo's snippets, as a reward model reads them."""

from __future__ import annotations

from stages.models.assets import rated_rows


def test_mean_and_spread_are_those_of_the_ratings_and_a_snippet_is_there_once() -> None:
    """1, 2, 3, 2: mean 2, sum of squares 2, of n - 1 = 3 degrees of freedom."""
    reviews = [["7", "2.01", "A film."], ["8", "-4", "B film."], ["9", "1", "A film."]]
    ratings = [["8", "-4", "0", "[-4, -4]"], ["9", "1", "0", "[1, 1]"], ["7", "2.0", "0.7", "[1, 2, 3, 2]"]]
    assert [*rated_rows(reviews, ratings)] == [
        "7\t2.000000\t0.816497\t4\tA film.",
        "8\t-4.000000\t0.000000\t2\tB film.",
    ]
