"""What goes from rank to rank beside the commands: sums and draws among the ranks that share blocks, hidden states from
stage to stage. May import torch, stages.engines.

The groups are torch.distributed's backends used directly, without its global state: the process may belong to other
groups, Megatron's for one.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from jaxtyping import Float32, Float64

_TIMEOUT = timedelta(minutes=30)
"""For a rank that neither answers nor dies: whoever waits for the whole replica has a shorter one."""


class RankCommunicator:
    """Owns this rank's connections to the others.

    gloo between CPUs, where parts are exchanged directly and added in the order of the ranks: so a sum has the same
    bits on every rank and in any batch (a ring adds each piece of a tensor in another order), and at decoding's sizes
    it takes a tenth of gloo's all-reduce. NCCL's own all-reduce between GPUs."""

    def __init__(self, folder: Path, rank: int, tensor: int, pipeline: int, device: torch.device) -> None:
        """Blocks until all ranks have come. `folder`: shared by them, empty at first."""
        self._tensor, self._index, self._stage = tensor, rank % tensor, rank // tensor
        self._device = device
        store = dist.FileStore(str(folder / "store"), tensor * pipeline)
        self._peers: Any = _group(store, f"stage{self._stage}", self._index, tensor, device) if tensor > 1 else None
        """Of this stage; torch gives its backends no common type."""
        self._stages: Any = _group(store, f"i{self._index}", self._stage, pipeline, device) if pipeline > 1 else None
        self._sent: deque[tuple[Any, torch.Tensor]] = deque()
        self._pipeline = pipeline
        self.waited_s = 0.0
        """Seconds spent here, since the start."""

    @property
    def total(self) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The float32 sum over the ranks of this stage; None where there is one."""
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
        """All parts, on the first rank of the stage; None on the others."""
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
        """Hidden states from the stage before."""
        started = time.perf_counter()
        hidden = torch.empty(rows, width, device=self._device)
        self._stages.recv([hidden], self._stage - 1, 0).wait()
        self.waited_s += time.perf_counter() - started
        return hidden

    def send(self, hidden: Float32[torch.Tensor, "rows width"]) -> None:
        """To the next stage; does not wait until they have arrived. They must not be changed any more."""
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
