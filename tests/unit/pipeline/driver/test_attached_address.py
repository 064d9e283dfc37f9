"""Address of the scheduler of attached workers, and place of its file: impossible ones are refused by their key."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from pipeline.config.sections import ClusterConfig, listening
from pipeline.driver.attached_workers import _check_port, listening_address, next_driver_number
from pipeline.driver.cluster import dashboard_address
from pipeline.errors import ConfigError
from pipeline.workers.attached import interface_with, interfaces
from pipeline.workers.scheduler_file import SchedulerFile, file_of_driver, write_scheduler_file


def test_an_interface_stands_for_its_address() -> None:
    loopback = interface_with("127.0.0.1")
    assert loopback is not None
    assert loopback in interfaces()
    assert listening_address(loopback, None) == "127.0.0.1"
    assert listening_address(None, "localhost") in ("127.0.0.1", "::1")
    assert listening_address(None, None)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        (None, (None, 0)),
        ("n1", ("n1", 0)),
        (":8786", (None, 8786)),
        ("10.0.0.1:8786", ("10.0.0.1", 8786)),
        ("[::1]:8786", ("::1", 8786)),
        ("[fe80::1]", ("fe80::1", 0)),
    ],
)
def test_a_scheduler_listens_where_its_address_says(address: str | None, expected: tuple[str | None, int]) -> None:
    assert listening(ClusterConfig(kind="attached", address=address)) == expected


@pytest.mark.parametrize(
    ("interface", "host", "said"),
    [
        ("nowhere0", None, r"cluster\.interface: given 'nowhere0'; host .* has no such interface .*; it has .*lo"),
        (None, "192.0.2.1", r"cluster\.address: given '192\.0\.2\.1'; is no address of this host"),
        (None, "no.such.host.invalid", r"cluster\.address: given 'no\.such\.host\.invalid'"),
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
            ConfigError, match=rf"cluster\.address: given port {port}; cannot listen there on host .*127\.0\.0\.1"
        ):
            _check_port("127.0.0.1", port)


def test_a_dashboard_that_cannot_be_here_is_refused() -> None:
    assert dashboard_address(None).startswith("127.0.0.1:")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert dashboard_address(f"127.0.0.1:{taken.getsockname()[1]}") == "127.0.0.1:0"
    with pytest.raises(ConfigError, match=r"cluster\.dashboard: given '192\.0\.2\.1:1'; 192\.0\.2\.1 is no address"):
        dashboard_address("192.0.2.1:1")


def left_by_a_driver(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_scheduler_file(path, SchedulerFile(3, "tls://127.0.0.1:1", "n1", 7, "/runs/a", "/", "n", "c", "k", ""))


@pytest.mark.parametrize("counted", [b"", b"x", b"\xff"])
def test_drivers_are_counted_also_where_the_count_was_cut_off(tmp_path: Path, counted: bytes) -> None:
    assert [next_driver_number(tmp_path) for _ in range(2)] == [1, 2]
    left_by_a_driver(file_of_driver(tmp_path, 2))
    (tmp_path / "attached" / "attempts").write_bytes(counted)
    assert next_driver_number(tmp_path) == 3
    assert [one.name for one in (tmp_path / "attached").iterdir()] == ["attempts"]
