"""Updates whose exchange overlaps with their passes (`gradient_buffers`) equal updates that exchange afterwards. The
gangs here make gradient buckets of a few thousand numbers, so that a tiny model has several. Among two data-parallel
ranks a sum has two terms, whose order does not matter: all bits are the same. One sum does have another order: under
the distributed optimizer a rank takes the norm of its parts of the buckets. So those cases do not clip."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup as BucketGroup
from megatron.core.models.gpt import GPTModel
from torch.nn import Parameter

from stages.models import gradient_buffers
from stages.models import trainer as trainer_module
from stages.models.build import Blueprint
from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.protocol import Rank, Role
from stages.models.trainer import Trainer
from stages.ppo.config import PPOConfig
from tests.support.collectives import run_ranks
from tests.support.families import random_model
from tests.support.models import ALL_MODELS, random_advantages, random_rollout, update_both

pytestmark = pytest.mark.processes

ROWS, SEQ, SEED, BUCKET = 12, 13, 3, 6000
TRAINED = (Role.POLICY, Role.CRITIC)
ZERO1 = {"distributed_optimizer": True}


@dataclass(frozen=True)
class Case:
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    tied: bool = True


CASES: dict[int, dict[str, Case]] = {
    2: {
        "DP2": Case(),
        "DP2, untied, kept forward passes": Case(model={"reuse_forward": ["policy", "critic"]}, tied=False),
        "DP2, ZeRO-1": Case(ZERO1),
        "DP2, ZeRO-1, untied, bfloat16": Case(ZERO1, {"dtype": "bfloat16"}, tied=False),
        "DP2, frozen blocks": Case(model={"frozen_blocks": 1}),
        "DP2, ZeRO-1, adapters": Case(ZERO1, {"lora": LoraConfig(rank=3, alpha=6.0)}),
    },
    4: {
        "PP2 x DP2": Case({"pipeline": 2}),
        "PP2 x DP2, ZeRO-1, untied, recomputed": Case({"pipeline": 2, "recompute": "full"} | ZERO1, tied=False),
    },
}
"""By the number of ranks."""
ALL = {name: case for cases in CASES.values() for name, case in cases.items()}


@dataclass
class Watch:
    """The exchanges of a rank's updates, in order: (what happened, number of the bucket group)."""

    events: list[tuple[str, int]] = field(default_factory=list)
    gradients_left: int | None = None
    """Number of gradients of a last micro-batch that become ready before its backward pass fails; None: all."""

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record when each group's gradients are sent and awaited, its weights are sent, and a step is made."""
        numbers: dict[int, int] = {}
        in_hook = False
        originals = {name: getattr(BucketGroup, name) for name in ("register_grad_ready", *SENDS, "finish_grad_sync")}
        step = Trainer._step

        def number(group: BucketGroup) -> int:
            return numbers.setdefault(id(group), len(numbers))

        def register(group: BucketGroup, *args: Any) -> None:
            nonlocal in_hook
            if self.gradients_left is not None and group.is_last_microbatch:
                self.gradients_left -= 1
                if self.gradients_left < 0:
                    raise ZeroDivisionError
            in_hook = True
            originals["register_grad_ready"](group, *args)
            in_hook = False

        def start(name: str, group: BucketGroup, *args: Any, **options: Any) -> None:
            if name == "start_grad_sync" and group.grad_reduce_handle is None:
                self.events.append(("sent by hook" if in_hook else "sent at the end", number(group)))
            elif name == "start_param_sync":
                self.events.append(("gathered at the end" if options.get("force_sync") else "gathered", number(group)))
            originals[name](group, *args, **options)

        def finish(group: BucketGroup, **options: Any) -> None:
            originals["finish_grad_sync"](group, **options)
            assert group.grad_reduce_handle is None
            self.events.append(("received", number(group)))

        def made(trainer: Trainer) -> tuple[float, bool]:
            for group in trainer._ddp.bucket_groups:
                self.events.append(("stepped", number(group)))
            return step(trainer)

        with (
            patch.object(BucketGroup, "register_grad_ready", register),
            patch.object(BucketGroup, "start_grad_sync", lambda *args, **o: start("start_grad_sync", *args, **o)),
            patch.object(BucketGroup, "start_param_sync", lambda *args, **o: start("start_param_sync", *args, **o)),
            patch.object(BucketGroup, "finish_grad_sync", finish),
            patch.object(Trainer, "_step", made),
        ):
            yield


