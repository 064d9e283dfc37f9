"""Seconds to bring new weights into a running engine: all tensors, and those of six blocks (a partly frozen policy).

Beside them, in turn in every repeat: one copy of the same bytes into memory that is there already (the least that any
refit takes), and packing alone. `while decoding`: 16 rows run meanwhile, and weights are swapped between two tokens.
The cold start is the engine made from files. Tensors are float32, as the trainer publishes them.

Then the same weights from the board of another host, which another directory stands for: a worker process fetches a
version from another one's board over loopback with TLS (`fetch`), beside the same bytes through a plain socket into a
file in memory (`sendall`, `recv_into`), which is the least that any transfer over sockets takes, their encryption alone
(each end needs that once), and a copy in memory. Meanwhile the worker that publishes updates a small model on a core
that nothing else uses: what fetch after fetch adds to the time of an update is the gang's loss.

Then into an engine in an environment of its own, which maps the board's file: what the worker does before (sums and
finiteness, in one pass), what the engine does, and all of it, beside a copy.
"""

from __future__ import annotations

import argparse
import logging
import mmap
import os
import socket
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from distributed import Client, Future, Nanny, Scheduler, SpecCluster, get_worker
from distributed.security import Security
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.harness import arguments, measured_load, report, write_json
from benchmarks.publish import SHAPES, write_random
from pipeline.workers.messages import MirrorSpec
from pipeline.workers.versioned_engine import Clock, VersionedEngine, check_finite_numbers
from pipeline.workers.weight_transfer import WeightMirror
from pipeline.workers.worker_process import FORKSERVER_ENVIRONMENT
from stages.engines.build import build_engine
from stages.engines.capabilities import vllm_capabilities
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.runner import LocalRunner
from stages.engines.protocol import GenerationEngine, Request
from stages.engines.remote.build import build_remote
from stages.models.config import SamplingConfig
from stages.models.hf_weights import read_weights
from storage.weights import BFLOAT16, WeightBoard

CORES = os.cpu_count() or 1
CPU = torch.device("cpu")
MODEL = Path("assets/smollm2-135m-instruct")
DTYPES = ("float32", "bfloat16")
SLOTS, MAX_SEQ, NEW_TOKENS = 16, 256, 64
NUM_BLOCKS = 6
SOCKET_PIECE = 1 << 20
UPDATES_S = 5.0
VERSION = 1


