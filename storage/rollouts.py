"""The rollout store: the arrays of every record, in one Zarr v3 hierarchy that any Zarr reader or xarray can open.

    rollouts.zarr/step_000012/tokens/c.3.0     tokens of shard 3 of step 12 (all stages of a step share its group)
    rollouts.zarr/evaluate_000012/...          the rows that `evaluate` sampled with version 12 of the weights
    attempts/generate-000012-0003-a0-1f6c2a9b/ files of one attempt that are not yet at their chunk keys

In an object store each request takes a round trip, so the files of an attempt are one object there
(`...-1f6c2a9b.packed`). Such an object is not renamed: its files are written once more, at their chunk keys. A worker
keeps the object for some steps, since other workers read a record from it with one request (`prefetch`), and then
removes the objects of a step together.

Writing is a write-ahead log of files (law 2 of docs/architecture.md):

    encode ──► attempt's files, synced ──► commit (exclusive create) ──won──► settle: rename each file to its chunk key
                                                 └──lost──► discard the attempt's files

    attempts/generate-000012-0003-a0-1f6c2a9b/tokens.c.3.0 ──► rollouts.zarr/step_000012/tokens/c.3.0

A thread may settle (`files.Writeback`) while the next node runs, because the commit alone makes an output exist. A
process that dies before the commit leaves files that nobody reads. A process that dies after the commit leaves files
that the commit names: `read` finds them in the attempt, and `recover` moves them (after the loss of a gang, and at the
start and end of a driver). No array file is ever opened for writing in place, and each shard of an array is written by
one attempt only.

Zarr returns fill values for a missing shard. `read` raises instead, and checks the CRC-32 of every array against the
commit. Plain readers see the fill value (NaN, -1, False) where nothing is committed yet.

All stages of a step share a group, in which the arrays have the names of the records' fields. So each kind of record is
written by one stage only.

Each process keeps the records that it read or wrote last, so that stages of one worker do not read the same rows again.
Committed records never change, so a kept record is as good as the file.

Arrays of old steps may be deleted (`storage.keep.rollouts`). A file records this before the first deletion:

    dropped.json   {"format": 1, "rollouts_before": 30, "by": "storage.keep.rollouts", "checksum": "..."}

Commit records of those steps stay, and so do all evaluations. A reader that does not find an array looks into
this file, and reports "dropped" instead of "missing".

The root has attributes and arrays that belong to no step:

    rollouts.zarr/zarr.json               run, digest of its config, model, tokenizer, meaning of the groups
    rollouts.zarr/vocabulary_bytes        every token's bytes, one after the other; none for special tokens
    rollouts.zarr/vocabulary_offsets      token t is bytes[offsets[t] : offsets[t + 1]]

With the vocabulary a run's text can be read without its tokenizer, in any language: join the bytes of the tokens and
decode them as UTF-8, with a replacement character where a response was cut inside a character. Attributes and arrays of
the root are no output: they have no commit and no stage reads them. A driver that continues the run writes the same
content again.
"""

from __future__ import annotations

import json
import math
import re
import sys
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from storage import files
from storage.address import Address
from storage.commits import ArrayInfo, Commit, Provenance, checksum, new_attempt
from storage.config import Durability, Layout, Layouts
from storage.errors import DamagedCommit, DroppedOutput, MissingOutput, StoreError, StoreRefused, StoreUnavailable
from storage.files import Writeback
from storage.ledger import KEEP, Ledger, read_dropped, write_dropped
from storage.records import RECORD_TYPES, Record, check_finite, check_logprobs, concatenate, describe
from storage.shards import GROUP_METADATA, Template, encode_whole, group_metadata, is_group, make_template, shards_of

EVALUATE = "evaluate"
"""Prefix of the names of evaluation stages. The outputs of these stages are in no step's group. There is one group for
each evaluated version, and these groups have a layout of their own."""

_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError, StoreError)
"""Errors that Zarr raises when it reads a missing or damaged array."""
_STORE = "rollouts.zarr"
_PACKED = ".packed"
_MOST_DESCRIBED = 4096
_STEPS_KEPT = 3
"""Number of steps after which a worker removes the object of an attempt. A step's readers are within the window of a
run. A later reader finds the files at their chunk keys."""
_STEP_GROUP = re.compile(r"step_(\d{6,})")


