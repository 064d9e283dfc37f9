"""`stageline simulate`: what it prints and writes, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.cli.main import main
from pipeline.plan.calibration import to_yaml, typical
from tests.support.paths import TINY, TINY_PROMPTS

CONFIG = (str(TINY), f"prompts.url={TINY_PROMPTS}")


def test_it_prints_times_and_writes_what_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace, timeline = tmp_path / "trace.json", tmp_path / "timeline.png"
    given = ["--trace-file", str(trace), "--timeline", str(timeline), "--lengths", "fixed:4"]
    assert main(["simulate", *CONFIG, "steps=6", "--hardware", "1xcpu", *given]) == 0
    out = capsys.readouterr().out
    assert "critical path" in out
    spans = [event for event in json.loads(trace.read_text("utf8"))["traceEvents"] if event["ph"] == "X"]
    assert sum(event["cat"] == "update_policy" for event in spans) == 6
    assert timeline.read_bytes().startswith(b"\x89PNG")


def test_the_same_seed_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    chance = [
        "--stragglers",
        "0.2:3",
        "--failures-per-hour",
        "5000",
        "--rebuild-s",
        "0.1",
        "--lengths",
        "lognormal:4,0.5",
    ]
    drafts = "engine.embedded.speculation.drafter=ngram"
    texts = []
    for seed in ("1", "1", "2"):
        assert main(["simulate", *CONFIG, "steps=20", "--hardware", "1xcpu", drafts, *chance, "--seed", seed]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
    assert "workers lost" in texts[0]
    assert "drafts (ngram) are assumed to gain and cost nothing" in texts[0]


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (["--hardware", "8xH100"], "--hardware"),
        (["--hardware", "1xcpu", "--stragglers", "2"], "--stragglers"),
        (["--hardware", "1xcpu", "--stragglers", "0.1:0.5"], "--stragglers"),
        (["--hardware", "1xcpu", "--stragglers", "0.1:inf"], "--stragglers"),
        (["--hardware", "1xcpu", "--calibration", str(TINY)], "tiny.yaml"),
        (["--hardware", "1xcpu", "--failures-per-hour", "0"], "--failures-per-hour"),
        (["--hardware", "1xcpu", "--rebuild-s", "10"], "--rebuild-s"),
        (["--hardware", "1xcpu", "--stragglers", "0.1:1e300"], "--stragglers"),
        (["--hardware", "1xcpu", "--failures-per-hour", "1", "--rebuild-s", "-1"], "--rebuild-s"),
        (["--hardware", "1xcpu", "--lengths", "fixed:9"], "sampling.max_new_tokens"),
        (["--hardware", "1xcpu", "--trace-file", "trace.txt"], "--trace-file"),
        (["--hardware", "1xcpu", "--timeline", "nowhere/t.png"], "--timeline"),
        (["--hardware", "1xcpu", "--calibration", "none.yaml"], "none.yaml"),
        (["--hardware", "1x2xH100-80", "model.path=conf/model/llama-3.1-8b"], "placement.gangs"),
    ],
)
def test_refusals_name_what_was_given(given: list[str], named: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *CONFIG, *given]) == 2
    assert named in capsys.readouterr().err


def test_speeds_of_other_hardware_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "speeds.yaml"
    file.write_text(to_yaml(typical("H100-80", on_gpus=True)), "utf8")
    assert main(["simulate", *CONFIG, "--hardware", "1xcpu", "--calibration", str(file)]) == 2
    assert "H100-80" in capsys.readouterr().err
