"""The `advantage` stage without a critic: estimators put together as the loop oracle does, over a step whose groups lie
in several shards; what is skipped; refusals."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from stages.advantage import advantage
from stages.ppo.advantages import GROUP_STD_EPS
from stages.ppo.config import KLConfig, PPOConfig
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Scores, Values, concatenate
from tests.reference import oracles
from tests.support.sampled_rows import sampled_rows

STEP, BOUND, SEQ, RESPONSES = 5, 2, 9, 4
SPANS = [(1, 6), (2, 3), (3, 5), (6, 2), (4, 1), (1, 8), (2, 7), (3, 3)]
CUT = np.array([False, True, False, False, True, False, True, False])
SCORES = np.array([1.0, 0.0, 0.5, 1.0, 0.3, 0.3, 0.3, 0.3], np.float32)
"""Two groups; the second's scores are all the same."""
IN_LOSS = KLConfig(where="loss", estimator="k3")
Step = tuple[Rollout, Scores, ReferenceLogprobs, PolicyLogprobs]


def make_step(outside: float = 0.0) -> Step:
    rng, prompts = np.random.default_rng(0), np.repeat([7, 7], RESPONSES).tolist()
    made = sampled_rows(rng, SPANS, CUT, SEQ, (STEP - BOUND, STEP), prompts, outside)
    return made.rollout, Scores(scores=SCORES), made.reference, made.policy


def run(records: Step, cfg: PPOConfig, responses: int = RESPONSES) -> tuple[Advantages, dict[str, float]]:
    rollout, scores, reference, policy = records
    got, _, found = advantage(
        rollout, scores, reference, policy, None, cfg, STEP, BOUND, {}, responses_per_prompt=responses
    )
    return got, found


