"""Turn scores into advantages: first one reward per token, then generalised advantage estimation (GAE) over the sampled
tokens of each row (Schulman et al. 2016, eq. 11-16).

A score is shaped in this order. A cut response gets a fixed score, scores are normalised by the run's mean and standard
deviation, the KL penalty is subtracted per token, and rewards are whitened. The config turns each of these on or off.

The estimators without a critic are the values of `ppo.advantage` below. group, group_mean and rloo compare a response's
reward with the rewards of the other responses to its prompt. reinforce_pp compares a token's reward to go with the mean
of the step.

    R_i = sum_t r_t of response i. A group is the k responses to one prompt, without the rows that the loss leaves out.

    group          A_i = (R_i - mean_group R) / (std_group R + eps)        eq. of GRPO: Shao et al. 2024 (2402.03300)
    group_mean     A_i = R_i - mean_group R                                Dr. GRPO: Liu et al. 2025 (2503.20783)
    rloo           A_i = R_i - mean of the other R_j of the group          Ahmadian et al. 2024 (2402.14740)
    reinforce_pp   A_t = sum_{s >= t} gamma^(s - t) r_s, then whitened     Hu 2025 (2501.03262)

group, group_mean and rloo give every token of a response the same advantage. In a group whose R are all equal, the
advantages are set to exactly 0. Otherwise the rounding error of the mean would train the policy, because AdamW divides
by a gradient's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from beartype import beartype
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

from stages.ppo.config import KLConfig, NormalizeConfig
from stages.ppo.kl import token_kl
from stages.ppo.masks import last_token_mask


@dataclass(frozen=True)
class RunningMoments:
    """Moments of all scores so far in the run: mean, sum of squared distances from the mean, and number of scores."""

    mean: float = 0.0
    squares: float = 0.0
    count: int = 0

    @property
    def std(self) -> float:
        """Population standard deviation: the variance divides by `count`. 0 before the first score."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@jaxtyped(typechecker=beartype)
def penalise_missing_eos(
    scores: Float[Tensor, " rows"], truncated: Bool[Tensor, " rows"], missing_eos_score: float | None
) -> Float[Tensor, " rows"]:
    """Return the scores, with `missing_eos_score` as the score of every truncated response. If `missing_eos_score` is
    None, return the scores unchanged.

    `missing_eos_score` is rounded to float32, in which scores are stored. Without the rounding, scores of -0.1 and a
    `missing_eos_score` of -0.1 would differ by about 1e-9. The standard deviation would then be of this size, and
    normalisation would divide by it.
    """
    if missing_eos_score is None:
        return scores
    return torch.where(truncated, torch.tensor(missing_eos_score, dtype=torch.float32).to(scores), scores)


@jaxtyped(typechecker=beartype)
def update_running_moments(state: RunningMoments, scores: Float[Tensor, " rows"]) -> RunningMoments:
    """Return the running moments after adding the n scores of this step. s is the mean of these scores. m is the old
    mean of all scores, and q is the old sum of squared distances from the mean. m' and q' are the new ones:

        m'   = m + (sum(scores) - n*m) / (count + n)
        q'   = q + sum((scores - s)^2) + (s - m)^2 * count * n / (count + n)

    No term of q' is negative, so no precision is lost by subtraction (Chan, Golub and LeVeque 1983).
    """
    n = scores.numel()
    if n == 0:
        return state
    count = state.count + n
    mean = state.mean + (float(scores.sum()) - n * state.mean) / count
    between = (float(scores.mean()) - state.mean) ** 2 * state.count * n / count
    return RunningMoments(mean, state.squares + float((scores - scores.mean()).square().sum()) + between, count)


@jaxtyped(typechecker=beartype)
def normalise_scores(
    scores: Float[Tensor, " rows"], moments: RunningMoments, cfg: NormalizeConfig
) -> Float[Tensor, " rows"]:
    """Return (score - mean) / std, clipped to -clip .. clip. The config turns each of the three operations on or off.
    As long as all scores of the run are equal, they are not divided by std."""
    if cfg.mean:
        scores = scores - moments.mean
    if cfg.scale and moments.std > 0:
        scores = scores / moments.std
    return scores if cfg.clip is None else scores.clamp(-cfg.clip, cfg.clip)


