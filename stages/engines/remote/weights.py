"""Find a model's tensors in files of this host, so that another process can map them: in the model's own files, in the
files in which the run publishes weights, or in a temporary file."""

from __future__ import annotations

import json
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from stages.engines.protocol import MappedTensors, TensorPlace, WeightsError, check_finite, check_tensors
from stages.models.hf_files import weight_files
from stages.models.spec import ModelSpec, read_spec, tensor_shapes

_SHARED_MEMORY = Path("/dev/shm")
_HEADER = struct.Struct("<Q")
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Safetensors' name of a dtype -> its name in `TensorPlace.dtype`."""


class ModelFiles:
    """The places of all tensors of a model in files of this host."""

    def __init__(self, path: str) -> None:
        """Find the tensors in a Hugging Face directory. Raises FileNotFoundError if it has no weights, and WeightsError
        if a tensor is missing or has a dtype that cannot be mapped."""
        self.spec: ModelSpec = read_spec(path)
        self.vocab: int = self.spec.vocab_size
        self._own = {place.name: place for file in weight_files(path) for place in places_in(file)}
        missing = sorted(tensor_shapes(self.spec).keys() - self._own.keys())
        if missing:
            raise WeightsError(f"{missing[0]} (and {len(missing) - 1} more) is missing in {path}")
        self._refitted: frozenset[str] = frozenset()
        """Names of the tensors that the last refit replaced. Their values in the model's own files are out of date."""

    @contextmanager
    def complete(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[list[TensorPlace]]:
        """Yield the places of all tensors of the model. A tensor in `tensors` replaces the tensor of the same name in
        the model's files. The places are valid until the block ends.

        Raises WeightsError, naming the tensor, in these cases:

        - The model has no tensor of this name, or its shape differs.
        - A number in `tensors` is not finite. This is not checked if the caller has checked it
          (`MappedTensors.finite`).
        - The previous call replaced a tensor that `tensors` lacks. The values in the model's files are then out of
          date, and perhaps no file has the present values.
        """
        check_tensors(self.spec, tensors, complete=False)
        if not (isinstance(tensors, MappedTensors) and tensors.finite):
            check_finite(tensors)
        lost = sorted(self._refitted - tensors.keys())
        if lost:
            raise WeightsError(f"{lost[0]} (and {len(lost) - 1} more) was in the last weights and is missing in these")
        mapped = dict(tensors.places) if isinstance(tensors, MappedTensors) else {}
        with tempfile.NamedTemporaryFile(dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None) as written:
            new = {name: mapped.get(name) or _write(written, name, tensor) for name, tensor in tensors.items()}
            written.flush()
            yield list(({name: self._own[name] for name in tensor_shapes(self.spec)} | new).values())
        self._refitted = frozenset(tensors)


def places_in(file: Path) -> list[TensorPlace]:
    """Return the places of the tensors in a safetensors file. A safetensors file consists of the header's length (8
    bytes), the header (JSON) and the bytes of the tensors. Raises WeightsError, naming the tensor, for a dtype that is
    not in `_DTYPES`."""
    with file.open("rb") as stream:
        (length,) = _HEADER.unpack(stream.read(_HEADER.size))
        header = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    places = []
    for name, info in header.items():
        if info["dtype"] not in _DTYPES:
            raise WeightsError(f"{name} in {file} is of type {info['dtype']}; must be one of {', '.join(_DTYPES)}")
        offset = _HEADER.size + length + info["data_offsets"][0]
        places.append(TensorPlace(name, str(file.resolve()), offset, tuple(info["shape"]), _DTYPES[info["dtype"]]))
    return places


def _write(file: IO[bytes], name: str, tensor: torch.Tensor) -> TensorPlace:
    """Append a tensor's bytes to a file, aligned to 64 bytes, and return their place."""
    file.write(b"\0" * (-file.tell() % 64))
    offset = file.tell()
    flat = tensor.detach().to("cpu").contiguous()
    file.write(flat.reshape(-1).view(torch.uint8).numpy().data)
    return TensorPlace(name, file.name, offset, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
