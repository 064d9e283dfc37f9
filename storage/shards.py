"""How an array of the rollout store is laid out, and one shard of it encoded and decoded (one file each).

May import numpy, zarr and storage.address.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.buffer.cpu import Buffer
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import MemoryStore

from storage.address import Address

CHUNK_ROWS = 16
"""Rows of an inner chunk: 1-row chunks are 6-9 times slower to read, and larger ones gain nothing."""
GROUP_METADATA = b'{\n  "attributes": {},\n  "zarr_format": 3,\n  "node_type": "group"\n}'
_DIMENSIONS = ("row", "token")


@dataclass(frozen=True)
class Layout:
    """Shape of a group's arrays: num_shards × rows_per_shard rows of seq tokens. A record has the rows of one shard, or
    of all of them."""

    num_shards: int
    rows_per_shard: int
    seq: int

    @property
    def num_rows(self) -> int:
        return self.num_shards * self.rows_per_shard


@dataclass(frozen=True)
class Layouts:
    """The layout of the steps' groups and that of the evaluations' groups (None: this run has none)."""

    step: Layout
    evaluate: Layout | None = None


@dataclass(frozen=True)
class Template:
    """An array of a group in memory, and the store it lives in: encodes and decodes one shard at a time. Made once per
    field and process, since making one takes milliseconds."""

    array: Any
    memory: dict[str, Any]
    metadata: bytes
    layout: Layout

    def encode(self, shard: int, block: np.ndarray) -> bytes:
        key = self.key(shard)
        self.array[self._rows(shard)] = block
        return bytes(self.memory.pop(key).to_bytes())

    def decode(self, shard: int, data: bytes) -> np.ndarray:
        key = self.key(shard)
        self.memory[key] = Buffer.from_bytes(data)
        try:
            return np.asarray(self.array[self._rows(shard)])
        finally:
            del self.memory[key]

    def key(self, shard: int) -> str:
        return "/".join(["c", str(shard)] + ["0"] * (self.array.ndim - 1))

    def described(self, attributes: Mapping[str, Any]) -> bytes:
        """`metadata` with attributes."""
        document = json.loads(self.metadata) | {"attributes": dict(attributes)}
        return json.dumps(document, indent=2).encode()

    def _rows(self, shard: int) -> slice:
        return slice(shard * self.layout.rows_per_shard, (shard + 1) * self.layout.rows_per_shard)


def make_template(layout: Layout, dtype: str, ndim: int) -> Template:
    """An array of this dtype and so many dimensions (rows, or rows × seq), with what plain readers need to open it."""
    rows = layout.rows_per_shard
    inner = max(n for n in range(1, min(CHUNK_ROWS, rows) + 1) if rows % n == 0)
    rest = (layout.seq,) * (ndim - 1)
    fill = {"f": float("nan"), "i": -1}.get(np.dtype(dtype).kind, 0)
    memory: dict[str, Any] = {}
    array = zarr.create_array(
        MemoryStore(memory),
        shape=(layout.num_rows, *rest),
        shards=(rows, *rest),
        chunks=(inner, *rest),
        dtype=dtype,
        compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()],
        fill_value=fill,
        dimension_names=_DIMENSIONS[:ndim],
        # A chunk that equals the fill value must still be a file: no file means no data.
        config={"write_empty_chunks": True},
    )
    return Template(array, memory, bytes(memory["zarr.json"].to_bytes()), layout)


def group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """Of a group with attributes."""
    return json.dumps(json.loads(GROUP_METADATA) | {"attributes": dict(attributes)}, indent=2).encode()


def is_group(data: bytes | None) -> bool:
    """Whether this is the metadata of a group, whatever its attributes say."""
    try:
        document = json.loads(data or b"")
    except ValueError:
        return False
    return isinstance(document, dict) and document | {"attributes": {}} == json.loads(GROUP_METADATA)


def encode_whole(array: np.ndarray, dimension: str, attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """The files of an array of one dimension, which is no step's: key -> content."""
    memory: dict[str, Any] = {}
    made = zarr.create_array(
        MemoryStore(memory),
        shape=array.shape,
        chunks=array.shape,
        dtype=array.dtype,
        compressors=[BloscCodec(cname="lz4", clevel=5, shuffle="shuffle"), Crc32cCodec()],
        dimension_names=(dimension,),
        attributes=dict(attributes),
        config={"write_empty_chunks": True},
    )
    made[:] = array
    return {key: bytes(data.to_bytes()) for key, data in memory.items()}


def shards_of(layout: Layout, address: Address, rows: int) -> range:
    """Shards of the arrays that a record of so many rows fills."""
    if rows == layout.rows_per_shard and address.shard < layout.num_shards:
        return range(address.shard, address.shard + 1)
    if rows == layout.num_rows and address.shard == 0:
        return range(layout.num_shards)
    raise ValueError(
        f"{address}: {rows} rows, but a shard has {layout.rows_per_shard} and all {layout.num_shards} shards have "
        f"{layout.num_rows}"
    )
