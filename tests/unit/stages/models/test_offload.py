"""Models that leave the device while they do nothing: the same bits as where all of them stay, and no memory under what
sleeps. The device is a CPU that is said to have memory of its own: storages move as they would between a GPU and its
host."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from stages.models import weights as gather
from stages.models.checkpoints import masters_of
from stages.models.config import LayoutConfig, ModelConfig, Offload, OptimizerConfig
from stages.models.host import MegatronHost
from stages.models.offload import OffloadableTensors, allocate, release
from stages.models.protocol import CriticBatch, PolicyBatch, Role
from stages.models.trainer import Trainer
from stages.ppo.config import PPOConfig
from storage.records import Advantages
from tests.support.models import SEED, opened, published, random_rollout

ROWS, SEQ = 6, 12
LAYOUTS = {"whole": LayoutConfig(), "sharded": LayoutConfig(distributed_optimizer=True)}


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy sees copies then, as of a GPU's tensors: of what it shares, torch resizes no storage."""
    monkeypatch.setattr("stages.models.host.has_own_memory", lambda: True)
    as_numpy = gather.as_numpy
    monkeypatch.setattr(gather, "as_numpy", lambda tensor: as_numpy(tensor.clone()))


def model_config(dtype: Any = "bfloat16", frozen_blocks: int = 0, state: Any = "float32") -> ModelConfig:
    """`state`: dtype of gradients and moments."""
    optimizer = OptimizerConfig(
        lr=1e-3, weight_decay=0.1, micro_batch_rows=3, gradients_dtype=state, moments_dtype=state
    )
    return ModelConfig(
        path="random:tiny",
        dtype=dtype,
        frozen_blocks=frozen_blocks,
        critic_blocks=2,
        policy=optimizer,
        critic=optimizer,
    )


def step(host: Any, number: int) -> list[np.ndarray]:
    """All nodes of a step, in an order that changes roles often; what they gave."""
    rng = np.random.default_rng([SEED, number])
    rollout = random_rollout(rng, ROWS, SEQ, version=number)
    noise = np.where(rollout.response_mask, rng.normal(size=rollout.tokens.shape), 0).astype(np.float32)
    values, reference, policy = host.values(rollout), host.ref_logprobs(rollout), host.policy_logprobs(rollout)
    advantages = Advantages(noise, noise, noise, rollout.response_mask)
    host.update_policy(number, PolicyBatch(rollout, advantages, policy, reference, 0.0))
    host.update_critic(number, CriticBatch(rollout, advantages, values))
    host.mark_clean(Role.POLICY)
    host.mark_clean(Role.CRITIC)
    return [values.values, reference.ref_logprobs, policy.policy_logprobs]


class Resting:
    """Owns a host that leaves its devices before each thing that it is asked to do."""

    def __init__(self, host: MegatronHost) -> None:
        self._host = host

    def __getattr__(self, name: str) -> Any:
        self._host.sleep()
        return getattr(self._host, name)


def nodes(host: Any, directory: Path) -> list[Any]:
    """Two steps, a checkpoint between them, the second step again from it, back to the start; all that was computed."""
    found: list[Any] = step(host, 0)
    for role in (Role.POLICY, Role.CRITIC):
        (directory / role).mkdir()
        host.save(role, directory / role)()
    found += step(host, 1)
    digests = [host.digest(role) for role in (Role.POLICY, Role.CRITIC)]
    for role in (Role.POLICY, Role.CRITIC):
        host.load(role, directory / role)
    found += step(host, 1)
    assert [host.digest(role) for role in (Role.POLICY, Role.CRITIC)] == digests
    for role in (Role.POLICY, Role.CRITIC):
        host.load(role, None)
    assert host.version(Role.CRITIC) == 0
    weights = published(host)
    return [*found, *digests, {name: array.copy() for name, array in weights.items()}]


@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize(
    ("dtype", "frozen_blocks", "state"),
    [("bfloat16", 0, "float32"), ("float32", 2, "float32"), ("bfloat16", 1, "bfloat16")],
)
def test_offloading_changes_no_bit(
    tmp_path: Path, layout: LayoutConfig, dtype: str, frozen_blocks: int, state: str
) -> None:
    config, found = model_config(dtype, frozen_blocks, state), []
    for offload in ("none", "gradients", "idle"):
        (tmp_path / offload).mkdir()
        with opened(tmp_path / offload, config, layout=layout, offload=offload) as host:
            found.append(nodes(host, tmp_path / offload))
    for other in found[1:]:
        np.testing.assert_equal(other, found[0])


@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize("offload", ["none", "idle"])
@pytest.mark.parametrize(("dtype", "frozen_blocks"), [("bfloat16", 0), ("float32", 2)])
def test_resting_changes_no_bit(tmp_path: Path, offload: Offload, dtype: str, frozen_blocks: int) -> None:
    found = []
    for resting in (False, True):
        directory = tmp_path / str(resting)
        directory.mkdir()
        with opened(directory, model_config(dtype, frozen_blocks), offload=offload) as host:
            found.append(nodes(Resting(host) if resting else host, directory))
    np.testing.assert_equal(found[1], found[0])


