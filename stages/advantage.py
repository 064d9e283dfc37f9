"""Stage `advantage`: compute the inputs of the two updates from the records of all rows of a step.

    scores ─missing EOS, normalising─► R ┐
    log pi (or log mu), log pi_ref ──────┴─► r_t ──(whitening)──► GAE ──► returns, advantages ──whitening──► Advantages
    values, bootstrap_values ───────────────────────────────────────┘
                                              r_t ──► an estimator without a critic (`ppo.advantage`) ──┘

The stage is a pure function, computed in float64. It gets the whole step and not a shard, since four things are defined
over the step: whitening, groups of responses to one prompt, the running moments of scores, and the KL controller.
`state` passes from step to step. The state is a small JSON object in the stage's output, so every checkpoint has the
state.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from stages.ppo import metrics as measure
from stages.ppo.advantages import (
    Groups,
    RunningMoments,
    equal_groups,
    gae,
    group_advantages,
    group_std,
    leave_one_out_advantages,
    normalise_scores,
    penalise_missing_eos,
    rewards_to_go,
    token_rewards,
    update_running_moments,
)
from stages.ppo.config import GROUPED, NormalizeConfig, PPOConfig, has_critic, whitens_advantages
from stages.ppo.kl import next_kl_coef, token_kl
from stages.ppo.masks import masked_whiten
from storage.records import Advantages, FinishReason, PolicyLogprobs, ReferenceLogprobs, Rollout, Scores, Values

_AS_THEY_ARE = NormalizeConfig()


class StalenessError(RuntimeError):
    """A row was sampled by weights older than the staleness bound allows, or newer than the step. The graph should make
    this impossible. The message names the row."""


def advantage(
    rollout: Rollout,
    scores: Scores,
    reference: ReferenceLogprobs,
    policy: PolicyLogprobs | None,
    values: Values | None,
    cfg: PPOConfig,
    step: int,
    staleness_bound: int,
    state: Mapping[str, Any],
    normalize: NormalizeConfig = _AS_THEY_ARE,
    responses_per_prompt: int = 1,
) -> tuple[Advantages, dict[str, Any], dict[str, float]]:
    """Return the advantages of every row of the step, the state for the next step, and the step's metrics.

    Args:
        policy: None if `cfg.proximal` is "loglinear" or "sampler". The KL term then uses sampler_logprobs.
        values: None if `cfg.advantage` trains no critic.
        staleness_bound: eta. Every sampled token must have max(0, step - eta) <= version <= step.
        state: the state that the previous step returned. Empty at step 0. Keys: kl_coef (of this step), step_kl_coef
            (of the previous step), score_mean, score_squares, score_count.
        normalize: how scores are normalised before they become rewards.
        responses_per_prompt: `rollout.responses_per_prompt`, called k. Rows 0 to k - 1 of the step are a group, rows k
            to 2 k - 1 the next one, and so on. All rows of a group have the same prompt.

    Returns:
        (advantages, state, metrics). `metrics["kl/coef"]` and `state["step_kl_coef"]` are the KL coefficient of THIS
        step. `state["kl_coef"]` is the KL coefficient of the next step.

    Raises:
        StalenessError: a sampled token has a version outside the range given under `staleness_bound`.
        ValueError: the records do not belong together or do not suit `cfg`. Also raised if `cfg.advantage` compares
            the responses of a group, and a group is incomplete or has several prompts.
    """
    _check(rollout, scores, reference, policy, values, cfg)
    check_staleness(rollout, step, staleness_bound)
    mask = torch.tensor(rollout.response_mask)
    truncated = torch.tensor(rollout.finish_reason == FinishReason.LENGTH)
    loss_mask = mask & ~truncated[:, None] if cfg.truncated == "mask" else mask
    log_ref = _float64(reference.ref_logprobs, mask)
    log_policy = _float64(rollout.sampler_logprobs if policy is None else policy.policy_logprobs, mask)
    kl_coef = float(state.get("kl_coef", cfg.kl.coef)) if cfg.kl.target is not None else cfg.kl.coef
    shaped_scores, running = _shape_scores(scores, truncated, cfg, normalize, state)
    groups = _groups(rollout, loss_mask, responses_per_prompt) if cfg.advantage in GROUPED else None
    loss_mask = _without_equal_groups(loss_mask, shaped_scores, groups, cfg)
    r = _whitened_rewards(token_rewards(shaped_scores, log_policy, log_ref, mask, kl_coef, cfg.kl), loss_mask, cfg)
    unwhitened, returns = _advantages_and_returns(r, values, mask, truncated, groups, cfg)
    a = masked_whiten(unwhitened, loss_mask) if whitens_advantages(cfg) else unwhitened
    metrics = {
        "kl/coef": kl_coef,
        **_reward_metrics(scores, shaped_scores, token_kl(log_policy, log_ref, cfg.kl.estimator), kl_coef),
        **_ref_kl_metrics(rollout, log_policy, log_ref, cfg),
        **measure.staleness_metrics(rollout.token_versions, rollout.response_mask, step, staleness_bound),
        **_estimator_metrics(values, returns, shaped_scores, groups, loss_mask),
        **measure.advantage_metrics(unwhitened.numpy(), loss_mask.numpy()),
        **measure.response_metrics(rollout),
        **_policy_metrics(rollout, policy, step),
    }
    next_coef = next_kl_coef(kl_coef, metrics.get("kl/ref", 0.0), rollout.num_rows, cfg.kl)
    return _record(r, a, returns, loss_mask), _state(kl_coef, next_coef, running), metrics


def check_staleness(rollout: Rollout, step: int, bound: int) -> None:
    """Check that max(0, step - bound) <= version <= step for every sampled token, where version is the version of the
    weights that sampled it. Otherwise raise StalenessError. The message names the first row that breaks this rule."""
    staleness = step - rollout.token_versions.astype(np.int64)
    bad = rollout.response_mask & ((staleness < 0) | (staleness > bound) | (rollout.token_versions < 0))
    if bad.any():
        index, token = np.argwhere(bad)[0]
        raise StalenessError(
            f"row {rollout.row[index]} of step {step}: token {token} was sampled by weights version "
            f"{rollout.token_versions[index, token]}; allowed are {max(0, step - bound)}..{step} "
            f"(staleness bound {bound})"
        )


def _shape_scores(
    scores: Scores, truncated: torch.Tensor, cfg: PPOConfig, normalize: NormalizeConfig, state: Mapping[str, Any]
) -> tuple[torch.Tensor, RunningMoments]:
    """Return the scores after the penalty for a missing EOS and the normalisation, and the moments including this
    step."""
    shaped = penalise_missing_eos(torch.tensor(scores.scores).double(), truncated, cfg.missing_eos_score)
    before = RunningMoments(*(state.get(name, 0) for name in ("score_mean", "score_squares", "score_count")))
    running = update_running_moments(before, shaped)
    return normalise_scores(shaped, running, normalize), running


def _whitened_rewards(rewards: torch.Tensor, loss_mask: torch.Tensor, cfg: PPOConfig) -> torch.Tensor:
    """Return the rewards, whitened within the loss mask if the config asks for it."""
    return masked_whiten(rewards, loss_mask, keep_mean=True) if cfg.whiten_rewards else rewards


def _record(
    rewards: torch.Tensor, advantages: torch.Tensor, returns: torch.Tensor, loss_mask: torch.Tensor
) -> Advantages:
    """Return the stage's record, in float32. Advantages are 0 outside the loss mask."""
    return Advantages(
        rewards=rewards.float().numpy(),
        advantages=torch.where(loss_mask, advantages, 0).float().numpy(),
        returns=returns.float().numpy(),
        loss_mask=loss_mask.numpy().copy(),
    )


