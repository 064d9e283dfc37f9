"""Errors of stored data. Standard library only."""

from __future__ import annotations


class StoreError(Exception):
    """Stored bytes are torn, damaged, missing or of another format. The message names the file and the fault."""


class MissingOutput(StoreError):
    """There is no commit record at an address, so there is no output."""


class DroppedOutput(StoreError):
    """The arrays of a committed output were deleted under `storage.keep.rollouts`. The commit record is still there."""


class DamagedWeights(StoreError):
    """A copy of published weights differs from what was published."""


class StoreUnavailable(StoreError):
    """The filesystem still gave a transient error after all retries."""


class StoreRefused(StoreError):
    """The filesystem refuses a write for good: full, read only, not permitted."""


class DamagedCommit(StoreError):
    """A commit record differs from what was written, so it is ignored."""
