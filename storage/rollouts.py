"""The rollout store: the arrays of every record, in one Zarr v3 hierarchy that any Zarr reader or xarray can open.

    rollouts.zarr/step_000012/tokens/c/3/0     tokens of shard 3 of step 12 (all stages of a step share its group)
    rollouts.zarr/evaluate_000012/...          the rows that `evaluate` sampled with version 12 of the weights
    attempts/generate-000012-0003-a0-1f6c2a9b/ what one attempt has written and not yet moved into place

Writing is a write-ahead log of files (law 2):

    encode ──► attempt's files, synced ──► commit (exclusive create) ──won──► settle: rename each file to its chunk key
                                                 └──lost──► discard the attempt's files

A process that dies before the commit leaves files nobody looks at; one that dies after it leaves files that the commit
names, so `read` finds them there and `recover` moves them: when a gang was lost, when a driver begins, when it ends.
No array file is ever opened for writing in place, and a shard of an array is written by one attempt only. Zarr itself
would answer a missing shard with fill values: `read` raises instead, and checks the CRC-32 of every array against the
commit. Plain readers see the fill value (NaN, -1, False) where nothing is committed yet.

One record kind is written by one stage: all stages of a step share a group, and fields are named by the records.

May import numpy, zarr and storage.
"""

from __future__ import annotations

import re
import threading
import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr
from zarr.buffer.cpu import Buffer
from zarr.codecs import BloscCodec, Crc32cCodec
from zarr.storage import MemoryStore

from storage import files
from storage.address import Address
from storage.config import Durability
from storage.errors import MissingOutput, StoreError
from storage.ledger import ArrayInfo, Commit, Ledger, Provenance, new_attempt
from storage.recent import RecentRecords
from storage.records import RECORD_TYPES, Record, concatenate
from storage.validation import check_finite, check_logprobs

EVALUATE = "evaluate"
"""Stages whose names begin so have groups, and a layout, of their own: one group per evaluated version."""

_CHUNK_ROWS = 16
"""Rows of an inner chunk: 1-row chunks are 6-9 times slower to read, and larger ones gain nothing."""
_DIMENSIONS = ("rows", "seq")
_ATTEMPT = re.compile(r"(?P<stage>.+?)-(?P<step>\d{6,})-(?P<shard>\d{4,})-(?P<attempt>[^/]+)")


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
class _Template:
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

    def _rows(self, shard: int) -> slice:
        return slice(shard * self.layout.rows_per_shard, (shard + 1) * self.layout.rows_per_shard)


