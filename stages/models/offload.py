"""Where the memory of a gang's models lies while they do nothing (`placement.gangs.NAME.offload`).

    none         everything stays on the device
    gradients    gradient buffers exist during their model's update only
    idle         and of the gang's roles only the one at work is on the device: of the policy or critic its weights, for
                 an update or a checkpoint its masters and moments too; what is not lies in (pinned) host memory

What comes and goes is the storage under tensors, never a tensor: Megatron's buffers, the parameters and `main_grad`s
that are views of them, the optimizer's keys stay the objects that they are, and see the same bits when the storage is
back. On CUDA written and never run; the mechanism is the same on a CPU, where the tests move storages.

May import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage


def has_own_memory() -> bool:
    """Whether what is moved to the host leaves memory free where models are computed."""
    return torch.cuda.is_available()


class Residence:
    """Owns the host's copies of what lies under some tensors, and those tensors' storages while they sleep. To read a
    sleeping tensor is an error that nothing catches: wake first."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        """`tensors`: asked anew each time, since an optimizer makes its state with the first step."""
        self._tensors = tensors
        self._asleep: list[tuple[UntypedStorage, Tensor]] = []
        self._copies: list[Tensor] = []
        """Kept while awake, too: pinning memory takes longer than the copy."""

    def sleep(self) -> None:
        """Copies to the host and frees; nothing if asleep already."""
        if self._asleep:
            return
        spare, self._copies = self._copies, []
        for storage in storages(self._tensors()):
            copy = next((own for own in spare if own.nbytes == storage.nbytes()), None)
            if copy is None:
                copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.is_cuda)
            else:
                spare = [own for own in spare if own is not copy]
            copy.copy_(_bytes(storage), non_blocking=True)
            self._copies.append(copy)
            self._asleep.append((storage, copy))
        for storage, _ in self._asleep:
            storage.resize_(0)
        _give_back(self._asleep[0][0].device if self._asleep else torch.device("cpu"))

    def wake(self) -> None:
        """Brings everything back, bit for bit; nothing if awake already."""
        for storage, copy in self._asleep:
            storage.resize_(copy.nbytes)
            _bytes(storage).copy_(copy, non_blocking=True)
        self._asleep = []


def storages(tensors: Iterable[Tensor]) -> Iterator[UntypedStorage]:
    """What lies under some tensors, each storage once, none that is empty."""
    seen = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            seen[storage.data_ptr()] = storage
    yield from seen.values()


def release(buffers: Iterable[Tensor]) -> None:
    """Frees what lies under whole buffers, whose contents are not needed again."""
    device = torch.device("cpu")
    for buffer in buffers:
        device = buffer.device
        buffer.untyped_storage().resize_(0)
    _give_back(device)


def allocate(buffers: Iterable[Tensor]) -> None:
    """Undoes `release`, where that was done; what the buffers hold then is undefined."""
    for buffer in buffers:
        if buffer.untyped_storage().nbytes() != buffer.nbytes:
            buffer.untyped_storage().resize_(buffer.nbytes)


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _give_back(device: torch.device) -> None:
    """To the device, where another process may need it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
