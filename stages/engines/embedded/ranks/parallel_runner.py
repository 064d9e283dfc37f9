"""A model that spans ranks. This process is rank 0; the other ranks are its child processes (`processes`).

Each rank gets the input of every pass and computes its part (`rank_model`). Under tensor parallelism, this part is some
of the heads and a part of the MLP, and the results are summed over the ranks of a stage. Under pipeline parallelism,
this part is some of the blocks, and their input is the hidden states of the previous stage. `submit` returns when stage
0 is done, so the next pass can begin while later stages compute.
"""

from __future__ import annotations

import tempfile
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from stages.engines.config import EngineConfig
from stages.engines.embedded.batch import Batch, Draws
from stages.engines.embedded.division import divide
from stages.engines.embedded.kernels.blocks import block_bytes
from stages.engines.embedded.kernels.packed import all_finite
from stages.engines.embedded.model import LlamaWeights
from stages.engines.embedded.ranks.communication import (
    READY,
    Command,
    Drop,
    Prepare,
    ReadCache,
    Swap,
    WriteCache,
    send_bytes,
)
from stages.engines.embedded.ranks.processes import RankProcess, RankProcesses
from stages.engines.embedded.ranks.rank_model import BUSY_FILE, RankModel, RankSpec, shard_tensors
from stages.engines.embedded.runner import affordable_blocks, checked_spec, choose_kernels
from stages.engines.protocol import WeightsError, check_tensors
from stages.models.hf_weights import read_weights


@dataclass(frozen=True)
class PreparedOnRanks:
    """New weights that are ready on every rank, but not in use yet. `number`: the number by which messages to the ranks
    name these weights (`Prepare`, `Swap`, `Drop`). `weights`: the part of rank 0."""

    number: int
    weights: LlamaWeights


