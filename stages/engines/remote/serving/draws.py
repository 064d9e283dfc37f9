"""The draw by law 4, for engines whose own draws are not keyed: from a batch's logits to tokens and log-probs.

Runs in the engine's own Python environment. May import numpy, torch, this folder and stages.engines.embedded.sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from stages.engines.embedded.sampling.draw import ban, forced_logprobs, sample
from stages.engines.embedded.sampling.noise import noise_keys
from stages.engines.remote.serving.adapter import ServedRow


def draw(logits: torch.Tensor, rows: Sequence[ServedRow], made: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [rows] and their log-probs [rows], of logits [rows, vocab] in float32, which it overwrites. `made`: tokens
    that each row has of its response already."""
    pairs = list(zip(rows, made, strict=True))
    ban(logits, [row.suppress + (row.stop if n < row.min_new_tokens else ()) for row, n in pairs])
    temperatures = [row.temperature for row in rows]
    forced = {i: row.forced[n] for i, (row, n) in enumerate(pairs) if row.forced}
    given = forced_logprobs(logits, temperatures, forced)
    keys = noise_keys(
        np.array([row.seed for row in rows]),
        np.array([row.step for row in rows]),
        np.array([row.row for row in rows]),
        np.array([len(row.tokens) + n for row, n in pairs]),
    )
    tokens, logprobs = sample(logits, temperatures, keys)
    for i, token in forced.items():
        tokens[i], logprobs[i] = token, given[i]
    return tokens, logprobs
