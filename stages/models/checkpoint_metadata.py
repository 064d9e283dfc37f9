"""Read the two pickles of a checkpoint, `.metadata` and `common.pt`, as data only.

Anybody who can write a checkpoint can put any pickle there, with the right CRC-32 in the manifest. So `.metadata` is
not unpickled into torch's classes. Every class that it may name becomes a plain record (`_Record`), and the needed
values are copied from the records, type by type. Any other name is refused before it is imported. torch loads
`common.pt` and the shards with `weights_only=True`.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from stages.models.protocol import StateError

METADATA, COMMON = ".metadata", "common.pt"
_CLASSES = {
    "builtins": {"getattr"},  # Python before 3.11.4 pickles a member of an enum as getattr(class, name)
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # Python 3.13
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "_MEM_FORMAT_ENCODING",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
    },
}
"""Module -> its names that the pickle in `.metadata` may refer to, besides torch's dtypes. No checkpoint needs other
names, whatever its layout, dtype and optimizer, and with or without LoRA. (BytesStorageMetadata is left out: torch
would unpickle the bytes that it describes.)"""
_NOT_ONE = (
    pickle.UnpicklingError, ArithmeticError, AttributeError, EOFError, ImportError, LookupError, MemoryError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
"""Errors that reading `.metadata` or `common.pt` may raise if the file is not a valid pickle, or is a pickle with other
content."""


class MetadataReader(FileSystemReader):
    """Torch's reader of a checkpoint's shards, safe for a `.metadata` from an untrusted source."""

    def __init__(self, directory: Path) -> None:
        """Read `.metadata`. Raises StateError, naming the file, if it is not the metadata of a checkpoint."""
        super().__init__(directory)
        self.metadata = _read_metadata(directory / METADATA)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.metadata


def read_common(directory: Path) -> dict[str, Any]:
    """Return the content of `common.pt`. Raises StateError, naming the file, if it is not a dict of numbers and
    text."""
    file = directory / COMMON
    try:
        common = torch.load(file, map_location="cpu", weights_only=True)
    except _NOT_ONE as error:
        raise _changed(file, "holds more than numbers and text") from error
    if not isinstance(common, dict):
        raise _changed(file, f"holds a {type(common).__name__}")
    return common


def pickle_fault(directory: Path) -> str | None:
    """Return a description of what is wrong with the two pickles of a checkpoint, or None if nothing is wrong. A
    missing file is not an error here."""
    try:
        if (directory / COMMON).exists():
            read_common(directory)
        if (directory / METADATA).exists():
            _read_metadata(directory / METADATA)
    except (OSError, StateError) as error:
        return str(error)
    return None


def _changed(file: Path, what: str) -> StateError:
    return StateError(
        f"{file} {what}: no checkpoint of this program does, so it was changed, and nothing of it was run. Without the "
        f"directory {file.parent} the checkpoint before it is used"
    )


class _Record:
    """An object of a pickle as data: the arguments of its constructor and its state."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """An unpickler that runs no code of the pickle. Where the pickle names a class or function of `_CLASSES`, it
    creates objects that only hold data (`_Record`). torch's dtypes are the only real objects. Any other name raises
    UnpicklingError. Each time a name occurs, it gets a new subclass of `_Record`, so a pickle that changes a class
    changes nothing outside itself."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if name not in _CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"names {module}.{name}")
        return type(name, (_Record,), {})


def _read_metadata(file: Path) -> Metadata:
    try:
        with file.open("rb") as stream:
            state = _Unpickler(stream).load().state
        return Metadata(
            {str(key): _tensor(entry.state) for key, entry in state["state_dict_metadata"].items()},
            storage_data={_index(key.state): _stored(entry.state) for key, entry in state["storage_data"].items()},
        )
    except _NOT_ONE as error:
        raise _changed(file, str(error) if isinstance(error, pickle.UnpicklingError) else "is none") from error


def _tensor(state: dict[str, Any]) -> TensorStorageMetadata:
    dtype = state["properties"].state[0]
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"a dtype {dtype!r}")
    chunks = [ChunkStorageMetadata(_size(c.state["offsets"]), _size(c.state["sizes"])) for c in state["chunks"]]
    return TensorStorageMetadata(TensorProperties(dtype=dtype), _size(state["size"]), chunks)


def _index(state: dict[str, Any]) -> MetadataIndex:
    offset = state["offset"]
    return MetadataIndex(str(state["fqn"]), None if offset is None else _size(offset), state["index"])


def _stored(state: dict[str, Any]) -> _StorageInfo:
    """Return a shard's location. Raises ValueError for one outside the directory, or that torch would transform."""
    path = state["relative_path"]
    if Path(path).name != path or state.get("transform_descriptors"):
        raise ValueError(f"a shard in {path}")
    return _StorageInfo(path, int(state["offset"]), int(state["length"]))


def _size(record: _Record) -> torch.Size:
    return torch.Size(*record.arguments)
