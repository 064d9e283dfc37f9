"""What can be wrong with something that was written down. Standard library only."""

from __future__ import annotations


class StoreError(Exception):
    """Stored bytes that are torn, damaged, missing or of another format; the message names what and where."""


class MissingOutput(StoreError):
    """No commit record at an address, so there is no output."""


class DroppedOutput(StoreError):
    """The arrays of a committed output were let go, as `storage.keep.rollouts` says; its commit record stays."""


class DamagedWeights(StoreError):
    """A copy of published weights is not what was published."""


class StoreUnavailable(StoreError):
    """The filesystem gives an error that may pass, and gave it for as long as it was to be waited for."""


class StoreRefused(StoreError):
    """The filesystem does not take what is to be written, and will not by itself: full, read only, not permitted."""


class DamagedCommit(StoreError):
    """A commit record is not what was written, so nothing that it says counts."""
