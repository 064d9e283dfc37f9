"""Stage `publish`: the policy's trained weights become a version that every engine of the host can map and read."""

from __future__ import annotations

from stages.models.protocol import ModelHost
from storage.weights import Manifest, WeightBoard


def publish(models: ModelHost, board: WeightBoard, version: int) -> Manifest | None:
    """Writes the resident policy to the board as `version`; None on ranks other than 0. Writing a version again is
    harmless if the bits are the same, and raises ValueError if they are not."""
    weights = models.trained_weights()
    return None if weights is None else board.publish(version, weights)