class RolloutStore:
    """The rollout store of a run, as one process sees it. Each process makes its own object, because the encoders
    cannot be pickled. Threads may share it."""

    def __init__(
        self,
        url: str,
        ledger: Ledger,
        layouts: Layouts,
        *,
        recent_bytes: int = 0,
        durability: Durability = files.DEFAULT,
        writeback: Writeback | None = None,
    ) -> None:
        """Open the store in the run's directory `url` (a path or an object store's URL); `rollouts.zarr/` and
        `attempts/` are created in it.

        `recent_bytes`: maximum size of the cache of records. All readers get the same cached record. `writeback`: the
        thread that moves committed files to their final place; the caller closes it. Without `writeback`, the method
        `write` moves them itself.
        """
        run = files.open_root(url, durability)
        self._data = run.below(_STORE)
        self._attempts = run.below("attempts")
        self._run = run
        self._ledger = ledger
        self._layouts = layouts
        self._recent = RecentRecords(recent_bytes)
        self._writeback = writeback
        self._templates: dict[tuple[Layout, str, int], Template] = {}
        self._described: set[str] = set()
        """Keys of metadata that is known to exist. The set is emptied when it is large, and when arrays are deleted."""
        self._lock = threading.Lock()
        self._kept: dict[int, list[str]] = {}
        """Step -> keys of settled attempts whose objects other workers may still read. Only `settle` uses it."""

    @property
    def url(self) -> str:
        """Return the URL for `zarr.open_group`."""
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
        """Store and commit a record. Return the winning commit, which may be an earlier one of another attempt.

        `mask`: response_mask, rows × seq, for the check of `*_logprobs` (see `check_logprobs`).

        Raises:
            ValueError: rows or seq differ from the layout's; a number is NaN or infinite (naming field and row); or
                `*_logprobs` are zero on all sampled tokens of a row (naming field and row).
        """
        check_finite(record)
        check_logprobs(record, mask)
        attempt = attempt or new_attempt()
        prepared, contents = self._encode(address, record, provenance, attempt, metrics, state)
        # If the commit itself raises, nothing is discarded: the commit may exist, and `recover` will find out.
        winner = self._commit(prepared, before=lambda: self._write_attempt(prepared, contents))
        if winner.attempt != attempt:
            self._discard(address, attempt)
            return winner
        self._recent.put((address, attempt), record)
        known = None if self._run.fs is None else contents
        if self._writeback is None:
            self.settle(winner, known)
        else:
            self._writeback.submit(lambda: self._settle_unless_late(winner, known))
        return winner

    def commit_only(
        self,
        address: Address,
        provenance: Provenance,
        *,
        attempt: str | None = None,
        metrics: Mapping[str, float] | None = None,
        digest: str | None = None,
    ) -> Commit:
        """Commit an output without arrays (an update, a publish). Return the winning commit."""
        name, now = attempt or new_attempt(), time.time()
        winner = self._commit(Commit(address, name, None, 0, {}, provenance, now, metrics or {}, digest=digest))
        if self._writeback is not None:
            self._writeback.submit(lambda: self._ledger.closed_winner(address))
        return winner

    def _commit(self, commit: Commit, before: Callable[[], None] | None = None) -> Commit:
        """Commit an output. A writeback thread looks for an earlier commit in the step's segment, so the caller need
        not wait."""
        return self._ledger.commit(commit, before, closed=self._writeback is None)

    def _settle_unless_late(self, commit: Commit, contents: Mapping[str, bytes] | None) -> None:
        """Settle a commit, or discard its attempt if the segment of its step has an earlier commit."""
        earlier = self._ledger.closed_winner(commit.address)
        if earlier is None or earlier.attempt == commit.attempt:
            self.settle(commit, contents)
        else:
            self._discard(commit.address, commit.attempt)

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
        """Do the first part of `write`: write the attempt's files and return the commit that is to be made. On an
        exception the files are removed. The caller goes on with `Ledger.commit` and `settle`."""
        prepared, contents = self._encode(address, record, provenance, attempt, metrics, state)
        self._write_attempt(prepared, contents)
        return prepared

    def settle(self, commit: Commit, contents: Mapping[str, bytes] | None = None) -> None:
        """Do the last part of `write`: bring a committed attempt's files to their chunk keys. May be called at any time
        after the commit, any number of times, and by several processes at once.

        `contents`: name -> content of the attempt's files, if known. They are used only with an object store. There
        the files are written again at their chunk keys, because an object store cannot rename files."""
        metadata = {key: data for key, data in self._metadata(commit).items() if key not in self._described}
        # A group may have attributes, which stay. An array in an object store is described without a look whether it
        # is described already: the look would take a request too.
        looked_at = [key for key, data in metadata.items() if self._run.fs is None or data == GROUP_METADATA]
        stored = files.map_items(self._data, lambda key: files.read(self._data, key), looked_at)
        described = {key for key, data in zip(looked_at, stored, strict=True) if data}
        write_metadata(self._run, {key: data for key, data in metadata.items() if key not in described})
        if len(self._described) > _MOST_DESCRIBED:
            self._described.clear()
        self._described.update(metadata)
        group, source = _group(commit.address), attempt_key(commit.address, commit.attempt)
        targets = {in_attempt(key): f"{group}/{key}" for key in self._chunk_keys(commit)}
        if self._run.fs is None:
            for name, target in targets.items():
                files.move(self._run, f"attempts/{source}/{name}", f"{_STORE}/{target}")
        elif contents := contents or self._read_packed(commit):
            files.write_together(self._run, _STORE, {target: contents[name] for name, target in targets.items()})
        if self._run.fs is None or self._writeback is None:
            self._discard(commit.address, commit.attempt)
        else:
            self._keep_for_readers(commit)

    def _keep_for_readers(self, commit: Commit) -> None:
        """Leave the object of a settled attempt to other workers, and remove the objects of old steps."""
        step = commit.address.step
        self._kept.setdefault(step, []).append(attempt_key(commit.address, commit.attempt) + _PACKED)
        old = [kept for kept in self._kept if kept <= step - _STEPS_KEPT]
        files.remove_all(self._attempts, [key for kept in old for key in self._kept.pop(kept)])

    def recover(self, *, discard: bool = True) -> int:
        """Finish the work of processes that died while they wrote outputs. Return the number of attempts that were
        settled. To settle an attempt is to move its files to their final place in the Zarr hierarchy.

        - A committed attempt is settled. In an object store, its files are packed into one object. The attempt may have
          been settled before, since a worker keeps the objects of some steps. If the object is damaged, it is removed
          if the arrays are at their chunk keys. Otherwise it stays, and readers do not find the arrays.
        - An attempt is removed if another attempt at its address was committed, or if its arrays count as deleted
          (`dropped`). If `discard` is False it stays, since a living process may still need it.
        - An attempt at an address without a commit stays, since its process may be about to commit.

        Raises DamagedCommit.
        """
        before = self.dropped_before()

        def finish(found: tuple[Address, str]) -> bool:
            """Return True if the attempt had to be settled."""
            address, attempt = found
            commit = self._ledger.closed_winner(address) or self._ledger.find(address)
            if commit is None:
                return False
            if commit.attempt != attempt or dropped(address, before):
                if discard:
                    self._discard(address, attempt)
                return False
            try:
                self.settle(commit)
            except DamagedAttempt as error:
                if self._is_in_place(commit):
                    self._discard(address, attempt)
                else:
                    print(error, file=sys.stderr, flush=True)
                return False
            return True

        return sum(files.map_items(self._run, finish, self.attempts()))

    def restore_metadata(self, commits: Iterable[Commit]) -> None:
        """Write the Zarr metadata of these commits' arrays, where it is missing or damaged. Programs that read the
        arrays with Zarr alone need it. The method `read` does not need it.

        Commits whose arrays count as deleted are skipped. Only a driver may call this, while no worker runs.
        """
        before = self.dropped_before()
        for commit in commits:
            for key, data in {} if dropped(commit.address, before) else self._metadata(commit).items():
                stored = files.read(self._data, key)
                if stored != data and not (data == GROUP_METADATA and is_group(stored)):
                    write_metadata(self._run, {key: data})

    def attempts(self) -> list[tuple[Address, str]]:
        """Return the attempts whose files are not at their chunk keys: attempts that are running, and attempts of dead
        processes."""
        found = sorted({key.split("/", 1)[0].removesuffix(_PACKED) for key in files.keys(self._attempts)})
        return [attempt for attempt in map(of_attempt_key, found) if attempt is not None]

    def finalise(self) -> None:
        """Move the files of all committed attempts to their chunk keys, and remove all attempts. Nothing is removed if
        the object of a committed attempt is damaged (`recover`). Only a driver that ends may call this: every node must
        have its commit, and no worker may run."""
        self.recover()
        commits = ((self._ledger.find(address), attempt) for address, attempt in self.attempts())
        if not any(commit is not None and commit.attempt == attempt for commit, attempt in commits):
            files.remove_tree(self._run, "attempts")

    def read(self, address: Address) -> Any:
        """Return the committed record, in the type that was written.

        Raises:
            MissingOutput: nothing is committed, or the commit has no arrays.
            DroppedOutput: the arrays were deleted.
            StoreError: an array is missing or damaged. The message names the array and its address. In an object store,
                the arrays may still be packed into one object of the attempt. If that object is damaged, the message
                names it.
        """
        commit = self._ledger.get(address)
        if commit.kind is None:
            raise MissingOutput(f"{address} was committed without arrays")
        kept = self._recent.get((address, commit.attempt))
        if kept is not None:
            return kept
        try:
            return self._decode(commit, self._found(commit, self._in_place, self._in_attempt, self._in_place))
        except (DroppedOutput, StoreRefused, StoreUnavailable):
            raise
        except StoreError:
            # Arrays of an earlier commit, which was archived, may still be in the place of an attempt's files until
            # these are moved there, one after the other. A file that has left the attempt is in its place.
            return self._decode(commit, self._found(commit, self._in_attempt, self._in_place))

    def prefetch(self, addresses: Iterable[Address]) -> None:
        """Read records of an object store into the cache, all at the same time, so that later reads take no round trip.
        Do nothing for a local store, or if the records would fill more than half of the cache.

        The object with the attempt's files is tried first, since one request reads all arrays. Skip records that are
        missing or damaged. Raises StoreUnavailable.
        """
        if self._run.fs is None:
            return

        def find(address: Address) -> Commit | None:
            with suppress(DamagedCommit):
                return self._ledger.find(address)
            return None

        found = [commit for commit in files.map_items(self._run, find, addresses) if commit and commit.arrays]
        arrays = [info for commit in found for info in commit.arrays.values()]
        num_bytes = sum(np.dtype(info.dtype).itemsize * math.prod(info.shape) for info in arrays)
        if 2 * num_bytes > self._recent.max_bytes:
            return
        commits = [commit for commit in found if self._recent.get((commit.address, commit.attempt)) is None]

        def look(commit: Commit) -> list[bytes | None]:
            with suppress(DamagedAttempt):
                return self._found(commit, self._in_attempt, self._in_place)
            return self._in_place(commit)

        for commit, chunks in zip(commits, files.map_items(self._run, look, commits), strict=True):
            if None not in chunks:
                with suppress(StoreError):
                    self._decode(commit, chunks)

    def _decode(self, commit: Commit, chunks: Sequence[bytes | None]) -> Any:
        """Return the record of a commit, given the contents of its files in the order of `_chunk_keys`, and keep it in
        the cache. Raises DroppedOutput and StoreError as `read` does."""
        address, blocks = commit.address, dict[str, list[np.ndarray]]()
        for (name, template, shard), data in zip(self._blocks(commit), chunks, strict=True):
            where = self._data.at(f"{_group(address)}/{name}/{template.key(shard)}")
            if data is None:
                what = f"array {name} of {address}: shard {shard} ({where})"
                raise _absent_error(address, what, self.dropped_before())
            try:
                blocks.setdefault(name, []).append(template.decode(data))
            except (ValueError, RuntimeError) as error:
                what = f"array {name} of {address}: shard {shard} does not decode ({where}: {error})"
                raise StoreError(what) from error
        arrays = {name: parts[0] if len(parts) == 1 else np.concatenate(parts) for name, parts in blocks.items()}
        for name, array in arrays.items():
            crc32 = zlib.crc32(np.ascontiguousarray(array).data)
            if crc32 != commit.arrays[name].crc32:
                raise StoreError(
                    f"array {name} of {address}: CRC-32 {crc32:08x}, committed as {commit.arrays[name].crc32:08x} "
                    f"({self._data.at(_group(address))}/{name})"
                )
        record = RECORD_TYPES[str(commit.kind)].from_arrays(arrays)
        self._recent.put((address, commit.attempt), record)
        return record

    def dropped_before(self) -> int:
        """Return the first step whose arrays were not deleted; 0 if nothing was deleted. Raises StoreError."""
        return read_dropped(self._run)

    def drop(self, before: int) -> int:
        """Delete the arrays of all steps before step `before`, except evaluations. Commits stay. Return the number of
        steps that had arrays. The caller ensures that nothing reads the arrays any more."""
        self._described.clear()
        if before > self.dropped_before():
            write_dropped(self._run, before)
        steps = [int(match[1]) for match in map(_STEP_GROUP.fullmatch, files.names(self._data)) if match]
        gone = [step for step in steps if step < before]
        for step in gone:
            files.remove_tree(self._data, f"step_{step:06d}")
        return len(gone)

    def make_anew(self, step: int) -> None:
        """Record that the deleted arrays of step `step` and of later steps are about to be computed again. From now on
        they do not count as deleted."""
        if step < self.dropped_before():
            write_dropped(self._run, step)

    def plain_faults(self, commit: Commit) -> Iterator[str]:
        """Yield a text for each fault that a plain Zarr reader meets: an array of the commit that the reader does
        not find or cannot read, or that has other numbers than the committed ones."""
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

    def read_uncommitted(self, address: Address, name: str) -> np.ndarray | None:
        """Return the array of a shard whose commit is lost, without a check of its CRC-32. Return None if plain Zarr
        cannot read the array."""
        try:
            return self._plain(address, name, self._layout(address).rows_per_shard)
        except _UNREADABLE:
            return None

    def _plain(self, address: Address, name: str, num_rows: int) -> np.ndarray:
        """Return the rows of an output's array as any Zarr reader sees them."""
        rows = _rows_of(self._layout(address), address, num_rows)
        return _plain_array(self._data, f"{_group(address)}/{name}", rows)

    def keys_of(self, commit: Commit) -> tuple[str, ...]:
        """Return the keys, below the run's directory, that a commit's files have after `settle`. Empty for a commit
        without arrays."""
        return tuple(f"{_STORE}/{_group(commit.address)}/{key}" for key in self._chunk_keys(commit))

    def read_step(self, stage: str, step: int, num_shards: int) -> Any:
        """Return the records of shards 0..num_shards-1, joined along the rows."""
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
        """Yield (array name, template, shard) for every file of a commit."""
        layout = self._layout(commit.address)
        for name, info in commit.arrays.items():
            template = self._template(layout, info.dtype, len(info.shape))
            for shard in shards_of(layout, commit.address, commit.rows):
                yield name, template, shard

    def _chunk_keys(self, commit: Commit) -> list[str]:
        """Return the keys of a commit's files within its Zarr group, such as `tokens/c.3.0`."""
        return [f"{name}/{template.key(shard)}" for name, template, shard in self._blocks(commit)]

    def _metadata(self, commit: Commit) -> dict[str, bytes]:
        """Return key -> content of the `zarr.json` files that programs need that read a commit's arrays with Zarr
        alone."""
        group = _group(commit.address)
        metadata = {"zarr.json": GROUP_METADATA, f"{group}/zarr.json": GROUP_METADATA} if commit.arrays else {}
        arrays = {name: template for name, template, _ in self._blocks(commit)}
        return metadata | {f"{group}/{name}/zarr.json": t.described(describe(name)) for name, t in arrays.items()}

    def _found(self, commit: Commit, *looks: Callable[[Commit], list[bytes | None]]) -> list[bytes | None]:
        """Return the contents of a commit's files in the order of `_chunk_keys`, found by the first look that finds
        each. Another process may move a file at any time, so a look at its final place must follow the look in the
        attempt."""
        contents: list[bytes | None] = [None] * len(self._chunk_keys(commit))
        for look in looks:
            if None not in contents:
                break
            contents = [a if a is not None else b for a, b in zip(contents, look(commit), strict=True)]
        return contents

    def _in_place(self, commit: Commit) -> list[bytes | None]:
        """Return what is at a commit's chunk keys."""
        keys = [f"{_group(commit.address)}/{key}" for key in self._chunk_keys(commit)]
        return files.map_items(self._data, lambda key: files.read(self._data, key), keys)

    def _is_in_place(self, commit: Commit) -> bool:
        """Return True if a commit's arrays are at their chunk keys, with the CRC-32 of the commit."""
        try:
            self._decode(commit, self._in_place(commit))
        except (StoreRefused, StoreUnavailable):
            raise
        except StoreError:
            return False
        return True

    def _in_attempt(self, commit: Commit) -> list[bytes | None]:
        """Return a commit's files as they are in its attempt. Raises DamagedAttempt."""
        names = [in_attempt(key) for key in self._chunk_keys(commit)]
        if self._run.fs is None:
            source = attempt_key(commit.address, commit.attempt)
            return [files.read(self._attempts, f"{source}/{name}") for name in names]
        packed = self._read_packed(commit) or {}
        return [packed.get(name) for name in names]

    def _encode(
        self,
        address: Address,
        record: Record,
        provenance: Provenance,
        attempt: str,
        metrics: Mapping[str, float] | None,
        state: Mapping[str, Any] | None,
    ) -> tuple[Commit, dict[str, bytes]]:
        """Return the commit of a record, and the files of its attempt: name -> content."""
        layout = self._layout(address)
        shards = shards_of(layout, address, record.num_rows)
        infos, contents = encode_record(record, layout, shards, self._template)
        about = (address, attempt, record.KIND, record.num_rows, infos, provenance)
        return Commit(*about, time.time(), metrics or {}, state or {}), contents

    def _write_attempt(self, prepared: Commit, contents: Mapping[str, bytes]) -> None:
        """Write an attempt's files. On an exception remove them."""
        key = attempt_key(prepared.address, prepared.attempt)
        with ExitStack() as undo:
            undo.callback(self._discard, prepared.address, prepared.attempt)
            if self._run.fs is None:
                files.write_together(self._attempts, key, contents)
            else:
                files.write(self._attempts, key + _PACKED, pack(contents))
            undo.pop_all()

    def _discard(self, address: Address, attempt: str) -> None:
        key = attempt_key(address, attempt)
        if self._run.fs is None:
            files.remove_tree(self._attempts, key)
        else:
            files.remove(self._attempts, key + _PACKED)

    def _read_packed(self, commit: Commit) -> dict[str, bytes] | None:
        """Return name -> content of an attempt's files, which an object store holds in one object. Raises
        DamagedAttempt."""
        key = attempt_key(commit.address, commit.attempt) + _PACKED
        data = files.read(self._attempts, key)
        return None if data is None else unpack(data, self._attempts.at(key))


