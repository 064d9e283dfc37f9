"""Prompt sources: three formats, errors that name the place, and a schedule that is a pure function."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import fsspec
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from storage.config import EvaluationPromptsConfig, PromptsConfig
from storage.prompts import PromptItem, PromptsError, batch_indices, load_texts, split

CHAT = [{"role": "user", "content": "2+2?"}]


def source(path: Path, content: str | bytes) -> str:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(path)


def test_jsonl(tmp_path: Path) -> None:
    # U+2028 ends a line for str.splitlines, but not in JSON.
    url = source(tmp_path / "p.jsonl", '{"prompt": "a\u2028b", "answer": 4}\n\n{"prompt": "c"}\n')
    assert load_texts(PromptsConfig(url)) == [PromptItem("a\u2028b", None, {"answer": 4}), PromptItem("c", None, {})]


def test_jsonl_chat(tmp_path: Path) -> None:
    url = source(tmp_path / "p.jsonl", json.dumps({"messages": CHAT, "answer": "4"}) + "\n")
    config = PromptsConfig(url, format="chat", field="messages")
    assert load_texts(config) == [PromptItem(None, CHAT, {"answer": "4"})]


@pytest.mark.parametrize("suffix", ["tsv", "txt"])
def test_columns(tmp_path: Path, suffix: str) -> None:
    url = source(tmp_path / f"p.{suffix}", "id1\t0.5\tA film.\r\nid2\t-1\tB film.\r\n")
    assert load_texts(PromptsConfig(url, field="2")) == [
        PromptItem("A film.", None, {"0": "id1", "1": "0.5"}),
        PromptItem("B film.", None, {"0": "id2", "1": "-1"}),
    ]


def test_parquet(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["x", "y"], "chat": [CHAT, CHAT]}), tmp_path / "p.parquet")
    url = str(tmp_path / "p.parquet")
    assert load_texts(PromptsConfig(url))[1] == PromptItem("y", None, {"chat": CHAT})
    assert load_texts(PromptsConfig(url, format="chat", field="chat"))[0] == PromptItem(None, CHAT, {"prompt": "x"})


def test_any_filesystem() -> None:
    url = f"memory://{uuid.uuid4().hex}/p.jsonl"
    with fsspec.open(url, "w") as stream:
        stream.write('{"prompt": "a"}')
    assert load_texts(PromptsConfig(url)) == [PromptItem("a", None, {})]


@pytest.mark.parametrize(
    ("name", "content", "field", "form", "message"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b", "n": 1}', "prompt", "plain",
         r"prompts\.field: .*p\.jsonl line 2: given 'prompt', available: text, n"),
        ("p.jsonl", '{"prompt": "a"}\n{"prom', "prompt", "plain", r"prompts\.url: .*p\.jsonl line 2: not JSON"),
        ("p.jsonl", "[1]", "prompt", "plain", r"line 1: a line must hold an object"),
        ("p.jsonl", '{"prompt": " "}', "prompt", "plain", r"prompts\.field: .*line 1: 'prompt' must be a text"),
        ("p.jsonl", '{"prompt": "a"}', "prompt", "chat", r"prompts\.format: .*line 1: chat needs 'prompt'"),
        ("p.jsonl", '{"prompt": []}', "prompt", "chat", r"prompts\.format: .*line 1: chat needs 'prompt'"),
        ("p.jsonl", b'{"prompt": "\xff"}', "prompt", "plain", r"prompts\.url: .*line 1: not UTF-8"),
        ("p.jsonl", "\n\n", "prompt", "plain", r"prompts\.url: .* holds no prompts"),
        ("p.tsv", "a\tb\nc", "1", "plain", r"prompts\.field: .*p\.tsv line 2: given '1', available: 0"),
        ("p.tsv", "a\tb", "prompt", "plain", r"prompts\.field: given 'prompt'; .*0-based column number"),
        ("p.txt", "a\nb", "question", "plain", r"prompts\.field: given 'question'; .*prompts\.field=prompt if each"),
        ("p.xml", "a,b", "0", "plain", r"prompts\.url: .*'\.xml'; .* of \.csv, \.jsonl, \.parquet, \.tsv, \.txt\. "),
        ("p.csv", "a,b\nx,y\nz\n", "a", "plain", r"prompts\.url: .*csv line 3: 1 cells, but the first line names 2"),
        ("p.csv", "a,a\nx,y\n", "a", "plain", r"prompts\.url: .*csv line 1: the first line must have a different name"),
        ("p.csv", 'a,b\n"x,y\n', "a", "plain", r"prompts\.url: .*p.csv line \d: not CSV"),
        ("p.csv", "a,b\n", "a", "plain", "holds no prompts"),
        ("p.csv", 'a\nx\n\n""\n', "a", "plain", r"prompts\.field: .*csv line 4: 'a' must be a text that is not"),
        ("p.csv", "a,b\nx,y\n", "c", "plain", r"prompts\.field: .*p.csv line 2: given 'c', available: a, b"),
        ("p.parquet", "not parquet", "prompt", "plain", r"prompts\.url: cannot read .*p\.parquet"),
    ],
)  # fmt: skip
def test_errors_name_places(
    tmp_path: Path, name: str, content: str | bytes, field: str, form: str, message: str
) -> None:
    url = source(tmp_path / name, content)
    with pytest.raises(PromptsError, match=message):
        load_texts(PromptsConfig(url, field=field, format=form))  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["/nowhere/p.jsonl", "/nowhere/p.parquet", "bogus://p.tsv"])
def test_a_source_that_cannot_be_opened(url: str) -> None:
    with pytest.raises(PromptsError, match=rf"prompts\.url: cannot read {url}"):
        load_texts(PromptsConfig(url, field="0"))


def test_lines_of_a_text_are_prompts_unless_a_column_is_asked_for(tmp_path: Path) -> None:
    url = source(tmp_path / "p.txt", "one\ttwo\n\nthree\n")
    assert load_texts(PromptsConfig(url)) == [PromptItem("one\ttwo", None, {}), PromptItem("three", None, {})]
    marked = source(tmp_path / "marked.txt", "\ufeffone\n")
    assert load_texts(PromptsConfig(marked))[0].text == "one"
    columns = source(tmp_path / "columns.txt", "one\ttwo\nthree\tfour\n")
    assert load_texts(PromptsConfig(columns, field="1"))[0] == PromptItem("two", None, {"0": "one"})


def test_lines_of_a_text_are_evaluated_whatever_the_column_of_the_prompts_that_are_trained_on() -> None:
    training = PromptsConfig("p.tsv", field="2")
    text, table = (EvaluationPromptsConfig(url).source(training) for url in ("e.txt", "e.tsv"))
    assert text is not None
    assert table is not None
    assert (text.field, table.field) == ("prompt", "2")


def test_csv_is_what_a_spreadsheet_writes(tmp_path: Path) -> None:
    """A byte order mark, quotes around commas and line ends, blank lines, and other fields for the reward."""
    url = source(tmp_path / "p.csv", '\ufeffprompt,answer\r\n"one, two\nthree",3\r\n\r\n"say ""x""",\r\n')
    items = load_texts(PromptsConfig(url))
    assert [item.text for item in items] == ["one, two\nthree", 'say "x"']
    assert [item.extra for item in items] == [{"answer": "3"}, {"answer": ""}]


