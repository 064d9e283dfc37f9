"""A fake GPU: tensors on it have shapes and sizes, but no numbers. Code for CUDA runs on it unchanged, with a model of
any size, and a `Recorder` records the memory and the collectives that the code uses.

    with recording(NoNumbers()) as recorder:    one rank of a gang; the other ranks do not exist
        ...                                     tensors on `fake_device()`
        recorder.usage.peak, recorder.collectives

The device uses torch's backend for devices that are implemented in Python. Attention and norms count as the kernels
that torch would choose on a CUDA GPU. These are flash attention for 16-bit heads, memory-efficient attention for
float32 heads, a matrix of scores for float32 heads that share keys, and a fused norm. A program that reads numbers from
a tensor gets 0, and False for a condition (`NoNumbers`). The rounding and fragmentation of a GPU's allocator and the
workspaces of libraries are not recorded.

A process that has called `fake_device` cannot use another accelerator afterwards.
"""

from __future__ import annotations

import math
import pickle
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.backend_registration as backends
from torch import Tensor, UntypedStorage
from torch._C._distributed_c10d import FakeWork, ProcessGroup
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

_NAME = "fakegpu"
DEVICE, HOST, PINNED, FILES = "device", "host", "pinned", "files"
"""The places of a tensor. PINNED: host memory that a GPU can read. FILES: mapped pages of the model's files, which the
processes of a host share."""


@cache
def fake_device() -> torch.device:
    """Return torch's device for the fake GPU. The first call registers it with torch."""
    backends._setup_privateuseone_for_python_backend(_NAME)
    return torch.device(_NAME, 0)


@dataclass(frozen=True)
class Collective:
    """A collective call of one rank."""

    operation: str
    group: str
    num_ranks: int
    """Number of ranks in the group."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the tensors that the rank gives to the call or gets from it, whichever have more bytes. Empty for
    pickled objects."""
    num_bytes: int


@dataclass
class Usage:
    """Place -> bytes: `live` has the bytes in use, `peak` the maximum in use since the last `restart`."""

    live: Counter[str] = field(default_factory=Counter)
    peak: Counter[str] = field(default_factory=Counter)

    def add(self, place: str, num_bytes: int) -> None:
        self.live[place] += num_bytes
        self.peak[place] = max(self.peak[place], self.live[place])

    def restart(self) -> None:
        self.peak = Counter(self.live)


