"""The contract of engines across the boundary between two environments, and what becomes of a server that fails.

The engine behind it is a plain Llama (tests/support/served_llama.py): vLLM's own test is test_vllm_engine.py.
"""

from __future__ import annotations

import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import psutil
import pytest
import torch
from transformers import LlamaForCausalLM

from stages.engines.capabilities import vllm_capabilities
from stages.engines.config import EngineConfig
from stages.engines.protocol import EngineLost, WeightsError
from stages.engines.remote.build import build_remote, build_vllm
from stages.engines.remote.client import RemoteEngine
from stages.engines.remote.process import SCRATCH
from stages.engines.remote.wire import PROTOCOL
from tests.contracts.engine_contract import (
    MAX_SEQ,
    OneServer,
    assert_same_tokens,
    contract_of,
    make_requests,
    random_llama,
    trained_tensors,
)
from tests.support.engines import by_row

SUPPORT = Path(__file__).resolve().parents[1] / "support"


def make_served(
    path: Path,
    max_rows: int = 4,
    *,
    message_timeout_s: float = 60.0,
    start_s: float = 600.0,
    python: str = sys.executable,
    **more: Any,
) -> RemoteEngine:
    config = EngineConfig(python=python, max_rows=max_rows)
    more |= {"message_timeout_s": message_timeout_s, "start_s": start_s}
    settings = {"adapter": "served_llama:ServedLlama", "modules": SUPPORT, "extra": {}, **more}
    return cast(
        RemoteEngine, build_remote(str(path), config, stated=vllm_capabilities, max_seq=MAX_SEQ, threads=1, **settings)
    )


class TestServedEngine(OneServer, contract_of(vllm_capabilities(EngineConfig(kind="vllm"), "cpu"))):
    @pytest.fixture(scope="class", params=[True], ids=["tied"])
    def model(self, request: pytest.FixtureRequest) -> LlamaForCausalLM:
        return random_llama(0, request.param)

    def make(self, path: Path, max_rows: int = 4) -> RemoteEngine:
        return make_served(path, max_rows)

    def make_in_flight(self, path: Path) -> RemoteEngine:
        return make_served(path, 8, in_flight=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    random_llama(0, False).save_pretrained(directory)
    return directory


def server_of(engine: RemoteEngine) -> psutil.Process:
    return psutil.Process(engine._server.process.pid)


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_untied_heads_are_refitted(path: Path) -> None:
    """Weights by file, and weights that are written for the moment."""
    other = random_llama(1, False)
    with closing(make_served(path)) as engine:
        engine.load_weights(1, trained_tensors(other))
        found = by_row(engine.generate(make_requests(3, version=1)))
        directory = path.parent / "other"
        other.save_pretrained(directory)
    with closing(make_served(directory)) as engine:
        assert_same_tokens(by_row(engine.generate(make_requests(3))), found)


def test_a_tensor_that_is_left_out_later_is_refused(path: Path) -> None:
    """Its values since the last refit exist only in the engine."""
    tensors = trained_tensors(random_llama(1, False))
    with closing(make_served(path)) as engine:
        engine.load_weights(1, tensors)
        del tensors["model.norm.weight"]
        with pytest.raises(WeightsError, match=r"model\.norm\.weight .*was in the last weights"):
            engine.load_weights(2, tensors)
        assert engine.version == 1


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("raise", "RuntimeError: the machine is on fire"),
        ("SIGKILL", "ended with status -9"),
        ("SIGSTOP", "sent nothing"),
    ],
)
def test_a_lost_server_is_told_and_ended(path: Path, fault: str, reason: str) -> None:
    told: list[str] = []
    heard = threading.Event()

    def on_lost(text: str) -> None:
        told.append(text)
        heard.set()

    engine = make_served(path, message_timeout_s=3.0, extra={"fault": fault, "at": 3}, on_lost=on_lost)
    with closing(engine), ThreadPoolExecutor(2) as threads:
        server = server_of(engine)
        calls = [threads.submit(lambda: list(engine.generate(make_requests(4)))) for _ in range(2)]
        for call in calls:
            with pytest.raises(EngineLost, match=re.escape(reason)):
                call.result()
        assert heard.wait(60)
        assert is_gone(server)
        assert len(told) == 1
        assert reason in told[0]
        for again in (lambda: engine.generate(make_requests(1)), engine.stats, lambda: engine.load_weights(1, {})):
            with pytest.raises(EngineLost, match="the engine has stopped"):
                again()