def seconds_of(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def copy_seconds(tensors: Mapping[str, torch.Tensor], target: Mapping[str, torch.Tensor]) -> float:
    def copy() -> None:
        for name, tensor in tensors.items():
            target[name].copy_(tensor)

    return seconds_of(copy)


def load_while_decoding(engine: EmbeddedEngine, version: int, tensors: Mapping[str, torch.Tensor]) -> float:
    """Return the seconds of `load_weights` while as many rows as possible decode. These then run to their end."""
    sampling = SamplingConfig(NEW_TOKENS, NEW_TOKENS)
    engine.stats()
    running = engine.generate(Request(i, 1, 1, (5, 6, 7 + i), engine.version, sampling) for i in range(SLOTS))
    while not engine.stats().tokens:
        time.sleep(0.005)
    seconds = seconds_of(lambda: engine.load_weights(version, tensors))
    for _ in running:
        pass
    return seconds


def measure(path: Path, dtype: str, repeats: int) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Return the rows of the table and the figures by name, for weights of one dtype."""
    tensors = {name: tensor.float() for name, tensor in read_weights(str(path)).items()}
    few = {n: t for n, t in tensors.items() if n.startswith(tuple(f"model.layers.{i}." for i in range(NUM_BLOCKS)))}
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    settings = EngineConfig(max_rows=SLOTS, dtype=dtype)  # type: ignore[arg-type]
    seconds: dict[str, list[float]] = {}
    started = time.perf_counter()
    with closing(
        build_embedded(str(path), settings, max_seq=MAX_SEQ, threads=CORES, device=CPU, in_flight=True)
    ) as engine:
        assert isinstance(engine, EmbeddedEngine)
        cold = time.perf_counter() - started
        runner = LocalRunner(str(path), settings, max_seq=MAX_SEQ, device=CPU)
        version = 0
        with measured_load() as load:
            for _ in range(1 + repeats):
                for kind, given in (("all", tensors), (f"{NUM_BLOCKS} blocks", few)):
                    version += 2
                    arms: dict[str, Callable[[], float]] = {
                        "copy": partial(copy_seconds, given, target),
                        "pack": partial(seconds_of, partial(runner.prepare, given)),
                        "load": partial(seconds_of, partial(engine.load_weights, version, given)),
                        "load while decoding": partial(load_while_decoding, engine, version + 1, given),
                    }
                    for arm, run in arms.items():
                        seconds.setdefault(f"{kind}/{arm}", []).append(run())
        runner.close()
    figures = {
        f"{dtype}/{name}_s": statistics.median(taken[1:]) for name, taken in seconds.items()
    }  # the first warms up
    figures[f"{dtype}/cold_start_s"] = cold
    rows = []
    for kind in ("all", f"{NUM_BLOCKS} blocks"):
        arms_s = [figures[f"{dtype}/{kind}/{arm}_s"] for arm in ("copy", "pack", "load", "load while decoding")]
        rows.append((dtype, kind, *(f"{s * 1e3:.0f}" for s in arms_s), f"{cold * 1e3:.0f}", f"{load().others:.0%}"))
    return rows, figures


def keep_to(cores: set[int]) -> None:
    """Let all threads of this process, and the processes that it starts later, run on some cores only."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), cores)


def open_mirror(board: str, cores: set[int]) -> None:
    """Open this worker's mirror. `cores`: the cores of all its threads and of its sender."""
    keep_to(cores)
    worker = get_worker()
    worker.mirror = WeightMirror(worker, MirrorSpec(board, "there", timeout_s=60.0, message_timeout_s=30.0))
    worker.mirror.open()


def fetch(board: str) -> float:
    """Return the seconds until this worker's board has the version, which is then removed."""
    seconds = seconds_of(lambda: get_worker().mirror.fetch(VERSION))
    with WeightBoard(board).open(VERSION) as lease:
        lease.verify()
    WeightBoard(board).release(VERSION)
    return seconds


def update_seconds(core: int) -> float:
    """Return the seconds of an update of a small model on one core, as the mean over `UPDATES_S` seconds."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=512, hidden_size=192, intermediate_size=512, num_hidden_layers=8, num_attention_heads=6)
    )
    optimizer, tokens = torch.optim.AdamW(model.parameters()), torch.zeros(4, 64, dtype=torch.int64)

    def update() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        update()
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < UPDATES_S:
        update()
        count += 1
    return (time.perf_counter() - started) / count


def encrypt(data: memoryview) -> None:
    cipher = AESGCM(bytes(32))
    for start in range(0, len(data), SOCKET_PIECE):
        cipher.encrypt(bytes(12), data[start : start + SOCKET_PIECE], None)


def serve(listener: socket.socket, file: str) -> None:
    """Send a file's bytes to everybody who connects."""
    with open(file, "rb") as stream, mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ) as whole:
        while True:
            connection, _ = listener.accept()
            with connection, memoryview(whole) as view:
                connection.sendall(view)


def socket_seconds(address: tuple[str, int], num_bytes: int, target: Path) -> float:
    """Return the seconds that these bytes take through a plain socket into a file."""
    piece = memoryview(bytearray(SOCKET_PIECE))
    started = time.perf_counter()
    with socket.create_connection(address) as connection, target.open("xb", buffering=0) as stream:
        left = num_bytes
        while left:
            received = connection.recv_into(piece[: min(left, SOCKET_PIECE)])
            if not received:
                raise ConnectionError(f"{left} of {num_bytes} bytes did not come")
            stream.write(piece[:received])
            left -= received
    seconds = time.perf_counter() - started
    target.unlink()
    return seconds


def copy_arrays(arrays: Mapping[str, np.ndarray], target: Mapping[str, np.ndarray]) -> None:
    for name, array in arrays.items():
        np.copyto(target[name], array)


def update_there(client: Client) -> Future:
    return client.submit(update_seconds, 0, resources={"there": 1}, pure=False)


def fetch_seconds(client: Client, directory: str) -> float:
    return float(client.submit(fetch, directory, resources={"here": 1}, pure=False).result())


