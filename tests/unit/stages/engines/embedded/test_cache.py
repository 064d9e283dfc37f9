"""The memory of keys and values, in its own layout and in the one that says nothing of blocks."""

from __future__ import annotations

import numpy as np
import torch

from stages.engines.embedded.cache import KVCache

CPU = torch.device("cpu")


def test_copied_keys_and_values_are_where_they_belong() -> None:
    """Against the layout that `KVCache` documents: keys [P, K, D, 16], values [P, K, 16, D]; 37 positions of 3 blocks
    that lie in another order there."""
    torch.manual_seed(0)
    here, there = (KVCache(3, 6, 2, 8, torch.float32, CPU) for _ in range(2))
    for keys, values in here.layers:
        keys.normal_()
        values.normal_()
    copied = here.read([5, 1, 4], 37)
    assert copied.shape == (3, 2, 2, 37, 8)
    there.write([2, 6, 3], copied)
    for layer in range(3):
        for position in (0, 15, 16, 36):
            block, place = [5, 1, 4][position // 16], position % 16
            other = [2, 6, 3][position // 16]
            keys, values = here.layers[layer]
            np.testing.assert_array_equal(copied[layer, 0, :, position], keys[block, :, :, place])
            np.testing.assert_array_equal(copied[layer, 1, :, position], values[block, :, place])
            new_keys, new_values = there.layers[layer]
            assert torch.equal(new_keys[other, :, :, place], keys[block, :, :, place])
            assert torch.equal(new_values[other, :, place], values[block, :, place])
    assert not there.layers[0][0][3, :, :, 5:].any()
    assert not any(part[[0, 1, 4, 5]].any() for layer in there.layers for part in layer)