@jaxtyped(typechecker=beartype)
def token_rewards(
    scores: Float[Tensor, " rows"],
    policy_logprobs: Float[Tensor, "rows seq"],
    ref_logprobs: Float[Tensor, "rows seq"],
    mask: Bool[Tensor, "rows seq"],
    kl_coef: float,
    cfg: KLConfig,
) -> Float[Tensor, "rows seq"]:
    """Return r_t = 1[t = last] * R - beta * k_t over the sampled tokens, 0 elsewhere.

    R is the row's score, beta is `kl_coef`, and k_t is the estimate of the KL to the reference at token t. The KL term
    exists only if `cfg.where` is "reward". If it is "loss", the KL is a term of the policy loss.

    Args:
        policy_logprobs: log-probs of the proximal policy, or of the sampler if no proximal policy was computed.
    """
    score_at_last = torch.where(last_token_mask(mask), scores[:, None], 0)
    if cfg.where == "loss":
        return score_at_last
    penalty = kl_coef * token_kl(policy_logprobs, ref_logprobs, cfg.estimator)
    return score_at_last - torch.where(mask, penalty, 0)


@jaxtyped(typechecker=beartype)
def gae(
    rewards: Float[Tensor, "rows seq"],
    values: Float[Tensor, "rows seq"],
    bootstrap_values: Float[Tensor, " rows"],
    mask: Bool[Tensor, "rows seq"],
    truncated: Bool[Tensor, " rows"],
    gamma: float,
    lam: float,
    on_truncation: Literal["bootstrap", "terminate"],
) -> tuple[Float[Tensor, "rows seq"], Float[Tensor, "rows seq"]]:
    """Return advantages A_t and returns G_t, both before any whitening; 0 outside the mask.

        delta_t = r_t + gamma * V_{t+1} - V_t
        A_t     = delta_t + gamma * lam * A_{t+1}
        G_t     = A_t + V_t

    V_t is the value of the state BEFORE token t. After the last token of a response

        V_{last+1} = bootstrap_value    if the response was cut and `on_truncation` is "bootstrap"
                   = 0                  otherwise: nothing follows

    and A_{last+1} = 0. The tokens inside the mask of a row must be contiguous, and may start anywhere. The results have
    no gradient.
    """
    r_t = torch.where(mask, rewards, 0).detach()
    v_t = torch.where(mask, values, 0).detach()
    bootstraps = truncated & (on_truncation == "bootstrap")
    v_end = torch.where(bootstraps, bootstrap_values, 0).detach()

    v_tp1 = torch.cat([v_t[:, 1:], torch.zeros_like(v_t[:, :1])], dim=1)
    v_tp1 = torch.where(last_token_mask(mask), v_end[:, None], v_tp1)
    delta_t = torch.where(mask, r_t + gamma * v_tp1 - v_t, 0)

    # The mask is applied again, because the recursion continues into the prompt.
    a_t = torch.where(mask, _discounted_sums(delta_t, gamma * lam), 0)
    return a_t, a_t + v_t


def _discounted_sums(x_t: Float[Tensor, "rows seq"], factor: float) -> Float[Tensor, "rows seq"]:
    """Return y_t = x_t + factor * y_{t+1}. The loop has the bits of the recursion. On the transposed array all rows of
    a token lie together, so each token takes two numpy calls."""
    y = x_t.t().contiguous().numpy()
    y_tp1, discounted = np.zeros_like(y[:1]), np.empty_like(y[:1])
    for t in reversed(range(len(y))):
        np.multiply(y_tp1, factor, discounted)
        y_tp1 = y[t : t + 1]
        np.add(y_tp1, discounted, y_tp1)
    return torch.from_numpy(y).t().contiguous()


# ---- critic free -----------------------------------------------------------------------------------------