def expected_by_loops(cfg: PPOConfig) -> dict[str, list[list[float]]]:
    rollout, scores, reference, policy = make_step()
    mask, rows = rollout.response_mask.tolist(), range(len(SPANS))
    counted = [not (cfg.truncated == "mask" and CUT[i]) for i in rows]
    numbers = [i // RESPONSES for i in rows]
    members = [[j for j in rows if numbers[j] == numbers[i] and counted[j]] for i in rows]
    equal = [len({float(scores.scores[j]) for j in members[i]}) < 2 for i in rows]
    trained = [counted[i] and not (cfg.skip_equal_groups and equal[i]) for i in rows]
    kept = [[on and trained[i] for on in mask[i]] for i in rows]
    r = oracles.token_rewards(
        scores.scores.tolist(), policy.policy_logprobs.tolist(), reference.ref_logprobs.tolist(), mask, cfg.kl.coef,
        cfg.kl.estimator, cfg.kl.where,
    )  # fmt: skip
    to_go = oracles.rewards_to_go(r, mask, cfg.gamma)
    if cfg.advantage == "reinforce_pp":
        a = to_go
    else:
        how = {"group": "std", "group_mean": "none", "rloo": "rloo"}[cfg.advantage]
        of_rows = oracles.group_advantages([sum(row) for row in r], numbers, counted, how, GROUP_STD_EPS)
        a = [[of_rows[i]] * SEQ for i in rows]
    if cfg.whiten_advantages or (cfg.advantage == "reinforce_pp" and cfg.whiten_advantages is None):
        a = oracles.whiten(a, kept, keep_mean=False)
    a = [[x if on else 0.0 for x, on in zip(row, m, strict=True)] for row, m in zip(a, kept, strict=True)]
    return {"rewards": r, "advantages": a, "returns": to_go, "loss_mask": kept}


CONFIGS = {
    "grpo": PPOConfig(advantage="group", kl=IN_LOSS),
    "dr-grpo": PPOConfig(advantage="group_mean", kl=IN_LOSS),
    "group-kl-in-the-reward": PPOConfig(advantage="group_mean"),
    "group-whitened": PPOConfig(advantage="group_mean", whiten_advantages=True, kl=IN_LOSS),
    "group-skips": PPOConfig(advantage="group", skip_equal_groups=True, kl=IN_LOSS),
    "group-overlong": PPOConfig(advantage="group", truncated="mask", kl=IN_LOSS),
    "rloo": PPOConfig(advantage="rloo", kl=KLConfig(coef=0.5)),
    "rloo-overlong-skips": PPOConfig(advantage="rloo", truncated="mask", skip_equal_groups=True),
    "reinforce_pp": PPOConfig(advantage="reinforce_pp", kl=KLConfig(coef=0.5)),
    "reinforce_pp-discounted": PPOConfig(advantage="reinforce_pp", gamma=0.9, truncated="mask"),
    "reinforce": PPOConfig(advantage="reinforce_pp", whiten_advantages=False, kl=IN_LOSS),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_against_loops(name: str) -> None:
    cfg = CONFIGS[name]
    got, found = run(make_step(), cfg)
    for array, expected in expected_by_loops(cfg).items():
        np.testing.assert_allclose(getattr(got, array), np.array(expected), atol=1e-6, err_msg=array)
    assert not {key for key in found if key.startswith("critic/")}
    assert all(math.isfinite(x) for x in found.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_shards_and_the_order_of_rows_change_nothing(name: str) -> None:
    """A step is read shard by shard; the first shard ends in the middle of a group here."""
    cfg, records = CONFIGS[name], make_step()
    whole, _ = run(records, cfg)
    order = np.array([3, 0, 6, 1, 2, 7, 4, 5])

    def moved(record: Rollout | Scores | ReferenceLogprobs | PolicyLogprobs) -> object:
        parts = [record.rows(order[:3]), record.rows(order[3:])]
        return concatenate(parts)

    got, _ = run(tuple(moved(record) for record in records), cfg)  # type: ignore[arg-type]
    for array, expected in whole.arrays().items():
        np.testing.assert_allclose(got.arrays()[array], expected[order], atol=1e-6, err_msg=array)


@pytest.mark.parametrize("name", CONFIGS)
def test_nothing_outside_the_mask_is_read(name: str) -> None:
    clean, poisoned = run(make_step(), CONFIGS[name]), run(make_step(outside=np.nan), CONFIGS[name])
    for array, expected in clean[0].arrays().items():
        np.testing.assert_array_equal(expected, poisoned[0].arrays()[array])
    assert clean[1] == poisoned[1]


def test_a_group_of_equal_scores_is_counted_and_left_out_where_that_is_asked() -> None:
    kept, found = run(make_step(), PPOConfig(advantage="group", kl=IN_LOSS))
    assert not kept.advantages[4:].any()
    assert kept.loss_mask[4:].any(axis=1).all(), "its tokens count in the mean, and the KL's gradient is theirs too"
    assert (found["group/equal_fraction"], found["group/skipped_rows"]) == (0.5, 0)
    assert found["group/score_std"] == pytest.approx(SCORES[:4].std(ddof=1) / 2)
    skipped, found = run(make_step(), PPOConfig(advantage="group", skip_equal_groups=True, kl=IN_LOSS))
    assert skipped.loss_mask.any(axis=1).tolist() == [True] * 4 + [False] * 4
    assert (found["group/equal_fraction"], found["group/skipped_rows"]) == (0.5, 4)
    np.testing.assert_array_equal(skipped.advantages[:4], kept.advantages[:4])


def test_a_prompt_that_was_drawn_twice_is_two_groups() -> None:
    """Both groups of these rows have prompt 7: rows decide what was sampled together, not prompts."""
    got, _ = run(make_step(), PPOConfig(advantage="group_mean", kl=IN_LOSS))
    first = got.advantages[:4].max(axis=1) + got.advantages[:4].min(axis=1)  # one number a row, and zeros
    np.testing.assert_allclose(first, SCORES[:4] - SCORES[:4].mean(), atol=1e-6)


def test_rows_that_are_no_groups_are_refused() -> None:
    rollout, scores, reference, policy = make_step()
    cfg = PPOConfig(advantage="rloo")
    with pytest.raises(ValueError, match="rows 6 and on: 3 responses to one prompt are needed, there are 2"):
        run((rollout, scores, reference, policy), cfg, responses=3)
    mixed = dataclasses.replace(rollout, prompt_index=np.array([1, 1, 1, 2, 3, 3, 3, 3]))
    with pytest.raises(ValueError, match=r"rows 0 and on: 4 responses .* to prompts \[1, 2\]"):
        run((mixed, scores, reference, policy), cfg)


def test_values_belong_to_gae_alone() -> None:
    rollout, scores, reference, policy = make_step()
    values = Values(np.zeros_like(policy.entropy), np.zeros(len(SPANS), np.float32))
    with pytest.raises(ValueError, match="rloo with values"):
        advantage(rollout, scores, reference, policy, values, PPOConfig(advantage="rloo"), STEP, BOUND, {},
                  responses_per_prompt=RESPONSES)  # fmt: skip
    with pytest.raises(ValueError, match="gae with no values"):
        run(make_step(), PPOConfig())
