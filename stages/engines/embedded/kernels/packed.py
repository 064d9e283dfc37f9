"""Weights in the layout that their device multiplies fastest, and memory in huge pages.

On a CPU, the kernels in plain torch convert each weight once to oneDNN's blocked layout. `gemm.c` has a layout of its
own. With oneDNN's layout a row's result has the same bits in any batch of 2 or more rows, and at any place in the
batch, in float32 and bfloat16. (Plain `F.linear` gives other bits below 4 rows.) A single row is computed as two equal
rows. On other devices the layout of the weight is not changed.

`Slabs` takes memory for packed weights, keys and values from the system in large pieces (slabs), which the system may
back with huge pages. A forward pass spends most of its time on reading weights, keys and values. With pages of 2 MiB it
reads faster (the processor translates far fewer addresses, and its prefetchers do not stop at every 4 KiB), and new
weights are packed faster (fewer page faults).
"""

from __future__ import annotations

import mmap
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float

from stages.native.fingerprint import cpu_multiplies

_TYPICAL_ROWS = 32
"""Approximate number of rows for which oneDNN should choose its blocking."""


@dataclass(frozen=True, eq=False)
class NativeWeight:
    """A weight [out, in] as packed by gemm.c. It is never changed."""

    tiles: torch.Tensor
    """The packed weight as bytes (uint8)."""
    out_features: int
    in_features: int
    dtype: torch.dtype
    handle: int
    """Address of the C struct that describes this weight for the C kernels. The field `record` holds the struct."""
    record: object


Packed = torch.Tensor | NativeWeight


class NotFiniteError(ValueError):
    """A part of a weight holds NaN or infinity after rounding to the weight's dtype. The part begins at row `start`."""

    def __init__(self, start: int) -> None:
        super().__init__(f"the part from row {start} on holds NaN or infinity")
        self.start = start


def pack(
    parts: Mapping[int, Float[torch.Tensor, "rows in"]], dtype: torch.dtype, old: torch.Tensor | None, wide: bool
) -> torch.Tensor:
    """See `Kernels.pack`. The result never shares memory with the parts."""
    for start, part in parts.items():
        if not all_finite(part.to(dtype)):
            raise NotFiniteError(start)
    if old is None:
        dense = torch.cat([parts[start].to(dtype) for start in sorted(parts)])
    else:
        dense = old.to_dense() if old.is_mkldnn else old.clone()
        for start, part in parts.items():
            dense[start : start + len(part)] = part.to(dtype)
    if not dense.is_cuda and (wide or not cpu_multiplies(dtype)):
        dense = dense.float()
    return torch.ops.mkldnn._reorder_linear_weight(dense, _TYPICAL_ROWS) if dense.device.type == "cpu" else dense


def unpack(packed: torch.Tensor) -> Float[torch.Tensor, "out in"]:
    """Return the weight that `pack` has packed. The result is exact."""
    return packed.to_dense() if packed.is_mkldnn else packed


def linear(
    x: Float[torch.Tensor, "rows in"], packed: torch.Tensor, dtype: torch.dtype
) -> Float[torch.Tensor, "rows out"]:
    """Return x W^T as `dtype`. The dtype of the packed weight must be `dtype` too, with two exceptions. On CUDA,
    `dtype` may be float32 for any weight. On a CPU that cannot multiply in `dtype`, the packed weight is float32."""
    x = x.to(packed.dtype)
    if packed.is_cuda and packed.dtype != dtype:
        return torch.mm(x, packed.t(), out_dtype=dtype)
    if not packed.is_mkldnn:
        return F.linear(x, packed)
    assert packed.dtype == dtype or not cpu_multiplies(dtype), "packed for products of another dtype"
    rows = x.expand(2, -1).contiguous() if x.shape[0] == 1 else x
    return torch.ops.mkldnn._linear_pointwise(rows, packed, None, "none", [], "")[: x.shape[0]].to(dtype)


def all_finite(tensor: torch.Tensor) -> bool:
    """Return True if all numbers are finite. First check only their sum, at a tenth of the cost. A sum with NaN or
    infinity is never finite, so a finite sum proves that all numbers are finite."""
    return bool(tensor.sum(dtype=torch.float32).isfinite()) or bool(tensor.isfinite().all())


# ---- memory in huge pages --------------------------------------------------------------------------------

SLAB_BYTES = 32 << 20
_HUGE_PAGE = 2 << 20
_UNUSED_REFERENCES = 3
"""Reference count of a region that no tensor uses: one reference from the list, one from the loop, and one from the
argument of `sys.getrefcount`."""
_CACHE_LINE = 64
"""Bytes of a cache line. Every tensor begins at a multiple of it."""


class Slabs:
    """Owns large regions of memory (slabs), and cuts tensors from them one after the other. A slab whose tensors have
    all been freed is used again: mapping and zeroing new pages takes longer than packing weights into them. The address
    space of a slab is never released."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0
        self._regions: list[mmap.mmap] = []

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return zeroed bytes [num_bytes] that no other tensor uses. Raises MemoryError if the system has too little
        memory."""
        with self._lock:
            start = -(-self._used // _CACHE_LINE) * _CACHE_LINE
            if start + num_bytes > len(self._slab):
                self._slab = torch.empty(0, dtype=torch.uint8)  # drops the old slab, which may have no tensors
                start, self._slab = 0, self._next_slab(max(num_bytes, SLAB_BYTES))
            self._used = start + num_bytes
            return self._slab[start : self._used]

    def _next_slab(self, num_bytes: int) -> torch.Tensor:
        """Return a slab of at least this size: the smallest one without tensors, or a new one."""
        free = [
            region
            for region in self._regions
            if sys.getrefcount(region) == _UNUSED_REFERENCES and len(region) >= num_bytes
        ]
        if free:
            return torch.frombuffer(min(free, key=len), dtype=torch.uint8).zero_()
        region = _reserve(num_bytes)
        self._regions.append(region)
        return torch.frombuffer(region, dtype=torch.uint8)


def _reserve(num_bytes: int) -> mmap.mmap:
    """Reserve address space in whole huge pages. The system assigns memory to a page when it is first written."""
    try:
        region = mmap.mmap(-1, -(-num_bytes // _HUGE_PAGE) * _HUGE_PAGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {num_bytes >> 20} MiB of weights, or keys and values: {error}") from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # the kernel has no huge pages
            region.madvise(mmap.MADV_HUGEPAGE)
    return region