def _groups(rollout: Rollout, loss_mask: torch.Tensor, responses_per_prompt: int) -> Groups:
    """Return the groups of rows. Rows that the loss leaves out do not count in their group. Groups are formed by row
    number and not by prompt, because a prompt may be drawn twice in a step. Raises ValueError if rows of a group are
    missing or have different prompts."""
    first, number = np.unique(rollout.row // responses_per_prompt, return_inverse=True)
    for index in range(len(first)):
        prompts = rollout.prompt_index[number == index]
        if len(prompts) != responses_per_prompt or (prompts != prompts[0]).any():
            raise ValueError(
                f"rows {first[index] * responses_per_prompt} and on: {responses_per_prompt} responses to one prompt "
                f"are needed, there are {len(prompts)} to prompts {sorted(set(prompts.tolist()))}"
            )
    return Groups(torch.tensor(number), loss_mask.any(dim=1))


def _without_equal_groups(
    loss_mask: torch.Tensor, shaped_scores: torch.Tensor, groups: Groups | None, cfg: PPOConfig
) -> torch.Tensor:
    """Return the loss mask, under `cfg.skip_equal_groups` without groups whose scores are all equal."""
    if groups is None or not cfg.skip_equal_groups:
        return loss_mask
    return loss_mask & ~equal_groups(shaped_scores, groups)[groups.number][:, None]


def _advantages_and_returns(
    r: torch.Tensor,
    values: Values | None,
    mask: torch.Tensor,
    truncated: torch.Tensor,
    groups: Groups | None,
    cfg: PPOConfig,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the advantages, computed with the policy's lambda, and the returns, computed with the critic's lambda.
    Without a critic (`values` is None) return the result of `_without_critic`."""
    if values is None:
        return _without_critic(r, mask, groups, cfg)
    v, v_end = _float64(values.values, mask), torch.tensor(values.bootstrap_values).double()
    ending: Literal["bootstrap", "terminate"] = "bootstrap" if cfg.truncated == "bootstrap" else "terminate"
    advantages, returns = gae(r, v, v_end, mask, truncated, cfg.gamma, cfg.lam, ending)
    if cfg.critic_lam is not None:
        _, returns = gae(r, v, v_end, mask, truncated, cfg.gamma, cfg.critic_lam, ending)
    return advantages, returns


def _without_critic(
    r: torch.Tensor, mask: torch.Tensor, groups: Groups | None, cfg: PPOConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (advantages, returns). The advantages are computed as `cfg.advantage` says, and the returns are the
    rewards to go. `groups`: None under `reinforce_pp`, where the advantages are the rewards to go too."""
    to_go = rewards_to_go(r, mask, cfg.gamma)
    if groups is None:
        return to_go, to_go
    totals = r.sum(dim=1)
    if cfg.advantage == "rloo":
        of_rows = leave_one_out_advantages(totals, groups)
    else:
        of_rows = group_advantages(totals, groups, "std" if cfg.advantage == "group" else "none")
    return torch.where(mask, of_rows[:, None], 0), to_go


def _estimator_metrics(
    values: Values | None,
    returns: torch.Tensor,
    shaped_scores: torch.Tensor,
    groups: Groups | None,
    loss_mask: torch.Tensor,
) -> dict[str, float]:
    """Return the metrics of the critic, or of the groups if there is no critic. Return no metrics under
    `reinforce_pp`."""
    if values is not None:
        return measure.value_metrics(values.values, returns.numpy(), loss_mask.numpy())
    if groups is None:
        return {}
    equal, std = equal_groups(shaped_scores, groups), group_std(shaped_scores, groups)
    left_out = groups.counted & ~loss_mask.any(dim=1)
    return measure.group_metrics(equal.numpy(), std.numpy(), int(left_out.sum()))


def _reward_metrics(scores: Scores, shaped_scores: torch.Tensor, kl: torch.Tensor, kl_coef: float) -> dict[str, float]:
    """Return the metrics of the scores, their parts and the rewards. `kl`: estimate of the KL at each token."""
    metrics = measure.reward_metrics(scores.scores, shaped_scores.numpy(), kl.sum(dim=1).numpy(), kl_coef)
    return measure.part_metrics(scores) | metrics


def _ref_kl_metrics(
    rollout: Rollout, log_policy: torch.Tensor, log_ref: torch.Tensor, cfg: PPOConfig
) -> dict[str, float]:
    """Return the metrics of the KL to the reference. `log_policy`: log pi_prox, else log mu."""
    log_mu, mask = rollout.sampler_logprobs, rollout.response_mask
    return measure.ref_kl_metrics(log_policy.numpy(), log_mu, log_ref.numpy(), mask, cfg.correction_cap)


def _state(kl_coef: float, next_coef: float, running: RunningMoments) -> dict[str, Any]:
    """Return the state for the next step's `advantage`. `step_kl_coef` is the coefficient of this step's update."""
    return {
        "step_kl_coef": kl_coef,
        "kl_coef": next_coef,
        "score_mean": running.mean,
        "score_squares": running.squares,
        "score_count": running.count,
    }


def _policy_metrics(rollout: Rollout, policy: PolicyLogprobs | None, step: int) -> dict[str, float]:
    """Return the metrics of the proximal policy. Return no metrics if no proximal policy was computed."""
    if policy is None:
        return {}
    mask = rollout.response_mask
    return {
        **measure.proximal_metrics(
            policy.policy_logprobs, rollout.sampler_logprobs, rollout.token_versions, mask, step
        ),
        **measure.entropy_metrics(policy.entropy, mask),
    }


def _check(
    rollout: Rollout,
    scores: Scores,
    reference: ReferenceLogprobs,
    policy: PolicyLogprobs | None,
    values: Values | None,
    cfg: PPOConfig,
) -> None:
    """Raise ValueError if the records have different numbers of rows, or if they do not suit `cfg`: a record is None
    although `cfg` needs it, or is given although `cfg` excludes it."""
    for record in (scores, reference, policy, values):
        if record is not None and record.num_rows != rollout.num_rows:
            raise ValueError(f"{record.KIND} has {record.num_rows} rows, the rollout {rollout.num_rows}")
    if (policy is None) == (cfg.proximal == "recompute"):
        given = "no policy_logprobs" if policy is None else "policy_logprobs"
        raise ValueError(f"ppo.proximal: {cfg.proximal} with {given}")
    if (values is not None) != has_critic(cfg):
        raise ValueError(f"ppo.advantage: {cfg.advantage} with {'no ' if values is None else ''}values")


def _float64(x: np.ndarray, mask: torch.Tensor) -> torch.Tensor:
    """Return `x` as a float64 tensor with zeros outside the mask."""
    return torch.where(mask, torch.tensor(x).double(), 0)