GROUP_STD_EPS = 1e-6
"""Term added to a group's standard deviation."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class Groups:
    """A division of rows into groups. The rows of a group are responses to the same prompt."""

    number: Int[Tensor, " rows"]
    """Index of each row's group. Groups are numbered from 0 without a gap. The rows of a group need not be next to each
    other."""
    counted: Bool[Tensor, " rows"]
    """Rows that take part in their group's mean and deviation. The other rows have advantage 0."""

    @property
    def num_groups(self) -> int:
        return int(self.number.max()) + 1 if self.number.numel() else 0


@jaxtyped(typechecker=beartype)
def equal_groups(x: Float[Tensor, " rows"], groups: Groups) -> Bool[Tensor, " groups"]:
    """Return True for each group whose counted rows all have the same x, to the last bit. Also return True for a group
    with fewer than two counted rows."""
    inf = torch.full((groups.num_groups,), torch.inf, dtype=x.dtype)
    least = inf.scatter_reduce(0, groups.number, torch.where(groups.counted, x, torch.inf), "amin")
    most = (-inf).scatter_reduce(0, groups.number, torch.where(groups.counted, x, -torch.inf), "amax")
    return least >= most


@jaxtyped(typechecker=beartype)
def group_std(x: Float[Tensor, " rows"], groups: Groups) -> Float[Tensor, " groups"]:
    """Return the standard deviation of x in each group, over the rows whose `groups.counted` is True. The variance
    divides by n - 1. The result is exactly 0 if these rows have equal x, or if there is only one."""
    squares = _sums(_centred(x, groups) ** 2, groups)
    return torch.sqrt(squares / (_sizes(groups, x) - 1).clamp(min=1))


@jaxtyped(typechecker=beartype)
def group_advantages(
    totals: Float[Tensor, " rows"], groups: Groups, scale: Literal["std", "none"]
) -> Float[Tensor, " rows"]:
    """Return A_i = R_i - mean, where R is `totals` and the mean is over the row's group. If `scale` is "std", return
    A_i / (std + GROUP_STD_EPS), where std is the group's standard deviation. Its variance divides by n - 1, as in
    published runs. The GRPO paper does not say which divisor it uses."""
    centred = _centred(totals, groups)
    return centred if scale == "none" else centred / (group_std(totals, groups) + GROUP_STD_EPS)[groups.number]


@jaxtyped(typechecker=beartype)
def leave_one_out_advantages(totals: Float[Tensor, " rows"], groups: Groups) -> Float[Tensor, " rows"]:
    """Return A_i = R_i - 1/(n - 1) sum_{j != i} R_j = n/(n - 1) (R_i - mean). R is `totals`, and n is the number of
    counted rows of the group. A_i is 0 in a group of one row."""
    sizes = _sizes(groups, totals)
    return _centred(totals, groups) * (sizes / (sizes - 1).clamp(min=1))[groups.number]


@jaxtyped(typechecker=beartype)
def rewards_to_go(
    rewards: Float[Tensor, "rows seq"], mask: Bool[Tensor, "rows seq"], gamma: float
) -> Float[Tensor, "rows seq"]:
    """Return G_t = r_t + gamma * G_{t+1} over the sampled tokens, 0 elsewhere. This is GAE with lambda 1 and values of
    0."""
    none = torch.zeros_like(rewards)
    never = torch.zeros_like(mask[:, 0])
    to_go, _ = gae(rewards, none, none[:, 0], mask, never, gamma, 1.0, "terminate")
    return to_go


def _centred(x: Tensor, groups: Groups) -> Tensor:
    """Return x minus the mean of its group: exactly 0 where all counted rows are equal, and in rows that do not
    count."""
    means = _sums(x, groups) / _sizes(groups, x).clamp(min=1)
    varies = groups.counted & ~equal_groups(x, groups)[groups.number]
    return torch.where(varies, x - means[groups.number], 0)


def _sums(x: Tensor, groups: Groups) -> Tensor:
    zeros = torch.zeros(groups.num_groups, dtype=x.dtype)
    return zeros.index_add(0, groups.number, torch.where(groups.counted, x, 0))


def _sizes(groups: Groups, like: Tensor) -> Tensor:
    """Return the number of counted rows (`groups.counted`) of each group, in the dtype of `like`."""
    return _sums(torch.ones_like(like), groups)
