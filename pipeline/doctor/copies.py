"""Copies between devices, as a process of its own: `python -m pipeline.doctor.copies RESULT DEVICE...`.

It copies COPY_BYTES from the host to each device and back, and from each device to each other. Of each copy it measures
the rate, and compares a checksum that the target computes with the source's.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import torch
from torch import Tensor

from storage.codec import encode
from storage.host import end_with_parent

COPY_BYTES = 256 << 20
PIECE = 1 << 20
"""Words that a checksum adds up at a time."""
PIECE_FACTOR = 6364136223846793005
"""Knuth's multiplier for 64-bit words."""


@dataclass(frozen=True)
class Copies:
    """The copies by name: "0->1" from GPU 0 to GPU 1, "host->0" and "0->host"."""

    bytes_per_s: dict[str, float]
    wrong: list[str]
    """Copies whose checksum is not the source's."""


def measure(devices: list[str], num_bytes: int) -> Copies:
    """Return the rates of all copies between these devices of torch and the host, and the copies that are wrong."""
    rates, wrong = dict[str, float](), list[str]()
    generator = torch.Generator().manual_seed(0)
    host = torch.randint(-(2**62), 2**62, (num_bytes // 8,), generator=generator)
    if devices[0] != "cpu":
        host = host.pin_memory()
    expected = checksum(host)
    there = []

    def copy(name: str, source: Tensor, target: Tensor) -> Tensor:
        print(f"copy {name}", flush=True)
        rates[name] = copy_rate(source, target)
        if checksum(target) != expected:
            wrong.append(name)
        return target

    for index, device in enumerate(devices):
        there.append(copy(f"host->{index}", host, torch.empty_like(host, device=device)))
        copy(f"{index}->host", there[index], torch.empty_like(host, pin_memory=host.is_pinned()))
    for source, target in permutations(range(len(devices)), 2):
        copy(f"{source}->{target}", there[source], torch.empty_like(there[target]))
    return Copies(rates, wrong)


def copy_rate(source: Tensor, target: Tensor) -> float:
    """Copy a tensor into another, and return the bytes per second of the best of four copies."""
    best = 0.0
    for _ in range(4):  # the first one opens the connection
        target.zero_()
        _wait(source, target)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(source, target)
        best = max(best, source.nbytes / (time.perf_counter() - began))
    return best


def checksum(words: Tensor) -> int:
    """Return a sum of 64-bit words modulo 2^64, in which each has a factor that depends on its position. It is exact,
    so every device computes the same number."""
    factors = torch.arange(1, 2 * PIECE, 2, device=words.device)
    total = 0
    for piece in words.split(PIECE):
        total = (total * PIECE_FACTOR + int((piece * factors[: len(piece)]).sum())) % 2**64
    return total


def _wait(*tensors: Tensor) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)


def main() -> int:
    end_with_parent()
    result, *devices = sys.argv[1:]
    Path(result).write_text(encode(measure(devices, COPY_BYTES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
