"""Logits to tokens: suppression, temperature, the keyed draw, and the log-prob of what was drawn. May import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Float32, Float64, Int64, UInt64

from stages.engines.embedded.sampling.noise import block_rows, gumbel, gumbel_of, token_words


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
    _heat(logits, temperatures)
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


def sample_part(
    logits: Float32[torch.Tensor, "rows part"],
    temperatures: Sequence[float],
    keys: UInt64[np.ndarray, " rows"],
    first: int,
    vocab: int,
) -> Float64[torch.Tensor, "rows 5"]:
    """What `join_parts` needs of a part of the vocabulary: per row the token that is best here, its logit + noise, its
    logit, the largest logit, and the sum of e^(logit - largest). Overwrites `logits`."""
    _heat(logits, temperatures)
    noise = gumbel_of(keys, token_words(vocab, logits.device)[:, first : first + logits.shape[1]])
    noise.mul_(torch.tensor([t > 0 for t in temperatures], device=logits.device)[:, None])
    noisy, tokens = noise.add_(logits).max(-1)
    largest = logits.amax(-1)
    logit = logits.gather(1, tokens[:, None])[:, 0]
    # where every token of the part is banned: e^(-inf - 0) is 0, e^(-inf + inf) would not be a number
    sums = logits.sub_(largest.clamp_min(torch.finfo(torch.float32).min)[:, None]).exp_().sum(-1, dtype=torch.float64)
    return torch.stack([(tokens + first).double(), noisy.double(), logit.double(), largest.double(), sums], dim=1)


def join_parts(
    parts: Float64[torch.Tensor, "parts rows 5"],
) -> tuple[Int64[torch.Tensor, " rows"], Float32[torch.Tensor, " rows"]]:
    """The draw from the whole vocabulary, and its log-prob, from what is known of its parts: the best of the best, and
    log of the sum of all parts' sums."""
    tokens, noisy, logits, largest, sums = parts.unbind(-1)
    best = noisy.argmax(0)[None]
    top = largest.amax(0)
    total = torch.where(sums > 0, sums * (largest - top).exp(), 0.0).sum(0)
    return tokens.gather(0, best)[0].long(), (logits.gather(0, best)[0] - top - total.log()).float()


def forced_logprobs(
    logits: Float32[torch.Tensor, "rows vocab"], temperatures: Sequence[float], forced: Mapping[int, int]
) -> dict[int, float]:
    """Log-probs of tokens that are given, by row: what `sample` says of a token that it draws. Leaves `logits` as they
    are."""
    found = {}
    for row, token in forced.items():
        heated = logits[row] / (temperatures[row] or 1.0)
        found[row] = float(heated[token] - heated.logsumexp(-1))
    return found


def forced_logits(
    logits: Float32[torch.Tensor, "rows part"], temperatures: Sequence[float], forced: Mapping[int, int], first: int
) -> dict[int, float]:
    """Logits over temperature of the given tokens that lie in this part of the vocabulary, by row; for `put_forced`,
    once `sample_part` has overwritten the logits."""
    inside = {row: token - first for row, token in forced.items() if 0 <= token - first < logits.shape[1]}
    return {row: float(logits[row, token]) / (temperatures[row] or 1.0) for row, token in inside.items()}


def put_forced(part: Float64[torch.Tensor, "rows 5"], forced: Mapping[int, int], logits: Mapping[int, float]) -> None:
    """Has the given tokens win in `join_parts`, in place: where their logits are, nothing is better; elsewhere, nothing
    is worse."""
    for row, token in forced.items():
        part[row, 0] = token
        part[row, 1] = float("inf") if row in logits else float("-inf")
        part[row, 2] = logits.get(row, 0.0)


def _heat(logits: Float32[torch.Tensor, "rows vocab"], temperatures: Sequence[float]) -> None:
    """Divides by the temperatures, in place; by 1 where they are 0."""
    divisors = [t or 1.0 for t in temperatures]
    if any(d != 1.0 for d in divisors):
        logits.div_(torch.tensor(divisors, device=logits.device)[:, None])
