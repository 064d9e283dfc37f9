"""Metrics by hand; every one of them reads only what was sampled."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from stages.ppo import metrics
from stages.ppo.masks import (
    last_token_index,
    last_token_mask,
    masked_mean,
    masked_var,
    masked_whiten,
    predictions_of_tokens,
    state_values,
    token_weights,
)
from storage.records import FinishReason
from tests.reference import oracles
from tests.support.sampled_rows import rollout_of

NAN = np.nan
MASK = np.array([[0, 1, 1, 0], [0, 0, 1, 1]], dtype=bool)


def tokens(*values: float, fill: float = NAN) -> np.ndarray:
    """The four sampled tokens of MASK; `fill` elsewhere."""
    out = np.full(MASK.shape, fill)
    out[MASK] = values
    return out


def versions(*values: int) -> np.ndarray:
    return tokens(*values, fill=-1).astype(np.int32)


def test_reward_and_adjusted_reward_are_apart() -> None:
    got = metrics.reward_metrics(
        scores=np.array([1.0, 3.0]), shaped_scores=np.array([1.0, -1.0]), kl_per_response=np.array([2.0, 4.0]),
        kl_coef=0.1,
    )  # fmt: skip
    assert got == pytest.approx({"reward/mean": 2.0, "reward/std": 1.0, "reward/adjusted_mean": (0.8 - 1.4) / 2})


def test_kl_to_the_reference_is_per_response() -> None:
    """All tokens are fresh, so every weight is 1."""
    mu = tokens(-1, -2, -3, -4)
    got = metrics.ref_kl_metrics(mu, mu, tokens(-1.5, -2.5, -2, -4), MASK, 2.0)
    k3 = (2 * (math.exp(-0.5) - 1 + 0.5) + (math.e - 1 - 1)) / 2
    expected = {"kl/ref": (1.0 - 1.0) / 2, "kl/ref_k3": k3, "kl/ref_per_token": 0.0, "kl/ref_sampler": 0.0}
    assert got == pytest.approx(expected | {"kl/ref_capped_share": 0.0})


def test_kl_to_the_reference_weighs_stale_tokens() -> None:
    """w = 2, 1/2, 4 -> 3 (capped), 1/2: sum 6, mean 1.5. d = 1, -1, 2, -4: sum of w d = 2 - .5 + 6 - 2 = 5.5."""
    log_w, d = np.log([2, 0.5, 4, 0.5]), np.array([1.0, -1.0, 2.0, -4.0])
    prox = np.array([-1.0, -2.0, -3.0, -4.0])
    got = metrics.ref_kl_metrics(tokens(*prox), tokens(*(prox - log_w)), tokens(*(prox - d)), MASK, 3.0)
    assert got["kl/ref"] == pytest.approx(5.5 / 1.5 / 2)
    assert got["kl/ref_per_token"] == pytest.approx(5.5 / 6)
    assert got["kl/ref_capped_share"] == 0.25
    assert got["kl/ref_sampler"] == pytest.approx((d.sum() - log_w.sum()) / 2)


def test_kl_to_the_reference_is_the_proximal_policys_whatever_sampled() -> None:
    """Exact expectation over mu's outcomes: mu is uniform, so that the four tokens are its four outcomes. The
    plain mean over them is negative, since mu is nearer to the reference than pi_prox is."""
    prox, ref = np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.22, 0.24, 0.26, 0.28])
    assert np.log(prox / ref).mean() < -0.05
    got = metrics.ref_kl_metrics(tokens(*np.log(prox)), tokens(*np.log([0.25] * 4)), tokens(*np.log(ref)), MASK, 100.0)
    kl = float((prox * np.log(prox / ref)).sum())
    assert got["kl/ref_per_token"] == pytest.approx(kl)
    assert got["kl/ref_k3"] == pytest.approx(2 * kl)  # both estimators are unbiased; two tokens a response
    assert got["kl/ref"] == pytest.approx(2 * kl)
    assert got["kl/ref_sampler"] == pytest.approx(2 * float(np.log(0.25 / ref).mean()))


@pytest.mark.parametrize("cap", [1.0, 1.3, 50.0])
def test_kl_to_the_reference_against_the_loop(cap: float) -> None:
    rng = np.random.default_rng(0)
    mask = np.arange(9) >= rng.integers(1, 9, 7)[:, None]
    mask[3] = False  # a response without a token counts as a response
    mu = -rng.random(mask.shape) - 0.1
    prox, ref = mu + rng.normal(0, 0.5, mask.shape), mu + rng.normal(0, 0.5, mask.shape)
    kl, of_sampler, capped = oracles.ref_kl(prox.tolist(), mu.tolist(), ref.tolist(), mask.tolist(), cap)
    poisoned = [np.where(mask, x, np.nan) for x in (prox, mu, ref)]
    got = metrics.ref_kl_metrics(*poisoned, mask, cap)
    assert got["kl/ref"] == pytest.approx(kl, abs=1e-12)
    assert got["kl/ref_sampler"] == pytest.approx(of_sampler, abs=1e-12)
    assert got["kl/ref_capped_share"] == capped
    fresh = metrics.ref_kl_metrics(mu, mu, ref, mask, cap)
    assert fresh["kl/ref"] == fresh["kl/ref_sampler"]  # to the last bit


def test_proximal_metrics_by_hand() -> None:
    """d = ln 2 and -ln 2 on fresh tokens, ln 4 and 0 on stale ones: w = 2, 1/2, 4, 1."""
    d = [math.log(2), -math.log(2), math.log(4), 0.0]
    got = metrics.proximal_metrics(tokens(*(x - 5 for x in d)), tokens(-5, -5, -5, -5), versions(3, 3, 2, 2), MASK, 3)
    assert got == pytest.approx(
        {
            "mismatch/fresh_fraction": 0.5,
            "mismatch/mean_abs": math.log(2),
            "mismatch/exp_abs": 2.0,
            "mismatch/mean_abs_all": math.log(2),
            "mismatch/exp_abs_all": (2 + 2 + 4 + 1) / 4,
            "ess/fraction": 7.5**2 / (4 * 21.25),
            "kl/prox_sampler": (2 * d[0] - 1 + 0.5 * d[1] + 0.5 + 4 * d[2] - 3) / 4,
        }
    )


def test_without_fresh_tokens_the_fresh_mismatch_is_absent() -> None:
    got = metrics.proximal_metrics(tokens(-1, -1, -1, -1), tokens(-1, -1, -1, -1), versions(2, 2, 2, 2), MASK, 3)
    assert "mismatch/mean_abs" not in got
    assert got["mismatch/fresh_fraction"] == 0
    assert got["ess/fraction"] == 1


def test_staleness_histogram() -> None:
    assert metrics.staleness_metrics(versions(3, 2, 2, 1), MASK, 3, bound=2) == {
        "staleness/mean": 1.0,
        "staleness/max": 2.0,
        "staleness/fraction_0": 0.25,
        "staleness/fraction_1": 0.5,
        "staleness/fraction_2": 0.25,
    }


def test_explained_variance() -> None:
    """Var(G) of 1, 2, 3, 4 is 1.25. Errors .5, -.5, .5, -.5: variance .25, so 0.8. A constant offset costs nothing."""
    got = metrics.value_metrics(tokens(0.5, 2.5, 2.5, 4.5), tokens(1, 2, 3, 4), MASK)
    assert got == pytest.approx({"critic/explained_variance": 0.8, "critic/return_mean": 2.5, "critic/start_mean": 2.5})
    assert metrics.value_metrics(tokens(0, 1, 2, 3), tokens(1, 2, 3, 4), MASK)["critic/explained_variance"] == 1
    assert "critic/explained_variance" not in metrics.value_metrics(tokens(0, 1, 2, 3), tokens(1, 1, 1, 1), MASK)


def test_entropy_and_advantages() -> None:
    assert metrics.entropy_metrics(tokens(1, 2, 3, 4), MASK) == {"policy/entropy_start": 2.5}
    assert metrics.advantage_metrics(tokens(1, 3, 1, 3), MASK) == {"advantage/mean": 2.0, "advantage/std": 1.0}


def test_responses() -> None:
    mask = np.array([[0, 1, 0, 0], [0, 1, 1, 1]], dtype=bool)
    rollout = rollout_of(
        np.zeros((2, 4)), mask, finish_reason=np.array([FinishReason.STOP, FinishReason.LENGTH], np.int8)
    )
    assert metrics.response_metrics(rollout) == {
        "response/length_mean": 2.0,
        "response/length_max": 3.0,
        "response/eos_fraction": 0.5,
        "response/truncated_fraction": 0.5,
    }


NOT_A_NUMBER = float("nan")
# Three rows: two sampled tokens at offset 1, one at the end, none.
PLAIN_MASK = torch.tensor([[0, 1, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]], dtype=torch.bool)


def test_predictions_move_one_to_the_right_and_nothing_predicts_token_zero() -> None:
    x = torch.tensor([[1.0, 2.0, 3.0]])
    assert predictions_of_tokens(x).tolist() == [[0.0, 1.0, 2.0]]
    logits_RTV = torch.arange(6.0).reshape(1, 3, 2)
    assert predictions_of_tokens(logits_RTV).tolist() == [[[0.0, 0.0], [0.0, 1.0], [2.0, 3.0]]]


def test_last_token() -> None:
    assert last_token_mask(PLAIN_MASK).int().tolist() == [[0, 0, 1, 0], [0, 0, 0, 1], [0, 0, 0, 0]]
    assert last_token_index(PLAIN_MASK).tolist() == [2, 3, 0]


def test_state_values_are_of_the_state_before_each_token_and_after_the_last() -> None:
    head = torch.tensor([[10.0, 11.0, 12.0, 13.0], [20.0, 21.0, 22.0, 23.0], [30.0, 31.0, 32.0, 33.0]])
    values, bootstrap = state_values(head, PLAIN_MASK)
    assert values.tolist() == [[0.0, 10.0, 11.0, 0.0], [0.0, 0.0, 0.0, 22.0], [0.0, 0.0, 0.0, 0.0]]
    assert bootstrap.tolist() == [12.0, 23.0, 0.0]


def test_moments_and_whitening_read_only_the_mask() -> None:
    x = torch.tensor(
        [[NOT_A_NUMBER, 1.0, 3.0, NOT_A_NUMBER], [NOT_A_NUMBER, NOT_A_NUMBER, NOT_A_NUMBER, 8.0], [NOT_A_NUMBER] * 4],
        dtype=torch.float64,
    )
    assert masked_mean(x, PLAIN_MASK).item() == 4.0
    assert masked_var(x, PLAIN_MASK).item() == pytest.approx((9 + 1 + 16) / 3)
    std = (26 / 3) ** 0.5
    expected = torch.tensor([[0, -3, -1, 0], [0, 0, 0, 4], [0, 0, 0, 0]], dtype=torch.float64) / std
    torch.testing.assert_close(masked_whiten(x, PLAIN_MASK), expected, atol=1e-8, rtol=0)
    torch.testing.assert_close(
        masked_whiten(x, PLAIN_MASK, keep_mean=True), torch.where(PLAIN_MASK, expected + 4, 0), atol=1e-8, rtol=0
    )


def test_empty_mask_gives_zeros() -> None:
    x, none = torch.full((2, 3), NOT_A_NUMBER), torch.zeros(2, 3, dtype=torch.bool)
    assert masked_mean(x, none).item() == 0
    assert masked_whiten(x, none).abs().sum().item() == 0
    assert token_weights(none, "token").sum().item() == token_weights(none, "sequence").sum().item() == 0


def test_token_weights_by_hand() -> None:
    third = 1 / 3
    expected = {
        "token": [[0, third, third, 0], [0, 0, 0, third], [0, 0, 0, 0]],
        "sequence": [[0, 0.25, 0.25, 0], [0, 0, 0, 0.5], [0, 0, 0, 0]],
    }
    for aggregation, weights in expected.items():
        torch.testing.assert_close(
            token_weights(PLAIN_MASK, aggregation, torch.float64), torch.tensor(weights, dtype=torch.float64)
        )
