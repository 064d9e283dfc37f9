"""What an update does to the models, against a PPO update written by hand with torch and transformers."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from stages.models.config import ModelConfig, OptimizerConfig
from stages.models.errors import StateError
from stages.models.hf_files import read_config, read_weights
from stages.models.host import MegatronHost
from stages.models.protocol import CriticBatch, PolicyBatch, Role
from stages.models.trainer import learning_rate
from stages.ppo.config import KLConfig, PPOConfig
from stages.ppo.micro_batches import minibatches
from storage.records import Advantages, ReferenceLogprobs
from tests.support.models import SEED, opened, random_rollout

ROWS, SEQ = 8, 12
LR, EPS, WEIGHT_DECAY = 1e-3, 1e-5, 0.1


def model_config(dtype: Any = "float32", frozen_blocks: int = 0, micro_batch_rows: int = 3) -> ModelConfig:
    optimizer = OptimizerConfig(
        lr=LR, decay="constant", eps=EPS, weight_decay=WEIGHT_DECAY, micro_batch_rows=micro_batch_rows
    )
    return ModelConfig(
        path="random:tiny",
        dtype=dtype,
        frozen_blocks=frozen_blocks,
        critic_blocks=2,
        policy=optimizer,
        critic=optimizer,
    )


def batches(host: MegatronHost, step: int = 0) -> tuple[PolicyBatch, CriticBatch]:
    """A step's data, as the stages would have made it, with random advantages and returns."""
    rng = np.random.default_rng([SEED, step])
    rollout = random_rollout(rng, ROWS, SEQ, version=step)
    mask = rollout.response_mask

    def noise(scale: float) -> np.ndarray:
        return np.where(mask, rng.normal(0, scale, mask.shape), 0).astype(np.float32)

    policy, reference, values = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    assert policy is not None
    assert reference is not None
    assert values is not None
    rollout = dataclasses.replace(rollout, sampler_logprobs=policy.policy_logprobs + noise(0.3))
    reference = ReferenceLogprobs(reference.ref_logprobs + noise(0.1))
    advantages = Advantages(noise(1), noise(1), noise(1), mask)
    return PolicyBatch(rollout, advantages, policy, reference, 0.2), CriticBatch(rollout, advantages, values)


def update(host: MegatronHost, step: int = 0) -> dict[str, float]:
    policy, value = batches(host, step)
    metrics = host.update_policy(step, policy) | host.update_critic(step, value)
    host.mark_clean(Role.POLICY)
    host.mark_clean(Role.CRITIC)
    return metrics


def weights(host: MegatronHost) -> dict[str, np.ndarray]:
    found = host.trained_weights()
    assert found is not None
    return {name: array.copy() for name, array in found.items()}


def adamw(model: torch.nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim == 1]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=EPS, weight_decay=WEIGHT_DECAY)


def tiny_state(names: Any) -> dict[str, torch.Tensor]:
    tensors = read_weights("random:tiny")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return {name: tensors[name] for name in names}


@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_update_policy_equals_one_written_by_hand(tmp_path: Path, frozen_blocks: int) -> None:
    ppo = PPOConfig(epochs=2, minibatches=2, entropy_coef=0.01, kl=KLConfig(where="loss", estimator="k3"))
    with opened(tmp_path, model_config(frozen_blocks=frozen_blocks), ppo) as host:
        batch, _ = batches(host)
        metrics = host.update_policy(0, batch)
        host.mark_clean(Role.POLICY)
        found = weights(host)

    model = LlamaForCausalLM(LlamaConfig(**read_config("random:tiny")))
    model.load_state_dict(tiny_state(model.state_dict()))
    if frozen_blocks:
        model.model.embed_tokens.requires_grad_(False)
        model.model.layers[:frozen_blocks].requires_grad_(False)
    optimizer = adamw(model)
    tokens = torch.from_numpy(batch.rollout.tokens).long()
    mask = torch.from_numpy(batch.advantages.loss_mask)[:, 1:]
    mu = torch.from_numpy(batch.rollout.sampler_logprobs)[:, 1:]
    assert batch.policy is not None
    prox = torch.from_numpy(batch.policy.policy_logprobs)[:, 1:]
    ref = torch.from_numpy(batch.reference.ref_logprobs)[:, 1:]
    advantages = torch.from_numpy(batch.advantages.advantages)[:, 1:]
    losses, norms = [], []
    for rows in (rows for epoch in minibatches(ROWS, 2, 2, SEED, 0) for rows in epoch):
        logp = model(tokens[rows]).logits[:, :-1].log_softmax(-1)
        new = logp.gather(2, tokens[rows, 1:, None])[..., 0]
        ratio = (new - prox[rows]).exp()
        w = (prox[rows] - mu[rows]).exp().clamp(max=2.0)
        a = advantages[rows]
        entropy = -(logp.exp() * logp).sum(-1)
        k3 = (ref[rows] - new).exp() - 1 - (ref[rows] - new)
        term = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * w - 0.01 * entropy + 0.2 * k3
        loss = term[mask[rows]].mean()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        losses.append(loss.item())

    expected = dict(model.named_parameters())
    trained = {name for name, p in expected.items() if p.requires_grad}
    assert set(found) == trained
    for name in trained:
        np.testing.assert_allclose(found[name], expected[name].detach().numpy(), atol=1e-5, err_msg=name)
    assert metrics["policy/loss"] == pytest.approx(np.mean(losses), abs=1e-5)
    assert metrics["policy/grad_norm"] == pytest.approx(np.mean(norms), rel=1e-4)
    assert metrics["policy/ratio_deviation_first"] < 1e-5
    assert metrics["policy/skipped_steps"] == 0


