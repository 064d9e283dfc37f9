"""Predicted bytes against measured ones: exactly for what is kept between steps, and for the activations of a block as
autograd saves them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig
from stages.models.flops import update_flops
from stages.models.forward import cut_micro_batches
from stages.models.hf_conversion import PARTS, from_hf
from stages.models.host import MegatronHost
from stages.models.layouts import adapter_shapes
from stages.models.lora import LINEARS
from stages.models.memory import (
    BLOCK_BYTES,
    GangModels,
    MicroBatchSize,
    RowsSize,
    activation_bytes,
    adapter_bytes,
    checkpoint_bytes,
    communicators,
    kept_bytes,
    logits_bytes,
    offloaded_bytes,
    pinned,
    publication_bytes,
    published_tensors,
    rank_bytes,
    role_parameters,
    state_bytes,
    trained_parameters,
    trunk_cache_bytes,
    trunk_parameters,
)
from stages.models.protocol import Role
from stages.models.spec import ModelSpec, read_config, read_spec, tensor_shapes
from stages.models.weights import trained_tensors
from stages.models.work import UpdateWork, measured_peak
from stages.ppo.config import PPOConfig
from tests.support.families import random_model
from tests.support.models import ALL_MODELS, bytes_kept_for_backward, opened, published, update_on_random_rows
from tests.unit.stages.models.test_model_update import batches, model_config

TINY = read_spec("random:tiny")
ROWS, WIDTH = 4, 64
BATCH = MicroBatchSize(tokens=ROWS * WIDTH, sampled=128, width=WIDTH)
STEP = RowsSize(WIDTH, of_step=8, of_run=10)


def gang(
    model: ModelConfig | None = None,
    layout: LayoutConfig | None = None,
    roles: frozenset[Role] = ALL_MODELS,
    data_ranks: int = 1,
    spec: ModelSpec = TINY,
) -> GangModels:
    return GangModels(spec, model or ModelConfig(path="random:tiny"), layout or LayoutConfig(), roles, data_ranks)


def train(host: MegatronHost) -> None:
    update_on_random_rows(host, np.random.default_rng(0), 4, 12)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_state_is_predicted_to_the_byte(tmp_path: Path, dtype: Any, frozen_blocks: int) -> None:
    model = ModelConfig(path="random:tiny", dtype=dtype, frozen_blocks=frozen_blocks, critic_blocks=2)
    with opened(tmp_path, model) as host:
        train(host)
        found = host.state_bytes()
    assert found == state_bytes(gang(model), 0)


@pytest.mark.parametrize(
    ("dtype", "gradients", "moments", "expected"),
    [
        ("float32", "float32", "float32", 16),
        ("float32", "float32", "bfloat16", 12),
        ("bfloat16", "float32", "float32", 18),
        ("bfloat16", "bfloat16", "float32", 16),
        ("bfloat16", "float32", "bfloat16", 14),
        ("bfloat16", "bfloat16", "bfloat16", 12),
    ],
)
def test_the_bytes_of_a_trained_parameter(
    tmp_path: Path, dtype: Any, gradients: Any, moments: Any, expected: int
) -> None:
    """The case compares the policy. The critic has other dtypes, and a head of 65 parameters that is always float32."""
    policy, critic = OptimizerConfig(gradients_dtype=gradients, moments_dtype=moments), OptimizerConfig()
    model = ModelConfig(path="random:tiny", dtype=dtype, policy=policy, critic=critic)
    with opened(tmp_path, model) as host:
        train(host)
        assert host.state_bytes() == state_bytes(gang(model), 0)
        taken = host._trainers[Role.POLICY].snapshot()
    alone = gang(model, roles=frozenset({Role.POLICY}))
    number = trained_parameters(alone, Role.POLICY, 0).of_dtype
    assert sum(state_bytes(alone, 0).values()) == expected * number
    with opened(tmp_path, dataclasses.replace(model, policy=critic, critic=policy)) as host:
        train(host)
        assert host.state_bytes() == state_bytes(gang(host._blueprint.model), 0)
    copied = sum(shard.data.nbytes for shards in taken.tensors.values() for shard in shards)
    assert copied == checkpoint_bytes(alone, 0, is_pinned=False)


@pytest.mark.parametrize("offload", ["gradients", "idle"])
def test_what_is_offloaded_is_not_on_the_device(offload: Any) -> None:
    """Policy and critic (two of four blocks, and no output layer: smaller) and the reference above a frozen block."""
    model = ModelConfig(path="random:tiny", dtype="bfloat16", frozen_blocks=1, critic_blocks=2)
    whole = state_bytes(gang(model), 0)
    alone = {role: state_bytes(gang(model, roles=frozenset({role})), 0) for role in ALL_MODELS}
    found = dataclasses.replace(gang(model), offload=offload)
    if offload == "gradients":
        assert state_bytes(found, 0) == whole | {"gradients": alone[Role.POLICY]["gradients"]}
        assert offloaded_bytes(found, 0) == 0
        return
    assert state_bytes(found, 0) == alone[Role.POLICY]
    on_host = offloaded_bytes(found, 0)
    assert on_host == sum(whole.values()) - whole["gradients"] - 2 * trunk_parameters(found)


RECOMPUTED = {
    "none": LayoutConfig(),
    "selective": LayoutConfig(recompute="selective"),
    "mlp": LayoutConfig(recompute="selective", recompute_modules=["mlp"]),
    "full": LayoutConfig(recompute="full"),
}


@pytest.mark.parametrize(
    ("recomputed", "dtype", "frozen_blocks", "kernels"),
    [
        ("none", "float32", 0, "auto"),
        ("none", "bfloat16", 1, "portable"),
        ("selective", "float32", 1, "auto"),
        ("selective", "bfloat16", 0, "portable"),
        ("mlp", "float32", 0, "portable"),
        ("mlp", "bfloat16", 1, "auto"),
        ("full", "float32", 1, "portable"),
        ("full", "bfloat16", 0, "auto"),
    ],
)
def test_activations_are_predicted(
    tmp_path: Path, recomputed: str, dtype: Any, frozen_blocks: int, kernels: Any
) -> None:
    """Every two values of two settings meet."""
    layout = RECOMPUTED[recomputed]
    model = ModelConfig(path="random:tiny", dtype=dtype, frozen_blocks=frozen_blocks, critic_blocks=2, kernels=kernels)
    predicted = dataclasses.replace(gang(model, layout), portable=kernels == "portable")
    tokens, mask = np.full((ROWS, WIDTH), 5, np.int32), np.ones((ROWS, WIDTH), bool)
    mask[:, 0] = False
    with opened(tmp_path, model, layout=layout) as host:
        for role in (Role.POLICY, Role.CRITIC):
            device = host._parallel_rank.device
            (batch,) = cut_micro_batches(tokens, mask, np.arange(ROWS), device, max_tokens=BATCH.tokens)
            found = bytes_kept_for_backward(host, role, batch)
            assert found == pytest.approx(kept_bytes(predicted, role, BATCH, 0), rel=0.05)


def test_the_parts_of_all_ranks_are_the_whole_model() -> None:
    """Untied, since a tied output layer has a copy on the last pipeline stage; norms are whole on each tensor rank."""
    spec = dataclasses.replace(TINY, tied_embeddings=False)
    whole = role_parameters(gang(spec=spec), Role.POLICY, 0).of_dtype
    norms = (2 * spec.num_layers + 1) * spec.hidden_size
    for tensor, pipeline in ((2, 1), (1, 2), (2, 2), (2, 4)):
        parts = gang(layout=LayoutConfig(tensor=tensor, pipeline=pipeline), spec=spec)
        found = tensor * sum(role_parameters(parts, Role.POLICY, stage).of_dtype for stage in range(pipeline))
        assert found == whole + (tensor - 1) * norms


UNEVEN = {
    "9 heads in 3 groups on 2": (9, 3, 2),
    "9 heads in 3 groups on 4": (9, 3, 4),
    "14 heads in 2 groups on 4": (14, 2, 4),
    "4 heads in 2 groups on 4": (4, 2, 4),
    "4 heads in 2 groups on 3": (4, 2, 3),
}


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("targets", [[], ["qkv", "fc2"], ["qkv", "proj", "fc1", "fc2"]], ids=len)
def test_what_is_padded_is_counted_to_the_number(name: str, targets: list[str]) -> None:
    """Heads, neurons and vocabulary that do not divide, against what a rank is given of a model."""
    heads, groups, tensor = UNEVEN[name]
    spec = dataclasses.replace(
        TINY, num_heads=heads, num_kv_heads=groups, intermediate_size=175, vocab_size=257, tied_embeddings=False,
        num_layers=1, qkv_bias=True,
    )  # fmt: skip
    lora = LoraConfig(rank=3 if targets else 0, targets=targets or ["qkv"])
    shapes = tensor_shapes(spec) | adapter_shapes(spec, lora, 0)
    whole = {tensor_name: torch.zeros(shape) for tensor_name, shape in shapes.items()}

    def held(names: Iterable[str], block: int | None) -> int:
        return sum(from_hf(name, block, whole, spec, tensor - 1, tensor).numel() for name in names)

    of_block = held([*PARTS, "self_attention.linear_qkv.bias", "input_layernorm.weight", "pre_mlp_layernorm.weight"], 0)
    beside = held(["embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight"], None)
    found = gang(ModelConfig(path="", lora=lora), LayoutConfig(tensor=tensor), spec=spec)
    assert role_parameters(found, Role.POLICY, 0).of_dtype == of_block + beside
    if targets:
        adapters = [f"{LINEARS[target]}.lora.{side}" for target in targets for side in "AB"]
        assert trained_parameters(found, Role.POLICY, 0).of_dtype == held(adapters, 0)


def test_a_tied_output_layer_is_counted_where_it_is() -> None:
    embedding = TINY.vocab_size * TINY.hidden_size
    last = gang(layout=LayoutConfig(pipeline=2))
    untied = dataclasses.replace(last, spec=dataclasses.replace(TINY, tied_embeddings=False))
    assert role_parameters(last, Role.POLICY, 1) == role_parameters(untied, Role.POLICY, 1)
    assert role_parameters(last, Role.POLICY, 0) == role_parameters(last, Role.CRITIC, 0)
    frozen = gang(ModelConfig(path="random:tiny", frozen_blocks=2))
    assert role_parameters(frozen, Role.POLICY, 0).of_dtype == role_parameters(frozen, Role.CRITIC, 0).of_dtype
    assert trunk_parameters(frozen) == 2 * 46_208 + embedding  # 64 (64 + 2 x 32 + 64) + 3 x 64 x 176 + 2 x 64


def test_the_distributed_optimizer_divides_masters_and_moments() -> None:
    model = ModelConfig(path="random:tiny", dtype="bfloat16")
    alone = state_bytes(gang(model, data_ranks=4), 0)
    split = state_bytes(gang(model, LayoutConfig(distributed_optimizer=True), data_ranks=4), 0)
    assert (split["parameters"], split["gradients"]) == (alone["parameters"], alone["gradients"])
    assert 4 * split["float32 masters"] == pytest.approx(alone["float32 masters"], abs=16)
    assert 4 * split["moments"] == pytest.approx(alone["moments"], abs=32)


def test_a_pipeline_keeps_micro_batches_in_flight() -> None:
    """1F1B: two on the first of two stages, one on the last; beside which the last has the final norm's."""
    two = gang(layout=LayoutConfig(pipeline=2))
    first, last = (kept_bytes(two, Role.POLICY, BATCH, stage) for stage in (0, 1))
    assert activation_bytes(two, Role.POLICY, BATCH, 0) == round(2 * first)
    assert activation_bytes(two, Role.POLICY, BATCH, 1) == round(last)
    assert last - first == BATCH.tokens * (4 * TINY.hidden_size + 4 - 9)


