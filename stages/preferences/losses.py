"""What a reward model minimises: Bradley–Terry on pairs, or the square error of ratings.

With K responses to a prompt compared in all C(K, 2) pairs, as one group (Ouyang et al. 2022, equation 1):

    L = - mean over groups of  1 / C(K, 2)  sum over pairs (w, l) of  log sigma(r_w - r_l)

Both losses are sums of weight * term with weights over the whole minibatch: add them over micro-batches and ranks.

May import numpy, torch, jaxtyping, stages.models.reward_host (the row that is none), stages.ppo.stats and
stages.preferences.data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import Float, Int, jaxtyped
from torch import Tensor

from stages.models.reward_host import NO_ROW, ScoreLoss
from stages.ppo.stats import LossStats
from stages.preferences.data import Group

LOSS = "critic/loss"
"""What the trainer, for which a reward model is a critic, calls the loss."""


@jaxtyped(typechecker=beartype)
def bradley_terry_loss(
    scores: Float[Tensor, " rows"],
    better: Int[Tensor, " pairs"],
    worse: Int[Tensor, " pairs"],
    weights: Float[Tensor, " pairs"],
) -> tuple[Float[Tensor, ""], LossStats]:
    """-sum of weight * log sigma(r_better - r_worse), the probability of the judgement under Bradley and Terry (1952).
    Stats: the loss; `accuracy`, the share of pairs that are ordered as judged, ties a half; `margin`, the mean
    difference."""
    margins = scores[better] - scores[worse]
    loss = -(weights * F.logsigmoid(margins)).sum()
    with torch.no_grad():
        right = (margins > 0).float() + 0.5 * (margins == 0).float()
        sums = {LOSS: loss.detach(), "accuracy": (weights * right).sum(), "margin": (weights * margins).sum()}
    return loss, LossStats(sums, {})


@jaxtyped(typechecker=beartype)
def regression_loss(
    scores: Float[Tensor, " rows"], ratings: Float[Tensor, " rows"], weights: Float[Tensor, " rows"]
) -> tuple[Float[Tensor, ""], LossStats]:
    """sum of weight * (score - rating)^2. Stats: the loss; `absolute_error`."""
    errors = scores - ratings
    loss = (weights * errors**2).sum()
    with torch.no_grad():
        sums = {LOSS: loss.detach(), "absolute_error": (weights * errors.abs()).sum()}
    return loss, LossStats(sums, {})


def pair_loss_of(groups: Sequence[Group], num_rows: int) -> ScoreLoss:
    """Bradley–Terry of a minibatch's groups, each of which counts the same; `num_rows`: of the whole part."""
    better = np.concatenate([group.pairs.better for group in groups])
    worse = np.concatenate([group.pairs.worse for group in groups])
    weights = np.concatenate([np.full(len(group.pairs), 1 / len(group.pairs) / len(groups)) for group in groups])

    def loss(scores: Tensor, rows: np.ndarray) -> tuple[Tensor, LossStats]:
        position = _positions(rows, num_rows)
        here = np.flatnonzero(position[better] >= 0)  # a group is never cut: the other row is here too

        def chosen(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array[here]).to(scores.device)

        return bradley_terry_loss(
            scores, chosen(position[better]), chosen(position[worse]), chosen(weights).to(scores.dtype)
        )

    return loss


def rating_loss_of(groups: Sequence[Group], ratings: np.ndarray) -> ScoreLoss:
    """Mean square error of a minibatch's rows. `ratings`: of the whole part."""
    total = sum(len(group.rows) for group in groups)

    def loss(scores: Tensor, rows: np.ndarray) -> tuple[Tensor, LossStats]:
        real = rows != NO_ROW
        targets = torch.from_numpy(np.where(real, ratings[rows], 0.0)).to(scores)
        return regression_loss(scores, targets, torch.from_numpy(real / total).to(scores))

    return loss


def _positions(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Of every row of a part its place in a micro-batch, -1 where it is not in it."""
    position = np.full(num_rows, -1, np.int64)
    real = rows != NO_ROW
    position[rows[real]] = np.flatnonzero(real)
    return position
