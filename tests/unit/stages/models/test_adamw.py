"""AdamW with gradients and moments in bfloat16, against its formula in float64, and what 8 bits lose."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from stages.models import adamw, layers
from stages.models.adamw import BlockAdamW
from stages.models.config import MOST_BETA, ModelConfig, OptimizerConfig
from stages.models.protocol import Role
from stages.ppo.config import PPOConfig
from tests.support.models import opened
from tests.unit.stages.models.test_model_update import batches, model_config

LR, BETAS, EPS, DECAY, FACTOR = 0.01, (0.9, 0.95), 1e-5, 0.1, 0.25
HALF_ULP = 2**-8
"""Most that rounding to bfloat16 changes a number, as a share of it."""


def optimizer_of(*masters: Tensor, moments: torch.dtype, decay: float = DECAY, betas: Any = BETAS) -> BlockAdamW:
    return BlockAdamW(torch.optim.AdamW(masters, lr=LR, betas=betas, eps=EPS, weight_decay=decay), moments)


def give(master: Tensor, gradient: Tensor) -> None:
    master.grad_dtype = gradient.dtype
    master.grad = gradient


@pytest.mark.parametrize("gradients", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("moments", [torch.float32, torch.bfloat16], ids=str)
def test_steps_equal_the_formula(monkeypatch: pytest.MonkeyPatch, gradients: torch.dtype, moments: torch.dtype) -> None:
    """In blocks of 7 of 30 elements. The oracle keeps its moments as they are stored."""
    monkeypatch.setattr(adamw, "_BLOCK", {"cpu": 7})
    numbers = torch.Generator().manual_seed(1)
    master = torch.randn(5, 6, generator=numbers)
    theta, m, v = master.double(), torch.zeros(5, 6).double(), torch.zeros(5, 6).double()
    optimizer = optimizer_of(master, moments=moments)
    optimizer.factor = FACTOR
    for step in range(1, 5):
        gradient = torch.randn(5, 6, generator=numbers).to(gradients)
        give(master, gradient)
        optimizer.step()
        g = FACTOR * gradient.double()
        m = BETAS[0] * m + (1 - BETAS[0]) * g
        v = BETAS[1] * v + (1 - BETAS[1]) * g**2
        theta *= 1 - LR * DECAY
        unbiased = m / (1 - BETAS[0] ** step), v / (1 - BETAS[1] ** step)
        theta -= LR * unbiased[0] / (unbiased[1].sqrt() + EPS)
        state = optimizer.state[master]
        torch.testing.assert_close(master.double(), theta, rtol=1e-6, atol=1e-6)
        for name, exact in (("exp_avg", m), ("exp_avg_sq", v)):
            assert state[name].dtype is moments
            rounding = 1.01 * HALF_ULP if moments is torch.bfloat16 else 1e-6
            torch.testing.assert_close(state[name].double(), exact, rtol=rounding, atol=1e-7)
        m, v = state["exp_avg"].double(), state["exp_avg_sq"].double()
        assert state["step"] == step


def test_a_stored_moment_decays_up_to_the_largest_beta() -> None:
    """Every number of one binade, without gradients. With a larger beta some are rounded back for ever."""
    start = (1 + torch.arange(128) / 128).bfloat16()
    for beta, decays in ((MOST_BETA, True), (0.999, False)):
        master = torch.zeros(128)
        optimizer = optimizer_of(master, moments=torch.bfloat16, betas=(beta, beta))
        optimizer.state[master] = adamw.initial_state(master, 3, torch.bfloat16)
        for name in ("exp_avg", "exp_avg_sq"):
            optimizer.state[master][name].copy_(start)
        give(master, torch.zeros(128))
        optimizer.step()
        for name in ("exp_avg", "exp_avg_sq"):
            assert bool((optimizer.state[master][name] < start).all()) is decays


def test_a_row_of_the_embedding_is_rounded_once_whatever_its_tokens() -> None:
    """1,000 gradients of 1: added one by one to 8 bits they would be 256."""
    weight = torch.zeros(3, 2, dtype=torch.bfloat16, requires_grad=True)
    weight.main_grad = torch.ones(3, 2, dtype=torch.bfloat16)  # type: ignore[attr-defined]
    rows, inside = torch.tensor([[1] * 1000 + [2]]), torch.tensor([[True] * 1000 + [False]])
    layers._Embedding.apply(weight, rows, inside).sum().backward()
    assert weight.main_grad.tolist() == [[1, 1], [1000, 1000], [1, 1]]  # type: ignore[attr-defined]


def config_of(rows: int, kernels: Any = "auto", **settings: Any) -> ModelConfig:
    base = model_config("bfloat16")
    optimizer = dataclasses.replace(base.policy, micro_batch_rows=rows, **settings)
    return dataclasses.replace(base, policy=optimizer, critic=optimizer, kernels=kernels)


def gradients_of(directory: Path, model: ModelConfig) -> tuple[dict[str, Tensor], float]:
    """Return the policy's gradients of one minibatch of 8 rows, and their norm by the trainer."""
    with opened(directory, model, PPOConfig(epochs=1, minibatches=1)) as host:
        batch, _ = batches(host)
        norm = host.update_policy(0, batch)["policy/grad_norm"]
        named = host._trainers[Role.POLICY].model.named_parameters()
        return {name: parameter.main_grad.clone() for name, parameter in named}, norm


