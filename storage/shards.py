"""The layout of an array of the rollout store, and the codec of its shards (one file each).

Zarr itself makes the metadata of all arrays, and encodes the arrays that belong to no step. The shards of all other
arrays are encoded and decoded here, with Zarr's own codecs and to the same bytes, so any Zarr reader can read them.
Zarr itself would take a millisecond for an array of some hundred numbers, mostly to hand work to its event loop and
threads.

    shard file = inner chunk 0 | inner chunk 1 | … | index | CRC-32C of the index
    inner chunk = Blosc (LZ4, shuffled) of the rows' bytes, little-endian | CRC-32C of the compressed bytes
    index       = (offset, bytes) of every inner chunk, each a little-endian uint64

https://zarr-specs.readthedocs.io/en/latest/v3/codecs/sharding-indexed/index.html
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import google_crc32c
import numpy as np
import zarr
from numcodecs import blosc
from numcodecs.blosc import Blosc
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import MemoryStore

from storage.address import Address
from storage.config import Layout

CHUNK_ROWS = 16
"""Maximum number of rows of an inner chunk. Chunks of one row are 6-9 times slower to read; chunks of more than 16 rows
are no faster."""
GROUP_METADATA = b'{\n  "attributes": {},\n  "zarr_format": 3,\n  "node_type": "group"\n}'
_DIMENSIONS = ("row", "token")
_FLAT: Any = {"name": "default", "separator": "."}
"""All shards of an array lie in its directory. With `/` as the separator, each shard would have a directory of its
own."""
_COMPRESSOR: Final = "lz4"
_LEVEL = 5
_INDEX = np.dtype("<u8")
# numcodecs guards Blosc's state by a lock between processes, although each process has a state of its own. The lock is
# a named semaphore in shared memory, which stays there if the process is killed. A lock between threads is enough.
blosc._MUTEX, blosc._MUTEX_IS_INIT = threading.Lock(), True
_SUM_BYTES = 4


@dataclass(frozen=True)
class Template:
    """Encodes and decodes the shards of a Zarr array. A call handles one shard, and several threads may call at once. A
    `RolloutStore` keeps one template for all arrays with the same layout, dtype and number of dimensions, since making
    Zarr's metadata takes milliseconds."""

    metadata: bytes
    dtype: np.dtype[Any]
    """Type of the stored numbers, little-endian."""
    chunk: tuple[int, ...]
    """Shape of an inner chunk."""
    num_chunks: int
    """Number of inner chunks of a shard. They follow one another along the rows."""

    def encode(self, block: np.ndarray) -> bytes:
        """Return the content of the file of a shard whose rows are `block`."""
        compressor = Blosc(_COMPRESSOR, _LEVEL, Blosc.SHUFFLE, typesize=self.dtype.itemsize)
        chunks = [_with_sum(compressor.encode(part)) for part in np.split(self._as_stored(block), self.num_chunks)]
        sizes = np.array([len(chunk) for chunk in chunks], _INDEX)
        index = np.stack([np.cumsum(sizes) - sizes, sizes], axis=1)
        return b"".join([*chunks, _with_sum(index.tobytes())])

    def decode(self, data: bytes) -> np.ndarray:
        """Return the rows of a shard's file, in a new array. Raises ValueError or RuntimeError for a damaged file."""
        index_bytes = 2 * _INDEX.itemsize * self.num_chunks
        index = np.frombuffer(_checked(data[-index_bytes - _SUM_BYTES :], "its index"), _INDEX)
        if index.size != 2 * self.num_chunks:
            raise ValueError(f"{len(data)} bytes do not hold its index")
        rows = self.chunk[0]
        array = np.empty((rows * self.num_chunks, *self.chunk[1:]), self.dtype)
        for number, (offset, size) in enumerate(index.reshape(-1, 2).tolist()):
            if offset + size > len(data) - index_bytes - _SUM_BYTES:
                raise ValueError(f"inner chunk {number} is not there")
            plain = Blosc().decode(_checked(data[offset : offset + size], f"inner chunk {number}"))
            array[rows * number : rows * (number + 1)] = np.frombuffer(plain, self.dtype).reshape(self.chunk)
        return array

    def key(self, shard: int) -> str:
        """Return the name of a shard's file in the array's directory: `c.3.0`."""
        return ".".join(["c", str(shard)] + ["0"] * (len(self.chunk) - 1))

    def described(self, attributes: Mapping[str, Any]) -> bytes:
        """Return the content of the array's `zarr.json`: `metadata` with its attributes replaced by these."""
        return _with_attributes(self.metadata, attributes)

    def _as_stored(self, block: np.ndarray) -> np.ndarray:
        """Return the rows, contiguous in the stored dtype. Raises ValueError for another shape than a shard's."""
        shape = (self.chunk[0] * self.num_chunks, *self.chunk[1:])
        if block.shape != shape:
            raise ValueError(f"rows of shape {block.shape}, but a shard's is {shape}")
        return np.ascontiguousarray(block, self.dtype)


