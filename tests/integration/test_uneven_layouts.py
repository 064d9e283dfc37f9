"""Models that do not divide over tensor-parallel ranks, and families with biases and norms of their own: two and four
ranks say and learn the same as one. Real processes over gloo, float32."""

from __future__ import annotations

import dataclasses
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.multiprocessing

from pipeline.workers.worker_process import PRELOADED
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.hf_conversion import from_hf, named_by_block
from stages.models.host import MegatronHost
from stages.models.protocol import Rank, Role
from stages.models.spec import padded, read_spec
from stages.models.weights import stage_tensors
from stages.ppo.config import PPOConfig
from storage.records import Advantages, Rollout
from tests.support.families import random_model
from tests.support.models import ALL_MODELS, random_advantages, random_rollout, update_both

ROWS, SEQ, SEED, UPDATES = 8, 13, 3, 5
TRAINED = (Role.POLICY, Role.CRITIC)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "9 and 3 heads": (
        "Llama 3.1",
        {
            "hidden_size": 36,
            "head_dim": 8,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "intermediate_size": 51,
            "tie_word_embeddings": True,
        },
    ),
    "4 and 2 heads": ("Llama 3.1", {"num_attention_heads": 4}),
    "14 and 2 heads, biases": ("Qwen 2.5", {"hidden_size": 56, "num_attention_heads": 14}),
    "4 and 2 heads, biases": ("Qwen 2.5", {"num_attention_heads": 4}),
    "4 and 2 heads, norms": ("Qwen 3", {"num_attention_heads": 4}),
    "3 and 3 heads, norms": ("Qwen 3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
}
"""Family and sizes; all have 259 tokens, which neither two nor four ranks can share evenly."""


@dataclass(frozen=True)
class Case:
    model: str
    layout: LayoutConfig
    frozen_blocks: int = 0
    kernels: Literal["auto", "portable"] = "auto"


CASES: dict[int, dict[str, Case]] = {
    2: {
        "padded groups, TP2": Case("9 and 3 heads", LayoutConfig(tensor=2, recompute="selective")),
        "padded groups, TP2, SP": Case(
            "9 and 3 heads", LayoutConfig(tensor=2, sequence_parallel=True), kernels="portable"
        ),
        "padded groups, TP2, frozen": Case("9 and 3 heads", LayoutConfig(tensor=2), frozen_blocks=1),
        "biases, TP2": Case("14 and 2 heads, biases", LayoutConfig(tensor=2), kernels="portable"),
        "norms, TP2, SP": Case("4 and 2 heads, norms", LayoutConfig(tensor=2, sequence_parallel=True)),
        "padded groups with norms, TP2": Case("3 and 3 heads, norms", LayoutConfig(tensor=2, recompute="full")),
        "norms, DP2": Case("4 and 2 heads, norms", LayoutConfig(distributed_optimizer=True)),
    },
    4: {
        "padded groups, TP4": Case("9 and 3 heads", LayoutConfig(tensor=4)),
        "padded groups, TP2, DP2": Case("9 and 3 heads", LayoutConfig(tensor=2, distributed_optimizer=True)),
        "shared keys, TP4": Case("4 and 2 heads", LayoutConfig(tensor=4), kernels="portable"),
        "shared keys with biases, TP4, SP": Case(
            "4 and 2 heads, biases", LayoutConfig(tensor=4, sequence_parallel=True)
        ),
        "shared keys with norms, TP4": Case("4 and 2 heads, norms", LayoutConfig(tensor=4), kernels="portable"),
        "padded groups with biases, TP4": Case("14 and 2 heads, biases", LayoutConfig(tensor=4)),
    },
}
"""By the number of ranks."""


def inputs() -> tuple[Rollout, Advantages]:
    rng = np.random.default_rng(0)
    rollout = random_rollout(rng, ROWS, SEQ)
    return rollout, random_advantages(rng, rollout.response_mask)


