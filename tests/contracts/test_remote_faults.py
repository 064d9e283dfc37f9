"""The boundary between two environments, where one side does not say what the protocol has, or nothing at all; and what
is left of a server when the process that started it has gone."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from stages.engines.protocol import EngineLost, Request, RequestError
from stages.engines.remote import guard
from stages.engines.remote.client import RemoteEngine
from stages.engines.remote.process import SCRATCH
from stages.engines.remote.wire import PROTOCOL, ProtocolError, frame
from tests.contracts.engine_contract import assert_same_tokens, make_requests, random_llama, trained_tensors
from tests.contracts.test_remote_engine import is_gone, make_served, server_of
from tests.support.engines import by_row
from tests.support.paths import ROOT

READY: dict[str, Any] = {
    "kind": "ready", "protocol": PROTOCOL, "engine": "odd", "version": "1", "device": "cpu", "facts": {},
}  # fmt: skip
ODD_SERVER = """
import msgpack, socket, struct, sys, threading, time
connection = socket.socket(fileno=int(sys.argv[4]))
def send(message):
    body = msgpack.packb(message)
    connection.sendall(struct.pack(">I", len(body)) + body)
def beat():
    while True:
        time.sleep(1)
        send({"kind": "beat"})
def receive():
    (length,) = struct.unpack(">I", connection.recv(4, socket.MSG_WAITALL))
    return msgpack.unpackb(connection.recv(length, socket.MSG_WAITALL))
threading.Thread(target=beat, daemon=True).start()
receive()
send(READY)
receive()
send(SAID)
connection.recv(1)
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    random_llama(0, False).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(path: Path) -> Iterator[RemoteEngine]:
    with closing(make_served(path)) as engine:
        yield engine


def odd_server(folder: Path, said: object, ready: dict[str, Any] = READY) -> str:
    """An interpreter that, whatever it is asked to run, is a server that answers hello with `ready` and the message
    after it with `said`, and says every second that it is there."""
    program = folder / "python"
    text = ODD_SERVER.replace("READY", repr(ready)).replace("SAID", repr(said))
    program.write_text(f"#!{sys.executable}\n{text}", "utf8")
    program.chmod(0o755)
    return str(program)


def array(dtype: str, *numbers: float) -> dict[str, Any]:
    return {"dtype": dtype, "shape": [len(numbers)], "data": np.array(numbers, dtype).tobytes()}


def row(number: int = 0, **fields: Any) -> dict[str, Any]:
    sound = {"tokens": array("int32", 3, 4), "logprobs": array("float32", -1, -2), "versions": array("int32", 0, 0)}
    return {"kind": "row", "id": number, **sound, **fields}


ODD_ANSWERS = {
    "no row": ({"kind": "row"}, "whose id is None"),
    "a row that none has": (row(99), "id 99, which was not sent"),
    "a row without log-probs": (row(logprobs=None), "not an array"),
    "fewer log-probs than tokens": (row(logprobs=array("float32", -1)), r"logprobs float32 \[1\]"),
    "fewer versions than tokens": (row(versions=array("int32", 0)), r"versions int32 \[1\]"),
    "tokens of another type": (row(tokens=array("int64", 3, 4)), r"tokens int64 \[2\]"),
    "more tokens than asked for": (
        row(
            tokens=array("int32", *range(17)), logprobs=array("float32", *[-1] * 17), versions=array("int32", *[0] * 17)
        ),
        "at most 16 tokens",
    ),
    "an answer to nobody": ({"kind": "done", "call": 77}, "answer to call 77"),
    "another kind of message": ({"kind": "zzz"}, "kind 'zzz'"),
}


@pytest.mark.parametrize(("said", "reason"), ODD_ANSWERS.values(), ids=ODD_ANSWERS)
def test_a_server_that_breaks_the_protocol_is_lost(path: Path, tmp_path: Path, said: object, reason: str) -> None:
    """The server still reports that it is alive."""
    told: list[str] = []
    with closing(make_served(path, python=odd_server(tmp_path, said), on_lost=told.append)) as engine:
        with pytest.raises(EngineLost, match=f"cannot be talked to: .*{reason}"):
            list(engine.generate(make_requests(1)))
        with pytest.raises(EngineLost, match="the engine has stopped"):
            engine.load_weights(1, trained_tensors(random_llama(1, False)))
    assert len(told) == 1