class DamagedAttempt(StoreError):
    """The object with an attempt's files is not what was written."""


def _absent_error(address: Address, what: str, before: int) -> StoreError:
    """Return the error for a missing array: DroppedOutput if the array was deleted, else StoreError. `what`: the array,
    as the message names it. `before`: the first step whose arrays were not deleted."""
    if dropped(address, before):
        return DroppedOutput(
            f"{what}: dropped by {KEEP}, as are the arrays of all steps before {before}. A run that has to train "
            "on them again goes on with `stageline resume RUN --from-checkpoint`"
        )
    return StoreError(f"{what} is committed but its file is missing")


def _rows_of(layout: Layout, address: Address, num_rows: int) -> slice:
    """Return the slice that an output's rows fill in the array of all shards."""
    shards = shards_of(layout, address, num_rows)
    return slice(shards.start * layout.rows_per_shard, shards.stop * layout.rows_per_shard)


def _group(address: Address) -> str:
    return f"{EVALUATE if address.stage.startswith(EVALUATE) else 'step'}_{address.step:06d}"


def dropped(address: Address, before: int) -> bool:
    """Return True if the arrays at an address count as deleted: the step is before `before`, and the stage is no
    evaluation. The result does not depend on whether the output ever had arrays."""
    return address.step < before and not address.stage.startswith(EVALUATE)


