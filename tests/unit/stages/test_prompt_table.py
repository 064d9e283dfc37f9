"""Prompts of a shard from texts: lengths, refusals, and a draw that depends on (seed, step) alone."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from stages.models.hf_files import ByteTokenizer
from stages.prompts import PromptTable, held_out_prompts, last_questions, tokenise, training_prompts
from storage.config import PromptsConfig
from storage.errors import StoreError
from storage.prompts import PromptItem, PromptsError, batch_indices

TEXTS = ["abc", "de", "fghij", "k", "lm", "no", "pqr", "s"]


def items(texts: list[str]) -> list[PromptItem]:
    return [PromptItem(text, None, {"answer": i}) for i, text in enumerate(texts)]


def table(held_out: int = 2, **changes: object) -> PromptTable:
    config = PromptsConfig(**{"url": "x.jsonl", "max_tokens": 5, "held_out": held_out, **changes})  # type: ignore[arg-type]
    return tokenise(items(TEXTS), ByteTokenizer(), config, seed=0)


def test_tokens_are_padded_on_the_right() -> None:
    found = table()
    assert found.tokens.shape == (8, 5)
    assert found.tokens.dtype == found.lengths.dtype == np.int32
    assert found.tokens[0].tolist() == [ord("a"), ord("b"), ord("c"), 0, 0]
    assert found.lengths.tolist() == [len(text) for text in TEXTS]
    assert found.extra[3] == {"answer": 3}


def test_openings_cut_long_texts_and_leave_out_short_ones() -> None:
    found = table(opening_tokens=2, max_tokens=2, held_out=1)
    assert found.lengths.tolist() == [2] * 6
    assert [bytes(row.tolist()).decode() for row in found.tokens] == ["ab", "de", "fg", "lm", "no", "pq"]
    assert [e["answer"] for e in found.extra] == [0, 1, 2, 4, 5, 6]


def test_a_prompt_that_is_too_long_is_refused_or_skipped() -> None:
    with pytest.raises(
        PromptsError, match=r"^prompts.max_tokens: given 4; 1 of 8 prompts .* prompt 2, .* 5 tokens.*too_long=skip"
    ):
        table(max_tokens=4)
    assert table(max_tokens=4, too_long="skip").lengths.tolist() == [3, 2, 1, 2, 2, 3, 1]
    with pytest.raises(PromptsError, match=r"^prompts.opening_tokens: given 6; the longest prompt of x.jsonl has 5"):
        table(opening_tokens=6, max_tokens=6)
    for texts, said in ({"abc", "defg"}, "prompts.max_tokens: given 2; .* has 3 tokens"), ({""}, "prompts.url: all"):
        with pytest.raises(PromptsError, match=f"^{said}"):
            tokenise(items([*texts]), ByteTokenizer(), PromptsConfig("x.jsonl", max_tokens=2, too_long="skip"), seed=0)


def test_chats_go_through_the_template() -> None:
    chat = [
        PromptItem(None, [{"role": "user", "content": "hi"}]),
        PromptItem(None, [{"role": "user", "content": "ho"}]),
    ]
    found = tokenise(chat, ByteTokenizer(), PromptsConfig(url="x.jsonl", held_out=1), seed=0)
    assert bytes(found.tokens[0, : found.lengths[0]].tolist()).decode() == "user: hi\nassistant: "


def test_people_read_the_last_question_of_a_chat(tmp_path: Path) -> None:
    told = {"role": "system", "content": "Be brief."}
    first, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes?"}
    chat = [PromptItem(None, [told, first]), PromptItem(None, [first, answer, {"role": "user", "content": "why?"}])]
    config = PromptsConfig(url="x.jsonl", format="chat", held_out=1)
    tokenise(chat, ByteTokenizer(), config, seed=0).save(tmp_path / "prompts.npz")
    assert last_questions(tmp_path / "prompts.npz") == ["hi", "why?"]
    table().save(tmp_path / "plain.npz")
    assert last_questions(tmp_path / "plain.npz") is None
    (tmp_path / "prompts.chat.jsonl").write_text("[{")
    assert last_questions(tmp_path / "prompts.npz") is None


def test_held_out_prompts_are_never_trained_on() -> None:
    found = table(held_out=3)
    held_out = {int(p) for shard in range(3) for p in held_out_prompts(found, shard=shard, shards=3).prompt_index}
    assert held_out == set(found.held_out.tolist())
    trained = set()
    for step in range(10):
        for shard in range(2):
            batch = training_prompts(found, seed=4, step=step, shard=shard, rows=4, shards=2, responses_per_prompt=1)
            trained |= set(batch.prompt_index.tolist())
    assert trained == set(range(8)) - held_out


def test_the_shards_of_a_step_are_its_batch() -> None:
    found = table()
    for step in range(5):
        shards = [
            training_prompts(found, seed=1, step=step, shard=s, rows=6, shards=3, responses_per_prompt=1)
            for s in range(3)
        ]
        np.testing.assert_array_equal(
            np.concatenate([s.prompt_index for s in shards]), batch_indices(found.train, 1, step, 6)
        )
        assert [r for s in shards for r in s.row.tolist()] == list(range(6))
        for s in shards:
            np.testing.assert_array_equal(s.tokens, found.tokens[s.prompt_index])


def test_responses_per_prompt_repeats_each_prompt() -> None:
    batch = training_prompts(table(), seed=1, step=2, shard=1, rows=12, shards=2, responses_per_prompt=3)
    whole = batch_indices(table().train, 1, 2, 4)
    assert batch.prompt_index.tolist() == [whole[2]] * 3 + [whole[3]] * 3
    assert batch.row.tolist() == [6, 7, 8, 9, 10, 11]


def test_a_table_survives_the_disk(tmp_path: Path) -> None:
    first = tokenise(
        [PromptItem("one", None, {"note": "a\u2028b\u0085c", "n": 1}), PromptItem("two", None, {})],
        ByteTokenizer(),
        PromptsConfig(url="x.jsonl", held_out=1),
        seed=0,
    )
    path = tmp_path / "prompts.npz"
    first.save(path)
    again = PromptTable.load(path)
    for name in ("tokens", "lengths", "train", "held_out"):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))
    assert (again.pad_id, again.extra) == (first.pad_id, first.extra)
    assert sorted(os.listdir(tmp_path)) == ["prompts.jsonl", "prompts.npz"]


CHAT = PromptsConfig(url="x.jsonl", format="chat", held_out=1)


def chats(*texts: str) -> PromptTable:
    items = [PromptItem(None, [{"role": "user", "content": text}], {"n": len(text)}) for text in texts]
    return tokenise(items, ByteTokenizer(), CHAT, seed=0)


def test_evaluated_prompts_of_another_source_have_the_numbers_after_the_training_prompts(tmp_path: Path) -> None:
    other = tokenise(items(["vw", "xyz", "w"]), ByteTokenizer(), PromptsConfig(url="y", max_tokens=5, held_out=0), 0)
    found = table(held_out=0).evaluated_on(other.beginning(2))
    assert (found.train.tolist(), found.held_out.tolist()) == ([*range(8)], [8, 9])
    shard = held_out_prompts(found, shard=1, shards=2)
    assert (shard.row.tolist(), shard.prompt_index.tolist()) == ([1], [9])
    assert bytes(shard.tokens[0, :3].tolist()).decode() == "xyz"
    assert found.for_reward(shard.prompt_index) == ([{"answer": 1}], None)
    found.save(tmp_path / "prompts.npz")
    assert PromptTable.load(tmp_path / "prompts.npz").digest() == found.digest()
    assert table(held_out=0).evaluated_on(other.beginning(3)).digest() != found.digest()


def test_chats_may_be_evaluated_beside_plain_training_prompts(tmp_path: Path) -> None:
    """Each prompt keeps its own messages, and people read the text of a plain one."""
    asked = chats("hi", "ho")
    found = table(held_out=0, max_tokens=64).evaluated_on(asked.beginning(2))
    assert asked.messages is not None
    assert found.for_reward([0, 9]) == ([{"answer": 0}, {"n": 2}], [[], asked.messages[1]])
    found.save(tmp_path / "prompts.npz")
    assert last_questions(tmp_path / "prompts.npz") == [""] * 8 + ["hi", "ho"]


def test_messages_survive_the_disk_and_are_part_of_the_digest(tmp_path: Path) -> None:
    first = chats("hi", "a\u2028b")
    assert first.messages == [[{"role": "user", "content": "hi"}], [{"role": "user", "content": "a\u2028b"}]]
    first.save(tmp_path / "prompts.npz")
    again = PromptTable.load(tmp_path / "prompts.npz")
    assert (again.messages, again.digest()) == (first.messages, first.digest())
    assert replace(first, messages=first.messages[::-1]).digest() != first.digest()
    (tmp_path / "prompts.chat.jsonl").unlink()
    with pytest.raises(StoreError, match=r"prompts\.chat\.jsonl is missing"):
        PromptTable.load(tmp_path / "prompts.npz")


@pytest.mark.parametrize("lost", ["prompts.npz", "prompts.jsonl"])
def test_a_table_that_is_lost_or_damaged_is_named(tmp_path: Path, lost: str) -> None:
    path = tmp_path / "prompts.npz"
    table().save(path)
    whole = (tmp_path / lost).read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"\xff" * 100):
        (tmp_path / lost).write_bytes(content)
        with pytest.raises(StoreError, match=lost):
            PromptTable.load(path)
    (tmp_path / lost).unlink()
    with pytest.raises(StoreError, match=f"{lost} is missing"):
        PromptTable.load(path)


def test_the_digest_tells_tables_apart(tmp_path: Path) -> None:
    digests = {table().digest(), replace(table(), pad_id=9).digest(), replace(table(), train=table().held_out).digest()}
    digests.add(replace(table(), extra=[{"n": 1}] * len(table().extra)).digest())
    assert len(digests) == 4
    table().save(tmp_path / "prompts.npz")
    assert PromptTable.load(tmp_path / "prompts.npz").digest() == table().digest()
