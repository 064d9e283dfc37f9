"""Every parallel layout computes, learns, publishes and saves the same as one rank: data, tensor, sequence and pipeline
parallelism and two of them at once, the distributed optimizer, frozen blocks, adapters, models that do not divide over
the ranks, families with biases and norms of their own, every optimizer. Real processes over gloo, tiny models.

one rank:  three updates, a save after the second ──► several ranks: the same three updates
                                                  ──► several ranks: load it: the same digests; save it again
                                                                       ──► one rank: load that: the same digests

In bfloat16 sums of another order round to other numbers, as they do in Muon's iterations; so there the weights are
compared with how far they moved. All that is saved is bit for bit the same.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from stages.models.spec import RANDOM_TINY, padded, read_spec
from stages.models.weights import stage_tensors
from stages.ppo.config import KLConfig, PPOConfig
from stages.ppo.micro_batches import minibatch_rows
from storage.records import Advantages, Rollout
from tests.support.collectives import run_ranks
from tests.support.families import random_model
from tests.support.models import ALL_MODELS, published, random_advantages, random_rollout, update_both

pytestmark = pytest.mark.processes

ROWS, SEQ, SEED, SAVED = 8, 13, 3, 2
TRAINED = (Role.POLICY, Role.CRITIC)
SP = {"tensor": 2, "sequence_parallel": True}
ZERO1 = {"distributed_optimizer": True}

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
"""Family and sizes. All but the first have 259 tokens, which neither two nor four ranks can share evenly.
RANDOM_TINY, a tied Llama, is there without files."""


EVEN = ("tiny", RANDOM_TINY)
"""Models that need no padding."""
LINEARS = ("qkv", "proj", "fc1", "fc2")


@dataclass(frozen=True)
class Case:
    model: str
    ranks: int
    layout: dict[str, Any]
    frozen_blocks: int = 0
    critic_blocks: int | None = None
    adapters: tuple[str, ...] = ()
    kernels: Literal["auto", "portable"] = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    state: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients and moments."""
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"

    @property
    def alone(self) -> str:
        """The name of the directory of one rank with the same models."""
        models = self.model, self.frozen_blocks, self.critic_blocks, self.adapters, self.dtype, self.state
        return f"alone, {', '.join(map(str, models))}, {self.optimizer}"

    @property
    def micro_batch_rows(self) -> int:
        """Rows of a micro-batch, of which one rank has 4: others here, and several where there is a pipeline."""
        return 1 if self.layout.keys() & {"pipeline", "tensor"} == {"pipeline"} else 3

    @property
    def rounded(self) -> bool:
        """True if sums in another order give other numbers."""
        return self.dtype != "float32" or self.optimizer == "muon"

    @property
    def updates(self) -> int:
        """Number of updates: more where the way from the start is the measure."""
        return 5 if self.rounded else 3

    @property
    def settings(self) -> list[str]:
        """The names of the case's settings in `EXACT` and `OTHERS`."""
        layout = self.layout
        tensor, pipeline = layout.get("tensor", 1), layout.get("pipeline", 1)
        data = self.ranks // tensor // pipeline
        named = {
            self.model: True,
            f"TP{tensor}": tensor > 1,
            f"PP{pipeline}": pipeline > 1,
            f"DP{data}": data > 1,
            "SP": "sequence_parallel" in layout,
            "ZeRO-1": "distributed_optimizer" in layout and data > 1,
            "MLP" if "recompute_modules" in layout else layout.get("recompute"): "recompute" in layout,
            "portable": self.kernels == "portable",
            "frozen": self.frozen_blocks > 0,
            "small critic": self.critic_blocks is not None,
            "adapters" if self.adapters == LINEARS else "few adapters": self.adapters != (),
            "bfloat16": self.dtype == "bfloat16",
            "bfloat16 state": self.state == "bfloat16",
            self.optimizer: self.optimizer != "adamw",
        }
        return [name for name, is_set in named.items() if is_set]