def test_an_engine_that_cannot_start_shows_its_last_lines(path: Path) -> None:
    with pytest.raises(EngineLost, match=r"(?s)MemoryError: of 3 bytes, 4 are taken.*not enough memory for anything"):
        make_served(path, extra={"fault": "start"})


def test_an_engine_that_is_stuck_in_its_start_is_given_up(path: Path) -> None:
    """Its server reports every second that it is alive."""
    with pytest.raises(EngineLost, match=r"did not come up in 3 s"):
        make_served(path, extra={"fault": "stuck"}, start_s=3.0)


def test_what_a_server_has_started_ends_with_it(path: Path, tmp_path: Path) -> None:
    """This holds even if the server has ended: ranks of a tensor-parallel engine are processes of their own."""
    engine = make_served(path, extra={"fault": "helped"}, log=tmp_path / "log")
    with closing(engine):
        (helper,) = re.findall(r"helper (\d+)", (tmp_path / "log").read_text())
        process = psutil.Process(int(helper))
        server_of(engine).kill()
    psutil.wait_procs([process], timeout=60)
    assert is_gone(process)


@pytest.mark.parametrize("adapter", ["no_such_module:Engine", "served_llama:NoSuchEngine"])
def test_an_adapter_that_is_not_there(path: Path, adapter: str) -> None:
    with pytest.raises(EngineLost, match=r"NoSuchEngine|no_such_module"):
        make_served(path, adapter=adapter)


def test_a_server_of_another_protocol_is_refused(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever side is the older one."""
    older = tmp_path / "python"
    older.write_text(f"#!{sys.executable}\n{OLDER_SERVER}", "utf8")
    older.chmod(0o755)
    with pytest.raises(EngineLost, match=f"speaks protocol 1, this side {PROTOCOL}"):
        make_served(path, python=str(older))
    monkeypatch.setattr("stages.engines.remote.client.PROTOCOL", PROTOCOL + 1)
    with pytest.raises(EngineLost, match=f"this server speaks protocol {PROTOCOL}, the client {PROTOCOL + 1}"):
        make_served(path)


OLDER_SERVER = """
import msgpack, socket, struct, sys
connection = socket.socket(fileno=int(sys.argv[4]))
body = msgpack.packb({"kind": "ready", "protocol": 1, "engine": "llama", "version": "1", "facts": {}})
connection.sendall(struct.pack(">I", len(body)) + body)
connection.recv(1)
"""


def test_rows_longer_than_the_model_has_positions_are_refused_before_a_server_starts(path: Path) -> None:
    config = EngineConfig(kind="vllm", python="/nowhere/python")
    with pytest.raises(ValueError, match=r"max_seq is 129; .*/llama.* has positions for 128 tokens"):
        build_vllm(str(path), config, max_seq=129, threads=1)


def test_a_python_that_is_not_there_is_named(path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="/nowhere/python"):
        make_served(path, python="/nowhere/python")


def test_what_the_last_bits_depend_on_is_the_servers_own(path: Path) -> None:
    """They go into the worker's numerics, and so into every commit's provenance."""
    with closing(make_served(path)) as engine:
        assert engine.numerics["device"] == "cpu"
        facts = dict(fact.split(" ", 1) for fact in engine.numerics["kernels"].split(", ")[1:])
        assert facts["torch"] == torch.__version__
        assert facts.keys() >= {"dtype", "environment", "machine", "python", "torch.build", "torch.cpu", "version"}
        assert facts["draws"] == "native"
        assert SCRATCH in facts["storage"], "the server has what the draw needs of this project, and not by chance"
