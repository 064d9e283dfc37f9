"""The rollout store: the arrays of every record, in one Zarr v3 hierarchy that any Zarr reader or xarray can open.

    rollouts.zarr/step_000012/tokens/c/3/0     tokens of shard 3 of step 12 (all stages of a step share its group)
    rollouts.zarr/evaluate_000012/...          the rows that `evaluate` sampled with version 12 of the weights
    attempts/generate-000012-0003-a0-1f6c2a9b/ what one attempt has written and not yet moved into place

Writing is a write-ahead log of files (law 2):

    encode ──► attempt's files, synced ──► commit (exclusive create) ──won──► settle: rename each file to its chunk key
                                                 └──lost──► discard the attempt's files

Settling may be left to a thread (`behind`) while the next node runs: the commit alone makes an output exist.
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
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from typing import Any

import numpy as np
import zarr

from storage import files
from storage.address import Address
from storage.attempts import attempt_key, encode_record, in_attempt, of_attempt_key, write_metadata
from storage.behind import Behind
from storage.commits import Commit, Provenance, new_attempt
from storage.config import Durability
from storage.descriptions import describe
from storage.errors import DroppedOutput, MissingOutput, StoreError
from storage.ledger import Ledger
from storage.recent import RecentRecords
from storage.records import RECORD_TYPES, Record, concatenate
from storage.retention import KEY, read_dropped, write_dropped
from storage.shards import GROUP_METADATA, Layout, Layouts, Template, is_group, make_template, shards_of
from storage.validation import check_finite, check_logprobs

EVALUATE = "evaluate"
"""Stages whose names begin so have groups, and a layout, of their own: one group per evaluated version."""

_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError)
"""What Zarr raises for an array that is not there, or not sound."""
_STEP_GROUP = re.compile(r"step_(\d{6,})")


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
        behind: Behind | None = None,
    ) -> None:
        """`url`: the run's directory, a path or any fsspec URL; `rollouts.zarr/` and `attempts/` are made inside it.
        `recent_bytes`: of the records read or written last that are kept, and then shared by all who read them.
        `behind`: settles what `write` commits; its owner closes it."""
        run = files.open_root(url, durability)
        self._data = run.below("rollouts.zarr")
        self._attempts = run.below("attempts")
        self._run = run
        self._ledger = ledger
        self._layouts = layouts
        self._recent = RecentRecords(recent_bytes)
        self._behind = behind
        self._templates: dict[tuple[Layout, str, int], Template] = {}
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
        prepared, contents = self._encode(address, record, provenance, attempt, metrics, state)
        # An exception of the commit itself discards nothing: it may exist all the same, and `recover` will know.
        winner = self._ledger.commit(prepared, before=lambda: self._write_attempt(prepared, contents))
        if winner.attempt == attempt:
            self._recent.put((address, attempt), record)
            if self._behind is None:
                self.settle(winner)
            else:
                self._behind.submit(lambda: self.settle(winner))
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
        prepared, contents = self._encode(address, record, provenance, attempt, metrics, state)
        self._write_attempt(prepared, contents)
        return prepared

    def settle(self, commit: Commit) -> None:
        """Last third of `write`: moves a committed attempt's files to their chunk keys. Harmless at any time after the
        commit, by any number of processes at once."""
        group, source = _group(commit.address), attempt_key(commit.address, commit.attempt)
        metadata = self._metadata(commit)
        write_metadata(self._run, {key: data for key, data in metadata.items() if not files.exists(self._data, key)})
        for name, template, shard in self._blocks(commit):
            key = f"{name}/{template.key(shard)}"
            files.move(self._run, f"attempts/{source}/{in_attempt(key)}", f"rollouts.zarr/{group}/{key}")
        files.remove_tree(self._attempts, source)

    def recover(self, *, discard: bool = True) -> int:
        """Finishes what dead processes left: settles committed attempts, discards those that lost (unless `discard` is
        off: their processes may be alive, and would miss their files). Attempts whose address has no commit stay, since
        their process may be about to commit. Returns how many it settled. Raises DamagedCommit."""
        settled, before = 0, self.dropped_before()
        for address, attempt in self.attempts():
            commit = self._ledger.find(address)
            if commit is not None and commit.attempt == attempt and not dropped(address, before):
                self.settle(commit)
                settled += 1
            elif commit is not None and discard:
                self._discard(address, attempt)
        return settled

    def restore_metadata(self, commits: Iterable[Commit]) -> None:
        """Writes what plain readers find these arrays by where it is missing or damaged. For a driver without workers;
        reading a committed array does not need it."""
        before = self.dropped_before()
        for commit in commits:
            for key, data in {} if dropped(commit.address, before) else self._metadata(commit).items():
                there = files.read(self._data, key)
                if there != data and not (data == GROUP_METADATA and is_group(there)):
                    write_metadata(self._run, {key: data})

    def attempts(self) -> list[tuple[Address, str]]:
        """Attempts that have files which are not in their place: under way, or of processes that died."""
        directories = sorted({key.split("/", 1)[0] for key in files.keys(self._attempts)})
        return [found for found in map(of_attempt_key, directories) if found is not None]

    def close_books(self) -> None:
        """For a driver at the end, when every node has its commit and no worker is there: all that is committed is in
        its place, and nothing else is left of any attempt."""
        self.recover()
        files.remove_tree(self._run, "attempts")

    def read(self, address: Address) -> Any:
        """The committed record, of the type that was written. Raises MissingOutput where nothing is committed,
        DroppedOutput where its arrays were let go, and StoreError, naming array and address, where an array is missing
        or is not what was committed."""
        commit = self._ledger.get(address)
        if commit.kind is None:
            raise MissingOutput(f"{address} was committed without arrays")
        kept = self._recent.get((address, commit.attempt))
        if kept is not None:
            return kept
        blocks: dict[str, list[np.ndarray]] = {}
        for name, template, shard in self._blocks(commit):
            key = f"{name}/{template.key(shard)}"
            data, where = self._chunk(commit, key), self._data.at(f"{_group(address)}/{key}")
            if data is None:
                what = f"array {name} of {address}: shard {shard} ({where})"
                raise _why_absent(address, what, self.dropped_before())
            try:
                blocks.setdefault(name, []).append(template.decode(data))
            except (ValueError, RuntimeError) as error:
                what = f"array {name} of {address}: shard {shard} does not decode ({where}: {error})"
                raise StoreError(what) from error
        arrays = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in blocks.items()}
        for name, array in arrays.items():
            found = zlib.crc32(np.ascontiguousarray(array).data)
            if found != commit.arrays[name].crc32:
                raise StoreError(
                    f"array {name} of {address}: CRC-32 {found:08x}, committed as {commit.arrays[name].crc32:08x} "
                    f"({self._data.at(_group(address))}/{name})"
                )
        record = RECORD_TYPES[commit.kind].from_arrays(arrays)
        self._recent.put((address, commit.attempt), record)
        return record

    def dropped_before(self) -> int:
        """The first step whose arrays were not let go; 0 where none were. Raises StoreError."""
        return read_dropped(self._run)

    def drop(self, before: int) -> int:
        """Lets go the arrays of all steps before this one, evaluations excepted; their commits stay. For a driver, when
        nothing can read them any more. Returns of how many steps there was something."""
        if before > self.dropped_before():
            write_dropped(self._run, before)
        steps = [int(match[1]) for match in map(_STEP_GROUP.fullmatch, files.names(self._data)) if match]
        gone = [step for step in steps if step < before]
        for step in gone:
            files.remove_tree(self._data, f"step_{step:06d}")
        return len(gone)

    def make_anew(self, step: int) -> None:
        """Arrays of this step and later ones are about to be made anew: of them, none counts as let go any more."""
        if step < self.dropped_before():
            write_dropped(self._run, step)

    def plain_faults(self, commit: Commit) -> Iterator[str]:
        """What a plain Zarr reader does not find, or does not see as it was committed."""
        for key in ("zarr.json", f"{_group(commit.address)}/zarr.json") if commit.arrays else ():
            if not is_group(files.read(self._data, key)):
                yield f"{self._data.at(key)}: is not what was written: plain Zarr does not find the arrays below it"
        for name, info in commit.arrays.items():
            where = f"array {name} of {commit.address}"
            try:
                array = self._plain(commit.address, name, commit.rows)
                crc32 = zlib.crc32(np.ascontiguousarray(array).data)
            except _UNREADABLE as error:
                yield f"{where}: plain Zarr cannot read it ({type(error).__name__}: {error})"
                continue
            if crc32 != info.crc32 or array.dtype.name != info.dtype:
                yield f"{where}: plain Zarr sees other numbers than the committed ones (CRC-32 {crc32:08x})"

    def unvouched(self, address: Address, name: str) -> np.ndarray | None:
        """What is in the place of an array of a shard whose commit is lost: nothing vouches for it. None where plain
        Zarr reads nothing."""
        try:
            return self._plain(address, name, self._layout(address).rows_per_shard)
        except _UNREADABLE:
            return None

    def _plain(self, address: Address, name: str, num_rows: int) -> np.ndarray:
        """The rows of an output's array, as any Zarr reader sees them. Raises what Zarr raises (`_UNREADABLE`)."""
        options = {} if self._data.fs is None else {"storage_options": self._data.fs.storage_options}
        array = zarr.open_array(f"{self.url}/{_group(address)}/{name}", mode="r", **options)
        return np.asarray(array[_rows_of(self._layout(address), address, num_rows)])

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

    def _template(self, layout: Layout, dtype: str, ndim: int) -> Template:
        with self._lock:
            key = (layout, dtype, ndim)
            if key not in self._templates:
                self._templates[key] = make_template(layout, dtype, ndim)
            return self._templates[key]

    def _blocks(self, commit: Commit) -> Iterator[tuple[str, Template, int]]:
        """(array name, template, shard) of every file of a commit."""
        layout = self._layout(commit.address)
        for name, info in commit.arrays.items():
            template = self._template(layout, info.dtype, len(info.shape))
            for shard in shards_of(layout, commit.address, commit.rows):
                yield name, template, shard

    def _metadata(self, commit: Commit) -> dict[str, bytes]:
        """What plain readers find a commit's arrays by: key -> content."""
        group = _group(commit.address)
        found = {"zarr.json": GROUP_METADATA, f"{group}/zarr.json": GROUP_METADATA} if commit.arrays else {}
        arrays = {name: template for name, template, _ in self._blocks(commit)}
        return found | {f"{group}/{name}/zarr.json": t.described(describe(name)) for name, t in arrays.items()}

    def _chunk(self, commit: Commit, key: str) -> bytes | None:
        """A committed file: in its place, or still where the attempt wrote it. The place is asked again at the end,
        since the file may have moved between the two looks."""
        final = f"{_group(commit.address)}/{key}"
        data = files.read(self._data, final)
        if data is None:
            data = files.read(self._attempts, f"{attempt_key(commit.address, commit.attempt)}/{in_attempt(key)}")
        return files.read(self._data, final) if data is None else data

    def _encode(
        self,
        address: Address,
        record: Record,
        provenance: Provenance,
        attempt: str,
        metrics: Mapping[str, float] | None,
        state: Mapping[str, Any] | None,
    ) -> tuple[Commit, dict[str, bytes]]:
        """The commit of a record, and the files of its attempt: name -> content."""
        layout = self._layout(address)
        shards = shards_of(layout, address, record.num_rows)
        infos, contents = encode_record(record, layout, shards, self._template)
        about = (address, attempt, record.KIND, record.num_rows, infos, provenance)
        return Commit(*about, time.time(), metrics or {}, state or {}), contents

    def _write_attempt(self, prepared: Commit, contents: Mapping[str, bytes]) -> None:
        """On an exception the files are removed."""
        with ExitStack() as undo:
            undo.callback(self._discard, prepared.address, prepared.attempt)
            files.write_together(self._attempts, attempt_key(prepared.address, prepared.attempt), contents)
            undo.pop_all()

    def _discard(self, address: Address, attempt: str) -> None:
        files.remove_tree(self._attempts, attempt_key(address, attempt))


def _why_absent(address: Address, what: str, before: int) -> StoreError:
    """`before`: the arrays of the steps before this one were let go."""
    if dropped(address, before):
        return DroppedOutput(
            f"{what}: dropped by {KEY}, as are the arrays of all steps before {before}. A run that has to train on "
            "them again goes on with `stageline resume RUN --from-checkpoint`"
        )
    return StoreError(f"{what} is committed but its file is missing")


def _rows_of(layout: Layout, address: Address, num_rows: int) -> slice:
    """Where an output's rows, the padding of its last shard included, are in the step's array."""
    shards = shards_of(layout, address, num_rows)
    return slice(shards.start * layout.rows_per_shard, shards.stop * layout.rows_per_shard)


def _group(address: Address) -> str:
    return f"{EVALUATE if address.stage.startswith(EVALUATE) else 'step'}_{address.step:06d}"


def dropped(address: Address, before: int) -> bool:
    """Whether an output's arrays, if it has any, were let go, where those of all steps `before` one were."""
    return address.step < before and not address.stage.startswith(EVALUATE)