def test_update_critic_equals_one_written_by_hand(tmp_path: Path) -> None:
    with opened(tmp_path, model_config(frozen_blocks=1)) as host:
        _, batch = batches(host)
        metrics = host.update_critic(0, batch)
        host.mark_clean(Role.CRITIC)
        found = {name: tensor.numpy().copy() for name, tensor in host._whole_tensors(host._trainers[Role.CRITIC].model)}

    body = LlamaModel(LlamaConfig(**read_config("random:tiny") | {"num_hidden_layers": 3}))
    body.load_state_dict({n: tiny_state([f"model.{n}"])[f"model.{n}"] for n in body.state_dict()})
    body.embed_tokens.requires_grad_(False)
    body.layers[:1].requires_grad_(False)
    head = torch.nn.Linear(64, 1)
    torch.nn.init.zeros_(head.weight)
    torch.nn.init.zeros_(head.bias)
    both = torch.nn.ModuleDict({"model": body, "value_head": head})
    optimizer = adamw(both)
    tokens = torch.from_numpy(batch.rollout.tokens).long()
    mask = torch.from_numpy(batch.advantages.loss_mask)[:, 1:]
    returns = torch.from_numpy(batch.advantages.returns)[:, 1:]
    losses = []
    for rows in (rows for epoch in minibatches(ROWS, 2, 2, SEED, 0) for rows in epoch):
        v = head(body(tokens[rows]).last_hidden_state)[:, :-1, 0]
        clipped = v.clamp(-0.2, 0.2)  # around the old values, which are 0
        loss = torch.max((v - returns[rows]) ** 2, (clipped - returns[rows]) ** 2)[mask[rows]].mean() / 2
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(both.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    expected = {name: p.detach().numpy() for name, p in both.named_parameters() if p.requires_grad}
    assert set(found) == set(expected)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, err_msg=name)
    assert metrics["critic/loss"] == pytest.approx(np.mean(losses), abs=1e-5)


def test_gradients_do_not_depend_on_micro_batch_rows(tmp_path: Path) -> None:
    found = []
    for size in (1, 3, 8):
        with opened(tmp_path, model_config(frozen_blocks=2, micro_batch_rows=size)) as host:
            update(host)
            found.append(weights(host))
    for other in found[1:]:
        for name, array in other.items():
            np.testing.assert_allclose(array, found[0][name], atol=1e-5, err_msg=name)


