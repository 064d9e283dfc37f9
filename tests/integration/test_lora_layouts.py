"""With adapters two ranks compute, learn, publish and save the same as one, in every layout. Real processes over gloo.

one rank:  five updates, a save after the second ──► two ranks: the same five updates
                                                 ──► two ranks: load it: the same digests; save it again
                                                                 ──► one rank: load that: the same digests
"""

from __future__ import annotations

import multiprocessing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.multiprocessing

from pipeline.workers.worker_process import PRELOADED
from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.hf_conversion import from_hf, named_by_block
from stages.models.host import MegatronHost
from stages.models.memory import GangModels, state_bytes
from stages.models.protocol import Rank, Role
from stages.models.weights import stage_tensors
from stages.ppo.config import PPOConfig
from storage.records import Advantages, Rollout
from tests.support.families import random_model
from tests.support.models import ALL_MODELS, random_advantages, random_rollout, update_both

pytestmark = pytest.mark.processes

ROWS, SEQ, SEED, UPDATES, SAVED = 8, 13, 3, 5, 2
TRAINED = (Role.POLICY, Role.CRITIC)

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen 2.5", {"num_hidden_layers": 4}),
    "padded": ("Llama 3.1", {"hidden_size": 36, "head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3,
                             "intermediate_size": 51}),
    "shared keys": ("Llama 3.1", {"num_attention_heads": 4, "num_key_value_heads": 1}),
}  # fmt: skip
"""Family and sizes; 259 tokens, which two ranks cannot share evenly."""


@dataclass(frozen=True)
class Case:
    model: str
    layout: LayoutConfig
    frozen_blocks: int = 0
    critic_blocks: int | None = None
    targets: list[str] = field(default_factory=lambda: ["qkv", "proj", "fc1", "fc2"])
    kernels: Literal["auto", "portable"] = "auto"


CASES = {
    "DP2": Case("tied", LayoutConfig()),
    "DP2, distributed optimizer": Case(
        "tied", LayoutConfig(distributed_optimizer=True), frozen_blocks=1, kernels="portable"
    ),
    "TP2": Case("tied", LayoutConfig(tensor=2), kernels="portable"),
    "TP2, SP": Case("tied", LayoutConfig(tensor=2, sequence_parallel=True)),
    "TP2, SP, recomputed": Case(
        "tied", LayoutConfig(tensor=2, sequence_parallel=True, recompute="full"), kernels="portable"
    ),
    "TP2, padded": Case("padded", LayoutConfig(tensor=2)),
    "TP2, shared keys": Case("shared keys", LayoutConfig(tensor=2, recompute="selective", recompute_modules=["mlp"])),
    "PP2": Case("tied", LayoutConfig(pipeline=2, distributed_optimizer=True), critic_blocks=2, targets=["proj", "fc1"]),
}


def make_host(case: Case, root: Path, directory: Path, index: int = 0, size: int = 1) -> MegatronHost:
    optimizer = OptimizerConfig(lr=2e-3, weight_decay=0.1, micro_batch_rows=4)
    model = ModelConfig(
        path=str(root / case.model),
        kernels=case.kernels,
        frozen_blocks=case.frozen_blocks,
        critic_blocks=case.critic_blocks,
        lora=LoraConfig(rank=3, alpha=6.0, targets=case.targets),
        policy=optimizer,
        critic=optimizer,
    )
    return MegatronHost(
        model,
        SamplingConfig(suppress_token_ids=[7, 258], temperature=0.9),
        PPOConfig(entropy_coef=0.01, epochs=1),
        case.layout if size > 1 else LayoutConfig(),
        ALL_MODELS,
        Rank(index, size, f"file://{directory}/rendezvous{size}", 1),
        seed=SEED,
        total_steps=UPDATES + 1,
    )


def inputs() -> tuple[Rollout, Advantages]:
    rng = np.random.default_rng(0)
    rollout = random_rollout(rng, ROWS, SEQ)
    return rollout, random_advantages(rng, rollout.response_mask)


def save(host: MegatronHost, directory: Path, index: int) -> None:
    for role in TRAINED:
        if index == 0:
            (directory / role.value).mkdir(parents=True)
        torch.distributed.barrier()
        host.save(role, directory / role.value)()


