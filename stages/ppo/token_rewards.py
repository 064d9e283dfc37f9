"""Turn one score per response into one reward per token.

A score is shaped in this order: a cut response gets its fixed score; scores are normalised by the run's mean and
spread; the KL penalty is added per token; and rewards are whitened if the config asks for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from beartype import beartype
from jaxtyping import Bool, Float, jaxtyped
from torch import Tensor

from stages.ppo.config import KLConfig, NormalizeConfig
from stages.ppo.kl import token_kl
from stages.ppo.masks import last_token_mask


@dataclass(frozen=True)
class RunningMoments:
    """Mean, sum of squared distances from it, and number of all scores so far in the run."""

    mean: float = 0.0
    squares: float = 0.0
    count: int = 0

    @property
    def std(self) -> float:
        """Standard deviation, divided by the number; 0 before the first score."""
        return math.sqrt(self.squares / self.count) if self.count else 0.0


@jaxtyped(typechecker=beartype)
def penalise_missing_eos(
    scores: Float[Tensor, " rows"], truncated: Bool[Tensor, " rows"], missing_eos_score: float | None
) -> Float[Tensor, " rows"]:
    """Replace the score of every cut response by `missing_eos_score`, if it is set. In float32, as scores are stored:
    otherwise a reward's own -0.1 would differ from it by rounding, and constant scores would have a spread that they
    are divided by."""
    if missing_eos_score is None:
        return scores
    return torch.where(truncated, torch.tensor(missing_eos_score, dtype=torch.float32).to(scores), scores)


@jaxtyped(typechecker=beartype)
def update_running_moments(state: RunningMoments, scores: Float[Tensor, " rows"]) -> RunningMoments:
    """Return the running moments with this step's n scores, of mean s, included:

        m' = m + (sum(scores) - n*m) / (count + n)
        q' = q + sum((scores - s)^2) + (s - m)^2 * count * n / (count + n)

    (Chan, Golub and LeVeque 1983: no difference of large sums of squares.)
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
    """Return (score - mean) / std, bounded to -clip .. clip; each only if the config asks for it. Scores that have not
    varied yet are not divided."""
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

    The KL term exists only if `cfg.where` is "reward"; under "loss" the policy loss has it. `policy_logprobs`: of the
    proximal policy, or of the sampler if no proximal policy was computed.
    """
    score_at_last = torch.where(last_token_mask(mask), scores[:, None], 0)
    if cfg.where == "loss":
        return score_at_last
    penalty = kl_coef * token_kl(policy_logprobs, ref_logprobs, cfg.estimator)
    return score_at_last - torch.where(mask, penalty, 0)
