"""Settings of the PPO algorithm, one field per choice of docs/training.md, and what of them cannot work.

May import the standard library and storage.problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from storage.problems import Problem, above, at_least, finite


@dataclass
class KLConfig:
    """The penalty that keeps the policy near the reference: counted once, in the reward or in the loss."""

    where: Literal["reward", "loss"] = "reward"
    estimator: Literal["k1", "k2", "k3"] = "k1"
    coef: float = 0.05
    target: float | None = None
    """Nats per response that an adaptive controller (Ziegler et al. 2019, eq. 4) steers `coef` to; null: constant."""
    horizon: int = 10_000
    """Rows over which the adaptive controller reacts."""


@dataclass
class NormalizeConfig:
    """`reward.normalize`: what is done with scores before they are learnt from, by the mean and standard deviation of
    all scores of the run so far, this step's included (state carried from step to step)."""

    mean: bool = False
    """Subtract the mean."""
    scale: bool = False
    """Divide by the standard deviation."""
    clip: float | None = None
    """Then bound scores to -clip .. clip; null: no bound."""


def normalize_problems(config: NormalizeConfig) -> Iterator[Problem]:
    """What of the section `reward.normalize` cannot work by itself."""
    yield from above(0, {"reward.normalize.clip": config.clip}, ", or null for no bound")


@dataclass
class PPOConfig:
    advantage: Literal["gae", "group", "rloo", "reinforce_pp"] = "gae"
    """What a token's advantage is measured against. gae: the critic's values; the others train without a critic. group:
    the other responses to the prompt, standardised (GRPO); rloo: their mean (leave one out); reinforce_pp: the step's
    mean (REINFORCE++). See stages/ppo/critic_free.py."""
    group_scale: Literal["std", "none"] = "std"
    """Under `advantage: group`: divided by the group's standard deviation, or centred alone (Dr. GRPO)."""
    skip_equal_groups: bool = False
    """Under `advantage: group | rloo`: leave responses out of the loss where all to the prompt have the same score."""
    gamma: float = 1.0
    """Discount; 1 under `advantage: group | rloo`, where a response has one reward."""
    lam: float = 0.95
    """lambda of GAE: of the policy's advantages, and of the critic's returns unless `critic_lam` is set."""
    critic_lam: float | None = None
    """lambda of the critic's returns (decoupled GAE, VC-PPO, arXiv 2503.01491); null: `lam`."""
    clip: float = 0.2
    """epsilon of the policy clip: the ratio is clipped to 1 - clip .. 1 + clip."""
    clip_high: float | None = None
    """epsilon of the upper bound alone (clip-higher, DAPO, arXiv 2503.14476); null: `clip`."""
    dual_clip: float | None = None
    """Where the advantage is negative the ratio counts as at most this, 1 + clip or more (arXiv 1912.09729); null: no
    bound."""
    value_clip: float | None = 0.2
    """Clip of the new values around the OLD values; null: none."""
    anchor: Literal["proximal", "sampler"] = "proximal"
    correction: Literal["truncate", "mask", "none"] = "truncate"
    correction_cap: float = 2.0
    proximal: Literal["auto", "recompute", "loglinear", "sampler"] = "recompute"
    """Where pi_prox comes from. A run's config has no `auto` any more: see `resolve_proximal`."""
    epochs: int = 2
    minibatches: int = 2
    """Optimizer steps per epoch; divides the rows of a step."""
    critic_warmup_steps: int = 0
    """First PPO steps in which the critic alone is trained: the policy's version advances with the same weights, and
    its learning rate's schedule starts after them."""
    target_kl: float | None = None
    """`policy/approx_kl` of a minibatch, nats per token, above which it and the rest of the policy's update are left
    out; null: every minibatch is trained on."""
    max_skipped_steps: int | None = 8
    """Optimizer steps in a row, skipped since their gradient is not finite, at which the run stops and names the rows;
    null: it never does."""
    aggregation: Literal["token", "sequence"] = "token"
    """Mean over the sampled tokens of the minibatch, or mean over rows of each row's mean."""
    entropy_coef: float = 0.0
    whiten_advantages: bool | None = None
    """Over the sampled tokens of the step; null: under `advantage: gae | reinforce_pp`."""
    whiten_rewards: bool = False
    truncated: Literal["bootstrap", "terminate"] = "terminate"
    """What follows a response cut by the length limit: nothing, or the critic's value of its last state. The score is
    given at the last token either way, so `bootstrap` counts the outcome of a cut response twice: it suits rewards that
    accrue per token, not one score per response."""
    missing_eos_score: float | None = None
    """Fixed score of a response that was cut; null: the reward's own."""
    mask_truncated: bool = False
    """Leave cut responses out of both losses (overlong filtering)."""
    kl: KLConfig = field(default_factory=KLConfig)


GROUPED = ("group", "rloo")
"""Values of `ppo.advantage` that compare the responses to one prompt."""


def has_critic(config: PPOConfig) -> bool:
    """Whether a critic is trained, and read for advantages."""
    return config.advantage == "gae"


def whitens_advantages(config: PPOConfig) -> bool:
    """`ppo.whiten_advantages`, and what it is where that is null: as the estimator was published."""
    return config.advantage not in GROUPED if config.whiten_advantages is None else config.whiten_advantages