def test_logits_of_a_tiny_model_are_kept_whole() -> None:
    """256 tokens of vocabulary, 128 positions: a block of the vocabulary is all of it."""
    whole, hidden = 4 * 128 * 256, 4 * 128 * 64
    assert logits_bytes(gang(), BATCH, "cpu") == 4 * whole + 2 * hidden


def test_the_trunks_cache_fills_up_to_its_bound() -> None:
    frozen = gang(ModelConfig(path="random:tiny", frozen_blocks=2), data_ranks=2)
    assert trunk_cache_bytes(frozen, 10, 64) == 5 * 64 * 4 * 64
    assert trunk_cache_bytes(frozen, 10**9, 64) == 1 << 30
    assert trunk_cache_bytes(gang(), 10, 64) == 0


def test_of_two_trained_roles_the_larger_works() -> None:
    batches = {Role.POLICY: BATCH, Role.CRITIC: BATCH}
    both = rank_bytes(gang(), batches, 0, rows=STEP, device="cpu")
    alone = rank_bytes(gang(roles=frozenset({Role.POLICY})), batches, 0, rows=STEP, device="cpu")
    assert (both["activations"], both["logits"]) == (alone["activations"], alone["logits"])
    assert both["parameters"] > 2 * alone["parameters"]
    reference = rank_bytes(gang(roles=frozenset({Role.REFERENCE})), {}, 0, rows=STEP, device="cpu")
    assert [name for name, number in reference.items() if number] == ["parameters"]


