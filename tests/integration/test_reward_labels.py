"""`stageline reward label` from the command line. A judge labels the responses of a run, of a file, and sampled ones.
The result trains a reward model. An interrupted labelling can be continued."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli.main import main
from pipeline.config.paths import RunPaths
from pipeline.config.run import RunConfig
from pipeline.driver.session import hold_driver_lock
from tests.support.judge_server import Judge, Reply, Served, asked_text, completion, serving
from tests.support.paths import ROOT

TINY = ROOT / "conf/reward/tiny.yaml"
CONFIG = """\
name: labelled
judge:
  kind: judge
  args: {url: "to be served", model: m, read: text, against: group, rubric: "{prompt}<<>>{first}<<>>{second}",
         delimit: false, on_unparsed: 0.5, timeout_s: 20, retry_s: 20}
"""
VOWELS = frozenset("aeiou")


def more_vowels(body: Mapping[str, Any]) -> Reply:
    _, first, second = asked_text(body).split("<<>>")
    shares = [sum(c in VOWELS for c in text) / max(1, len(text)) for text in (first, second)]
    return completion("I choose A." if shares[0] > shares[1] else "**B**")


@pytest.fixture
def served() -> Iterator[Served]:
    with serving(more_vowels) as found:
        yield found


def arguments(folder: Path, url: str, *changes: str, name: str = "labelled") -> list[str]:
    file = folder / "label.yaml"
    file.write_text(CONFIG)
    return ["reward", "label", str(file), f"runs_dir={folder}", f"name={name}", f"judge.args.url={url}", *changes]


def responses(folder: Path, number: int = 24) -> str:
    """A file of prompts with three responses each, of a fixed draw."""
    file = folder / "responses.jsonl"
    rows = [
        {"prompt": f"p{n} ", "responses": [f"{'aei'[:k]}{'xyz'[k:]}{n % 7}" for k in range(3)]} for n in range(number)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"responses.url={file}"


def pairs(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "pairs.jsonl").open()]


def test_the_labels_train_a_reward_model(tmp_path: Path, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    given = responses(tmp_path)
    assert main([*arguments(tmp_path, served.url), given]) == 0
    run = tmp_path / "labelled"
    rows = pairs(run)
    assert len(rows) == 24 * 3
    for row in rows:
        assert sum(c in VOWELS for c in row["chosen"]) > sum(c in VOWELS for c in row["rejected"])
        assert row["margin"] == 1.0
        assert row["judge"] == "m"
        assert row["verdicts"] == {"chosen_shown_first": 1.0, "chosen_shown_last": 1.0}
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["pairs"], summary["dropped"], summary["orders_agree"]) == (72, {}, 1.0)
    assert "72 pairs of 24 prompts with 72 responses; left out: none" in capsys.readouterr().out
    fixed = (f"runs_dir={tmp_path}", "name=learnt", "tracking.uri=null", "tracking.report=false", "train.epochs=2")
    assert main(["reward", "train", str(TINY), *fixed, f"data.url={run / 'pairs.jsonl'}"]) == 0

    assert main([*arguments(tmp_path, served.url), given]) == 2
    assert "holds a finished preference set" in capsys.readouterr().err
    assert main([*arguments(tmp_path, served.url, name="learnt"), given]) == 2
    assert "holds a run or a reward model" in capsys.readouterr().err


def test_an_interrupted_labelling_asks_only_for_the_rest(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The judge vanishes in the second lot of prompts."""
    left, lock, gone = 40, threading.Lock(), True

    def vanishing(body: Mapping[str, Any]) -> Reply:
        nonlocal left
        with lock:
            left -= 1
            return Reply("", cut=True) if gone and left < 0 else more_vowels(body)

    judge: Judge = vanishing
    with serving(judge) as served:
        command = [*arguments(tmp_path, served.url), responses(tmp_path, 12), "prompts_at_once=4"]
        assert main(command) == 3
        said = capsys.readouterr().err
        assert "has answered nothing for" in said
        assert "Start it again with the same config to go on" in said
        assert not (tmp_path / "labelled/pairs.jsonl").exists()
        assert main([*command, "min_margin=0.2"]) == 2
        assert "min_margin: given 0.2; " in capsys.readouterr().err
        gone, before = False, len(served.asked)
        (tmp_path / "responses.jsonl").unlink()  # they were written down
        with (tmp_path / "labelled/verdicts.jsonl").open("a") as file:
            file.write('{"number": 4, "rows": [{"pro')  # torn by a crash
        assert main(command) == 0
        assert len(served.asked) - before == 12 * 3 * 2 - 40
    assert len(pairs(tmp_path / "labelled")) == 36
    with hold_driver_lock(RunPaths(tmp_path / "labelled")):
        (tmp_path / "labelled/pairs.jsonl").unlink()
        assert main(command) == 2
    assert "is running" in capsys.readouterr().err


def test_a_larger_budget_goes_on_where_one_ended(
    tmp_path: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*arguments(tmp_path, served.url), responses(tmp_path, 4)]
    assert main([*command, "judge.args.max_requests=10"]) == 3
    said = " ".join(capsys.readouterr().err.split())
    assert "max_requests = 10 is used up" in said
    assert main([*command, "judge.args.max_requests=24"]) == 0
    assert len(served.asked) == 4 * 3 * 2
    assert json.loads((tmp_path / "labelled/summary.json").read_text())["judge"] == {"requests": 24}


