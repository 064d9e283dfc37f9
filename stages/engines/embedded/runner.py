"""The protocol of runners, which compute batches, and the runner of a whole model on one device in this process.

The engine decides which rows run (`scheduler`) and turns them into arrays (`batch`). A runner holds the weights and the
cache. It runs batches in the order in which they are submitted.
"""

from __future__ import annotations

import importlib
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from importlib.util import find_spec
from typing import Any, Protocol

import numpy as np
import torch

from stages.engines.config import EngineConfig
from stages.engines.embedded.batch import NO_DRAWS, Batch, Draws
from stages.engines.embedded.cache import KVCache
from stages.engines.embedded.kernels.blocks import block_bytes, blocks_for
from stages.engines.embedded.kernels.cpu.native import load_native_kernels
from stages.engines.embedded.kernels.cuda.graphs import CapturedBatches, Drawing, GraphCapture, run_directly
from stages.engines.embedded.kernels.protocol import DeviceKernels, Kernels, NoTritonKernelsError, Tokens, TreePaths
from stages.engines.embedded.kernels.reference import TorchKernels
from stages.engines.embedded.model import LlamaWeights, build_weights, forward, logits, refit_weights
from stages.engines.embedded.sampling import ban, forced_logprobs
from stages.engines.protocol import check_tensors
from stages.models.hf_weights import read_weights
from stages.models.offload import OffloadableTensors
from stages.models.spec import ModelSpec, read_spec
from stages.native.compile import NoNativeKernelsError


class Runner(Protocol):
    """Owner of weights and cache, which computes batches. Only one thread at a time may submit batches or swap weights.
    Meanwhile any other thread may call `prepare`."""

    depth: int
    """Maximum number of batches that are submitted before the first of them is collected."""
    vocab: int
    num_blocks: int
    """Number of cache blocks that all rows together can hold."""
    kernels: str
    """The kernels in use: `native`, `torch` or `triton`."""
    supports_trees: bool
    """True if batches may have `Batch.tree_paths`."""
    cache_shape: tuple[int, int, int]
    """Layers, key/value heads and head dimension of the whole model."""

    def submit(self, batch: Batch) -> None:
        """Start a batch. At most `depth` batches may be under way."""
        ...

    def collect(self) -> Draws:
        """Wait for the oldest batch under way and return its draws."""
        ...

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return new weights for `swap`. The old weights stay in use until the swap. Raises WeightsError if the new
        weights cannot be made."""
        ...

    def swap(self, prepared: Any) -> None:
        """Replace the old weights by prepared ones. No batch may be under way."""
        ...

    def end_threads(self) -> None:
        """End the helper threads of the calling thread, because this thread will not compute for a while. See
        `Kernels`."""
        ...

    def busy_s(self) -> tuple[float, ...]:
        """Return each rank's seconds of work on batches since the start, in wall-clock time. Time in which a rank
        waited for other ranks is not counted."""
        ...

    def read_cache(self, blocks: Sequence[int], num_positions: int) -> np.ndarray:
        """Return a copy of the keys and values of the first `num_positions` positions in `blocks`, for the whole model:
        float32 [layers, 2, kv_heads, positions, dim]. No batch may be under way."""
        ...

    def write_cache(self, blocks: Sequence[int], copied: np.ndarray) -> None:
        """Write a copy made by `read_cache` into `blocks`. No batch under way may read or write these blocks."""
        ...

    @property
    def awake(self) -> bool: ...

    def sleep(self) -> None:
        """Release the cache's memory; on a CUDA device also move the weights to the host."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Prepared:
    """New weights, made by `LocalRunner.prepare`."""

    weights: LlamaWeights