def test_forwards_kept_for_the_update_are_of_all_rows() -> None:
    """Both trained models keep theirs at once: the policy is updated while the critic's forward still waits for its
    update."""
    both = gang(ModelConfig(path="random:tiny", reuse_forward=["policy", "critic"]), data_ranks=2)
    batches = {Role.POLICY: BATCH, Role.CRITIC: BATCH}
    found = rank_bytes(both, batches, 0, rows=RowsSize(WIDTH, of_step=24, of_run=24), device="cpu")
    of_a_rank = MicroBatchSize(12 * WIDTH, 0, WIDTH)
    assert found["activations"] == sum(kept_bytes(both, role, of_a_rank, 0) for role in batches)


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4)], ids=["all", "lora"])
def test_a_critic_with_a_model_of_its_own_is_counted_by_it(tmp_path: Path, lora: LoraConfig) -> None:
    """Against what is held: a critic of other sizes, which shares no weights with the others."""
    directory = tmp_path / "critic"
    random_model("Llama 2").save_pretrained(directory)
    model = ModelConfig(path="random:tiny", critic_path=str(directory), lora=lora)
    with opened(tmp_path, model) as host:
        train(host)
        found = host.state_bytes()
    own = {Role.CRITIC: read_spec(str(directory))}
    predicted = state_bytes(dataclasses.replace(gang(model), own=own), 0)
    assert found == {name: predicted[name] for name in found}