def learn(case: Case, root: Path, directory: Path, index: int = 0, size: int = 1) -> None:
    """One rank of so many: all outputs and five updates of both models; rank 0 leaves what it got. Two ranks then load
    what the one saved and save it again."""
    host = make_host(case, root, directory, index, size)
    rollout, advantages = inputs()
    found: dict[str, Any] = {"start": host.digest(Role.POLICY), "start of the critic": host.digest(Role.CRITIC)}
    policy, reference, values = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    if index == 0:
        assert policy is not None
        assert reference is not None
        assert (policy.policy_logprobs == reference.ref_logprobs).all()
        found |= {"logprobs": policy.policy_logprobs, "entropy": policy.entropy}
    if size == 1:  # every rank is given the whole answers, those of the run on one rank
        torch.save((policy, reference, values), directory / "known.pt")
    answers = torch.load(directory / "known.pt", weights_only=False)
    for step in range(UPDATES):
        metrics = update_both(host, step, rollout, advantages, answers)
        found |= {f"metric:{step}:{name}": value for name, value in metrics.items()}
        if size == 1 and step + 1 == SAVED:
            save(host, directory / "A", index)
            (directory / "digests").write_text("\n".join(host.digest(role) for role in TRAINED))
    trained, after, still = host.trained_weights(), host.values(rollout), host.ref_logprobs(rollout)
    for role in TRAINED:
        assert_nothing_else_is_held(host, role)
    assert_memory_is_predicted(host)
    if index == 0:
        assert trained is not None
        assert after is not None
        assert still is not None
        found |= {f"weight:{name}": array for name, array in trained.items()}
        found |= {"trained values": after.values, "reference": still.ref_logprobs}
        np.savez(directory / f"{size}.npz", **found)
    if size > 1:
        assert_digests(host, directory / "A", directory)
        save(host, directory / "B", index)
    host.close()


def assert_digests(host: MegatronHost, checkpoint: Path, directory: Path) -> None:
    for role in TRAINED:
        host.load(role, checkpoint / role.value)
    assert [host.digest(role) for role in TRAINED] == (directory / "digests").read_text().split("\n")
    assert [host.version(role) for role in TRAINED] == [SAVED, SAVED]


def assert_nothing_else_is_held(host: MegatronHost, role: Role) -> None:
    """Check that a rank holds its part of the whole adapters, and otherwise zeros."""
    model, blueprint = host._trainers[role].model, host._blueprint
    rank, whole = blueprint.parallel_rank, dict(stage_tensors(model, blueprint))
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if ".lora." in name:
            part = from_hf(name, block, whole, blueprint.spec, rank.tensor_rank, rank.tensor_size)
            assert torch.equal(parameter, part), name


def assert_memory_is_predicted(host: MegatronHost) -> None:
    """Check the bytes of parameters, exactly if nothing is padded (a tied embedding's rows included)."""
    blueprint = host._blueprint
    rank, spec = blueprint.parallel_rank, blueprint.spec
    if rank.tensor_size == 1:
        gang = GangModels(spec, blueprint.model, blueprint.layout, ALL_MODELS, rank.data_size)
        predicted, found = state_bytes(gang, rank.pipeline_rank), host.state_bytes()
        assert found["parameters"] == predicted["parameters"]
        if not blueprint.layout.distributed_optimizer:
            assert found == predicted


def learn_all(index: int, root: Path) -> None:
    """One of two ranks: every case in turn, since starting processes is what takes time."""
    for number, case in enumerate(CASES.values()):
        learn(case, root, root / str(number), index, 2)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a directory per case, by its number."""
    root = tmp_path_factory.mktemp("lora")
    for model, (family, sizes) in MODELS.items():
        random_model(family, **sizes).save_pretrained(root / model)
    for number, case in enumerate(CASES.values()):
        (root / str(number)).mkdir()
        learn(case, root, root / str(number))
    multiprocessing.set_forkserver_preload([*PRELOADED])
    torch.multiprocessing.start_processes(learn_all, (root,), nprocs=2, start_method="forkserver")
    return root


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_the_same_as_one(root: Path, name: str) -> None:
    directory = root / str(list(CASES).index(name))
    expected, found = (np.load(directory / f"{size}.npz") for size in (1, 2))
    assert set(found.files) == set(expected.files)
    for key in found.files:
        if key.startswith("start"):
            assert found[key] == expected[key]
        else:
            np.testing.assert_allclose(found[key], expected[key], atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", CASES)
def test_what_two_ranks_wrote_one_has_bit_for_bit(root: Path, name: str) -> None:
    directory = root / str(list(CASES).index(name))
    host = make_host(CASES[name], root, directory)
    try:
        assert_digests(host, directory / "B", directory)
    finally:
        host.close()
