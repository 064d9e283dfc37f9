"""The losses of a reward model (Bradley–Terry on pairs, or the square error of ratings), and measures of its agreement
with people.

If K responses to a prompt are compared in all C(K, 2) pairs, these pairs are one group (Ouyang et al. 2022, eq. 1):

    L = - mean over groups of  1 / C(K, 2)  sum over pairs (w, l) of  log sigma(r_w - r_l)

Both losses are sums of weight * term. The weights of a whole minibatch add up to 1, so the loss of a minibatch is the
sum over its micro-batches and ranks.

The measures are accuracy on pairs with its standard error, calibration, margin, and the best accuracy that the noise of
the ratings allows. They are pure functions, in float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import Float, Int, jaxtyped
from torch import Tensor

from stages.models.reward_model import NO_ROW, ScoreLoss
from stages.ppo.losses import LossStats
from stages.preferences.data import Group

LOSS = "critic/loss"
"""Name of the loss in the trainer's metrics. The trainer treats a reward model as a critic."""


@jaxtyped(typechecker=beartype)
def bradley_terry_loss(
    scores: Float[Tensor, " rows"],
    better: Int[Tensor, " pairs"],
    worse: Int[Tensor, " pairs"],
    weights: Float[Tensor, " pairs"],
) -> tuple[Float[Tensor, ""], LossStats]:
    """Return (loss, stats). The loss is -sum of weight * log sigma(r_better - r_worse), the negative log-likelihood of
    the judgements (Bradley and Terry 1952). The stats are:

    - the loss
    - `accuracy`: weighted share of pairs that are ordered as judged; a tie counts half
    - `margin`: weighted mean of r_better - r_worse"""
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
    """Return (loss, stats). The loss is the sum of weight * (score - rating)^2. The stats are the loss and
    `absolute_error`, which is the weighted mean of |score - rating|."""
    errors = scores - ratings
    loss = (weights * errors**2).sum()
    with torch.no_grad():
        sums = {LOSS: loss.detach(), "absolute_error": (weights * errors.abs()).sum()}
    return loss, LossStats(sums, {})


def pair_loss_of(groups: Sequence[Group], num_rows: int) -> ScoreLoss:
    """Return a function that computes the share of a micro-batch in the Bradley–Terry loss of a minibatch.

    Args:
        groups: the groups of the minibatch. All groups have the same weight.
        num_rows: number of rows of the whole training set. All rows are given as indices into this set."""
    better = np.concatenate([group.pairs.better for group in groups])
    worse = np.concatenate([group.pairs.worse for group in groups])
    weights = np.concatenate([np.full(len(group.pairs), 1 / len(group.pairs) / len(groups)) for group in groups])

    def loss(scores: Tensor, rows: np.ndarray) -> tuple[Tensor, LossStats]:
        position = _positions(rows, num_rows)
        here = np.flatnonzero(position[better] >= 0)  # a group is never divided, so the other row is here too

        def chosen(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array[here]).to(scores.device)

        return bradley_terry_loss(
            scores, chosen(position[better]), chosen(position[worse]), chosen(weights).to(scores.dtype)
        )

    return loss


def rating_loss_of(groups: Sequence[Group], ratings: np.ndarray) -> ScoreLoss:
    """Return a function that computes the share of a micro-batch in the mean square error of a minibatch.

    Args:
        groups: the groups of the minibatch. All their rows have the same weight.
        ratings: ratings, or mean scores of the teachers, of all rows of the training set."""
    total = sum(len(group.rows) for group in groups)

    def loss(scores: Tensor, rows: np.ndarray) -> tuple[Tensor, LossStats]:
        real = rows != NO_ROW
        targets = torch.from_numpy(np.where(real, ratings[rows], 0.0)).to(scores)
        return regression_loss(scores, targets, torch.from_numpy(real / total).to(scores))

    return loss


def _positions(rows: np.ndarray, num_rows: int) -> np.ndarray:
    """Return each row's position in a micro-batch of `rows`, or -1 if it is not there. `NO_ROW` is padding."""
    position = np.full(num_rows, -1, np.int64)
    real = rows != NO_ROW
    position[rows[real]] = np.flatnonzero(real)
    return position


# ---- measures --------------------------------------------------------------------------------------------

NUM_BINS = 10


