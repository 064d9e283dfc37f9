"""The gain of drafts, seen on passes. Seconds are made up, so nothing here depends on a clock."""

from __future__ import annotations

import itertools

from stages.engines.embedded.drafts.costs import Trials


def run(trials: Trials, passes: int, num_rows: int, drafted_s: float, drafted_tokens: int) -> list[bool]:
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
    allowed = run(trials, 2000, 8, 1.5, 16)
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
    allowed = run(trials, 20_000, 16, 1.1, 17)
    assert allowed[:8] == [True] * 8
    assert sum(allowed) / len(allowed) < 0.02
    starts = [i for i in range(1, len(allowed)) if allowed[i] and not any(allowed[max(0, i - 100) : i])]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert [gap // 256 * 256 for gap in gaps] == [256, 512, 1024, 2048, 4096, 4096, 4096]


def test_drafts_that_come_to_gain_are_taken_up_again() -> None:
    trials = Trials()
    assert not any(run(trials, 100, 2, 3.0, 3)[45:])
    assert sum(run(trials, 1000, 2, 1.1, 6)) > 700


def test_numbers_of_rows_are_judged_apart() -> None:
    trials = Trials()
    run(trials, 40, 16, 2.0, 16)
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
