"""When engine and trainer differ by more than rounding, on numbers of real runs."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.config.sections import BFLOAT16_FLOOR_NATS, FLOAT32_FLOOR_NATS, alarm_limit, differs

FIRST = 0.0236
"""Difference of engine and trainer at version 0 of the demo (seed 0, bfloat16). Below: at versions 1 to 29."""
DIFFERENCES = [
    0.0178, 0.0217, 0.0252, 0.0201, 0.0227, 0.0234, 0.0233, 0.0161, 0.0310, 0.0146,
    0.0180, 0.0293, 0.0205, 0.0103, 0.0152, 0.0194, 0.0157, 0.0282, 0.0136, 0.0276,
    0.0181, 0.0155, 0.0174, 0.0226, 0.0167, 0.0151, 0.0170, 0.0221, 0.0205,
]  # fmt: skip
MOVED = [
    0.0398, 0.0907, 0.0890, 0.1488, 0.1058, 0.0692, 0.0704, 0.0470, 0.0566, 0.0368,
    0.0568, 0.0825, 0.0559, 0.0763, 0.0654, 0.0535, 0.0388, 0.0551, 0.0391, 0.0353,
    0.0280, 0.0341, 0.0251, 0.0329, 0.0277, 0.0161, 0.0223, 0.0271, 0.0128,
]  # fmt: skip
BEHIND = [
    0.0460, 0.0926, 0.0812, 0.1526, 0.1136, 0.0655, 0.0684, 0.0488, 0.0650, 0.0426,
    0.0615, 0.0864, 0.0517, 0.0802, 0.0705, 0.0522, 0.0436, 0.0506, 0.0440, 0.0506,
    0.0341, 0.0374, 0.0253, 0.0424, 0.0354, 0.0192, 0.0294, 0.0326, 0.0241,
]  # fmt: skip
"""Differences of an engine that kept the weights of the version before: its log-probs at the sampling against the
trainer's now."""


def test_the_limit_is_a_multiple_of_what_rounding_makes_and_no_less_than_a_floor() -> None:
    """max(floor, 3 * first); at version 0 the floor stands for what is measured there."""
    assert alarm_limit(BFLOAT16_FLOOR_NATS, None) == pytest.approx(0.15)
    assert alarm_limit(BFLOAT16_FLOOR_NATS, 0.004) == 0.05
    assert alarm_limit(BFLOAT16_FLOOR_NATS, 0.04) == pytest.approx(0.12)
    assert alarm_limit(FLOAT32_FLOOR_NATS, 6e-6) == 0.01


def test_less_is_allowed_to_an_engine_that_still_says_what_it_said() -> None:
    """Two thirds of the limit, where it is five times nearer to its old word than to the trainer."""
    found = [differs(d, 0.06, moved) for d, moved in ((0.061, 0.1), (0.059, 0.013), (0.05, 0.009), (0.039, 0.0))]
    assert found == [True, False, True, False]
    assert not differs(0.05, 0.06, None)


def test_a_healthy_demo_raises_none() -> None:
    limit = alarm_limit(BFLOAT16_FLOOR_NATS, FIRST)
    assert not any(differs(d, limit, moved) for d, moved in zip(DIFFERENCES, MOVED, strict=True))


def test_a_small_update_of_long_responses_in_bfloat16_raises_none() -> None:
    """Measured with conf/run/grpo.yaml (seed 0, 32 rows, limit 0.05): log-probs moved a quarter of the difference."""
    assert not differs(0.0467, BFLOAT16_FLOOR_NATS, 0.0117)


def test_vllm_in_bfloat16_raises_none() -> None:
    """On a processor with AMX, vLLM and trainer differed by 0.052 to 0.077 nats at eight versions of the demo, more
    than the 0.05 that was once the limit for all. Its version 0 was not recorded: it may be a third of the largest."""
    limit = alarm_limit(BFLOAT16_FLOOR_NATS, 0.077 / 3)
    assert not any(differs(d, limit, moved) for d in np.linspace(0.052, 0.077, 8) for moved in (0.04, 0.1))


def test_an_engine_that_kept_the_weights_before_is_found_where_the_update_is_more_than_rounding() -> None:
    """At the demo's learning rate: in most versions until the decay makes updates smaller than rounding itself."""
    limit = alarm_limit(BFLOAT16_FLOOR_NATS, FIRST)
    found = [differs(d, limit, 0.0) for d in BEHIND]
    assert sum(found[:20]) == 16
    assert not any(found[25:])


@pytest.mark.parametrize("first", [0.03, 0.05])
def test_an_engine_that_takes_no_weights_is_found_however_large_its_rounding(first: float) -> None:
    """The engine falls behind by one update after another, and rounds differently from the trainer at every token.
    The alarm finds it by version 4 at the demo's learning rate, and never a healthy engine."""
    limit, rng = alarm_limit(BFLOAT16_FLOOR_NATS, first), np.random.default_rng(0)

    def rounding(mean: float) -> np.ndarray:
        return rng.normal(0, mean * np.sqrt(np.pi / 2), 32)

    behind, healthy, drift = [], [], np.zeros(32)
    for size in MOVED[:6]:
        update = rounding(size)
        drift += update
        own, self = rounding(first), rounding(first / 2)
        behind.append(differs(float(np.abs(drift + own).mean()), limit, float(np.abs(self).mean())))
        healthy.append(differs(float(np.abs(own).mean()), limit, float(np.abs(update + self).mean())))
    assert behind[3:] == [True] * 3
    assert not any(healthy)
