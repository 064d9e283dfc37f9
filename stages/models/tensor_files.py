"""Writing tensors to a file that others may read. May import torch and safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file that transformers and peft take for torch's, with the permissions that any new file
    gets here: safetensors would give it to its owner alone."""
    path.write_bytes(b"")
    mode = path.stat().st_mode
    save_file({name: tensor.contiguous().cpu() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    path.chmod(mode)