def counted_by_torch(rows: int, tokens: int) -> int:
    """Return torch's count of the products in a forward and a backward pass; attention counts as matrices, masked
    parts included."""
    config = LlamaConfig(**read_config("random:tiny"))
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    ids = torch.zeros(rows, tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids).logits.sum().backward()
    return counter.get_total_flops()


def test_flops_are_those_that_torch_counts() -> None:
    """Less the half of the attention that a token does not see, which torch counts."""
    rows, n = 3, 40
    lengths = np.full(rows, n)
    found = update_flops(TINY, TINY.num_layers, lengths, outputs=256, num_outputs=rows * n, output_trained=True)
    unseen = 6 * TINY.num_layers * TINY.q_size * rows * n**2
    assert found + unseen == pytest.approx(counted_by_torch(rows, n), rel=1e-4)


def test_flops_by_hand() -> None:
    """One block of two: 64 x (64 + 32 + 32) and 64 x 64 of attention, 3 x 64 x 176 of the MLP; rows of 2 and 4."""
    matrices = 64 * 128 + 64 * 64 + 3 * 64 * 176
    expected = 6 * matrices * 6 + 6 * 64 * (4 + 16) + 4 * 64 * 256 * 5
    found = update_flops(TINY, 1, np.array([2, 4]), outputs=256, num_outputs=5, output_trained=False)
    assert found == expected


