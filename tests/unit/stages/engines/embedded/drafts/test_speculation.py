"""The cost model and the drafter by lookup, without any model or clock."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from stages.engines.embedded.drafts.calibration import TrainingShare
from stages.engines.embedded.drafts.costs import (
    DraftingCosts,
    PassCosts,
    Trials,
    choose_depth,
    choose_guesses,
)
from stages.engines.embedded.drafts.drafters import Draft, Drafter, NgramDrafter
from stages.engines.embedded.drafts.speculation import Speculation
from stages.engines.embedded.rows import NO_GUESSES, DraftTree, Row, chain
from stages.engines.embedded.scheduler import Chunk
from stages.engines.protocol import Request
from stages.models.config import SamplingConfig
from tests.support.engines import row_of

FLAT = {1: 1.0, 64: 1.0}
"""A pass costs the same whatever its size: memory-bound."""
STEEP = {1: 1.0, 64: 64.0}
"""A pass costs in proportion to its tokens: compute-bound."""


def make_row(prompt: tuple[int, ...], response: tuple[int, ...] = (), new: int = 30) -> Row:
    row = row_of(Request(0, 1, 1, prompt, 0, SamplingConfig(new)))
    for token in response:
        row.append(token, 0.0, 0)
    return row


class Ones:
    """Says 1 whatever comes, and counts what it is asked."""

    kinds: tuple[str, ...] = ("ones",)
    wants_hidden = False

    def __init__(self, by_position: bool = False, levels: tuple[int, ...] = ()) -> None:
        self.by_position = by_position
        self.levels = levels
        self.asked: list[list[int]] = []
        self.seen: list[np.ndarray] = []
        self.lessons = 0
        self.generation = 0

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        self.asked.append(list(longest))
        return [Draft(chain((1,) * length), self.kinds[0], self.levels[:length]) for length in longest]

    def observe(self, row: Row, hidden: np.ndarray) -> None:
        self.seen.append(hidden)

    def finish(self, row: Row) -> None: ...

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None: ...

    def train(self) -> bool:
        self.lessons -= 1
        return self.lessons >= 0


def ticks(step: float = 0.0) -> Iterator[float]:
    return itertools.count(0.0, step)


def make_speculation(
    *drafters: Drafter,
    costs: Mapping[int, float] = FLAT,
    longest: int = 4,
    lengths: str = "measured",
    tick: float = 0.0,
) -> Speculation:
    clock = ticks(tick)
    return Speculation(drafters, PassCosts(costs), longest, lengths, lambda: next(clock), lambda begins: 0.25)


def test_costs_between_and_beyond_the_sizes() -> None:
    costs = PassCosts({1: 10.0, 4: 16.0, 8: 15.0})  # 8 cannot be faster than 4
    assert [costs.seconds(n) for n in (1, 2, 4, 6, 8, 12)] == pytest.approx([10, 12, 16, 16, 16, 16])
    assert PassCosts(STEEP).seconds(100) == pytest.approx(100.0)


def test_costs_follow_what_is_observed() -> None:
    """Thrice as slow: two thirds of that (in logarithms) is put down to the machine and moves the other sizes too."""
    costs = PassCosts({1: 1.0, 2: 1.0, 4: 1.0})
    for _ in range(200):
        costs.observe(2, 3.0)
    assert costs.curve == pytest.approx({1: 3 ** (2 / 3), 2: 3.0, 4: 3 ** (2 / 3)}, rel=1e-3)


def test_long_contexts_cost_more_and_do_not_move_the_curve() -> None:
    costs = PassCosts({1: 1.0, 4: 1.0}, per_position=0.01)
    assert costs.seconds(2, 50) == pytest.approx(1.5)
    costs.observe(2, 1.5, 50)
    assert costs.curve == pytest.approx({1: 1.0, 4: 1.0})


def test_drafting_costs_by_hand() -> None:
    """Measured at 1 and 8 rows: 3 rows are nearer to 1. The second of two measurements counts as much as the first;
    one that is far out counts as thrice what is known."""
    costs = DraftingCosts(by_position=True, smallest_pass=10.0)
    assert costs.seconds(4, 2) == pytest.approx(0.6)  # 3 % of a pass for each position, before anything is known
    costs.observe(1, 4, 2.0)
    costs.observe(8, 1, 4.0)
    costs.observe(8, 2, 4.0)
    assert costs.curve == pytest.approx({1: 0.5, 8: 3.0})
    assert [costs.seconds(n, 2) for n in (1, 3, 16)] == pytest.approx([1.0, 1.0, 6.0])
    costs.observe(1, 1, 100.0)
    assert costs.curve[1] == pytest.approx((0.5 + 1.5) / 2)
    whole = DraftingCosts(by_position=False, smallest_pass=10.0)
    assert whole.seconds(4, 2) == 0.0
    whole.observe(2, 6, 3.0)
    assert whole.seconds(2, 1) == whole.seconds(2, 5) == 3.0
    assert costs.seconds(0, 3) == costs.seconds(3, 0) == 0.0


def test_lengths_by_hand() -> None:
    """Two rows. T = 1, 1, 1 for 2 to 4 tokens, then 1 more for each: the third guess would give 2 + .9 + .8 + .5 tokens
    in 2 s, the two best ones 3.7 in 1 s. They are the first of each row."""
    costs = PassCosts({1: 1.0, 4: 1.0, 64: 61.0})
    assert choose_guesses(2, 2, [[0.9, 0.5], [0.8, 0.1]], costs.seconds) == [[0], [0]]
    assert choose_guesses(2, 2, [[0.9, 0.85], [0.8, 0.1]], costs.seconds) == [[0, 1], []]


@pytest.mark.parametrize("seed", range(20))
def test_choices_are_the_best_of_all(seed: int) -> None:
    """Against every possible choice: lengths of three drafts, and one depth for several rows with the time of
    drafting."""
    rng = random.Random(seed)
    times = np.cumsum([rng.random() for _ in range(40)])

    def seconds(size: float) -> float:
        return float(times[int(size)])

    gains = [sorted((rng.random() for _ in range(3)), reverse=True) for _ in range(3)]
    lengths = [len(chosen) for chosen in choose_guesses(3, 5, gains, seconds)]

    def rate(chosen: Sequence[int]) -> float:
        return (3 + sum(sum(g[:n]) for g, n in zip(gains, chosen, strict=True))) / seconds(5 + sum(chosen))

    assert rate(lengths) == pytest.approx(max(rate(c) for c in itertools.product(range(4), repeat=3)))

    each, others = rng.random() / 4, rng.random()
    depth = choose_depth(4, 3, gains[0], others, lambda k: seconds(5 + k), lambda length: each * length)
    rates = [(4 + others + 3 * sum(gains[0][:n])) / (seconds(5 + 3 * n) + each * n) for n in range(4)]
    assert rates[depth] == pytest.approx(max(rates))


@pytest.mark.parametrize("by_position", [False, True])
def test_no_draft_is_looked_for_where_none_can_pay(by_position: bool) -> None:
    drafter = Ones(by_position)
    rows = [make_row((1, 2, 3)) for _ in range(4)]
    assert make_speculation(drafter, costs=STEEP).propose(rows, 0) == {}
    assert drafter.asked == []
    assert make_speculation(drafter).propose(rows, 0) == {row: chain((1,) * 4) for row in rows}
    longest = make_speculation(drafter, costs=STEEP, lengths="longest")
    assert longest.propose(rows, 0) == {row: chain((1,) * 4) for row in rows}


def run_passes(speculation: Speculation, row: Row, accepted: int, num: int, times: float = 0.3) -> DraftTree:
    """Passes in which so many drafted tokens are right; what would be verified after them."""
    for _ in range(num):
        drafts = speculation.propose([row], 0).get(row, NO_GUESSES)
        kept = range(min(accepted, len(drafts)) + 1)
        speculation.observe([Chunk(row, 2, 1, True, drafts)], [kept], None, 1.0 + times * len(drafts))
    return speculation.propose([row], 0).get(row, NO_GUESSES)


@pytest.mark.parametrize("by_position", [False, True])
def test_wrong_drafts_are_given_up_and_right_ones_kept(by_position: bool) -> None:
    """A pass costs 1 + 0.3 for each token more: worth it at an acceptance above about 0.3."""
    for accepted, expected in ((0, 0), (4, 4)):
        speculation = make_speculation(Ones(by_position), costs={1: 1.0, 11: 4.0})
        assert len(run_passes(speculation, make_row((1, 2, 3)), accepted, 60)) == expected


def test_a_drafter_is_asked_only_as_far_as_pays() -> None:
    """Only first tokens are right: a drafter that needs time for each token is soon asked for one, another drafter
    for all."""
    for by_position, expected in ((True, 1), (False, 4)):
        drafter = Ones(by_position)
        speculation = make_speculation(drafter, costs={1: 1.0, 11: 4.0})
        assert run_passes(speculation, make_row((1, 2, 3)), 1, 60) == chain([1])
        assert drafter.asked[-1] == [expected]


@pytest.mark.parametrize("drafting_s", [0.01, 0.1])
def test_drafts_that_are_made_in_vain_are_given_up(drafting_s: float) -> None:
    """The drafter is unsure of all that it drafts now, and was right whenever it was sure: its drafts are made, since
    on average they pay, and never verified. Where making them takes time, that is seen."""
    drafter = Ones(by_position=True, levels=(1,) * 4)
    speculation = make_speculation(drafter, costs={1: 1.0, 11: 4.0})
    row = make_row((1, 2, 3))
    run_passes(speculation, row, 4, 60)
    drafter.levels = (0,) * 4
    for _ in range(10):  # these are wrong; the drafter's average stays good
        drafts = speculation.propose([row], 0).get(row, NO_GUESSES)
        speculation.observe([Chunk(row, 2, 1, True, drafts)], [[0]], None, 2.2)
    asked = len(drafter.asked)
    for _ in range(400):
        before = len(drafter.asked)
        assert speculation.propose([row], 0) == {}
        spent_s = drafting_s if len(drafter.asked) > before else 0.0
        speculation.observe([Chunk(row, 2, 1, True)], [[0]], None, 1.0, spent_s)
    assert (len(drafter.asked) - asked < 300) == (drafting_s > 0.02)


def test_what_was_given_up_is_tried_again() -> None:
    drafter = Ones()
    speculation = make_speculation(drafter, costs={1: 1.0, 11: 4.0})
    row = make_row((1, 2, 3))
    assert run_passes(speculation, row, 0, 60) == NO_GUESSES
    given_up = len(drafter.asked)
    run_passes(speculation, row, 0, 3000)
    assert given_up < len(drafter.asked) < given_up + 90  # at most 3 % of the passes


def test_sure_drafts_are_told_from_unsure_ones() -> None:
    """All guesses of level 1 are right, none of level 0: afterwards only level 1 is verified."""
    drafter = Ones()
    speculation = make_speculation(drafter, costs={1: 1.0, 11: 4.0}, longest=1)
    row = make_row((1, 2, 3))
    for level in (0, 1) * 30:
        drafter.levels = (level,)
        run_passes(speculation, row, level, 1)
    drafter.levels = (0,)
    assert speculation.propose([row], 0) == {}
    drafter.levels = (1,)
    assert speculation.propose([row], 0) == {row: chain([1])}


class Twos(Ones):
    kinds = ("twos",)

    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        self.asked.append(list(longest))
        return [Draft(chain((2,) * length), "twos") for length in longest]


def test_of_two_drafters_the_one_that_was_right() -> None:
    """Both are tried while they are unknown; then the drafter with accepted guesses is used."""
    for right in (1, 2):
        first, second = Ones(), Twos(by_position=True)
        speculation = make_speculation(first, second, costs={1: 1.0, 11: 4.0})
        row = make_row((1, 2, 3))
        for _ in range(100):
            drafts = speculation.propose([row], 0).get(row, NO_GUESSES)
            kept = [0, *(1 + guess for guess, token in enumerate(drafts.tokens) if token == right)]
            speculation.observe([Chunk(row, 2, 1, True, drafts)], [kept], None, 1.0 + 0.3 * len(drafts))
        assert speculation.propose([row], 0)[row] == chain((right,) * 4)


def test_the_time_of_drafting_is_measured() -> None:
    """The clock advances by 1 at every reading, so a draft takes 1 s, as long as a pass. It is first assumed to take 3
    % of a pass, so drafts of four positions are made once. They took 0.25 s a position."""
    speculation = make_speculation(Ones(by_position=True), tick=1.0)
    speculation.propose([make_row((1, 2, 3))], 0)
    (costs,) = speculation.drafting.values()
    assert costs.curve == {1: 0.25}


def test_hidden_states_reach_the_drafter() -> None:
    """Three draws of a row with two drafts, of which two count, and one of a row without."""
    drafter = Ones()
    drafter.wants_hidden = True
    speculation = make_speculation(drafter)
    rows = [make_row((1, 2, 3)), make_row((1, 2))]
    drafts = speculation.propose(rows[:1], 0)[rows[0]].first(2)
    chunks = [Chunk(rows[0], 2, 1, True, drafts), Chunk(rows[1], 1, 1, True)]
    hidden = np.arange(4, dtype=np.float32)[:, None]
    speculation.observe(chunks, [[0, 1], [0]], hidden, 1.0)
    assert [seen.ravel().tolist() for seen in drafter.seen] == [[0.0, 1.0], [3.0]]


def test_training_keeps_to_its_share() -> None:
    """A lesson takes 2 s by the clock; at a share of 1/4 the next may start 6 s later."""
    drafter = Ones()
    drafter.lessons = 1
    speculation = make_speculation(drafter, tick=2.0)
    assert speculation.train() == pytest.approx(6.0)
    assert speculation.train() is None


def test_the_head_learns_more_while_a_core_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits of 0.1, 0.2 and 0.4 s, of which a core is idle for 0.1, 0.1 and 0.4 s. Waits are measured together until
    they last a quarter of a second. What happens in a lesson does not count."""
    samples = iter([(0.0, 5.0), (0.1, 5.1), (1.1, 9.0), (1.3, 9.1), (2.0, 9.1), (2.4, 9.6)])
    monkeypatch.setattr(TrainingShare, "_sample", lambda self: next(samples))
    share = TrainingShare()
    assert [share(begins) for begins in (False, True) * 3] == [0.02] * 5 + [0.5]