def _with_sum(data: bytes) -> bytes:
    return data + google_crc32c.value(data).to_bytes(_SUM_BYTES, "little")


def _checked(data: bytes, what: str) -> bytes:
    """Return `data` without its checksum. Raises ValueError if the checksum is wrong."""
    body, expected = data[:-_SUM_BYTES], int.from_bytes(data[-_SUM_BYTES:], "little")
    crc32c = google_crc32c.value(body)
    if len(data) < _SUM_BYTES or crc32c != expected:
        raise ValueError(f"{what} has CRC-32C {crc32c:08x}, stored as {expected:08x}")
    return body


def make_template(layout: Layout, dtype: str, ndim: int) -> Template:
    """Return the template of an array of this dtype and number of dimensions (rows, or rows × seq)."""
    rows = layout.rows_per_shard
    inner = max(n for n in range(1, min(CHUNK_ROWS, rows) + 1) if rows % n == 0)
    rest = (layout.seq,) * (ndim - 1)
    fill = {"f": float("nan"), "i": -1}.get(np.dtype(dtype).kind, 0)
    memory: dict[str, Any] = {}
    zarr.create_array(
        MemoryStore(memory),
        shape=(layout.num_rows, *rest),
        shards=(rows, *rest),
        chunks=(inner, *rest),
        dtype=dtype,
        compressors=_compressors(),
        fill_value=fill,
        dimension_names=_DIMENSIONS[:ndim],
        chunk_key_encoding=_FLAT,
    )
    metadata = bytes(memory["zarr.json"].to_bytes())
    return Template(metadata, np.dtype(dtype).newbyteorder("<"), (inner, *rest), rows // inner)


def _compressors() -> list[Any]:
    return [BloscCodec(cname=_COMPRESSOR, clevel=_LEVEL, shuffle="shuffle"), Crc32cCodec()]


def group_metadata(attributes: Mapping[str, Any]) -> bytes:
    """Return the content of the `zarr.json` of a Zarr group that has these attributes."""
    return _with_attributes(GROUP_METADATA, attributes)


def _with_attributes(metadata: bytes, attributes: Mapping[str, Any]) -> bytes:
    return json.dumps(json.loads(metadata) | {"attributes": dict(attributes)}, indent=2).encode()


def is_group(data: bytes | None) -> bool:
    """Return True if `data` is the metadata of a Zarr group, whatever the group's attributes are."""
    try:
        document = json.loads(data or b"")
    except ValueError:
        return False
    return isinstance(document, dict) and document | {"attributes": {}} == json.loads(GROUP_METADATA)


def encode_whole(array: np.ndarray, dimension: str, attributes: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files of a one-dimensional array that belongs to no step: key -> content."""
    memory: dict[str, Any] = {}
    made = zarr.create_array(
        MemoryStore(memory),
        shape=array.shape,
        chunks=array.shape,
        dtype=array.dtype,
        compressors=_compressors(),
        dimension_names=(dimension,),
        chunk_key_encoding=_FLAT,
        attributes=dict(attributes),
        config={"write_empty_chunks": True},
    )
    made[:] = array
    return {key: bytes(data.to_bytes()) for key, data in memory.items()}


def shards_of(layout: Layout, address: Address, rows: int) -> range:
    """Return the shards that a record of `rows` rows fills. Raises ValueError if the record fills neither one shard nor
    all shards."""
    if rows == layout.rows_per_shard and address.shard < layout.num_shards:
        return range(address.shard, address.shard + 1)
    if rows == layout.num_rows and address.shard == 0:
        return range(layout.num_shards)
    raise ValueError(
        f"{address}: {rows} rows, but a shard has {layout.rows_per_shard} and all {layout.num_shards} shards have "
        f"{layout.num_rows}"
    )
