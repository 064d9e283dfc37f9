"""Settings of the PPO algorithm, one field per choice described in docs/training.md, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from storage.problems import Problem, above, at_least, between, finite, setting, unread_problems

KLEstimator = Literal["k1", "k2", "k3"]


@dataclass
class KLConfig:
    """The KL penalty that keeps the policy near the reference. It is applied in one place: the rewards or the loss."""

    where: Literal["reward", "loss"] = "reward"
    """reward: the penalty is subtracted from the rewards of tokens. loss: it is added to the policy's loss."""
    estimator: KLEstimator = "k1"
    """Estimator of the KL per token (Schulman 2020). k1: d. k2: d^2 / 2. k3: exp(-d) - 1 + d. Here d is log pi - log
    pi_ref."""
    coef: float = setting(0.05, at_least(0))
    """Weight of the penalty. If `target` is set, this is the first weight, and the controller changes it."""
    target: float | None = setting(None, above(0, ", or null for none"))
    """Target of an adaptive controller of `coef` (Ziegler et al. 2019, eq. 4), in nats per response; null: `coef` is
    constant. The controller reads `kl/ref`, whatever `estimator` is."""
    horizon: int = setting(10_000, at_least(1))
    """Number of rows over which the adaptive controller reacts. A larger number makes it react more slowly."""


@dataclass
class NormalizeConfig:
    """Normalization of the scores, by the mean and standard deviation of all scores of the run so far. The scores of
    the current step are included."""

    mean: bool = False
    """true: subtract the mean of all scores so far from each score. Under `advantage: group`, `group_mean` and `rloo`,
    this is allowed only together with `clip`. These three subtract a mean themselves, so without `clip` it would have
    no effect."""
    scale: bool = False
    """true: divide each score by the standard deviation of all scores so far. `mean` is applied first."""
    clip: float | None = setting(None, above(0, ", or null for no bound"))
    """Bound of the scores after `mean` and `scale`: they are clipped to -clip .. clip; null: no bound."""


