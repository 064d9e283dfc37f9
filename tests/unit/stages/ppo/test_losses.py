"""The losses against the loop oracle, their gradients by hand, and what must not change them: how rows are cut, and
whatever lies outside the mask."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.ppo.config import KLConfig, PPOConfig
from stages.ppo.losses import (
    LossStats,
    PolicyLossInputs,
    ValueLossInputs,
    behaviour_weights,
    loglinear_proximal,
    merge_stats,
    policy_loss,
    summarise_stats,
    value_loss,
)
from stages.ppo.masks import token_weights
from tests.reference import oracles

SPANS = [(1, 7), (2, 3), (5, 2), (3, 1), (4, 4), (2, 6)]
SEQ = 8
KL_COEF = 0.3


def make_batch(cfg: PPOConfig, taken: int = 3) -> tuple[Tensor, Tensor, PolicyLossInputs]:
    """(new_logprobs, entropy, inputs) of six rows of unequal lengths, far enough from mu for every branch to be met."""
    g = torch.Generator().manual_seed(0)

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(len(SPANS), SEQ, generator=g, dtype=torch.float64)

    mask = torch.zeros(len(SPANS), SEQ, dtype=torch.bool)
    for i, (start, length) in enumerate(SPANS):
        mask[i, start : start + length] = True
    mu = -normal(1.0).abs() - 0.1
    prox = mu + normal(0.6)
    new = (prox + normal(0.3)).requires_grad_()
    entropy = normal(1.0).abs().requires_grad_()
    inputs = PolicyLossInputs(
        mask=mask,
        weights=token_weights(mask, cfg.aggregation, torch.float64),
        advantages=normal(1.0),
        sampler_logprobs=mu,
        policy_logprobs=prox if cfg.proximal == "recompute" else None,
        ref_logprobs=mu + normal(0.5) if cfg.kl.where == "loss" else None,
        stale_optimizer_steps=4 * torch.randint(0, 3, mask.shape, generator=g),
        optimizer_steps_taken=taken,
    )
    return new, entropy, inputs


def rows_of(inputs: PolicyLossInputs, index: Tensor) -> PolicyLossInputs:
    cut = {n: v[index] for n, v in vars(inputs).items() if isinstance(v, Tensor)}
    return dataclasses.replace(inputs, **cut)


CONFIGS = [
    PPOConfig(
        anchor=anchor, correction=correction, proximal=proximal, aggregation=aggregation, correction_cap=1.5,
        entropy_coef=0.05, kl=KLConfig(where=where, estimator=estimator),
    )
    for (anchor, correction, proximal), (aggregation, where, estimator) in itertools.product(
        [
            ("proximal", "truncate", "recompute"),
            ("proximal", "mask", "recompute"),
            ("proximal", "none", "recompute"),
            ("proximal", "truncate", "loglinear"),
            ("proximal", "mask", "sampler"),
            ("sampler", "truncate", "recompute"),
        ],
        [("token", "reward", "k1"), ("sequence", "loss", "k1"), ("token", "loss", "k2"), ("sequence", "loss", "k3")],
    )
]  # fmt: skip
CLIPS = [
    PPOConfig(clip_high=0.28),
    PPOConfig(clip_high=0.05, aggregation="sequence"),
    PPOConfig(dual_clip=1.3, correction_cap=1.5),
    PPOConfig(clip=0.1, clip_high=1.5, dual_clip=1.3, anchor="sampler", kl=KLConfig(where="loss", estimator="k3")),
]


@pytest.mark.parametrize("taken", [0, 3])
@pytest.mark.parametrize(
    "cfg",
    [*CONFIGS, *CLIPS],
    ids=lambda c: (
        f"{c.anchor}-{c.correction}-{c.proximal}-{c.aggregation}-{c.kl.estimator}-{c.clip_high}-{c.dual_clip}"
    ),
)
def test_policy_loss_against_the_loop(cfg: PPOConfig, taken: int) -> None:
    new, entropy, inputs = make_batch(cfg, taken)
    loss, stats = policy_loss(new, entropy, inputs, cfg, KL_COEF)
    unused = torch.zeros_like(new).tolist()
    expected = oracles.policy_loss(
        new.tolist(), entropy.tolist(), inputs.sampler_logprobs.tolist(),
        unused if inputs.policy_logprobs is None else inputs.policy_logprobs.tolist(),
        unused if inputs.ref_logprobs is None else inputs.ref_logprobs.tolist(),
        inputs.advantages.tolist(), inputs.mask.tolist(), inputs.stale_optimizer_steps.tolist(), taken,
        clip_eps=cfg.clip, anchor=cfg.anchor, correction=cfg.correction, cap=cfg.correction_cap,
        proximal=cfg.proximal, aggregation=cfg.aggregation, entropy_coef=cfg.entropy_coef,
        kl_where=cfg.kl.where, kl_estimator=cfg.kl.estimator, kl_coef=KL_COEF, clip_high=cfg.clip_high,
        dual_clip=cfg.dual_clip,
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    assert stats.sums["policy/loss"].item() == loss.item()


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
@pytest.mark.parametrize("cut", [[1] * 6, [2, 2, 2], [4, 2], [1, 5]], ids=str)
def test_cutting_a_minibatch_changes_neither_loss_nor_gradient_nor_stats(cut: list[int], aggregation: str) -> None:
    """Why weights exist: a mean per micro-batch would weigh the tokens of short micro-batches more. The cuts are of
    unequal size over rows of unequal length, in a shuffled order, each trimmed to its own longest row."""
    cfg = PPOConfig(aggregation=aggregation, entropy_coef=0.05, kl=KLConfig(where="loss", estimator="k3"))
    new, entropy, inputs = make_batch(cfg)
    whole, stats = policy_loss(new, entropy, inputs, cfg, KL_COEF)
    grad = torch.autograd.grad(whole, [new, entropy])

    pieces, losses = torch.tensor([3, 2, 5, 0, 4, 1]).split(cut), []
    for index in pieces:
        width = int((inputs.mask[index] * torch.arange(1, SEQ + 1)).max())
        part = rows_of(inputs, index)
        part = dataclasses.replace(part, **{n: v[:, :width] for n, v in vars(part).items() if isinstance(v, Tensor)})
        losses.append(policy_loss(new[index, :width], entropy[index, :width], part, cfg, KL_COEF))
    total = torch.stack([loss for loss, _ in losses]).sum()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, [new, entropy]), grad)
    merged = merge_stats([s for _, s in losses])
    torch.testing.assert_close(merged.sums, stats.sums)
    torch.testing.assert_close(merged.maxima, stats.maxima)


@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_nothing_outside_the_mask_reaches_loss_gradient_or_stats(proximal: str) -> None:
    cfg = PPOConfig(proximal=proximal, entropy_coef=0.05, kl=KLConfig(where="loss", estimator="k2"))
    new, entropy, inputs = make_batch(cfg)
    loss, stats = policy_loss(new, entropy, inputs, cfg, KL_COEF)
    grad = torch.autograd.grad(loss, [new, entropy])

    def poison(x: Tensor) -> Tensor:
        return torch.where(inputs.mask, x, float("nan")) if x.is_floating_point() else x

    bad = dataclasses.replace(
        inputs,
        stale_optimizer_steps=torch.where(inputs.mask, inputs.stale_optimizer_steps, -3),
        **{n: poison(v) for n, v in vars(inputs).items() if isinstance(v, Tensor) and v.is_floating_point()},
    )
    bad_new, bad_entropy = (poison(x.detach()).requires_grad_() for x in (new, entropy))
    bad_loss, bad_stats = policy_loss(bad_new, bad_entropy, bad, cfg, KL_COEF)
    assert bad_loss.item() == loss.item()
    assert {n: v.item() for n, v in bad_stats.sums.items()} == {n: v.item() for n, v in stats.sums.items()}
    assert {n: v.item() for n, v in bad_stats.maxima.items()} == {n: v.item() for n, v in stats.maxima.items()}
    for bad_grad, good in zip(torch.autograd.grad(bad_loss, [bad_new, bad_entropy]), grad, strict=True):
        assert torch.equal(bad_grad, good)
        assert bad_grad[~inputs.mask].abs().sum() == 0


def test_a_micro_batch_without_tokens_adds_nothing() -> None:
    cfg = PPOConfig()
    new, entropy, inputs = make_batch(cfg)
    empty = dataclasses.replace(inputs, mask=torch.zeros_like(inputs.mask))
    loss, stats = policy_loss(new, entropy, empty, cfg, KL_COEF)
    assert loss.item() == 0
    assert all(v.item() == 0 for v in [*stats.sums.values(), *stats.maxima.values()])
    (grad,) = torch.autograd.grad(loss, new)
    assert grad.abs().sum() == 0


# One row, one value per case: u = pi/pi_prox, A, w = pi_prox/mu. eps = 0.2.
U = [1.1, 1.5, 1.5, 0.5, 0.5, 0.9]
A = [1.0, 1.0, -1.0, 1.0, -1.0, -1.0]
CLIPPED = [False, True, False, False, True, False]


def six_tokens(w: float, **changes: object) -> tuple[Tensor, PolicyLossInputs]:
    prox = torch.full((1, 6), -2.0, dtype=torch.float64)
    new = (prox + torch.tensor([U], dtype=torch.float64).log()).requires_grad_()
    mask = torch.ones(1, 6, dtype=torch.bool)
    inputs = PolicyLossInputs(
        mask=mask, weights=token_weights(mask, "token", torch.float64),
        advantages=torch.tensor([A], dtype=torch.float64), sampler_logprobs=prox - math.log(w), policy_logprobs=prox,
        ref_logprobs=None, stale_optimizer_steps=torch.zeros(1, 6, dtype=torch.int64), optimizer_steps_taken=1,
    )  # fmt: skip
    return new, dataclasses.replace(inputs, **changes)


@pytest.mark.parametrize("w", [1.0, 1.7, 3.0, 0.3])
def test_gradient_is_zero_where_the_clip_says_so_and_w_u_a_elsewhere(w: float) -> None:
    """d/d log pi of -w u A / 6 is -w u A / 6; w is cut at C = 2 and has no gradient of its own."""
    new, inputs = six_tokens(w)
    loss, stats = policy_loss(new, torch.zeros_like(new), inputs, PPOConfig(), 0.0)
    (grad,) = torch.autograd.grad(loss, new)
    expected = [0.0 if c else -min(w, 2.0) * u * a / 6 for u, a, c in zip(U, A, CLIPPED, strict=True)]
    assert grad[0].tolist() == pytest.approx(expected)
    # -w/6 * (1.1 + 1.2 - 1.5 + .5 - .8 - .9)
    assert loss.item() == pytest.approx(-min(w, 2.0) * -0.4 / 6)
    assert stats.sums["policy/clipfrac"].item() == pytest.approx(2 / 6)
    assert stats.sums["policy/ratio_mean"].item() == pytest.approx(sum(U) / 6)
    assert stats.maxima["policy/ratio_max"].item() == pytest.approx(1.5)
    assert stats.sums["policy/weight_mean"].item() == pytest.approx(w)
    assert stats.sums["policy/weight_outside"].item() == pytest.approx(float(w > 2.0))
    assert stats.sums["policy/approx_kl"].item() == pytest.approx(sum(u - 1 - math.log(u) for u in U) / 6)
    _, stats = policy_loss(new, torch.zeros_like(new), inputs, PPOConfig(correction="mask"), 0.0)
    assert stats.sums["policy/weight_outside"].item() == pytest.approx(float(not 0.5 <= w <= 2.0))


@pytest.mark.parametrize(
    ("cfg", "clipped", "gain"),
    [  # u = 1.1, 1.5, 1.5, .5, .5, .9 and A = 1, 1, -1, 1, -1, -1
        (PPOConfig(clip_high=0.6), [4], 1.1 + 1.5 - 1.5 + 0.5 - 0.8 - 0.9),
        (PPOConfig(clip_high=0.05), [0, 1, 4], 1.05 + 1.05 - 1.5 + 0.5 - 0.8 - 0.9),
        (PPOConfig(dual_clip=1.4), [1, 2, 4], 1.1 + 1.2 - 1.4 + 0.5 - 0.8 - 0.9),
        (PPOConfig(dual_clip=1.6), [1, 4], 1.1 + 1.2 - 1.5 + 0.5 - 0.8 - 0.9),
        (PPOConfig(clip_high=0.6, dual_clip=1.4), [2, 4], 1.1 + 1.5 - 1.4 + 0.5 - 0.8 - 0.9),
    ],
    ids=["wider-above", "narrower-above", "dual", "dual-not-met", "both"],
)
def test_clip_high_and_dual_clip_by_hand(cfg: PPOConfig, clipped: list[int], gain: float) -> None:
    new, inputs = six_tokens(1.7)
    loss, stats = policy_loss(new, torch.zeros_like(new), inputs, cfg, 0.0)
    assert loss.item() == pytest.approx(-1.7 * gain / 6)
    (grad,) = torch.autograd.grad(loss, new)
    expected = [0.0 if t in clipped else -1.7 * u * a / 6 for t, (u, a) in enumerate(zip(U, A, strict=True))]
    assert grad[0].tolist() == pytest.approx(expected)
    dual = stats.sums.get("policy/dual_clipfrac", torch.tensor(0.0)).item()
    assert ("policy/dual_clipfrac" in stats.sums) == (cfg.dual_clip is not None)
    assert dual == pytest.approx(float(2 in clipped) / 6)
    assert stats.sums["policy/clipfrac"].item() + dual == pytest.approx(len(clipped) / 6)


@pytest.mark.parametrize("anchor", ["proximal", "sampler"])
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_a_ratio_that_overflows_has_the_gradient_of_a_clipped_one(anchor: Any, dual_clip: float | None) -> None:
    """log u of 100, beyond float32's exp, with A = 1, 0 and -1 beside an ordinary token, against the loop in float64.
    Without a dual clip the third one's loss is unbounded, and stays so: its step is left out, not made smaller."""
    cfg = PPOConfig(anchor=anchor, dual_clip=dual_clip, correction="none")
    log_u, a = [100.0, 100.0, 0.1, 100.0], [1.0, 0.0, 1.0, -1.0]
    some = slice(None) if dual_clip is not None else slice(3)
    mask = torch.ones(1, len(a[some]), dtype=torch.bool)
    zeros = torch.zeros(1, len(a[some]))
    new = torch.tensor([log_u[some]], requires_grad=True)
    inputs = PolicyLossInputs(
        mask, token_weights(mask, "token"), torch.tensor([a[some]]), zeros, zeros, None, zeros.int(), 1
    )
    loss, stats = policy_loss(new, zeros, inputs, cfg, 0.0)
    expected = oracles.policy_loss(
        [log_u[some]], zeros.tolist(), zeros.tolist(), zeros.tolist(), zeros.tolist(), [a[some]], mask.tolist(),
        zeros.int().tolist(), 1, clip_eps=cfg.clip, anchor=anchor, correction="none", cap=cfg.correction_cap,
        proximal="recompute", aggregation="token", entropy_coef=0.0, kl_where="reward", kl_estimator="k1", kl_coef=0.0,
        dual_clip=dual_clip,
    )  # fmt: skip
    assert loss.item() == pytest.approx(expected)
    (grad,) = torch.autograd.grad(loss, new)
    count = len(a[some])
    assert grad[0].tolist() == pytest.approx([0.0, 0.0, -math.exp(0.1) / count, 0.0][:count])
    assert stats.maxima["policy/ratio_max"].isfinite()