# ---- attempts --------------------------------------------------------------------------------------------

_KEY = re.compile(r"(?P<stage>.+?)-(?P<step>\d{6,})-(?P<shard>\d{4,})-(?P<attempt>[^/]+)")


def attempt_key(address: Address, attempt: str) -> str:
    """Return the name of an attempt's directory."""
    return f"{address.stage}-{address.step:06d}-{address.shard:04d}-{attempt}"


def of_attempt_key(name: str) -> tuple[Address, str] | None:
    """Return the address and attempt of an attempt's directory; None for another name."""
    match = _KEY.fullmatch(name)
    return match and (Address(match["stage"], int(match["step"]), int(match["shard"])), match["attempt"])


def in_attempt(key: str) -> str:
    """Return the name of a file in its attempt's directory. `key`: path of the file below the Zarr group of its step or
    evaluation. The attempt's directory has no subdirectories, so that one sync covers it."""
    return key.replace("/", ".")


def pack(contents: Mapping[str, bytes]) -> bytes:
    """Return an attempt's files (name -> content) as one object. Its first line is a checksum of the rest. Its second
    line has the names and sizes of the files, as JSON. The files follow, one after the other."""
    listed = json.dumps([[name, len(data)] for name, data in contents.items()])
    rest = b"".join((listed.encode(), b"\n", *contents.values()))
    return checksum(rest).encode() + b"\n" + rest


