"""The text of tables shows the given numbers."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, RenderableType

from pipeline.graph.graph import GraphSpec
from pipeline.observe.evaluations import EvaluatedVersion
from pipeline.observe.history import History
from pipeline.observe.provenance import result_text
from pipeline.observe.report.facts import headlines
from pipeline.observe.rows import ResponsePair, choose_pairs, response_pairs, samples_table
from pipeline.observe.summary import EvalSummary, StalenessSummary, Summary, TrainerLoss, summary_lines
from pipeline.observe.tables import (
    InspectRow,
    MemoryColumn,
    end_of_run_text,
    inspect_table,
    memory_table,
    summary_table,
)
from pipeline.observe.text import escape_control_characters, format_number
from storage.address import Address
from storage.commits import Provenance
from storage.config import Layout, Layouts
from storage.ledger import Ledger
from storage.records import Scores
from storage.rollouts import RolloutStore
from tests.support.sampled_rows import rollout_of

SUMMARY = Summary(
    steps=2, wall_s=10.0, samples_per_s=1.6, tokens_per_s=10.0, stage_s={"generate": 6.0, "update_policy": 7.0},
    overhead_fraction=0.031, staleness=StalenessSummary(1, 0.5, {"0": 1, "1": 1}),
    eval=EvalSummary(0.195, 0.481, 32, 4.4), reward=[0.1, 0.4], kl=[0.0, 5.7], versions={"weights": 3},
    overlap_fraction=0.25,
    busiest_gang="train", idle={"gen": 0.4}, alarms=0, kl_final=5.7, distinct_bigrams={"before": 0.9, "after": 0.8},
)  # fmt: skip


def _text(renderable: RenderableType, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width).print(renderable)
    return out.getvalue()


def lines(summary: Summary) -> dict[str, str]:
    return {line.label: line.text for line in summary_lines(summary)}


def test_summary_in_words() -> None:
    rows = lines(SUMMARY)
    assert rows["held-out reward"] == "0.195 → 0.481 (32 prompts, paired t 4.4)"
    assert rows["KL to the reference"] == "5.700 (nats per response, last step)"
    assert rows["distinct bigrams"] == "90.0% → 80.0% (of the held-out responses)"
    assert rows["seconds by stage"] == "update_policy 7.0, generate 6.0"
    assert rows["overlap"] == "25% (of the time two gangs were busy; idle: gen 40%)"
    assert rows["bookkeeping"] == "3.1% (store, ledger and driver, of the time)"
    assert not {"alarms", "trainer lost", "seconds of a step (predicted)"} & rows.keys()
    predicted = dataclasses.replace(SUMMARY, predictions={"step": (4.0, 5.0), "generate": (2.5, 3.0)})
    assert lines(predicted)["seconds of a step (predicted)"] == "step 5.000 (4.000), generate 3.000 (2.500)"
    loss = TrainerLoss(12.0, "train", "its process ended", 3.0, 8.0)
    lost = lines(dataclasses.replace(SUMMARY, trainer_losses=(loss, loss), trainer_lost_s=8.0))
    assert lost["trainer lost"] == "2 times (8.0 s until it trained again)"
    alarmed = lines(dataclasses.replace(SUMMARY, alarms=5, alarms_by_rule={"mismatch": 2, "kl": 1, "entropy": 2}))
    assert alarmed["alarms"] == "5 (mismatch 2, kl 1, entropy 2; events.jsonl says when and why)"


def test_terminal_report_and_note_show_the_same_words() -> None:
    """Each line of the report without an uncertainty of its own, and each result in MLflow's note, stands in the
    terminal's table too."""
    loss = TrainerLoss(12.0, "train", "its process ended", 3.0, 8.0)
    summary = dataclasses.replace(SUMMARY, trainer_losses=(loss,), trainer_lost_s=8.0, alarms=1)
    shown = _text(summary_table(summary), 200)
    report = [line for line in headlines(summary, [], None, None) if line.key != "score"]
    assert len(report) > 5
    assert [line.key for line in report if line.text not in shown] == []
    note = result_text("FINISHED", summary).split("; ", 1)[1]
    assert "trainer lost once (8.0 s until it trained again)" in note
    assert all(f"{line.label} {line.text}" in note for line in report if line.key in ("kl", "speed", "overlap"))