def test_counters_that_are_none_are_refused(path: Path, tmp_path: Path) -> None:
    said = {"kind": "done", "call": 0, "rows": "many"}
    engine = make_served(path, python=odd_server(tmp_path, said))
    with closing(engine), pytest.raises(ProtocolError, match="counters that are not numbers"):
        engine.stats()


@pytest.mark.parametrize(("name", "value"), [("device", None), ("device", "abacus"), ("version", 1), ("facts", "none")])
def test_a_server_that_is_not_ready_as_it_should_be(path: Path, tmp_path: Path, name: str, value: object) -> None:
    ready = {key: given for key, given in {**READY, name: value}.items() if given is not None}
    with pytest.raises(EngineLost, match=rf"cannot be talked to: .*{'None' if value is None else value}"):
        make_served(path, python=odd_server(tmp_path, {}, ready))


@pytest.mark.parametrize("said", [b"\x00\x00\x00\x05\xc1\xc1\xc1\xc1\xc1", frame("zzz"), frame("generate", rows=[{}])])
def test_a_client_that_says_what_the_protocol_does_not_have_ends_the_server(path: Path, said: bytes) -> None:
    with closing(make_served(path)) as engine:
        server = server_of(engine)
        engine._server.channel.send_frame(said)
        with pytest.raises(EngineLost, match=r"ProtocolError|TypeError"):
            engine.stats()
        assert is_gone(server)


@pytest.mark.parametrize("name", ["row", "seed", "step"])
@pytest.mark.parametrize("value", [2**63, 2**64, -(2**63) - 1])
def test_a_number_that_does_not_fit_is_refused_and_leaves_nothing(served: RemoteEngine, name: str, value: int) -> None:
    bad = dataclasses.replace(make_requests(1)[0], **{name: value})
    with pytest.raises(RequestError, match=f"has {name} {value}, which must be a number of 64 bits"):
        served.generate([bad])
    assert not served._calls


@pytest.mark.parametrize("seed", [2**63 - 1, -(2**63)])
def test_the_largest_numbers_work(served: RemoteEngine, seed: int) -> None:
    assert len(by_row(served.generate([dataclasses.replace(make_requests(1)[0], seed=seed)]))) == 1


def test_numbers_of_numpys_types_are_numbers(served: RemoteEngine) -> None:
    def as_numpys(request: Request) -> Request:
        return dataclasses.replace(request, seed=np.int64(request.seed), tokens=tuple(np.array(request.tokens)))

    plain = by_row(served.generate(make_requests(3)))
    assert_same_tokens(by_row(served.generate(map(as_numpys, make_requests(3)))), plain)


def test_what_cannot_be_said_leaves_nothing_in_flight(path: Path) -> None:
    """New weights would wait for it for ever."""
    odd = dataclasses.replace(make_requests(1)[0], tokens=(3.5, object()))
    with closing(make_served(path)) as engine:
        with pytest.raises(TypeError):
            engine.generate([odd])
        engine.load_weights(1, trained_tensors(random_llama(1, False)))


