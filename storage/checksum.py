"""The checksum of what the store writes down beside its arrays. Standard library only."""

from __future__ import annotations

import hashlib


def checksum(data: bytes) -> str:
    """32 hexadecimal digits of the SHA-256: it tells damage, not forgery."""
    return hashlib.sha256(data).hexdigest()[:32]
