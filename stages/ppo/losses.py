"""The two losses of PPO: the clipped policy loss and the clipped value loss. The policy loss uses three policies, so
that it can correct for stale data:

    mu        the behaviour policy, which drew the token: the weights of the version in `token_versions`
    pi_prox   the proximal policy: the trainer's weights at the start of the step
    pi        the policy being trained

Both losses are sums of weight_t * term_t (see `stages.ppo.masks`). The loss of a minibatch is the sum over its
micro-batches and ranks. If a framework AVERAGES gradients over n ranks, multiply the losses by n.

The policy loss also returns stats (`LossStats`). The function `policy_loss` defines the symbols u, w, g, A, H, rho and
k. C is `correction_cap`. The anchor is the denominator of u: pi_prox under `anchor: proximal`, mu under `anchor:
sampler`. These stats are weighted sums:

    policy/loss             all terms                      policy/surrogate       -w * g
    policy/kl_ref           rho * k, if `kl.where: loss`   policy/entropy         H
    policy/approx_kl        k3 of KL(anchor || pi)         policy/ratio_mean      u
    policy/clipfrac         share of tokens whose gradient the clip removed
    policy/dual_clipfrac    share of tokens whose gradient the dual clip removed, if there is a dual clip
    policy/weight_mean      pi_prox / mu before the correction; only under `anchor: proximal`
    policy/weight_outside   share of tokens with pi_prox / mu > C (under `correction: mask` also < 1/C); only under
                            `anchor: proximal`

These stats are maxima: policy/ratio_max (of u) and policy/weight_max (of pi_prox / mu).

A ratio u above exp(80) counts as exp(80) wherever a clip bounds the term. Without a dual clip, tokens with A < 0 have
no such bound. If the ratio of such a token overflows, the loss is infinite.

Sources: Schulman et al. 2017 (clip), Yu et al. 2025 (DAPO: clip_high), Ye et al. 2019 (dual clip), Hilton et al. 2022
and AReaL, Fu et al. 2025 (decoupled objective).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from beartype import beartype
from jaxtyping import Bool, Float, Int, jaxtyped
from torch import Tensor

from stages.ppo.config import PPOConfig
from stages.ppo.kl import token_kl_loss

MAX_LOG_RATIO = 80.0
"""Bound of the log-ratio. exp(80) = 5.5e34 is far above every clip, and float32 overflows only at exp(88.7)."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class PolicyLossInputs:
    """Inputs of the policy loss besides the model's outputs, for the rows of one micro-batch. Entries outside `mask`
    are never read."""

    mask: Bool[Tensor, "rows seq"]
    """True for the tokens that count in the loss (`Advantages.loss_mask`)."""
    weights: Float[Tensor, "rows seq"]
    """Loss weights of the tokens: the result of `masks.token_weights` for the whole minibatch, cut to the rows of this
    micro-batch."""
    advantages: Float[Tensor, "rows seq"]
    sampler_logprobs: Float[Tensor, "rows seq"]
    """log mu."""
    policy_logprobs: Float[Tensor, "rows seq"] | None
    """log pi_prox. Needed if `proximal` is "recompute", None otherwise."""
    ref_logprobs: Float[Tensor, "rows seq"] | None
    """log pi_ref. Needed if `kl.where` is "loss", None otherwise."""
    stale_optimizer_steps: Int[Tensor, "rows seq"]
    """s_prox - s_mu: number of optimizer steps from the weights that drew the token to the start of this update. The
    number is (step - token_versions) * epochs * minibatches. Skipped steps count too. Read if `proximal` is
    "loglinear"."""
    optimizer_steps_taken: int
    """s_pi - s_prox: number of optimizer steps since the start of this update."""


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class ValueLossInputs:
    """Inputs of the value loss besides the model's output, for the rows of one micro-batch."""

    mask: Bool[Tensor, "rows seq"]
    weights: Float[Tensor, "rows seq"]
    old_values: Float[Tensor, "rows seq"]
    """The critic's values at the start of the step, the centre of the clip."""
    returns: Float[Tensor, "rows seq"]


