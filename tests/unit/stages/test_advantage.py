"""The `advantage` stage: formulas put together as the loop oracle does, over the whole step; state; refusals."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import pytest

from stages.advantage import StalenessError, advantage
from stages.ppo.config import KLConfig, NormalizeConfig, PPOConfig
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Scores, Values, concatenate
from tests.reference import oracles
from tests.support.sampled_rows import sampled_rows

STEP, BOUND = 5, 2
SPANS = [(1, 6), (2, 3), (3, 5), (6, 2), (4, 1)]
CUT = np.array([False, True, True, False, False])
SEQ = 8

Step = tuple[Rollout, Scores, ReferenceLogprobs, PolicyLogprobs, Values]


def make_step(outside: float = 0.0, seed: int = 0) -> Step:
    """The records of one step; `outside` fills every float outside the mask."""
    rng, rows = np.random.default_rng(seed), len(SPANS)
    made = sampled_rows(rng, SPANS, CUT, SEQ, (STEP - BOUND, STEP), range(rows), outside, first_row=100)
    values = Values(
        values=made.by_token(rng.normal(size=(rows, SEQ))),
        bootstrap_values=np.where(CUT, rng.normal(size=rows), outside).astype(np.float32),
    )
    scores = Scores(scores=rng.normal(size=rows).astype(np.float32))
    return made.rollout, scores, made.reference, made.policy, values


AS_THEY_ARE, CENTRED = NormalizeConfig(), NormalizeConfig(mean=True)


def run(
    records: Step, cfg: PPOConfig, state: dict | None = None, normalize: NormalizeConfig = AS_THEY_ARE
) -> tuple[Advantages, dict, dict[str, float]]:
    rollout, scores, reference, policy, values = records
    return advantage(
        rollout, scores, reference, policy if cfg.proximal == "recompute" else None, values, cfg, STEP, BOUND,
        {} if state is None else state, normalize,
    )  # fmt: skip


def expected_by_loops(records: Step, cfg: PPOConfig, normalize: NormalizeConfig) -> dict[str, list[list[float]]]:
    rollout, scores, reference, policy, values = records
    mask = rollout.response_mask.tolist()
    kept = [[on and not (cfg.truncated == "mask" and cut) for on in row] for row, cut in zip(mask, CUT, strict=True)]
    shaped = [
        cfg.missing_eos_score if cut and cfg.missing_eos_score is not None else float(s)
        for s, cut in zip(scores.scores, CUT, strict=True)
    ]
    if normalize.mean:
        shaped = [s - sum(shaped) / len(shaped) for s in shaped]
    logprobs = policy.policy_logprobs if cfg.proximal == "recompute" else rollout.sampler_logprobs
    r = oracles.token_rewards(
        shaped, logprobs.tolist(), reference.ref_logprobs.tolist(), mask, cfg.kl.coef, cfg.kl.estimator, cfg.kl.where
    )
    if cfg.whiten_rewards:
        r = oracles.whiten(r, kept, keep_mean=True)
    a, returns = oracles.gae(
        r, values.values.tolist(), values.bootstrap_values.tolist(), mask, CUT.tolist(), cfg.gamma, cfg.lam,
        cfg.truncated,
    )  # fmt: skip
    if cfg.critic_lam is not None:
        _, returns = oracles.gae(
            r, values.values.tolist(), values.bootstrap_values.tolist(), mask, CUT.tolist(), cfg.gamma,
            cfg.critic_lam, cfg.truncated,
        )  # fmt: skip
    if cfg.whiten_advantages is not False:
        a = oracles.whiten(a, kept, keep_mean=False)
    a = [[x if on else 0.0 for x, on in zip(row, m, strict=True)] for row, m in zip(a, kept, strict=True)]
    return {"rewards": r, "advantages": a, "returns": returns, "loss_mask": kept}


CONFIGS = {
    "default": PPOConfig(),
    "sampler-k3": PPOConfig(proximal="sampler", kl=KLConfig(coef=0.5, estimator="k3")),
    "loglinear-kl-loss": PPOConfig(proximal="loglinear", kl=KLConfig(coef=0.5, where="loss")),
    "terminate": PPOConfig(whiten_advantages=False, truncated="terminate", gamma=0.9),
    "whiten-rewards": PPOConfig(whiten_rewards=True, kl=KLConfig(coef=0.5, estimator="k2")),
    "missing-eos-centred": PPOConfig(missing_eos_score=-3.0),
    "overlong": PPOConfig(truncated="mask", whiten_rewards=True),
    "critic-lambda-1": PPOConfig(lam=0.7, critic_lam=1.0),
    "critic-lambda-0": PPOConfig(lam=1.0, critic_lam=0.0, gamma=0.9, truncated="bootstrap", whiten_advantages=False),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_against_loops(name: str) -> None:
    cfg, records = CONFIGS[name], make_step()
    normalize = NormalizeConfig(mean=cfg.missing_eos_score is not None)
    got, _, _ = run(records, cfg, normalize=normalize)
    for array, expected in expected_by_loops(records, cfg, normalize).items():
        rows = slice(None)
        if array in ("rewards", "returns") and cfg.truncated == "mask" and cfg.whiten_rewards:
            rows = ~CUT  # nothing reads the rewards and returns of a filtered row
        np.testing.assert_allclose(getattr(got, array)[rows], np.array(expected)[rows], atol=1e-6, err_msg=array)


@pytest.mark.parametrize(
    ("cfg", "normalize"),
    [(PPOConfig(), NormalizeConfig()), (PPOConfig(truncated="mask", whiten_rewards=True), CENTRED)],
    ids=["plain", "all"],
)
def test_nothing_outside_the_mask_is_read(cfg: PPOConfig, normalize: NormalizeConfig) -> None:
    """NaN in every float outside the mask, and in bootstrap values that must not be used: same bits everywhere, metrics
    and state included."""
    clean, poisoned = (run(make_step(outside=o), cfg, normalize=normalize) for o in (0.0, np.nan))
    for name, array in clean[0].arrays().items():
        np.testing.assert_array_equal(array, poisoned[0].arrays()[name])
    assert clean[1:] == poisoned[1:]
    assert all(math.isfinite(x) for x in clean[2].values())


def test_whitening_is_over_the_step_not_the_shard() -> None:
    """Two shards together: mean 0 and deviation 1 over all of their tokens, which neither has by itself."""
    shards = [make_step(), make_step(seed=1)]
    shards[1] = (shards[1][0], Scores(shards[1][1].scores + 10), *shards[1][2:])
    got, _, found = run(tuple(concatenate(list(kind)) for kind in zip(*shards, strict=True)), PPOConfig())
    a = got.advantages[got.loss_mask].astype(np.float64)
    assert a.mean() == pytest.approx(0, abs=1e-6)
    assert a.std() == pytest.approx(1, abs=1e-6)
    half = got.advantages[: len(SPANS)][got.loss_mask[: len(SPANS)]]
    assert abs(half.mean()) > 0.3
    assert found["advantage/std"] > 2  # of the advantages before whitening


def test_the_critics_lambda_by_hand() -> None:
    """One response of two tokens, gamma 1, no KL: rewards 0 and 1, values 0.5 and 0.25, so deltas -0.25 and 0.75.
    Policy, lambda 0: A = -0.25, 0.75. Critic, lambda 1: G = (-0.25 + 0.75) + 0.5 = 1 and 0.75 + 0.25 = 1, the score."""
    rollout, _, _, _, _ = make_step()
    row = rollout.rows(slice(1, 2))  # its three tokens are at 2, 3, 4; the first is taken out
    mask = row.response_mask.copy()
    mask[0, 2] = False
    row = dataclasses.replace(row, response_mask=mask, token_versions=np.where(mask, STEP, -1).astype(np.int32))
    values = np.where(mask, 0.25, 0).astype(np.float32)
    values[0, 3] = 0.5
    zeros = np.zeros(mask.shape, np.float32)
    cfg = PPOConfig(lam=0.0, critic_lam=1.0, whiten_advantages=False, kl=KLConfig(coef=0.0))
    records = (row, Scores(np.ones(1, np.float32)), ReferenceLogprobs(zeros), PolicyLogprobs(zeros, zeros),
               Values(values, np.zeros(1, np.float32)))  # fmt: skip
    got, _, _ = run(records, cfg)
    assert got.advantages[0, 3:5].tolist() == [-0.25, 0.75]
    assert got.returns[0, 3:5].tolist() == [1.0, 1.0]


def test_adaptive_kl_passes_through_the_state_and_this_step_uses_the_old_coefficient() -> None:
    """beta of step i comes from the state; what step i measures moves beta of step i + 1."""
    rollout, scores, _, policy, values = make_step()
    cfg = PPOConfig(kl=KLConfig(coef=0.4, target=1.0, horizon=50))
    for shift, error in [(-5.0, 0.2), (5.0, -0.2)]:  # pi_ref far below pi: KL above the target, and the reverse
        far = ReferenceLogprobs(np.where(rollout.response_mask, policy.policy_logprobs + shift, 0).astype(np.float32))
        _, state, found = run((rollout, scores, far, policy, values), cfg)
        assert found["kl/coef"] == 0.4
        assert state["kl_coef"] == pytest.approx(0.4 * (1 + error * 5 / 50))
        got, _, found = run((rollout, scores, far, policy, values), cfg, json.loads(json.dumps(state)))
        assert found["kl/coef"] == state["kl_coef"]
        first = rollout.response_mask & (np.cumsum(rollout.response_mask, axis=1) == 1)
        first[4] = False  # its only token also carries the score
        np.testing.assert_allclose(got.rewards[first], state["kl_coef"] * shift, rtol=1e-5)


def test_the_controller_takes_the_kl_of_the_policy_that_is_trained() -> None:
    """Three outcomes of mu, two of which pi_prox has left: the plain mean of log pi_prox - log pi_ref is far below the
    target, the KL of pi_prox is above it."""
    rollout, scores, _, _, values = make_step()
    on = rollout.response_mask
    rare = on & (np.cumsum(on, axis=1) % 3 != 0)
    mu = np.where(on, math.log(1 / 3), 0).astype(np.float32)
    stale = dataclasses.replace(rollout, sampler_logprobs=mu)
    prox = np.where(on, np.where(rare, math.log(0.02), math.log(0.96)), 0).astype(np.float32)
    records = (stale, scores, ReferenceLogprobs(mu), PolicyLogprobs(prox, np.zeros_like(prox)), values)
    cfg = PPOConfig(correction_cap=10.0, kl=KLConfig(coef=0.4, target=0.5, horizon=50))
    _, state, found = run(records, cfg)
    assert found["kl/ref"] > 0.5
    assert float((prox - mu)[on].sum() / len(on)) < 0
    assert state["kl_coef"] > 0.4


def test_without_a_proximal_policy_the_kl_is_the_samplers() -> None:
    _, _, found = run(make_step(), PPOConfig(proximal="loglinear"))
    assert found["kl/ref"] == found["kl/ref_sampler"]
    assert found["kl/ref_capped_share"] == 0


@pytest.mark.parametrize("where", ["reward", "loss"])
def test_a_proximal_policy_that_says_what_the_sampler_said_adds_nothing(where: str) -> None:
    """Fresh rows, engine and trainer 1e-6 apart: the same advantages and returns with its nodes and without."""
    rollout, scores, reference, _, values = make_step()
    fresh = dataclasses.replace(rollout, token_versions=np.where(rollout.response_mask, STEP, -1).astype(np.int32))
    policy = PolicyLogprobs(rollout.sampler_logprobs * np.float32(1 + 1e-6), np.zeros_like(rollout.sampler_logprobs))
    records = (fresh, scores, reference, policy, values)
    kl = KLConfig(where=where, coef=0.1, target=2.0)  # type: ignore[arg-type]
    with_nodes, state, found = run(records, PPOConfig(epochs=1, minibatches=1, kl=kl))
    without, state_without, found_without = run(records, PPOConfig(proximal="loglinear", kl=kl))
    for name, array in with_nodes.arrays().items():
        np.testing.assert_allclose(without.arrays()[name], array, atol=2e-6, err_msg=name)
    assert state_without == pytest.approx(state, rel=1e-6)
    assert found_without["kl/ref"] == pytest.approx(found["kl/ref"], abs=1e-5)


def test_a_constant_coefficient_follows_the_config_not_the_state() -> None:
    _, state, found = run(make_step(), PPOConfig(kl=KLConfig(coef=0.05)), {"kl_coef": 9.0})
    assert found["kl/coef"] == state["kl_coef"] == 0.05


def test_scores_are_normalised_over_all_that_the_run_has_seen() -> None:
    """Two steps, the second by the state of the first as JSON has it: mean, spread and bound over both."""
    cfg = PPOConfig(whiten_advantages=False, kl=KLConfig(coef=0.0))
    normalize = NormalizeConfig(mean=True, scale=True, clip=1.0)
    first, second = make_step(), make_step(seed=1)
    _, state, _ = run(first, cfg, None, normalize)
    got, _, _ = run(second, cfg, json.loads(json.dumps(state)), normalize)
    seen = np.concatenate([first[1].scores, second[1].scores]).astype(np.float64)
    expected = np.clip((second[1].scores - seen.mean()) / seen.std(), -1, 1)
    np.testing.assert_allclose(got.rewards.sum(axis=1), expected, atol=1e-6)
    assert np.abs(expected).max() == 1.0, "the bound is felt"


def test_each_part_of_a_score_has_metrics_of_its_own() -> None:
    """Reward hacking is a sum that rises while a part falls."""
    rollout, scores, *others = make_step()
    kind, brief = scores.scores * 2, np.arange(len(scores.scores), dtype=np.float32)
    of_parts = Scores(kind + brief, {"kind": kind, "brief": brief}, {"kind": np.full_like(kind, 0.5)})
    found = run((rollout, of_parts, *others), PPOConfig())[2]
    assert found["reward/kind/mean"] == pytest.approx(float(kind.mean()))
    assert found["reward/brief/std"] == pytest.approx(float(brief.std()))
    assert found["reward/kind/disagreement"] == 0.5
    alone = run((rollout, Scores(kind, {"kind": kind}), *others), PPOConfig())[2]
    assert not [name for name in alone if name.startswith("reward/kind")], "it would say what reward/mean says"


def test_metrics_keep_score_and_adjusted_reward_apart() -> None:
    records = make_step()
    cfg = PPOConfig(missing_eos_score=-3.0, whiten_rewards=True, kl=KLConfig(coef=0.5))
    _, _, found = run(records, cfg)
    rollout, scores, reference, policy, _ = records
    assert found["reward/mean"] == pytest.approx(float(scores.scores.mean()))
    d = np.where(rollout.response_mask, policy.policy_logprobs - reference.ref_logprobs, 0).sum(axis=1)
    shaped = np.where(CUT, -3.0, scores.scores)
    assert found["reward/adjusted_mean"] == pytest.approx(float((shaped - 0.5 * d).mean()), rel=1e-5)
    kl, of_sampler, _ = oracles.ref_kl(
        policy.policy_logprobs.tolist(), rollout.sampler_logprobs.tolist(), reference.ref_logprobs.tolist(),
        rollout.response_mask.tolist(), cfg.correction_cap,
    )  # fmt: skip
    assert found["kl/ref"] == pytest.approx(kl, rel=1e-5)
    assert found["kl/ref_sampler"] == pytest.approx(of_sampler, rel=1e-5)
    assert abs(found["kl/ref"] - float(d.mean())) > 1e-3  # what was given as a penalty is not weighted
    assert found["response/truncated_fraction"] == 0.4


def test_without_a_proximal_policy_its_metrics_are_absent() -> None:
    _, _, found = run(make_step(), PPOConfig(proximal="sampler"))
    assert not {"ess/fraction", "kl/prox_sampler", "policy/entropy_start"} & found.keys()


@pytest.mark.parametrize("version", [STEP - BOUND - 1, STEP + 1, -1])
def test_a_version_outside_the_bound_is_refused_with_the_row_named(version: int) -> None:
    records = make_step()
    records[0].token_versions[3, 7] = version
    with pytest.raises(StalenessError, match=rf"row 103 of step 5: token 7 .* version {version}; allowed are 3\.\.5"):
        run(records, PPOConfig())


def test_records_that_do_not_belong_together_are_refused() -> None:
    rollout, scores, reference, policy, values = make_step()
    with pytest.raises(ValueError, match="scores has 4 rows, the rollout 5"):
        run((rollout, scores.rows(slice(0, 4)), reference, policy, values), PPOConfig())
    for given, proximal in [(None, "recompute"), (policy, "loglinear")]:
        with pytest.raises(ValueError, match=f"ppo.proximal: {proximal} with"):
            advantage(
                rollout, scores, reference, given, values, PPOConfig(proximal=proximal), STEP, BOUND, {}
            )  # fmt: skip


def test_inputs_are_not_written_to() -> None:
    records, before = make_step(), make_step()
    run(records, PPOConfig(truncated="mask", whiten_rewards=True))
    for record, copy in zip(records, before, strict=True):
        for name in (f.name for f in dataclasses.fields(record)):
            np.testing.assert_array_equal(getattr(record, name), getattr(copy, name))