CASES = [
    Case("tiny", 2, {"pipeline": 2}, optimizer="adafactor"),
    Case(RANDOM_TINY, 2, {}, optimizer="adafactor"),
    Case("tiny", 2, {**ZERO1, "recompute": "selective"}, frozen_blocks=2, critic_blocks=2),
    Case("tiny", 2, {"tensor": 2, "recompute": "full"}, kernels="portable", frozen_blocks=2, critic_blocks=2),
    Case("9 and 3 heads", 2, ZERO1, kernels="portable"),
    Case("9 and 3 heads", 2, {**SP, "recompute": "selective"}),
    Case("9 and 3 heads", 2, {"tensor": 2, "recompute": "selective"}, adapters=LINEARS, frozen_blocks=1),
    Case("14 and 2 heads, biases", 2, SP),
    Case("4 and 2 heads, norms", 2, {**ZERO1, "recompute": "full"}, frozen_blocks=1),
    Case("4 and 2 heads, norms", 2, SP, kernels="portable", frozen_blocks=1),
    Case("3 and 3 heads, norms", 2, {"tensor": 2, "recompute": "full"}),
    Case("four blocks", 2, ZERO1, adapters=LINEARS, frozen_blocks=1),
    Case("four blocks", 2, {"pipeline": 2, **ZERO1}, adapters=("proj", "fc1"), critic_blocks=2),
    Case("four blocks", 2, {**SP, "recompute": "full"}, kernels="portable", adapters=LINEARS, frozen_blocks=1),
    Case("4 heads and 1", 2, {**ZERO1, "recompute": "selective", "recompute_modules": ["mlp"]}, adapters=LINEARS),
    Case(
        "4 heads and 1",
        2,
        {**SP, "recompute": "selective", "recompute_modules": ["mlp"]},
        kernels="portable",
        adapters=LINEARS,
        frozen_blocks=1,
    ),
    Case("4 and 2 heads", 2, {"tensor": 2}, kernels="portable"),
    Case(RANDOM_TINY, 2, {}, optimizer="muon"),
    Case(RANDOM_TINY, 2, ZERO1, dtype="bfloat16", state="bfloat16"),
    Case(RANDOM_TINY, 2, {"pipeline": 2}, kernels="portable", dtype="bfloat16", state="bfloat16"),
    Case(RANDOM_TINY, 2, SP, kernels="portable", dtype="bfloat16", state="bfloat16"),
    Case("tiny", 2, {"pipeline": 2}, dtype="bfloat16", optimizer="muon"),
    Case("tiny", 4, {}, optimizer="adafactor"),
    Case("tiny", 4, {"pipeline": 4}),
    Case("tiny", 4, {**SP, **ZERO1}, frozen_blocks=2, critic_blocks=2),
    Case(RANDOM_TINY, 4, {"pipeline": 2, **ZERO1, "recompute": "full"}, critic_blocks=2),
    Case(RANDOM_TINY, 4, {"tensor": 2, "pipeline": 2, "sequence_parallel": True}, kernels="portable", critic_blocks=2),
    Case("9 and 3 heads", 4, {**ZERO1, "recompute": "selective"}, frozen_blocks=1),
    Case("9 and 3 heads", 4, {"tensor": 4, "sequence_parallel": True, "recompute": "full"}, kernels="portable"),
    Case("14 and 2 heads, biases", 4, {"tensor": 4}, kernels="portable"),
    Case("4 and 2 heads, norms", 4, {"tensor": 4, "recompute": "selective"}, kernels="portable"),
    Case("4 and 2 heads", 4, {"tensor": 4, "sequence_parallel": True, "recompute": "selective"}),
    Case("4 and 2 heads, biases", 4, {"tensor": 4, "sequence_parallel": True}),
    Case(RANDOM_TINY, 4, {}, dtype="bfloat16", optimizer="muon"),
]
"""A search chose few cases that have every two settings of `EXACT` and `OTHERS` together."""
ALL = {", ".join(case.settings): case for case in CASES}
CHECKED = ("biases, TP4, portable", "TP2, DP2")
"""Parts of the names of cases in which torch checks every collective, too. It takes three times as long."""
EXACT = {
    "tiny": "TP2; PP2; PP4; DP2; DP4; SP; ZeRO-1; selective; full; portable; frozen; small critic; adafactor",
    RANDOM_TINY: "TP2; PP2; DP2; ZeRO-1; portable; adafactor",
    "9 and 3 heads": "TP2; TP4; DP2; SP; ZeRO-1; selective; portable; frozen",
    "14 and 2 heads, biases": "TP2; TP4; portable",
    "4 and 2 heads, norms": "TP2; TP4; DP2; SP; ZeRO-1; portable",
    "3 and 3 heads, norms": "TP2; full",
    "4 and 2 heads": "TP4; portable",
    "4 and 2 heads, biases": "TP4; SP",
    "TP2": "PP2; DP2; SP; ZeRO-1; selective; full; portable; frozen; small critic",
    "TP4": "SP; portable",
    "PP2": "DP2; SP; ZeRO-1; full; portable; small critic; adafactor",
    "DP2": "SP; ZeRO-1; selective; full; portable; frozen; small critic; adafactor",
    "DP4": "ZeRO-1; adafactor",
    "SP": "selective; portable; frozen; small critic",
    "ZeRO-1": "full; portable; frozen; small critic",
    "selective": "small critic",
    "full": "portable; frozen; small critic",
    "portable": "frozen; small critic",
    "frozen": "small critic",
}
"""Setting -> settings that it is tried with, where all parameters are trained and the numbers are one rank's."""
OTHERS = {
    "tiny": "muon",
    RANDOM_TINY: "DP4; SP; bfloat16; bfloat16 state; muon",
    "9 and 3 heads": "adapters",
    "four blocks": "TP2; PP2; DP2; SP; ZeRO-1; full; portable; frozen; small critic; adapters; few adapters",
    "4 heads and 1": "TP2; MLP; adapters",
    "TP2": "MLP; adapters; bfloat16; bfloat16 state",
    "PP2": "few adapters; bfloat16; bfloat16 state; muon",
    "DP2": "adapters; bfloat16; bfloat16 state; muon",
    "DP4": "bfloat16; muon",
    "SP": "ZeRO-1; full; adapters; bfloat16; bfloat16 state",
    "ZeRO-1": "adapters; bfloat16; bfloat16 state",
    "MLP": "adapters",
    "full": "adapters",
    "portable": "adapters; bfloat16; bfloat16 state",
    "frozen": "adapters",
    "small critic": "few adapters",
    "bfloat16": "bfloat16 state; muon",
}
"""Setting -> settings that it is tried with in any case."""


