"""Tie the processes of one host together: they end with their parent, and their connections stay on the host."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None = None, by: signal.Signals = signal.SIGKILL) -> None:
    """Let Linux kill this process when the thread that started it ends, even if this process is stopped or stuck in a
    native call. Other systems have no such call; there the process ends with its connection. `parent`: id of the
    expected parent; if it has ended already, this process ends at once. `by`: the signal to send, for a process that
    must clean up first."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, by)
        if parent is not None and os.getppid() != parent:
            os._exit(1)


def loopback_only() -> dict[str, str]:
    """Return the environment under which gloo and NCCL listen on the loopback interface alone. Without it gloo listens
    on the address that the host's name resolves to, and NCCL on the first interface, and neither asks who connects."""
    name = next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))
    return {"GLOO_SOCKET_IFNAME": name, "NCCL_SOCKET_IFNAME": name}