def learn(index: int, size: int, case: Case, root: Path, directory: Path) -> None:
    """One rank: all outputs, five updates of both models. Rank 0 leaves what it got in result.npz."""
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, micro_batch_rows=4)
    host = MegatronHost(
        ModelConfig(
            path=str(root / case.model),
            kernels=case.kernels,
            frozen_blocks=case.frozen_blocks,
            policy=optimizer,
            critic=optimizer,
        ),
        SamplingConfig(suppress_token_ids=[7, 258], temperature=0.9),
        PPOConfig(entropy_coef=0.01, epochs=1),
        case.layout,
        ALL_MODELS,
        Rank(index, size, f"file://{directory}/rendezvous", 1),
        seed=SEED,
        total_steps=UPDATES + 1,
    )
    rollout, advantages = inputs()
    found: dict[str, Any] = {"start": host.digest(Role.POLICY)}
    # every rank is given the whole answers, those of the run on one rank
    known = root / f"{case.model}, {case.frozen_blocks}.npz"
    policy, reference, values = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    if index == 0:
        assert policy is not None
        assert values is not None
        found |= {"logprobs": policy.policy_logprobs, "entropy": policy.entropy, "values": values.values}
    if size == 1:
        torch.save((policy, reference, values), known)
    answers = torch.load(known, weights_only=False)
    for step in range(UPDATES):
        metrics = update_both(host, step, rollout, advantages, answers)
        found |= {f"metric:{step}:{name}": value for name, value in metrics.items()}
    for role in TRAINED:
        assert_nothing_else_is_held(host, role)
    trained, after = host.trained_weights(), host.values(rollout)
    if index == 0:
        assert trained is not None
        assert after is not None
        found |= {f"weight:{name}": array for name, array in trained.items()} | {"trained_values": after.values}
        np.savez(directory / "result.npz", **found)
    host.close()


def assert_nothing_else_is_held(host: MegatronHost, role: Role) -> None:
    """What a rank holds is its part of the whole tensors, and otherwise zeros."""
    model, blueprint = host._trainers[role].model, host._blueprint
    spec, rank = blueprint.spec, blueprint.parallel_rank
    whole = dict(stage_tensors(model, blueprint))
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if not name.startswith("output_layer.") or parameter.shape[0] > 1:
            part = from_hf(name, block, whole, spec, rank.tensor_rank, rank.tensor_size)
            assert torch.equal(parameter, part), name


def learn_all(index: int, size: int, root: Path) -> None:
    """One of so many ranks: every case in turn, since starting processes is what takes time."""
    for number, case in enumerate(CASES[size].values()):
        learn(index, size, case, root, root / f"{size}-{number}")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By case: result.npz of one rank, and of all of them."""
    root = tmp_path_factory.mktemp("layouts")
    found = {}
    for model, (family, sizes) in MODELS.items():
        random_model(family, **sizes).save_pretrained(root / model)
    for size, cases in CASES.items():
        for number, (name, case) in enumerate(cases.items()):
            alone, directory = root / f"alone, {case.model}, {case.frozen_blocks}", root / f"{size}-{number}"
            directory.mkdir()
            if not alone.exists():
                alone.mkdir()
                learn(0, 1, dataclasses.replace(case, layout=LayoutConfig(), kernels="auto"), root, alone)
            found[name] = (alone / "result.npz", directory / "result.npz")
        multiprocessing.set_forkserver_preload([*PRELOADED])
        torch.multiprocessing.start_processes(learn_all, (size, root), nprocs=size, start_method="forkserver")
    return found


@pytest.mark.processes
@pytest.mark.parametrize("case", [name for cases in CASES.values() for name in cases])
def test_ranks_learn_the_same_as_one(results: dict[str, tuple[Path, Path]], case: str) -> None:
    expected, found = map(np.load, results[case])
    assert set(found.files) == set(expected.files)
    assert found["start"] == expected["start"]
    for name in set(found.files) - {"start"}:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("model", "tensor", "heads", "kv_heads"),
    [
        ("9 and 3 heads", 1, 9, 3),
        ("9 and 3 heads", 2, 12, 4),
        ("9 and 3 heads", 3, 9, 3),
        ("9 and 3 heads", 4, 12, 4),
        ("9 and 3 heads", 9, 27, 9),
        ("4 and 2 heads", 4, 4, 2),
        ("14 and 2 heads, biases", 2, 14, 2),
        ("14 and 2 heads, biases", 4, 28, 4),
    ],
)
def test_heads_are_padded_where_they_must_be(
    tmp_path: Path, model: str, tensor: int, heads: int, kv_heads: int
) -> None:
    """Whole groups of queries; none where Megatron's ranks can share a group's key and value: nine cannot, since they
    would hold unequal parts of the 9 + 2 * 3 heads of the fused projection."""
    family, sizes = MODELS[model]
    random_model(family, **sizes).config.save_pretrained(tmp_path)
    spec = read_spec(str(tmp_path))
    wide = padded(spec, tensor)
    assert (wide.num_heads, wide.num_kv_heads) == (heads, kv_heads)
    for size in (wide.vocab_size - spec.vocab_size, wide.intermediate_size - spec.intermediate_size):
        assert 0 <= size < tensor
    assert wide.vocab_size % tensor == wide.intermediate_size % tensor == 0
