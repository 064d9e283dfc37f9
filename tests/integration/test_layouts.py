"""Every parallel layout computes, learns, publishes and saves the same as one rank: data, tensor, sequence and pipeline
parallelism, the distributed optimizer, frozen blocks, adapters, models that do not divide over the ranks, families with
biases and norms of their own. Real processes over gloo, tiny models, float32.

one rank:  five updates, a save after the second ──► several ranks: the same five updates
                                                 ──► several ranks: load it: the same digests; save it again
                                                                      ──► one rank: load that: the same digests
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.hf_conversion import from_hf, named_by_block
from stages.models.host import MegatronHost
from stages.models.memory import GangModels, state_bytes
from stages.models.protocol import PolicyBatch, Rank, Role
from stages.models.spec import padded, read_spec
from stages.models.weights import stage_tensors
from stages.ppo.config import KLConfig, PPOConfig
from stages.ppo.micro_batches import minibatch_rows
from tests.support.collectives import run_ranks
from tests.support.families import random_model
from tests.support.models import ALL_MODELS, published, random_advantages, random_rollout, update_both

pytestmark = pytest.mark.processes

ROWS, SEQ, SEED, UPDATES, SAVED = 8, 13, 3, 5, 2
TRAINED = (Role.POLICY, Role.CRITIC)
SP = {"tensor": 2, "sequence_parallel": True}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "tiny": ("Llama 3.1", {"num_attention_heads": 4, "num_hidden_layers": 4, "vocab_size": 260}),
    "9 and 3 heads": (
        "Llama 3.1",
        {"hidden_size": 36, "head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3, "intermediate_size": 51,
         "tie_word_embeddings": True},
    ),
    "4 and 2 heads": ("Llama 3.1", {"num_attention_heads": 4}),
    "4 heads and 1": ("Llama 3.1", {"num_attention_heads": 4, "num_key_value_heads": 1}),
    "14 and 2 heads, biases": ("Qwen 2.5", {"hidden_size": 56, "num_attention_heads": 14}),
    "4 and 2 heads, biases": ("Qwen 2.5", {"num_attention_heads": 4}),
    "four blocks": ("Qwen 2.5", {"num_hidden_layers": 4}),
    "4 and 2 heads, norms": ("Qwen 3", {"num_attention_heads": 4}),
    "3 and 3 heads, norms": ("Qwen 3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
}  # fmt: skip
"""Family and sizes. All but the first have 259 tokens, which neither two nor four ranks can share evenly."""


@dataclass(frozen=True)
class Case:
    model: str
    layout: dict[str, Any]
    frozen_blocks: int = 0
    critic_blocks: int | None = None
    adapters: tuple[str, ...] = ()
    kernels: Literal["auto", "portable"] = "auto"

    @property
    def alone(self) -> str:
        """The name of the directory of one rank with the same models."""
        return f"alone, {self.model}, {self.frozen_blocks}, {self.critic_blocks}, {self.adapters}"


LORA = {"adapters": ("qkv", "proj", "fc1", "fc2")}
TINY = {"model": "tiny", "critic_blocks": 2}

CASES: dict[int, dict[str, Case]] = {
    2: {
        "DP2, portable": Case(**TINY, layout={}, kernels="portable"),
        "DP2, distributed optimizer, frozen": Case(**TINY, layout={"distributed_optimizer": True}, frozen_blocks=2),
        "TP2": Case(**TINY, layout={"tensor": 2, "recompute": "selective"}),
        "TP2, frozen, portable": Case(
            **TINY, layout={"tensor": 2, "recompute": "full"}, frozen_blocks=2, kernels="portable"
        ),
        "TP2, SP, portable": Case(**TINY, layout=SP, kernels="portable"),
        "TP2, SP, frozen": Case(**TINY, layout=SP, frozen_blocks=2),
        "PP2": Case(**TINY, layout={"pipeline": 2}),
        "padded groups, TP2": Case("9 and 3 heads", {"tensor": 2, "recompute": "selective"}),
        "padded groups, TP2, SP": Case("9 and 3 heads", SP, kernels="portable"),
        "padded groups, TP2, frozen": Case("9 and 3 heads", {"tensor": 2}, frozen_blocks=1),
        "biases, TP2": Case("14 and 2 heads, biases", {"tensor": 2}, kernels="portable"),
        "norms, TP2, SP": Case("4 and 2 heads, norms", SP),
        "padded groups with norms, TP2": Case("3 and 3 heads, norms", {"tensor": 2, "recompute": "full"}),
        "norms, DP2": Case("4 and 2 heads, norms", {"distributed_optimizer": True}),
        "adapters, DP2": Case("four blocks", {}, **LORA),
        "adapters, DP2, distributed optimizer": Case(
            "four blocks", {"distributed_optimizer": True}, frozen_blocks=1, kernels="portable", **LORA
        ),
        "adapters, TP2": Case("four blocks", {"tensor": 2}, kernels="portable", **LORA),
        "adapters, TP2, SP": Case("four blocks", SP, **LORA),
        "adapters, TP2, SP, recomputed": Case("four blocks", SP | {"recompute": "full"}, kernels="portable", **LORA),
        "adapters, padded groups, TP2": Case("9 and 3 heads", {"tensor": 2}, **LORA),
        "adapters, shared keys, TP2": Case(
            "4 heads and 1", {"tensor": 2, "recompute": "selective", "recompute_modules": ["mlp"]}, **LORA
        ),
        "adapters, PP2": Case(
            "four blocks", {"pipeline": 2, "distributed_optimizer": True}, critic_blocks=2, adapters=("proj", "fc1")
        ),
    },
    4: {
        "padded groups, TP4": Case("9 and 3 heads", {"tensor": 4}),
        "padded groups, TP2, DP2": Case("9 and 3 heads", {"tensor": 2, "distributed_optimizer": True}),
        "shared keys, TP4": Case("4 and 2 heads", {"tensor": 4}, kernels="portable"),
        "shared keys with biases, TP4, SP": Case("4 and 2 heads, biases", {"tensor": 4, "sequence_parallel": True}),
        "shared keys with norms, TP4": Case("4 and 2 heads, norms", {"tensor": 4}, kernels="portable"),
        "padded groups with biases, TP4": Case("14 and 2 heads, biases", {"tensor": 4}),
    },
}
"""By the number of ranks."""
ALL = {name: case for cases in CASES.values() for name, case in cases.items()}


def make_host(case: Case, root: Path, directory: Path, index: int = 0, size: int = 1) -> MegatronHost:
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, micro_batch_rows=4)
    lora = {"lora": LoraConfig(rank=3, alpha=6.0, targets=[*case.adapters])} if case.adapters else {}
    model = ModelConfig(
        path=str(root / case.model),
        kernels=case.kernels if size > 1 else "auto",
        frozen_blocks=case.frozen_blocks,
        critic_blocks=case.critic_blocks,
        policy=optimizer,
        critic=optimizer,
        **lora,
    )
    return MegatronHost(
        model,
        SamplingConfig(suppress_token_ids=[7, 258], temperature=0.9),
        PPOConfig(entropy_coef=0.01, epochs=1),
        LayoutConfig(**case.layout) if size > 1 else LayoutConfig(),
        ALL_MODELS,
        Rank(index, size, f"file://{directory}/rendezvous{size}", 1),
        seed=SEED,
        total_steps=UPDATES + 1,
        fsync=False,
    )


def learn(case: Case, root: Path, directory: Path, index: int = 0, size: int = 1) -> None:
    """Compute all outputs, make five updates of both models, and continue from a checkpoint, as one rank of `size`.
    Rank 0 leaves its results. Every rank asserts what must be the same on all ranks."""
    host, alone = make_host(case, root, directory, index, size), root / case.alone
    rng = np.random.default_rng(0)
    rollout = random_rollout(rng, ROWS, SEQ)
    advantages = random_advantages(rng, rollout.response_mask)
    found: dict[str, Any] = {f"start:{role}": host.digest(role) for role in TRAINED}
    own = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    assert [answer is not None for answer in own] == [index == 0] * 3
    if size == 1:  # every rank is given the whole answers, those of the run on one rank
        torch.save(own, directory / "known.pt")
    answers = torch.load(alone / "known.pt", weights_only=False)
    for step in range(UPDATES):
        metrics = update_both(host, step, rollout, advantages, answers)
        found |= {f"metric:{step}:{name}": value for name, value in metrics.items()}
        if size == 1 and step + 1 == SAVED:
            save(host, directory / "A", index)
            (directory / "digests").write_text("\n".join(host.digest(role) for role in TRAINED))
    for role in TRAINED:
        check_own_part(host, role)
    check_memory(host)
    trained, after, still = published(host), host.values(rollout), host.ref_logprobs(rollout)
    if index == 0:
        policy, reference, values = own
        found |= {"logprobs": policy.policy_logprobs, "entropy": policy.entropy, "values": values.values}
        found |= {"reference": reference.ref_logprobs, "reference after": still.ref_logprobs, "after": after.values}
        found |= {f"weight:{name}": array.copy() for name, array in trained.items()}
        if case.adapters:
            assert (policy.policy_logprobs == reference.ref_logprobs).all()
    load_digests(host, alone / "A", alone)
    if size > 1:
        save(host, directory / "B", index)
    digests = []
    for _ in range(2):
        update_both(host, SAVED, rollout, advantages, answers)
        digests.append([host.digest(role) for role in TRAINED])
        for role in TRAINED:
            host.load(role, alone / "A" / role.value)
    assert digests[0] == digests[1], "the same layout goes on bit for bit"
    mask = rollout.response_mask
    noise = np.where(mask, np.random.default_rng(1).normal(size=mask.shape), 0).astype(np.float32)
    batch = PolicyBatch(dataclasses.replace(rollout, sampler_logprobs=noise - 5), advantages, *answers[:2], 0.1)
    for name, arrays in (("grouped", grouped(host, batch)), ("guarded", guarded(host, batch))):
        found |= {f"{name}:{key}": array for key, array in arrays.items()}
    if index == 0:
        np.savez(directory / "result.npz", **found)
    host.close()


def save(host: MegatronHost, directory: Path, index: int) -> None:
    for role in TRAINED:
        if index == 0:
            (directory / role.value).mkdir(parents=True)
        torch.distributed.barrier()
        host.save(role, directory / role.value)()


def load_digests(host: MegatronHost, checkpoint: Path, directory: Path) -> None:
    for role in TRAINED:
        host.load(role, checkpoint / role.value)
    assert [host.digest(role) for role in TRAINED] == (directory / "digests").read_text().split("\n")
    assert [host.version(role) for role in TRAINED] == [SAVED, SAVED]


def check_own_part(host: MegatronHost, role: Role) -> None:
    """Check that a rank holds its part of the whole tensors (or of the adapters), and otherwise zeros."""
    model, blueprint = host._trainers[role].model, host._blueprint
    rank, whole = blueprint.parallel_rank, dict(stage_tensors(model, blueprint))
    lora = blueprint.model.lora.rank
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if ".lora." in name if lora else not name.startswith("output_layer.") or parameter.shape[0] > 1:
            part = from_hf(name, block, whole, blueprint.spec, rank.tensor_rank, rank.tensor_size)
            assert torch.equal(parameter, part), name


def check_memory(host: MegatronHost) -> None:
    """Check the bytes of parameters, exactly if nothing is padded (a tied embedding's rows included)."""
    blueprint = host._blueprint
    rank, spec = blueprint.parallel_rank, blueprint.spec
    if rank.tensor_size == 1:
        gang = GangModels(spec, blueprint.model, blueprint.layout, ALL_MODELS, rank.data_size)
        predicted, found = state_bytes(gang, rank.pipeline_rank), host.state_bytes()
        assert found["parameters"] == predicted["parameters"]
        if not blueprint.layout.distributed_optimizer:
            assert found == predicted


def policy_update(host: MegatronHost, ppo: PPOConfig, batch: PolicyBatch, mask: np.ndarray) -> dict[str, Any]:
    """Return metrics and weights of one update from the start, of the tokens in `mask`; only rank 0 has weights."""
    host.load(Role.POLICY, None)
    before, host._ppo = host._ppo, ppo
    advantages = dataclasses.replace(batch.advantages, loss_mask=mask)
    metrics = host.update_policy(0, dataclasses.replace(batch, advantages=advantages))
    host._ppo = before
    host.mark_clean(Role.POLICY)
    assert metrics.pop("policy/peak_memory_bytes") > 1e8, "less than torch alone takes"
    return metrics | {f"weight:{name}": array.copy() for name, array in (published(host) or {}).items()}


def grouped(host: MegatronHost, batch: PolicyBatch) -> dict[str, Any]:
    """Return an update without a critic's settings: a mean over rows, the KL in the loss, stale tokens, and rows in the
    middle that no loss counts, so that data-parallel ranks have different shares of the rows that count."""
    mask = batch.advantages.loss_mask.copy()
    mask[1:4] = False
    kl = KLConfig(where="loss", estimator="k3")
    ppo = PPOConfig(advantage="group", skip_equal_groups=True, aggregation="sequence", kl=kl)
    return policy_update(host, ppo, batch, mask)


def guarded(host: MegatronHost, batch: PolicyBatch) -> dict[str, Any]:
    """Return an update whose first minibatch has no token that counts, whose second one has a single row that counts
    (on two data-parallel ranks one has none), and which a target KL ends after that."""
    first, second = minibatch_rows(ROWS, 2, 2, SEED, 0)[0]
    mask = batch.advantages.loss_mask.copy()
    mask[[*first, *second[1:]]] = False
    return policy_update(host, PPOConfig(entropy_coef=0.01, target_kl=1e-7), batch, mask)


def learn_all(index: int, size: int, root: Path) -> None:
    """Run every case in turn as one of `size` ranks: starting processes is what takes time. Four ranks let torch check
    every collective, too."""
    if size == 4:
        torch.distributed.set_debug_level(torch.distributed.DebugLevel.DETAIL)
    for number, case in enumerate(CASES[size].values()):
        learn(case, root, root / f"{size}-{number}", index, size)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a directory per case, and one per case's models on one rank."""
    root = tmp_path_factory.mktemp("layouts")
    for model, (family, sizes) in MODELS.items():
        random_model(family, **sizes).save_pretrained(root / model)
    for case in ALL.values():
        if not (root / case.alone).exists():
            (root / case.alone).mkdir()
            learn(case, root, root / case.alone)
    for size, cases in CASES.items():
        for number in range(len(cases)):
            (root / f"{size}-{number}").mkdir()
        run_ranks(learn_all, size, size, root)
    return root


def directory_of(root: Path, name: str) -> Path:
    [(size, number)] = [(size, [*cases].index(name)) for size, cases in CASES.items() if name in cases]
    return root / f"{size}-{number}"


@pytest.mark.parametrize("name", ALL)
def test_several_ranks_learn_the_same_as_one(root: Path, name: str) -> None:
    """Also where rows are left out, and where the same minibatches are."""
    alone, here = (folder / "result.npz" for folder in (root / ALL[name].alone, directory_of(root, name)))
    expected, found = np.load(alone), np.load(here)
    assert set(found.files) == set(expected.files)
    counts = ("optimizer_steps", "empty_steps", "stopped_steps", "skipped_steps")
    assert [int(found[f"guarded:policy/{count}"]) for count in counts] == [1, 2, 1, 0]
    assert found["grouped:policy/kl_ref"] > 0
    for key in found.files:
        if key.startswith("start"):
            assert found[key] == expected[key]
        else:
            np.testing.assert_allclose(found[key], expected[key], atol=1e-5, rtol=1e-5, err_msg=key)


@pytest.mark.parametrize("name", ALL)
def test_a_checkpoint_of_several_ranks_loads_on_one_bit_for_bit(root: Path, name: str, tmp_path: Path) -> None:
    host = make_host(ALL[name], root, tmp_path)
    try:
        load_digests(host, directory_of(root, name) / "B", root / ALL[name].alone)
    finally:
        host.close()


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
def test_heads_are_padded_where_needed(tmp_path: Path, model: str, tensor: int, heads: int, kv_heads: int) -> None:
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
