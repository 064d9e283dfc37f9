"""Connections between processes of one host stay on that host."""

from __future__ import annotations

import socket


def loopback_only() -> dict[str, str]:
    """Return the environment under which gloo and NCCL listen on the loopback interface alone. Without it gloo listens
    on the address that the host's name resolves to, and NCCL on the first interface, and neither asks who connects."""
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
