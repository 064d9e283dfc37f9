"""The process of a rank other than 0: `python -m THIS_MODULE COMMANDS WEIGHTS` (file descriptors).

    main thread      commands: passes, swaps, sleep and wake, one after the other ──► draws, from the last stage
    second thread    weights: receives tensors as they come, packs them beside the old ones, answers whether it could

It lives as long as the thread that started it: when the commands end, so does it. May import torch, stages.engines.
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
from stages.engines.embedded.model.llama import LlamaWeights
from stages.engines.embedded.ranks.commands import (
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
from stages.native.parent import end_with_parent


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns this one
    end_with_parent()
    commands, weights = (Connection(int(number)) for number in sys.argv[1:3])
    with suppress(EOFError, ConnectionResetError):  # the parent has gone, or wants no more
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
        model.adopt(prepared.pop(command.number))
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
    """The thread also ends the process when the parent has gone, should the other one be stuck in a collective."""
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
    """Answers what is wrong, if something is, before and after the tensors come."""
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