def test_a_loss_without_a_bound_is_infinite() -> None:
    one = torch.ones(1, 1)
    inputs = PolicyLossInputs(one.bool(), one, -one, 0 * one, 0 * one, None, one.int(), 1)
    assert policy_loss(100 * one, 0 * one, inputs, PPOConfig(), 0.0)[0].item() == math.inf


def test_corrections_by_hand() -> None:
    w = torch.tensor([[0.4, 0.6, 1.0, 1.9, 2.5]], dtype=torch.float64)
    mu = torch.zeros_like(w)
    for correction, expected in {
        "truncate": [0.4, 0.6, 1.0, 1.9, 2.0], "mask": [0.0, 0.6, 1.0, 1.9, 0.0], "none": [1.0] * 5,
    }.items():  # fmt: skip
        corrected, raw = behaviour_weights(w.log(), mu, correction, 2.0)
        assert corrected[0].tolist() == pytest.approx(expected)
        assert raw[0].tolist() == pytest.approx(w[0].tolist())


def test_decoupled_equals_vanilla_ppo_when_nothing_is_stale() -> None:
    """pi_prox == mu: both anchors, and all three corrections, are the same objective, bit for bit."""
    new, inputs = six_tokens(1.0)
    results = []
    for anchor, correction in [
        ("sampler", "none"),
        ("proximal", "truncate"),
        ("proximal", "mask"),
        ("proximal", "none"),
    ]:
        cfg = PPOConfig(anchor=anchor, correction=correction)
        loss, _ = policy_loss(new, torch.zeros_like(new), inputs, cfg, 0.0)
        results.append((loss.item(), torch.autograd.grad(loss, new)[0].tolist()))
    assert all(r == results[0] for r in results)