def measure_fetch(path: Path, repeats: int) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Return the rows of the table and the figures by name, for both types of published weights. Arms are taken in turn
    in every repeat."""
    weights = read_weights(str(path))
    published = {
        "float32": {name: tensor.float().numpy() for name, tensor in weights.items()},
        "bfloat16": {name: tensor.bfloat16().view(torch.uint16).numpy() for name, tensor in weights.items()},
    }
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    for dtype, tensors in published.items():
        with ExitStack() as stack:
            here, there = (
                stack.enter_context(WeightBoard(f"/dev/shm/stageline-refit-{uuid.uuid4().hex[:8]}")) for _ in range(2)
            )
            patterns = dict.fromkeys(tensors, BFLOAT16) if dtype == "bfloat16" else {}
            manifest = there.publish(VERSION, tensors, patterns)
            target = {name: np.zeros_like(array) for name, array in tensors.items()}
            file = np.memmap(there.directory / manifest.file, np.uint8, "r")
            client = stack.enter_context(two_workers(stack))
            cores = {*range(1, CORES)} or {0}
            for name, board in (("there", there), ("here", here)):
                client.submit(open_mirror, str(board.directory), cores, resources={name: 1}, pure=False).result()
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            process = get_context("fork").Process(
                target=serve, args=(listener, str(there.directory / manifest.file)), daemon=True
            )
            process.start()
            stack.callback(process.terminate)
            arms: dict[str, Callable[[], float]] = {
                "copy": partial(seconds_of, partial(copy_arrays, tensors, target)),
                "socket": partial(
                    socket_seconds, listener.getsockname(), manifest.file_bytes, here.directory / "plain"
                ),
                "encryption": partial(seconds_of, partial(encrypt, file.data)),
                "fetch": partial(fetch_seconds, client, str(here.directory)),
            }
            seconds: dict[str, list[float]] = {arm: [] for arm in arms}
            updates: dict[str, list[float]] = {"alone": [], "beside": []}
            with measured_load() as load:
                for _ in range(1 + repeats):
                    for arm, run in arms.items():
                        seconds[arm].append(run())
                    keep_to(cores)  # so that the scheduler of these workers, which is in this process, takes no time
                    updates["alone"].append(update_there(client).result())
                    updating = update_there(client)
                    while not updating.done():
                        fetch_seconds(client, str(here.directory))
                    updates["beside"].append(updating.result())
                    keep_to({*range(CORES)})
        medians = {arm: statistics.median(taken[1:]) for arm, taken in seconds.items()}
        rate = manifest.num_bytes / 1e9
        figures |= {f"between boards/{dtype}/{arm}_s": value for arm, value in medians.items()}
        figures[f"between boards/{dtype}/gb"] = rate
        figures[f"between boards/{dtype}/of_socket"] = medians["socket"] / medians["fetch"]
        loss = statistics.median(updates["beside"][1:]) / statistics.median(updates["alone"][1:]) - 1
        figures[f"between boards/{dtype}/loss"] = loss
        cells = [f"{medians[arm] * 1e3:.0f} ({rate / medians[arm]:.2f})" for arm in arms]
        of_socket = f"{medians['socket'] / medians['fetch']:.0%}"
        rows.append((dtype, f"{rate * 1e3:.0f}", *cells, of_socket, f"{loss:.1%}", f"{load().others:.0%}"))
    return rows, figures


def engines_elsewhere(path: Path) -> dict[str, Callable[[], GenerationEngine]]:
    """Return the builders of engines in other processes: the stand-in of the tests, whose load is one copy, and vLLM if
    STAGELINE_VLLM_PYTHON names a Python that has it."""
    made: dict[str, Callable[[], GenerationEngine]] = {
        "stand-in": lambda: build_remote(
            str(path),
            EngineConfig(python=sys.executable, max_rows=SLOTS),
            adapter="served_llama:ServedLlama",
            stated=vllm_capabilities,
            extra={},
            max_seq=MAX_SEQ,
            threads=1,
            modules=Path("tests/support").resolve(),
        )
    }
    python = os.environ.get("STAGELINE_VLLM_PYTHON")
    if python is not None:
        config = EngineConfig(kind="vllm", python=python, max_rows=SLOTS)
        made["vllm"] = lambda: build_engine(str(path), config, max_seq=MAX_SEQ, threads=1)
    return made


def enter_and_leave(engine: VersionedEngine, version: int) -> None:
    with engine.engine_at(version, Clock()):
        pass


def measure_elsewhere(path: Path, repeats: int) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Measure the way from the board to an engine in another process, as a worker does it (`VersionedEngine`). Arms are
    taken in turn in every repeat."""
    tensors = {name: tensor.float().numpy() for name, tensor in read_weights(str(path)).items()}
    target = {name: np.zeros_like(array) for name, array in tensors.items()}
    rows: list[tuple[str, ...]] = []
    figures: dict[str, float] = {}
    os.environ.update(FORKSERVER_ENVIRONMENT)  # which a worker has, and its servers inherit; this process is made
    for name, make in engines_elsewhere(path).items():
        with ExitStack() as stack:
            board = stack.enter_context(WeightBoard(f"/dev/shm/stageline-refit-{uuid.uuid4().hex[:8]}"))
            num_bytes = max(board.publish(version, tensors).num_bytes for version in (0, 1))
            engine = stack.enter_context(closing(make()))
            whole = VersionedEngine(engine, board)
            lease = stack.enter_context(board.open(0))
            seconds: dict[str, list[float]] = {}
            with measured_load() as load:
                for repeat in range(1 + repeats):
                    engine.stats()
                    arms: dict[str, Callable[[], object]] = {
                        "copy": partial(copy_arrays, tensors, target),
                        "sums": lease.verify,
                        "sums and finiteness": partial(lease.verify, check_finite_numbers),
                        "whole": partial(enter_and_leave, whole, repeat % 2),
                    }
                    for arm, run in arms.items():
                        seconds.setdefault(arm, []).append(seconds_of(run))
                    seconds.setdefault("load", []).append(engine.stats().refit_s)
        medians = {arm: statistics.median(taken[1:]) for arm, taken in seconds.items()}
        figures |= {f"elsewhere/{name}/{arm}_s": value for arm, value in medians.items()}
        shown = [f"{medians[arm] * 1e3:.0f}" for arm in ("copy", "sums", "sums and finiteness", "load", "whole")]
        factor = f"{medians['whole'] / medians['copy']:.1f}x"
        rows.append((name, f"{num_bytes / 1e6:.0f}", *shown, factor, f"{load().others:.0%}"))
    return rows, figures


