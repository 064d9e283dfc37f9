"""Slabs of memory. They look at addresses, which the sanitizers' allocator changes: not one of its suites."""

from __future__ import annotations

from stages.engines.embedded.kernels.packed import SLAB_BYTES, Slabs


def test_a_slab_is_used_again_when_its_last_tensor_is_gone() -> None:
    slabs = Slabs()
    first, second = (slabs.take(2 * SLAB_BYTES).fill_(7) for _ in range(2))
    address, view = first.data_ptr(), first[5:9].view(2, 2)
    del first
    assert slabs.take(SLAB_BYTES + 1).data_ptr() != address  # a view of it lives
    del view
    third = slabs.take(2 * SLAB_BYTES)
    assert third.data_ptr() == address
    assert not third.any()
    assert (second == 7).all()


def test_small_tensors_share_a_slab_and_a_larger_one_does_not_take_a_smaller_ones_place() -> None:
    slabs = Slabs()
    one, other = slabs.take(10), slabs.take(10)
    assert other.data_ptr() == one.data_ptr() + 64
    large = slabs.take(2 * SLAB_BYTES)
    address = one.data_ptr()
    del one, other
    assert slabs.take(3 * SLAB_BYTES).data_ptr() not in (address, large.data_ptr())
    assert slabs.take(SLAB_BYTES).data_ptr() == address