def unpack(data: bytes, where: str) -> dict[str, bytes]:
    """Return the files (name -> content) in an object that `pack` made. Raises DamagedAttempt, naming `where`, if the
    checksum is wrong."""
    stated, _, rest = data.partition(b"\n")
    if checksum(rest).encode() != stated:
        raise DamagedAttempt(f"{where}: is not what was written (it does not have its checksum)")
    listed, _, body = rest.partition(b"\n")
    contents, start = {}, 0
    for name, size in json.loads(listed):
        contents[name] = body[start : start + size]
        start += size
    return contents


def encode_record(
    record: Record, layout: Layout, shards: Sequence[int], template_of: Callable[[Layout, str, int], Template]
) -> tuple[dict[str, ArrayInfo], dict[str, bytes]]:
    """Return two mappings: name of an array -> its description in the commit, and name of a file of the attempt ->
    content. `template_of(layout, dtype, ndim)` returns the encoder of an array. Raises ValueError for an array that
    does not fit the layout."""
    infos, contents = {}, {}
    for name, given in record.arrays().items():
        if given.shape[1:] not in ((), (layout.seq,)):
            raise ValueError(f"{record.KIND}.{name}: shape {given.shape}, but the layout's seq is {layout.seq}")
        array = np.ascontiguousarray(given)
        infos[name] = ArrayInfo(array.dtype.name, array.shape, zlib.crc32(array.data))
        template = template_of(layout, array.dtype.name, array.ndim)
        for shard, block in zip(shards, np.split(array, len(shards)), strict=True):
            contents[in_attempt(f"{name}/{template.key(shard)}")] = template.encode(block)
    return infos, contents


