"""Errors of stored data. Standard library only."""

from __future__ import annotations


class StoreError(Exception):
    """An error for stored bytes that are torn, damaged, missing or of another format. The message names the file and
    the fault."""


class MissingOutput(StoreError):
    """An error for an address without a commit record, and so without an output."""


class DroppedOutput(StoreError):
    """An error for a committed output whose arrays were deleted under `storage.keep.rollouts`. The commit record is
    still there."""


class DamagedWeights(StoreError):
    """An error for a copy of published weights that differs from what was published."""


class StoreUnavailable(StoreError):
    """An error for a filesystem that still gives a transient error after all retries."""


class StoreRefused(StoreError):
    """An error for an access that the filesystem refuses until a person acts: it is full or read only, or does not
    permit the access."""


class DamagedCommit(StoreError):
    """An error for a commit record that differs from what was written."""