def make_host(case: Case, root: Path, directory: Path, index: int = 0, size: int = 1) -> MegatronHost:
    optimizer = OptimizerConfig(
        case.optimizer,
        lr=1e-3,
        weight_decay=0.1,
        micro_batch_rows=case.micro_batch_rows if size > 1 else 4,
        gradients_dtype=case.state,
        moments_dtype=case.state,
    )
    lora = {"lora": LoraConfig(rank=3, alpha=6.0, targets=[*case.adapters])} if case.adapters else {}
    model = ModelConfig(
        path=RANDOM_TINY if case.model == RANDOM_TINY else str(root / "models" / case.model),
        dtype=case.dtype,
        kernels=case.kernels if size > 1 else "auto",
        frozen_blocks=case.frozen_blocks,
        critic_blocks=case.critic_blocks,
        policy=optimizer,
        critic=optimizer,
        **lora,
    )
    return MegatronHost(
        model,
        SamplingConfig(suppress_token_ids=[7] if case.model == RANDOM_TINY else [7, 258], temperature=0.9),
        PPOConfig(entropy_coef=0.01, epochs=1),
        LayoutConfig(**case.layout) if size > 1 else LayoutConfig(),
        ALL_MODELS,
        Rank(index, size, f"file://{directory}/rendezvous{size}", 1),
        seed=SEED,
        total_steps=case.updates + 1,
        fsync=False,
    )