def two_workers(stack: ExitStack) -> Client:
    """Return a client of two worker processes, which are chosen by resources of their names."""
    security = Security.temporary()
    common = {"host": "127.0.0.1", "protocol": "tls://", "security": security}
    workers = {
        name: {"cls": Nanny, "options": {**common, "nthreads": 1, "memory_limit": 0, "resources": {name: 1}}}
        for name in ("there", "here")
    }
    scheduler = {"cls": Scheduler, "options": {**common, "dashboard": False}}
    cluster = SpecCluster(workers=workers, scheduler=scheduler, security=security, silence_logs=logging.CRITICAL)
    return Client(stack.enter_context(cluster), security=security)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--only", choices=list(TABLES), help="measure one of the three")
    parser.add_argument("--size", choices=list(SHAPES), help="random weights of this size instead of the demo's model")


def measure_load(path: Path, repeats: int) -> tuple[list[tuple[str, ...]], dict[str, float]]:
    """Return the rows of the table and the figures by name, for engines of both dtypes."""
    measured = [measure(path, dtype, repeats) for dtype in DTYPES]
    return [row for rows, _ in measured for row in rows], {k: v for _, figures in measured for k, v in figures.items()}


TABLES: dict[str, tuple[Callable[[Path, int], tuple[list[tuple[str, ...]], dict[str, float]]], str, str, str]] = {
    "load": (
        measure_load,
        f"refit: {CORES} threads, milliseconds",
        "engine, tensors, copy, pack, load, while decoding, cold start, others' load",
        "",
    ),
    "fetch": (
        measure_fetch,
        "from another board over loopback: milliseconds (GB/s)",
        "published, MB, copy, plain socket, encryption, fetch, of the socket's rate, the gang's loss, others' load",
        "",
    ),
    "elsewhere": (
        measure_elsewhere,
        "into an engine in an environment of its own: milliseconds",
        "engine, MB, copy, sums, sums and finiteness, load, whole refit, of a copy, others' load",
        "; whole refit: sums and finiteness here, then the engine reads the same file",
    ),
}
"""Name -> function that measures, title of its table, column heads, and a note."""


def main() -> None:
    options = arguments(__doc__ or "", add_options)
    torch.set_num_threads(CORES)
    repeats = 1 if options.quick else options.repeats
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="stageline-refit-") as scratch:
        path = MODEL
        if options.quick or options.size:
            path = Path(scratch)
            write_random(path, SHAPES[options.size] if options.size else {})
        for name, (measure_table, title, columns, note) in TABLES.items():
            if options.only in (None, name):
                rows, measured = measure_table(path, repeats)
                figures |= measured
                report(title, columns.split(", "), rows, [f"{repeats} repeats, medians{note}"])
    write_json(options.json, figures)


if __name__ == "__main__":
    main()