def test_frozen_blocks_and_reference_stay_and_the_rest_moves(tmp_path: Path) -> None:
    with opened(tmp_path, model_config(frozen_blocks=2)) as host:
        assert host._trunk is not None
        assert host._reference is not None
        fixed = [*host._trunk.model.parameters(), *host._reference.parameters()]
        before, digest = [p.clone() for p in fixed], host.digest(Role.POLICY)
        update(host)
        assert all(torch.equal(a, b) for a, b in zip(before, fixed, strict=True))
        start = read_weights("random:tiny")
        trained = weights(host)
        assert {int(n.split(".")[2]) for n in trained if ".layers." in n} == {2, 3}
        assert all((array != start[name].numpy()).any() for name, array in trained.items())
        assert host.digest(Role.POLICY) != digest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_is_restored_and_replays_the_same_bits(tmp_path: Path, dtype: str) -> None:
    for name in ("policy", "critic"):
        (tmp_path / name).mkdir()
    roles = (Role.POLICY, Role.CRITIC)
    with opened(tmp_path, model_config(dtype)) as host:
        start = [host.digest(role) for role in roles]
        update(host, 0)
        for role in roles:
            host.save(role, tmp_path / role.value)
        saved = [host.digest(role) for role in roles]
        update(host, 1)
        after = [host.digest(role) for role in roles]
        assert len({*start, *saved, *after}) == 6

        for role in roles:  # in the same process
            host.load(role, tmp_path / role.value)
            assert host.version(role) == 1
        assert [host.digest(role) for role in roles] == saved
        update(host, 1)
        assert [host.digest(role) for role in roles] == after

        for role in roles:  # from nothing
            host.load(role, None)
            assert host.version(role) == 0
        assert [host.digest(role) for role in roles] == start
        update(host, 0)
        update(host, 1)
        assert [host.digest(role) for role in roles] == after

    with opened(tmp_path, model_config(dtype)) as host:  # in another process, as good as
        for role in roles:
            host.load(role, tmp_path / role.value)
        update(host, 1)
        assert [host.digest(role) for role in roles] == after


def test_versions_and_the_dirty_flag_guard_the_state(tmp_path: Path) -> None:
    with opened(tmp_path, model_config()) as host:
        policy, value = batches(host)
        with pytest.raises(StateError, match="policy is at version 0"):
            host.update_policy(1, policy)
        assert not host.dirty(Role.POLICY)
        host.update_policy(0, policy)
        assert host.dirty(Role.POLICY)
        for call in (
            lambda: host.policy_logprobs(policy.rollout),
            lambda: host.update_policy(1, policy),
            host.trained_weights,
            lambda: host.save(Role.POLICY, tmp_path),
        ):
            with pytest.raises(StateError, match="policy is dirty"):
                call()
        host.update_critic(0, value)  # a model of its own
        host.mark_clean(Role.POLICY)
        assert (host.version(Role.POLICY), host.dirty(Role.POLICY)) == (1, False)
        assert host.policy_logprobs(policy.rollout) is not None


def test_a_step_whose_gradient_is_not_finite_is_skipped_and_counted(tmp_path: Path) -> None:
    with opened(tmp_path, model_config(), PPOConfig(epochs=1, minibatches=2)) as host:
        policy, _ = batches(host)
        poisoned = policy.advantages.advantages.copy()
        row = minibatches(ROWS, 2, 1, SEED, 0)[0][0][0]  # in the first of the two minibatches
        poisoned[row, policy.advantages.loss_mask[row].argmax()] = np.inf
        batch = dataclasses.replace(policy, advantages=dataclasses.replace(policy.advantages, advantages=poisoned))
        before = weights(host)
        metrics = host.update_policy(0, batch)
        host.mark_clean(Role.POLICY)
        after = weights(host)
    assert metrics["policy/skipped_steps"] == 1
    assert np.isfinite(metrics["policy/grad_norm"])
    assert all(np.isfinite(array).all() for array in after.values())
    assert any((after[name] != before[name]).any() for name in after)


def test_an_exported_model_loads_in_transformers_with_the_same_logprobs(tmp_path: Path) -> None:
    with opened(tmp_path, model_config(frozen_blocks=2)) as host:
        update(host)
        host.export(tmp_path / "exported")
        batch, _ = batches(host, 1)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "exported")
    tokens = torch.from_numpy(batch.rollout.tokens).long()
    with torch.no_grad():
        logp = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[..., 0].numpy()
    mask = batch.rollout.response_mask[:, 1:]
    assert batch.policy is not None
    np.testing.assert_allclose(batch.policy.policy_logprobs[:, 1:][mask], logp[mask], atol=1e-5)


def test_learning_rate_warms_up_and_decays_to_zero_one_past_the_last_step() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=2)
    assert [learning_rate(config, step, 6) for step in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    flat = dataclasses.replace(config, decay="constant")
    assert [learning_rate(flat, step, 6) for step in range(4)] == [0.5, 1.0, 1.0, 1.0]