def write_metadata(run: files.Root, contents: Mapping[str, bytes]) -> None:
    """Write Zarr metadata: key below `rollouts.zarr` -> content. Programs that read the arrays with Zarr alone need it.
    Several processes may write it at once, since they write the same bytes.

    In a local store, the files are first written outside the Zarr hierarchy, since Zarr warns about unknown files. An
    object store needs no temporary files.
    """
    if not contents:
        return
    if run.fs is not None:
        files.write_together(run, _STORE, contents)
        return
    scratch = f"attempts/metadata-{new_attempt()}"
    files.write_together(run, scratch, {in_attempt(key): data for key, data in contents.items()})
    for key in contents:
        files.move(run, f"{scratch}/{in_attempt(key)}", f"{_STORE}/{key}")
    files.remove_tree(run, scratch)


# ---- recent ----------------------------------------------------------------------------------------------

Key = tuple[Address, str]
"""(Address of an output, name of its committed attempt)."""


class RecentRecords:
    """A cache of up to `max_bytes` of records. The least recently used record is dropped first. Threads may share
    it."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._records: OrderedDict[Key, tuple[Record, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, key: Key) -> Record | None:
        with self._lock:
            if key not in self._records:
                return None
            self._records.move_to_end(key)
            return self._records[key][0]

    def put(self, key: Key, record: Record) -> None:
        """Keep a record, unless it is larger than the cache. The record's arrays must not change any more."""
        size = sum(array.nbytes for array in record.arrays().values())
        with self._lock:
            if size > self.max_bytes or key in self._records:
                return
            self._records[key] = (record, size)
            self._bytes += size
            while self._bytes > self.max_bytes:
                _, (_, dropped) = self._records.popitem(last=False)
                self._bytes -= dropped


