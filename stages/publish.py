"""Stage `publish`: write the policy's trained weights as a version that every engine of the host can map."""

from __future__ import annotations

import numpy as np

from stages.models.protocol import ModelHost
from storage.address import Address
from storage.ledger import Ledger
from storage.weights import BFLOAT16, Manifest, WeightBoard


def publish(models: ModelHost, board: WeightBoard, version: int) -> Manifest | None:
    """Write the resident policy to the board as `version`. Return None on ranks other than 0. A version may be written
    again with the same bits; raises ValueError for other bits."""
    weights = models.trained_weights()
    if weights is None:
        return None
    # numpy has no bfloat16: uint16 is its bit pattern, since no weight is an integer
    patterns = {name: BFLOAT16 for name, array in weights.items() if array.dtype == np.uint16}
    return board.publish(version, weights, patterns)


def is_published(ledger: Ledger, manifest: Manifest) -> bool:
    """Return True if a version on a board is the one in the run's ledger."""
    commit = ledger.find(Address("publish", manifest.version))
    return commit is not None and commit.digest == manifest.digest