@jaxtyped(typechecker=beartype)
def loglinear_proximal(
    new_logprobs: Float[Tensor, "rows seq"],
    sampler_logprobs: Float[Tensor, "rows seq"],
    stale_optimizer_steps: Int[Tensor, "rows seq"],
    optimizer_steps_taken: int,
) -> Float[Tensor, "rows seq"]:
    """Return log pi_prox, interpolated between mu and pi by optimizer steps, without gradient. It needs no forward
    pass.

        log pi_prox = log mu + alpha * (log pi - log mu)
        alpha       = (s_prox - s_mu) / (s_pi - s_mu) = stale / (stale + taken)

    Before the first optimizer step of the update, alpha is 1 for every token, because pi IS pi_prox at that moment.
    (For a fresh token the quotient would be 0/0.) After the first step, alpha is 0 for a fresh token, so pi_prox = mu.
    """
    if optimizer_steps_taken == 0:
        return new_logprobs.detach()
    stale = stale_optimizer_steps.to(new_logprobs.dtype)
    alpha = stale / (stale + optimizer_steps_taken)
    return torch.lerp(sampler_logprobs, new_logprobs.detach(), alpha).detach()


@jaxtyped(typechecker=beartype)
def behaviour_weights(
    proximal_logprobs: Float[Tensor, "rows seq"],
    sampler_logprobs: Float[Tensor, "rows seq"],
    correction: Literal["truncate", "mask", "none"],
    cap: float,
) -> tuple[Float[Tensor, "rows seq"], Float[Tensor, "rows seq"]]:
    """Return (w after the correction, w before the correction) for w = pi_prox / mu, without gradient. C is `cap`.

    truncate:  min(w, C)
    mask:      w where 1/C <= w <= C, else 0: the policy term omits the token; other tokens keep their loss weights
    none:      1
    """
    w = torch.exp(proximal_logprobs - sampler_logprobs).detach()
    match correction:
        case "truncate":
            return w.clamp(max=cap), w
        case "mask":
            return torch.where((w >= 1 / cap) & (w <= cap), w, 0), w
        case "none":
            return torch.ones_like(w), w


@jaxtyped(typechecker=beartype)
def policy_loss(
    new_logprobs: Float[Tensor, "rows seq"],
    entropy: Float[Tensor, "rows seq"],
    inputs: PolicyLossInputs,
    cfg: PPOConfig,
    kl_coef: float,
) -> tuple[Float[Tensor, ""], LossStats]:
    """Return this micro-batch's share of the policy loss, and its stats. The top of this file lists the stats and
    defines mu, pi_prox and pi. Each token t has these values:

        A     advantage                          H     entropy of pi
        k     estimate of KL(pi || pi_ref)       rho   weight of k:  correct(pi / mu)
        u     ratio that is clipped:             pi / pi_prox            (anchor sampler: pi / mu)
        w     weight of the clipped term:        correct(pi_prox / mu)   (anchor sampler: 1)

    `correct` depends on `cfg.correction` (see `behaviour_weights`). It truncates a ratio at the cap C, sets it to 0
    outside [1/C, C], or replaces it by 1. w and rho have no gradient. rho is needed because k and its gradient are
    defined for tokens drawn from pi, and mu drew the tokens. The loss is

        L     = sum_t weight_t * [ -w_t * g_t
                                   + kl_coef * rho_t * k_t               if kl.where is "loss"
                                   - entropy_coef * H_t ]
        g_t   = min(u_t A_t, clip(u_t, 1 - clip, 1 + clip_high) A_t)
        g_t   = max(g_t, dual_clip A_t)                                  where A_t < 0, if there is a dual_clip

    Args:
        new_logprobs: log pi of the tokens, with gradient.
        entropy: H of pi's distribution at each token, in nats; with gradient if `entropy_coef` is not 0.

    Raises:
        ValueError: a log-prob array that `cfg` needs is None.
    """
    mask = inputs.mask
    # Select first, so that entries outside the mask reach neither the loss nor the gradient.
    log_pi = torch.where(mask, new_logprobs, 0)
    log_mu = torch.where(mask, inputs.sampler_logprobs, 0)
    advantages = torch.where(mask, inputs.advantages, 0).detach()
    entropy = torch.where(mask, entropy, 0)
    weights = torch.where(mask, inputs.weights, 0)

    log_anchor, w, raw_w = _anchored(log_pi, log_mu, inputs, cfg)
    u = _ratio(log_pi - log_anchor, advantages, cfg)
    gain, clips = _clipped_gain(u, advantages, cfg)
    surrogate = -w * gain
    per_token = surrogate - cfg.entropy_coef * entropy

    terms = {
        "policy/surrogate": surrogate,
        "policy/entropy": entropy,
        "policy/approx_kl": u - 1 - (log_pi - log_anchor),
        "policy/ratio_mean": u,
        **clips,
    }
    maxima = {"policy/ratio_max": _masked_max(u, mask)}
    if cfg.kl.where == "loss":
        kl = _reference_kl(log_pi, log_mu, inputs, cfg)
        per_token = per_token + kl_coef * kl
        terms["policy/kl_ref"] = kl
    if raw_w is not None:
        terms["policy/weight_mean"] = raw_w
        terms["policy/weight_outside"] = _outside_cap(raw_w, cfg).to(u.dtype)
        maxima["policy/weight_max"] = _masked_max(raw_w, mask)

    loss = (weights * per_token).sum()
    sums = {name: (weights * term.detach()).sum() for name, term in terms.items()}
    return loss, LossStats(sums={"policy/loss": loss.detach().clone()} | sums, maxima=maxima)


