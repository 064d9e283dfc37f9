"""The processes of a model's ranks 1, 2, ...: how rank 0's process starts them, and the program that they run.

A thread of `RankProcesses` starts the processes, waits for their ends and reaps them. The processes end with this
thread (`end_with_parent`), so none is left behind, however rank 0's process ends. Each process runs `main`. The two
arguments on its command line are the file descriptors of its connections for commands and for weights.

    main thread      carries out commands one after the other: passes (the last stage answers with the draws), swaps of
                     weights, reads and writes of the cache, sleep and wake
    second thread    receives new weights, packs them beside the old ones, and answers None or an error

A rank's process also ends when one of its two connections closes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from typing import TypeVar

import torch

from stages.engines.embedded.batch import Batch
from stages.engines.embedded.model import LlamaWeights
from stages.engines.embedded.ranks.communication import (
    READY,
    Command,
    Drop,
    Prepare,
    ReadCache,
    Swap,
    WriteCache,
    receive_bytes,
)
from stages.engines.embedded.ranks.rank_model import RankModel, RankSpec
from stages.engines.protocol import WeightsError
from storage.host import end_with_parent

Result = TypeVar("Result")
_ROOT = Path(__file__).resolve().parents[4]
_EXIT_NOTICE_S = 30.0
"""Maximum seconds that the method `or_rank_lost` waits after an error. The cause may be that a rank's process has
ended, which another thread notices and handles. If that does not happen in time, the method raises the error itself."""


class RankLost(RuntimeError):
    """A rank's process has ended by itself. The message names the rank and says how it ended."""


@dataclass(frozen=True)
class RankProcess:
    """A rank, and rank 0's ends of the two connections to it."""

    spec: RankSpec
    commands: Connection
    weights: Connection


class RankProcesses:
    """Owns the processes of ranks 1, 2, ... If one of these processes ends, the others are killed."""

    def __init__(self, specs: Sequence[RankSpec], on_lost: Callable[[str], None] | None = None) -> None:
        """Start the rank processes. `meet` waits until they run.

        If a rank is lost, `on_lost` is called with a description of the loss, in the thread that watches the processes.
        `or_rank_lost` raises RankLost only after this call. So if `on_lost` ends this process, no caller sees the
        error."""
        self._lost: str | None = None
        self._loss_handled = threading.Event()
        self._closing = False
        self._on_lost = on_lost
        self._processes: list[subprocess.Popen[bytes]] = []
        self.ranks: list[RankProcess] = []
        started = threading.Event()
        child_ends: list[tuple[Connection, Connection]] = []
        for spec in specs:
            (commands, child_commands), (weights, child_weights) = Pipe(), Pipe()
            self.ranks.append(RankProcess(spec, commands, weights))
            child_ends.append((child_commands, child_weights))
        self._thread = threading.Thread(
            target=self._watch, args=(child_ends, started), name="engine-ranks", daemon=True
        )
        self._thread.start()
        started.wait()

    def meet(self) -> None:
        """Send each rank its spec, and wait until its process answers. Raises RankLost if a process ends before it has
        answered."""
        for rank in self.ranks:
            self.or_rank_lost(partial(rank.commands.send, rank.spec))
        for rank in self.ranks:
            answer = self.or_rank_lost(rank.commands.recv)
            assert answer == READY

    def or_rank_lost(self, act: Callable[[], Result]) -> Result:
        """Return the result of `act`. If `act` fails because a rank has ended, raise RankLost."""
        try:
            return act()
        except (RuntimeError, EOFError, OSError) as error:  # raised by gloo, NCCL and connections if a rank ends
            if not self._loss_handled.wait(_EXIT_NOTICE_S) or self._lost is None:
                raise
            raise RankLost(self._lost) from error

    def close(self) -> None:
        """Kill the processes; they hold nothing that must be saved. A second call does nothing."""
        self._closing = True
        for process in self._processes:
            process.kill()
        self._thread.join()
        self._loss_handled.set()  # wakes threads that wait in `or_rank_lost`
        for rank in self.ranks:
            rank.commands.close()
            rank.weights.close()

    def _watch(self, child_ends: Sequence[tuple[Connection, Connection]], started: threading.Event) -> None:
        alive: dict[Connection, int] = {}
        try:
            for i, (commands, weights) in enumerate(child_ends):
                liveness, child_liveness = Pipe(duplex=False)
                alive[liveness] = i
                self._processes.append(self._start(self.ranks[i].spec, commands, weights, child_liveness))
                for end in (commands, weights, child_liveness):
                    end.close()
        finally:
            started.set()
        while alive:
            for liveness in [liveness for liveness in wait(list(alive)) if isinstance(liveness, Connection)]:
                i = alive.pop(liveness)
                liveness.close()
                self._reap(i)

    def _start(
        self, spec: RankSpec, commands: Connection, weights: Connection, liveness: Connection
    ) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(p for p in (str(_ROOT), os.environ.get("PYTHONPATH")) if p)
        return subprocess.Popen(
            [
                sys.executable,
                "-m",
                "stages.engines.embedded.ranks.processes",
                str(commands.fileno()),
                str(weights.fileno()),
            ],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(spec.threads), "OMP_WAIT_POLICY": "PASSIVE"},
            stdin=subprocess.DEVNULL,
            pass_fds=[end.fileno() for end in (commands, weights, liveness)],
        )

    def _reap(self, i: int) -> None:
        code = self._processes[i].wait()
        if self._closing or self._lost is not None:
            return
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"
        self._lost = f"{self.ranks[i].spec.name} of the engine (process {self._processes[i].pid}) {how}"
        for process in self._processes:
            process.kill()
        try:
            if self._on_lost is not None:
                self._on_lost(self._lost)
        finally:
            self._loss_handled.set()


