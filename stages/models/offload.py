"""Move idle models between the device and the host's memory (`placement.gangs.NAME.offload`).

    none         everything stays on the device
    gradients    gradient buffers exist only during their model's update
    idle         as `gradients`, and only the role at work is on the device: its weights, and for an update or a
                 checkpoint its master weights and moments. All else is in (pinned) host memory

Only the storage under a tensor is freed and allocated again, never the tensor itself. So Megatron's buffers, the
parameters and `main_grad`s that are views of them, and the optimizer's keys stay the same objects. After `wake` they
have the same bits as before. CI moves storages on a CPU, where the mechanism is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage


def has_own_memory() -> bool:
    """Return True if the models run on CUDA. Then the device has a memory of its own, which becomes free when models
    move to the host's memory."""
    return torch.cuda.is_available()


class OffloadableTensors:
    """Owns the host copies of some tensors' storages while the storages are offloaded. Reading an offloaded tensor
    raises no error, so call `wake` first."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors` returns the tensors to offload. It is called on every `sleep`, since an optimizer creates its state
        only in its first step."""
        self._tensors = tensors
        self._asleep: list[tuple[UntypedStorage, Tensor]] = []
        self._copies: list[Tensor] = []
        """Host buffers. They are kept after `wake` for the next `sleep`, since pinning memory takes longer than the
        copy."""

    def sleep(self) -> None:
        """Copy the storages to the host and free them. Does nothing if they are offloaded already."""
        if self._asleep:
            return
        spare, self._copies = self._copies, []
        for storage in storages(self._tensors()):
            copy = next((own for own in spare if own.nbytes == storage.nbytes()), None)
            if copy is None:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
            else:
                spare = [own for own in spare if own is not copy]
            copy.copy_(_bytes(storage), non_blocking=True)
            self._copies.append(copy)
            self._asleep.append((storage, copy))
        for storage, _ in self._asleep:
            storage.resize_(0)
        _give_back(self._asleep[0][0].device if self._asleep else torch.device("cpu"))

    def wake(self) -> None:
        """Allocate the storages again and copy their bits back. Does nothing if no storage is offloaded."""
        for storage, copy in self._asleep:
            storage.resize_(copy.nbytes)
            _bytes(storage).copy_(copy, non_blocking=True)
        self._asleep = []


def storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """Yield each storage of the tensors once. Empty storages are left out."""
    seen = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            seen[storage._cdata] = storage
    yield from seen.values()


def release(buffers: Iterable[Tensor]) -> None:
    """Free the storages of these buffers. Their contents are lost. Each buffer must fill its whole storage."""
    device = torch.device("cpu")
    for buffer in buffers:
        device = buffer.device
        buffer.untyped_storage().resize_(0)
    _give_back(device)


def allocate(buffers: Iterable[Tensor]) -> None:
    """Allocate the storages of released buffers again. Their contents are undefined."""
    for buffer in buffers:
        if buffer.untyped_storage().nbytes() != buffer.nbytes:
            buffer.untyped_storage().resize_(buffer.nbytes)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_back(device: torch.device) -> None:
    """Return cached memory to the device, since another process may need it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
