"""Logits to tokens: suppression, temperature, the keyed draw, and the log-prob of what was drawn. May import torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float32, Int64, UInt64

from stages.engines.noise import block_rows, gumbel


def ban(logits: Float32[torch.Tensor, "rows vocab"], banned: Sequence[tuple[int, ...]]) -> None:
    """Takes each row's banned tokens out of its distribution, in place. Rows with the same ones, as all rows of a run
    mostly are, share an operation."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, tokens in enumerate(banned):
        if tokens:
            groups.setdefault(tokens, []).append(row)
    for tokens, rows in groups.items():
        columns = torch.tensor(tokens, device=logits.device)
        if len(rows) == logits.shape[0]:
            logits.index_fill_(1, columns, float("-inf"))
        else:
            logits[torch.tensor(rows, device=logits.device)[:, None], columns] = float("-inf")


def sample(
    logits: Float32[torch.Tensor, "rows vocab"], temperatures: Sequence[float], keys: UInt64[np.ndarray, " rows"]
) -> tuple[Int64[torch.Tensor, " rows"], Float32[torch.Tensor, " rows"]]:
    """Draws a token per row from softmax(logits / temperature), as the arg max of log p + Gumbel noise of the row's
    key. Overwrites `logits`.

    Temperature 0 takes the arg max itself; its log-prob is that of the distribution at temperature 1."""
    device = logits.device
    divisors = [t or 1.0 for t in temperatures]
    if any(d != 1.0 for d in divisors):
        logits.div_(torch.tensor(divisors, device=device)[:, None])
    drawn = torch.tensor([t > 0 for t in temperatures], device=device)[:, None]
    chosen, normalisers = [], []
    step = block_rows(logits.shape[1], device)
    for start in range(0, len(temperatures), step):
        part = slice(start, start + step)
        normalisers.append(logits[part].logsumexp(-1))
        if not any(temperatures[part]):
            chosen.append(logits[part].argmax(-1))
            continue
        noise = gumbel(keys[part], logits.shape[1], device)
        if not all(temperatures[part]):
            noise.mul_(drawn[part])
        chosen.append(noise.add_(logits[part]).argmax(-1))
    tokens = torch.cat(chosen)
    return tokens, logits.gather(1, tokens[:, None])[:, 0] - torch.cat(normalisers)