def resolve_proximal(config: PPOConfig, *, staleness: int, exact: bool) -> Literal["recompute", "loglinear", "sampler"]:
    """What `ppo.proximal: auto` comes to: no forward for pi_prox where it changes nothing that is learnt, but for
    rounding. Three things read pi_prox, and none may miss it:

    - The policy's loss. With one optimizer step per update pi_prox IS pi before that step, whatever sampled the rows
      and whatever the engine's numerics: `loglinear`, which is exact then. Under `anchor: sampler` the loss does not
      read it: `sampler`.
    - The KL penalty, where it is in the rewards. Without pi_prox it would be mu's, which on fresh rows is the same but
      for rounding; and yet that forward is made: in a step whose scores do not vary the penalty is all that is left,
      whitening divides by its spread, AdamW by the gradient's size, and rounding errors are trained on.
    - The controller of the KL's coefficient, where there is one. It takes mu's KL as well on fresh rows, if engine and
      trainer agree (`exact`: both compute in float32; in bfloat16 they differ by 0.02 nats a token).

    `staleness`: the bound eta.
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
    """What of the section `ppo` cannot work by itself."""
    counts = {
        "ppo.epochs": config.epochs,
        "ppo.minibatches": config.minibatches,
        "ppo.kl.horizon": config.kl.horizon,
    }
    if config.max_skipped_steps is not None:
        counts["ppo.max_skipped_steps"] = config.max_skipped_steps
    yield from at_least(1, counts)
    not_negative = {
        "ppo.kl.coef": config.kl.coef,
        "ppo.entropy_coef": config.entropy_coef,
        "ppo.critic_warmup_steps": config.critic_warmup_steps,
    }
    yield from at_least(0, not_negative)
    yield from finite({"ppo.missing_eos_score": config.missing_eos_score}, ", or null for none")
    for key, share in {"ppo.gamma": config.gamma, "ppo.lam": config.lam, "ppo.critic_lam": config.critic_lam}.items():
        if share is not None and not 0 <= share <= 1:
            yield Problem(key, share, "must be from 0 to 1")
    if not 0 < config.clip < 1:
        yield Problem("ppo.clip", config.clip, "must be between 0 and 1 (0.2 is usual)")
    yield from above(0, {"ppo.clip_high": config.clip_high}, " (0.28 is usual), or null for none of its own")
    if config.dual_clip is not None and not 1 + config.clip <= config.dual_clip < float("inf"):
        least = 1 + config.clip
        need = f"must be finite and {least:g} (1 + ppo.clip) or more (3 is usual), or null: less cuts within the clip"
        yield Problem("ppo.dual_clip", config.dual_clip, need)
    yield from at_least(1, {"ppo.correction_cap": config.correction_cap}, " (2 is usual; ppo.correction=none: none)")
    or_none = {
        "ppo.value_clip": config.value_clip,
        "ppo.target_kl": config.target_kl,
        "ppo.kl.target": config.kl.target,
    }
    yield from above(0, or_none, ", or null for none")
    yield from _estimator_problems(config)
    yield from _dead_problems(config)


def _estimator_problems(config: PPOConfig) -> Iterator[Problem]:
    """What does not go with `ppo.advantage`."""
    chosen = f"ppo.advantage={config.advantage}"
    if config.skip_equal_groups and config.advantage not in GROUPED:
        need = f"{chosen} compares no groups: false, or ppo.advantage=group or rloo"
        yield Problem("ppo.skip_equal_groups", True, need)
    if config.group_scale != "std" and config.advantage != "group":
        need = f"{chosen} has no groups that it divides by: std, which does nothing, or ppo.advantage=group"
        yield Problem("ppo.group_scale", config.group_scale, need)
    if has_critic(config):
        return
    if config.critic_warmup_steps:
        yield Problem("ppo.critic_warmup_steps", config.critic_warmup_steps, f"{chosen} trains no critic: 0")
    if config.truncated == "bootstrap":
        need = f"{chosen} has no critic whose value could follow a cut response: terminate"
        yield Problem("ppo.truncated", config.truncated, need)
    if config.whiten_rewards:
        need = f"{chosen} sums the rewards of tokens up, and what whitening adds to each grows with the length: false"
        yield Problem("ppo.whiten_rewards", True, need)
    if config.advantage in GROUPED and config.gamma != 1:
        need = f"{chosen} takes a response's reward as one: 1 (discounting needs gae or reinforce_pp)"
        yield Problem("ppo.gamma", config.gamma, need)
    divided = config.advantage == "group" and config.group_scale == "std"
    if divided and config.kl.where == "reward" and config.kl.coef:
        need = (
            "ppo.advantage=group divides by the deviation of a prompt's rewards, which is the KL's alone where all "
            "scores are equal: ppo.kl.where=loss (as GRPO has it), ppo.group_scale=none or ppo.kl.coef=0"
        )
        yield Problem("ppo.kl.where", config.kl.where, need)


def _dead_problems(config: PPOConfig) -> Iterator[Problem]:
    """What is asked for and would do nothing."""
    if config.kl.target is not None and config.kl.coef == 0:
        need = "steers ppo.kl.coef by factors, which 0 does not feel: a ppo.kl.coef above 0, or null"
        yield Problem("ppo.kl.target", config.kl.target, need)
    if config.correction == "mask" and "sampler" in (config.anchor, config.proximal):
        by = "ppo.anchor" if config.anchor == "sampler" else "ppo.proximal"
        need = f"with {by}=sampler every weight is 1: use ppo.correction=none"
        yield Problem("ppo.correction", config.correction, need)
