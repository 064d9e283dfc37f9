"""Measure copies between devices, in a process of its own: `python -m pipeline.doctor.copies RESULT DEVICE...`.

COPY_BYTES are copied from the host to each device, from each device to the host, and between each pair of devices in
both directions. Each copy's rate is measured, and the target's checksum is compared with the source's checksum.
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
"""Number of 64-bit words that `checksum` adds up at a time."""
PIECE_FACTOR = 6364136223846793005
"""Knuth's multiplier for 64-bit words. `checksum` multiplies its sum by this number before it adds the next piece."""


@dataclass(frozen=True)
class CopyResult:
    """The results of all copies. A copy is named by source and target, for example "0->1" from GPU 0 to GPU 1, or
    "host->0" from the host to GPU 0."""

    bytes_per_s: dict[str, float]
    """Name of a copy -> its rate in bytes per second."""
    wrong: list[str]
    """Names of the copies after which source and target had different checksums."""


def measure_copies(devices: list[str], num_bytes: int) -> CopyResult:
    """Copy `num_bytes` between the host and each of these torch devices, and between the devices. Return the rates, and
    the names of the copies that arrived with other bytes."""
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
    return CopyResult(rates, wrong)


def copy_rate(source: Tensor, target: Tensor) -> float:
    """Copy `source` into `target` four times. Return the rate of the fastest copy, in bytes per second."""
    best = 0.0
    for _ in range(4):  # the first copy opens the connection
        target.zero_()
        _wait(source, target)
        began = time.perf_counter()
        target.copy_(source, non_blocking=True)
        _wait(source, target)
        best = max(best, source.nbytes / (time.perf_counter() - began))
    return best


def checksum(words: Tensor) -> int:
    """Return a weighted sum of 64-bit words modulo 2^64. The weight of a word depends on its position. The sum is
    exact, so every device computes the same number."""
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
    Path(result).write_text(encode(measure_copies(devices, COPY_BYTES)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
