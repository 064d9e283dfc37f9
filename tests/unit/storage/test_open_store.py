"""A store's description of itself: every array is described, the root is written once, the vocabulary is text."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import zarr
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from stages.models.hf_files import ByteTokenizer, read_tokenizer
from storage import files
from storage.address import Address
from storage.config import Layout
from storage.errors import StoreError
from storage.records import DESCRIPTIONS, STORED, Scores
from storage.rollouts import BYTES, OFFSETS, RecentRecords, Vocabulary, read_root_array, write_root
from storage.shards import Template, make_template
from tests.support.paths import MOVIE_REVIEWS, SMOLLM2

TEXTS = ("a lamp", "naïve — “日本語” 😀", "  two  spaces\n\tand a tab ", "don't . , !")


def test_every_stored_array_is_described() -> None:
    """Nothing else is described: there is no description for a name that no record has."""
    fields = {field.name for record in STORED for field in dataclasses.fields(record)} - {"parts", "disagreement"}  # type: ignore[arg-type]
    assert fields | {BYTES, OFFSETS} == set(DESCRIPTIONS)
    assert all({"long_name", "units"} <= attributes.keys() for attributes in DESCRIPTIONS.values())
    masks = {a["ancillary_variables"] for a in DESCRIPTIONS.values() if "ancillary_variables" in a}
    assert masks == {"response_mask", "loss_mask"} < fields


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
    (tmp_path / f"rollouts.zarr/{BYTES}/c.0").write_bytes(b"other")
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


SHARDS, SEQ = 3, 7


def block(dtype: str, rows: int, ndim: int) -> np.ndarray:
    generator = np.random.default_rng(5)
    shape = (rows, SEQ)[:ndim]
    if dtype == "bool":
        return generator.random(shape) < 0.5
    return generator.integers(0, 9, shape).astype(dtype) if "int" in dtype else generator.random(shape).astype(dtype)


def by_zarr(template: Template, shard: int, rows: np.ndarray) -> bytes:
    """The file of a shard as Zarr writes it, by the metadata that readers are given."""
    memory: dict[str, object] = {"zarr.json": Buffer.from_bytes(template.metadata)}
    with zarr.config.set({"array.write_empty_chunks": True}):
        array = zarr.open_array(MemoryStore(memory), mode="r+")  # type: ignore[arg-type]
        array[shard * len(rows) : (shard + 1) * len(rows)] = rows
    return bytes(memory[template.key(shard)].to_bytes())  # type: ignore[attr-defined]


@pytest.mark.parametrize("ndim", [1, 2])
@pytest.mark.parametrize("rows", [1, 5, 16, 48])
@pytest.mark.parametrize("dtype", ["bool", "int8", "int32", "int64", "float32", "float64"])
def test_the_bytes_are_those_that_zarr_writes(dtype: str, rows: int, ndim: int) -> None:
    template, given = make_template(Layout(SHARDS, rows, SEQ), dtype, ndim), block(dtype, rows, ndim)
    data = template.encode(given)
    assert data == by_zarr(template, 1, given)
    found = template.decode(data)
    np.testing.assert_array_equal(found, given, strict=True)
    assert found.flags.writeable


def test_the_fill_value_is_data() -> None:
    template = make_template(Layout(SHARDS, 32, SEQ), "float32", 2)
    blank = np.full((32, SEQ), np.nan, np.float32)
    assert template.encode(blank) == by_zarr(template, 0, blank)
    assert np.isnan(template.decode(template.encode(blank))).all()


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    template, given = make_template(Layout(SHARDS, 32, SEQ), "int32", 2), block("int32", 32, 2)
    data = template.encode(given)
    for place in range(len(data)):
        flipped = bytearray(data)
        flipped[place] ^= 1 << place % 8
        with pytest.raises(ValueError, match="CRC-32C"):
            template.decode(bytes(flipped))
    for size in range(len(data)):
        with pytest.raises(ValueError, match=r"CRC-32C|index|inner chunk"):
            template.decode(data[:size])
    with pytest.raises(ValueError, match=r"CRC-32C|index|inner chunk"):
        make_template(Layout(SHARDS, 16, SEQ), "int32", 2).decode(data[:-4])


def test_rows_of_another_shard_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"rows of shape \(8, 7\), but a shard's is \(16, 7\)"):
        make_template(Layout(SHARDS, 16, SEQ), "int32", 2).encode(block("int32", 8, 2))


def scores(value: float) -> Scores:
    return Scores(np.full(4, value, np.float32))  # 16 bytes


def key(step: int) -> tuple[Address, str]:
    return Address("score", step), "a0"


def test_the_least_recently_used_record_goes_first() -> None:
    recent = RecentRecords(max_bytes=40)  # room for two
    recent.put(key(0), scores(0))
    recent.put(key(1), scores(1))
    assert recent.get(key(0)) is not None  # now 1 is the older one
    recent.put(key(2), scores(2))
    assert [recent.get(key(step)) is not None for step in range(3)] == [True, False, True]


def test_another_attempt_is_another_record() -> None:
    recent = RecentRecords(max_bytes=1000)
    recent.put((Address("score", 0), "a0"), scores(0))
    assert recent.get((Address("score", 0), "a1")) is None


def test_what_is_larger_than_all_the_room_is_not_kept_and_drops_nothing() -> None:
    recent = RecentRecords(max_bytes=20)
    recent.put(key(0), scores(0))
    recent.put(key(1), Scores(np.zeros(100, np.float32)))
    assert recent.get(key(1)) is None
    assert recent.get(key(0)) is not None
    assert RecentRecords(0).get(key(0)) is None
