"""`stageline worker` where there is nothing to join: one message that names this host, and exit code 2."""

from __future__ import annotations

import asyncio
import socket
import threading
from pathlib import Path

import pytest
from distributed.core import Server
from distributed.security import Security

from pipeline.cli.main import main
from pipeline.config.loading import load_config, to_yaml
from pipeline.workers.scheduler_file import SchedulerFile, file_of_driver, host_name, write_scheduler_file
from tests.support.attached import with_other_content
from tests.support.configs import arguments, write_config

WORKER = ("--gang", "all", "--index", "0", "--wait", "0")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """The scheduler file of a killed driver: nobody listens at its port any more."""
    write_config(tmp_path)
    source, *changes = arguments(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    own = Security.temporary().get_tls_config_for_role("scheduler")
    path = file_of_driver(tmp_path / "run", 1)
    path.parent.mkdir(parents=True)
    config = to_yaml(load_config([source], changes))
    told = SchedulerFile(
        1, f"tls://127.0.0.1:{port}", "n1", 7, str(tmp_path / "run"), str(tmp_path), "", own["cert"], own["key"], config
    )
    write_scheduler_file(path, told)
    return path


def refused(capsys: pytest.CaptureFixture[str], *given: str) -> str:
    assert main(["worker", *given]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("refused ")
    assert err.count("\n") == 1, "one message, on one line"
    return err


def test_no_scheduler_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, str(tmp_path), *WORKER)
    assert f"all-0: host {host_name()}: there is no scheduler file in {tmp_path}/attached" in said
    assert "cluster.kind=attached" in said
    assert "(waited 0 s)" in said
    elsewhere = str(tmp_path / "f.json")
    assert f"no scheduler file in {tmp_path}" in refused(capsys, "--scheduler-file", elsewhere, *WORKER)


def test_a_driver_that_is_gone(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--scheduler-file", str(file), *WORKER)
    assert "the driver does not answer at tls://127.0.0.1:" in said
    assert "(process 7 on host n1)" in said


@pytest.mark.parametrize(
    ("key", "content"),
    [
        ("certificate", ""),
        ("certificate", "c"),
        ("certificate", "-----BEGIN CERTIFICATE-----\nabc\n-----END CERTIFICATE-----\n"),
        ("key", ""),
        ("key", "k"),
        ("key", "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----\n"),
    ],
)
def test_no_certificate(file: Path, capsys: pytest.CaptureFixture[str], key: str, content: str) -> None:
    """Another than the driver's: tests/integration/test_attached_workers.py."""
    bare = with_other_content(file, file.with_name("bare.json"), **{key: content})
    said = refused(capsys, "--scheduler-file", str(bare), *WORKER)
    assert f"all-0: host {host_name()}: the {key} in {bare} cannot be used: " in said


def test_another_certificate_than_who_listens_has(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ends at once: a file of one's own says tomorrow what it says today."""
    other = Security.temporary()
    ready, over = threading.Event(), threading.Event()
    address = []

    async def listen() -> None:
        async with Server({}, connection_args={}) as server:
            await server.listen("tls://127.0.0.1:0", **other.get_listen_args("scheduler"))
            address.append(server.address)
            ready.set()
            await asyncio.to_thread(over.wait)

    listening = threading.Thread(target=asyncio.run, args=(listen(),))
    listening.start()
    try:
        ready.wait()
        elsewhere = with_other_content(file, file.with_name("other.json"), address=address[0])
        said = refused(capsys, "--scheduler-file", str(elsewhere), *WORKER[:4], "--wait", "1e9")
    finally:
        over.set()
        listening.join()
    assert f"all-0: host {host_name()}: the driver does not answer at {address[0]}" in said
    assert f"who listens there has another certificate than {elsewhere}" in said


def test_a_config_of_another_version(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = with_other_content(file, file.with_name("other.json"), config="nonsense: 1")
    said = refused(capsys, "--scheduler-file", str(other), *WORKER)
    assert f"the config in {other}: " in said


@pytest.mark.parametrize(
    ("gang", "index", "part"),
    [("alll", "0", "the run has no gang 'alll'; it has all"), ("all", "1", "gang all has no index 1; it has 0 to 0")],
)
def test_an_unknown_worker(file: Path, capsys: pytest.CaptureFixture[str], gang: str, index: str, part: str) -> None:
    """Said without asking the driver."""
    run_dir = str(file.parent.parent)
    said = refused(capsys, run_dir, "--gang", gang, "--index", index, "--wait", "0")
    assert f"host {host_name()}: {part}" in said


def test_what_is_no_scheduler_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "f.json"
    path.write_text("{}")
    here = f"host {host_name()}: {path}"
    assert f"{here} is no scheduler file" in refused(capsys, "--scheduler-file", str(path), *WORKER)
    assert f"{here}/x cannot be read: Not a" in refused(capsys, "--scheduler-file", f"{path}/x", *WORKER)
    assert f"{here}/attached/scheduler-000000.json cannot be read" in refused(capsys, str(path), *WORKER)


@pytest.mark.parametrize("given", [(), ("RUN", "--scheduler-file", "f.json")])
def test_one_of_the_two(given: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert "a run's directory or --scheduler-file, one of the two" in refused(capsys, *given, *WORKER)


@pytest.mark.parametrize("seconds", ["-1", "nan"])
def test_no_time_to_wait(seconds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert f"--wait: given {float(seconds)}" in refused(capsys, "RUN", *WORKER[:4], f"--wait={seconds}")