def test_the_best_version_is_named_with_its_price() -> None:
    first, second = EvaluatedVersion(0, 0.1, 0.0, 8.0, {}), EvaluatedVersion(10, 0.48, 5.1, 9.0, {"a": 0.48})
    both = dataclasses.replace(SUMMARY, evaluations=(first, second), best=second)
    assert lines(both)["best version"] == "v10 (held-out reward 0.480, KL 5.100)"
    none = dataclasses.replace(SUMMARY, evaluations=(first, second))
    assert lines(none)["best version"] == "none (no evaluated version is within evaluate.select.max_kl)"
    assert "best version" not in lines(SUMMARY)


def test_parts_of_a_score_are_shown_where_there_are_several() -> None:
    """So a learned reward that rises is seen beside a measured one that falls."""
    first = EvaluatedVersion(0, 0.1, 0.0, 8.0, {"learned": 0.1, "vader": 0.25})
    last = EvaluatedVersion(10, 0.48, 5.1, 9.0, {"learned": 0.48, "vader": -0.125})
    several = lines(dataclasses.replace(SUMMARY, evaluations=(first, last)))
    assert several["held-out parts"] == "learned 0.100 → 0.480, vader 0.250 → -0.125"
    one = dataclasses.replace(first, parts={"learned": 0.1})
    assert "held-out parts" not in lines(dataclasses.replace(SUMMARY, evaluations=(one, one)))


def test_end_of_run_shows_responses_as_they_are_and_paths() -> None:
    """Model text may hold what rich takes for markup."""
    pairs = [ResponsePair("The film", "was [red]dull[/red]", -0.5, "was great", 0.75)]
    text = _text(end_of_run_text(SUMMARY, pairs, {"timeline": Path("runs/x/timeline.png")}))
    assert "-0.500 was [red]dull[/red]" in text
    assert "+0.750 was great" in text
    assert "runs/x/timeline.png" in text


def test_a_run_ends_with_the_numbers_that_matter_and_its_report() -> None:
    last = _text(end_of_run_text(SUMMARY, [], {"report": Path("runs/x/report.html")})).splitlines()[-1]
    for said in ("0.195 → 0.481", "5.00 s a step", "10 sampled tokens/s", "runs/x/report.html"):
        assert said in last
    without = _text(end_of_run_text(dataclasses.replace(SUMMARY, eval=None), [], {})).splitlines()[-1]
    assert "→" not in without
    assert "5.00 s a step" in without


def test_control_characters_of_a_response_reach_no_terminal() -> None:
    """The response is untrusted: it must not colour, overwrite or turn the text around it."""
    hostile = "a\x1b[31mred\x07 \x00 \x9b2J \u202eturned\u2066 \u2028 \x7f"
    shown = "a␛[31mred␇ ␀ \\x9b2J \\u202eturned\\u2066 \\u2028 ␡"
    assert escape_control_characters(hostile) == shown
    assert escape_control_characters("two\nlines\tand é 漢 👩\u200d🚀") == "two\nlines\tand é 漢 👩\u200d🚀"
    pairs = [ResponsePair(hostile, hostile, -0.5, hostile, 0.75)]
    end = _text(end_of_run_text(SUMMARY, pairs, {}), width=400)
    rows = _text(inspect_table([InspectRow(3, hostile, hostile, 0.5, 1.25, "2", None)], "step 2"), width=400)
    for text, times in ((end, 3), (rows, 2)):
        assert text.count(shown) == times
        assert not set(text) & set(hostile) - set(shown)


@pytest.mark.parametrize(
    ("value", "said"),
    [(0.25, "0.250"), (-3.0, "-3.000"), (0.0, "0.000"), (-1e-8, "0.000"), (3.1e-5, "3.1e-05"), (1.25e30, "1.25e+30"),
     (999_999.0, "999999.000"), (float("nan"), "nan"), (float("-inf"), "-inf")],
)  # fmt: skip
def test_a_score_is_never_long_nor_rounded_away(value: float, said: str) -> None:
    assert format_number(value) == said
    assert format_number(abs(value), with_sign=True).startswith("+") or value != value


