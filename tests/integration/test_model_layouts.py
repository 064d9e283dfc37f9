"""Every parallel layout says and learns the same as one rank: data, tensor, sequence and pipeline parallelism, the
distributed optimizer, frozen blocks. Real processes over gloo, a tiny model, float32."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import torch.multiprocessing

from pipeline.workers.worker_process import PRELOADED
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.layouts import check_layout
from stages.models.protocol import MODEL_ROLES, CriticBatch, PolicyBatch, Rank, Role
from stages.models.spec import read_spec
from stages.ppo.config import KLConfig, PPOConfig
from stages.ppo.micro_batches import minibatches
from storage.records import Advantages, PolicyLogprobs, ReferenceLogprobs, Rollout, Values
from tests.support.models import ALL_MODELS, random_advantages, random_rollout

ROWS, SEQ, SEED = 8, 13, 3
TRAINED = (Role.POLICY, Role.CRITIC)


def model_config(frozen_blocks: int, *, portable: bool) -> ModelConfig:
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, micro_batch_rows=2)
    return ModelConfig(
        path="random:tiny",
        kernels="portable" if portable else "auto",
        frozen_blocks=frozen_blocks,
        critic_blocks=2,
        policy=optimizer,
        critic=optimizer,
    )


def inputs() -> tuple[Rollout, Advantages]:
    rng = np.random.default_rng(0)
    rollout = random_rollout(rng, ROWS, SEQ)
    mask = rollout.response_mask

    noise = np.where(mask, rng.normal(size=mask.shape), 0).astype(np.float32)
    rollout = dataclasses.replace(rollout, sampler_logprobs=noise - 5)
    return rollout, random_advantages(rng, mask)


def work(
    index: int, size: int, layout: LayoutConfig, frozen_blocks: int, directory: Path, *, portable: bool = False
) -> None:
    """One rank: all outputs, an update of both models, a save, a second update, and the same from the save again.
    Rank 0 leaves what it got in result.npz; every rank asserts what all ranks must see alike."""
    host = MegatronHost(
        model_config(frozen_blocks, portable=portable),
        SamplingConfig(suppress_token_ids=[7, 200], temperature=0.9),
        PPOConfig(entropy_coef=0.01),
        layout,
        ALL_MODELS,
        Rank(index, size, f"file://{directory}/rendezvous", 1),
        seed=SEED,
        total_steps=4,
    )
    rollout, advantages = inputs()
    policy, reference, values = host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)
    assert all((answer is not None) == (index == 0) for answer in (policy, reference, values))
    known = np.load(directory / "known.npz") if (directory / "known.npz").exists() else None
    if known is not None:  # every rank is given the whole answers, from the one-rank run
        policy_in = PolicyLogprobs(known["logprobs"], known["entropy"])
        reference_in = ReferenceLogprobs(known["reference"])
        values_in = Values(known["values"], known["bootstrap"])
    else:
        assert policy is not None
        assert reference is not None
        assert values is not None
        policy_in, reference_in, values_in = policy, reference, values

    def update(step: int) -> dict[str, float]:
        versions = np.where(rollout.response_mask, step, -1).astype(np.int32)
        fresh = dataclasses.replace(rollout, token_versions=versions)
        metrics = host.update_policy(step, PolicyBatch(fresh, advantages, policy_in, reference_in, 0.1))
        metrics |= host.update_critic(step, CriticBatch(fresh, advantages, values_in))
        assert metrics.pop("policy/peak_memory_bytes") > 1e8, "less than torch alone takes"
        assert metrics.pop("critic/peak_memory_bytes") > 1e8
        for role in TRAINED:
            host.mark_clean(role)
        return metrics

    start = host.digest(Role.POLICY)
    metrics = update(0)
    trained = host.trained_weights()
    after = host.values(rollout)
    if index == 0:
        assert policy is not None
        assert reference is not None
        assert values is not None
        assert trained is not None
        assert after is not None
        np.savez(
            directory / "result.npz",
            logprobs=policy.policy_logprobs,
            entropy=policy.entropy,
            reference=reference.ref_logprobs,
            values=values.values,
            bootstrap=values.bootstrap_values,
            trained_critic=after.values,
            start=start,
            **{f"metric:{name}": value for name, value in metrics.items()},
            **{f"weight:{name}": array for name, array in trained.items()},
        )
    for role in TRAINED:
        if index == 0:
            (directory / role.value).mkdir()
        torch.distributed.barrier()
        host.save(role, directory / role.value)()
    update(1)
    digests = [host.digest(role) for role in TRAINED]
    for role in TRAINED:
        host.load(role, directory / role.value)
    update(1)
    assert [host.digest(role) for role in TRAINED] == digests
    for role in TRAINED:
        host.load(role, None)
    assert host.digest(Role.POLICY) == start
    update(0)
    for role in TRAINED:
        assert host.version(role) == 1
    update(1)
    assert [host.digest(role) for role in TRAINED] == digests
    host.load(Role.POLICY, None)
    grouped(host, index, directory, PolicyBatch(rollout, advantages, policy_in, reference_in, 0.1))
    guarded(host, index, directory, PolicyBatch(rollout, advantages, policy_in, reference_in, 0.1))
    host.close()


def grouped(host: MegatronHost, index: int, directory: Path, batch: PolicyBatch) -> None:
    """An update without a critic's settings: a mean over rows, the KL in the loss, stale tokens, and rows in the middle
    that no loss counts, so that each data-parallel rank has another share of those that do. Rank 0 leaves what it got
    in grouped.npz."""
    mask = batch.advantages.loss_mask.copy()
    mask[1:4] = False
    advantages = dataclasses.replace(batch.advantages, loss_mask=mask)
    kl = KLConfig(where="loss", estimator="k3")
    ppo, host._ppo = host._ppo, PPOConfig(advantage="group", skip_equal_groups=True, aggregation="sequence", kl=kl)
    metrics = host.update_policy(0, dataclasses.replace(batch, advantages=advantages))
    host._ppo = ppo
    del metrics["policy/peak_memory_bytes"]
    host.mark_clean(Role.POLICY)
    trained = host.trained_weights()
    if index == 0:
        assert trained is not None
        np.savez(directory / "grouped.npz", **metrics, **{f"weight:{name}": array for name, array in trained.items()})
    host.load(Role.POLICY, None)


def guarded(host: MegatronHost, index: int, directory: Path, batch: PolicyBatch) -> None:
    """An update whose first minibatch has no token that counts, of whose second one row counts (on two data-parallel
    ranks one has none), and which a target KL ends after that. Rank 0 leaves what it got in guarded.npz."""
    first, second = minibatches(ROWS, 2, 2, SEED, 0)[0]
    mask = batch.advantages.loss_mask.copy()
    mask[[*first, *second[1:]]] = False
    host._ppo = dataclasses.replace(host._ppo, target_kl=1e-7)
    host.load(Role.POLICY, None)
    advantages = dataclasses.replace(batch.advantages, loss_mask=mask)
    metrics = host.update_policy(0, dataclasses.replace(batch, advantages=advantages))
    del metrics["policy/peak_memory_bytes"]
    host.mark_clean(Role.POLICY)
    trained = host.trained_weights()
    if index == 0:
        assert trained is not None
        np.savez(directory / "guarded.npz", **metrics, **{f"weight:{name}": array for name, array in trained.items()})


CASES = {
    "DP2, portable": (0, LayoutConfig()),
    "DP2, distributed optimizer, frozen blocks": (2, LayoutConfig(distributed_optimizer=True)),
    "TP2": (0, LayoutConfig(tensor=2, recompute="selective")),
    "TP2, frozen blocks, portable": (2, LayoutConfig(tensor=2, recompute="full")),
    "TP2, SP, portable": (0, LayoutConfig(tensor=2, sequence_parallel=True)),
    "TP2, SP, frozen blocks": (2, LayoutConfig(tensor=2, sequence_parallel=True)),
    "PP2": (0, LayoutConfig(pipeline=2)),
}


def work_all(index: int, root: Path) -> None:
    """One of two ranks: every layout in turn, since starting processes is what takes time."""
    for number, (name, (frozen_blocks, layout)) in enumerate(CASES.items()):
        work(index, 2, layout, frozen_blocks, root / str(number), portable="portable" in name)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """result.npz of every layout, and of one rank with 0 and with 2 frozen blocks."""
    root = tmp_path_factory.mktemp("layouts")
    found = {}
    for frozen_blocks in (0, 2):
        directory = root / f"one, {frozen_blocks}"
        directory.mkdir()
        work(0, 1, LayoutConfig(), frozen_blocks, directory)
        found[directory.name] = directory / "result.npz"
    for number, (name, (frozen_blocks, _)) in enumerate(CASES.items()):
        directory = root / str(number)
        directory.mkdir()
        (directory / "known.npz").write_bytes(found[f"one, {frozen_blocks}"].read_bytes())
        found[name] = directory / "result.npz"
    multiprocessing.set_forkserver_preload([*PRELOADED])
    torch.multiprocessing.start_processes(work_all, (root,), nprocs=2, start_method="forkserver")
    return found


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one(results: dict[str, Path], case: str) -> None:
    expected, found = np.load(results[f"one, {CASES[case][0]}"]), np.load(results[case])
    assert set(found.files) == set(expected.files)
    assert found["start"] == expected["start"]
    for name in set(found.files) - {"start"}:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_equal_one_where_rows_are_left_out(results: dict[str, Path], case: str) -> None:
    """Means over rows, of which the ranks have different numbers, and a KL that is weighted."""
    alone, here = (results[name].with_name("grouped.npz") for name in (f"one, {CASES[case][0]}", case))
    expected, found = np.load(alone), np.load(here)
    assert set(found.files) == set(expected.files)
    assert found["policy/kl_ref"] > 0
    for name in found.files:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_leave_out_the_same_minibatches_as_one(results: dict[str, Path], case: str) -> None:
    alone, here = (results[name].with_name("guarded.npz") for name in (f"one, {CASES[case][0]}", case))
    expected, found = np.load(alone), np.load(here)
    counts = ("optimizer_steps", "empty_steps", "stopped_steps", "skipped_steps")
    assert [int(found[f"policy/{name}"]) for name in counts] == [1, 2, 1, 0]
    assert set(found.files) == set(expected.files)
    for name in found.files:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-5, rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("layout", "model", "ranks", "message"),
    [
        (LayoutConfig(tensor=2), {}, 3, r"workers = 3: must be a multiple of layout.tensor x layout.pipeline = 2"),
        (
            LayoutConfig(tensor=8),
            {},
            8,
            r"layout.tensor = 8: the (model|critic|reference) has 4 query heads: at most 4",
        ),
        (LayoutConfig(sequence_parallel=True), {}, 2, "layout.sequence_parallel = True: needs layout.tensor of 2"),
        (LayoutConfig(pipeline=2), {"frozen_blocks": 2}, 2, "model.frozen_blocks = 2: .* needs layout.pipeline=1"),
        (LayoutConfig(pipeline=2), {"critic_blocks": 3}, 2, "layout.pipeline = 2: .*model.critic_blocks = 3"),
        (LayoutConfig(), {"frozen_blocks": 4}, 1, r"model.frozen_blocks = 4: .* at most 3"),
        (LayoutConfig(), {"frozen_blocks": 2, "critic_blocks": 3}, 1, r"model.critic_blocks = 3: must be from 1 to 2"),
    ],
)
def test_a_layout_that_cannot_work_is_refused_by_its_key(
    layout: LayoutConfig, model: dict[str, int], ranks: int, message: str
) -> None:
    specs = dict.fromkeys(MODEL_ROLES, read_spec("random:tiny"))
    with pytest.raises(ValueError, match=message):
        check_layout(ModelConfig(path="random:tiny", **model), specs, layout, ranks)