@pytest.mark.processes
def test_a_runs_responses_are_labelled(tmp_path: Path, folder: Path, overlapped: RunConfig, served: Served) -> None:
    run = folder / "runs" / overlapped.name
    assert main([*arguments(tmp_path, served.url, "pairs_per_prompt=2"), "--from", str(run)]) == 0
    kept = [json.loads(line) for line in (tmp_path / "labelled/responses.jsonl").open()]
    assert len(kept) > 4
    assert all(isinstance(one["prompt"], str) and one["responses"] for one in kept)


def test_sampled_responses_are_labelled_by_a_local_judge(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All of it in this process; the same again from another directory."""
    file = tmp_path / "local.yaml"
    file.write_text(
        "judge: {kind: local_judge, args: {path: 'random:tiny', rubric: '{prompt} {response}?', on_unparsed: 0,"
        " answers: {a: 1, e: 0}, likeliest: 256, delimit: false}}\n"
        "responses: {model: 'random:tiny', per_prompt: 3}\n"
        f"prompts: {{url: {ROOT / 'conf/data/tiny_prompts.jsonl'}, max_tokens: 16, too_long: skip, held_out: 0}}\n"
        "sampling: {max_new_tokens: 6}\nengine: {max_rows: 8, kv_budget_mb: 16}\n"
    )
    for name in ("one", "two"):
        assert main(["reward", "label", str(file), f"runs_dir={tmp_path}", f"name={name}"]) == 0
    assert pairs(tmp_path / "one") == pairs(tmp_path / "two")
    row = pairs(tmp_path / "one")[0]
    assert row["verdicts"]["chosen"] - row["verdicts"]["rejected"] == pytest.approx(row["margin"], abs=1e-5)
    assert row["judge"] == "random:tiny"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ([], "responses: given {}; give one of responses.run (or --from RUN), responses.url and responses.model"),
        (["responses.url=gone.jsonl"], "responses.url: "),
        (["responses.run=nowhere"], "nowhere: holds no run"),
        (["responses.model=random:tiny"], "prompts.url: given ''; responses.model needs prompts to answer"),
        (
            ["responses.url=x.jsonl", "prompts.url=y.jsonl"],
            "prompts.url: given 'y.jsonl'; only responses.model reads it",
        ),
        (["responses.url=x.jsonl", "judge.kind=vader"], "judge.kind: given 'vader'; must be judge or local_judge"),
        (["responses.url=x.jsonl", "judge.args.against=ideal"], "judge.args.against: given 'ideal'; responses are co"),
        (["responses.url=x.jsonl", "judge.args.rubric={prompt}"], "judge.args.rubric: "),
        (["responses.url=x.jsonl", "min_margin=-1"], "min_margin: given -1"),
        (["responses.model=random:tiny", "responses.per_prompt=1", "prompts.url=x"], "responses.per_prompt: given 1"),
    ],
)
def test_impossible_labelling(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str], said: str
) -> None:
    assert main([*arguments(tmp_path, "http://127.0.0.1:9/v1"), *changes]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x"}, "responses.responses: "),
        ({"prompt": " ", "responses": ["a", "b"]}, "must be a text that is not blank, or a list of messages"),
        ({"prompt": "x", "responses": ["a"]}, "must be a list of two texts or more"),
    ],
)
def test_unlabelled_row_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], row: dict[str, Any], said: str
) -> None:
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main([*arguments(tmp_path, "http://127.0.0.1:9/v1"), f"responses.url={tmp_path}/rows.jsonl"]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert "rows.jsonl" in error


def test_texts_with_separators_of_unicode_are_read_back_and_a_path_cannot_turn_what_is_said(
    tmp_path: Path, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    """U+0085 and U+2028 end no line of JSON, and stand in texts from the web. U+202E turns the text behind it."""
    tmp_path = tmp_path / "a\u202ec"
    tmp_path.mkdir()
    file = tmp_path / "responses.jsonl"
    texts = ["xx\x85y", "aa\u2028e"]
    file.write_text(json.dumps({"prompt": "p\u2029", "responses": texts}) + "\n")
    assert main([*arguments(tmp_path, served.url), f"responses.url={file}"]) == 0
    (row,) = pairs(tmp_path / "labelled")
    said = capsys.readouterr().out
    assert "a\\u202ec" in said
    assert "\u202e" not in said
    assert (row["prompt"], row["chosen"], row["rejected"]) == ("p\u2029", texts[1], texts[0])


def test_another_rubric_in_one_file_fails(tmp_path: Path, served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the pairs would be labelled by another standard than the others."""
    rubric = tmp_path / "rubric.txt"
    rubric.write_text("{prompt}<<>>{first}<<>>{second}")
    given = (responses(tmp_path, 2), "judge.args.rubric=null", f"judge.args.rubric_file={rubric}")
    assert main([*arguments(tmp_path, served.url, *given)]) == 0
    (tmp_path / "labelled" / "pairs.jsonl").unlink()
    rubric.write_text("Which is shorter? {prompt}<<>>{first}<<>>{second}")
    capsys.readouterr()
    assert main([*arguments(tmp_path, served.url, *given)]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "judge.args.rubric_file: given" in said
    assert "its text is not the one that" in said