def main() -> None:
    for of_terminal in (signal.SIGINT, signal.SIGHUP):  # both are meant for the process that started this one
        signal.signal(of_terminal, signal.SIG_IGN)
    end_with_parent()
    commands, weights = (Connection(int(number)) for number in sys.argv[1:3])
    with suppress(EOFError, ConnectionResetError):  # the parent has ended, or closed the connection
        spec: RankSpec = commands.recv()
        torch.set_num_threads(spec.threads)
        if torch.device(spec.device).type == "cuda":
            torch.cuda.set_device(spec.device)
        commands.send(READY)
        model = RankModel(spec)
        prepared: dict[int, LlamaWeights] = {}
        threading.Thread(target=_receive_weights, args=(weights, model, prepared), daemon=True).start()
        for command in _received(commands):
            _carry_out(command, model, prepared, commands)


def _carry_out(command: Command, model: RankModel, prepared: dict[int, LlamaWeights], commands: Connection) -> None:
    if isinstance(command, Batch):
        draws = model.run(command)
        if draws is not None:
            commands.send(draws)
    elif isinstance(command, Swap):
        model.set_weights(prepared.pop(command.number))
        commands.send(READY)
    elif isinstance(command, ReadCache):
        commands.send(model.read_cache(command.blocks, command.num_positions))
    elif isinstance(command, WriteCache):
        model.write_cache(command.blocks, command.copied)
    else:
        model.sleep() if command == "sleep" else model.wake()
        commands.send(READY)


def _received(commands: Connection) -> Iterator[Command]:
    while True:
        yield commands.recv()


def _receive_weights(weights: Connection, model: RankModel, prepared: dict[int, LlamaWeights]) -> None:
    """Receive weights until the connection closes. Then end the process, since the main thread may be stuck in a
    collective."""
    try:
        while True:
            message: Prepare | Drop = weights.recv()
            if isinstance(message, Drop):
                prepared.pop(message.number, None)
            else:
                _prepare(message, weights, model, prepared)
    except (EOFError, OSError):
        os._exit(1)


def _prepare(message: Prepare, weights: Connection, model: RankModel, prepared: dict[int, LlamaWeights]) -> None:
    """Receive and prepare the announced weights. Before the tensors are sent, answer None, or an error if there is too
    little memory. If all ranks have answered None, receive and pack the tensors, and answer again: None or an error."""
    try:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in message.tensors}
    except (RuntimeError, MemoryError) as error:  # torch reports missing memory as RuntimeError
        weights.send(str(error))
        return
    weights.send(None)
    if not weights.recv():  # the weights do not fit into another rank's memory
        return
    for tensor in tensors.values():
        receive_bytes(weights, tensor)
    try:
        prepared[message.number] = model.prepare(tensors)
    except (WeightsError, RuntimeError, MemoryError) as error:
        weights.send(str(error))
        return
    finally:
        model.end_threads()
    weights.send(None)


if __name__ == "__main__":
    main()
