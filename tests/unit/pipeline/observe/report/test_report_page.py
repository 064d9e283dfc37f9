"""The file: what of a run goes into HTML, how large it gets; and runs beside one another."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from pipeline.observe.html import to_embedded_json
from pipeline.observe.report.comparison import HeldOutScores, IncomparablePart, compare_runs
from pipeline.observe.report.page import build_report
from pipeline.observe.report.source import RunSource, Sameness
from tests.support.report_runs import SAME, WORDS, WrittenRun, write_run

HOSTILE = "</script><script>alert(1)</script><!--<img src=x onerror=alert(1)>\x00\u2028\u202e\ud800"


def contents_of(page: bytes) -> Any:
    found = re.search(r'<script type="application/json" id="contents">(.*?)</script>', page.decode(), re.DOTALL)
    return json.loads(found[1])


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attributes)))


def test_hostile_text_stays_in_its_data(tmp_path: Path) -> None:
    words = ("<pad>", *[HOSTILE] * 7)
    page = build_report(
        [write_run(tmp_path, WrittenRun(name="<b>&amp;</b>", words=words, steps=1, rows=2, eval_every=0))]
    )
    parser = Elements()
    parser.feed(page.decode())
    tags = [tag for tag, _ in parser.found]
    assert (tags.count("script"), tags.count("img"), tags.count("b")) == (2, 0, 0)
    assert HOSTILE in {token for row in contents_of(page)["runs"][0]["samples"]["rows"] for token in row["tokens"]}


def test_the_page_loads_nothing(plain: RunSource) -> None:
    page = build_report([plain])
    parser = Elements()
    parser.feed(page.decode())
    policy = next(a["content"] for tag, a in parser.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert not [a for tag, a in parser.found if "src" in a or (tag == "link")]
    assert re.findall(r"https?://[^\"' )]+", page.decode()) == ["http://www.w3.org/2000/svg"]


def test_what_is_no_number_and_no_record_has_no_place() -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_embedded_json({"x": float("nan")})
    with pytest.raises(TypeError, match="PosixPath"):
        to_embedded_json({"x": Path()})


def test_a_page_keeps_its_size_by_showing_fewer_rows(tmp_path: Path) -> None:
    source = write_run(tmp_path, WrittenRun(steps=2, rows=64, eval_every=0, words=tuple(word * 400 for word in WORDS)))
    whole, small = build_report([source]), build_report([source], max_bytes=400_000)
    assert len(small) <= 400_000 < len(whole)
    rows = contents_of(small)["runs"][0]["samples"]
    assert 16 <= len(rows["rows"]) < len(contents_of(whole)["runs"][0]["samples"]["rows"])
    assert rows["of_rows"] == 128


def test_several_runs_share_the_page(plain: RunSource, tmp_path: Path) -> None:
    """The first ends at 0.44 by version 4, the other at 0.84 by version 2 of a gain of 0.4 a version."""
    second = write_run(tmp_path, WrittenRun("other", steps=2, gain=0.4, settings={"seed": 2}))
    shown = contents_of(build_report([plain, second]))
    assert [run["name"] for run in shown["runs"]] == ["plain", "other"]
    assert {"key": "seed", "values": ["1", "2"]} in shown["comparison"]["config"]
    (paired,) = shown["comparison"]["paired"]
    assert (paired["found"]["num_prompts"], paired["found"]["difference"]) == (8, pytest.approx(0.4, abs=1e-6))


def held_out(version: int, scores: dict[str, float]) -> HeldOutScores:
    return HeldOutScores(version, {(prompt, 0): score for prompt, score in scores.items()})


def test_runs_are_paired_by_the_text_of_their_prompts() -> None:
    """b - a on the two prompts that both have: 0.2 and 0.4, so mean 0.3, sd 0.2 / sqrt(2), standard error 0.1, t 3."""
    scores = [held_out(4, {"x": 0.1, "y": 0.2, "z": 9.0}), held_out(6, {"y": 0.4, "x": 0.5})]
    (found,) = compare_runs([{}, {}], [SAME, replace(SAME, held_out_sampling="other")], scores).paired
    assert (found.versions, found.found.num_prompts) == ((4, 6), 2)
    assert found.found.difference == pytest.approx(0.3)
    assert found.found.paired_t == pytest.approx(3.0)
    assert found.error == pytest.approx(0.1)
    assert (found.found.better, found.found.worse) == (2, 0)
    assert found.remark == (
        "only 2 prompts are in both (3 and 2); their responses are sampled differently (temperature, length or seed)"
    )


@pytest.mark.parametrize(
    ("sameness", "scores", "why"),
    [
        (SAME, None, "it has no held-out scores by prompt"),
        (SAME, held_out(2, {"other": 1.0}), "no held-out prompt is in both runs"),
        (replace(SAME, held_out_reward="x"), held_out(2, {"p": 1.0}), "held-out scores are made by different rewards"),
        (SAME, held_out(2, {"p": float("nan")}), "some held-out scores are not finite"),
    ],
)
def test_unpaired_runs_are_left_out_with_a_reason(sameness: Sameness, scores: HeldOutScores | None, why: str) -> None:
    found = compare_runs([{}, {}], [SAME, sameness], [held_out(2, {"p": 1.0}), scores])
    assert found.paired == []
    assert IncomparablePart(1, "scores by prompt", why) in found.left_out


def test_runs_of_different_models_share_no_curve_of_what_differs() -> None:
    other = Sameness("n", "u", "n", "r", "r", "s")
    found = compare_runs([{}, {}], [SAME, other], [None, None])
    left = {one.what: one.metrics for one in found.left_out}
    assert "kl/ref*" in left["KL to the reference"]
    assert "response/*" in left["lengths, entropies and rates in tokens"]
    assert "training scores" not in left


def test_config_keys_that_one_run_lacks_differ() -> None:
    found = compare_runs([{"a": 1, "b": 2, "name": "x"}, {"a": 1, "c": 3, "name": "y"}], [SAME, SAME], [None, None])
    assert [(one.key, one.values) for one in found.config] == [("b", ["2", None]), ("c", [None, "3"])]
