"""One rank's part of a model: its tensors, and how it computes a pass. Rank 0 runs inside the engine, the other ranks
in processes of their own (`processes`). `stages.engines.embedded.division` divides a model among ranks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from stages.engines.config import EngineConfig
from stages.engines.embedded.batch import NO_DRAWS, Batch, Draws
from stages.engines.embedded.cache import KVCache
from stages.engines.embedded.division import Share
from stages.engines.embedded.model import LlamaWeights, build_weights, forward, logits, refit_weights
from stages.engines.embedded.ranks.communication import RankCommunicator
from stages.engines.embedded.runner import all_tensors, choose_kernels, draw, on_device
from stages.engines.embedded.sampling import ban, forced_logits, join_parts, put_forced
from stages.models.offload import OffloadableTensors
from stages.models.spec import (
    DOWN_PROJ,
    EMBEDDING,
    FINAL_NORM,
    GATE_PROJ,
    K_BIAS,
    K_PROJ,
    LM_HEAD,
    O_PROJ,
    Q_BIAS,
    Q_PROJ,
    UP_PROJ,
    V_BIAS,
    V_PROJ,
    ModelSpec,
    layer_and_part,
    layer_tensor,
)

BUSY_FILE = "busy"
"""Name of the file in the ranks' folder that holds the busy time of each rank, in seconds as float64."""


@dataclass(frozen=True)
class RankSpec:
    """Everything that a rank needs to start."""

    rank: int
    tensor: int
    pipeline: int
    share: Share
    model: ModelSpec
    """Sizes of the whole model."""
    engine: EngineConfig
    max_seq: int
    num_blocks: int
    device: str
    threads: int
    folder: str
    """Absolute path of the folder that the ranks of an engine share."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.tensor * self.pipeline}"


class RankModel:
    """Owns one rank's weights, its part of the cache, and its connections to the other ranks."""

    def __init__(self, spec: RankSpec) -> None:
        """Connect to the other ranks, and wait until all have connected. The caller must load the first weights by
        `set_weights(prepare(...))`."""
        self._spec, self.name = spec, spec.name
        self._part = spec.share.spec(spec.model)
        """Sizes of this rank's part of the model."""
        self._device = torch.device(spec.device)
        self._kernels = choose_kernels(spec.engine, self._device)
        self._cache = KVCache(
            self._part.num_layers,
            spec.num_blocks,
            self._part.num_kv_heads,
            self._part.head_dim,
            getattr(torch, spec.engine.dtype),
            self._device,
        )
        self._weights: LlamaWeights | None = None
        self._resident = OffloadableTensors(lambda: [] if self._weights is None else all_tensors(self._weights))
        self._busy = np.memmap(Path(spec.folder) / BUSY_FILE, np.float64, "r+")
        self._communicator = RankCommunicator(Path(spec.folder), spec.rank, spec.tensor, spec.pipeline, self._device)

    @torch.inference_mode()
    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> LlamaWeights:
        """Return new weights, made from this rank's slices of tensors (`shard_tensors`). The old weights stay in use
        meanwhile. The first call needs all slices. Later calls need only the slices that change. Any thread may call
        this. Raises WeightsError, naming the first slice that is not finite."""
        if self._weights is None:
            dtype = getattr(torch, self._spec.engine.dtype)
            return build_weights(self._part, tensors, dtype, self._device, self._spec.max_seq, self._kernels)
        return refit_weights(self._part, self._weights, tensors, self._kernels)

    def end_threads(self) -> None:
        """End the helper threads of the calling thread; see `Kernels.end_threads`."""
        self._kernels.end_threads()

    def set_weights(self, weights: LlamaWeights) -> None:
        """Use these weights from the next pass on."""
        self._weights = weights

    @torch.inference_mode()
    def run(self, batch: Batch) -> Draws | None:
        """Compute this rank's part of a pass. Return the draws on the first rank of the last stage, and None on the
        other ranks."""
        assert self._weights is not None
        spec, others = self._spec, self._communicator
        started, waited_s = time.perf_counter(), others.waited_s
        hidden = None if spec.share.first else others.receive(len(batch.ids), self._part.hidden_size)
        tokens = on_device(batch, self._device)
        hidden = forward(self._weights, self._part, self._kernels, tokens, self._cache, hidden, others.total)
        draws = None
        if not spec.share.last:
            others.send(hidden)
        elif len(batch.drawn):
            draws = self._draw(hidden, batch)
        elif spec.rank % spec.tensor == 0:
            draws = NO_DRAWS
        self._busy[spec.rank] += time.perf_counter() - started - (others.waited_s - waited_s)
        return draws

    def _draw(self, hidden: torch.Tensor, batch: Batch) -> Draws | None:
        assert self._weights is not None
        drawn = torch.from_numpy(batch.drawn).to(self._device)
        scores = logits(self._weights, self._part, self._kernels, hidden, drawn)
        seen = hidden[drawn].cpu().numpy() if batch.wants_hidden else None
        if self._spec.tensor == 1:
            return replace(draw(self._kernels, scores, batch), hidden=seen)
        own = self._spec.share.tokens
        ban(scores, [tuple(token - own.start for token in banned if token in own) for banned in batch.banned])
        forced = forced_logits(scores, batch.temperatures, batch.forced, own.start)
        part = self._kernels.choose_part(scores, batch.temperatures, batch.keys, own.start, self._part.vocab_size)
        put_forced(part, batch.forced, forced)
        parts = self._communicator.gather(part)
        if parts is None:
            return None
        tokens, logprobs = join_parts(parts)
        return Draws(tokens.cpu().numpy(), logprobs.cpu().numpy(), seen)

    @torch.inference_mode()
    def read_cache(self, blocks: Sequence[int], num_positions: int) -> np.ndarray:
        """Return the keys and values of a row in this rank's layers and heads. See `KVCache.read`."""
        return self._cache.read(blocks, num_positions)

    @torch.inference_mode()
    def write_cache(self, blocks: Sequence[int], copied: np.ndarray) -> None:
        self._cache.write(blocks, copied)

    @property
    def awake(self) -> bool:
        return self._cache.allocated

    def sleep(self) -> None:
        """Release the cache's memory; on a CUDA device also move this rank's weights to the host."""
        self._cache.release()
        if self._device.type == "cuda":
            self._resident.sleep()

    def wake(self) -> None:
        self._resident.wake()
        self._cache.allocate()

    def close(self) -> None:
        self._cache.release()
        self._communicator.close()