@dataclass
class PPOConfig:
    """The algorithm: advantages, the loss of policy and critic, and the limits of an update."""

    advantage: Literal["gae", "group", "group_mean", "rloo", "reinforce_pp"] = "gae"
    """Baseline of the advantages. All except gae train without a critic. gae: the critic's values. group: the mean
    reward of the responses to the prompt; a reward minus this mean is divided by the standard deviation of these
    rewards (GRPO). group_mean: the same without the division (Dr. GRPO). rloo: the mean reward of the other responses
    to the prompt (leave one out). reinforce_pp: the mean of the step, by whitening (REINFORCE++). See
    stages/ppo/advantages.py."""
    skip_equal_groups: bool = False
    """Under `advantage: group`, `group_mean` and `rloo`, leave a prompt's responses out of the loss if all have the
    same score."""
    gamma: float = setting(1.0, between(0, 1))
    """Discount. It must be 1 under `advantage: group`, `group_mean` and `rloo`, where a response has one reward."""
    lam: float = setting(0.95, between(0, 1))
    """Lambda of GAE for the policy's advantages. It is used for the critic's returns too, unless `critic_lam` is
    set."""
    critic_lam: float | None = setting(None, between(0, 1))
    """Lambda of the critic's returns (decoupled GAE, VC-PPO, arXiv 2503.01491); null: `lam`."""
    clip: float = setting(0.2, between(0, 1, " (0.2 is usual)", ends=False))
    """Epsilon of the policy clip: the ratio is clipped to 1 - clip .. 1 + clip."""
    clip_high: float | None = setting(None, above(0, " (0.28 is usual), or null for none of its own"))
    """Epsilon of the upper bound alone (clip-higher, DAPO, arXiv 2503.14476); null: `clip`."""
    dual_clip: float | None = None
    """Upper bound of the policy ratio at tokens whose advantage is negative (dual clip, arXiv 1912.09729). It must be
    at least 1 + clip; null: no bound."""
    value_clip: float | None = setting(0.2, above(0, ", or null for none"))
    """Epsilon of the value clip: the critic's loss clips a new value to old value - epsilon .. old value + epsilon;
    null: no clip."""
    anchor: Literal["proximal", "sampler"] = "proximal"
    """Policy in the denominator of the clipped ratio. proximal: the proximal policy pi_prox. sampler: the sampler mu
    (vanilla PPO)."""
    correction: Literal["truncate", "mask", "none"] = "truncate"
    """Importance weight w = pi_prox / mu of a token under `anchor: proximal`. truncate: min(w, C). mask: w if it is in
    [1/C, C], else 0. none: 1."""
    correction_cap: float = setting(2.0, at_least(1, " (2 is usual; ppo.correction=none: none)"))
    """The cap C of `correction`."""
    proximal: Literal["auto", "recompute", "loglinear", "sampler"] = "recompute"
    """Source of pi_prox. recompute: a forward pass at the start of the step. loglinear: interpolation between mu and
    pi, without a forward pass. sampler: mu. auto: one of these three, but loglinear or sampler only if the result then
    differs from recompute by no more than rounding. The saved config contains the choice."""
    epochs: int = setting(2, at_least(1))
    """Number of passes of an update over the rows of its step."""
    minibatches: int = setting(2, at_least(1))
    """Number of minibatches per epoch, with one optimizer step each. It must divide the number of rows of a step."""
    critic_warmup_steps: int = setting(0, at_least(0))
    """Number of PPO steps at the run's start that train only the critic. In these steps the policy's version advances
    and its weights stay the same. The schedule of the policy's learning rate starts after these steps."""
    target_kl: float | None = setting(None, above(0, ", or null for none"))
    """Limit on `policy/approx_kl` of a minibatch, in nats per token. If a minibatch exceeds it, this minibatch and the
    rest of the policy's update are skipped; null: no limit."""
    aggregation: Literal["token", "sequence"] = "token"
    """Loss of a minibatch. token: the mean over its sampled tokens. sequence: the mean over each row's sampled tokens,
    then the mean over the rows."""
    entropy_coef: float = setting(0.0, at_least(0))
    """Weight of the entropy bonus in the policy's loss."""
    whiten_advantages: bool | None = None
    """Whiten the advantages over the sampled tokens of the step, to mean 0 and variance 1; null: only under `advantage:
    gae` and `reinforce_pp`."""
    whiten_rewards: bool = False
    """Scale the rewards of tokens to variance 1 and keep their mean."""
    truncated: Literal["terminate", "bootstrap", "mask"] = "terminate"
    """Treatment of a response that was cut by the length limit. terminate: the value after its last token is 0.
    bootstrap: the value after its last token is the critic's value of the state there. The last token still gets the
    score, so the outcome of a cut response counts twice. Use bootstrap for rewards that accrue per token, and not for
    one score per response. mask: the response is left out of the losses of policy and critic (overlong filtering)."""
    missing_eos_score: float | None = setting(None, finite(", or null for none"))
    """Score of every response that was cut; null: the score that the reward gives."""
    kl: KLConfig = field(default_factory=KLConfig)
    """The KL penalty."""


GROUPED = ("group", "group_mean", "rloo")
"""Values of `ppo.advantage` that compare the responses to one prompt."""


def has_critic(config: PPOConfig) -> bool:
    """Return True if a critic is trained and used for the advantages."""
    return config.advantage == "gae"


def whitens_advantages(config: PPOConfig) -> bool:
    """Return `ppo.whiten_advantages`. If it is null, return True for gae and reinforce_pp, because these estimators
    were published with whitening."""
    return config.advantage not in GROUPED if config.whiten_advantages is None else config.whiten_advantages


