"""One pass in terms of its chunks: laid out as tensors for the forward, its logits drawn from, its draws kept.

May import numpy, torch, stages.engines.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, Int64

from stages.engines.kernels import Kernels, Tokens
from stages.engines.kv_cache import NO_BLOCK, blocks_for
from stages.engines.noise import noise_keys
from stages.engines.sampling import ban
from stages.engines.scheduler import Chunk

Draw = tuple[int, float]
"""A token and its log-prob."""


def lay_out(chunks: Sequence[Chunk], device: torch.device) -> tuple[Tokens, Int64[torch.Tensor, " drawn"]]:
    """The tokens of a pass, chunk after chunk, and the indices of those whose logits are drawn from: of each chunk that
    samples, its last own token and its drafts."""
    ids = [token for chunk in chunks for token in chunk.tokens]
    ends = [chunk.start + chunk.count + len(chunk.drafts) for chunk in chunks]
    positions = [p for chunk, end in zip(chunks, ends, strict=True) for p in range(chunk.start, end)]
    rows = [i for i, (chunk, end) in enumerate(zip(chunks, ends, strict=True)) for _ in range(chunk.start, end)]
    longest = max(ends)
    tables = np.full((len(chunks), blocks_for(longest)), NO_BLOCK, np.int32)
    drawn: list[int] = []
    offset = 0
    for i, (chunk, end) in enumerate(zip(chunks, ends, strict=True)):
        num_blocks = blocks_for(end)
        tables[i, :num_blocks] = chunk.row.blocks[:num_blocks]
        offset += end - chunk.start
        if chunk.samples:
            drawn += range(offset - 1 - len(chunk.drafts), offset)
    tokens = Tokens(
        torch.tensor(ids, device=device),
        torch.tensor(positions, device=device),
        torch.tensor(rows, dtype=torch.int32, device=device),
        torch.from_numpy(tables).to(device),
        longest,
    )
    return tokens, torch.tensor(drawn, dtype=torch.int64, device=device)


def draw(kernels: Kernels, logits: Float32[torch.Tensor, "drawn vocab"], chunks: Sequence[Chunk]) -> list[list[Draw]]:
    """Per chunk that samples, the row's draw at its next position and at those after its drafts, each with the noise of
    its own position; whether the later ones count is decided by `keep`. Raises FloatingPointError, naming the row, if
    the model's output is not finite."""
    sampling = [chunk for chunk in chunks if chunk.samples]
    places = [(chunk.row, ahead) for chunk in sampling for ahead in range(1 + len(chunk.drafts))]
    ban(logits, [row.banned(ahead) for row, ahead in places])
    requests = [row.request for row, _ in places]
    positions = [len(row.tokens) + ahead for row, ahead in places]
    key_parts = [(r.seed, r.step, r.row, position) for r, position in zip(requests, positions, strict=True)]
    keys = noise_keys(*np.array(key_parts, np.int64).T)
    tokens, logprobs = kernels.choose(logits, [r.sampling.temperature for r in requests], keys)
    draws = list(zip(tokens.tolist(), logprobs.tolist(), strict=True))
    for request, (_, logprob) in zip(requests, draws, strict=True):
        if not -float("inf") < logprob <= 1e-3:
            raise FloatingPointError(f"row {request.row}: the model's output is not finite ({logprob=})")
    split, start = [], 0
    for chunk in sampling:
        split.append(draws[start : start + 1 + len(chunk.drafts)])
        start += 1 + len(chunk.drafts)
    return split


def keep(chunk: Chunk, draws: Sequence[Draw], version: int) -> int:
    """Appends to the row the draws that are its tokens: the first one, and each that follows a draft which was right,
    up to the row's end; how many. Keys of wrong drafts stay in the cache and are overwritten later."""
    row = chunk.row
    kept = 0
    for (token, logprob), draft in zip(draws, (*chunk.drafts, None), strict=True):
        row.append(token, logprob, version)
        kept += 1
        if row.finished is not None or token != draft:
            break
    row.num_cached += kept - 1
    return kept