# ---- a rank's tensors ------------------------------------------------------------------------------------


def shard_tensors(share: Share, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return this rank's slices of `tensors`, whose names and shapes were checked. The keys are the tensors' names in
    the rank's own model, and the slices are views. Tensors that this rank does not hold are left out. If this rank does
    not use the embedding or the output layer, it gets one row of that matrix, since a packed matrix has at least one
    row."""
    own: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        of_layer = layer_and_part(name)
        if of_layer is not None:
            layer, part = of_layer
            if layer in share.layers:
                own[layer_tensor(layer - share.layers.start, part)] = _slice(share, spec, part, tensor)
        elif name == FINAL_NORM:
            own[name] = tensor
        elif name == EMBEDDING:
            own[name] = tensor if share.first else tensor[:1]
        if name == spec.output_tensor:  # if tied, this is the embedding, and a separate head is ignored
            own[LM_HEAD] = _rows(tensor, share.tokens) if share.last else tensor[:1]
    return own


def _slice(share: Share, spec: ModelSpec, part: str, tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's slice of a tensor of a block. Every rank holds whole norms."""
    dim = spec.head_dim
    queries = range(share.heads.start * dim, share.heads.stop * dim)
    keys = range(share.kv_heads.start * dim, share.kv_heads.stop * dim)
    rows = {
        **dict.fromkeys((Q_PROJ, Q_BIAS), queries),
        **dict.fromkeys((K_PROJ, V_PROJ, K_BIAS, V_BIAS), keys),
        **dict.fromkeys((GATE_PROJ, UP_PROJ), share.intermediate),
    }
    columns = {O_PROJ: queries, DOWN_PROJ: share.intermediate}
    if part in rows:
        return _rows(tensor, rows[part])
    if part in columns:
        return tensor[:, columns[part].start : columns[part].stop]
    return tensor


def _rows(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    return tensor[rows.start : rows.stop]
