"""Stage `publish`: the policy's trained weights become a version that every engine of the host can map and read."""

from __future__ import annotations

import numpy as np

from stages.models.protocol import ModelHost
from storage.address import Address
from storage.ledger import Ledger
from storage.weights import BFLOAT16, Manifest, WeightBoard


def publish(models: ModelHost, board: WeightBoard, version: int) -> Manifest | None:
    """Writes the resident policy to the board as `version`; None on ranks other than 0. Writing a version again is
    harmless if the bits are the same, and raises ValueError if they are not."""
    weights = models.trained_weights()
    if weights is None:
        return None
    # numpy has no bfloat16: the models hand out its bit pattern, and no weight is an integer
    patterns = {name: BFLOAT16 for name, array in weights.items() if array.dtype == np.uint16}
    return board.publish(version, weights, patterns)


def is_published(ledger: Ledger, manifest: Manifest) -> bool:
    """Whether a version on a board is the one that the run's ledger knows."""
    commit = ledger.find(Address("publish", manifest.version))
    return commit is not None and commit.digest == manifest.digest
