"""A store's description of itself: every array is described, the root is written once, the vocabulary is text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import zarr

from stages.models.hf_files import ByteTokenizer, read_tokenizer
from storage import files
from storage.errors import StoreError
from storage.records import DESCRIPTIONS, STORED, FinishReason, describe
from storage.rollout_root import BYTES, OFFSETS, Vocabulary, read_root_array, write_root
from tests.support.paths import MOVIE_REVIEWS, SMOLLM2

TEXTS = ("a lamp", "naïve — “日本語” 😀", "  two  spaces\n\tand a tab ", "don't . , !")


def test_every_stored_array_is_described() -> None:
    """Nothing else is described: there is no description for a name that no record has."""
    fields = {field.name for record in STORED for field in dataclasses.fields(record)} - {"parts", "disagreement"}  # type: ignore[arg-type]
    assert fields | {BYTES, OFFSETS} == set(DESCRIPTIONS)
    assert all({"long_name", "units"} <= attributes.keys() for attributes in DESCRIPTIONS.values())
    masks = {a["ancillary_variables"] for a in DESCRIPTIONS.values() if "ancillary_variables" in a}
    assert masks == {"response_mask", "loss_mask"} < fields


def test_parts_and_flags_are_described() -> None:
    assert describe("scores.brief")["long_name"] == "part brief of the score, before its weight"
    assert "brief" in describe("disagreement.brief")["long_name"]
    assert describe("an_array_of_an_extension") == {}
    reasons = describe("finish_reason")
    assert reasons["flag_values"] == [reason.value for reason in FinishReason]
    assert reasons["flag_meanings"].split() == ["stop", "length"]


def test_the_root_is_what_was_said_and_is_written_once(tmp_path: Path) -> None:
    run = files.open_root(str(tmp_path))
    arrays = Vocabulary.of([b"", b"ab", b"\xe2"]).arrays()
    write_root(run, {"run": "one"}, arrays)
    found = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    write_root(run, {"run": "one"}, arrays)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == found
    write_root(run, {"run": "two"}, arrays)
    group = zarr.open_group(tmp_path / "rollouts.zarr", mode="r")
    assert dict(group.attrs) == {"run": "two"}
    assert sorted(group.array_keys()) == [BYTES, OFFSETS]
    assert read_root_array(run, OFFSETS).tolist() == [0, 0, 2, 3]  # type: ignore[union-attr]
    assert read_root_array(run, "nothing") is None
    assert not [path for path in (tmp_path / "attempts").glob("*")]


def test_a_damaged_root_array_is_named(tmp_path: Path) -> None:
    run = files.open_root(str(tmp_path))
    write_root(run, {}, Vocabulary.of([b"abc"]).arrays())
    (tmp_path / f"rollouts.zarr/{BYTES}/c/0").write_bytes(b"other")
    with pytest.raises(StoreError, match=f"rollouts.zarr/{BYTES}: is damaged"):
        read_root_array(run, BYTES)


def test_the_byte_tokenizers_vocabulary_is_its_text() -> None:
    tokenizer = ByteTokenizer()
    vocabulary = Vocabulary.of(tokenizer.token_bytes() or [])
    for text in TEXTS:
        ids = [*tokenizer.encode(text), tokenizer.eos_ids[0]]
        assert vocabulary.text(ids) == tokenizer.decode(ids) == text
        assert vocabulary.text(np.array(ids[:-3])) == tokenizer.decode(ids[:-3])  # cut within a character


@pytest.mark.smollm2
def test_a_byte_level_vocabulary_is_what_the_tokenizer_decodes() -> None:
    tokenizer = read_tokenizer(str(SMOLLM2))
    vocabulary = Vocabulary.of(tokenizer.token_bytes() or [])
    reviews = [line.split("\t")[2] for line in MOVIE_REVIEWS.read_text("utf8").splitlines()[:200]]
    for text in [*TEXTS, *reviews]:
        ids = tokenizer.encode(text)
        assert vocabulary.text([1, *ids, 2]) == tokenizer.decode([1, *ids, 2])
        assert vocabulary.text(ids[:2]) == tokenizer.decode(ids[:2])
    assert vocabulary.text([30, 10**6]) == tokenizer.decode([30]), "an id of padding of the embedding has no text"