def test_learning_takes_old_failures_back() -> None:
    speculation = make_speculation(drafter := Ones(by_position=True), costs={1: 1.0, 11: 4.0})
    run_passes(speculation, make_row((1, 2, 3)), 0, 60)
    before = speculation.acceptance("ones")[0]

    def improve() -> bool:
        drafter.generation += 1
        return True

    drafter.train = improve  # type: ignore[method-assign]
    speculation.train()
    assert before < speculation.acceptance("ones")[0] < 2 / 3


def test_counts() -> None:
    speculation = make_speculation(Ones())
    row = make_row((1, 2, 3))
    drafts = speculation.propose([row], 0)[row]
    speculation.observe([Chunk(row, 2, 1, True, drafts)], [[0, 1, 2]], None, None)
    counts = speculation.counts
    assert (counts.drafted, counts.accepted, counts.lengths) == ({"ones": 4}, {"ones": 2}, {4: 1})
    assert counts.accepted_at == {0: 1, 1: 1}
    assert speculation.acceptance("ones") == pytest.approx([3 / 4, 3 / 4, 2 / 4])


def test_drafts_end_where_the_row_does() -> None:
    """The last token is sampled anyway: of 3 left, 2 can be drafted."""
    row = make_row((1, 2), (3,) * 27)
    assert make_speculation(Ones(), longest=8, lengths="longest").propose([row], 0) == {row: chain((1, 1))}


