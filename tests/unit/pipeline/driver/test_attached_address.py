"""Where the scheduler of attached workers listens: addresses and ports that cannot be had are refused by their keys."""

from __future__ import annotations

import socket

import pytest

from pipeline.config.errors import ConfigError
from pipeline.driver.attached_workers import _check_port, listening_address
from pipeline.workers.network import interface_with, interfaces


def test_an_interface_stands_for_its_address() -> None:
    loopback = interface_with("127.0.0.1")
    assert loopback is not None
    assert loopback in interfaces()
    assert listening_address(loopback, None) == "127.0.0.1"
    assert listening_address(None, "localhost") in ("127.0.0.1", "::1")
    assert listening_address(None, None)


@pytest.mark.parametrize(
    ("interface", "host", "said"),
    [
        ("nowhere0", None, r"cluster\.interface: given 'nowhere0'; host .* has no such interface .*; it has .*lo"),
        (None, "192.0.2.1", r"cluster\.host: given '192\.0\.2\.1'; is no address of this host"),
        (None, "no.such.host.invalid", r"cluster\.host: given 'no\.such\.host\.invalid'"),
    ],
)
def test_what_this_host_does_not_have_is_refused(interface: str | None, host: str | None, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        listening_address(interface, host)


def test_a_port_that_is_taken_is_refused() -> None:
    _check_port("127.0.0.1", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=rf"cluster\.port: given {port}; cannot listen there on host .*127\.0\.0\.1"
        ):
            _check_port("127.0.0.1", port)
