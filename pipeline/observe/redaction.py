"""What a report or a tracker must not carry: others read them, and see no password. Pure. Standard library only."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"(://)[^/\s@]+@")


def without_credentials(text: str) -> str:
    """A text whose URLs have no user and password: `http://***@host/`."""
    return _CREDENTIALS.sub(r"\1***@", text)