def look_up(drafter: NgramDrafter, row: Row, longest: int) -> Draft | None:
    return drafter.propose([row], [longest])[0]


def test_lookup_in_the_row_itself() -> None:
    drafter = NgramDrafter()
    row = make_row((1, 2, 3, 4, 5, 6), (9, 2, 3))
    assert look_up(drafter, row, 2) == Draft(chain((4, 5)), "lookup-2")
    row.append(4, 0.0, 0)
    # what came round once is continued with itself
    assert look_up(drafter, row, 9) == Draft(chain((5, 6, 9, 2, 3, 4, 5, 6, 9)), "lookup-3")
    row.append(7, 0.0, 0)
    assert look_up(drafter, row, 2) is None


def test_lookup_in_earlier_rows_of_the_prompt() -> None:
    drafter = NgramDrafter()
    drafter.finish(make_row((1, 2), (3, 4, 5), new=3))
    drafter.finish(make_row((1, 2), (8,), new=3))  # given up: not a response
    assert look_up(drafter, make_row((1, 2)), 8) == Draft(chain((3, 4, 5)), "earlier-2")
    assert look_up(drafter, make_row((1, 7)), 8) is None
    drafter.finish(make_row((1, 2), (6, 7, 8), new=3))
    assert look_up(drafter, make_row((1, 2)), 8) == Draft(chain((6, 7, 8)), "earlier-2")


