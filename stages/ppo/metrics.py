"""Compute the metrics of a step from the records of all its rows, in numpy float64.

Every metric is taken over sampled tokens or over responses only. A metric that is undefined for a step is left out. It
is not set to NaN or 0. For example, the mismatch on fresh tokens is absent if every token is stale.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, Int

from storage.records import FinishReason, Rollout, Scores

PerToken = Float[np.ndarray, "rows seq"]
Mask = Bool[np.ndarray, "rows seq"]
PerRow = Float[np.ndarray, " rows"]


def reward_metrics(scores: PerRow, shaped_scores: PerRow, kl_per_response: PerRow, kl_coef: float) -> dict[str, float]:
    """Return the metrics of the scores before shaping, and the mean of the shaped scores less the KL penalty.

    reward/adjusted_mean = mean(shaped score - beta * sum_t k_t), also if the KL penalty is in the loss. beta is
    `kl_coef`, and sum_t k_t is `kl_per_response`.
    """
    scores = scores.astype(np.float64)
    if scores.size == 0:
        return {}
    return {
        "reward/mean": float(scores.mean()),
        "reward/std": float(scores.std()),
        "reward/adjusted_mean": float((shaped_scores - kl_coef * kl_per_response).mean()),
    }


def part_metrics(scores: Scores) -> dict[str, float]:
    """Return the metrics of each part of the scores, before weighting. They reveal reward hacking: the sum rises while
    a part falls.

    reward/NAME/mean, reward/NAME/std     absent if the score consists of this part alone
    reward/NAME/disagreement              for an ensemble: mean over rows of the standard deviation among its members
    """
    if scores.num_rows == 0:
        return {}
    metrics: dict[str, float] = {}
    alone = len(scores.parts) == 1 and all(np.array_equal(part, scores.scores) for part in scores.parts.values())
    for name, part in scores.parts.items() if not alone else ():
        numbers = part.astype(np.float64)
        metrics |= {f"reward/{name}/mean": float(numbers.mean()), f"reward/{name}/std": float(numbers.std())}
    spread = {f"reward/{name}/disagreement": float(s.mean()) for name, s in scores.disagreement.items()}
    return {**metrics, **spread}


def ref_kl_metrics(
    policy_logprobs: PerToken, sampler_logprobs: PerToken, ref_logprobs: PerToken, mask: Mask, cap: float
) -> dict[str, float]:
    """Return estimates of the KL to the reference: for the proximal policy and for the sampler mu. All tokens were
    drawn from mu. The estimates are in nats per response, and kl/ref_per_token in nats per token.

    The mean of d = log pi_prox - log pi_ref over tokens drawn from mu is not a KL of pi_prox. It is KL(mu || pi_ref) -
    KL(mu || pi_prox), which is negative if mu is farther from pi_prox than from pi_ref. So each token is weighted by w
    = min(pi_prox / mu, cap), and the weights are normalised by their mean over the step's N tokens (R responses):

        kl/ref             = 1/R sum_it (w_it / w_mean) d_it = N/R * E[w d] / E[w],      w_mean = 1/N sum_it w_it
        kl/ref_k3          the same with exp(-d) - 1 + d in place of d
        kl/ref_per_token   = E[w d] / E[w]
        kl/ref_capped_share    share of tokens whose pi_prox / mu is above the cap
        kl/ref_sampler     = 1/R sum_it (log mu - log pi_ref)

    If no proximal policy was computed, pass mu's log-probs in its place. Then w is 1 and kl/ref equals kl/ref_sampler.

    Args:
        cap: `ppo.correction_cap`. The weights are truncated at the cap under every `ppo.correction`. The cap bounds the
            variance. Dropping tokens instead would leave out exactly the tokens that moved most.
    """
    if not mask.any():
        return {}
    log_prox, log_mu, log_ref = (_float64(x, mask) for x in (policy_logprobs, sampler_logprobs, ref_logprobs))
    d, log_w = log_prox - log_ref, log_prox - log_mu
    w = np.where(mask, np.exp(np.minimum(log_w, np.log(cap))), 0.0)
    w /= w[mask].mean()
    return {
        "kl/ref": float((w * d).sum(axis=1).mean()),
        "kl/ref_k3": float((w * (np.expm1(-d) + d)).sum(axis=1).mean()),
        "kl/ref_per_token": float((w * d).sum() / mask.sum()),
        "kl/ref_capped_share": float((log_w[mask] > np.log(cap)).mean()),
        "kl/ref_sampler": float((log_mu - log_ref).sum(axis=1).mean()),
    }


def proximal_metrics(
    policy_logprobs: PerToken,
    sampler_logprobs: PerToken,
    token_versions: Int[np.ndarray, "rows seq"],
    mask: Mask,
    step: int,
) -> dict[str, float]:
    """Return metrics that compare the proximal policy with the sampler. d = log pi_prox - log mu, w = exp(d).

    On fresh tokens (version = step) both policies have the same weights, so only rounding or a bug makes them differ:

        mismatch/mean_abs       mean |d| over fresh tokens
        mismatch/exp_abs        mean exp(|d|) over fresh tokens; worth an alarm above 1.05
        mismatch/*_all          the same over all tokens, so it includes staleness

    Over all tokens:

        mismatch/fresh_fraction share of fresh tokens
        ess/fraction            (sum w)^2 / (n sum w^2): effective sample size of w, 1 when no token is stale
        kl/prox_sampler         mean of w d - (w - 1): KL(pi_prox || mu) per token from tokens drawn from mu, unbiased
                                and never negative
    """
    d = (_float64(policy_logprobs, mask) - _float64(sampler_logprobs, mask))[mask]
    if d.size == 0:
        return {}
    fresh = np.abs(d[token_versions[mask] == step])
    w = np.exp(d)
    relative_w = np.exp(d - d.max())  # the effective sample size does not depend on the scale of w
    metrics = {
        "mismatch/fresh_fraction": fresh.size / d.size,
        "mismatch/mean_abs_all": float(np.abs(d).mean()),
        "mismatch/exp_abs_all": float(np.exp(np.abs(d)).mean()),
        "ess/fraction": float(relative_w.sum() ** 2 / (d.size * (relative_w**2).sum())),
        "kl/prox_sampler": float((w * d - np.expm1(d)).mean()),
    }
    if fresh.size:
        metrics["mismatch/mean_abs"] = float(fresh.mean())
        metrics["mismatch/exp_abs"] = float(np.exp(fresh).mean())
    return metrics


def canary_metrics(
    engine_logprobs: PerToken, policy_logprobs: PerToken, sampler_logprobs: PerToken, mask: Mask
) -> dict[str, float]:
    """Return metrics that compare engine and trainer at one version of the weights. The tokens may have been sampled by
    any version. d = log mu (engine) - log pi (trainer), both computed with this one version.

    mismatch/canary_mean_abs    mean |d|; the alarm compares it with its limit
    mismatch/canary_max_abs     largest |d|
    mismatch/canary_k3          mean of exp(-d) - 1 + d: KL(mu || pi) per token, as if mu had drawn the tokens
    mismatch/canary_moved       mean |log mu of this version - log mu when the token was sampled|. If it stays 0
                                although the tokens are stale, the engine's weights do not change.
    """
    if not mask.any():
        return {}
    engine, policy, before = (_float64(x, mask)[mask] for x in (engine_logprobs, policy_logprobs, sampler_logprobs))
    d = engine - policy
    return {
        "mismatch/canary_mean_abs": float(np.abs(d).mean()),
        "mismatch/canary_max_abs": float(np.abs(d).max()),
        "mismatch/canary_k3": float((np.expm1(-d) + d).mean()),
        "mismatch/canary_moved": float(np.abs(engine - before).mean()),
    }


def entropy_metrics(entropy: PerToken, mask: Mask) -> dict[str, float]:
    """Return policy/entropy_start: the mean entropy of the proximal policy per sampled token, in nats. (policy/entropy
    is the entropy during the update.)"""
    return {"policy/entropy_start": float(_float64(entropy, mask)[mask].mean())} if mask.any() else {}


def staleness_metrics(
    token_versions: Int[np.ndarray, "rows seq"], mask: Mask, step: int, bound: int
) -> dict[str, float]:
    """Return the mean and the maximum staleness of the tokens, and the fraction of tokens with each staleness from 0 to
    `bound`. The staleness of a token is `step` minus the version of the weights that sampled the token."""
    staleness = step - token_versions[mask].astype(np.int64)
    if staleness.size == 0:
        return {}
    histogram = {f"staleness/fraction_{age}": float((staleness == age).mean()) for age in range(bound + 1)}
    return {"staleness/mean": float(staleness.mean()), "staleness/max": float(staleness.max())} | histogram


def value_metrics(values: PerToken, returns: PerToken, mask: Mask) -> dict[str, float]:
    """Return metrics of the critic at the start of the step.

    critic/return_mean          mean of the returns G
    critic/start_mean           mean of the values V
    critic/explained_variance   1 - Var(G - V) / Var(G); absent if all returns are equal
    """
    v, g = _float64(values, mask)[mask], _float64(returns, mask)[mask]
    if g.size == 0:
        return {}
    metrics = {"critic/return_mean": float(g.mean()), "critic/start_mean": float(v.mean())}
    if g.max() > g.min():
        metrics["critic/explained_variance"] = float(1 - (g - v).var() / g.var())
    return metrics


def group_metrics(
    equal: Bool[np.ndarray, " groups"], score_std: Float[np.ndarray, " groups"], skipped_rows: int
) -> dict[str, float]:
    """Return metrics of the groups of responses to one prompt.

    group/equal_fraction    share of groups whose scores are all equal: the policy learns nothing from them
    group/score_std         mean over the groups of the standard deviation of their scores
    group/skipped_rows      number of rows of equal groups that the loss leaves out
    """
    if equal.size == 0:
        return {}
    return {
        "group/equal_fraction": float(equal.mean()),
        "group/score_std": float(score_std.mean()),
        "group/skipped_rows": float(skipped_rows),
    }


def advantage_metrics(unwhitened: PerToken, mask: Mask) -> dict[str, float]:
    """Return the mean and standard deviation of the advantages before whitening. (Whitening makes them 0 and 1.)"""
    a = _float64(unwhitened, mask)[mask]
    return {"advantage/mean": float(a.mean()), "advantage/std": float(a.std())} if a.size else {}


def response_metrics(rollout: Rollout) -> dict[str, float]:
    """Return the mean and maximum length of the responses in tokens, EOS included. Also return the fraction of
    responses that ended with EOS, and the fraction that ended at the length limit."""
    if rollout.num_rows == 0:
        return {}
    lengths = rollout.response_mask.sum(axis=1)
    return {
        "response/length_mean": float(lengths.mean()),
        "response/length_max": float(lengths.max()),
        "response/eos_fraction": float((rollout.finish_reason == FinishReason.STOP).mean()),
        "response/truncated_fraction": float((rollout.finish_reason == FinishReason.LENGTH).mean()),
    }


def _float64(x: PerToken, mask: Mask) -> Float[np.ndarray, "rows seq"]:
    """Return x in float64 with zeros outside the mask. Arithmetic on these zeros raises no warning."""
    return np.where(mask, x, 0.0).astype(np.float64)