@jaxtyped(typechecker=beartype)
def value_loss(
    new_values: Float[Tensor, "rows seq"], inputs: ValueLossInputs, value_clip: float | None
) -> tuple[Float[Tensor, ""], LossStats]:
    """Return this micro-batch's share of the value loss, and its stats.

        L = 1/2 sum_t weight_t * max[ (V - G)^2, (V_old + clip(V - V_old, -c, +c) - G)^2 ]

    V is `new_values`. V_old and G are the old values and the returns of `inputs`. c is `value_clip`. If it is None, the
    second square is left out.

    All stats are weighted sums (`LossStats.sums`):

    - critic/loss: L
    - critic/clipfrac: share of tokens whose second square is larger than the first
    - critic/mean: mean of V
    """
    mask = inputs.mask
    v = torch.where(mask, new_values, 0)
    v_old = torch.where(mask, inputs.old_values, 0).detach()
    g = torch.where(mask, inputs.returns, 0).detach()
    weights = torch.where(mask, inputs.weights, 0)

    square = (v - g) ** 2
    if value_clip is None:
        largest, clip_is_larger = square, torch.zeros_like(mask)
    else:
        clipped_square = (v_old + (v - v_old).clamp(-value_clip, value_clip) - g) ** 2
        largest, clip_is_larger = torch.maximum(square, clipped_square), clipped_square > square

    loss = (weights * largest).sum() / 2
    return loss, LossStats(
        sums={
            "critic/loss": loss.detach().clone(),
            "critic/clipfrac": (weights * clip_is_larger).sum(),
            "critic/mean": (weights * v.detach()).sum(),
        },
        maxima={},
    )


def _ratio(log_ratio: Tensor, advantages: Tensor, cfg: PPOConfig) -> Tensor:
    """Return exp(log_ratio), bounded where a clip replaces large ratios anyway. An infinite ratio's gradient would be
    NaN."""
    clipped = advantages >= 0 if cfg.dual_clip is None else torch.ones_like(advantages, dtype=torch.bool)
    return torch.exp(torch.where(clipped, log_ratio.clamp(max=MAX_LOG_RATIO), log_ratio))