def learn(case: Case, root: Path, directory: Path, index: int = 0, size: int = 1) -> None:
    """Compute all outputs, make some updates of both models, and continue from a checkpoint, as one rank of `size`.
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
    if case.rounded:
        found |= {f"start {name}": array for name, array in weights(host).items()}
    for step in range(case.updates):
        metrics = update_both(host, step, rollout, advantages, answers)
        found |= {f"metric:{step}:{name}": value for name, value in metrics.items()}
        if size == 1 and step + 1 == SAVED:
            save(host, directory / "A", index)
            (directory / "digests").write_text("\n".join(host.digest(role) for role in TRAINED))
    for role in TRAINED:
        check_own_part(host, role)
    check_memory(case, host)
    trained = weights(host)
    after = host.policy_logprobs(rollout), host.values(rollout), host.ref_logprobs(rollout)
    if index == 0:
        policy, reference, values = own
        found |= {"logprobs": policy.policy_logprobs, "entropy": policy.entropy, "values": values.values}
        found |= {"logprobs after": after[0].policy_logprobs, "values after": after[1].values}
        found |= {"reference": reference.ref_logprobs, "reference after": after[2].ref_logprobs} | trained
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
    if not case.rounded:
        found |= other_updates(host, rollout, advantages, answers)
    if index == 0:
        np.savez(directory / "result.npz", **found)
    host.close()


def other_updates(host: MegatronHost, rollout: Rollout, advantages: Advantages, answers: Any) -> dict[str, Any]:
    """Return metrics and weights of single updates under other settings."""
    mask = rollout.response_mask
    noise = np.where(mask, np.random.default_rng(1).normal(size=mask.shape), 0).astype(np.float32)
    batch = PolicyBatch(dataclasses.replace(rollout, sampler_logprobs=noise - 5), advantages, *answers[:2], 0.1)
    updates = {"grouped": grouped(host, batch), "guarded": guarded(host, batch)}
    return {f"{name}:{key}": array for name, arrays in updates.items() for key, array in arrays.items()}


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


def weights(host: MegatronHost) -> dict[str, np.ndarray]:
    """Return what is published of the policy, on rank 0 alone, and the critic's tensors."""
    policy = {name: torch.from_numpy(array) for name, array in (published(host) or {}).items()}
    if host._blueprint.model.dtype == "bfloat16":  # whose bits NumPy has as integers
        policy = {name: tensor.view(torch.bfloat16) for name, tensor in policy.items()}
    whole = policy | {f"critic:{name}": tensor for name, tensor in whole_tensors(host, Role.CRITIC).items()}
    return {f"weight:{name}": tensor.float().numpy().copy() for name, tensor in whole.items()}


def whole_tensors(host: MegatronHost, role: Role) -> dict[str, torch.Tensor]:
    """Return the tensors that all stages of a pipeline train."""
    stages: list[Any] = [None] * torch.distributed.get_world_size()
    own = {name: tensor.clone() for name, tensor in stage_tensors(host._trainers[role].model, host._blueprint)}
    torch.distributed.all_gather_object(stages, own)
    return {name: tensor for stage in stages for name, tensor in stage.items()}


def check_own_part(host: MegatronHost, role: Role) -> None:
    """Check that a rank holds its part of the whole tensors (or of the adapters), and otherwise zeros."""
    model, blueprint = host._trainers[role].model, host._blueprint
    rank, whole = blueprint.parallel_rank, whole_tensors(host, role)
    lora = blueprint.model.lora.rank
    for name, block, parameter in named_by_block(model, blueprint.model.frozen_blocks):
        if ".lora." in name if lora else not name.startswith("output_layer.") or parameter.shape[0] > 1:
            part = from_hf(name, block, whole, blueprint.spec, rank.tensor_rank, rank.tensor_size)
            assert torch.equal(parameter, part), name


