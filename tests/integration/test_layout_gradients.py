"""Losses and gradients of layouts on four ranks against transformers in float64: tensor x data, tensor x pipeline,
pipeline x data parallelism, with sequence parallelism and the distributed optimizer, tied and untied, with the kernels
for CPUs and the portable ones that CUDA runs. `test_layouts.py` compares whole updates with those of one rank.

A gradient is read off the weights, which works alike in every layout: with beta1 = 0.9 and an eps = lr far above it,
AdamW's first step from empty state is w - lr * g / (|g| + eps) = w - g.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, LlamaModel

from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.hf_weights import read_weights
from stages.models.host import MegatronHost
from stages.models.protocol import CriticBatch, PolicyBatch, Rank, Role
from stages.models.spec import read_config
from stages.models.weights import stage_tensors
from stages.ppo.config import KLConfig, PPOConfig
from storage.records import Advantages, ReferenceLogprobs, Rollout
from tests.support.collectives import run_ranks
from tests.support.models import ALL_MODELS, random_rollout

RANKS, ROWS, SEQ, SEED = 4, 8, 13, 3
TRAINED = (Role.POLICY, Role.CRITIC)
KL_COEF = 0.2


@dataclass(frozen=True)
class Case:
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    tied: bool = True
    micro_batch_rows: int = 2
    ranks: int = RANKS
    kernels: Any = "auto"


def layout(**settings: Any) -> LayoutConfig:
    return LayoutConfig(**settings)


CASES = {
    "DP4, ZeRO-1, untied": Case(layout(distributed_optimizer=True), tied=False, micro_batch_rows=1),
    "TP2 x DP2, ZeRO-1, portable": Case(layout(tensor=2, distributed_optimizer=True), kernels="portable"),
    "TP2, SP x DP2, untied": Case(layout(tensor=2, sequence_parallel=True, recompute="selective"), tied=False),
    "TP2 x PP2": Case(layout(tensor=2, pipeline=2), micro_batch_rows=3),
    "TP2, SP x PP2, ZeRO-1, untied, portable": Case(
        layout(tensor=2, pipeline=2, sequence_parallel=True, distributed_optimizer=True), tied=False, kernels="portable"
    ),
    "PP2 x DP2, ZeRO-1": Case(layout(pipeline=2, distributed_optimizer=True), micro_batch_rows=1),
    "PP2 x DP2, ZeRO-1, untied, portable": Case(
        layout(pipeline=2, distributed_optimizer=True, recompute="full"), False, micro_batch_rows=1, kernels="portable"
    ),
    "PP4, untied": Case(layout(pipeline=4), tied=False, micro_batch_rows=1),
}
ALONE = {
    "one rank, tied": Case(micro_batch_rows=5, ranks=1),
    "one rank, untied": Case(tied=False, micro_batch_rows=5, ranks=1),
}
ALL = ALONE | CASES


def untied_model(directory: Path) -> Path:
    """`random:tiny` with an output layer of its own."""
    directory.mkdir()
    config = read_config("random:tiny") | {"tie_word_embeddings": False}
    (directory / "config.json").write_text(json.dumps(config))
    weights = read_weights("random:tiny")
    weights["lm_head.weight"] = torch.randn(256, 64, generator=torch.Generator().manual_seed(1)) * 0.2
    save_file(weights, directory / "model.safetensors")
    return directory


def head() -> tuple[torch.Tensor, torch.Tensor]:
    """A critic's head that is not zero, so that gradients reach its blocks in the first step."""
    return torch.randn(1, 64, generator=torch.Generator().manual_seed(2)) * 0.1, torch.tensor([0.25])


def opened(case: Case, index: int, untied: Path, directory: Path) -> MegatronHost:
    optimizer = OptimizerConfig(
        lr=1e8, eps=1e8, decay="constant", max_grad_norm=0.0, micro_batch_rows=case.micro_batch_rows
    )
    ppo = PPOConfig(epochs=1, minibatches=1, entropy_coef=0.01, kl=KLConfig(where="loss", estimator="k3"))
    path = "random:tiny" if case.tied else str(untied)
    model = ModelConfig(path=path, kernels=case.kernels, policy=optimizer, critic=optimizer)
    rank = Rank(index, case.ranks, f"file://{directory}/rendezvous", 1)
    return MegatronHost(model, SamplingConfig(), ppo, case.layout, ALL_MODELS, rank, seed=SEED, total_steps=1)


def made_rows() -> tuple[Rollout, Advantages, np.ndarray]:
    """Return rows of different lengths, their advantages, and the reference's log-probs less the policy's."""
    rng = np.random.default_rng(0)
    rollout = random_rollout(rng, ROWS, SEQ)
    mask = rollout.response_mask

    def noise(mean: float, scale: float) -> np.ndarray:
        return np.where(mask, rng.normal(mean, scale, mask.shape), 0).astype(np.float32)

    rollout = dataclasses.replace(rollout, sampler_logprobs=noise(-5.5, 0.3))
    return rollout, Advantages(noise(0, 1), noise(0, 1), noise(0, 1), mask), noise(0, 0.1)


def batch_of(host: MegatronHost) -> tuple[PolicyBatch, CriticBatch]:
    """Return the rows with the layout's own log-probs and values, which rank 0 has and gives to the others."""
    rollout, advantages, noise = made_rows()
    answers: list[Any] = [host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)]
    torch.distributed.broadcast_object_list(answers, src=0)
    policy, reference, values = answers
    reference = ReferenceLogprobs(reference.ref_logprobs + noise)
    return PolicyBatch(rollout, advantages, policy, reference, KL_COEF), CriticBatch(rollout, advantages, values)