def _clipped_gain(u: Tensor, advantages: Tensor, cfg: PPOConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Return g, the clipped objective u * A of each token (see `policy_loss`), and stats by name. The stat of a clip is
    1 for each token whose gradient this clip removed, else 0."""
    unclipped = u * advantages
    high = cfg.clip if cfg.clip_high is None else cfg.clip_high
    clipped = u.clamp(1 - cfg.clip, 1 + high) * advantages
    gain = torch.minimum(unclipped, clipped)
    stats = {"policy/clipfrac": (clipped < unclipped).to(u.dtype)}
    if cfg.dual_clip is not None:
        least = cfg.dual_clip * advantages
        cut = (advantages < 0) & (gain < least)
        gain = torch.where(cut, least, gain)
        stats["policy/dual_clipfrac"] = cut.to(u.dtype)
    return gain, stats


def _anchored(
    log_pi: Tensor, log_mu: Tensor, inputs: PolicyLossInputs, cfg: PPOConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the log-probs of the anchor, and the weight w = pi_prox / mu after and before `cfg.correction`. The anchor
    is pi_prox, or under `anchor: sampler` mu, with the weights 1 and None."""
    if cfg.anchor == "sampler":
        return log_mu, torch.ones_like(log_mu), None
    log_anchor = _proximal_logprobs(log_pi, log_mu, inputs, cfg)
    return log_anchor, *behaviour_weights(log_anchor, log_mu, cfg.correction, cfg.correction_cap)


def _proximal_logprobs(log_pi: Tensor, log_mu: Tensor, inputs: PolicyLossInputs, cfg: PPOConfig) -> Tensor:
    """Return log pi_prox from the source that `cfg.proximal` names, without gradient, 0 outside the mask."""
    match cfg.proximal:
        case "recompute":
            if inputs.policy_logprobs is None:
                raise ValueError("ppo.proximal: recompute needs policy_logprobs")
            return torch.where(inputs.mask, inputs.policy_logprobs, 0).detach()
        case "loglinear":
            stale = torch.where(inputs.mask, inputs.stale_optimizer_steps, 0)
            return loglinear_proximal(log_pi, log_mu, stale, inputs.optimizer_steps_taken)
        case "sampler":
            return log_mu.detach()
        case "auto":
            raise ValueError("ppo.proximal: auto is no choice yet: see stages.ppo.config.resolve_proximal")


def _reference_kl(log_pi: Tensor, log_mu: Tensor, inputs: PolicyLossInputs, cfg: PPOConfig) -> Tensor:
    """Return rho_t * k_t(pi, pi_ref), 0 outside the mask. Only the KL estimator k has a gradient. rho is pi / mu,
    corrected by `cfg.correction`; before the first optimizer step it equals the policy term's weight w, unless `anchor`
    or `proximal` is `sampler`, where w is 1."""
    if inputs.ref_logprobs is None:
        raise ValueError("ppo.kl.where: loss needs ref_logprobs")
    k = token_kl_loss(log_pi, torch.where(inputs.mask, inputs.ref_logprobs, 0), cfg.kl.estimator)
    rho, _ = behaviour_weights(log_pi, log_mu, cfg.correction, cfg.correction_cap)
    return rho * k


def _outside_cap(w: Tensor, cfg: PPOConfig) -> Tensor:
    """Return True for tokens whose weight is above the cap, or under `correction: mask` below 1 / cap."""
    outside = w > cfg.correction_cap
    return outside | (w < 1 / cfg.correction_cap) if cfg.correction == "mask" else outside


def _masked_max(x: Tensor, mask: Tensor) -> Tensor:
    """Return the largest entry of the (positive) x inside the mask; 0 if the mask is empty."""
    return torch.where(mask, x.detach(), 0).max()


# ---- stats -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LossStats:
    """Detached scalars of one micro-batch.

    `sums` have the same weights as the loss (`masks.token_weights` of the whole minibatch). To get the mean over a
    minibatch, ADD the sums of its micro-batches and ranks. `maxima` are combined by MAX. Other ways to combine are
    wrong.
    """

    sums: Mapping[str, Tensor]
    maxima: Mapping[str, Tensor]


def merge_stats(parts: Sequence[LossStats]) -> LossStats:
    """Return a minibatch's stats from the stats of its micro-batches or of its ranks. Needs at least one part."""
    return LossStats(
        sums={name: torch.stack([p.sums[name] for p in parts]).sum() for name in parts[0].sums},
        maxima={name: torch.stack([p.maxima[name] for p in parts]).amax() for name in parts[0].maxima},
    )


def summarise_stats(minibatches: Sequence[LossStats]) -> dict[str, float]:
    """Return the metrics of an update from the stats of its minibatches. An entry of `sums` becomes its mean over the
    minibatches. An entry of `maxima` becomes its largest value over the minibatches. Needs at least one minibatch."""
    means = {n: float(torch.stack([m.sums[n] for m in minibatches]).mean()) for n in minibatches[0].sums}
    maxima = {n: float(torch.stack([m.maxima[n] for m in minibatches]).amax()) for n in minibatches[0].maxima}
    return means | maxima