def test_with_adapters_frozen_weights_have_no_gradient() -> None:
    """Against torch's count, the adapters' small products aside: of a frozen weight the forward and the input's."""
    matrices, adapters = 64 * 128 + 64 * 64 + 3 * 64 * 176, 4 * (64 + 64)
    expected = (4 * matrices + 6 * adapters) * 6 + 6 * 64 * (4 + 16) + 4 * 64 * 256 * 5
    kwargs: dict[str, Any] = {"outputs": 256, "num_outputs": 5, "output_trained": False}
    assert update_flops(TINY, 1, np.array([2, 4]), **kwargs, adapters=adapters) == expected


def test_a_host_counts_adapters(tmp_path: Path) -> None:
    config = ModelConfig(path="random:tiny", lora=LoraConfig(rank=4, targets=["proj"]), peak_tflops=1.0)
    with opened(tmp_path, config) as host:
        policy, _ = batches(host)
        host.update_policy(0, policy)
        metrics = host.last_update(Role.POLICY)
    rollout = policy.rollout
    lengths = rollout.prompt_lengths + rollout.response_lengths
    kwargs: dict[str, Any] = {"outputs": 256, "num_outputs": int(rollout.response_lengths.sum())}
    flops = update_flops(TINY, 4, lengths, **kwargs, output_trained=False, adapters=4 * (64 + 64))
    assert metrics["tflops_per_s"] / metrics["tokens_per_s"] == pytest.approx(flops / lengths.sum() / 1e12)


def test_rates_by_hand() -> None:
    found = UpdateWork(tokens=600, flops=3e12, seconds=2.0, peak_flops=6e12).metrics()
    assert found == {"tokens_per_s": 300.0, "tflops_per_s": 1.5, "peak_tflops": 6.0, "mfu": 0.25}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_measured_peak_leaves_the_random_numbers_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    assert 1e8 < measured_peak(dtype, torch.device("cpu")) < math.inf
    assert torch.equal(torch.get_rng_state(), before)


def test_a_host_reports_what_it_trained_on(tmp_path: Path) -> None:
    """Two epochs of all rows; the policy's frozen output layer after sampled tokens, the critic's head after all."""
    config = model_config(frozen_blocks=2)
    config.peak_tflops = 0.5
    with opened(tmp_path, config, PPOConfig(epochs=2, minibatches=2)) as host:
        assert host.last_update(Role.POLICY) == {}
        policy, critic = batches(host)
        host.update_policy(0, policy)
        host.update_critic(0, critic)
        found = {role: host.last_update(role) for role in (Role.POLICY, Role.CRITIC)}
    rollout = policy.rollout
    lengths = np.tile(rollout.prompt_lengths + rollout.response_lengths, 2)
    sampled, outputs = 2 * int(rollout.response_lengths.sum()), TINY.vocab_size
    flops = {
        Role.POLICY: update_flops(TINY, 2, lengths, outputs=outputs, num_outputs=sampled, output_trained=False),
        Role.CRITIC: update_flops(TINY, 2, lengths, outputs=1, num_outputs=int(lengths.sum()), output_trained=True),
    }
    for role, metrics in found.items():
        seconds = lengths.sum() / metrics["tokens_per_s"]
        assert metrics["tflops_per_s"] * 1e12 == pytest.approx(flops[role] / seconds)
        assert metrics["mfu"] == pytest.approx(metrics["tflops_per_s"] / 0.5)
        assert metrics["peak_tflops"] == 0.5


def test_steps_without_training_have_no_rate(tmp_path: Path) -> None:
    with opened(tmp_path, ModelConfig(path="random:tiny"), PPOConfig(critic_warmup_steps=1)) as host:
        policy, _ = batches(host)
        host.update_policy(0, policy)
        assert host.last_update(Role.POLICY) == {}


# ---- publication, checkpoints, and what CUDA takes ------------------------------------------------------


