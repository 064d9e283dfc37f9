"""What a report must not carry: a file that is mailed shows no password. Pure. Standard library only."""

from __future__ import annotations

import re

_CREDENTIALS = re.compile(r"(://)[^/\s@]+@")


def without_credentials(text: str) -> str:
    """A text whose URLs have no user and password: `http://***@host/`."""
    return _CREDENTIALS.sub(r"\1***@", text)
