"""Trees of guesses, and how a pass lays them out and keeps what was right, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from stages.engines.embedded.batch import Draws, keep, lay_out
from stages.engines.embedded.drafts.drafters import Guesses, merge_guesses
from stages.engines.embedded.rows import DraftTree, Row, chain
from stages.engines.embedded.scheduler import Chunk
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from tests.support.engines import row_of

FILM = DraftTree((10, 11, 12, 13, 14), (-1, 0, 1, 0, -1))
"""The one drawn in trees.py: film is a, was, movie."""


def make_row(num_tokens: int, new: int = 30) -> Row:
    request = Request(4, 1, 2, tuple(range(20, 20 + num_tokens)), 0, SamplingConfig(new))
    row = row_of(request)
    row.blocks, row.num_cached = [3, 7], num_tokens  # fed, as the chunks below say
    return row


def test_a_tree_by_hand() -> None:
    assert (len(FILM), FILM.depths, FILM.is_chain) == (5, [0, 1, 2, 1, 0], False)
    assert [FILM.path_to(guess) for guess in range(5)] == [[0], [0, 1], [0, 1, 2], [0, 3], [4]]
    assert [FILM.find_child(-1, 14), FILM.find_child(0, 13), FILM.find_child(1, 13), FILM.find_child(-1, 11)] == [
        4,
        3,
        None,
        None,
    ]
    assert FILM.first(3) == chain((10, 11, 12))
    assert FILM.only([4, 0, 3]) == DraftTree((14, 10, 13), (-1, -1, 1))


def test_a_tree_in_a_pass() -> None:
    """A row of 14 tokens whose last is fed at position 13, with five guesses in cells 14 to 18 at positions 14, 15, 16,
    15, 14; and one that has none."""
    row, other = make_row(14), make_row(2)
    batch = lay_out([Chunk(row, 13, 1, True, FILM), Chunk(other, 0, 2, True)])
    assert batch.ids.tolist() == [33, 10, 11, 12, 13, 14, 20, 21]
    assert batch.positions.tolist() == [13, 14, 15, 16, 15, 14, 0, 1]
    assert batch.drawn.tolist() == [0, 1, 2, 3, 4, 5, 7]
    assert batch.tables.tolist() == [[3, 7], [3, 0]]
    assert batch.tree_paths.cells.tolist() == [13, 14, 15, 16, 17, 18, 0, 1]
    # the fourth and fifth guess are out of place
    assert batch.tree_paths.starts.tolist() == [14, 15, 16, 17, 14, 14, 1, 2]
    assert batch.tree_paths.paths[4, :2].tolist() == [14, 17]
    assert batch.tree_paths.paths[5, :1].tolist() == [18]
    keys = dict(zip(batch.drawn.tolist(), batch.keys.tolist(), strict=True))
    assert keys[2] == keys[4]  # alternatives for one position are drawn with one noise
    assert len({keys[0], keys[1], keys[2], keys[3]}) == 4


def test_a_table_follows_the_blocks_of_its_row() -> None:
    """Blocks are appended, and a row that was preempted gets others, as many as before."""
    row = make_row(14)
    for block in range(20, 30):
        row.blocks.append(block)
        assert row.table(len(row.blocks)).tolist() == row.blocks
    assert row.table(3).tolist() == [3, 7, 20]
    for blocks in ([4], [6]):
        row.blocks = blocks
        assert row.table(1).tolist() == blocks


@pytest.mark.parametrize(
    ("draws", "kept", "cached", "again"),
    [
        ([9, 0, 0, 0, 0, 0], [0], 14, 0),  # no guess is right
        ([10, 11, 12, 8, 0, 0], [0, 1, 2, 3], 17, 0),  # the first line, to its end
        ([10, 13, 0, 0, 9, 0], [0, 1, 4], 15, 1),  # film was: one in place, one beside
        ([14, 0, 0, 0, 0, 9], [0, 5], 14, 1),  # movie
    ],
)
def test_what_is_kept(draws: list[int], kept: list[int], cached: int, again: int) -> None:
    row = make_row(14)
    drawn = Draws(np.array(draws), np.full(6, -0.5, np.float32))
    assert keep([Chunk(row, 13, 1, True, FILM)], drawn, 3) == [kept]
    assert row.tokens[14:] == [draws[place] for place in kept]
    assert (row.num_cached, row.num_to_refeed, row.num_pending) == (cached, again, 1 + again)
    assert row.decodes
    assert row.versions == [3] * len(kept)


def test_what_lies_behind_a_rows_end_is_not_kept() -> None:
    row = make_row(14, new=2)
    drawn = Draws(np.array([10, 11, 12, 8, 0, 0]), np.full(6, -0.5, np.float32))
    assert keep([Chunk(row, 13, 1, True, FILM)], drawn, 3) == [[0, 1]]
    assert row.num_left == 0


def guesses(tree: DraftTree, kind: str, *gains: float) -> Guesses:
    return Guesses(tree, (kind,) * len(tree), tuple(range(len(tree))), gains)


def test_guesses_are_fed_with_the_likeliest_line_first() -> None:
    given = guesses(DraftTree((10, 11, 12, 13), (-1, -1, 1, 0)), "a", 0.3, 0.6, 0.2, 0.25)
    assert given.main_chain == [1, 2]
    fed = given.as_fed()
    assert fed.tree == DraftTree((11, 12, 10, 13), (-1, 0, -1, 2))
    assert (fed.gains, fed.levels) == ((0.6, 0.2, 0.3, 0.25), (1, 2, 0, 3))
    assert fed.total == pytest.approx(1.35)


def test_guesses_of_two_drafters_are_joined() -> None:
    """Both guess 10. The first continues with 11; the second, which is surer of 10, with 12; 13 is its own guess."""
    first = guesses(chain((10, 11)), "a", 0.5, 0.4)
    second = guesses(DraftTree((13, 10, 12), (-1, -1, 1)), "b", 0.1, 0.7, 0.3)
    both = merge_guesses(first, second)
    assert both.tree == DraftTree((10, 11, 13, 12), (-1, 0, -1, 0))
    assert both.kinds == ("b", "a", "b", "b")
    assert both.gains == (0.7, 0.4, 0.1, 0.3)
