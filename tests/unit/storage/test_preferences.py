"""Human judgements: what is read of them, how they are split, and what is refused with file and line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from storage.config import PreferencesConfig, preferences_problems
from storage.preferences import JudgedPair, PreferencesError, RatedText, load_judgements, load_split

PAIR = {"prompt": "p", "chosen": "good", "rejected": "bad"}
CHAT = [{"role": "user", "content": "2+2?"}]


def written(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def load(config: PreferencesConfig) -> list[Any]:
    return load_judgements(config, "data.url", config.url)


def test_pairs(tmp_path: Path) -> None:
    url = written(tmp_path / "p.jsonl", PAIR, PAIR | {"prompt": "q", "n": 1})
    assert load(PreferencesConfig(url=url))[1] == JudgedPair(f"{url} line 2", "q", "good", "bad")


@pytest.mark.parametrize("response", ["4", [{"role": "assistant", "content": "4"}]])
def test_chats_in_parquet(tmp_path: Path, response: object) -> None:
    table = pyarrow.table({"prompt": [CHAT], "chosen": [response], "rejected": ["5"]})
    pyarrow.parquet.write_table(table, tmp_path / "p.parquet")
    url = str(tmp_path / "p.parquet")
    assert load(PreferencesConfig(url=url, format="chat")) == [JudgedPair(f"{url} row 0", CHAT, "4", "5")]


def test_ratings_in_columns(tmp_path: Path) -> None:
    (tmp_path / "r.tsv").write_text("1\t0.5\t2\t16\tA film.\n")
    url = str(tmp_path / "r.tsv")
    config = PreferencesConfig(kind="ratings", url=url, rating="1", spread="2", raters="3", text="4")
    assert load(config) == [RatedText(f"{url} line 1", "A film.", 0.5, 0.5)]


@pytest.mark.parametrize(
    ("row", "key", "message"),
    [
        (PAIR | {"chosen": "bad"}, "data.chosen", "line 2: 'chosen' and 'rejected' are the same text, 'bad'"),
        (PAIR | {"rejected": " "}, "data.rejected", "line 2: 'rejected' must be a text that is not blank"),
        (PAIR | {"chosen": 4}, "data.chosen", "line 2: 'chosen' must be a text that is not blank, given 4"),
        (PAIR | {"prompt": ""}, "data.prompt", "line 2: 'prompt' must be a text that is not blank"),
        ({"prompt": "p", "chosen": "a"}, "data.rejected", "line 2: given 'rejected', available: prompt, chosen"),
    ],
)
def test_a_bad_pair_is_named(tmp_path: Path, row: dict[str, Any], key: str, message: str) -> None:
    url = written(tmp_path / "p.jsonl", PAIR, row)
    with pytest.raises(PreferencesError) as refused:
        load(PreferencesConfig(url=url))
    assert refused.value.key == key
    assert message in str(refused.value)


def test_a_chat_must_be_one(tmp_path: Path) -> None:
    url = written(tmp_path / "p.jsonl", PAIR)
    with pytest.raises(PreferencesError, match=r"data\.format: .* line 1: chat: 'prompt' must be a list"):
        load(PreferencesConfig(url=url, format="chat"))


@pytest.mark.parametrize("field", ["prompt", "chosen"])
def test_a_chat_that_is_read_as_plain_is_told_the_format(tmp_path: Path, field: str) -> None:
    url = written(tmp_path / "p.jsonl", PAIR | {field: [{"role": "user", "content": "a"}]})
    with pytest.raises(
        PreferencesError, match=rf"data\.{field}: .* line 1: .* \(conversations: data\.format=chat\), given"
    ):
        load(PreferencesConfig(url=url))


@pytest.mark.parametrize(
    ("change", "key", "message"),
    [
        ({"rating": "high"}, "data.rating", "line 2: 'rating' must be a number, given 'high'"),
        ({"rating": float("nan")}, "data.rating", "line 2: 'rating' must be a number"),
        ({"text": "a"}, "data.text", "line 2: the same text as .* line 1"),
        ({"n": 0}, "data.raters", "line 2: 'n' must be 1 or more, given 0"),
    ],
)
def test_a_bad_rating_is_named(tmp_path: Path, change: dict[str, Any], key: str, message: str) -> None:
    first = {"text": "a", "rating": 1, "sd": 1.0, "n": 4}
    url = written(tmp_path / "r.jsonl", first, first | {"text": "b"} | change)
    with pytest.raises(PreferencesError, match=message) as refused:
        load(PreferencesConfig(kind="ratings", url=url, spread="sd", raters="n"))
    assert refused.value.key == key


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("p.jsonl", "{", r"data\.url: .*p\.jsonl line 1: not JSON"),
        ("p.jsonl", "\n", r"data\.url: .* holds no judgements"),
        ("p.xml", "a", r"data\.url: .*'\.xml'; .* ending of \.csv, \.jsonl, \.parquet"),
        ("p.tsv", "a\tb", r"data\.prompt: .*must be a 0-based column number, given 'prompt'"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(PreferencesError, match=message):
        load(PreferencesConfig(url=str(tmp_path / name)))


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(PreferencesError, match=r"data\.url: cannot read .*none\.jsonl"):
        load(PreferencesConfig(url=str(tmp_path / "none.jsonl")))


def test_a_split_is_by_prompt_and_by_seed(tmp_path: Path) -> None:
    """Three pairs of each of ten prompts: no prompt is in two parts, and none is lost."""
    rows = [PAIR | {"prompt": f"p{number % 10}", "chosen": f"good {number}"} for number in range(30)]
    config = PreferencesConfig(url=written(tmp_path / "p.jsonl", *rows), held_out=0.2, validation=0.1)
    split = load_split(config, 0)
    prompts = [{judgement.unit for judgement in part} for part in (split.train, split.validation, split.held_out)]
    assert [len(part) for part in prompts] == [7, 1, 2]
    assert len(set().union(*prompts)) == 10
    assert [len(split.train), len(split.validation), len(split.held_out)] == [21, 3, 6]
    assert load_split(config, 0) == split
    assert any(load_split(config, seed).held_out != split.held_out for seed in range(1, 4))


def test_held_out_prompts_of_their_own_must_be_unseen(tmp_path: Path) -> None:
    url = written(tmp_path / "p.jsonl", *(PAIR | {"prompt": f"p{number}"} for number in range(9)))
    other = written(tmp_path / "h.jsonl", PAIR | {"prompt": "new"}, PAIR | {"prompt": "p4"})
    with pytest.raises(
        PreferencesError, match=r"held_out_url: .*h\.jsonl line 2: .* trained on too \(.*p\.jsonl line 5"
    ):
        load_split(PreferencesConfig(url=url, held_out_url=other), 0)
    fine = written(tmp_path / "f.jsonl", PAIR | {"prompt": "new"})
    split = load_split(PreferencesConfig(url=url, held_out_url=fine), 0)
    assert [judgement.unit for judgement in split.held_out] == ['"new"']
    assert len(split.train) == 8


def test_too_few_prompts_to_split(tmp_path: Path) -> None:
    url = written(tmp_path / "p.jsonl", PAIR, PAIR | {"prompt": "q"})
    with pytest.raises(PreferencesError, match=r"data\.url: .*2 prompts are too few"):
        load_split(PreferencesConfig(url=url), 0)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"held_out": 0.6, "validation": 0.5}, "data.held_out"),
        ({"kind": "ratings", "format": "chat"}, "data.format"),
        ({"kind": "ratings", "spread": "sd"}, "data.raters"),
    ],
)
def test_settings_that_cannot_work(change: dict[str, Any], key: str) -> None:
    assert [problem.key for problem in preferences_problems(PreferencesConfig(url="x.jsonl", **change))] == [key]
