"""Network interfaces and addresses of this host. May import psutil."""

from __future__ import annotations

import socket

import psutil


def interface_address(interface: str) -> str | None:
    """Of an interface: its IPv4 address, or its IPv6 address where it has no other; None where there is neither."""
    found = psutil.net_if_addrs().get(interface, [])
    for family in (socket.AF_INET, socket.AF_INET6):
        for address in found:
            if address.family == family:
                return str(address.address)
    return None


def interfaces() -> list[str]:
    """Those that have an address."""
    return sorted(name for name in psutil.net_if_addrs() if interface_address(name) is not None)


def interface_with(address: str) -> str | None:
    """The interface that has an address; None where none has."""
    names = (name for name, found in psutil.net_if_addrs().items() if any(one.address == address for one in found))
    return next(names, None)


def route_address(host: str) -> str:
    """The address of this host by which another one is reached. Raises OSError where there is no route."""
    with socket.socket(family_of(host), socket.SOCK_DGRAM) as probe:
        probe.connect((host, 1))  # sends nothing: asks for the route
        return str(probe.getsockname()[0])


def family_of(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