def test_loglinear_ends_and_middle() -> None:
    mu = torch.tensor([[-1.0, -1.0, -1.0]], dtype=torch.float64)
    new = torch.tensor([[-3.0, -3.0, -3.0]], dtype=torch.float64, requires_grad=True)
    stale = torch.tensor([[0, 4, 12]])
    assert loglinear_proximal(new, mu, stale, 4)[0].tolist() == [-1.0, -2.0, -2.5]  # alpha 0, 1/2, 3/4
    assert not loglinear_proximal(new, mu, stale, 4).requires_grad
    at_start = loglinear_proximal(new, mu, stale, 0)
    assert torch.equal(at_start, new)
    assert not at_start.requires_grad


def test_loglinear_is_recompute_at_its_ends() -> None:
    """Fresh tokens after a step: pi_prox = mu, vanilla PPO. Before any step: u = 1, w = pi/mu, and only u has a
    gradient."""
    cfg = PPOConfig(proximal="loglinear", correction="none")
    new, inputs = six_tokens(1.3, policy_logprobs=None)
    loss, _ = policy_loss(new, torch.zeros_like(new), inputs, cfg, 0.0)
    vanilla, _ = policy_loss(new, torch.zeros_like(new), inputs, PPOConfig(anchor="sampler"), 0.0)
    assert loss.item() == vanilla.item()

    first = dataclasses.replace(inputs, optimizer_steps_taken=0)
    cfg = PPOConfig(proximal="loglinear", correction="truncate", correction_cap=100.0)
    loss, stats = policy_loss(new, torch.zeros_like(new), first, cfg, 0.0)
    (grad,) = torch.autograd.grad(loss, new)
    assert stats.sums["policy/ratio_mean"].item() == pytest.approx(1.0)
    assert grad[0].tolist() == pytest.approx([-1.3 * u * a / 6 for u, a in zip(U, A, strict=True)])