@pytest.mark.usefixtures("own_memory")
@pytest.mark.parametrize("offload", ["none", "idle"])
def test_who_rests_has_nothing_on_the_device(tmp_path: Path, offload: Offload) -> None:
    with opened(tmp_path, model_config(frozen_blocks=1), offload=offload) as host:
        step(host, 0)
        for _ in range(2):
            host.sleep()
            assert [held(host, role) for role in (Role.POLICY, Role.CRITIC)] == [(0, 0, 0)] * 2
            assert _bytes([*host._trunk.model.parameters(), *host._reference.parameters()]) == 0
        assert host.version(Role.POLICY) == 1
        step(host, 1)


def test_on_a_cpu_who_rests_gives_its_gradient_buffers_up(tmp_path: Path) -> None:
    with opened(tmp_path, model_config()) as host:
        step(host, 0)
        weights, state, gradients = held(host, Role.POLICY)
        assert gradients > 0
        host.sleep()
        assert held(host, Role.POLICY) == (weights, state, 0)
        step(host, 1)


def held(host: MegatronHost, role: Role) -> tuple[int, int, int]:
    """Bytes under a role's (weights, masters and moments, gradient buffers)."""
    trainer = host._trainers[role]
    return (
        _bytes(trainer.model.parameters()),
        _bytes(list(_optimizer_state(trainer))),
        _bytes(buffer.grad_data for buffer in trainer._ddp.buffers),
    )


def _optimizer_state(trainer: Trainer) -> list[torch.Tensor]:
    (inner,) = trainer._optimizer.chained_optimizers
    moments = [state[name] for state in trainer._adam.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return moments + [m.tensor for m in masters_of(inner) if m.parameter.dtype is not torch.float32]


def _bytes(tensors: Any) -> int:
    return sum({id(t): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.usefixtures("own_memory")
def test_only_the_role_at_work_is_on_the_device(tmp_path: Path) -> None:
    """A forward pass needs only the role's weights; gradients exist only in an update; the trunk, which all roles
    read, stays."""
    rollout = random_rollout(np.random.default_rng(0), ROWS, SEQ)
    with opened(tmp_path, model_config(frozen_blocks=1), offload="idle") as host:
        assert held(host, Role.POLICY) == (0, 0, 0)
        step(host, 0)
        assert held(host, Role.POLICY) == (0, 0, 0)
        weights, state, gradients = held(host, Role.CRITIC)
        assert min(weights, state) > 0 == gradients
        host.policy_logprobs(rollout)
        weights, state, gradients = held(host, Role.POLICY)
        assert weights > 0 == state == gradients
        assert held(host, Role.CRITIC) == (0, 0, 0)
        host.ref_logprobs(rollout)
        assert held(host, Role.POLICY) == (0, 0, 0)
        assert _bytes(host._trunk.model.parameters()) > 0
        assert (host.version(Role.POLICY), host.dirty(Role.POLICY)) == (1, False)


def test_gradient_buffers_exist_during_an_update_only(tmp_path: Path) -> None:
    with opened(tmp_path, model_config(), PPOConfig(minibatches=1), offload="gradients") as host:
        step(host, 0)
        weights, state, gradients = held(host, Role.POLICY)
        assert min(weights, state) > 0 == gradients


@pytest.mark.usefixtures("own_memory")
def test_megatrons_views_stay_views(tmp_path: Path) -> None:
    """Parameters stay views of the distributed optimizer's `param_data`, `main_grad`s of its `grad_data`."""
    with opened(tmp_path, model_config(), layout=LAYOUTS["sharded"], offload="idle") as host:
        step(host, 0)
        host.digest(Role.POLICY)
        (buffer, *_) = host._trainers[Role.POLICY]._ddp.buffers
        allocate([buffer.grad_data])
        for parameter in buffer.params:
            for view, whole in ((parameter, buffer.param_data), (parameter.main_grad, buffer.grad_data)):
                assert view.untyped_storage().data_ptr() == whole.data_ptr()
                assert view.data_ptr() == whole.data_ptr() + view.storage_offset() * whole.element_size()


def test_a_residence_moves_storages_and_not_tensors() -> None:
    whole = torch.arange(6.0)
    view, other = whole[2:], torch.ones(3)
    residence = OffloadableTensors(lambda: [whole, view, other])
    for _ in range(2):
        for _ in range(2):
            residence.sleep()
        assert [t.untyped_storage().nbytes() for t in (whole, view, other)] == [0, 0, 0]
        for _ in range(2):
            residence.wake()
        assert (view.tolist(), other.tolist()) == ([2, 3, 4, 5], [1, 1, 1])
        whole += 0
    view[0] = 7
    assert whole[2] == 7
    release([other])
    assert other.untyped_storage().nbytes() == 0
    allocate([other])
    assert other.fill_(2).tolist() == [2, 2, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_cpu_has_no_memory_of_its_own(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="offload = idle needs a GPU"),
        opened(tmp_path, model_config(), offload="idle"),
    ):
        pass
