"""KL estimators against their expectations, the gradient of the KL loss, and the adaptive coefficient."""

from __future__ import annotations

import math

import pytest
import torch

from stages.ppo.config import KLConfig
from stages.ppo.kl import next_kl_coef, token_kl, token_kl_loss
from tests.reference import oracles

ESTIMATORS = ("k1", "k2", "k3")


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_token_kl_is_the_formula(estimator: str) -> None:
    d = torch.tensor([[-2.0, -0.3, 0.0, 0.4, 1.7]], dtype=torch.float64)
    ref = torch.tensor([[-1.0, -2.0, -3.0, -0.5, -4.0]], dtype=torch.float64)
    expected = [[oracles.kl_estimate(x, estimator) for x in d[0].tolist()]]
    assert token_kl(ref + d, ref, estimator).tolist() == [pytest.approx(expected[0])]
    assert token_kl_loss(ref + d, ref, estimator).tolist() == [pytest.approx(expected[0])]


def test_k1_and_k3_are_unbiased_under_the_policy() -> None:
    """The expectation over every outcome, not a sample, so it is exact."""
    log_p = torch.log_softmax(torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64), dim=1)
    log_q = torch.log_softmax(torch.tensor([[0.0, 0.3, 1.0]], dtype=torch.float64), dim=1)
    kl = sum(p * math.log(p / q) for p, q in zip(log_p.exp()[0].tolist(), log_q.exp()[0].tolist(), strict=True))
    for estimator in ("k1", "k3"):
        assert (log_p.exp() * token_kl(log_p, log_q, estimator)).sum().item() == pytest.approx(kl)


@pytest.mark.parametrize(
    ("estimator", "forward"), [("k1", True), ("k2", True), ("k3", False)], ids=["k1", "k2", "k3-of-the-other-KL"]
)
def test_expected_gradient_of_the_loss_is_a_kl_gradient(estimator: str, forward: bool) -> None:
    """E_pi[grad of the term], taken exactly over all outcomes, equals grad KL(pi||ref) (k1, k2) or grad KL(ref||pi)
    (k3). With autograd's own gradient k1 would give exactly zero."""
    theta = torch.tensor([[0.5, -1.0, 2.0]], dtype=torch.float64, requires_grad=True)
    log_q = torch.log_softmax(torch.tensor([[0.0, 0.3, 1.0]], dtype=torch.float64), dim=1)
    log_p = torch.log_softmax(theta, dim=1)
    (got,) = torch.autograd.grad((log_p.detach().exp() * token_kl_loss(log_p, log_q, estimator)).sum(), theta)
    log_p = torch.log_softmax(theta, dim=1)
    exact = (log_p.exp() * (log_p - log_q)).sum() if forward else (log_q.exp() * (log_q - log_p)).sum()
    (expected,) = torch.autograd.grad(exact, theta)
    torch.testing.assert_close(got, expected)
    assert expected.abs().max() > 0.05


def test_adaptive_coefficient_moves_toward_the_target_and_is_clipped() -> None:
    cfg = KLConfig(target=6.0, horizon=1000)
    assert next_kl_coef(0.1, 6.6, 100, cfg) == pytest.approx(0.1 * (1 + 0.1 * 0.1))  # 10 % over: up by 1 %
    assert next_kl_coef(0.1, 5.4, 100, cfg) == pytest.approx(0.1 * (1 - 0.1 * 0.1))
    assert next_kl_coef(0.1, 6.0, 100, cfg) == pytest.approx(0.1)
    assert next_kl_coef(0.1, 600.0, 100, cfg) == pytest.approx(0.1 * (1 + 0.2 * 0.1))
    assert next_kl_coef(0.1, -600.0, 100, cfg) == pytest.approx(0.1 * (1 - 0.2 * 0.1))


def test_a_step_larger_than_the_horizon_cannot_turn_the_sign() -> None:
    assert next_kl_coef(0.1, 0.0, 10**6, KLConfig(target=6.0, horizon=10)) == pytest.approx(0.08)