def run_trials(trials: Trials, passes: int, num_rows: int, drafted_s: float, drafted_tokens: int) -> list[bool]:
    """Plain passes take 1 second. Which passes had drafts."""
    allowed = []
    for _ in range(passes):
        drafted = trials.allows(num_rows)
        tokens, seconds = (drafted_tokens, drafted_s) if drafted else (num_rows, 1.0)
        trials.observe(num_rows, tokens, seconds, drafted=drafted)
        allowed.append(drafted)
    return allowed


def test_drafts_that_gain_go_on() -> None:
    """Twice the tokens in 1.5 seconds; only passes without drafts that keep the comparison fresh lie between."""
    trials = Trials()
    allowed = run_trials(trials, 2000, 8, 1.5, 16)
    assert allowed[:12] == [True] * 8 + [False] * 4
    assert sum(not drafted for drafted in allowed) == 4 + 2000 // 32
    assert trials.gain(8) == 2.0 / 1.5


def test_few_rows_are_judged_by_more_passes() -> None:
    """128 tokens of luck in a window: 64 passes of 1 row must have been seen. They gain on average, and begin badly."""
    trials = Trials()
    for made in [1] * 8 + [2] * 40 + [1] * 8 + [2] * 40:
        while not trials.allows(1):
            trials.observe(1, 1, 1.0, drafted=False)
        trials.observe(1, made, 1.1, drafted=True)
    gain = trials.gain(1)
    assert gain is not None
    assert 1.5 < gain < 1.8
    assert trials.allows(1)


