"""The section `alarms`: what of a run is worth telling somebody at once, and what of that ends it.

An engine that differs from the trainer has a section of its own, `mismatch`. May import storage.problems.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from storage.problems import Problem, above, at_least

RULES = ("trainer_idle", "engine_silent", "staleness", "entropy", "kl", "critic", "first_updates")
"""What an alarm is called: in the journal, in MLflow's tags, in the table at the end, and in `alarms.stop`."""


@dataclass
class AlarmsConfig:
    """Null switches a rule off. An alarm is raised when its rule begins to hold, and again only after it has not."""

    trainer_idle_s: float | None = 900.0
    """trainer_idle: the policy's gang is up, and has had no node to work on for so long."""
    engine_silent_s: float | None = 900.0
    """engine_silent: a replica that generates has work, and has finished none of it for so long."""
    staleness_steps: int | None = None
    """staleness: in so many steps in a row every token was at the bound. For `rollout.versions: latest`; under `exact`
    every row is, by design."""
    entropy_below: float | None = 0.05
    """entropy: nats per sampled token (`policy/entropy`) below which the policy's has collapsed."""
    kl_above: float | None = 1.0
    """kl: nats per token to the reference (`kl/ref_per_token`) above which the policy has left it."""
    steps: int = 3
    """entropy, kl: in so many steps in a row."""
    critic_steps: int | None = 20
    """critic: in so many steps in a row `critic/explained_variance` was negative: worse than a constant."""
    first_steps: int = 3
    """first_updates: how many steps from the run's first on it looks at; 0: none."""
    first_approx_kl_above: float = 0.2
    """first_updates: `policy/approx_kl`, nats per token, of one update."""
    first_ratio_above: float = 20.0
    """first_updates: `policy/ratio_max` of one update."""
    stop: list[str] = field(default_factory=list)
    """Rules whose alarm ends the run, which can be resumed."""


def alarms_problems(config: AlarmsConfig) -> Iterator[Problem]:
    """What of the section cannot work by itself."""
    numbers = {
        "alarms.trainer_idle_s": config.trainer_idle_s,
        "alarms.engine_silent_s": config.engine_silent_s,
        "alarms.entropy_below": config.entropy_below,
        "alarms.kl_above": config.kl_above,
        "alarms.first_approx_kl_above": config.first_approx_kl_above,
        "alarms.first_ratio_above": config.first_ratio_above,
    }
    off = {"alarms.first_approx_kl_above", "alarms.first_ratio_above"}
    for key, number in numbers.items():
        yield from above(0, {key: number}, "" if key in off else ", or null for no such alarm")
    counts = {"alarms.staleness_steps": config.staleness_steps, "alarms.critic_steps": config.critic_steps}
    yield from at_least(1, {**counts, "alarms.steps": config.steps})
    yield from at_least(0, {"alarms.first_steps": config.first_steps})
    for rule in config.stop:
        if rule not in RULES:
            yield Problem("alarms.stop", rule, f"no such rule; the rules are {', '.join(RULES)}")