class LocalRunner:
    """Owns a whole model and its cache, on one device. Implements `Runner`.

    On a CUDA device, new weights are made on a separate stream while batches run. A swap copies them into the memory of
    the old ones, since captured batches keep reading that memory. A swap cannot fail half-way, because `prepare` has
    made all checks."""

    depth = 1

    def __init__(self, path: str, engine: EngineConfig, *, max_seq: int, device: torch.device) -> None:
        """Load the model.

        Raises:
            ValueError: `max_seq` or the settings do not suit the model (see `checked_spec`, `affordable_blocks`).
            WeightsError: a tensor is missing, unknown, of another shape or not finite.
            NoNativeKernelsError, NoTritonKernelsError: the config asks for kernels that are not available.
        """
        self._spec = checked_spec(path, engine, max_seq)
        self._device = device
        self._kernels = choose_kernels(engine, device)
        self.kernels, self.vocab = self._kernels.name, self._spec.vocab_size
        self.supports_trees = self._kernels.supports_trees
        self.cache_shape = (self._spec.num_layers, self._spec.num_kv_heads, self._spec.head_dim)
        dtype = getattr(torch, engine.dtype)
        per_block = block_bytes(self._spec.num_layers, self._spec.num_kv_heads, self._spec.head_dim, dtype.itemsize)
        self.num_blocks = affordable_blocks(engine, per_block, max_seq)
        self._cache = KVCache(
            self._spec.num_layers,
            self.num_blocks,
            self._spec.num_kv_heads,
            self._spec.head_dim,
            dtype,
            device,
        )
        tensors = read_weights(path)
        check_tensors(self._spec, tensors, complete=True)
        with torch.inference_mode():
            self._weights = build_weights(self._spec, tensors, dtype, device, max_seq, self._kernels)
        self._drawn: deque[Draws] = deque()
        self._busy_s = 0.0
        self._captured: CapturedBatches | None = None
        if isinstance(self._kernels, DeviceKernels):
            graphs = engine.cuda_graphs and device.type == "cuda"
            capture = GraphCapture(device) if graphs else run_directly
            self._captured = CapturedBatches(self._whole_batch, max_seq, device, capture)
        self._refit_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._resident = OffloadableTensors(lambda: all_tensors(self._weights))
        """Moves the weights to the host's memory and back. Used only on a CUDA device."""

    def submit(self, batch: Batch) -> None:
        with torch.inference_mode(), torch.cuda.device(self._device) if self._refit_stream else nullcontext():
            started = time.perf_counter()
            self._drawn.append(self._run(batch))
            self._busy_s += time.perf_counter() - started

    def _run(self, batch: Batch) -> Draws:
        if self._captured is not None and not batch.forced and self._captured.takes(batch):
            return Draws(*self._captured.run(batch))
        tokens = on_device(batch, self._device)
        hidden = forward(self._weights, self._spec, self._kernels, tokens, self._cache)
        if not len(batch.drawn):
            return NO_DRAWS
        wanted = torch.from_numpy(batch.drawn).to(self._device)
        scores = logits(self._weights, self._spec, self._kernels, hidden, wanted)
        drawn = draw(self._kernels, scores, batch)
        return replace(drawn, hidden=hidden[wanted].cpu().numpy()) if batch.wants_hidden else drawn

    def _whole_batch(self, tokens: Tokens, drawing: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the token drawn after each token of a batch, and its log-prob. Copies nothing from the device to the
        host."""
        assert isinstance(self._kernels, DeviceKernels)
        hidden = forward(self._weights, self._spec, self._kernels, tokens, self._cache)
        scores = logits(
            self._weights, self._spec, self._kernels, hidden, torch.arange(len(hidden), device=hidden.device)
        )
        return self._kernels.choose_on_device(scores, drawing.temperatures, drawing.keys, drawing.banned)

    def end_threads(self) -> None:
        self._kernels.end_threads()

    def collect(self) -> Draws:
        return self._drawn.popleft()

    @torch.inference_mode()
    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> Prepared:
        if self._refit_stream is not None:
            self._refit_stream.wait_stream(torch.cuda.current_stream())  # the caller's tensors may not be complete yet
        with torch.cuda.stream(self._refit_stream) if self._refit_stream is not None else nullcontext():
            check_tensors(self._spec, tensors, complete=False)
            prepared = Prepared(refit_weights(self._spec, self._weights, tensors, self._kernels))
        if self._refit_stream is not None:
            self._refit_stream.synchronize()
        return prepared

    @torch.inference_mode()
    def swap(self, prepared: Prepared) -> None:
        if self._refit_stream is None:
            self._weights = prepared.weights
            return
        for old, new in zip(all_tensors(self._weights), all_tensors(prepared.weights), strict=True):
            if new is not old:
                old.copy_(new)
        torch.cuda.current_stream().synchronize()  # `prepared` may be freed only after it has been read

    def busy_s(self) -> tuple[float, ...]:
        return (self._busy_s,)

    @torch.inference_mode()
    def read_cache(self, blocks: Sequence[int], num_positions: int) -> np.ndarray:
        return self._cache.read(blocks, num_positions)

    @torch.inference_mode()
    def write_cache(self, blocks: Sequence[int], copied: np.ndarray) -> None:
        self._cache.write(blocks, copied)

    @property
    def awake(self) -> bool:
        return self._cache.allocated

    def sleep(self) -> None:
        self.close()
        if self._refit_stream is not None:
            self._resident.sleep()

    def wake(self) -> None:
        self._resident.wake()
        self._cache.allocate()

    def close(self) -> None:
        if self._captured is not None:
            self._captured.clear()  # graphs read the memory that is released
        self._cache.release()


def all_tensors(weights: LlamaWeights) -> list[torch.Tensor]:
    """Return all tensors that new weights can change, always in the same order. The weights must be packed as torch
    tensors, not as `NativeWeight`."""
    assert isinstance(weights.head, torch.Tensor)
    blocks = [getattr(block, field.name) for block in weights.blocks for field in fields(block)]
    return [weights.embedding, *(each for each in blocks if each is not None), weights.norm, weights.head]


def checked_spec(path: str, engine: EngineConfig, max_seq: int) -> ModelSpec:
    """Return the model's sizes. Raises ValueError if the model has fewer than `max_seq` positions, or if `max_seq` or
    `engine.max_rows` is not positive."""
    spec = read_spec(path)
    if not 0 < max_seq <= spec.max_positions:
        raise ValueError(f"max_seq is {max_seq}; {path!r} has positions for {spec.max_positions} tokens")
    if engine.max_rows < 1:
        raise ValueError(f"engine.max_rows is {engine.max_rows}; at least 1 row must be decoded at a time")
    return spec


def affordable_blocks(engine: EngineConfig, per_block: int, max_seq: int) -> int:
    """Return the number of cache blocks: as many as `max_rows` rows of maximum length can use, or fewer if the memory
    budget allows fewer. `per_block`: bytes per block. Raises ValueError if the budget is too small for one row."""
    per_row = blocks_for(max_seq)
    affordable = engine.kv_budget_mb * 2**20 // per_block
    if affordable < per_row:
        raise ValueError(
            f"engine.kv_budget_mb is {engine.kv_budget_mb}; one row of {max_seq} tokens needs "
            f"{-(-per_row * per_block // 2**20)}"
        )
    return min(engine.max_rows * per_row, affordable)


def choose_kernels(engine: EngineConfig, device: torch.device) -> Kernels:
    """Return the kernels that `engine.embedded.kernels` names. auto means the best kernels that are available on the
    device. Raises NoNativeKernelsError or NoTritonKernelsError if the named kernels are not available."""
    wanted = engine.embedded.kernels
    has_triton = find_spec("triton") is not None
    if wanted == "triton" or (wanted == "auto" and device.type == "cuda" and has_triton):
        if not has_triton:
            raise NoTritonKernelsError("engine.embedded.kernels is triton, which is not installed")
        triton_kernels = importlib.import_module(
            "stages.engines.embedded.kernels.cuda.triton_kernels"
        )  # the import takes a second, and Triton may not be installed
        loaded: Kernels = triton_kernels.load_triton_kernels(device)
        return loaded
    if wanted == "torch" or (wanted == "auto" and device.type != "cpu"):
        return TorchKernels()
    if device.type != "cpu":
        raise NoNativeKernelsError(f"engine.embedded.kernels is native, which needs a CPU; the device is {device}")
    try:
        return load_native_kernels()
    except NoNativeKernelsError as error:
        if wanted == "native":
            raise
        warnings.warn(f"generation uses plain torch, which is slower: {error}", stacklevel=3)
        return TorchKernels()


def on_device(batch: Batch, device: torch.device) -> Tokens:
    """Return the tokens of a batch as tensors on the device."""
    paths = batch.tree_paths
    return Tokens(
        ids=torch.from_numpy(batch.ids).to(device),
        positions=torch.from_numpy(batch.positions).to(device),
        rows=torch.from_numpy(batch.rows).to(device),
        tables=torch.from_numpy(batch.tables).to(device),
        longest=int(batch.positions.max()) + 1,
        tree_paths=None
        if paths is None
        else TreePaths(
            cells=torch.from_numpy(paths.cells).to(device),
            starts=torch.from_numpy(paths.starts).to(device),
            paths=torch.from_numpy(paths.paths).to(device),
        ),
    )


def draw(kernels: Kernels, scores: torch.Tensor, batch: Batch) -> Draws:
    """Return the draws of a batch. `scores`: float32 logits [M, V], which may be overwritten. A prescribed token
    (`Batch.forced`) replaces the drawn token."""
    ban(scores, batch.banned)
    forced = forced_logprobs(scores, batch.temperatures, batch.forced)  # before `choose` overwrites the logits
    chosen, logprobs_of_chosen = kernels.choose(scores, batch.temperatures, batch.keys)
    tokens, logprobs = chosen.cpu().numpy(), logprobs_of_chosen.cpu().numpy()
    for place, logprob in forced.items():
        tokens[place], logprobs[place] = batch.forced[place], logprob
    return Draws(tokens, logprobs)
