"""Create and destroy Megatron's parallel groups in this process. Megatron keeps its groups in globals, so a process has
one layout at a time. `run_megatron_without_cuda` lets the same code run on CPUs.

**Rendezvous.** The ranks of a gang connect to a key-value store in rank 0's process. No shared filesystem is needed.

    rank 0 listens ──► tcp://ADDRESS:PORT, given to the others ──► every rank: `store_of` ──► notes (`CollectiveWatch`),
       └── its own `store_of` serves there                                                      process groups

The store listens on one address only: the address of rank 0's host that the other ranks use. If all ranks are on one
host, this is loopback. The store has no authentication. It trusts its network, and so do the sockets of gloo and NCCL.

**Missing ranks.** A failed collective does not say which rank hangs. So every rank that sees a collective fail writes a
note into the store. A rank that hangs or has died writes none.

    rank 0   at update_policy[3] ──► all_reduce ──time-out──► "gave up" ──┐ each waits for the others' notes
    rank 1   at update_policy[3] ──► all_reduce ──time-out──► "gave up" ──┤
    rank 2   at logprob[3, 1]        hangs                                └─► RanksMissing: 2, last at logprob[3, 1]

With gloo the error is raised where the collective was called. With NCCL, the call raises or NCCL's watchdog ends the
process after the same time. If the watchdog is first, no error names the missing rank (never run on GPUs).
"""

from __future__ import annotations

import functools
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from queue import Empty, SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.tensor_parallel import random as megatron_random

from stages.models.config import LayoutConfig
from stages.models.protocol import ALONE, Rank, RanksMissing, StateError
from storage.host import loopback_only


@dataclass(frozen=True)
class ParallelRank:
    """A rank of a gang: its indices in the tensor (TP), pipeline (PP) and data-parallel (DP) groups."""

    tensor_rank: int
    tensor_size: int
    pipeline_rank: int
    pipeline_size: int
    data_rank: int
    data_size: int
    device: torch.device
    missing_ranks: CollectiveWatch

    @property
    def first_stage(self) -> bool:
        return self.pipeline_rank == 0

    @property
    def last_stage(self) -> bool:
        return self.pipeline_rank == self.pipeline_size - 1

    @property
    def is_output_rank(self) -> bool:
        """True if this rank passes on the model's outputs. All tensor-parallel ranks of the last stage compute the same
        outputs, and only tensor-parallel rank 0 passes them on."""
        return self.last_stage and self.tensor_rank == 0


def join(rank: Rank, layout: LayoutConfig, seed: int) -> ParallelRank:
    """Join the gang's process group and create Megatron's groups. Block until all ranks have joined.

    Raises StateError if this process already belongs to a gang.
    """
    if dist.is_initialized():
        raise StateError("this process already belongs to a gang: close its model host first")
    run_megatron_without_cuda()
    if is_on_one_host(rank):
        os.environ.update(loopback_only())  # Megatron creates its groups without an address
    torch.set_num_threads(rank.threads)
    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(rank.device)
    missing_ranks = CollectiveWatch(rank)
    with ExitStack() as undo:  # if joining fails, the process belongs to no gang
        undo.callback(leave)
        dist.init_process_group(
            "nccl" if cuda else "gloo",
            store=missing_ranks.store,
            rank=rank.index,
            world_size=rank.size,
            timeout=missing_ranks.timeout,
        )
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        joined = create_groups(layout, seed, device, missing_ranks)
        undo.pop_all()
    return joined


def create_groups(
    layout: LayoutConfig, seed: int, device: torch.device, missing_ranks: CollectiveWatch
) -> ParallelRank:
    """Create Megatron's groups after all ranks of the gang have joined its process group. Return this process's rank in
    the groups."""
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        create_gloo_process_groups=False,  # they would be second copies of the groups, which no code here uses
        distributed_timeout_minutes=missing_ranks.timeout / timedelta(minutes=1),
    )
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)  # creates generators that sequence parallelism needs
    return ParallelRank(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=layout.tensor,
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=layout.pipeline,
        data_rank=parallel_state.get_data_parallel_rank(),
        data_size=parallel_state.get_data_parallel_world_size(),
        device=device,
        missing_ranks=missing_ranks,
    )


def leave() -> None:
    """Destroy the groups and close their connections, so that the process can join another gang."""
    if not dist.is_initialized():
        return
    try:
        parallel_state.destroy_model_parallel()
    finally:
        dist.destroy_process_group()
        # A group closes its sockets when nothing refers to it any more. Megatron does not clear two of its globals and
        # a cache, and its modules have cyclic references.
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP = None
        parallel_state._INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO = None
        RotaryEmbedding.forward.cache_clear()
        gc.collect()