@dataclass(frozen=True)
class Reliability:
    """Calibration of a reward model. Pairs are sorted into bins of equal width by the model's confidence in their
    order, from 0.5 to 1. A bin without pairs has confidence and accuracy NaN."""

    confidence: np.ndarray
    """[bins]: mean of sigma(|margin|)."""
    accuracy: np.ndarray
    counts: np.ndarray

    @property
    def ece(self) -> float:
        """Expected calibration error (Guo et al. 2017): mean of |accuracy - confidence| over the bins. Each bin is
        weighted by its number of pairs."""
        held = self.counts > 0
        gaps = np.abs(self.accuracy - self.confidence)[held]
        return float((gaps * self.counts[held]).sum() / self.counts.sum())


def right_order(margins: np.ndarray) -> np.ndarray:
    """Return 1 for each pair whose margin (better minus worse) is above 0, 0 if it is below, 0.5 for a tie."""
    return (margins > 0) + 0.5 * (margins == 0)


def dyadic_standard_error(values: np.ndarray, first: np.ndarray, second: np.ndarray) -> float:
    """Return the standard error of the mean of pairs' values. Pairs that share a member are not independent, so this
    uses dyadic clusters (Aronow, Samii and Assenova 2015, equation 3). P is the number of pairs:

        Var = 1 / P^2  sum over pairs p, q with a common member of  e_p e_q,     e = value - mean

    `first`, `second`: int [pairs], the cluster of each pair's first and second member. They are equal for a pair within
    one cluster (a prompt). If the sum is not positive, which is possible with few pairs, the pairs count as
    independent."""
    errors = values - values.mean()
    size = int(max(first.max(), second.max())) + 1
    distinct = first != second
    sums = np.bincount(first, errors, size) + np.bincount(second[distinct], errors[distinct], size)
    total = (sums**2).sum() - (errors[distinct] ** 2).sum()
    if total <= 0:
        total = (errors**2).sum()
    return float(math.sqrt(total) / len(values))


def spearman(first: np.ndarray, second: np.ndarray) -> float:
    """Return Spearman's rank correlation: Pearson's correlation of the ranks. Equal numbers share their mean rank."""
    return float(np.corrcoef(_ranks(first), _ranks(second))[0, 1])


def _ranks(values: np.ndarray) -> np.ndarray:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = counts.cumsum()
    return (ends - (counts - 1) / 2)[inverse]


def reliability(margins: np.ndarray) -> Reliability:
    """Return the calibration of Bradley–Terry scores. The model's confidence in the order of a pair is
    sigma(|margin|)."""
    confidence = 1 / (1 + np.exp(-np.abs(margins)))
    bins = np.minimum(((confidence - 0.5) * 2 * NUM_BINS).astype(int), NUM_BINS - 1)
    counts = np.bincount(bins, minlength=NUM_BINS)
    with np.errstate(invalid="ignore"):
        sure, right = (np.bincount(bins, of, NUM_BINS) / counts for of in (confidence, right_order(margins)))
    return Reliability(sure, right, counts)


def best_accuracy(ratings: np.ndarray, standard_errors: np.ndarray, better: np.ndarray, worse: np.ndarray) -> float:
    """Return the best accuracy that any model can reach on pairs of noisy ratings. The true rating of a text is the
    mean opinion of all people, not only of the few people who rated it. A pair's observed order may differ from the
    order of its true ratings. The result is the mean probability that both orders are the same.

    The true ratings are assumed to be normally distributed around m, the mean of the observed ratings. Their variance
    tau^2 is the variance of the observed ratings minus the mean squared standard error:

        tau^2           = max(0, var(ratings) - mean(se^2)),   b = tau^2 / (tau^2 + se^2)
        true | rating   ~ N(m + b (rating - m), b se^2)
    """
    variance = standard_errors**2
    tau2 = max(0.0, float(ratings.var() - variance.mean()))
    with np.errstate(invalid="ignore"):
        share = np.where(tau2 + variance > 0, tau2 / (tau2 + variance), 1.0)
    means = ratings.mean() + share * (ratings - ratings.mean())
    posterior = share * variance
    gap, spread = means[better] - means[worse], np.sqrt(posterior[better] + posterior[worse])
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.where(spread > 0, gap / spread, np.sign(gap) * np.inf)
    return float(np.mean([0.5 * (1 + math.erf(value / math.sqrt(2))) for value in z]))
