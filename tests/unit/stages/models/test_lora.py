"""Adapters against transformers models whose weights are W + (alpha / rank) B A: log-probs, gradients, updates, what is
published, exported and saved."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.dist_checkpointing import load_plain_tensors
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils import parametrize
from transformers import AutoModelForCausalLM

from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig
from stages.models.hf_weights import read_weights
from stages.models.host import MegatronHost
from stages.models.layouts import adapter_shapes
from stages.models.memory import GangModels, MicroBatchSize, kept_bytes, state_bytes
from stages.models.minibatches import rank_micro_batches
from stages.models.protocol import Role, StateError
from stages.models.spec import read_spec
from stages.models.weights import stage_tensors
from storage.weights import WeightBoard
from tests.support.families import random_model
from tests.support.models import (
    ALL_MODELS,
    bytes_kept_for_backward,
    logprob_gradients,
    opened,
    published,
    random_rollout,
    transformers_logprobs,
    update_on_random_rows,
)

ROWS, SEQ = 8, 12
TRAINED = (Role.POLICY, Role.CRITIC)
LORA = LoraConfig(rank=4, alpha=8.0)


def model_config(path: str = "random:tiny", lora: LoraConfig = LORA, **changes: Any) -> ModelConfig:
    optimizer = OptimizerConfig(lr=1e-2, decay="constant", weight_decay=0.1, micro_batch_rows=3)
    return ModelConfig(path=path, lora=lora, policy=optimizer, critic=optimizer, **changes)


def update(host: MegatronHost, step: int = 0) -> dict[str, float]:
    return update_on_random_rows(host, np.random.default_rng([7, step]), ROWS, SEQ, step)


def logprobs(host: MegatronHost) -> np.ndarray:
    found = host.policy_logprobs(random_rollout(np.random.default_rng(1), ROWS, SEQ))
    return found.policy_logprobs


def theirs(model: Any) -> Tensor:
    """Log-probs of the sampled tokens of the rollout of `logprobs`, 0 elsewhere."""
    rollout = random_rollout(np.random.default_rng(1), ROWS, SEQ)
    logp = transformers_logprobs(model, rollout)
    mask = torch.from_numpy(rollout.response_mask)
    return torch.zeros(mask.shape).index_put(torch.nonzero(mask, as_tuple=True), logp[mask[:, 1:]])


def adapters(host: MegatronHost, role: Role = Role.POLICY) -> dict[str, Tensor]:
    return {n: t.clone() for n, t in stage_tensors(host._trainers[role].model, host._blueprint)}


class Merged(torch.nn.Module):
    """W + scale B A."""

    def __init__(self, a: Tensor, b: Tensor, scale: float) -> None:
        super().__init__()
        self.a, self.b, self.scale = torch.nn.Parameter(a), torch.nn.Parameter(b), scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.b @ self.a


def adapted(model: Any, given: dict[str, Tensor], lora: LoraConfig = LORA) -> dict[str, Tensor]:
    """Puts adapters into a transformers model; gives their parameters by name."""
    found = {}
    model.requires_grad_(False)
    for name in {n.partition(".lora_")[0] for n in given}:
        a, b = (given[f"{name}.lora_{side}.weight"].clone() for side in "AB")
        own = Merged(a, b, lora.alpha / lora.rank)
        parametrize.register_parametrization(model.get_submodule(name), "weight", own)
        found |= {f"{name}.lora_A.weight": own.a, f"{name}.lora_B.weight": own.b}
    return found


def stir(host: MegatronHost, role: Role = Role.POLICY) -> None:
    """Random numbers in all adapters."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in host._trainers[role].model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)


@pytest.mark.parametrize("family", ["Llama 3.1", "Mistral", "Qwen 2.5", "Qwen 3"])
@pytest.mark.parametrize("targets", [["qkv", "proj", "fc1", "fc2"], ["qkv"], ["proj", "fc1"], ["fc2"]])
def test_logprobs_and_gradients_equal_those_of_a_merged_model(tmp_path: Path, family: str, targets: list[str]) -> None:
    lora = LoraConfig(rank=3, alpha=7.0, targets=targets)
    model = random_model(family)
    model.save_pretrained(tmp_path)
    with opened(tmp_path, model_config(str(tmp_path), lora)) as host:
        stir(host)
        expected = adapted(model, adapters(host), lora)
        logp = theirs(model)
        np.testing.assert_allclose(logprobs(host), logp.detach(), atol=2e-5)
        logp.sum().backward()
        found = logprob_gradients(host, random_rollout(np.random.default_rng(1), ROWS, SEQ))
    assert set(found) == set(expected)
    for name, gradient in found.items():
        wanted = expected[name].grad
        np.testing.assert_allclose(gradient, wanted, atol=1e-5 * float(wanted.abs().max()) + 1e-5, err_msg=name)


