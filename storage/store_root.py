"""The root of a run's rollout store: what the whole of it is, as attributes, and arrays that belong to no step.

    rollouts.zarr/zarr.json               run, digest of its config, model, tokenizer, what the groups are
    rollouts.zarr/vocabulary_bytes        what each token stands for (storage/vocabulary.py)
    rollouts.zarr/vocabulary_offsets

Nothing here is an output: it has no commit, stages read none of it, and the same run writes the same again. May import
numpy, zarr and storage.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

import numpy as np
import zarr

from storage import files
from storage.descriptions import describe
from storage.errors import StoreError
from storage.shards import encode_whole, group_metadata

_STORE = "rollouts.zarr"
_UNREADABLE = (OSError, ValueError, RuntimeError, KeyError)
"""What Zarr raises for an array that is not sound."""


def write_root(
    run: files.Root, attributes: Mapping[str, Any], arrays: Mapping[str, tuple[str, np.ndarray]] | None = None
) -> None:
    """Writes the root's attributes and arrays (name -> its dimension, its numbers, of one axis). For a driver without
    workers. What is there already as it should be is not written again."""
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
    """An array of the root; None where there is none. Raises StoreError for one that is damaged."""
    store = run.below(_STORE)
    if files.read(store, f"{name}/zarr.json") is None:
        return None
    options = {} if store.fs is None else {"storage_options": store.fs.storage_options}
    try:
        return np.asarray(zarr.open_array(f"{store.url}/{name}", mode="r", **options)[:])
    except _UNREADABLE as error:
        raise StoreError(f"{store.at(name)}: is damaged ({type(error).__name__}: {error})") from error
