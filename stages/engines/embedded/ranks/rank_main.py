"""The process of a rank other than 0: `python -m THIS_MODULE COMMANDS WEIGHTS` (file descriptors).

    main thread      commands, one after the other: passes, swaps, sleep and wake ──► draws, from the last stage
    second thread    weights: receives tensors, packs them beside the old ones, and answers if it succeeded

The process ends with the thread that started it, or when the commands end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import Connection

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
from stages.native.processes import end_with_parent


def main() -> None:
    for of_terminal in (signal.SIGINT, signal.SIGHUP):  # both are for the process that owns this one
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
    """Receive weights until the connection closes, then end the process, since the main thread may hang in a
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
    """Prepare weights. Answers None or a problem twice: before the tensors come, and when they are packed."""
    try:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, dtype, shape in message.tensors}
    except (RuntimeError, MemoryError) as error:  # torch reports missing memory as RuntimeError
        weights.send(str(error))
        return
    weights.send(None)
    if not weights.recv():  # they do not fit into another rank's memory
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