def test_loglinear_trains_as_if_its_interpolation_were_a_recomputed_policy() -> None:
    """Same loss and same gradient as `recompute` given those numbers: neither u's anchor nor w pulls on pi."""
    cfg = PPOConfig(proximal="loglinear")
    new, entropy, inputs = make_batch(cfg)
    prox = loglinear_proximal(new, inputs.sampler_logprobs, inputs.stale_optimizer_steps, inputs.optimizer_steps_taken)
    given = dataclasses.replace(inputs, policy_logprobs=prox)
    losses = [
        policy_loss(new, entropy, i, c, 0.0)[0] for i, c in [(inputs, cfg), (given, PPOConfig(proximal="recompute"))]
    ]
    assert losses[0].item() == losses[1].item()
    assert torch.equal(*(torch.autograd.grad(loss, new)[0] for loss in losses))


def test_missing_inputs_are_refused() -> None:
    new, inputs = six_tokens(1.0, policy_logprobs=None)
    with pytest.raises(ValueError, match="recompute needs policy_logprobs"):
        policy_loss(new, new, inputs, PPOConfig(), 0.0)
    with pytest.raises(ValueError, match="loss needs ref_logprobs"):
        policy_loss(new, new, inputs, PPOConfig(proximal="sampler", kl=KLConfig(where="loss")), 0.0)