def resolve_proximal(config: PPOConfig, *, staleness: int, exact: bool) -> Literal["recompute", "loglinear", "sampler"]:
    """Return the source of pi_prox. This is `ppo.proximal`, unless that setting is `auto`. `auto` avoids the forward
    pass for pi_prox if the pass would change only rounding. The first rule that applies decides the value of `auto`:

    - A KL penalty in the rewards: `recompute`.
    - A controller of the KL coefficient: `recompute`, unless staleness is 0 and `exact` is True. In that case the KL of
      mu, which sampled the rows, serves as well.
    - `anchor: sampler`: `sampler`, because the loss does not read pi_prox.
    - One optimizer step per update: `loglinear`, which interpolates between mu and pi. Before the first step of an
      update it takes pi itself, also on stale rows. This is exact, because pi_prox is pi then.
    - Otherwise: `recompute`.

    The first rule also holds for fresh rows, although mu and pi_prox then differ only by rounding. The reason is a step
    whose scores are all equal. Its advantages consist of the penalty alone. Whitening divides them by the penalty's
    standard deviation, and AdamW divides by the size of the gradient. So the policy would be trained on rounding
    errors.

    Args:
        staleness: the bound eta.
        exact: True if the log-probs of engine and trainer agree to rounding in float32. (In bfloat16 they differ by
            0.02 nats per token.)
    """
    if config.proximal != "auto":
        return config.proximal
    if config.kl.coef != 0:
        if config.kl.where == "reward":
            return "recompute"
        if config.kl.target is not None and not (staleness == 0 and exact):
            return "recompute"
    if config.anchor == "sampler":
        return "sampler"
    return "loglinear" if config.epochs * config.minibatches == 1 else "recompute"


def ppo_problems(config: PPOConfig) -> Iterator[Problem]:
    """Yield the problems of section `ppo` that do not depend on other sections."""
    if config.dual_clip is not None and not 1 + config.clip <= config.dual_clip < float("inf"):
        least = 1 + config.clip
        need = f"must be finite and {least:g} (1 + ppo.clip) or more (3 is usual), or null: less cuts within the clip"
        yield Problem("ppo.dual_clip", config.dual_clip, need)
    yield from _estimator_problems(config)
    yield from _dead_problems(config)


def _estimator_problems(config: PPOConfig) -> Iterator[Problem]:
    """Yield the problems of settings that do not suit `ppo.advantage`."""
    chosen = f"ppo.advantage={config.advantage}"
    if config.skip_equal_groups and config.advantage not in GROUPED:
        need = f"{chosen} compares no groups: false, or ppo.advantage=group, group_mean or rloo"
        yield Problem("ppo.skip_equal_groups", True, need)
    if has_critic(config):
        return
    if config.critic_warmup_steps:
        yield Problem("ppo.critic_warmup_steps", config.critic_warmup_steps, f"{chosen} trains no critic: 0")
    if config.truncated == "bootstrap":
        need = f"{chosen} has no critic, whose value would follow a cut response: terminate or mask"
        yield Problem("ppo.truncated", config.truncated, need)
    if config.whiten_rewards:
        need = f"{chosen} adds up the rewards of tokens, and whitening adds to each, so that length would count: false"
        yield Problem("ppo.whiten_rewards", True, need)
    if config.advantage in GROUPED and config.gamma != 1:
        need = f"{chosen} has one reward for each response, which is not discounted: 1, or gae or reinforce_pp"
        yield Problem("ppo.gamma", config.gamma, need)


def _dead_problems(config: PPOConfig) -> Iterator[Problem]:
    """Yield the problems of settings that would have no effect."""
    if config.kl.target is None:
        why = "ppo.kl.coef is constant under ppo.kl.target=null: give a target"
        yield from unread_problems("ppo.kl", config.kl, why, ("horizon",))
    from_anchor = config.anchor == "proximal" and config.proximal != "sampler"
    if config.target_kl is not None and config.epochs * config.minibatches == 1 and from_anchor:
        need = (
            "an update of one optimizer step (ppo.epochs x ppo.minibatches = 1) starts at the anchor, where its KL is "
            "0: null, or more steps"
        )
        yield Problem("ppo.target_kl", config.target_kl, need)
    if config.kl.target is not None and config.kl.coef == 0:
        need = "the controller multiplies ppo.kl.coef, and 0 stays 0: a ppo.kl.coef above 0, or null"
        yield Problem("ppo.kl.target", config.kl.target, need)
    if config.correction == "mask" and "sampler" in (config.anchor, config.proximal):
        by = "ppo.anchor" if config.anchor == "sampler" else "ppo.proximal"
        need = f"with {by}=sampler every weight is 1: use ppo.correction=none"
        yield Problem("ppo.correction", config.correction, need)