def test_drafts_that_do_not_gain_are_given_up_for_longer_and_longer() -> None:
    """17 tokens instead of 16, in 1.1 seconds."""
    trials = Trials()
    allowed = run_trials(trials, 20_000, 16, 1.1, 17)
    assert allowed[:8] == [True] * 8
    assert sum(allowed) / len(allowed) < 0.02
    starts = [i for i in range(1, len(allowed)) if allowed[i] and not any(allowed[max(0, i - 100) : i])]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert [gap // 256 * 256 for gap in gaps] == [256, 512, 1024, 2048, 4096, 4096, 4096]


def test_drafts_that_come_to_gain_are_taken_up_again() -> None:
    trials = Trials()
    assert not any(run_trials(trials, 100, 2, 3.0, 3)[45:])
    assert sum(run_trials(trials, 1000, 2, 1.1, 6)) > 700


def test_numbers_of_rows_are_judged_apart() -> None:
    trials = Trials()
    run_trials(trials, 40, 16, 2.0, 16)
    assert not trials.allows(16)
    assert trials.allows(1)


def test_a_pass_that_was_held_up_does_not_decide() -> None:
    trials = Trials()
    for i in range(300):
        drafted = trials.allows(1)
        held_up = i % 5 == 0
        seconds = (20.0 if held_up else 1.1) if drafted else 1.0
        trials.observe(1, 2 if drafted else 1, seconds, drafted=drafted)
    gain = trials.gain(1)
    assert gain is not None
    assert gain > 1.5
