"""What can be wrong with something that was written down. Standard library only."""

from __future__ import annotations


class StoreError(Exception):
    """Stored bytes that are torn, damaged, missing or of another format; the message names what and where."""


class MissingOutput(StoreError):
    """No commit record at an address, so there is no output."""


class DamagedWeights(StoreError):
    """A copy of published weights is not what was published."""
