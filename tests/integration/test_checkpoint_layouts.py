"""A checkpoint of any layout loads in any other bit for bit: weights, float32 masters, Adam's moments, counters.

    one rank: train, save A ──► two ranks, layout L: load A, save B, train on; save C while the next update runs
                            ──► one rank: A = B;   load C, save D;   C = D,   and C's weights have L's digest

Two ranks that misplaced alike what they save and what they load would be found by B, which has other cuts than A.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from megatron.core import dist_checkpointing

from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.protocol import CriticBatch, PolicyBatch, Rank, Role, StateError
from stages.ppo.config import PPOConfig
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Values
from tests.support.collectives import run_ranks
from tests.support.families import random_model
from tests.support.models import random_rollout

pytestmark = pytest.mark.processes

ROWS, SEQ, SEED = 4, 13, 3
TRAINED = (Role.POLICY, Role.CRITIC)


@dataclasses.dataclass(frozen=True)
class Case:
    layout: LayoutConfig
    dtype: str = "bfloat16"
    frozen_blocks: int = 0
    kernels: Literal["auto", "portable"] = "auto"
    sizes: Mapping[str, int] | None = None
    """Sizes of a model of its own, which the ranks do not divide."""
    state: Literal["float32", "bfloat16"] = "float32"
    """Dtype of gradients and moments."""
    optimizer: Literal["adamw", "adafactor", "muon"] = "adamw"


CASES = {
    "DP2": Case(LayoutConfig()),
    "DP2, distributed optimizer": Case(LayoutConfig(distributed_optimizer=True), kernels="portable"),
    "DP2, distributed optimizer, float32, frozen blocks": Case(LayoutConfig(distributed_optimizer=True), "float32", 2),
    "DP2, distributed optimizer, float16": Case(LayoutConfig(distributed_optimizer=True), "float16"),
    "TP2, SP": Case(LayoutConfig(tensor=2, sequence_parallel=True), kernels="portable"),
    "TP2, float32, frozen blocks": Case(LayoutConfig(tensor=2), "float32", 2, "portable"),
    "TP2, nothing divides": Case(LayoutConfig(tensor=2), sizes={"num_attention_heads": 3, "num_key_value_heads": 3}),
    "TP2, one head of keys for both": Case(
        LayoutConfig(tensor=2, sequence_parallel=True), sizes={"num_key_value_heads": 1, "intermediate_size": 57}
    ),
    "PP2, distributed optimizer": Case(LayoutConfig(pipeline=2, distributed_optimizer=True)),
    "DP2, distributed optimizer, bfloat16 state": Case(
        LayoutConfig(distributed_optimizer=True), kernels="portable", state="bfloat16"
    ),
    "TP2, SP, bfloat16 state": Case(
        LayoutConfig(tensor=2, sequence_parallel=True),
        sizes={"num_attention_heads": 3, "num_key_value_heads": 3},
        state="bfloat16",
    ),
    "PP2, bfloat16 state": Case(LayoutConfig(pipeline=2), state="bfloat16"),
    "DP2, adafactor, float32": Case(LayoutConfig(), "float32", optimizer="adafactor"),
    "PP2, adafactor, biases": Case(LayoutConfig(pipeline=2), sizes={"num_hidden_layers": 4}, optimizer="adafactor"),
    "DP2, muon, frozen blocks, bfloat16 state": Case(LayoutConfig(), "bfloat16", 2, state="bfloat16", optimizer="muon"),
    "PP2, muon": Case(LayoutConfig(pipeline=2), optimizer="muon"),
}
MOMENTS = {
    "adamw": {"exp_avg", "exp_avg_sq"},
    "adafactor": {"row_var", "col_var", "variance"},
    "muon": {"exp_avg", "exp_avg_sq", "momentum_buffer"},
}


def make_host(case: Case, directory: Path, rank: Rank, layout: LayoutConfig) -> MegatronHost:
    """`directory`: the case's own."""
    optimizer = OptimizerConfig(
        case.optimizer,
        lr=1e-3,
        weight_decay=0.1,
        micro_batch_rows=2,
        gradients_dtype=case.state,
        moments_dtype=case.state,
    )
    model = ModelConfig(
        path=str(directory / "model") if case.sizes else "random:tiny",
        dtype=case.dtype,
        kernels=case.kernels,
        frozen_blocks=case.frozen_blocks,
        critic_blocks=2,
        policy=optimizer,
        critic=optimizer,
    )
    ppo = PPOConfig(minibatches=1)
    return MegatronHost(model, SamplingConfig(), ppo, layout, frozenset(TRAINED), rank, seed=SEED, total_steps=9)


def update(host: MegatronHost, step: int) -> None:
    rng = np.random.default_rng(step)
    rollout = random_rollout(rng, ROWS, SEQ, step)
    mask = rollout.response_mask

    def noise() -> np.ndarray:
        return np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)

    advantages = Advantages(noise(), noise(), noise(), mask)
    logprobs = noise() - 5
    host.update_policy(
        step, PolicyBatch(rollout, advantages, PolicyLogprobs(logprobs, noise()), ReferenceLogprobs(logprobs), 0.1)
    )
    host.update_critic(step, CriticBatch(rollout, advantages, Values(noise(), np.zeros(ROWS, np.float32))))
    for role in TRAINED:
        host.mark_clean(role)


def save(host: MegatronHost, directory: Path) -> None:
    for role in TRAINED:
        path = directory / role.value
        path.mkdir(parents=True, exist_ok=True)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()
        writing(host.save(role, path)).join()


def writing(*calls: Callable[[], object]) -> threading.Thread:
    """Start to write snapshots in a thread, since their collectives belong to a thread of one name."""
    thread = threading.Thread(target=lambda: [call() for call in calls], name="writer")
    thread.start()
    return thread