@pytest.mark.parametrize("kernels", ["native", "torch", "portable"])
@pytest.mark.parametrize("rows", [8, 1])
def test_gradients_lose_half_a_unit_for_each_micro_batch(tmp_path: Path, kernels: Any, rows: int) -> None:
    """Every sum is rounded once more, by at most 2⁻⁸ of the sum so far; the largest of those sums is not known, so the
    bound is on the whole tensor. The tied output layer is a second part of the embedding's gradient."""
    exact, exact_norm = gradients_of(tmp_path, config_of(rows, kernels, max_grad_norm=0.0))
    found, norm = gradients_of(tmp_path, config_of(rows, kernels, max_grad_norm=0.0, gradients_dtype="bfloat16"))
    additions = 8 // rows
    for name, gradient in found.items():
        assert (gradient.dtype, exact[name].dtype) == (torch.bfloat16, torch.float32)
        parts = 2 if name.endswith("word_embeddings.weight") else 1
        lost = (gradient.float() - exact[name]).norm() / exact[name].norm()
        assert lost <= parts * additions * HALF_ULP, name
        if additions == 1 and "linear" in name:
            assert torch.equal(gradient.float(), exact[name]), "products are bfloat16 anyway"
    assert norm == pytest.approx(exact_norm, rel=additions * HALF_ULP)
    whole = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in found.values()))
    assert norm == pytest.approx(whole, rel=1e-5), "the norm is not rounded"


@pytest.mark.parametrize(
    "dtypes",
    [{"gradients_dtype": "bfloat16"}, {"moments_dtype": "bfloat16"}],
    ids=["gradients", "moments"],
)
def test_updates_are_near_those_of_float32_state(tmp_path: Path, dtypes: dict[str, Any]) -> None:
    """Three updates that clip: as a share of the way that the masters go."""
    found: list[dict[str, Tensor]] = []
    for given in ({}, dtypes):
        with opened(tmp_path, config_of(3, max_grad_norm=0.05, **given)) as host:
            trainer = host._trainers[Role.POLICY]
            (inner,) = trainer._optimizer.chained_optimizers
            start = [master.tensor.clone() for master in adamw.masters_of(inner)]
            for step in range(3):
                policy, _ = batches(host, step)
                assert host.update_policy(step, policy)["policy/grad_norm_max"] > 0.05
                host.mark_clean(Role.POLICY)
            ends = [master.tensor.clone() for master in adamw.masters_of(inner)]
            found.append({str(number): end for number, end in enumerate(ends)})
    way = sum(float((end - begin).square().sum()) for end, begin in zip(found[0].values(), start, strict=True))
    apart = sum(float((found[1][name] - end).square().sum()) for name, end in found[0].items())
    assert 0 < apart < 0.1**2 * way


def test_a_default_has_torchs_optimizer(tmp_path: Path) -> None:
    with opened(tmp_path, ModelConfig(path="random:tiny", policy=OptimizerConfig(), critic=OptimizerConfig())) as host:
        assert type(host._trainers[Role.POLICY]._adam) is torch.optim.AdamW
