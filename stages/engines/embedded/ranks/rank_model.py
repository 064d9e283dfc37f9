"""One rank's part of a model, and what it does with a pass: on rank 0 inside the engine, on the others in a process of
their own (`rank_main`). May import torch, stages.engines, stages.models.spec.
"""

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
from stages.engines.embedded.model.llama import (
    LlamaWeights,
    build_weights,
    forward,
    logits,
    refit_weights,
)
from stages.engines.embedded.ranks.communication import RankCommunicator
from stages.engines.embedded.ranks.sharding import Share
from stages.engines.embedded.runner import choose_kernels, draw, on_device
from stages.engines.embedded.sampling.draw import ban, forced_logits, join_parts, put_forced
from stages.models.spec import ModelSpec

BUSY_FILE = "busy"
"""In the ranks' folder: float64 seconds that each has computed, by rank."""


@dataclass(frozen=True)
class RankSpec:
    """What a rank must know to begin."""

    rank: int
    tensor: int
    pipeline: int
    share: Share
    model: ModelSpec
    """Of the whole model."""
    engine: EngineConfig
    max_seq: int
    num_blocks: int
    device: str
    threads: int
    folder: str
    """Shared by the ranks of one engine, absolute."""

    @property
    def name(self) -> str:
        return f"rank {self.rank} of {self.tensor * self.pipeline}"


class RankModel:
    """Owns one rank's weights, its part of the cache, and its connections to the other ranks."""

    def __init__(self, spec: RankSpec) -> None:
        """Blocks until all ranks have come. Without weights: `adopt(prepare(...))` brings the first."""
        self._spec, self.name = spec, spec.name
        self._part = spec.share.spec(spec.model)
        """What is computed here."""
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
        self._busy = np.memmap(Path(spec.folder) / BUSY_FILE, np.float64, "r+")
        self._communicator = RankCommunicator(Path(spec.folder), spec.rank, spec.tensor, spec.pipeline, self._device)

    @torch.inference_mode()
    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> LlamaWeights:
        """Weights of this rank's slices (see `sharding`) beside the ones in use: all of them the first time, then those
        that change. From any thread. Raises WeightsError for the first that is not finite."""
        if self._weights is None:
            dtype = getattr(torch, self._spec.engine.dtype)
            return build_weights(self._part, tensors, dtype, self._device, self._spec.max_seq, self._kernels)
        return refit_weights(self._part, self._weights, tensors, self._kernels)

    def end_threads(self) -> None:
        """See `Kernels`."""
        self._kernels.end_threads()

    def adopt(self, weights: LlamaWeights) -> None:
        """These from the next pass on."""
        self._weights = weights

    @torch.inference_mode()
    def run(self, batch: Batch) -> Draws | None:
        """This rank's part of a pass; what was drawn, on the first rank of the last stage."""
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
        mine = self._spec.share.tokens
        ban(scores, [tuple(token - mine.start for token in banned if token in mine) for banned in batch.banned])
        given = forced_logits(scores, batch.temperatures, batch.forced, mine.start)
        part = self._kernels.choose_part(scores, batch.temperatures, batch.keys, mine.start, self._part.vocab_size)
        put_forced(part, batch.forced, given)
        parts = self._communicator.gather(part)
        if parts is None:
            return None
        tokens, logprobs = join_parts(parts)
        return Draws(tokens.cpu().numpy(), logprobs.cpu().numpy(), seen)

    @torch.inference_mode()
    def read_cache(self, blocks: Sequence[int], num_positions: int) -> np.ndarray:
        """This rank's layers and heads of a row's keys and values: see `KVCache.read`."""
        return self._cache.read(blocks, num_positions)

    @torch.inference_mode()
    def write_cache(self, blocks: Sequence[int], copied: np.ndarray) -> None:
        self._cache.write(blocks, copied)

    @property
    def awake(self) -> bool:
        return self._cache.allocated

    def sleep(self) -> None:
        self._cache.release()

    def wake(self) -> None:
        self._cache.allocate()

    def close(self) -> None:
        self._cache.release()
        self._communicator.close()
