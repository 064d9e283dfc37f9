"""Shards are encoded here and not by Zarr: the bytes must be Zarr's own, and damage must be found as Zarr finds it."""

from __future__ import annotations

import numpy as np
import pytest
import zarr
from zarr.buffer.cpu import Buffer
from zarr.storage import MemoryStore

from storage.config import Layout
from storage.shards import Template, make_template

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
