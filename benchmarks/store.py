"""Bytes per token and GB/s of the rollout store, beside `np.save` and plain Zarr, on rollouts of realistic size.

A rollout has 1,024 positions a row: a prompt of 64 to 256 tokens, a response of up to 768, and padding.
Sides take turns in every repeat, each with the same arrays; the store with a step of its own, the others a directory:

    store     what a stage does: encode (lz4, CRC-32C), CRC-32 of every array, sync, commit, rename; read and checked
    np.save   one .npy an array, synced (`np.save`) or not (`np.save, no sync`); read by `np.load`, CRC-32 on top
    zarr      `zarr.create_array` with its defaults (zstd), chunks of 16 rows, no sync; read back, CRC-32 on top

GB/s are of the bytes in memory. Reads come from the page cache; `verify` is a read with its check, which the store
never leaves out, so that its two are one figure.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import zarr

from benchmarks.harness import arguments, measured_load, report, write_json
from storage.address import Address
from storage.commits import provenance_here
from storage.config import Durability, Layout, Layouts
from storage.ledger import Ledger
from storage.records import Rollout
from storage.rollouts import RolloutStore
from storage.shards import CHUNK_ROWS

SEQ, VOCABULARY = 1024, 49_152

Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Side:
    """Writes arrays below a directory, reads them back, and reads and checks them."""

    write: Callable[[Path, Rollout], None]
    read: Callable[[Path, Rollout], Arrays]
    checks: bool = False
    """A read checks what it reads."""
    size: Callable[[Path], int] | None = None
    """Bytes on disk, where they are not all below the directory."""


def rollout_of(rows: int, seed: int = 0) -> Rollout:
    """Return random rows. Token numbers fall off as words do (Zipf), and log-probs have as much noise in their mantissa
    as real ones."""
    g = np.random.default_rng(seed)
    prompts = g.integers(64, 257, rows).astype(np.int32)
    responses = g.integers(16, SEQ - 256 + 1, rows).astype(np.int32)
    at = np.arange(SEQ)
    mask = (at >= prompts[:, None]) & (at < (prompts + responses)[:, None])
    there = at < (prompts + responses)[:, None]
    tokens = np.minimum(g.zipf(1.2, (rows, SEQ)), VOCABULARY - 1)
    return Rollout(
        row=np.arange(rows, dtype=np.int64),
        prompt_index=g.integers(0, 100_000, rows),
        tokens=np.where(there, tokens, 0).astype(np.int32),
        prompt_lengths=prompts,
        response_lengths=responses,
        response_mask=mask,
        sampler_logprobs=np.where(mask, -g.exponential(1.5, (rows, SEQ)), 0).astype(np.float32),
        token_versions=np.where(mask, 7, -1).astype(np.int32),
        finish_reason=np.ones(rows, np.int8),
    )


def store_side(rows: int, root: Path, *, fsync: bool) -> Side:
    """Return a store below `root`, with a step per repeat. Encoders are made once per process, as in a worker."""
    provenance, durability = provenance_here(seed=0, config_hash=""), Durability(fsync)
    ledger = Ledger(str(root / "ledger"), durability)
    store = RolloutStore(str(root), ledger, Layouts(Layout(1, rows, SEQ)), durability=durability)

    def address(path: Path) -> Address:
        return Address("generate", int(path.name.rpartition("-")[2]))

    def write(path: Path, rollout: Rollout) -> None:
        store.write(address(path), rollout, provenance, mask=rollout.response_mask)

    def size(path: Path) -> int:
        step = address(path).step
        return sum(bytes_below(part) for part in root.glob(f"*/**/step_{step:06d}"))

    return Side(write, lambda path, _: store.read(address(path)).arrays(), checks=True, size=size)


def save_side(*, fsync: bool) -> Side:
    def write(path: Path, rollout: Rollout) -> None:
        for name, array in rollout.arrays().items():
            with (path / f"{name}.npy").open("wb") as stream:
                np.save(stream, array)
                if fsync:
                    stream.flush()
                    os.fsync(stream.fileno())

    return Side(write, lambda path, rollout: {name: np.load(path / f"{name}.npy") for name in rollout.arrays()})


def zarr_side() -> Side:
    def write(path: Path, rollout: Rollout) -> None:
        group = zarr.open_group(str(path), mode="a")
        for name, array in rollout.arrays().items():
            chunks = (min(CHUNK_ROWS, len(array)), *array.shape[1:])
            group.create_array(name, data=array, chunks=chunks)

    def read(path: Path, rollout: Rollout) -> Arrays:
        group = zarr.open_group(str(path), mode="r")
        return {name: np.asarray(group[name]) for name in rollout.arrays()}

    return Side(write, read)


def bytes_below(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def measure(side: Side, path: Path, rollout: Rollout) -> dict[str, float]:
    """Return the seconds of each kind, and the bytes on disk. Asserts that what is read is what was written."""
    path.mkdir()
    seconds: dict[str, float] = {}
    started = time.perf_counter()
    side.write(path, rollout)
    seconds["write"] = time.perf_counter() - started
    started = time.perf_counter()
    arrays = side.read(path, rollout)
    seconds["read"] = time.perf_counter() - started
    for array in () if side.checks else arrays.values():
        zlib.crc32(np.ascontiguousarray(array).data)
    seconds["verify"] = time.perf_counter() - started
    assert all(np.array_equal(arrays[name], array) for name, array in rollout.arrays().items())
    size = bytes_below(path) if side.size is None else side.size(path)
    shutil.rmtree(path)
    return seconds | {"bytes": size}


def main() -> None:
    options = arguments(__doc__ or "")
    repeats = 3 if options.quick else max(options.repeats, 9)
    figures: dict[str, float] = {}
    table: list[tuple[str, ...]] = []
    for rows in (64,) if options.quick else (64, 512):
        rollout = rollout_of(rows)
        size = sum(array.nbytes for array in rollout.arrays().values())
        sampled = int(rollout.response_lengths.sum())
        with tempfile.TemporaryDirectory(dir=".") as scratch, measured_load() as load:
            sides = {
                "store": store_side(rows, Path(scratch) / "synced", fsync=True),
                "store, no sync": store_side(rows, Path(scratch) / "unsynced", fsync=False),
                "np.save": save_side(fsync=True),
                "np.save, no sync": save_side(fsync=False),
                "zarr": zarr_side(),
            }
            found: dict[str, list[dict[str, float]]] = {name: [] for name in sides}
            for repeat in range(repeats + 1):  # the first makes encoders, and does not count
                for name, side in sides.items():
                    measured = measure(side, Path(scratch) / f"{name}-{repeat}", rollout)
                    found[name] += [measured] if repeat else []
        for name, taken in found.items():
            middle = {key: statistics.median(one[key] for one in taken) for key in taken[0]}
            per_token = middle["bytes"] / sampled
            speeds = {kind: size / middle[kind] / 1e9 for kind in ("write", "read", "verify")}
            key = f"{rows} rows/{name}"
            figures |= {f"{key}/{kind}_gb_per_s": speed for kind, speed in speeds.items()}
            figures |= {f"{key}/bytes_per_sampled_token": per_token, f"{key}/write_s": middle["write"]}
            shown = [f"{per_token:.1f}", *(f"{speed:.2f}" for speed in speeds.values()), f"{1e3 * middle['write']:.1f}"]
            table.append((f"{rows}", name, *shown, f"{load().others:.0%}"))
    columns = ("rows", "side", "bytes / sampled token", "write GB/s", "read", "verify", "write ms", "others' load")
    report(f"Rollouts of {SEQ} positions a row", columns, table, [])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