def check_memory(case: Case, host: MegatronHost) -> None:
    """Check that this rank's memory is as predicted: to the byte if nothing is padded (a tied embedding's rows
    included), except for the distributed optimizer's buffers, whose padding is much beside a tiny model."""
    blueprint = host._blueprint
    rank, spec = blueprint.parallel_rank, blueprint.spec
    if rank.tensor_size > 1 and case.model not in EVEN:
        return
    gang = GangModels(spec, blueprint.model, blueprint.layout, ALL_MODELS, rank.data_size)
    predicted, found = state_bytes(gang, rank.pipeline_rank), host.state_bytes()
    if not blueprint.layout.distributed_optimizer:
        assert found == predicted
    elif case.dtype == "float32":
        assert found["parameters"] == predicted["parameters"]
        if case.model in EVEN and not case.adapters:
            for name in ("gradients", "moments"):
                np.testing.assert_allclose(found[name], predicted[name], rtol=0.05, err_msg=name)


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
    """Run every case of `size` ranks in turn, as one of them: starting processes is what takes time."""
    levels = torch.distributed.DebugLevel
    for name, case in ALL.items():
        if case.ranks == size:
            checked = any(part in name for part in CHECKED)
            torch.distributed.set_debug_level(levels.DETAIL if checked else levels.OFF)
            learn(case, root, root / name, index, size)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a directory per case, and one per case's models on one rank."""
    root = tmp_path_factory.mktemp("layouts")
    for model, (family, sizes) in MODELS.items():
        random_model(family, **sizes).save_pretrained(root / "models" / model)
    for name, case in ALL.items():
        (root / name).mkdir()
        if not (root / case.alone).exists():
            (root / case.alone).mkdir()
            learn(case, root, root / case.alone)
    for size in (2, 4):
        run_ranks(learn_all, size, size, root)
    return root


def test_every_two_settings_are_in_a_case_together() -> None:
    exact = [case.settings for case in CASES if not case.rounded and not case.adapters]
    for table, tried in ((EXACT, exact), (OTHERS, [case.settings for case in CASES])):
        together = {pair for settings in tried for pair in itertools.permutations(settings, 2)}
        wanted = {(setting, other) for setting, others in table.items() for other in others.split("; ")}
        assert wanted <= together
    for part in CHECKED:
        assert any(part in name for name, case in ALL.items() if case.ranks == 4)


@pytest.mark.parametrize("name", ALL)
def test_several_ranks_learn_the_same_as_one(root: Path, name: str) -> None:
    """Also where rows are left out, and where the same minibatches are."""
    alone, here = (folder / "result.npz" for folder in (root / ALL[name].alone, root / name))
    expected, found = np.load(alone), np.load(here)
    assert set(found.files) == set(expected.files)
    if ALL[name].rounded:
        assert_near(found, expected)
        return
    counts = ("optimizer_steps", "empty_steps", "stopped_steps", "skipped_steps")
    assert [int(found[f"guarded:policy/{count}"]) for count in counts] == [1, 2, 1, 0]
    assert found["grouped:policy/kl_ref"] > 0
    for key in found.files:
        if key.startswith("start"):
            assert found[key] == expected[key]
        else:
            np.testing.assert_allclose(found[key], expected[key], atol=1e-5, rtol=1e-5, err_msg=key)


def assert_near(found: Any, expected: Any) -> None:
    """Check that two runs' weights are near each other for how far they moved, and the first losses as they are."""
    names = [name for name in found.files if name.startswith("weight:")]

    def distance(a: Any, b: Any, start: str = "") -> float:
        return float(sum(((a[name] - b[f"{start}{name}"]) ** 2).sum() for name in names)) ** 0.5

    assert distance(found, expected) < 0.2 * distance(expected, expected, "start ")
    for role in TRAINED:
        loss = f"metric:0:{role}/loss"
        np.testing.assert_allclose(found[loss], expected[loss], atol=0.02)


@pytest.mark.parametrize("name", ALL)
def test_a_checkpoint_of_several_ranks_loads_on_one_bit_for_bit(root: Path, name: str, tmp_path: Path) -> None:
    host = make_host(ALL[name], root, tmp_path)
    try:
        load_digests(host, root / name / "B", root / ALL[name].alone)
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
