"""Run the ranks of a gang, record every collective that they make, and refuse big pickles.

run_ranks(function, 4)  ─► function(index) in four processes, and for each process group that they join and leave
    watched() as calls:  a rank's work            ─► calls: [Call(group, operation, shapes, thread), ...]
    one_order([calls of rank 0, of rank 1, ...])  ─► fails if the ranks would wait for one another for ever, if they
                                                     come to the same collective with different shapes or dtypes, or
                                                     if a group is used by two threads
"""

from __future__ import annotations

import faulthandler
import inspect
import multiprocessing
import pickle
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pipeline.workers.worker_process import PRELOADED

OBJECT_BYTES = 1 << 20
"""Largest pickled object that a collective may carry. NCCL pads every rank's to the largest, and collects all of them
on one GPU."""
RANKS_S = 900.0
"""Longest time of all ranks' work: a minute on a fast machine, several on a slow one that has more to do."""
_OBJECTS = ("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list")


@dataclass(frozen=True)
class Call:
    """A collective call of one rank."""

    ranks: tuple[int, ...]
    """Ranks of its group."""
    group: str
    """torch's name of the group, the same on every rank."""
    operation: str
    shapes: tuple[tuple[int, ...], ...]
    peer: int
    """The other rank of a send or a receive; -1 for collectives."""
    thread: str
    dtypes: tuple[torch.dtype, ...] = ()


class _Recorder(TorchDispatchMode):
    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self.calls = calls

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and each call through the compiler's guard would take longer than recording it.
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            named = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False))
            group = ProcessGroup.unbox(named["process_group"])
            ranks = tuple(dist.get_process_group_ranks(group))
            peer = named.get("dst", named.get("src", -1))
            name = func._schema.name.removeprefix("c10d::").strip("_")
            # one rank has the parts of all
            common = {"gather": "input_tensors", "scatter": "output_tensors"}.get(name)
            leaves = tree_leaves(named[common] if common else list(args))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            self.calls.append(
                Call(
                    ranks,
                    group.group_name,
                    name,
                    tuple(tuple(tensor.shape) for tensor in tensors),
                    ranks[peer] if peer >= 0 else -1,
                    threading.current_thread().name,
                    tuple(tensor.dtype for tensor in tensors),
                )
            )
        return func(*args, **(kwargs or {}))


def run_ranks(function: Callable[..., None], size: int, *args: Any, limit_s: float = RANKS_S) -> None:
    """Run function(index, *args) in `size` processes, with their collectives watched. Check that in each process group
    that they joined and left they made them in one order. If a rank waits for ever, say where each one stands. No
    rank is left when this returns or raises."""
    multiprocessing.set_forkserver_preload([*PRELOADED])
    with TemporaryDirectory() as directory, ExitStack() as ended:
        given = Path(directory), limit_s, function, args
        ranks = torch.multiprocessing.start_processes(
            _run_rank, given, nprocs=size, join=False, start_method="forkserver"
        )
        for process in ranks.processes:
            ended.callback(process.join)
            ended.callback(process.kill)
        ended_by = time.monotonic() + limit_s + 5
        while not ranks.join(timeout=1):
            if time.monotonic() > ended_by:
                places = (file.read_text() for file in sorted(Path(directory).glob("at-*")))
                raise AssertionError("\n".join([f"ranks that have not ended after {limit_s:g} s:", *places]))
        groups = {int(file.name.partition("-")[0]) for file in Path(directory).iterdir()}
        assert groups, "no rank left a process group"
        for group in sorted(groups):
            calls = [torch.load(Path(directory) / f"{group}-{index}", weights_only=False) for index in range(size)]
            assert all(calls), f"no collectives in process group {group}"
            one_order(calls)


def _run_rank(
    index: int, directory: Path, limit_s: float, function: Callable[..., None], args: tuple[Any, ...]
) -> None:
    leave, numbers = dist.destroy_process_group, count()
    place = directory / f"at-{index}"
    with place.open("w") as stream, watched() as calls:
        faulthandler.dump_traceback_later(limit_s, file=stream)

        def left(group: Any = None) -> None:
            leave(group)
            if group is None:
                torch.save(calls, directory / f"{next(numbers)}-{index}")
                calls.clear()

        with patch.object(dist, "destroy_process_group", left):
            function(index, *args)
        faulthandler.cancel_dump_traceback_later()
    place.unlink()


@contextmanager
def watched() -> Iterator[list[Call]]:
    """Record this rank's collectives: those of tensors in this thread, those of objects in all threads."""
    calls: list[Call] = []
    with ExitStack() as stack:
        for name in _OBJECTS:
            stack.enter_context(patch.object(dist, name, _bounded(name, getattr(dist, name), calls)))
        stack.enter_context(_Recorder(calls))
        yield calls


def _bounded(name: str, collective: Any, calls: list[Call]) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(collective).bind(*args, **kwargs).arguments
        items = [given[key] for key in ("obj", "scatter_object_input_list", "object_list") if key in given]
        num_bytes = len(pickle.dumps(items[0]))
        assert num_bytes <= OBJECT_BYTES, f"{name} carries {num_bytes} bytes: send tensors"
        group = given.get("group") or dist.group.WORLD
        thread = threading.current_thread().name
        calls.append(Call(tuple(dist.get_process_group_ranks(group)), group.group_name, name, (), -1, thread))
        return collective(*args, **kwargs)

    return call


def one_order(calls: Sequence[Sequence[Call]]) -> None:
    """Check that the ranks' calls fit one another. `calls`: each rank's, in its order. The threads of a rank run
    independently of one another. A send does not wait for its receiver: Megatron gives both to NCCL at once."""
    threads: dict[str, set[str]] = defaultdict(set)
    left: dict[tuple[int, str], deque[Call]] = defaultdict(deque)
    for rank, of_rank in enumerate(calls):
        for call in of_rank:
            threads[f"{call.group} of rank {rank}"].add(call.thread)
            left[rank, call.thread].append(call)
    assert {group: names for group, names in threads.items() if len(names) > 1} == {}
    messages: dict[tuple[int, int, str], list[Call]] = defaultdict(list)
    progress = True
    while progress:
        progress = False
        waiting = {place: queue[0] for place, queue in left.items() if queue}
        for place, call in waiting.items():
            if call.operation == "send":
                messages[place[0], call.peer, call.group].append(call)
                partners = [place]
            elif call.operation == "recv":
                sent = messages[call.peer, place[0], call.group]
                partners = [place] if sent else []
                assert not sent or _tensors(sent.pop(0)) == _tensors(call)
            else:
                alike = {p: c for p, c in waiting.items() if (c.group, c.operation) == (call.group, call.operation)}
                partners = list(alike) if {rank for rank, _ in alike} == set(call.ranks) else []
                assert not partners or {_tensors(c) for c in alike.values()} == {_tensors(call)}, f"{alike}"
            for partner in partners:
                left[partner].popleft()
                progress = True
            if progress:
                break
    assert {place: queue[0] for place, queue in left.items() if queue} == {}, "these wait for one another"
    assert not any(messages.values()), "sent, and nobody receives it"


def _tensors(call: Call) -> tuple[object, ...]:
    """Return what the ranks' tensors must have in common."""
    return call.shapes, call.dtypes
