"""Ports of loopback for servers that must be told one before they listen."""

from __future__ import annotations

import random
import socket
from contextlib import ExitStack, suppress

_PORTS = range(20_000, 30_000)
"""Ports below the range from which Linux gives any free port (32768 and up), which other tests use all the time."""


def free_ports(number: int) -> list[int]:
    """Return different ports that nobody listens on now. They are drawn, so that two test processes hardly meet."""
    found: list[int] = []
    with ExitStack() as held:
        for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
            with suppress(OSError):
                held.enter_context(socket.socket()).bind(("127.0.0.1", port))
                found.append(port)
            if len(found) == number:
                return found
    raise AssertionError(f"no {number} free ports in {_PORTS}")