SENDS = ("start_grad_sync", "start_param_sync")


def opened(case: Case, root: Path, rendezvous: Path, index: int, size: int) -> MegatronHost:
    clips = 0.0 if case.layout.get("distributed_optimizer") else 0.05
    optimizer = OptimizerConfig(lr=1e-3, weight_decay=0.1, micro_batch_rows=2, max_grad_norm=clips)
    path = str(root / ("tied" if case.tied else "untied"))
    model = ModelConfig(path=path, kernels="portable", policy=optimizer, critic=optimizer, **case.model)
    ppo, layout = PPOConfig(epochs=1, minibatches=2, entropy_coef=0.01), LayoutConfig(**case.layout)
    rank = Rank(index, size, f"file://{rendezvous}", 1)
    return MegatronHost(model, SamplingConfig(), ppo, layout, ALL_MODELS, rank, seed=SEED, total_steps=9)


def updates(host: MegatronHost, steps: range) -> list[dict[str, Any]]:
    """Make PPO steps on the rows of each, and return their metrics and digests."""
    found = []
    for step in steps:
        rng = np.random.default_rng(step)
        rollout = random_rollout(rng, ROWS, SEQ, step)
        advantages = random_advantages(rng, rollout.response_mask)
        answers: list[Any] = [host.policy_logprobs(rollout), host.ref_logprobs(rollout), host.values(rollout)]
        torch.distributed.broadcast_object_list(answers, src=0)
        metrics = update_both(host, step, rollout, advantages, tuple(answers))
        found.append(metrics | {f"digest of {role}": host.digest(role) for role in TRAINED})
    return found


def end_early(host: MegatronHost, watch: Watch, step: int) -> None:
    """Fail on every rank at the last gradient of an update's first minibatch."""
    ddp = host._trainers[Role.POLICY]._ddp
    watch.gradients_left = len(ddp.params_with_grad) - 1
    with pytest.raises(ZeroDivisionError):
        updates(host, range(step, step + 1))
    watch.gradients_left = None
    sent = sum(group.grad_reduce_handle is not None for group in ddp.bucket_groups)
    assert sent == (len(ddp.bucket_groups) - 1 if step else 0)


def learn(case: Case, root: Path, directory: Path, index: int, size: int, *, overlapping: bool) -> None:
    """Make three PPO steps. If the exchange overlaps, save after the second, and make the last again from there."""
    watch = Watch()
    options = partial(DistributedDataParallelConfig, bucket_size=BUCKET)
    with (
        patch.object(gradient_buffers, "DistributedDataParallelConfig", options),
        patch.object(gradient_buffers, "overlaps", lambda _: overlapping),
        watch.watching(),
    ):
        host = opened(case, root, directory / f"rendezvous{overlapping}", index, size)
        fails = overlapping and "pipeline" not in case.layout  # the stages of a pipeline would wait for one another
        if fails:
            end_early(host, watch, 0)
            host.load(Role.POLICY, None)
            watch.events.clear()
        found = updates(host, range(2))
        for role in TRAINED if overlapping else ():
            path = directory / "saved" / role
            if index == 0:
                path.mkdir(parents=True)
            torch.distributed.barrier()
            host.save(role, path)()
        found += updates(host, range(2, 3))
        groups = {role: trainer._ddp.bucket_groups for role, trainer in host._trainers.items()}
        events = [*watch.events]
        if fails:
            end_early(host, watch, 3)
        if overlapping:
            for role in TRAINED:
                host.load(role, directory / "saved" / role)
            assert updates(host, range(2, 3)) == found[2:], "goes on bit for bit"
        host.close()
    torch.save(
        (found, events, {role: len(of_role) for role, of_role in groups.items()}),
        directory / f"{overlapping}{index}.pt",
    )


