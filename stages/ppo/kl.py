"""The KL penalty: estimators per token, the same estimators as a loss term, and the adaptive coefficient. The penalty
is computed only in this file. `token_rewards` subtracts `token_kl` from the rewards, or `losses` adds `token_kl_loss`
to the policy's loss.

All estimators estimate KL(pi || pi_ref) from tokens drawn from pi, with d_t = log pi(token t) - log pi_ref(token t).
Source of k1, k2, k3: J. Schulman, "Approximating KL divergence", 2020.
"""

from __future__ import annotations

import torch
from beartype import beartype
from jaxtyping import Float, jaxtyped
from torch import Tensor

from stages.ppo.config import KLConfig, KLEstimator

MAX_RELATIVE_ERROR = 0.2
"""Bound of the controller's relative error, as in Ziegler et al. 2019: it is clipped to +- 20 %."""


@jaxtyped(typechecker=beartype)
def token_kl(
    logprobs: Float[Tensor, "rows seq"], ref_logprobs: Float[Tensor, "rows seq"], estimator: KLEstimator
) -> Float[Tensor, "rows seq"]:
    """Return an estimate of KL(pi || pi_ref) at every token, in nats, with d = logprobs - ref_logprobs.

    k1 = d                   unbiased, either sign
    k2 = d^2 / 2             biased, never negative
    k3 = exp(-d) - 1 + d     unbiased, never negative
    """
    d = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return d
        case "k2":
            return d**2 / 2
        case "k3":
            return torch.expm1(-d) + d


@jaxtyped(typechecker=beartype)
def token_kl_loss(
    new_logprobs: Float[Tensor, "rows seq"],
    ref_logprobs: Float[Tensor, "rows seq"],
    estimator: KLEstimator,
) -> Float[Tensor, "rows seq"]:
    """Return `token_kl` as a loss term: the same numbers, with a gradient in `new_logprobs` that lowers the KL.

        grad k2 = d * grad log pi                   mean over pi: grad KL(pi || pi_ref)
        grad k3 = (1 - exp(-d)) * grad log pi       mean over pi: grad KL(pi_ref || pi)
        grad k1 = grad log pi                       mean over pi: 0, it would train nothing

    where d = new_logprobs - ref_logprobs. Because the gradient of k1 trains nothing, the loss of k1 has the value of k1
    and the gradient of k2. The means are over tokens drawn from the current policy. For tokens drawn from mu,
    `losses.policy_loss` weights each term with rho = pi / mu."""
    value = token_kl(new_logprobs, ref_logprobs, estimator)
    if estimator != "k1":
        return value
    k2 = token_kl(new_logprobs, ref_logprobs, "k2")
    return value.detach() + k2 - k2.detach()


def next_kl_coef(coef: float, kl_per_response: float, rows: int, cfg: KLConfig) -> float:
    """Return the coefficient beta of the next step (Ziegler et al. 2019, 2.2). Without a target it is always
    `cfg.coef`.

        e      = clip((KL - target) / target, -0.2, 0.2)
        beta' = beta * (1 + e * rows / horizon)

    `kl_per_response` is `kl/ref` of `stages.ppo.metrics`, in nats: the distance of pi_prox (the trained policy, not the
    sampler) from the reference. rows / horizon is bounded to 1, so that a step larger than the horizon changes beta by
    20 % at most and cannot change its sign.
    """
    if cfg.target is None:
        return cfg.coef
    error = (kl_per_response - cfg.target) / cfg.target
    clipped = min(max(error, -MAX_RELATIVE_ERROR), MAX_RELATIVE_ERROR)
    return coef * (1.0 + clipped * min(rows / cfg.horizon, 1.0))
