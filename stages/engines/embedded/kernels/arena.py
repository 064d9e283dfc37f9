"""Memory for packed weights, keys and values: taken from the system in large pieces, which it may back with huge pages.

A forward pass reads all weights, and the keys and values of all its rows, from memory mostly: with pages of 2 MiB it
reads faster (the processor looks far fewer addresses up, and its prefetchers do not stop at every 4 KiB), and new
weights are packed faster (far fewer page faults). May import torch.
"""

from __future__ import annotations

import mmap
import sys
import threading
from contextlib import suppress

import torch

SLAB_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20
_UNUSED = 3
"""References to a region that no tensor holds: the list's, the loop's and the argument's that counts them."""
_LINE = 64
"""Bytes of a cache line: tensors begin on one."""


class Slabs:
    """Owns the slab that the next tensors are cut from, and the address space of those before: once the last tensor
    in one is gone it is used again, since to find and zero new pages takes longer than to pack weights into them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._regions: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes [num_bytes], zeros; nobody else has them. Raises MemoryError."""
        with self._lock:
            start = -(-self._used // _LINE) * _LINE
            if start + num_bytes > len(self._slab):
                self._slab = torch.empty(0, dtype=torch.uint8)  # of which nothing may have been taken
                start, self._slab = 0, self._next_slab(max(num_bytes, SLAB_BYTES))
            self._used = start + num_bytes
            return self._slab[start : self._used]

    def _next_slab(self, num_bytes: int) -> torch.Tensor:
        """One at least so large: the smallest that no tensor lies in any more, or a new one."""
        free = [region for region in self._regions if sys.getrefcount(region) == _UNUSED and len(region) >= num_bytes]
        if free:
            return torch.frombuffer(min(free, key=len), dtype=torch.uint8).zero_()
        region = _reserve(num_bytes)
        self._regions.append(region)
        return torch.frombuffer(region, dtype=torch.uint8)


def _reserve(num_bytes: int) -> mmap.mmap:
    """Address space, in whole huge pages: memory comes with the first write to each."""
    try:
        region = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes >> 20} MiB of weights, or keys and values: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without them has small ones
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
