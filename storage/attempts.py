"""What an attempt at a node writes before its commit, all in one directory; the store moves it into place afterwards.

    attempts/generate-000012-0003-a0-1f6c2a9b/tokens.c.3.0 ──► rollouts.zarr/step_000012/tokens/c/3/0

May import numpy and storage.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from storage import files
from storage.address import Address
from storage.commits import ArrayInfo, new_attempt
from storage.records import Record
from storage.shards import Layout, Template

_KEY = re.compile(r"(?P<stage>.+?)-(?P<step>\d{6,})-(?P<shard>\d{4,})-(?P<attempt>[^/]+)")


def attempt_key(address: Address, attempt: str) -> str:
    """The name of an attempt's directory."""
    return f"{address.stage}-{address.step:06d}-{address.shard:04d}-{attempt}"


def of_attempt_key(name: str) -> tuple[Address, str] | None:
    """The inverse of `attempt_key`; None for another name."""
    match = _KEY.fullmatch(name)
    return match and (Address(match["stage"], int(match["step"]), int(match["shard"])), match["attempt"])


def in_attempt(key: str) -> str:
    """The name of a file in its attempt's directory, which has no others in it: one directory is one sync."""
    return key.replace("/", ".")


def encode_record(
    record: Record, layout: Layout, shards: Sequence[int], template_of: Callable[[Layout, str, int], Template]
) -> tuple[dict[str, ArrayInfo], dict[str, bytes]]:
    """(what a commit says of a record's arrays, the files of its attempt by name). `template_of(layout, dtype, ndim)`
    says how an array is encoded. Raises ValueError for an array that is not of the layout."""
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
    """Writes what plain readers find arrays by; whoever comes first, and in a race several, writes the same bytes.
    Temporary files are kept out of the hierarchy, since Zarr warns of files that it does not know."""
    if not contents:
        return
    scratch = f"attempts/metadata-{new_attempt()}"
    files.write_together(run, scratch, {in_attempt(key): data for key, data in contents.items()})
    for key in contents:
        files.move(run, f"{scratch}/{in_attempt(key)}", f"rollouts.zarr/{key}")
    files.remove_tree(run, scratch)
