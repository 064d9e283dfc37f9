"""Sample tokens with keyed noise, for engines that cannot do so themselves. The function `draw` turns the logits of a
batch into tokens and log-probs. The noise of each token is keyed by (seed, step, row, position).

Runs in the engine's own Python environment.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import numpy as np
import torch

from stages.engines.embedded.kernels.cpu.native import load_native_kernels
from stages.engines.embedded.sampling import ban, forced_logprobs, noise_keys, sample
from stages.engines.remote.serving.adapter import ServedRow
from stages.native.compile import NoNativeKernelsError

Choose = Callable[[torch.Tensor, list[float], np.ndarray], tuple[torch.Tensor, torch.Tensor]]
"""Function from logits [rows, vocab], temperatures and keys [rows] to tokens and log-probs, like `sampling.sample`."""


@functools.cache
def fastest_choice(device: str) -> tuple[str, Choose]:
    """Return the fastest implementation of the draw on a type of device: its name and the function. On a CPU with a
    compiler this is the embedded engine's C kernel. Otherwise it is `sample`, in torch."""
    if device == "cpu":
        try:
            return "native", load_native_kernels().choose
        except NoNativeKernelsError as error:
            print(f"tokens are drawn by torch, which is slower: {error}", flush=True)
    return "torch", sample


def draw(
    logits: torch.Tensor, rows: Sequence[ServedRow], made: Sequence[int], choose: Choose = sample
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw a token for each row, and return tokens [rows] and log-probs [rows]. `logits` [rows, vocab] are float32 and
    are overwritten. A row with prescribed tokens gets its next prescribed token. `made`: number of tokens that each
    row's response already has. `choose`: function that draws."""
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
    tokens, logprobs = choose(
        logits.contiguous(), temperatures, keys
    )  # logits of a padded vocabulary are not contiguous
    for i, token in forced.items():
        tokens[i], logprobs[i] = token, given[i]
    return tokens, logprobs
