"""Settings of the PPO algorithm; one field per choice of docs/training.md. May import the standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
class PPOConfig:
    gamma: float = 1.0
    lam: float = 0.95
    clip: float = 0.2
    value_clip: float | None = 0.2
    """Clip of the new values around the OLD values; null: none."""
    anchor: Literal["proximal", "sampler"] = "proximal"
    correction: Literal["truncate", "mask", "none"] = "truncate"
    correction_cap: float = 2.0
    proximal: Literal["recompute", "loglinear", "sampler"] = "recompute"
    epochs: int = 2
    minibatches: int = 2
    """Optimizer steps per epoch; divides the rows of a step."""
    aggregation: Literal["token", "sequence"] = "token"
    """Mean over the sampled tokens of the minibatch, or mean over rows of each row's mean."""
    entropy_coef: float = 0.0
    whiten_advantages: bool = True
    whiten_rewards: bool = False
    truncated: Literal["bootstrap", "terminate"] = "terminate"
    """What follows a response cut by the length limit: nothing, or the critic's value of its last state. The score is
    given at the last token either way, so `bootstrap` counts the outcome of a cut response twice: it suits rewards that
    accrue per token, not one score per response."""
    missing_eos_score: float | None = None
    """Fixed score of a response that was cut; null: the reward's own."""
    mask_truncated: bool = False
    """Leave cut responses out of both losses (overlong filtering)."""
    center_scores: bool = False
    """Subtract the running mean of scores (state carried from step to step)."""
    kl: KLConfig = field(default_factory=KLConfig)