@pytest.mark.parametrize("clip", [0.2, None])
@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_value_loss_against_the_loop_and_cut_by_rows(aggregation: str, clip: float | None) -> None:
    g = torch.Generator().manual_seed(1)
    old, delta, returns = torch.randn(3, len(SPANS), SEQ, generator=g, dtype=torch.float64)
    mask = make_batch(PPOConfig())[2].mask
    new = torch.where(mask, old + 0.5 * delta, float("nan")).requires_grad_()
    inputs = ValueLossInputs(mask, token_weights(mask, aggregation, torch.float64), old, returns)
    loss, stats = value_loss(new, inputs, clip)
    expected = oracles.value_loss(new.tolist(), old.tolist(), returns.tolist(), mask.tolist(), clip, aggregation)
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    (grad,) = torch.autograd.grad(loss, new)
    assert grad.isfinite().all()

    parts = [
        value_loss(new[i], ValueLossInputs(mask[i], inputs.weights[i], old[i], returns[i]), clip)
        for i in (slice(0, 1), slice(1, 6))
    ]
    total = parts[0][0] + parts[1][0]
    torch.testing.assert_close(total, loss)
    torch.testing.assert_close(torch.autograd.grad(total, new)[0], grad)
    torch.testing.assert_close(merge_stats([s for _, s in parts]).sums, stats.sums)