# ---- rendezvous ------------------------------------------------------------------------------------------


def store_of(rank: Rank) -> Any:
    """Return the store of the rank's gang, from which process groups can be created. Wait until rank 0 serves it."""
    if rank.rendezvous == ALONE:
        assert rank.size == 1, f"{rank.size} ranks cannot meet: {rank.rendezvous}"
        return dist.HashStore()
    address = urlsplit(rank.rendezvous)
    if address.scheme != "tcp":
        store, _, _ = next(dist.rendezvous(rank.rendezvous, rank.index, rank.size))
        return store
    host, port = str(address.hostname), int(address.port or 0)
    if rank.listening is None:
        return dist.TCPStore(host, port, None, False)
    return dist.TCPStore(host, port, None, True, wait_for_workers=False, master_listen_fd=rank.listening)


def is_on_one_host(rank: Rank) -> bool:
    """Return True if the gang's rendezvous is local, so that all ranks are on this host."""
    address = urlsplit(rank.rendezvous)
    return address.scheme != "tcp" or ip_address(str(address.hostname)).is_loopback


# ---- missing ranks ---------------------------------------------------------------------------------------

_RENDEZVOUS_S = 86_400.0
"""Maximum number of seconds that a rank waits until all ranks have joined. The limit is long, because the process that
starts the ranks has its own deadline, after which it ends the ranks."""
_LONGEST_ANSWER_S = 30.0
"""Maximum number of seconds to wait until the other ranks report that a collective failed for them too."""
_ANSWER_S = 2.0
"""Extra seconds for an answer of rank 0's process, after the time in which the other ranks can report a failed
collective. This process serves the store with the reports. If it has not answered by then, rank 0 counts as missing."""


class CollectiveWatch:
    """Finds out which ranks did not take part in a failed collective. Each rank writes two notes into the gang's
    key-value store (torch.distributed's, served by rank 0): first the name of the work that the rank begins, later that
    a collective has failed for this rank. After a failure, a rank without the second note is missing."""

    def __init__(self, rank: Rank) -> None:
        """Connect to the gang's key-value store (torch.distributed's), and block until every rank of the gang has
        joined."""
        self._index, self._size, self._timeout_s = rank.index, rank.size, rank.collective_timeout_s
        self.store: Any
        """The gang's store, from which process groups can be created."""
        self.store = store_of(rank)
        self._notes: Any = dist.PrefixStore("missing_ranks", self.store)
        self._note("came", "")
        self._notes.wait([f"came/{index}" for index in range(self._size)], timedelta(seconds=_RENDEZVOUS_S))

    @property
    def timeout(self) -> timedelta:
        """Time-out of every collective of the gang."""
        return timedelta(seconds=self._timeout_s)

    @contextmanager
    def collectives_of(self, where: str) -> Iterator[None]:
        """Return a context in which to make collective calls. `where` names the graph node that makes the calls.

        Raises:
            RanksMissing: a collective failed, and not every rank has seen it fail.
        """
        if self._size == 1:
            yield
            return
        self._note("at", where)
        try:
            yield
        except RuntimeError as error:
            if not _is_of_a_collective(error):
                raise
            try:
                missing = self._find_missing(where)
            except dist.DistNetworkError:  # rank 0, which keeps the notes, has ended; the driver notices this itself
                raise error from None
            if missing is None:
                raise
            raise missing from error

    def _find_missing(self, where: str) -> RanksMissing | None:
        """Return an error that names the ranks that are missing after a failed collective, or None. Each rank for which
        it failed notes this in the gang's store; a rank without a note is missing. Rank 0 serves the store: it is
        missing if it does not answer, and DistNetworkError is raised if it has ended. `where`: name of the work."""
        answer: SimpleQueue[RanksMissing | dist.DistNetworkError | None] = SimpleQueue()

        def ask() -> None:
            try:
                self._note("gave_up", where)
                missing = self._ranks_without_note()
                answer.put(RanksMissing(where, missing, self._detail(missing)) if missing else None)
            except dist.DistNetworkError as error:
                answer.put(error)

        Thread(target=ask, name="find-missing-ranks", daemon=True).start()
        try:
            received = answer.get(timeout=min(self._timeout_s, _LONGEST_ANSWER_S) + _ANSWER_S)
        except Empty:
            return RanksMissing(
                where, (0,), self._missing_text((0,), ["0 (which keeps the gang's notes, and does not answer)"])
            )
        if isinstance(received, dist.DistNetworkError):
            raise received
        return received

    def _ranks_without_note(self) -> tuple[int, ...]:
        """Wait until every rank has noted, in the gang's key-value store, that a collective failed for it. Return the
        ranks without such a note at the end of the wait. The wait is at most as long as the time-out of a collective,
        and at most `_LONGEST_ANSWER_S`."""
        notes = {index: f"gave_up/{index}" for index in range(self._size)}
        try:
            self._notes.wait([*notes.values()], timedelta(seconds=min(self._timeout_s, _LONGEST_ANSWER_S)))
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a time-out: file stores raise this class, other stores a subclass (DistStoreError)
            pass
        return tuple(index for index, note in notes.items() if not self._notes.check([note]))

    def _detail(self, missing: tuple[int, ...]) -> str:
        return self._missing_text(missing, [f"{index} (last seen at {self._last_seen(index)})" for index in missing])

    def _missing_text(self, missing: tuple[int, ...], last: list[str]) -> str:
        ranks = "rank" if len(last) == 1 else "ranks"
        return (
            f"{ranks} {', '.join(last)} of {self._size} did not come to a collective: not within "
            f"cluster.collective_timeout_s = {self._timeout_s:g}, or ended before"
        )

    def _last_seen(self, index: int) -> str:
        note = f"at/{index}"
        return self._notes.get(note).decode() if self._notes.check([note]) else "the gang's start"

    def _note(self, kind: str, text: str) -> None:
        self._notes.set(f"{kind}/{self._index}", text)


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Return True if torch.distributed raised the error. gloo's errors are RuntimeErrors with the path of its
    source."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error).partition("]")[0]


