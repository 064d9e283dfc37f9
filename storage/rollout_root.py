"""The root of a run's rollout store: its attributes, and arrays that belong to no step.

    rollouts.zarr/zarr.json               run, digest of its config, model, tokenizer, meaning of the groups
    rollouts.zarr/vocabulary_bytes        every token's bytes, one after the other; none for special tokens
    rollouts.zarr/vocabulary_offsets      token t is bytes[offsets[t] : offsets[t + 1]]

With the vocabulary a run's text can be read without its tokenizer, in any language: join the bytes of the tokens and
decode them as UTF-8, with a replacement character where a response was cut inside a character.

Nothing here is an output: it has no commit, no stage reads it, and the same run writes the same again.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import zarr

from storage import files
from storage.errors import StoreError
from storage.records import describe
from storage.shards import encode_whole, group_metadata

_STORE = "rollouts.zarr"
_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError)
"""Errors that Zarr raises for a damaged array."""


def write_root(
    run: files.Root, attributes: Mapping[str, Any], arrays: Mapping[str, tuple[str, np.ndarray]] | None = None
) -> None:
    """Write the root's attributes and arrays (name -> its dimension and its numbers, one axis). What is already there
    and right is not written again. For a driver without workers."""
    found = {"zarr.json": group_metadata(attributes)}
    for name, (dimension, array) in (arrays or {}).items():
        found |= {f"{name}/{key}": data for key, data in encode_whole(array, dimension, describe(name)).items()}
    scratch = f"attempts/metadata-{uuid.uuid4().hex[:8]}"  # Zarr warns of files that it does not know
    for key, data in found.items():
        if files.read(run, f"{_STORE}/{key}") != data:
            files.write(run, f"{scratch}/{key}", data)
            files.move(run, f"{scratch}/{key}", f"{_STORE}/{key}")
    files.remove_tree(run, scratch)


def read_root_array(run: files.Root, name: str) -> np.ndarray | None:
    """Return an array of the root, or None if there is none. Raises StoreError for a damaged one."""
    store = run.below(_STORE)
    if files.read(store, f"{name}/zarr.json") is None:
        return None
    options = {} if store.fs is None else {"storage_options": store.fs.storage_options}
    try:
        return np.asarray(zarr.open_array(f"{store.url}/{name}", mode="r", **options)[:])
    except _UNREADABLE as error:
        raise StoreError(f"{store.at(name)}: is damaged ({type(error).__name__}: {error})") from error


# ---- vocabulary ------------------------------------------------------------------------------------------

BYTES, OFFSETS = "vocabulary_bytes", "vocabulary_offsets"
"""Names of the arrays."""
Decode = Callable[[Sequence[int]], str]
"""A function from token ids to their text: a tokenizer's or a vocabulary's."""


@dataclass(frozen=True)
class Vocabulary:
    """The bytes of every token."""

    data: bytes
    offsets: np.ndarray
    """int64 [tokens + 1]"""

    @staticmethod
    def of(tokens: Iterable[bytes]) -> Vocabulary:
        """Return the vocabulary of these tokens' bytes, in the order of their ids."""
        pieces = list(tokens)
        return Vocabulary(b"".join(pieces), np.cumsum([0, *map(len, pieces)], dtype=np.int64))

    @staticmethod
    def from_arrays(data: np.ndarray, offsets: np.ndarray) -> Vocabulary:
        """Return the vocabulary with these arrays."""
        return Vocabulary(data.tobytes(), offsets)

    def arrays(self) -> dict[str, tuple[str, np.ndarray]]:
        """Return name -> (dimension, numbers), as they are stored."""
        data = np.frombuffer(self.data, np.uint8)
        return {BYTES: ("vocabulary_byte", data), OFFSETS: ("vocabulary_offset", self.offsets)}

    def text(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of tokens. Ids outside the vocabulary have no text."""
        last = len(self.offsets) - 1
        spans = ((self.offsets[i], self.offsets[i + 1]) for i in map(int, ids) if 0 <= i < last)
        return b"".join(self.data[start:end] for start, end in spans).decode("utf8", "replace")