class ParallelRunner:
    """Owns a model that spans ranks: rank 0, which computes in this process, and the processes of the other ranks.
    Implements `Runner`."""

    def __init__(
        self,
        path: str,
        engine: EngineConfig,
        *,
        max_seq: int,
        device: torch.device,
        threads: int,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Start all ranks and load the model. Raises the errors of `LocalRunner`, and RankLost if a rank's process
        ends.

        Args:
            path: a Hugging Face directory or `random:tiny`.
            engine: the engine's settings.
            max_seq: maximum length of a prompt and its response together, in tokens.
            device: device of rank 0. If it is a GPU, the other ranks use the GPUs after it.
            threads: number of torch threads of each rank.
            on_lost: see `RankProcesses`.
        """
        spec = checked_spec(path, engine, max_seq)
        tensor, pipeline = engine.tensor_parallel, engine.pipeline_parallel
        self._shares = divide(spec, tensor, pipeline)
        self._spec, self._dtype = spec, getattr(torch, engine.dtype)
        self.depth = pipeline
        self.vocab = spec.vocab_size
        kernels = choose_kernels(engine, device)
        self.kernels, self.supports_trees = kernels.name, kernels.supports_trees
        parts = [share.spec(spec) for share in self._shares]
        self.cache_shape = (spec.num_layers, spec.num_kv_heads, spec.head_dim)
        per_block = sum(block_bytes(p.num_layers, p.num_kv_heads, p.head_dim, self._dtype.itemsize) for p in parts)
        self.num_blocks = affordable_blocks(engine, per_block, max_seq)
        tensors = read_weights(path)
        check_tensors(spec, tensors, complete=True)
        self._drawn: deque[Draws] = deque()
        self._number = 0
        self._preparing = threading.Lock()
        with ExitStack() as stack:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="stageline-ranks-"))
            np.zeros(len(parts)).tofile(Path(folder) / BUSY_FILE)
            chosen = replace(engine.embedded, kernels=self.kernels)  # type: ignore[arg-type]
            specs = [
                RankSpec(
                    rank=rank,
                    tensor=tensor,
                    pipeline=pipeline,
                    share=share,
                    model=spec,
                    engine=replace(engine, embedded=chosen),
                    max_seq=max_seq,
                    num_blocks=self.num_blocks,
                    device=str(rank_device(device, rank)),
                    threads=threads,
                    folder=folder,
                )
                for rank, share in enumerate(self._shares)
            ]
            self._processes = RankProcesses(specs[1:], on_lost)
            stack.callback(self._processes.close)
            self._busy = np.memmap(Path(folder) / BUSY_FILE, np.float64, "r")
            self._processes.meet()
            self._model = self._processes.or_rank_lost(lambda: RankModel(specs[0]))
            stack.callback(self._model.close)
            output_rank = (pipeline - 1) * tensor  # the first rank of the last stage
            self._output_rank: RankProcess | None = self._processes.ranks[output_rank - 1] if output_rank else None
            self.swap(self._prepare(tensors))
            self._stack = stack.pop_all()

    def submit(self, batch: Batch) -> None:
        self._command(batch)
        draws = self._processes.or_rank_lost(lambda: self._model.run(batch))
        if draws is not None:
            self._drawn.append(draws)

    def collect(self) -> Draws:
        if self._output_rank is None:
            return self._drawn.popleft()
        draws: Draws = self._processes.or_rank_lost(self._output_rank.commands.recv)
        return draws

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> PreparedOnRanks:
        check_tensors(self._spec, tensors, complete=False)
        for name, tensor in tensors.items():  # checked here, since the error must name the caller's tensor
            if not all_finite(tensor):
                raise WeightsError(f"{name} holds NaN or infinity")
        return self._prepare(tensors)

    def swap(self, prepared: PreparedOnRanks) -> None:
        # wait for the answers, since another thread of each rank builds the next weights from the weights in use
        self._command(Swap(prepared.number), answered=True)
        self._model.set_weights(prepared.weights)

    def read_cache(self, blocks: Sequence[int], num_positions: int) -> np.ndarray:
        layers, heads, dim = self.cache_shape
        whole = np.empty((layers, 2, heads, num_positions, dim), np.float32)
        whole[self._part(0)] = self._model.read_cache(blocks, num_positions)
        self._command(ReadCache(tuple(blocks), num_positions))
        for rank in self._processes.ranks:
            whole[self._part(rank.spec.rank)] = self._processes.or_rank_lost(rank.commands.recv)
        return whole

    def write_cache(self, blocks: Sequence[int], copied: np.ndarray) -> None:
        self._model.write_cache(blocks, copied[self._part(0)])
        for rank in self._processes.ranks:
            part = np.ascontiguousarray(copied[self._part(rank.spec.rank)])
            self._processes.or_rank_lost(partial(rank.commands.send, WriteCache(tuple(blocks), part)))

    def _part(self, rank: int) -> tuple[slice, slice, slice]:
        """Return a rank's part of the keys and values, as slices of layers, pair and heads."""
        layers, heads = self._shares[rank].layers, self._shares[rank].kv_heads
        return slice(layers.start, layers.stop), slice(None), slice(heads.start, heads.stop)

    @property
    def awake(self) -> bool:
        return self._model.awake

    def sleep(self) -> None:
        self._model.sleep()
        self._command("sleep", answered=True)

    def wake(self) -> None:
        self._model.wake()
        self._command("wake", answered=True)

    def end_threads(self) -> None:
        self._model.end_threads()

    def busy_s(self) -> tuple[float, ...]:
        return tuple(self._busy.tolist())

    def close(self) -> None:
        self._stack.close()

    def _command(self, command: Command, *, answered: bool = False) -> None:
        for rank in self._processes.ranks:
            self._processes.or_rank_lost(partial(rank.commands.send, command))
        for rank in self._processes.ranks if answered else []:
            assert self._processes.or_rank_lost(rank.commands.recv) == READY

    def _prepare(self, tensors: Mapping[str, torch.Tensor]) -> PreparedOnRanks:
        """Prepare new weights on all ranks. The tensors are sent over separate connections, so passes can run
        meanwhile. A rank packs its part while other ranks still receive theirs. If a rank cannot take its part, all
        ranks drop the new weights, and WeightsError is raised, naming the rank."""
        with self._preparing:
            self._number += 1
            number, ranks = self._number, self._processes.ranks
            slices = [shard_tensors(share, self._spec, tensors) for share in self._shares]
            for rank in ranks:
                own = slices[rank.spec.rank]
                self._send(
                    rank, Prepare(number, tuple((n, self._stored_dtype(t), tuple(t.shape)) for n, t in own.items()))
                )
            problems = self._answers(ranks)
            for rank in [rank for rank in ranks if rank.spec.name not in problems]:
                self._send(rank, not problems)
            weights = None
            if not problems:
                for rank in ranks:
                    for tensor in slices[rank.spec.rank].values():
                        whole = tensor.detach().to("cpu", self._stored_dtype(tensor)).contiguous()
                        self._processes.or_rank_lost(partial(send_bytes, rank.weights, whole))
                try:
                    weights = self._model.prepare(slices[0])
                except (
                    WeightsError,
                    RuntimeError,
                    MemoryError,
                ) as error:  # torch reports missing memory as RuntimeError
                    problems[self._model.name] = str(error)
                problems |= self._answers(ranks)
            if weights is None or problems:
                for rank in ranks:
                    self._send(rank, Drop(number))
                name, problem = next(iter(problems.items()))
                raise WeightsError(f"{name} cannot take the weights: {problem}")
            return PreparedOnRanks(number, weights)

    def _send(self, rank: RankProcess, message: Prepare | Drop | bool) -> None:
        self._processes.or_rank_lost(partial(rank.weights.send, message))

    def _answers(self, ranks: Sequence[RankProcess]) -> dict[str, str]:
        """Return name of a rank -> the error in its answer, for ranks with an error."""
        answers = {rank.spec.name: self._processes.or_rank_lost(rank.weights.recv) for rank in ranks}
        return {name: problem for name, problem in answers.items() if problem is not None}

    def _stored_dtype(self, tensor: torch.Tensor) -> torch.dtype:
        """Return the dtype in which a tensor is sent to the ranks and stored there."""
        return torch.float32 if tensor.ndim == 1 else self._dtype


def rank_device(device: torch.device, rank: int) -> torch.device:
    """Return the device of a rank, given the device of rank 0. Ranks use consecutive GPUs, or share the CPU."""
    return device if device.type == "cpu" else torch.device(device.type, (device.index or 0) + rank)
