"""The cost model and the drafter, without any model or clock."""

from __future__ import annotations

import queue
import threading

import pytest

from stages.engines.config import SamplingConfig
from stages.engines.drafting import Draft, NgramDrafter
from stages.engines.protocol import Request
from stages.engines.rows import Call, Row
from stages.engines.scheduler import Chunk
from stages.engines.speculation import PassCosts, Speculation, choose_lengths

FLAT = PassCosts({1: 1.0, 64: 1.0})
"""A pass costs the same whatever its size: memory-bound."""
STEEP = PassCosts({1: 1.0, 64: 64.0})
"""A pass costs in proportion to its tokens: compute-bound."""


def make_row(prompt: tuple[int, ...], response: tuple[int, ...] = (), new: int = 30) -> Row:
    request = Request(0, 1, 1, prompt, 0, SamplingConfig(new))
    row = Row(request, Call(queue.SimpleQueue(), threading.Event()), frozenset())
    for token in response:
        row.append(token, 0.0, 0)
    return row


def test_costs_between_and_beyond_the_sizes() -> None:
    costs = PassCosts({1: 10.0, 4: 16.0, 8: 15.0})  # 8 cannot be faster than 4
    assert [costs.seconds(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([10, 12, 16, 16, 16, 16])
    assert STEEP.seconds(100) == pytest.approx(100.0)


def test_costs_follow_what_is_observed() -> None:
    costs = PassCosts({1: 1.0, 2: 1.0, 4: 1.0})
    for _ in range(100):
        costs.observe(2, 3.0)
    assert costs.curve == pytest.approx({1: 1.0, 2: 3.0, 4: 1.0}, rel=1e-3)


def test_lengths_by_hand() -> None:
    """Two rows. T = 1, 1, 1 for 2 to 4 tokens, then 1 more for each: the third draft would give 2 + .9 + .8 + .5 tokens
    in 2 s, the two best ones 3.7 in 1 s. They are the first of each row."""
    costs = PassCosts({1: 1.0, 4: 1.0, 64: 61.0})
    assert choose_lengths(2, 2, [[0.9, 0.5], [0.8, 0.1]], costs.seconds) == [1, 1]
    assert choose_lengths(2, 2, [[0.9, 0.85], [0.8, 0.1]], costs.seconds) == [2, 0]


def test_lengths_at_the_extremes() -> None:
    assert choose_lengths(16, 16, [[0.9, 0.8]] * 16, FLAT.seconds) == [2] * 16
    assert choose_lengths(16, 16, [[0.9, 0.8]] * 16, STEEP.seconds) == [0] * 16
    assert choose_lengths(1, 1, [], FLAT.seconds) == []


class CountingDrafter:
    def __init__(self) -> None:
        self.asked = 0

    def propose(self, row: Row, longest: int) -> Draft | None:
        self.asked += 1
        return Draft((1,) * longest, "ones")

    def finish(self, row: Row) -> None: ...


def test_no_draft_is_looked_for_where_none_can_pay() -> None:
    drafter = CountingDrafter()
    rows = [make_row((1, 2, 3)) for _ in range(4)]
    assert Speculation(drafter, STEEP, 4, "measured").propose(rows, 0) == {}
    assert drafter.asked == 0
    assert Speculation(drafter, FLAT, 4, "measured").propose(rows, 0) == {row: (1, 1, 1, 1) for row in rows}
    assert Speculation(drafter, STEEP, 4, "longest").propose(rows, 0) == {row: (1, 1, 1, 1) for row in rows}


def test_wrong_drafts_are_given_up_and_right_ones_kept() -> None:
    """A pass costs 1 + 0.3 for each token more: worth it at an acceptance above about 0.3."""
    for accepted, expected in ((0, 0), (4, 4)):
        speculation = Speculation(CountingDrafter(), PassCosts({1: 1.0, 11: 4.0}), 4, "measured")
        row = make_row((1, 2, 3))
        for _ in range(30):
            drafts = speculation.propose([row], 0).get(row, ())
            kept = min(accepted, len(drafts)) + 1
            speculation.observe([Chunk(row, 2, 1, True, drafts)], [kept], 1.0 + 0.3 * len(drafts))
        assert len(speculation.propose([row], 0).get(row, ())) == expected


def test_drafts_end_where_the_row_does() -> None:
    """The last token is sampled anyway: of 3 left, 2 can be drafted."""
    row = make_row((1, 2), (3,) * 27)
    assert Speculation(CountingDrafter(), FLAT, 8, "longest").propose([row], 0) == {row: (1, 1)}


def test_lookup_in_the_row_itself() -> None:
    drafter = NgramDrafter()
    row = make_row((1, 2, 3, 4, 5, 6), (9, 2, 3))
    assert drafter.propose(row, 2) == Draft((4, 5), "lookup-2")
    row.append(4, 0.0, 0)
    assert drafter.propose(row, 9) == Draft((5, 6, 9, 2, 3, 4), "lookup-3")
    row.append(7, 0.0, 0)
    assert drafter.propose(row, 2) is None


def test_lookup_in_earlier_rows_of_the_prompt() -> None:
    drafter = NgramDrafter()
    drafter.finish(make_row((1, 2), (3, 4, 5), new=3))
    drafter.finish(make_row((1, 2), (8,), new=3))  # given up: not a response
    assert drafter.propose(make_row((1, 2)), 8) == Draft((3, 4, 5), "earlier-2")
    assert drafter.propose(make_row((1, 7)), 8) is None
    drafter.finish(make_row((1, 2), (6, 7, 8), new=3))
    assert drafter.propose(make_row((1, 2)), 8) == Draft((6, 7, 8), "earlier-2")
