"""The list of metrics, its page, and the code that gives them agree."""

from __future__ import annotations

import re

import pytest

from pipeline.observe.metric_catalogue import (
    MAX_NEGATIVE_STEPS,
    METRICS,
    OVERVIEW,
    SECONDS,
    STEP,
    TRACKED_IF_NONZERO,
    UNTRACKED,
    VERSION,
    find_metric,
    find_unhealthy_numbers,
    select_tracked,
    terminal_numbers,
)
from pipeline.observe.text import sparkline
from tests.support.paths import ROOT

SOURCES = [*(ROOT / "stages").rglob("*.py"), *(ROOT / "pipeline").rglob("*.py")]
GIVES = ("stages/ppo/metrics.py", "stages/ppo/losses.py", "stages/advantage.py", "pipeline/observe/history.py")


def test_the_page_has_exactly_these_metrics() -> None:
    page = (ROOT / "docs/metrics.md").read_text("utf8")
    rows = re.findall(r"^\| `([\w./<>]+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", page, re.MULTILINE)
    assert [row[:4] for row in rows] == [(m.name, m.unit, m.axis, m.healthy) for m in METRICS]
    assert all(meaning.strip(" -") for *_, meaning in rows)


def test_every_metric_is_given_somewhere() -> None:
    code = "\n".join(path.read_text("utf8") for path in SOURCES if path.name != "metric_catalogue.py")
    for metric in METRICS:
        name = metric.name
        if name in OVERVIEW.values():
            continue
        fixed = re.split(r"<\w+>\.?|/mean$", name)
        role, _, word = name.partition("/")
        by_role = role in ("policy", "critic", "update_policy", "update_critic") and re.search(rf'["/]{word}"', code)
        assert by_role or all(f"{part}" in code for part in fixed if part != "/"), name


@pytest.mark.parametrize("path", GIVES)
def test_what_these_files_give_is_known(path: str) -> None:
    groups = {metric.name.partition("/")[0] for metric in METRICS}
    for name in re.findall(r'"([a-z_]+/[a-z0-9_]*[a-z0-9])"', (ROOT / path).read_text("utf8")):
        if name.partition("/")[0] in groups:
            assert find_metric(name) is not None or name in UNTRACKED, name


def test_axes_and_lists_name_metrics() -> None:
    assert {metric.axis for metric in METRICS} == {STEP, VERSION, SECONDS}
    assert len({metric.name for metric in METRICS}) == len(METRICS)
    assert all(find_metric(name) for name in (*OVERVIEW, *OVERVIEW.values(), *TRACKED_IF_NONZERO))
    assert not any(find_metric(name) for name in UNTRACKED)
    assert find_metric("time/generate_s") != find_metric("time/step_s")
    assert find_metric("bogus/name") is None


def test_what_is_tracked() -> None:
    values = {"reward/mean": 0.5, "score/mean": 0.5, "kl/coef": 0.1, "policy/skipped_steps": 0.0, "own": 1.0}
    assert select_tracked(values, {"kl/coef"}, ()) == {"Overview/reward": 0.5, "reward/mean": 0.5, "own": 1.0}
    assert list(select_tracked(values, (), ())) == ["Overview/reward", "reward/mean", "kl/coef", "own"]
    assert "policy/skipped_steps" in select_tracked(values | {"policy/skipped_steps": 1.0}, (), ())
    assert select_tracked(values, (), {"policy/skipped_steps"})["policy/skipped_steps"] == 0.0, "from then on always"


def test_a_healthy_step_says_nothing() -> None:
    step = {
        "policy/approx_kl": 0.1,
        "policy/ratio_max": 100.0,
        "policy/entropy": 1.0,
        "critic/explained_variance": -1.0,
    }
    assert find_unhealthy_numbers([]) == []
    assert find_unhealthy_numbers([step], 4.0) == []
    assert find_unhealthy_numbers([{}]) == []


def test_what_is_wrong_with_its_limit() -> None:
    demo = {"policy/approx_kl": 3.36, "policy/ratio_max": 2188.0}
    assert find_unhealthy_numbers([demo]) == ["approx_kl 3.36 > 0.1", "ratio_max 2188 > 100"]
    assert find_unhealthy_numbers([{"policy/approx_kl": float("nan")}]) == ["approx_kl nan > 0.1"]
    assert find_unhealthy_numbers([{"policy/entropy": 0.05}]) == ["entropy 0.05 < 0.1: collapsing"]
    assert find_unhealthy_numbers([{"policy/entropy": 0.7}], 4.0) == ["entropy 0.7 < 0.8: collapsing"]


def test_equal_groups_and_cut_responses_are_shown_under_advantages_that_compare_groups() -> None:
    grouped = {"group/equal_fraction": 0.75, "response/truncated_fraction": 0.2}
    assert find_unhealthy_numbers([grouped]) == ["equal groups 0.75 >= 0.5", "cut 0.2 >= 0.2"]
    assert terminal_numbers(grouped) == [("equal groups", "0.75"), ("cut", "0.2")]
    assert find_unhealthy_numbers([{"response/truncated_fraction": 0.9}]) == []
    assert terminal_numbers({"response/truncated_fraction": 0.9}) == []


def test_a_critic_worse_than_a_constant_for_long() -> None:
    bad = {"critic/explained_variance": -0.5}
    assert find_unhealthy_numbers([bad] * (MAX_NEGATIVE_STEPS - 1)) == []
    assert find_unhealthy_numbers([bad, {}, *[bad] * (MAX_NEGATIVE_STEPS - 1)]) == [
        "explained variance -0.50 < -0.05 for 5 steps"
    ]
    assert find_unhealthy_numbers([*[bad] * MAX_NEGATIVE_STEPS, {"critic/explained_variance": 0.1}]) == []


def test_sparkline() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([5.0, 5.0]) == "▄▄"
    assert sparkline([0.0, float("nan"), 1.0]) == "▁ █"
    assert sparkline(range(100), width=3) == "▁▅█"
    assert sparkline([]) == ""
