"""float16 with a dynamic loss scale: near float32's update, overflows that lower the scale and end no run, a scale that
is part of the state, and weights that an engine of another dtype reads."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from stages.models import trainer
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig
from stages.models.host import MegatronHost
from stages.models.protocol import NonFiniteGradientsError, PolicyBatch, Role, StateError
from stages.ppo.config import PPOConfig
from storage.records import Advantages, ReferenceLogprobs, Rollout
from storage.weights import WeightBoard
from tests.support.models import SEED, opened, published, random_rollout

ROWS, SEQ = 6, 12
TOO_LARGE = 2.0**28
"""A loss scale under which float16 gradients of the tiny model are infinite."""


@pytest.fixture(autouse=True)
def two_skipped_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "MAX_SKIPPED_STEPS", 2)


def model_config(dtype: str = "float16") -> ModelConfig:
    optimizer = OptimizerConfig(lr=1e-3, decay="constant", weight_decay=0.1, micro_batch_rows=3)
    return ModelConfig(
        path="random:tiny",
        dtype=dtype,  # type: ignore[arg-type]
        policy=optimizer,
        critic=optimizer,
    )


def batch(step: int = 0, scale: float = 1.0) -> PolicyBatch:
    rng = np.random.default_rng([SEED, step])
    rollout = random_rollout(rng, ROWS, SEQ, version=step)
    mask = rollout.response_mask
    noise = np.where(mask, rng.normal(0, scale, mask.shape), 0).astype(np.float32)
    sampled = np.where(mask, -5.5, 0).astype(np.float32)
    rollout = dataclasses.replace(rollout, sampler_logprobs=sampled)
    return PolicyBatch(rollout, Advantages(noise, noise, noise, mask), None, ReferenceLogprobs(sampled), 0.0)


def ppo(epochs: int = 1) -> PPOConfig:
    return PPOConfig(epochs=epochs, minibatches=1, proximal="sampler")


def update(host: MegatronHost, step: int) -> dict[str, float]:
    metrics = host.update_policy(step, batch(step))
    host.mark_clean(Role.POLICY)
    return metrics


@pytest.mark.parametrize("layout", [LayoutConfig(), LayoutConfig(distributed_optimizer=True)], ids=["whole", "sharded"])
def test_an_update_is_near_that_of_float32(tmp_path: Path, layout: LayoutConfig) -> None:
    """Gradients are clipped, so that a forgotten division by the scale would hide in the weights, and not in the
    norm."""
    found = []
    for dtype in ("float32", "float16"):
        with opened(tmp_path, model_config(dtype), ppo(), layout=layout) as host:
            metrics = update(host, 0)
            weights = published(host)
            found.append((metrics, {name: array.astype(np.float32) for name, array in weights.items()}))
    (of_float32, expected), (metrics, weights) = found
    assert metrics["policy/grad_norm"] == pytest.approx(of_float32["policy/grad_norm"], rel=5e-3)
    assert metrics["policy/loss"] == pytest.approx(of_float32["policy/loss"], abs=2e-3)
    assert (metrics["policy/loss_scale"], metrics["policy/overflow_steps"]) == (65536, 0)
    assert "policy/loss_scale" not in of_float32
    for name, array in expected.items():
        np.testing.assert_allclose(weights[name], array, atol=1.1e-3, err_msg=name)
        assert np.abs(weights[name] - array).mean() < 2e-4, name


def test_an_overflow_lowers_the_scale_and_is_no_skipped_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them in a row than MAX_SKIPPED_STEPS, none of which trains anything."""
    monkeypatch.setattr(trainer, "INITIAL_SCALE", TOO_LARGE)
    with opened(tmp_path, model_config(), ppo(epochs=4)) as host:
        before = host.digest(Role.POLICY)
        metrics = update(host, 0)
        assert host.digest(Role.POLICY) == before
        assert (metrics["policy/overflow_steps"], metrics["policy/skipped_steps"]) == (4, 0)
        assert (metrics["policy/optimizer_steps"], metrics["policy/loss_scale"]) == (0, TOO_LARGE / 2**4)
        steps = 1
        while not update(host, steps)["policy/optimizer_steps"]:
            steps += 1
        assert host.digest(Role.POLICY) != before


def test_at_its_minimum_the_scale_is_not_to_blame(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One overflow to the minimum, then two gradients that count."""
    monkeypatch.setattr(trainer, "INITIAL_SCALE", TOO_LARGE)
    monkeypatch.setattr(trainer, "MINIMUM_SCALE", TOO_LARGE / 2)
    with opened(tmp_path, model_config(), ppo()) as host:
        assert update(host, 0)["policy/overflow_steps"] == 1
        assert update(host, 1)["policy/skipped_steps"] == 1
        with pytest.raises(NonFiniteGradientsError, match="2 optimizer steps in a row"):
            host.update_policy(2, batch(2))


def test_the_scale_grows_after_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "GROWTH_INTERVAL", 2)
    monkeypatch.setattr(trainer, "INITIAL_SCALE", 256.0)
    with opened(tmp_path, model_config(), ppo()) as host:
        assert [update(host, step)["policy/loss_scale"] for step in range(4)] == [256, 512, 512, 1024]


def test_the_scale_is_part_of_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saved after an overflow and one of two steps of growth, in another process: the same bits and the same scale as
    where nothing was interrupted; and back at version 0 it is the first."""
    monkeypatch.setattr(trainer, "GROWTH_INTERVAL", 2)
    monkeypatch.setattr(trainer, "INITIAL_SCALE", 1024.0)
    model = model_config()
    (tmp_path / "saved").mkdir()
    with opened(tmp_path, model, ppo()) as host:
        first = update(host, 0)
        host.save(Role.POLICY, tmp_path / "saved")()
        expected = [update(host, step)["policy/loss_scale"] for step in (1, 2, 3)]
        digest = host.digest(Role.POLICY)
        host.load(Role.POLICY, None)
        again = update(host, 0)
    assert (first["policy/loss_scale"], expected) == (1024, [2048, 2048, 4096])
    assert again["policy/loss_scale"] == 1024
    with opened(tmp_path, model, ppo()) as host:
        host.load(Role.POLICY, tmp_path / "saved")
        assert [update(host, step)["policy/loss_scale"] for step in (1, 2, 3)] == expected
        assert host.digest(Role.POLICY) == digest
    with opened(tmp_path, model_config("bfloat16"), ppo()) as host, pytest.raises(StateError, match="'float16' there"):
        host.load(Role.POLICY, tmp_path / "saved")


def sampled(rollout: Rollout, host: MegatronHost) -> np.ndarray:
    found = host.policy_logprobs(rollout)
    return found.policy_logprobs[rollout.response_mask]


def test_logprobs_are_near_those_of_float32(tmp_path: Path) -> None:
    found = []
    for dtype in ("float32", "float16"):
        with opened(tmp_path, model_config(dtype)) as host:
            found.append(sampled(batch().rollout, host))
            values = host.values(batch().rollout)
            assert values.values.dtype == np.float32
    np.testing.assert_allclose(found[1], found[0], atol=1e-2)


def test_weights_are_published_as_float16(tmp_path: Path) -> None:
    with opened(tmp_path, model_config()) as host:
        weights = published(host)
        assert {array.dtype for array in weights.values()} == {np.dtype(np.float16)}
        host.export(WeightBoard(tmp_path / "board"), tmp_path / "exported")()
    assert torch.float16 == _stored_dtype(tmp_path / "exported")


def _stored_dtype(directory: Path) -> torch.dtype:
    (dtype,) = {t.dtype for file in directory.glob("*.safetensors") for t in load_file(file).values()}
    return dtype
