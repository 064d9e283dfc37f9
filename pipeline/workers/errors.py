"""What a command says to its user though a worker raised it; loads nothing."""

from __future__ import annotations


class ReplayMismatch(RuntimeError):
    """An update run again from its stored inputs gave other weights than the ones that were committed."""
