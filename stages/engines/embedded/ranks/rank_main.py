"""The process of a rank other than 0: `python -m THIS_MODULE ORDERS WEIGHTS` (file descriptors).

    main thread      orders: passes, swaps, sleep and wake, one after the other ──► draws, from the last stage
    second thread    weights: takes tensors as they come, packs them beside the old ones, says whether it could

It lives as long as the thread that started it: orders that end, end it. May import torch, stages.engines.
"""

from __future__ import annotations

import ctypes
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
    Drop,
    Order,
    Prepare,
    ReadCache,
    Swap,
    WriteCache,
    receive_bytes,
)
from stages.engines.embedded.ranks.rank_model import RankModel, RankSpec
from stages.engines.protocol import WeightsError

_PR_SET_PDEATHSIG = 1


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that owns this one
    _die_with_parent()
    orders, weights = (Connection(int(number)) for number in sys.argv[1:3])
    with suppress(EOFError, ConnectionResetError):  # the parent has gone, or wants no more
        spec: RankSpec = orders.recv()
        torch.set_num_threads(spec.threads)
        if torch.device(spec.device).type == "cuda":
            torch.cuda.set_device(spec.device)
        orders.send(READY)
        model = RankModel(spec)
        prepared: dict[int, LlamaWeights] = {}
        threading.Thread(target=_take_weights, args=(weights, model, prepared), daemon=True).start()
        for order in _received(orders):
            _obey(order, model, prepared, orders)


def _obey(order: Order, model: RankModel, prepared: dict[int, LlamaWeights], orders: Connection) -> None:
    if isinstance(order, Batch):
        draws = model.run(order)
        if draws is not None:
            orders.send(draws)
    elif isinstance(order, Swap):
        model.adopt(prepared.pop(order.number))
    elif isinstance(order, ReadCache):
        orders.send(model.read_cache(order.blocks, order.num_positions))
    elif isinstance(order, WriteCache):
        model.write_cache(order.blocks, order.copied)
    else:
        model.sleep() if order == "sleep" else model.wake()
        orders.send(READY)


def _received(orders: Connection) -> Iterator[Order]:
    while True:
        yield orders.recv()


def _take_weights(weights: Connection, model: RankModel, prepared: dict[int, LlamaWeights]) -> None:
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
    if not weights.recv():  # another rank has no room
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


def _die_with_parent() -> None:
    """Also where this process is stopped, or stuck in a native call: Linux kills it when the thread that started it
    ends. Elsewhere the connections' end has to do."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main()