PAIRS = [ResponsePair("a", "b", -0.5, "cde", 0.75), ResponsePair("fg", "hi", 0.25, "é", 1.0)]


@pytest.fixture
def history(tmp_path: Path) -> History:
    ledger, layout = Ledger(str(tmp_path / "ledger")), Layout(2, 1, 6)
    spec = GraphSpec(steps=4, shards=1, staleness=1, eval_every=2, eval_shards=1)
    return History(spec, ledger, RolloutStore(str(tmp_path), ledger, Layouts(layout, layout)), rows_per_step=2)


def evaluate(history: History, version: int, texts: list[tuple[str, str]], scores: list[float]) -> None:
    """Commits an evaluation; a token is a character, 0 pads."""
    tokens = np.zeros((len(texts), 6), np.int32)
    for row, (prompt, response) in enumerate(texts):
        tokens[row, : len(prompt + response)] = [ord(c) for c in prompt + response]
    starts, lengths = (np.array([len(text[i]) for text in texts], np.int32) for i in (0, 1))
    mask = (np.arange(6) >= starts[:, None]) & (np.arange(6) < (starts + lengths)[:, None])
    rollout = rollout_of(tokens, mask, version=version)
    provenance = Provenance((), (), 0, "test", "w", "h", 1, 1.0)
    history.store.write(Address("evaluate", version), rollout, provenance)
    history.store.write(Address("evaluate_score", version), Scores(np.array(scores, np.float32)), provenance)


def decode_characters(ids: Sequence[int]) -> str:
    return "".join(map(chr, ids))


def test_the_first_evaluation_is_paired_with_the_last(history: History) -> None:
    evaluate(history, 0, [("a", "b"), ("fg", "hi")], [-0.5, 0.25])
    assert response_pairs(history, decode_characters) == [], "there is nothing after it yet"
    evaluate(history, 2, [("a", "xx"), ("fg", "y")], [9.0, 9.0])
    evaluate(history, 4, [("a", "cde"), ("fg", "é")], [0.75, 1.0])
    assert response_pairs(history, decode_characters) == PAIRS
    asked = [dataclasses.replace(pair, prompt=text) for pair, text in zip(PAIRS, ("who?", "why?"), strict=True)]
    assert response_pairs(history, decode_characters, ["who?", "why?"]) == asked


def test_those_shown_are_chosen_by_how_much_the_score_changed() -> None:
    pairs = [ResponsePair("p", "b", 0.0, "a", change) for change in (0.5, -1.0, 2.0, 0.25, 1.0)]
    assert [pair.after_score for pair in choose_pairs(pairs)] == [2.0, 0.5, -1.0]
    assert [pair.after_score for pair in choose_pairs(pairs[:2])] == [0.5, -1.0]
    assert choose_pairs(pairs[:1]) == pairs[:1]
    assert choose_pairs([]) == []


def test_the_table_is_one_that_mlflow_reads() -> None:
    assert json.loads(samples_table(PAIRS)) == {
        "columns": ["prompt", "before", "after", "before_score", "after_score", "before_kl", "after_kl"],
        "data": [["a", "b", "cde", -0.5, 0.75, None, None], ["fg", "hi", "é", 0.25, 1.0, None, None]],
    }
    assert "é" in samples_table(PAIRS)


def test_a_table_of_memory_cuts_no_number_and_no_name_on_a_narrow_terminal() -> None:
    items = {"publication": 3 << 30, "publication on the host": 1100 << 30}
    columns = [MemoryColumn(f"node {number}", items, 1103 << 30) for number in range(9)]
    out = io.StringIO()
    Console(file=out, width=60).print(memory_table("memory", columns, 1862 << 30), crop=False)
    shown = out.getvalue()
    assert "…" not in shown
    assert shown.count("publication") == 2
    numbers = {"3.0 ": 18, "1,100.0": 9, "1,103.0": 9, "1,862.0": 1}
    assert {number: shown.count(number) for number in numbers} == numbers
    assert " 500 " in _text(memory_table("memory", [MemoryColumn("train", {"process": 500 << 20}, 500 << 20)]))