class RolloutStore:
    """Owns this process's encoders (not picklable: each process makes its own store); threads may share it."""

    def __init__(
        self,
        url: str,
        ledger: Ledger,
        layouts: Layouts,
        *,
        recent_bytes: int = 0,
        durability: Durability = files.DEFAULT,
    ) -> None:
        """`url`: the run's directory, a path or any fsspec URL; `rollouts.zarr/` and `attempts/` are made inside it.
        `recent_bytes`: of the records read or written last that are kept, and then shared by all who read them."""
        run = files.open_root(url, durability)
        self._data = run.below("rollouts.zarr")
        self._attempts = run.below("attempts")
        self._run = run
        self._ledger = ledger
        self._layouts = layouts
        self._recent = RecentRecords(recent_bytes)
        self._templates: dict[tuple[Layout, str, int], _Template] = {}
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """What `zarr.open_group` takes."""
        return self._data.url

    def write(
        self,
        address: Address,
        record: Record,
        provenance: Provenance,
        *,
        attempt: str | None = None,
        mask: np.ndarray | None = None,
        metrics: Mapping[str, float] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Commit:
        """Stores and commits a record. Returns the winning commit, which is another attempt's where that came first.

        Raises ValueError for rows or seq other than the layout's, NaN or infinity (naming field and row), and
        `*_logprobs` that are zero on all sampled tokens of a row (`mask`: response_mask, rows × seq).
        """
        check_finite(record)
        check_logprobs(record, mask)
        attempt = attempt or new_attempt()
        prepared = self.prepare(address, record, provenance, attempt=attempt, metrics=metrics, state=state)
        # An exception here discards nothing: the commit may exist all the same, and `recover` will know.
        winner = self._ledger.commit(prepared)
        if winner.attempt == attempt:
            self.settle(winner)
            self._recent.put((address, attempt), record)
        else:
            self._discard(address, attempt)
        return winner

    def commit_only(
        self,
        address: Address,
        provenance: Provenance,
        *,
        attempt: str | None = None,
        metrics: Mapping[str, float] | None = None,
        state: Mapping[str, Any] | None = None,
        digest: str | None = None,
    ) -> Commit:
        """Commits an output that has no arrays (an update, a publish); returns the winner."""
        commit = Commit(
            address, attempt or new_attempt(), None, 0, {}, provenance, time.time(), metrics or {}, state or {}, digest
        )
        return self._ledger.commit(commit)

    def prepare(
        self,
        address: Address,
        record: Record,
        provenance: Provenance,
        *,
        attempt: str,
        metrics: Mapping[str, float] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> Commit:
        """First third of `write`: the attempt's files, and the commit that would make them exist; on an exception the
        files are removed. `Ledger.commit` and `settle` are the other thirds."""
        layout = self._layout(address)
        shards = _shards(layout, address, record.num_rows)
        infos = {}
        with ExitStack() as undo:
            undo.callback(self._discard, address, attempt)
            for name, array in record.arrays().items():
                if array.shape[1:] not in ((), (layout.seq,)):
                    raise ValueError(f"{record.KIND}.{name}: shape {array.shape}, but the layout's seq is {layout.seq}")
                array = np.ascontiguousarray(array)
                infos[name] = ArrayInfo(array.dtype.name, array.shape, zlib.crc32(array.data))
                template = self._template(layout, array.dtype.name, array.ndim)
                for shard, block in zip(shards, np.split(array, len(shards)), strict=True):
                    with self._lock:
                        data = template.encode(shard, block)
                    files.write(self._attempts, f"{_attempt_key(address, attempt)}/{name}/{template.key(shard)}", data)
            undo.pop_all()
        return Commit(
            address, attempt, record.KIND, record.num_rows, infos, provenance, time.time(), metrics or {}, state or {}
        )

    def settle(self, commit: Commit) -> None:
        """Last third of `write`: moves a committed attempt's files to their chunk keys. Harmless at any time after the
        commit, by any number of processes at once."""
        group = _group(commit.address)
        self._write_metadata("zarr.json", _GROUP_METADATA)
        self._write_metadata(f"{group}/zarr.json", _GROUP_METADATA)
        source = _attempt_key(commit.address, commit.attempt)
        for name, template, shard in self._blocks(commit):
            self._write_metadata(f"{group}/{name}/zarr.json", template.metadata)
            key = f"{name}/{template.key(shard)}"
            files.move(self._run, f"attempts/{source}/{key}", f"rollouts.zarr/{group}/{key}")
        files.remove_tree(self._attempts, source)

    def recover(self, *, discard: bool = True) -> int:
        """Finishes what dead processes left: settles committed attempts, discards those that lost (unless `discard` is
        off: their processes may be alive, and would miss their files). Attempts whose address has no commit stay, since
        their process may be about to commit. Returns how many it settled. Raises DamagedCommit."""
        settled = 0
        for address, attempt in self.attempts():
            commit = self._ledger.find(address)
            if commit is not None and commit.attempt == attempt:
                self.settle(commit)
                settled += 1
            elif commit is not None and discard:
                self._discard(address, attempt)
        return settled

    def attempts(self) -> list[tuple[Address, str]]:
        """Attempts that have files which are not in their place: under way, or of processes that died."""
        directories = sorted({key.split("/", 1)[0] for key in files.keys(self._attempts)})
        matches = filter(None, map(_ATTEMPT.fullmatch, directories))
        return [(Address(m["stage"], int(m["step"]), int(m["shard"])), m["attempt"]) for m in matches]

    def close_books(self) -> None:
        """For a driver at the end, when every node has its commit and no worker is there: all that is committed is in
        its place, and nothing else is left of any attempt."""
        self.recover()
        files.remove_tree(self._run, "attempts")

    def read(self, address: Address) -> Any:
        """The committed record, of the type that was written. Raises MissingOutput where nothing is committed, and
        StoreError, naming array and address, where an array is missing or is not what was committed."""
        commit = self._ledger.get(address)
        if commit.kind is None:
            raise MissingOutput(f"{address} was committed without arrays")
        kept = self._recent.get((address, commit.attempt))
        if kept is not None:
            return kept
        blocks: dict[str, list[np.ndarray]] = {}
        for name, template, shard in self._blocks(commit):
            data = self._chunk(commit, f"{name}/{template.key(shard)}")
            if data is None:
                raise StoreError(f"array {name} of {address}: shard {shard} is committed but its file is missing")
            try:
                with self._lock:
                    blocks.setdefault(name, []).append(template.decode(shard, data))
            except (ValueError, RuntimeError) as error:
                raise StoreError(f"array {name} of {address}: shard {shard} does not decode ({error})") from error
        arrays = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in blocks.items()}
        for name, array in arrays.items():
            found = zlib.crc32(np.ascontiguousarray(array).data)
            if found != commit.arrays[name].crc32:
                raise StoreError(
                    f"array {name} of {address}: CRC-32 {found:08x}, committed as {commit.arrays[name].crc32:08x}"
                )
        record = RECORD_TYPES[commit.kind](**arrays)
        self._recent.put((address, commit.attempt), record)
        return record

    def plain_faults(self, commit: Commit) -> Iterator[str]:
        """Which committed arrays a plain Zarr reader does not see as they were committed."""
        layout, group = self._layout(commit.address), _group(commit.address)
        shards = _shards(layout, commit.address, commit.rows) if commit.arrays else range(0)
        rows = slice(shards.start * layout.rows_per_shard, shards.stop * layout.rows_per_shard)
        options = {} if self._data.fs is None else {"storage_options": self._data.fs.storage_options}
        for name, info in commit.arrays.items():
            where = f"array {name} of {commit.address}"
            try:
                array = zarr.open_array(f"{self.url}/{group}/{name}", mode="r", **options)
                crc32 = zlib.crc32(np.ascontiguousarray(array[rows]).data)
            except (OSError, ValueError, RuntimeError, KeyError) as error:
                yield f"{where}: plain Zarr cannot read it ({type(error).__name__}: {error})"
                continue
            if crc32 != info.crc32 or array.dtype.name != info.dtype:
                yield f"{where}: plain Zarr sees other numbers than the committed ones (CRC-32 {crc32:08x})"

    def keys_of(self, commit: Commit) -> tuple[str, ...]:
        """Where the files of a settled commit are, below the run's directory; none for one without arrays."""
        group = _group(commit.address)
        return tuple(f"rollouts.zarr/{group}/{name}/{t.key(shard)}" for name, t, shard in self._blocks(commit))

    def read_step(self, stage: str, step: int, num_shards: int) -> Any:
        """The records of shards 0..num_shards-1, joined along the rows."""
        return concatenate([self.read(Address(stage, step, shard)) for shard in range(num_shards)])

    def _layout(self, address: Address) -> Layout:
        if not address.stage.startswith(EVALUATE):
            return self._layouts.step
        if self._layouts.evaluate is None:
            raise ValueError(f"{address}: this store was made without a layout for {EVALUATE}")
        return self._layouts.evaluate

    def _template(self, layout: Layout, dtype: str, ndim: int) -> _Template:
        with self._lock:
            key = (layout, dtype, ndim)
            if key not in self._templates:
                self._templates[key] = _make_template(layout, dtype, ndim)
            return self._templates[key]

    def _blocks(self, commit: Commit) -> Iterator[tuple[str, _Template, int]]:
        """(array name, template, shard) of every file of a commit."""
        layout = self._layout(commit.address)
        for name, info in commit.arrays.items():
            template = self._template(layout, info.dtype, len(info.shape))
            for shard in _shards(layout, commit.address, commit.rows):
                yield name, template, shard

    def _chunk(self, commit: Commit, key: str) -> bytes | None:
        """A committed file: in its place, or still where the attempt wrote it. The place is asked again at the end,
        since the file may have moved between the two looks."""
        final = f"{_group(commit.address)}/{key}"
        data = files.read(self._data, final)
        if data is None:
            data = files.read(self._attempts, f"{_attempt_key(commit.address, commit.attempt)}/{key}")
        return files.read(self._data, final) if data is None else data

    def _write_metadata(self, key: str, data: bytes) -> None:
        """Whoever comes first, and in a race several, writes the same bytes. Temporary files are kept out of the
        hierarchy, since Zarr warns of files that it does not know."""
        if not files.exists(self._data, key):
            scratch = f"metadata-{new_attempt()}"
            files.write(self._attempts, f"{scratch}/zarr.json", data)
            files.move(self._run, f"attempts/{scratch}/zarr.json", f"rollouts.zarr/{key}")
            files.remove_tree(self._attempts, scratch)

    def _discard(self, address: Address, attempt: str) -> None:
        files.remove_tree(self._attempts, _attempt_key(address, attempt))


_GROUP_METADATA = b'{\n  "attributes": {},\n  "zarr_format": 3,\n  "node_type": "group"\n}'


def _make_template(layout: Layout, dtype: str, ndim: int) -> _Template:
    rows = layout.rows_per_shard
    inner = max(n for n in range(1, min(_CHUNK_ROWS, rows) + 1) if rows % n == 0)
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
    return _Template(array, memory, bytes(memory["zarr.json"].to_bytes()), layout)


def _shards(layout: Layout, address: Address, rows: int) -> range:
    """Shards of the arrays that a record of so many rows fills."""
    if rows == layout.rows_per_shard and address.shard < layout.num_shards:
        return range(address.shard, address.shard + 1)
    if rows == layout.num_rows and address.shard == 0:
        return range(layout.num_shards)
    raise ValueError(
        f"{address}: {rows} rows, but a shard has {layout.rows_per_shard} and all {layout.num_shards} shards have "
        f"{layout.num_rows}"
    )


def _group(address: Address) -> str:
    return f"{EVALUATE if address.stage.startswith(EVALUATE) else 'step'}_{address.step:06d}"


def _attempt_key(address: Address, attempt: str) -> str:
    return f"{address.stage}-{address.step:06d}-{address.shard:04d}-{attempt}"