def test_policy_and_reference_are_one_model_until_an_update_and_the_reference_stays(tmp_path: Path) -> None:
    with opened(tmp_path, model_config()) as host:
        rollout = random_rollout(np.random.default_rng(1), ROWS, SEQ)
        reference = host.ref_logprobs(rollout)
        assert (logprobs(host) == reference.ref_logprobs).all()
        models = [host._reference, *(trainer.model for trainer in host._trainers.values())]
        frozen = {p.data_ptr(): p for m in models for p in m.parameters() if not p.requires_grad}  # type: ignore[union-attr]
        assert sum(p.numel() for p in frozen.values()) == sum(t.numel() for t in read_weights("random:tiny").values())
        before, start = [p.clone() for p in frozen.values()], adapters(host)
        update(host)
        after = host.ref_logprobs(rollout)
        assert (after.ref_logprobs == reference.ref_logprobs).all()
        assert all(torch.equal(a, b) for a, b in zip(before, frozen.values(), strict=True))
        assert np.abs(logprobs(host) - reference.ref_logprobs).max() > 1e-3
        assert all((tensor != start[name]).any() for name, tensor in adapters(host).items())


def test_version_0_is_a_function_of_the_seed(tmp_path: Path) -> None:
    with opened(tmp_path, model_config()) as host:
        first = adapters(host)
        shapes = {n: s for layer in range(4) for n, s in adapter_shapes(host._blueprint.spec, LORA, layer).items()}
        assert {name: tuple(tensor.shape) for name, tensor in first.items()} == shapes
        critic = adapters(host, Role.CRITIC)
    for name, tensor in first.items():
        assert torch.equal(tensor, critic[name])
        if ".lora_B." in name:
            assert not tensor.any()
    a = torch.cat([t.flatten() * (3 * t.shape[1]) ** 0.5 for n, t in first.items() if ".lora_A." in n])
    assert (float(a.mean()), float(a.std())) == pytest.approx((0, 1), abs=0.03)