class Recorder(TorchDispatchMode):
    """Records the memory, the operations and the collectives of one rank. A storage counts as in use from the operation
    that made it until nothing refers to the storage."""

    def __init__(self) -> None:
        super().__init__()
        self.usage = Usage()
        self.operations: Counter[str] = Counter()
        """Name of a torch operation -> number of its calls."""
        self.collectives: list[Collective] = []
        self.group_names: dict[str, str] = {}
        """torch's name of a process group -> readable name."""
        self.reads_files = False
        """True while new tensors count as pages of the model's files (FILES)."""
        self._counted: dict[int, tuple[str, int]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and each call through the compiler's guard would take as long as recording it.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._collective(func, args)
        self.operations[func.name()] += 1
        result = func(*args, **kwargs)
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._count(tensor, PINNED if kwargs.get("pin_memory") else HOST)
        return result

    def record_objects(self, operation: str, group: ProcessGroup | None, item: object) -> None:
        """Record a collective of pickled objects. `group`: None for the whole gang."""
        group = dist.group.WORLD if group is None else group
        assert group is not None
        name = self.group_names.get(group.group_name, "gang")
        self.collectives.append(Collective(operation, name, group.size(), (), len(pickle.dumps(item))))

    def resize(self, storage: UntypedStorage, num_bytes: int) -> None:
        """Record that a storage gets another size in place."""
        if storage._cdata in self._counted:
            place, before = self._counted[storage._cdata]
            self._counted[storage._cdata] = place, num_bytes
            self.usage.add(place, num_bytes - before)

    def _collective(self, func: Any, args: Sequence[Any]) -> Any:
        """Record a collective without communication. The tensors are not changed. Return a completed work handle. If
        the operation also returns tensors, return a pair: these tensors, then the handle."""
        named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
        group = ProcessGroup.unbox(named.pop("process_group"))
        sides = [[leaf for leaf in tree_leaves(side) if isinstance(leaf, Tensor)] for side in named.values()]
        largest = max(sides, key=_bytes)
        name, operation = self.group_names.get(group.group_name, "gang"), func._schema.name.removeprefix("c10d::")
        shapes = tuple(tuple(tensor.shape) for tensor in largest)
        self.collectives.append(Collective(operation.strip("_"), name, group.size(), shapes, _bytes(largest)))
        done = FakeWork().boxed()
        return done if len(func._schema.returns) == 1 else (args[0], done)

    def _count(self, tensor: Tensor, on_host: str) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._counted or not num_bytes:
            return
        place = DEVICE if tensor.device.type == _NAME else FILES if self.reads_files else on_host
        if place == PINNED:
            num_bytes = 1 << math.ceil(math.log2(num_bytes))  # torch's allocator of pinned memory rounds up
        self._counted[key] = place, num_bytes
        self.usage.add(place, num_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        place, num_bytes = self._counted.pop(key)
        self.usage.add(place, -num_bytes)


_READS = (Tensor.eq, Tensor.__eq__, torch.all, Tensor.item, Tensor.__bool__)


class _FakeTensors(FakeTensorMode):
    """torch's mode for fake tensors. It never initialises the device, not even for `torch.tensor` of Python numbers."""

    avoid_device_init = True


class NoNumbers(TorchFunctionMode):
    """A mode for code that reads the numbers of fake tensors, which have none. A number is read as 0, and a condition
    as False. The method `numpy` gives zeros. In the context of `recording` the method `tolist` gives the list in the
    field `lists`. Attention and norms use the operations that CUDA would use."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: list[int] = []
        """The answer to `tolist`."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _READS and not any(isinstance(leaf, FakeTensor) for leaf in tree_leaves(args)):
            with unset_fake_temporarily():  # states of random generators are real tensors
                return func(*args, **kwargs)
        if func in (Tensor.item, Tensor.__float__):
            return 0.0
        if func is Tensor.__bool__:
            return False
        if func is torch.tensor:  # it reads the numbers of tensors in a list
            args = (tree_map_only(Tensor, lambda _: 0.0, args[0]), *args[1:])
        if func is Tensor.numpy:
            dtype = np.dtype(str(args[0].dtype).removeprefix("torch."))
            return np.broadcast_to(np.zeros((), dtype), tuple(args[0].shape))
        if func is F.scaled_dot_product_attention and args[0].dtype.itemsize == 2:
            attend = torch.ops.aten._scaled_dot_product_flash_attention
            return attend(*args[:3], 0.0, kwargs["is_causal"], scale=kwargs["scale"])[0]
        if func is F.scaled_dot_product_attention and args[0].shape[1] == args[1].shape[1]:
            attend = torch.ops.aten._scaled_dot_product_efficient_attention
            return attend(*args[:3], None, torch.is_grad_enabled(), 0.0, kwargs["is_causal"], scale=kwargs["scale"])[0]
        if func is F.rms_norm:
            return _FusedNorm.apply(args[0], kwargs["weight"])
        return func(*args, **kwargs)


class _FusedNorm(torch.autograd.Function):
    """CUDA's RMS norm without its arithmetic: it only makes tensors of the right shapes. It keeps its input and one
    number per row for the backward pass, as CUDA does. (Other devices keep the normed rows, too.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[:-1], dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


@contextmanager
def recording(numbers: NoNumbers) -> Iterator[Recorder]:
    """Return a context in which all tensors are fake. It yields a recorder of the operations in it.

    Collectives of pickled objects return this rank's object for every rank."""
    recorder = Recorder()
    resize = UntypedStorage.resize_

    def resized(storage: UntypedStorage, num_bytes: int) -> UntypedStorage:
        recorder.resize(storage, num_bytes)
        return resize(storage, num_bytes)

    def all_gather_object(parts: list[Any], item: Any, group: ProcessGroup | None = None) -> None:
        recorder.record_objects("all_gather_object", group, item)
        parts[:] = [item] * len(parts)

    def broadcast_object_list(items: list[Any], group: ProcessGroup | None = None, **_: Any) -> None:
        recorder.record_objects("broadcast_object_list", group, items)

    with ExitStack() as stack:
        for replacement in (all_gather_object, broadcast_object_list):
            stack.enter_context(replaced(dist, replacement.__name__, replacement))
        stack.enter_context(replaced(UntypedStorage, "resize_", resized))
        stack.enter_context(replaced(FakeTensor, "tolist", lambda tensor: list(numbers.lists)))
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.enter_context(_FakeTensors())
        stack.enter_context(recorder)
        stack.enter_context(numbers)
        yield recorder


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Return a context in which an attribute has another value."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
