"""Weights that another process has published, mapped where they lie. May import numpy and torch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch


def map_tensors(tensors: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """Tensors by name, without a copy and read only.

    `tensors`: of each its name, the file, the offset in bytes, the shape, and its dtype: numpy's name, or "bfloat16".
    Raises ValueError, naming the tensor, for one that its file does not hold."""
    files: dict[str, np.ndarray] = {}
    found = {}
    for info in tensors:
        name, path = str(info["name"]), str(info["file"])
        if path not in files:
            files[path] = np.memmap(path, np.uint8, "r")
        is_bfloat16 = info["dtype"] == "bfloat16"
        dtype = np.dtype(np.uint16 if is_bfloat16 else info["dtype"])
        start = int(info["offset"])
        end = start + dtype.itemsize * int(np.prod(info["shape"], dtype=np.int64))
        if end > files[path].size:
            raise ValueError(f"{name} ends at byte {end} of {path}, which has {files[path].size}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # of torch, for memory that cannot be written
            tensor = torch.from_numpy(files[path][start:end].view(dtype).reshape(tuple(info["shape"])))
        found[name] = tensor.view(torch.bfloat16) if is_bfloat16 else tensor
    return found