# ---- megatron-core without CUDA -------------------------------------------------------------------------

CPU = torch.device("cpu")
FACTORIES = ("tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like", "arange")
"""torch functions that megatron-core calls with device="cuda"."""


def run_megatron_without_cuda(device: torch.device = CPU) -> None:
    """Make megatron-core run on a torch without CUDA, on `device`. A second call, or a call in a process with CUDA, has
    no effect. Import megatron-core before the call. Call this in worker processes only.

    megatron-core refers to CUDA's devices, random generators and tensor types by name. So two things
    are replaced:

    - In all modules of megatron-core that were imported before, the name `torch` now stands for a changed copy of
      torch. The copy uses `device` instead of CUDA.
    - Two methods of Tensor change for all code in the process. `cuda` moves the tensor to `device`. `type` without
      arguments gives tensors on `device` the names of CUDA's types, such as "torch.cuda.FloatTensor".

    Apart from these two methods, all other code in the process keeps the real torch.
    """
    if torch.cuda.is_available() or hasattr(torch.Tensor.type, "__wrapped__"):
        return
    cuda = _view(
        torch.cuda,
        current_device=lambda: device,
        synchronize=lambda device=None: None,
        # the CPU's generator replaces the device's
        get_rng_state=lambda device="cuda": torch.get_rng_state(),
        set_rng_state=lambda state, device="cuda": torch.set_rng_state(state),
        manual_seed=torch.manual_seed,
    )
    view = _view(torch, cuda=cuda, **{name: _on(device, getattr(torch, name)) for name in FACTORIES})
    for name, module in list(sys.modules.items()):
        if name.startswith("megatron.core") and module.__dict__.get("torch") is torch:
            module.__dict__["torch"] = view
    megatron_random._get_cuda_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    megatron_random._set_cuda_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    torch.Tensor.cuda = lambda self, *args, **kwargs: self.to(device)  # type: ignore[method-assign]
    torch.Tensor.type = _cuda_type_name(torch.Tensor.type, device)  # type: ignore[method-assign]


def _view(module: ModuleType, **changes: Any) -> ModuleType:
    """Return a copy of a module with some of its contents replaced."""
    view = ModuleType(module.__name__, module.__doc__)
    view.__dict__.update(module.__dict__)
    view.__dict__.update(changes)
    return view


def _on(device: torch.device, factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the factory with device="cuda" replaced by `device`."""

    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        asked = kwargs.get("device")
        if asked is not None and str(asked).startswith("cuda"):
            kwargs["device"] = device
        return factory(*args, **kwargs)

    return create


def _cuda_type_name(original: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a `Tensor.type` that gives tensors on `device` the type names of CUDA's tensors, such as
    "torch.cuda.FloatTensor". megatron-core's optimizers compare these names."""
    own = "torch." if device == CPU else f"torch.{device.type}."

    @functools.wraps(original)
    def type_name(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        name = original(self, *args, **kwargs)
        is_own = isinstance(name, str) and self.device.type == device.type
        return name.replace(own, "torch.cuda.", 1) if is_own else name

    return type_name