def test_split_is_a_partition_that_depends_on_the_seed_alone() -> None:
    train, held_out = split(20, 5, seed=3)
    assert (len(train), len(held_out)) == (15, 5)
    assert sorted([*train, *held_out]) == list(range(20))
    np.testing.assert_array_equal(held_out, split(20, 5, seed=3)[1])
    assert held_out.tolist() != split(20, 5, seed=4)[1].tolist()


@pytest.mark.parametrize("held_out", [20, 21, -1])
def test_a_split_that_leaves_nothing_to_train_on(held_out: int) -> None:
    with pytest.raises(PromptsError, match=rf"prompts\.held_out: .* hold out {held_out} prompts, .* prompts: 20\)"):
        split(20, held_out, seed=0)


@pytest.mark.parametrize("rows", [4, 5, 30])
def test_every_training_prompt_comes_once_per_epoch(rows: int) -> None:
    """Steps of 4 rows straddle the epochs of 10 prompts, steps of 5 do not, and steps of 30 hold three."""
    train = np.arange(100, 110)
    stream = np.concatenate([batch_indices(train, 7, step, rows) for step in range(60 // rows)])
    epochs = stream.reshape(6, 10)
    np.testing.assert_array_equal(np.sort(epochs, axis=1), np.tile(train, (6, 1)))
    assert len({tuple(epoch) for epoch in epochs}) == 6, "epochs are shuffled anew"


def test_a_batch_is_a_function_of_seed_and_step() -> None:
    train = np.arange(10)
    later = batch_indices(train, 7, 1000, 4)
    np.testing.assert_array_equal(later, batch_indices(train, 7, 1000, 4))
    assert later.dtype == np.int64
    streams = [np.concatenate([batch_indices(train, seed, s, 5) for s in range(4)]).tolist() for seed in (7, 8)]
    assert streams[0] != streams[1]