def load(host: MegatronHost, directory: Path) -> None:
    for role in TRAINED:
        host.load(role, directory / role.value)


def two_ranks(index: int, root: Path) -> None:
    """Every layout in turn, since starting processes is what takes time."""
    for number, case in enumerate(CASES.values()):
        directory = root / str(number)
        host = make_host(case, directory, Rank(index, 2, f"file://{directory}/rendezvous", 1), case.layout)
        load(host, directory / "A")
        assert [host.version(role) for role in TRAINED] == [2, 2]
        save(host, directory / "B")
        update(host, 2)
        digests = [host.digest(role) for role in TRAINED]
        if index == 0:
            (directory / "digests").write_text("\n".join(digests))
            for role in TRAINED:
                (directory / "C" / role.value).mkdir(parents=True)
        torch.distributed.barrier()
        thread = writing(*[host.save(role, directory / "C" / role.value) for role in TRAINED])
        update(host, 3)
        after = [host.digest(role) for role in TRAINED]
        assert after != digests
        thread.join()
        torch.distributed.barrier()
        load(host, directory / "C")
        assert [host.digest(role) for role in TRAINED] == digests
        update(host, 3)
        assert [host.digest(role) for role in TRAINED] == after, "the same layout goes on bit for bit"
        host.close()


def plain(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of both roles, whole."""
    found = {}
    for role in TRAINED:
        tensors = dist_checkpointing.load_plain_tensors(str(directory / role.value))
        found |= {f"{role}.{key}": t for key, t in tensors.items() if isinstance(t, torch.Tensor)}
    return found


def assert_equal(ours: Path, theirs: Path) -> None:
    first, second = plain(ours), plain(theirs)
    assert first.keys() == second.keys()
    for key, tensor in first.items():
        assert tensor.dtype == second[key].dtype
        assert torch.equal(tensor, second[key]), key
    for role in TRAINED:
        common = [dist_checkpointing.load_common_state_dict(str(path / role.value)) for path in (ours, theirs)]
        assert common[0] == common[1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with a directory per case, by its number, and the checkpoints A, B and C."""
    root = tmp_path_factory.mktemp("checkpoints")
    for number, case in enumerate(CASES.values()):
        directory = root / str(number)
        directory.mkdir()
        if case.sizes:
            random_model("Qwen 2.5", **case.sizes).save_pretrained(directory / "model")
        host = make_host(case, directory, Rank(0, 1, f"file://{directory}/rendezvous0", 1), LayoutConfig())
        for step in range(2):
            update(host, step)
        save(host, directory / "A")
        host.close()
    run_ranks(two_ranks, 2, root)
    return root


@pytest.mark.parametrize("name", CASES)
def test_what_one_layout_wrote_another_has_bit_for_bit(root: Path, name: str) -> None:
    case, directory = CASES[name], root / str(list(CASES).index(name))
    host = make_host(case, directory, Rank(0, 1, f"file://{directory}/rendezvous1", 1), LayoutConfig())
    try:
        assert_equal(directory / "A", directory / "B")
        saved = plain(directory / "A")
        moments = {tensor.dtype for key, tensor in saved.items() if key.split(".")[1] in MOMENTS[case.optimizer]}
        assert moments == {getattr(torch, case.state)}
        kinds = {key.split(".")[1] for key in saved}
        assert kinds == {"weights"} | MOMENTS[case.optimizer] | ({"masters"} if case.dtype != "float32" else set())
        load(host, directory / "C")
        assert [host.version(role) for role in TRAINED] == [3, 3]
        assert [host.digest(role) for role in TRAINED] == (directory / "digests").read_text().split("\n")
        save(host, directory / "D")
        assert_equal(directory / "C", directory / "D")
    finally:
        host.close()


def test_moments_of_another_dtype_are_refused(root: Path, tmp_path: Path) -> None:
    host = make_host(
        dataclasses.replace(CASES["DP2"], state="bfloat16"), tmp_path, Rank(0, 1, f"file://{tmp_path}/rendezvous", 1),
        LayoutConfig(),
    )  # fmt: skip
    try:
        with pytest.raises(StateError, match=r"exp_avg\..* is torch.float32 .*, needed is torch.bfloat16"):
            host.load(Role.POLICY, root / "0" / "A" / "policy")
    finally:
        host.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frozen_blocks": 1}, "blocks 4 there and 3 here, frozen_blocks 0 there and 1 here"),
        ({"dtype": "float32"}, "dtype 'bfloat16' there and 'float32' here"),
        ({"optimizer": "muon"}, "optimizer None there and 'muon' here"),
    ],
)
def test_another_architecture_is_refused(
    root: Path, tmp_path: Path, change: dict[str, str | int], message: str
) -> None:
    case = dataclasses.replace(CASES["DP2"], **change)  # type: ignore[arg-type]
    host = make_host(case, tmp_path, Rank(0, 1, f"file://{tmp_path}/rendezvous", 1), LayoutConfig())
    before = host.digest(Role.POLICY)
    try:
        with pytest.raises(StateError, match=f"another architecture: .*{message}"):
            host.load(Role.POLICY, root / "0" / "A" / "policy")
        with pytest.raises(StateError, match=r"another architecture: .*role 'critic' there and 'policy' here"):
            host.load(Role.POLICY, root / "0" / "A" / "critic")
        with pytest.raises(StateError, match="holds no checkpoint of Megatron's format torch_dist"):
            host.load(Role.POLICY, tmp_path)
        assert (host.digest(Role.POLICY), host.dirty(Role.POLICY), host.version(Role.POLICY)) == (before, False, 0)
    finally:
        host.close()
