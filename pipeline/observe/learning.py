"""Rules that detect a run that does not learn. They are checked on the metrics of one step.

The alarms (pipeline/driver/alarms.py) count the steps in a row in which a rule is violated. At the end of a run, the
rules that raised an alarm are shown again, with advice. Pure functions.

    equal_groups     for half of the prompts or more, all responses have the same score, so their advantages are 0
    cut_responses    half of the responses or more are cut by the length limit; checked only if the advantages compare
                     the responses to one prompt with each other
    constant_score   all responses of the step have the same score
    constant_length  all responses of the step have the same length, though the config permits other lengths; not
                     violated if the length limit cut all responses
    unmoved          no optimizer step changed the policy
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.observe.metric_catalogue import upper_limit

EQUAL_FRACTION, TRUNCATED_FRACTION = "group/equal_fraction", "response/truncated_fraction"
MAX_TRUNCATED_FRACTION = 0.5
"""Fraction of truncated responses at which the rule `cut_responses` is violated. A smaller fraction that is above the
healthy range is only shown in red (`metric_catalogue.find_unhealthy_numbers`)."""
ALARM_STEPS, EQUAL_LENGTH_ALARM_STEPS = 3, 10
"""Number of steps in a row after which a violated rule raises an alarm: the default, and the number for
`constant_length`. The second number is larger, because short answers may have equal lengths by chance."""


@dataclass(frozen=True)
class RuleResult:
    """The result of one rule for one step."""

    rule: str
    is_violated: bool
    text: str
    alarm_steps: int = ALARM_STEPS
    """Number of steps in a row after which the violated rule raises an alarm."""


ADVICE = {
    "equal_groups": "sample more responses per prompt (rollout.responses_per_prompt), use a reward with finer steps, "
    "permit longer responses (sampling.max_new_tokens), or choose prompts that are sometimes solved",
    "cut_responses": "raise sampling.max_new_tokens, or reward short responses (the part `overlong`)",
    "constant_score": "`stageline check` tries the reward; look at the responses with `stageline inspect`, then choose "
    "easier prompts or a reward with finer steps",
    "constant_length": "look at the responses with `stageline inspect`: the policy may repeat one answer; lower "
    "model.policy.lr or raise ppo.kl.coef",
    "unmoved": "raise model.policy.lr if it is 0; without a gradient, the scores of a step do not differ or all rows "
    "are left out of the loss (ppo.truncated=mask, ppo.skip_equal_groups)",
    "critic": "raise model.critic.lr or ppo.critic_warmup_steps, or train without a critic (ppo.advantage=rloo)",
}
"""Rule that raised an alarm -> advice for the next run."""


def check_learning(
    metrics: Mapping[str, float], has_fixed_length: bool = False, trains_only_critic: bool = False
) -> list[RuleResult]:
    """Return the result of each rule for one step. A rule is skipped if the step lacks its metrics.

    Args:
        metrics: the metrics of the step.
        has_fixed_length: True if the config permits only one response length. `cut_responses` and `constant_length` are
            then skipped.
        trains_only_critic: True if the step trains only the critic. `unmoved` is then skipped."""
    results = []
    equal, cut, deviation = metrics.get(EQUAL_FRACTION), metrics.get(TRUNCATED_FRACTION), metrics.get("reward/std")
    if equal is not None:
        text = f"{equal:.0%} of the groups had equal scores: nothing to learn from ({EQUAL_FRACTION})"
        results.append(RuleResult("equal_groups", not equal < upper_limit(EQUAL_FRACTION), text))
    if equal is not None and cut is not None and not has_fixed_length:
        text = f"{cut:.0%} of the responses were cut by the length limit ({TRUNCATED_FRACTION})"
        results.append(RuleResult("cut_responses", not cut < MAX_TRUNCATED_FRACTION, text))
    if deviation is not None:
        score = metrics.get("reward/mean", 0.0)
        text = f"all responses had the same score, {score:.4g} (reward/std)"
        results.append(RuleResult("constant_score", not deviation > 1e-9 * max(1.0, abs(score)), text))
    mean, longest = metrics.get("response/length_mean"), metrics.get("response/length_max")
    if mean is not None and longest is not None and not has_fixed_length:
        text = f"all responses had {longest:g} tokens (response/length_max)"
        constant = mean == longest and cut is not None and cut < 1  # if all are cut, all have the length limit
        results.append(RuleResult("constant_length", constant, text, EQUAL_LENGTH_ALARM_STEPS))
    names = ("policy/lr", "policy/optimizer_steps", "policy/grad_norm_max")
    causes = {name: metrics[name] for name in names if name in metrics}
    if causes and not trains_only_critic:
        zero = " and ".join(f"{name} is 0" for name, value in causes.items() if value == 0)
        results.append(RuleResult("unmoved", bool(zero), f"no optimizer step changed the policy: {zero}"))
    return results