def learn_with_an_idle_parameter(root: Path, directory: Path, index: int) -> None:
    """Train a model with a parameter that no loss depends on: both ranks notice, neither waits for ever."""
    in_buffers = gradient_buffers.in_buffers

    def with_another(model: GPTModel, blueprint: Blueprint, *, in_fp32: bool) -> Any:
        model.output_layer.register_parameter("idle", Parameter(torch.zeros(3)))
        return in_buffers(model, blueprint, in_fp32=in_fp32)

    with patch.object(trainer_module, "in_buffers", with_another):
        host = opened(Case(), root, directory / "rendezvous", index, 2)
        with pytest.raises(AssertionError):
            updates(host, range(1))
        host.close()


def learn_all(index: int, size: int, root: Path) -> None:
    """Run every case in turn as one of `size` ranks: starting processes is what takes time."""
    for number, case in enumerate(CASES[size].values()):
        for overlapping in (False, True):
            learn(case, root, root / f"{size}-{number}", index, size, overlapping=overlapping)
    if size == 2:
        learn_with_an_idle_parameter(root, root / "idle", index)
    (root / f"{size}-{index}-ended").touch()


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("overlap")
    for tied in (True, False):
        model = random_model("Llama 3.1", num_hidden_layers=4, tie_word_embeddings=tied)
        model.save_pretrained(root / ("tied" if tied else "untied"))
    (root / "idle").mkdir()
    for size, cases in CASES.items():
        for number in range(len(cases)):
            (root / f"{size}-{number}").mkdir()
        run_ranks(learn_all, size, size, root)
    return root


def of_ranks(root: Path, name: str, overlapping: bool) -> list[tuple[list[dict[str, Any]], list[tuple[str, int]], Any]]:
    """Return (metrics and digests of each step, events, number of bucket groups by role) of each rank."""
    [(size, number)] = [(size, [*cases].index(name)) for size, cases in CASES.items() if name in cases]
    directory = root / f"{size}-{number}"
    return [torch.load(directory / f"{overlapping}{index}.pt", weights_only=False) for index in range(size)]


@pytest.mark.parametrize("name", ALL)
def test_updates_that_overlap_have_the_bits_of_those_that_do_not(root: Path, name: str) -> None:
    exchanged_after, overlapping = (of_ranks(root, name, flag)[0][0] for flag in (False, True))
    for ours, theirs in zip(overlapping, exchanged_after, strict=True):
        assert ours.keys() == theirs.keys()
        for key, value in ours.items():
            if "grad_norm" in key and "ZeRO-1" in name:
                assert value == pytest.approx(theirs[key], rel=1e-6)
            else:
                assert value == theirs[key], key


@pytest.mark.parametrize("name", ALL)
def test_hooks_send_every_bucket_before_the_step(root: Path, name: str) -> None:
    """In the first minibatch of each role Megatron counts the gradients, and sends at the end."""
    for _, events, groups in of_ranks(root, name, overlapping=True):
        of_group: dict[int, list[str]] = {}
        for event, number in events:
            of_group.setdefault(number, []).append(event)
        assert len(of_group) == sum(groups.values())
        gathers = "ZeRO-1" in name
        for found in of_group.values():
            steps = [event for event in found if "gathered" not in event]
            assert steps == [*ONE_STEP["end"], *ONE_STEP["hook"] * (len(steps) // 3 - 1)]
            assert len(steps) // 3 == 3 * 2
            assert (found.count("gathered"), found.count("gathered at the end")) == ((3, 3) if gathers else (0, 0))


ONE_STEP = {end: (how, "received", "stepped") for end, how in (("end", "sent at the end"), ("hook", "sent by hook"))}


def test_a_parameter_without_a_gradient_ends_the_update_on_every_rank(root: Path) -> None:
    assert {file.name for file in root.glob("2-*-ended")} == {"2-0-ended", "2-1-ended"}


@pytest.mark.parametrize("name", ALL)
def test_a_tiny_model_has_several_buckets(root: Path, name: str) -> None:
    [(_, _, groups), *_] = of_ranks(root, name, overlapping=True)
    assert min(groups.values()) > 2 or "adapters" in name
    assert {of_role for _, _, after in of_ranks(root, name, overlapping=False) for of_role in after.values()} <= {1, 2}
