"""What must hold of a record before it may be committed. May import numpy and storage.records.

A number that is not finite, or log-probs that were never filled in, would train silently; here they stop the stage.
"""

from __future__ import annotations

import numpy as np

from storage.records import Record, Rollout


def check_finite(record: Record) -> None:
    """Raises ValueError, naming field and row, where a float array holds NaN or infinity."""
    for name, array in record.arrays().items():
        if not np.issubdtype(array.dtype, np.floating):
            continue
        bad = ~np.isfinite(array).reshape(len(array), -1).all(axis=1)
        if bad.any():
            row = int(np.argmax(bad))
            value = array[row].ravel()[~np.isfinite(array[row].ravel())][0]
            raise ValueError(f"{record.KIND}.{name}: row {row} holds {value} ({int(bad.sum())} such rows)")


def check_logprobs(record: Record, mask: np.ndarray | None) -> None:
    """Raises ValueError, naming field and row, where an array named `*_logprobs` is zero on all of the row's sampled
    tokens. `mask` (bool, rows × seq) is the response_mask; a Rollout brings its own; without one nothing is checked.
    """
    if isinstance(record, Rollout):
        mask = record.response_mask
    if mask is None:
        return
    for name, array in record.arrays().items():
        if not name.endswith("_logprobs"):
            continue
        if mask.shape != array.shape:
            raise ValueError(f"{record.KIND}.{name}: shape {array.shape}, but the mask's is {mask.shape}")
        empty = mask.any(axis=1) & ~((array != 0) & mask).any(axis=1)
        if empty.any():
            row = int(np.argmax(empty))
            raise ValueError(
                f"{record.KIND}.{name}: row {row} is zero on all of its {int(mask[row].sum())} sampled tokens "
                f"({int(empty.sum())} such rows)"
            )