def write_root(
    run: files.Root, attributes: Mapping[str, Any], arrays: Mapping[str, tuple[str, np.ndarray]] | None = None
) -> None:
    """Write the attributes and arrays of the store's root, which belong to no step. `arrays`: name -> (name of its one
    dimension, numbers). Files that already have the right content are not written again. No worker may run
    meanwhile."""
    content = {"zarr.json": group_metadata(attributes)}
    for name, (dimension, array) in (arrays or {}).items():
        content |= {f"{name}/{key}": data for key, data in encode_whole(array, dimension, describe(name)).items()}
    write_metadata(run, {key: data for key, data in content.items() if files.read(run, f"{_STORE}/{key}") != data})


def read_root_array(run: files.Root, name: str) -> np.ndarray | None:
    """Return an array of the store's root, or None if there is no such array. Raises StoreError if the array is
    damaged."""
    store = run.below(_STORE)
    if files.read(store, f"{name}/zarr.json") is None:
        return None
    try:
        return _plain_array(store, name, slice(None))
    except _UNREADABLE as error:
        raise StoreError(f"{store.at(name)}: is damaged ({type(error).__name__}: {error})") from error


def _plain_array(store: files.Root, name: str, rows: slice) -> np.ndarray:
    """Return rows of an array as any Zarr reader sees them. Raises what Zarr raises, and StoreError."""
    options = {} if store.fs is None else {"storage_options": store.fs.storage_options}

    def look() -> np.ndarray:
        return np.asarray(zarr.open_array(f"{store.url}/{name}", mode="r", **options)[rows])

    return files.retried(look, store.at(name), store.durability.retry_s)


