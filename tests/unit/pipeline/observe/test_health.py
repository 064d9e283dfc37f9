"""Red warnings, and small curves."""

from pipeline.observe.metric_catalogue import CRITIC_STEPS, findings, sparkline


def test_a_healthy_step_says_nothing() -> None:
    step = {
        "policy/approx_kl": 0.1,
        "policy/ratio_max": 100.0,
        "policy/entropy": 1.0,
        "critic/explained_variance": -1.0,
    }
    assert findings([]) == []
    assert findings([step], 4.0) == []
    assert findings([{}]) == []


def test_what_is_wrong_with_its_limit() -> None:
    demo = {"policy/approx_kl": 3.36, "policy/ratio_max": 2188.0}
    assert findings([demo]) == ["approx_kl 3.36 > 0.1", "ratio_max 2188 > 100"]
    assert findings([{"policy/approx_kl": float("nan")}]) == ["approx_kl nan > 0.1"]
    assert findings([{"policy/entropy": 0.05}]) == ["entropy 0.05 < 0.1: collapsing"]
    assert findings([{"policy/entropy": 0.7}], 4.0) == ["entropy 0.7 < 0.8: collapsing"]


def test_a_critic_worse_than_a_constant_for_long() -> None:
    bad = {"critic/explained_variance": -0.5}
    assert findings([bad] * (CRITIC_STEPS - 1)) == []
    assert findings([bad, {}, *[bad] * (CRITIC_STEPS - 1)]) == ["explained variance -0.50 < 0 for 5 steps"]
    assert findings([*[bad] * CRITIC_STEPS, {"critic/explained_variance": 0.1}]) == []


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▄▄"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline(range(100), width=3) == "▁▅█"
    assert sparkline([]) == ""
