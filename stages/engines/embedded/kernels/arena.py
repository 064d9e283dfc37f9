"""Memory for packed weights, keys and values: taken from the system in large pieces, which it may back with huge pages.

A forward pass reads all weights, and the keys and values of all its rows, from memory mostly: with pages of 2 MiB it
reads faster (the processor looks far fewer addresses up, and its prefetchers do not stop at every 4 KiB), and new
weights are packed faster (far fewer page faults). A piece is given back when the last tensor in it is gone. May import
torch.
"""

from __future__ import annotations

import mmap
import threading
from contextlib import suppress

import torch

SLAB_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20
_LINE = 64
"""Bytes of a cache line: tensors begin on one."""


class Slabs:
    """Owns the slab that the next tensors are cut from; it does not keep full ones."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes [num_bytes], zeros: none has been given before. Raises MemoryError."""
        with self._lock:
            start = -(-self._used // _LINE) * _LINE
            if start + num_bytes > len(self._slab):
                start, self._slab = 0, _reserve(max(num_bytes, SLAB_BYTES))
            self._used = start + num_bytes
            return self._slab[start : self._used]


def _reserve(num_bytes: int) -> torch.Tensor:
    """Address space, in whole huge pages: memory comes with the first write to each."""
    try:
        region = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes >> 20} MiB of weights, or keys and values: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them has small ones
            region.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(region, dtype=torch.uint8)