# ---- vocabulary ------------------------------------------------------------------------------------------

BYTES, OFFSETS = "vocabulary_bytes", "vocabulary_offsets"
"""Names of the two arrays of the store's root that hold the vocabulary."""
Decode = Callable[[Sequence[int]], str]
"""A function that returns the text of token ids: a tokenizer's `decode`, or `Vocabulary.text`."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token."""

    data: bytes
    offsets: np.ndarray
    """int64 [tokens + 1]. Token t has the bytes `data[offsets[t] : offsets[t + 1]]`."""

    @staticmethod
    def of(tokens: Iterable[bytes]) -> Vocabulary:
        """Return the vocabulary of these tokens' bytes, in the order of their ids."""
        pieces = list(tokens)
        return Vocabulary(b"".join(pieces), np.cumsum([0, *map(len, pieces)], dtype=np.int64))

    def arrays(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return name of an array -> (name of its dimension, numbers), as `write_root` takes them."""
        data = np.frombuffer(self.data, np.uint8)
        return {BYTES: ("vocabulary_byte", data), OFFSETS: ("vocabulary_offset", self.offsets)}

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens. Ids outside the vocabulary are skipped. Bytes that are not UTF-8 become
        replacement characters."""
        last = len(self.offsets) - 1
        spans = ((self.offsets[i], self.offsets[i + 1]) for i in map(int, ids) if 0 <= i < last)
        return b"".join(self.data[start:end] for start, end in spans).decode("utf8", "replace")