def test_value_clip_is_around_the_old_values() -> None:
    """c = 0.2, G = 0. Token 0: V = .5, V_old = 1, clipped to .8 > .5: no gradient (V ran ahead of the clip). Token 1:
    V = 1.5, V_old = 1, clipped to 1.2 < 1.5: the plain square. Token 2 is within the clip."""
    new = torch.tensor([[0.5, 1.5, 1.1]], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(1, 3, dtype=torch.bool)
    weights = token_weights(mask, "token", torch.float64)
    inputs = ValueLossInputs(mask, weights, torch.ones_like(weights), torch.zeros_like(weights))
    loss, stats = value_loss(new, inputs, 0.2)
    assert loss.item() == pytest.approx((0.64 + 2.25 + 1.21) / 6)
    assert torch.autograd.grad(loss, new)[0][0].tolist() == pytest.approx([0.0, 1.5 / 3, 1.1 / 3])
    assert stats.sums["critic/clipfrac"].item() == pytest.approx(1 / 3)


def test_summary_takes_means_of_sums_and_maxima_of_maxima() -> None:
    def part(s: float, m: float) -> LossStats:
        return LossStats({"s": torch.tensor(s)}, {"m": torch.tensor(m)})

    assert summarise_stats([part(1.0, 5.0), part(3.0, 2.0)]) == {"s": 2.0, "m": 5.0}


TABLE_REWARD = torch.tensor([1.0, 0.0, -1.0, 0.5], dtype=torch.float64)


def train_table(cfg: PPOConfig, kl_coef: float, reward: Tensor) -> tuple[float, float, float, float]:
    """(KL before, after, expected reward before, after) of a one-token softmax policy over four tokens, trained with
    the real loss. A batch holds every token, weighted by its probability: exact expectations, no sampling noise."""
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, 1.0, -0.5], dtype=torch.float64), 0)
    theta = torch.tensor([1.0, -1.0, 0.5, 0.0], dtype=torch.float64, requires_grad=True)
    mask = torch.ones(4, 1, dtype=torch.bool)

    def measure() -> tuple[float, float]:
        log_p = torch.log_softmax(theta.detach(), 0)
        return (log_p.exp() * (log_p - ref)).sum().item(), (log_p.exp() * reward).sum().item()

    before = measure()
    for _ in range(50):
        log_p = torch.log_softmax(theta, 0)
        old = log_p.detach()
        r = reward - (kl_coef * (old - ref) if cfg.kl.where == "reward" else 0.0)
        inputs = PolicyLossInputs(
            mask=mask, weights=old.exp()[:, None], advantages=(r - (old.exp() * r).sum())[:, None],
            sampler_logprobs=old[:, None], policy_logprobs=old[:, None], ref_logprobs=ref[:, None],
            stale_optimizer_steps=torch.zeros(4, 1, dtype=torch.int64), optimizer_steps_taken=0,
        )  # fmt: skip
        loss, _ = policy_loss(log_p[:, None], torch.zeros_like(log_p)[:, None], inputs, cfg, kl_coef)
        (grad,) = torch.autograd.grad(loss, theta)
        with torch.no_grad():
            theta -= 0.2 * grad
    after = measure()
    return before[0], after[0], before[1], after[1]


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("stage", ["first-step", "later-step", "sampler-anchor"])
def test_the_kls_gradient_is_that_of_fresh_tokens_whoever_drew_them(estimator: Any, stage: str) -> None:
    """A batch that mu drew, each outcome by its probability under mu, so that expectations are exact: with rho = pi/mu
    the KL's term and its gradient are those of a batch that pi drew. Without rho they are not."""
    mu, prox, theta = (torch.log_softmax(torch.tensor(x, dtype=torch.float64), 0)
                       for x in ([0.3, 0.1, -0.6, 0.2], [0.5, -0.5, 0.2, 0.0], [0.9, -0.8, 0.3, -0.1]))  # fmt: skip
    theta = (prox if stage == "first-step" else theta).clone().requires_grad_()
    ref = torch.log_softmax(torch.tensor([0.0, 0.5, 1.0, -0.5], dtype=torch.float64), 0)
    anchor: Any = "sampler" if stage == "sampler-anchor" else "proximal"

    def term(drawn_by: Tensor, correction: Any) -> tuple[Tensor, Tensor]:
        kl = KLConfig(where="loss", estimator=estimator)
        cfg = PPOConfig(anchor=anchor, correction=correction, correction_cap=100.0, kl=kl)
        log_p = torch.log_softmax(theta, 0)
        inputs = PolicyLossInputs(
            mask=torch.ones(4, 1, dtype=torch.bool), weights=drawn_by.exp()[:, None],
            advantages=torch.zeros(4, 1, dtype=torch.float64), sampler_logprobs=drawn_by[:, None],
            policy_logprobs=prox[:, None], ref_logprobs=ref[:, None],
            stale_optimizer_steps=torch.zeros(4, 1, dtype=torch.int64), optimizer_steps_taken=0,
        )  # fmt: skip
        loss, _ = policy_loss(log_p[:, None], torch.zeros(4, 1, dtype=torch.float64), inputs, cfg, 1.0)
        (grad,) = torch.autograd.grad(loss, theta)
        return loss.detach(), grad

    fresh = term(torch.log_softmax(theta, 0).detach(), "truncate")
    torch.testing.assert_close(term(mu, "truncate"), fresh)
    uncorrected, _ = term(mu, "none")
    assert abs(float(uncorrected - fresh[0])) > 1e-3


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("where", ["reward", "loss"])
def test_kl_falls_when_only_kl_is_trained(where: str, estimator: str) -> None:
    cfg = PPOConfig(kl=KLConfig(where=where, estimator=estimator))
    kl_before, kl_after, _, _ = train_table(cfg, 1.0, torch.zeros(4, dtype=torch.float64))
    assert kl_after < 0.2 * kl_before


def test_kl_in_the_reward_and_in_the_loss_train_the_same_policy() -> None:
    """Counted once in either place, with the same strength: k1 in the reward has the gradient that k1 in the loss
    takes, so the two runs end at the same numbers. A penalty counted twice would end elsewhere."""
    ends = [train_table(PPOConfig(kl=KLConfig(where=w)), 0.5, TABLE_REWARD) for w in ("reward", "loss")]
    assert ends[0] == pytest.approx(ends[1], rel=1e-9)