@pytest.mark.parametrize(
    ("optimizer", "rank", "frozen_blocks"),
    [("adamw", 0, 0), ("adamw", 4, 0), ("adafactor", 0, 0), ("adafactor", 4, 2), ("muon", 0, 0), ("muon", 0, 2)],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_copies_of_a_checkpoint_are_counted_to_the_byte(
    tmp_path: Path, optimizer: Any, rank: int, frozen_blocks: int, dtype: Any
) -> None:
    """And the state of which they are copies."""
    lora = LoraConfig(rank=rank, targets=["qkv", "fc1"]) if rank else LoraConfig()
    settings = OptimizerConfig(optimizer)
    model = ModelConfig(
        path="random:tiny", lora=lora, dtype=dtype, frozen_blocks=frozen_blocks, policy=settings, critic=settings
    )
    with opened(tmp_path, model) as host:
        train(host)
        assert host.state_bytes() == state_bytes(gang(model), 0)
        copied = 0
        for role in (Role.POLICY, Role.CRITIC):
            host.mark_clean(role)
            (tmp_path / role).mkdir()
            host.save(role, tmp_path / role)()
            taken = host._trainers[role]._snapshot
            assert taken is not None
            copied += sum(shard.data.nbytes for shards in taken.tensors.values() for shard in shards)
    assert copied == checkpoint_bytes(gang(model), 0, is_pinned=False)
    assert copied < checkpoint_bytes(gang(model), 0, is_pinned=True) < 2 * copied


@pytest.mark.parametrize("lora", [LoraConfig(), LoraConfig(rank=4, targets=["qkv", "fc1"])], ids=["all", "lora"])
@pytest.mark.parametrize("frozen_blocks", [0, 2])
def test_published_tensors_are_those_that_are_published(tmp_path: Path, lora: LoraConfig, frozen_blocks: int) -> None:
    model = ModelConfig(path="random:tiny", lora=lora, frozen_blocks=frozen_blocks)
    with opened(tmp_path, model) as host:
        found = published(host)
        adapters = trained_tensors(host._trainers[Role.POLICY].model, host._blueprint, merged=False)
    assert found is not None
    assert adapters is not None
    assert {name: array.size for name, array in found.items()} == published_tensors(TINY, model)
    if lora.rank:
        assert sum(tensor.nbytes for tensor in adapters.values()) == adapter_bytes(gang(model))


def test_the_stages_of_a_pipeline_publish_all_tensors_once() -> None:
    model = ModelConfig(path="random:tiny")
    whole = published_tensors(TINY, model)
    stages = [published_tensors(TINY, model, 2, stage) for stage in range(2)]
    assert stages[0].keys().isdisjoint(stages[1].keys())
    assert stages[0] | stages[1] == whole


def test_a_publication_needs_two_blocks_of_a_part_or_a_merged_tensor() -> None:
    model, shape = ModelConfig(path="random:tiny", dtype="bfloat16"), LayoutConfig(tensor=2, pipeline=2)
    largest = 256 * 64
    assert publication_bytes(gang(model, shape), 0, on_gpu=True) == (2 * largest, 2 * largest)
    assert publication_bytes(gang(model, shape), 1, on_gpu=False) == (0, 2 * 2 * 176 * 64)
    adapted = replace(model, lora=LoraConfig(rank=4, targets=["qkv"]))
    queries = 64 * 64
    merged = 3 * 2 * queries + 2 * 4 * queries
    assert publication_bytes(gang(adapted, shape), 0, on_gpu=True) == (merged + 2 * queries, 2 * queries)
    large = gang(replace(model, path="random:70b-shape"), LayoutConfig(tensor=8, pipeline=4))
    large = replace(large, spec=read_spec("random:70b-shape"))
    assert publication_bytes(large, 0, on_gpu=True) == (BLOCK_BYTES, BLOCK_BYTES)


def test_pinned_memory_is_a_power_of_two() -> None:
    assert [pinned(number) for number in (0, 1, 4096, 4097, 1 << 30)] == [0, 1, 4096, 8192, 1 << 30]


def test_communicators_are_those_of_the_groups_that_are_used() -> None:
    """All ranks; tensor, pipeline and data parallelism; one copy of the model."""
    assert communicators(LayoutConfig(), 1) == 0
    assert communicators(LayoutConfig(), 8) == 2
    assert communicators(LayoutConfig(tensor=2, pipeline=2), 8) == 5
    assert communicators(LayoutConfig(tensor=8), 8) == 3
