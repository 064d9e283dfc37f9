"""What rank 0 sends to the other ranks of a model, over two connections: commands, carried out one after the other, and
new weights beside them. The bytes of tensors follow their announcement as they are.

May import numpy, torch, stages.engines.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Literal

import numpy as np
import torch

from stages.engines.embedded.batch import Batch


@dataclass(frozen=True)
class Prepare:
    """Weights to come under this number: names, dtypes and shapes of tensors. Answered by why they do not fit into
    memory, or None; on True their bytes follow, one tensor after the other, and the answer is why they cannot be
    packed, or None."""

    number: int
    tensors: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Drop:
    """The weights of that number, if there are any, are not wanted."""

    number: int


@dataclass(frozen=True)
class Swap:
    """The weights of that number, from the next pass on. Answered by `READY`."""

    number: int


@dataclass(frozen=True, eq=False)
class ReadCache:
    """Answered by a copy of what `KVCache.read` says of the rank's part."""

    blocks: tuple[int, ...]
    num_positions: int


@dataclass(frozen=True, eq=False)
class WriteCache:
    """The reverse, with the rank's part."""

    blocks: tuple[int, ...]
    copied: np.ndarray


Command = Batch | Swap | ReadCache | WriteCache | Literal["sleep", "wake"]
READY = "ready"
"""The answer of a rank that has begun, taken new weights into use, fallen asleep or woken up."""


def send_bytes(connection: Connection, tensor: torch.Tensor) -> None:
    """The bytes of a contiguous tensor on the CPU, as they are: pickling and framing would copy them."""
    view = tensor.view(-1).view(torch.uint8).numpy().data
    while view:
        view = view[os.write(connection.fileno(), view) :]


def receive_bytes(connection: Connection, tensor: torch.Tensor) -> None:
    """Fills a contiguous tensor on the CPU. Raises EOFError where they end too early."""
    view = tensor.view(-1).view(torch.uint8).numpy().data
    while view:
        num = os.readv(connection.fileno(), [view])
        if num == 0:
            raise EOFError
        view = view[num:]