def test_a_server_stopped_at_its_start_is_missed(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By its silence, long before its time to start is over."""
    monkeypatch.setattr("stages.engines.remote.client._START_MESSAGE_TIMEOUT_S", 2.0)
    with pytest.raises(EngineLost, match=r"sent nothing for 3 s while it started"):
        make_served(path, extra={"fault": "SIGSTOP", "at": 0}, message_timeout_s=3.0)


@pytest.mark.parametrize("program", ["/bin/true", "/bin/false"])
def test_a_program_that_is_no_server_says_how_it_ended(path: Path, program: str) -> None:
    with pytest.raises(EngineLost, match=f"ended at its start with status {int(program == '/bin/false')}"):
        make_served(path, python=program)


def test_a_relative_interpreter_is_the_callers(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's working directory is another; and a link is not followed, which would lead out of an environment."""
    (tmp_path / "bin").mkdir()
    link = tmp_path / "bin/python"
    link.write_text(f'#!/bin/sh\necho "called by $0" >> {tmp_path}/called\nexec {sys.executable} "$@"\n')
    link.chmod(0o755)
    (tmp_path / "bin/python3.link").symlink_to(link)
    monkeypatch.chdir(tmp_path)
    with closing(make_served(path, python="bin/python3.link")) as engine:
        assert len(by_row(engine.generate(make_requests(1)))) == 1
    assert (tmp_path / "called").read_text() == f"called by {tmp_path}/bin/python3.link\n"


def test_an_engine_outlives_the_thread_that_built_it(path: Path) -> None:
    built: list[RemoteEngine] = []
    thread = threading.Thread(target=lambda: built.append(make_served(path)))
    thread.start()
    thread.join()
    with closing(built[0]) as engine:
        assert len(by_row(engine.generate(make_requests(2)))) == 2


def test_nothing_is_left_when_the_client_is_killed(path: Path, tmp_path: Path) -> None:
    """The server's children and its directory are gone, even if the server was stopped."""
    program = f"""
import sys
from pathlib import Path
from tests.contracts.test_remote_engine import make_served, server_of
engine = make_served(Path({str(path)!r}), extra={{"fault": "helped"}}, log=Path({str(tmp_path / "log")!r}))
print(server_of(engine).pid, flush=True)
sys.stdin.read()
"""
    client = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    with client:
        server = psutil.Process(int(client.stdout.readline()))
        (helper,) = re.findall(r"helper (\d+)", (tmp_path / "log").read_text())
        guards = [child for child in psutil.Process(client.pid).children() if child != server]
        folders = [*Path(tempfile.gettempdir()).glob(f"{SCRATCH}{client.pid}-*")]
        assert len(guards) == len(folders) == 1
        server.suspend()
        client.kill()
    processes = [server, psutil.Process(int(helper)), *guards]
    psutil.wait_procs(processes, timeout=60)
    assert all(map(is_gone, processes))
    assert not folders[0].exists()


def test_closing_leaves_neither_guard_nor_directory(path: Path) -> None:
    def held() -> set[object]:
        return {*psutil.Process().children(), *Path(tempfile.gettempdir()).glob(f"{SCRATCH}{os.getpid()}-*")}

    before = held()
    engine = make_served(path)
    assert len(held() - before) == 3
    engine.close()
    assert held() == before


def test_a_server_that_does_not_listen_holds_nobody_up(path: Path) -> None:
    """More is sent than fits into the socket while it is stopped: callers get EngineLost when it is missed."""
    many = [dataclasses.replace(request, row=i) for i, request in enumerate(make_requests(1) * 20_000)]
    with closing(make_served(path, message_timeout_s=10.0)) as engine, ThreadPoolExecutor(1) as threads:
        server_of(engine).suspend()
        call = threads.submit(lambda: list(engine.generate(many)))
        with pytest.raises(EngineLost, match="sent nothing for 10 s"):
            call.result()


SHARING = """
import multiprocessing, sys, time
from multiprocessing.shared_memory import SharedMemory
memory, lock = SharedMemory(create=True, size=64), multiprocessing.get_context("spawn").Lock()
print(memory.name, lock._semlock.name.removeprefix("/"), flush=True)
time.sleep(600)
"""


def test_shared_memory_between_an_engines_ranks_is_removed_with_them() -> None:
    """The process that tracks the memory is killed too. vLLM's ranks have 160 MB and more."""
    with subprocess.Popen(
        [sys.executable, "-c", SHARING], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as server:
        assert server.stdout is not None
        memory, semaphore = server.stdout.readline().split()
        left = [Path("/dev/shm", memory), Path("/dev/shm", f"sem.{semaphore}")]
        assert [path.exists() for path in left] == [True, True]
        guard.end_group(server.pid)
    assert [path.exists() for path in left] == [False, False]