@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_published_and_exported_weights_are_the_policy(tmp_path: Path, frozen_blocks: int) -> None:
    with opened(tmp_path, model_config(frozen_blocks=frozen_blocks)) as host:
        update(host)
        merged, expected = published(host), logprobs(host)
        host.export(WeightBoard(tmp_path / "board"), tmp_path / "out")()
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(theirs(exported).detach(), expected, atol=2e-5)
    state, start = exported.state_dict(), read_weights("random:tiny")
    changed = {name for name, tensor in start.items() if not torch.equal(tensor, state[name])}
    assert changed == set(merged)
    assert {int(name.split(".")[2]) for name in changed} == {*range(frozen_blocks, 4)}
    assert all((array == state[name].numpy()).all() for name, array in merged.items())

    given = json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())
    assert (given["r"], given["lora_alpha"], given["peft_type"]) == (4, 8.0, "LORA")
    modules = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert given["target_modules"] == modules
    assert given["layers_to_transform"] == ([2, 3] if frozen_blocks else None)
    apart = load_file(tmp_path / "out/adapter/adapter_model.safetensors")
    names = {name.removeprefix("base_model.model.").partition(".lora_")[0] for name in apart}
    assert {f"{name}.weight" for name in names} == changed
    for name in names:
        a, b = (apart[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        own = start[f"{name}.weight"] + 8 / 4 * b @ a
        np.testing.assert_allclose(own, state[f"{name}.weight"], atol=1e-6, err_msg=name)


def test_under_bfloat16_merged_weights_are_rounded_once(tmp_path: Path) -> None:
    with opened(tmp_path, model_config(dtype="bfloat16")) as host:
        update(host)
        merged, own = published(host), adapters(host)
    name = "model.layers.1.self_attn.k_proj"
    a, b = (own[f"{name}.lora_{side}.weight"] for side in "AB")
    assert a.dtype is torch.bfloat16
    weight = read_weights("random:tiny")[f"{name}.weight"].bfloat16().double() + 2 * b.double() @ a.double()
    found = torch.from_numpy(merged[f"{name}.weight"]).view(torch.bfloat16)
    assert (found == weight.bfloat16()).float().mean() > 0.999  # float32 sums may fall on the other side of a tie


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_saved_adapters_are_restored_and_replay_the_same_bits(tmp_path: Path, dtype: str, frozen_blocks: int) -> None:
    for role in TRAINED:
        (tmp_path / role.value).mkdir()
    config = model_config(dtype=dtype, frozen_blocks=frozen_blocks, critic_blocks=2)
    with opened(tmp_path, config) as host:
        start = [host.digest(role) for role in TRAINED]
        update(host, 0)
        for role in TRAINED:
            host.save(role, tmp_path / role.value)()
        update(host, 1)
        after = [host.digest(role) for role in TRAINED]
        for role in TRAINED:
            host.load(role, None)
        assert [host.digest(role) for role in TRAINED] == start
        update(host, 0)
        update(host, 1)
        assert [host.digest(role) for role in TRAINED] == after
    with opened(tmp_path, config) as host:  # in another process, as good as
        kinds = {"weights", "exp_avg", "exp_avg_sq"} | ({"masters"} if dtype == "bfloat16" else set())
        for role in TRAINED:
            saved = {key for key in load_plain_tensors(str(tmp_path / role.value)) if key.partition(".")[0] in kinds}
            assert {key.partition(".")[0] for key in saved} == kinds
            own = {key for key in saved if ".lora." in key or ".output_layer." in key}
            assert saved == own, "adapters, and the critic's head, alone"
        for role in TRAINED:
            host.load(role, tmp_path / role.value)
        update(host, 1)
        assert [host.digest(role) for role in TRAINED] == after


def test_adapters_that_do_not_match_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "policy").mkdir()
    with opened(tmp_path, model_config()) as host:
        host.save(Role.POLICY, tmp_path / "policy")()
    for change, message in (
        ({"rank": 8}, "model.lora.rank 4 there and 8 here"),
        ({"alpha": 4.0}, "model.lora.alpha 8.0 there and 4.0 here"),
        ({"targets": ["qkv"]}, r"model.lora.targets \['fc1', 'fc2', 'proj', 'qkv'\] there and \['qkv'\] here"),
        ({"rank": 0}, "model.lora.rank 4 there and None here"),
    ):
        with opened(tmp_path, model_config(lora=dataclasses.replace(LORA, **change))) as host:  # type: ignore[arg-type]
            before = host.digest(Role.POLICY)
            with pytest.raises(StateError, match=f"another architecture: .*{message}"):
                host.load(Role.POLICY, tmp_path / "policy")
            assert (host.digest(Role.POLICY), host.dirty(Role.POLICY)) == (before, False)


@pytest.mark.parametrize("targets", [["qkv", "proj", "fc1", "fc2"], ["fc1", "fc2"], ["qkv"]])
def test_recomputing_changes_no_bit(tmp_path: Path, targets: list[str]) -> None:
    found = []
    for layout in (
        LayoutConfig(),
        LayoutConfig(recompute="full"),
        LayoutConfig(recompute="selective", recompute_modules=["core_attn", "mlp"]),
    ):
        with opened(tmp_path, model_config(lora=LoraConfig(rank=2, targets=targets)), layout=layout) as host:
            update(host)
            found.append([host.digest(role) for role in TRAINED])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("frozen_blocks", [0, 2])
@pytest.mark.parametrize("targets", [["qkv", "proj", "fc1", "fc2"], ["proj"]])
def test_memory_is_predicted(tmp_path: Path, dtype: str, frozen_blocks: int, targets: list[str]) -> None:
    """State to the byte; activations, as autograd saves them, no more than predicted (of the lowest block, whose input
    needs no gradient, less is kept)."""
    model = model_config(
        lora=LoraConfig(rank=4, targets=targets), dtype=dtype, frozen_blocks=frozen_blocks, critic_blocks=2
    )
    gang = GangModels(read_spec("random:tiny"), model, LayoutConfig(), ALL_MODELS, 1)
    with opened(tmp_path, model) as host:
        update(host)
        assert host.state_bytes() == state_bytes(gang, 0)
        trainer, rollout = host._trainers[Role.POLICY], random_rollout(np.random.default_rng(1), ROWS, SEQ)
        whole = dataclasses.replace(trainer.config, micro_batch_rows=None)
        rollout = dataclasses.replace(rollout, response_mask=np.arange(SEQ) >= np.ones((ROWS, 1)))
        (batch,) = rank_micro_batches(rollout, np.arange(ROWS), whole, host._blueprint)
        kept = bytes_kept_for_backward(host, Role.POLICY, batch)
    spec, inner = host._blueprint.spec, 4
    fixed = 0  # B's parts side by side, of a fused linear
    if "qkv" in targets:
        widened = 3 * (spec.q_size + 2 * spec.kv_size) + 2 * 2 * spec.intermediate_size
        fixed = (4 - frozen_blocks) * widened * inner * (4 if dtype == "float32" else 2)
        fixed += (4 - frozen_blocks) * widened * inner  # and which of them are another's
    predicted = kept_bytes(gang, Role.POLICY, MicroBatchSize(len(batch.tokens), 0, len(batch.tokens)), 0)
    assert 0.75 * predicted < kept - fixed < 1.05 * predicted
