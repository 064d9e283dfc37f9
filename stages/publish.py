"""Stage `publish`: write the policy's trained weights as a version that every engine of the host can memory-map."""

from __future__ import annotations

from stages.models.protocol import ModelHost
from storage.address import Address
from storage.ledger import Ledger
from storage.weights import Manifest, WeightBoard


def publish(models: ModelHost, board: WeightBoard, version: int) -> Manifest | None:
    """Write the resident policy to the weight board (storage/weights.py) as version `version` of the weights. Return
    the manifest on rank 0, None on other ranks. A version may be written again with the same bits. On rank 0, raises
    ValueError if the version exists with other bits, and raises StoreRefused if the board's memory is full."""
    return models.publish(board, version)


def is_published(ledger: Ledger, manifest: Manifest) -> bool:
    """Return True if the run's ledger has a commit of the manifest's version with the manifest's digest."""
    commit = ledger.find(Address("publish", manifest.version))
    return commit is not None and commit.digest == manifest.digest
