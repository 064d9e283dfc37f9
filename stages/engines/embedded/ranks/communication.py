"""Communication between ranks.

`RankCommunicator` exchanges sums and draws among the ranks of a stage, and hidden states from stage to stage. It uses
torch.distributed's backends directly, without their global state, since the process may belong to other groups, such as
Megatron's.

Every other rank has two connections to rank 0. Over the first it gets commands, which it carries out one after the
other. Over the second it gets new weights, at the same time as commands. A message announces the tensors, and their raw
bytes follow it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from jaxtyping import Float32, Float64

from stages.engines.embedded.batch import Batch

_TIMEOUT = timedelta(minutes=30)
"""Time after which a transfer between ranks fails if the other rank neither takes part nor ends. Callers that wait for
the whole replica use a shorter timeout."""


class RankCommunicator:
    """Owns this rank's connections to the other ranks.

    On CPUs it uses gloo. Each rank sends its part to all others, and every rank adds the parts in the order of the
    ranks. So a sum has the same bits on every rank and in any batch. A ring all-reduce does not guarantee this, since
    its order of adding differs from piece to piece of a tensor. For the small tensors of decoding, the exchange also
    takes only a tenth of the time of gloo's all-reduce. On GPUs the communicator uses NCCL's all-reduce."""

    def __init__(self, folder: Path, rank: int, tensor: int, pipeline: int, device: torch.device) -> None:
        """Connect to the other ranks, and wait until all have connected. `folder`: a new folder that only the ranks of
        this engine share."""
        self._tensor, self._index, self._stage = tensor, rank % tensor, rank // tensor
        self._device = device
        store = dist.FileStore(str(folder / "store"), tensor * pipeline)
        self._peers: Any = _group(store, f"stage{self._stage}", self._index, tensor, device) if tensor > 1 else None
        """Process group of this stage's ranks; None if the stage has one rank. The type is Any, since torch has no
        common type for gloo and NCCL."""
        self._stages: Any = _group(store, f"i{self._index}", self._stage, pipeline, device) if pipeline > 1 else None
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._pipeline = pipeline
        self.waited_s = 0.0
        """Seconds for which this rank has waited for other ranks since the start, transfers included."""

    @property
    def total(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The all-reduce over the ranks of this stage: a function that takes this rank's part and returns the float32
        sum of all parts. None if the stage has one rank."""
        return None if self._peers is None else self._total

    def _total(self, part: torch.Tensor) -> Float32[torch.Tensor, "*shape"]:
        started = time.perf_counter()
        part = part.float().contiguous()
        if self._device.type == "cuda":
            self._peers.allreduce([part]).wait()
            total = part
        else:
            parts = [part if i == self._index else torch.empty_like(part) for i in range(self._tensor)]
            others = [i for i in range(self._tensor) if i != self._index]
            works = [self._peers.send([part], i, 0) for i in others]
            works += [self._peers.recv([parts[i]], i, 0) for i in others]
            for work in works:
                work.wait()
            total = parts[0] + parts[1]
            for other in parts[2:]:
                total += other
        self.waited_s += time.perf_counter() - started
        return total

    def gather(self, part: Float64[torch.Tensor, "rows 5"]) -> Float64[torch.Tensor, "ranks rows 5"] | None:
        """Collect the parts of all ranks of this stage. Return them on the stage's first rank, and None on the other
        ranks."""
        started = time.perf_counter()
        gathered = None
        if self._index:
            self._peers.send([part.contiguous()], 0, 0).wait()
        else:
            gathered = part.new_empty(self._tensor, *part.shape)
            gathered[0] = part
            for i in range(1, self._tensor):
                self._peers.recv([gathered[i]], i, 0).wait()
        self.waited_s += time.perf_counter() - started
        return gathered

    def receive(self, rows: int, width: int) -> Float32[torch.Tensor, "rows width"]:
        """Receive hidden states from the stage before."""
        started = time.perf_counter()
        hidden = torch.empty(rows, width, device=self._device)
        self._stages.recv([hidden], self._stage - 1, 0).wait()
        self.waited_s += time.perf_counter() - started
        return hidden

    def send(self, hidden: Float32[torch.Tensor, "rows width"]) -> None:
        """Send hidden states to the next stage without waiting for their arrival. The tensor must not change
        afterwards."""
        self._sent.append((self._stages.send([hidden], self._stage + 1, 0), hidden))
        while self._sent[0][0].is_completed() or len(self._sent) > 2 * self._pipeline:
            self._sent.popleft()[0].wait()
            if not self._sent:
                break

    def close(self) -> None:
        self._sent.clear()
        self._peers = self._stages = None


def _group(store: Any, name: str, rank: int, size: int, device: torch.device) -> Any:
    prefixed = dist.PrefixStore(name, store)
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _TIMEOUT
        return dist.ProcessGroupNCCL(prefixed, rank, size, options)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]  # all ranks are on this host
    options._timeout = _TIMEOUT
    return dist.ProcessGroupGloo(prefixed, rank, size, options)


# ---- messages from rank 0 --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prepare:
    """Message that announces new weights. It contains a number by which later messages name these weights (`Swap`,
    `Drop`), and the name, dtype and shape of each tensor.

    The messages after this one:

    - The rank answers None if the weights fit into its memory, and the text of an error otherwise.
    - Rank 0 replies to each rank that answered None. If the weights fit on all ranks, it sends True and then the bytes
      of one tensor after the other. Otherwise it sends False, and nothing follows.
    - After the bytes the rank answers None if it could pack the weights, and the text of an error otherwise.
    """

    number: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Drop:
    """Message that tells a rank to drop the prepared weights with this number, if it has them. There is no answer."""

    number: int


@dataclass(frozen=True)
class Swap:
    """Order to use the weights of this number from the next pass on. The answer is `READY`."""

    number: int


@dataclass(frozen=True, eq=False)
class ReadCache:
    """Request for a copy of the rank's part of a row's keys and values. The answer is the result of `KVCache.read`."""

    blocks: tuple[int, ...]
    num_positions: int


@dataclass(frozen=True, eq=False)
class WriteCache:
    """Message that tells a rank to write keys and values into blocks of its cache. There is no answer. `copied`: the
    part of the layers and heads that the rank holds, in the form of `KVCache.read`."""

    blocks: tuple[int, ...]
    copied: np.ndarray


Command = Batch | Swap | ReadCache | WriteCache | Literal["sleep", "wake"]
READY = "ready"
"""Answer of a rank when its process has started, and after it has swapped weights, fallen asleep or woken up."""


def send_bytes(connection: Connection, tensor: torch.Tensor) -> None:
    """Write the bytes of a contiguous CPU tensor to a connection, without pickling them and without a frame around
    them."""
    view = tensor.view(-1).view(torch.uint8).numpy().data
    while view:
        view = view[os.write(connection.fileno(), view) :]


def receive_bytes(connection: Connection, tensor: torch.Tensor) -> None:
    """Fill a contiguous CPU tensor with bytes from a connection. Raises EOFError if the connection ends too early."""
    view = tensor.view(-1).view(torch.uint8).numpy().data
    while view:
        num = os.readv(connection.fileno(), [view])
        if num == 0:
            raise EOFError
        view = view[num:]
