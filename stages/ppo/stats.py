"""What a loss reports beside its value, in a form that can be combined over micro-batches and ranks.

May import torch and the standard library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossStats:
    """Detached scalars of one micro-batch.

    `sums` were weighted as the loss was (`masks.token_weights` over the whole minibatch): ADD them over micro-batches
    and ranks to get the minibatch's mean. `maxima` combine by MAX. Nothing else combines correctly.
    """

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def merge_stats(parts: Sequence[LossStats]) -> LossStats:
    """The stats of a minibatch from those of its micro-batches (or of its ranks' shares). Needs at least one part."""
    return LossStats(
        sums={name: torch.stack([p.sums[name] for p in parts]).sum() for name in parts[0].sums},
        maxima={name: torch.stack([p.maxima[name] for p in parts]).amax() for name in parts[0].maxima},
    )


def summarise_stats(minibatches: Sequence[LossStats]) -> dict[str, float]:
    """Metrics of a whole update from its minibatches: the mean of each sum, the largest of each maximum. Needs at least
    one minibatch."""
    means = {n: float(torch.stack([m.sums[n] for m in minibatches]).mean()) for n in minibatches[0].sums}
    maxima = {n: float(torch.stack([m.maxima[n] for m in minibatches]).amax()) for n in minibatches[0].maxima}
    return means | maxima
