"""Rules that detect a run that does not learn. They are checked on the metrics of one step.

The alarms (pipeline/driver/alarms.py) count for how many steps in a row a rule is violated. At the end of a run, the
rules that raised an alarm are shown again, with advice. Pure functions.

A rule is violated in a step under the following condition:

    equal_groups     for three quarters of the prompts or more, all responses have the same score
    cut_responses    half of the responses or more are cut by the length limit
    constant_score   all responses of the step have the same score
    constant_length  all responses have the same length, and not all were cut by the length limit
    unmoved          no optimizer step changed the policy, or a trained policy still has the reference's log-probs

The rules `equal_groups` and `cut_responses` are checked only with group-relative advantages. Such advantages compare
the responses to the same prompt, and are 0 if all their scores are equal. The rules `cut_responses` and
`constant_length` are not checked if the config permits only one response length. One cause violates one rule: if all
scores of a step are equal, so are those of each group, and the gradient is 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EQUAL_FRACTION, TRUNCATED_FRACTION = "group/equal_fraction", "response/truncated_fraction"
MAX_EQUAL_FRACTION, MAX_TRUNCATED_FRACTION = 0.75, 0.5
"""Fractions of groups with equal scores and of truncated responses at which `equal_groups` and `cut_responses` are
violated. A smaller fraction that is above the healthy range is only shown in red
(`metric_catalogue.find_unhealthy_numbers`)."""
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


_TOO_FAST = "lower model.policy.lr, or raise ppo.kl.coef; `stageline export RUN --version best` has the best version"
ADVICE = {
    "first_updates": _TOO_FAST,
    "kl": _TOO_FAST,
    "entropy": _TOO_FAST,
    "equal_groups": "sample more responses per prompt (rollout.responses_per_prompt), use a reward with finer steps, "
    "permit longer responses (sampling.max_new_tokens), or choose prompts that are sometimes solved",
    "cut_responses": "raise sampling.max_new_tokens, or reward short responses (the part `overlong`)",
    "constant_score": "`stageline check` tries the reward; look at the responses with `stageline inspect`, then choose "
    "easier prompts or a reward with finer steps",
    "constant_length": "look at the responses with `stageline inspect`: the policy may repeat one answer; lower "
    "model.policy.lr or raise ppo.kl.coef",
    "unmoved": "without a gradient, the scores of a step do not differ, or all rows are left out of the loss: "
    "cut responses by ppo.truncated=mask (raise sampling.max_new_tokens), equal groups by ppo.skip_equal_groups; else "
    "raise model.policy.lr, if it is 0 or tiny",
    "critic": "raise model.critic.lr or ppo.critic_warmup_steps, or train without a critic (ppo.advantage=rloo)",
}
"""Rule that raised an alarm -> advice for the next run. The first rules are the causes of the later ones."""


def check_learning(
    metrics: Mapping[str, float],
    has_fixed_length: bool = False,
    trains_only_critic: bool = False,
    is_trained: bool = False,
) -> list[RuleResult]:
    """Return the result of each rule for one step. A rule is skipped if the step lacks its metrics.

    Args:
        metrics: the metrics of the step.
        has_fixed_length: True if the config permits only one response length. `cut_responses` and `constant_length` are
            then skipped.
        trains_only_critic: True if the step trains only the critic. `unmoved` is then skipped.
        is_trained: True if every version of the weights that sampled the step was trained from the first version."""
    results = []
    equal, cut, deviation = metrics.get(EQUAL_FRACTION), metrics.get(TRUNCATED_FRACTION), metrics.get("reward/std")
    score = metrics.get("reward/mean", 0.0)
    is_constant = deviation is not None and not deviation > 1e-9 * max(1.0, abs(score))
    if equal is not None:
        text = f"{equal:.0%} of the groups had equal scores: nothing to learn from them ({EQUAL_FRACTION})"
        results.append(RuleResult("equal_groups", not equal < MAX_EQUAL_FRACTION and not is_constant, text))
    if equal is not None and cut is not None and not has_fixed_length:
        text = f"{cut:.0%} of the responses were cut by the length limit ({TRUNCATED_FRACTION})"
        results.append(RuleResult("cut_responses", not cut < MAX_TRUNCATED_FRACTION, text))
    if deviation is not None:
        text = f"all responses had the same score, {score:.4g} (reward/std)"
        results.append(RuleResult("constant_score", is_constant, text))
    mean, longest = metrics.get("response/length_mean"), metrics.get("response/length_max")
    if mean is not None and longest is not None and not has_fixed_length:
        text = f"all responses had the same length, {longest:g} (response/length_max)"
        constant = mean == longest and cut is not None and cut < 1  # if all are cut, all have the length limit
        results.append(RuleResult("constant_length", constant, text, EQUAL_LENGTH_ALARM_STEPS))
    names = ["policy/lr", "policy/optimizer_steps"]
    names += [] if is_constant or equal == 1 else ["policy/grad_norm_max"]  # then it is 0 for that reason
    names += ["kl/ref_per_token"] if is_trained else []
    causes = {name: metrics[name] for name in names if name in metrics}
    if causes and not trains_only_critic:
        zero = " and ".join(f"{name} is 0" for name, value in causes.items() if value == 0)
        results.append(RuleResult("unmoved", bool(zero), f"no optimizer step changed the policy: {zero}"))
    return results