def trained(host: MegatronHost) -> dict[str, np.ndarray]:
    """Return both models' weights, with the stages of a pipeline joined."""
    found: dict[str, np.ndarray] = {}
    for role in TRAINED:
        tensors = stage_tensors(host._trainers[role].model, host._blueprint)
        own = {f"{role}:{name}": tensor.float().numpy().copy() for name, tensor in tensors}
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, own)
        found |= {name: array for part in parts for name, array in part.items()}
    return found


def first_gradients(case: Case, index: int, untied: Path, directory: Path) -> None:
    """Make one update of one minibatch of all rows, as one rank of a case. Rank 0 leaves losses and gradients."""
    host = opened(case, index, untied, directory)
    if host._parallel_rank.last_stage:
        weight, bias = head()
        with torch.no_grad():
            host._trainers[Role.CRITIC].model.output_layer.weight.copy_(weight)
            host._trainers[Role.CRITIC].model.output_layer.bias.copy_(bias)
    before, (policy, critic) = trained(host), batch_of(host)
    metrics = host.update_policy(0, policy) | host.update_critic(0, critic)
    after = trained(host)
    host.close()
    found: dict[str, Any] = {f"loss:{role}": metrics[f"{role}/loss"] for role in TRAINED}
    found |= {f"gradient:{name}": before[name] - after[name] for name in before}
    if index == 0:
        answers = {"logprobs": policy.policy.policy_logprobs, "values": critic.values.values}
        np.savez(directory / "first.npz", **found, **answers)


def all_gradients(index: int, untied: Path, directories: dict[str, Path]) -> None:
    """Run every case in turn as one of four ranks: starting processes is what takes time."""
    for name, case in CASES.items():
        first_gradients(case, index, untied, directories[name])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the directory with the results of each case."""
    root = tmp_path_factory.mktemp("gradients")
    untied = untied_model(root / "untied")
    found = {name: root / str(number) for number, name in enumerate(ALL)}
    for directory in found.values():
        directory.mkdir()
    for name, case in ALONE.items():
        first_gradients(case, 0, untied, found[name])
    run_ranks(all_gradients, RANKS, untied, found)
    return found


def oracle(tied: bool, found: Any, untied: Path) -> dict[str, np.ndarray]:
    """Losses and gradients by transformers in float64, on the log-probs and values that a case found."""
    path = "random:tiny" if tied else str(untied)
    config, weights = LlamaConfig(**read_config(path)), read_weights(path)
    if tied:
        weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    policy, body = LlamaForCausalLM(config).double(), LlamaModel(config).double()
    policy.load_state_dict({name: weights[name] for name in policy.state_dict()})
    body.load_state_dict({name: weights[f"model.{name}"] for name in body.state_dict()})
    rollout, advantages, reference_noise = made_rows()
    tokens, mask = torch.from_numpy(rollout.tokens).long(), torch.from_numpy(rollout.response_mask)[:, 1:]

    def of_tokens(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).double()[:, 1:]

    logp = policy(tokens).logits[:, :-1].log_softmax(-1)
    new = logp.gather(2, tokens[:, 1:, None])[..., 0]
    prox, mu, a = of_tokens(found["logprobs"]), of_tokens(rollout.sampler_logprobs), of_tokens(advantages.advantages)
    ref = prox + of_tokens(reference_noise)  # the reference is the policy as it starts
    ratio, w = (new - prox).exp(), (prox - mu).exp().clamp(max=2.0)
    entropy, k3 = -(logp.exp() * logp).sum(-1), (ref - new).exp() - 1 - (ref - new)
    rho = (new - mu).exp().clamp(max=2.0).detach()
    term = torch.max(-a * ratio, -a * ratio.clamp(0.8, 1.2)) * w - 0.01 * entropy + KL_COEF * rho * k3
    policy_loss = term[mask].mean()

    weight, bias = (torch.nn.Parameter(part.double()) for part in head())
    v = (body(tokens).last_hidden_state @ weight[0] + bias)[:, :-1]
    old, returns = of_tokens(found["values"]), of_tokens(advantages.returns)
    clipped = old + (v - old).clamp(-0.2, 0.2)
    critic_loss = torch.max((v - returns) ** 2, (clipped - returns) ** 2)[mask].mean() / 2
    (policy_loss + critic_loss).backward()
    gradients = {f"policy:{name}": p.grad for name, p in policy.named_parameters()}
    gradients |= {f"critic:model.{name}": p.grad for name, p in body.named_parameters()}
    gradients |= {"critic:value_head.weight": weight.grad, "critic:value_head.bias": bias.grad}
    losses = {"loss:policy": policy_loss.detach().numpy(), "loss:critic": critic_loss.detach().numpy()}
    return losses | {f"gradient:{name}": g.numpy() for name, g in gradients.items() if g is not None}


@pytest.mark.processes
@pytest.mark.parametrize("case", ALL)
def test_first_losses_and_gradients_equal_those_of_transformers(
    results: dict[str, Path], case: str, tmp_path: Path
) -> None:
    found = np.load(results[case] / "first.npz")
    expected = oracle(ALL[case].tied, found, untied_model(tmp_path / "untied"))
    assert {name for name in found.files if ":" in name} == set(expected)
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(array).max() > 1e-3, f"{name}: too small to tell anything"
