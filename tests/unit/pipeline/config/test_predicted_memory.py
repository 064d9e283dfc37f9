"""Predicted memory of a run, and refusals because of it. stages/models/test_memory.py tests the bytes of models."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config import memory
from pipeline.config.devices import place_all_here
from pipeline.config.fitting import devices_memory, fitting_cache_mb, fitting_layouts, layout_text, memory_problems
from pipeline.config.hardware import GIB
from pipeline.config.loading import load_config
from pipeline.config.memory import (
    CUDA_PROCESS_BYTES,
    DRIVER_BYTES,
    PROCESS_BYTES,
    MemoryLimits,
    PlannedModel,
    PlannedRun,
    board_bytes,
    host_bytes,
    hosts_memory,
    largest_micro_batch,
    memory_limits,
    workers_memory,
)
from pipeline.config.preflight import preflight
from pipeline.errors import ConfigError
from stages.models.config import OptimizerConfig
from stages.models.memory import BLOCK_BYTES
from stages.models.spec import RANDOM_8B, read_spec
from stages.ppo.micro_batches import micro_batches
from tests.support.configs import arguments, write_config

LARGE = read_spec(RANDOM_8B)
PARAMETERS = 8_030_261_248
GANGS = "placement.gangs={generate: {workers: 2}, all: {workers: 8, layout: {tensor: 2}}, score: {}}"
ROLES = "placement.roles={generate: generate, score: score, reference: all, policy: all, critic: all}"
UNLIMITED = MemoryLimits(math.inf, math.inf, 0)


def planned(folder: Path, *changes: str, on_gpus: bool = False) -> PlannedRun:
    write_config(folder)
    file, *own = arguments(folder)
    settings = (GANGS, ROLES, "model.dtype=bfloat16", "engine.dtype=bfloat16", "rollout={rows: 64, shards: 2}")
    config = load_config([file], [*own, *settings, *changes])
    return PlannedRun(config, PlannedModel("llama", LARGE, 2 * PARAMETERS, "bfloat16"), on_gpus)


def items(run: PlannedRun, gang: str, index: int = 0) -> dict[str, Any]:
    return dict(next(worker.items for worker in workers_memory(run) if worker.worker == (gang, index)))


def test_a_large_model_by_hand(tmp_path: Path) -> None:
    """Policy, critic (a head in place of the output layer) and reference in bfloat16, on two tensor-parallel ranks."""
    run = planned(tmp_path)
    norms = 65 * 4096  # whole on both ranks
    policy = (PARAMETERS - norms) // 2 + norms
    critic = policy - 128256 * 4096 // 2
    found = items(run, "all")
    assert found["parameters"] == 2 * (2 * policy + critic) + 4 * 4097
    assert found["gradients"] == 4 * (policy + critic + 4097)
    assert found["float32 masters"] == 4 * (policy + critic)
    assert found["moments"] == 8 * (policy + critic + 4097)
    assert found["publication on the host"] == 2 * BLOCK_BYTES
    assert "export" not in found, "it is written from the published version"
    assert found["copies for checkpoints"] == -(-(14 * (policy + critic) + 12 * 4097) // 4), "of 4 data-parallel ranks"
    assert items(run, "generate")["engine weights"] == 2 * PARAMETERS
    assert items(run, "score") == {"process": PROCESS_BYTES}
    assert board_bytes(run) == 3 * 2 * PARAMETERS  # eta = 1


def test_the_host_has_everything_or_what_is_beside_the_gpus(tmp_path: Path) -> None:
    """The model's files are one mapping, which all processes share."""
    run = planned(tmp_path)
    workers = workers_memory(run)
    once = 2 * PARAMETERS + board_bytes(run) + DRIVER_BYTES
    assert host_bytes(run, workers) == sum(w.total for w in workers) + once
    beside = planned(tmp_path, on_gpus=True)
    found = items(beside, "all")
    own = 11 * PROCESS_BYTES + 10 * CUDA_PROCESS_BYTES + 8 * (BLOCK_BYTES + found["copies for checkpoints"])
    assert host_bytes(beside, workers_memory(beside)) == own + once


def test_each_host_has_its_workers_the_files_that_they_read_and_a_board(tmp_path: Path) -> None:
    run = planned(tmp_path)
    workers = workers_memory(run)
    hosts = place_all_here(run.config.gangs()) | {("generate", 1): "other", ("score", 0): "third"}
    first, other, third = hosts_memory(run, workers, hosts)
    (replica,) = (worker.total for worker in workers if worker.worker == ("generate", 1))
    files = {"model files": 2 * PARAMETERS, "published weights": board_bytes(run)}
    assert dict(other.items) == {"generate": replica} | files
    assert dict(third.items) == {"score": PROCESS_BYTES}
    assert first.items["driver"] == DRIVER_BYTES
    assert (first.shared, other.shared, third.shared) == (board_bytes(run), board_bytes(run), 0)


def test_shared_memory_that_is_too_small_is_refused(tmp_path: Path) -> None:
    run = planned(tmp_path)
    assert not [*memory_problems(run, MemoryLimits(math.inf, math.inf, 0, board_bytes(run)))]
    (problem,) = memory_problems(run, MemoryLimits(math.inf, math.inf, 0, board_bytes(run) - 1))
    assert problem.key == "cluster.weights_dir"


def test_a_local_run_is_held_to_this_hosts_dev_shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless its weights are published elsewhere."""
    run = planned(tmp_path)
    monkeypatch.setattr(memory.shutil, "disk_usage", lambda path: SimpleNamespace(total=board_bytes(run) - 1))
    monkeypatch.setattr(memory, "SHARED_MEMORY", tmp_path)
    limits = replace(memory_limits(run.config), host=math.inf)
    assert [problem.key for problem in memory_problems(run, limits)] == ["cluster.weights_dir"]
    on_disk = planned(tmp_path, "cluster.weights_dir=/var/tmp")
    assert not [*memory_problems(on_disk, limits)]


def test_a_worker_takes_the_most_that_is_there_at_once(tmp_path: Path) -> None:
    """While there are activations, no version is published."""
    run = planned(tmp_path)
    (rank,) = (worker for worker in workers_memory(run) if worker.worker == ("all", 0))
    found = rank.items
    assert {"activations", "logits", "publication on the host"} <= found.keys()
    assert rank.total == sum(number for name, number in found.items() if name != "publication on the host")
    assert board_bytes(planned(tmp_path, "export.every=1")) == board_bytes(run) + 2 * PARAMETERS, "a version to export"


def test_too_little_memory_is_refused_with_layouts_that_fit(tmp_path: Path) -> None:
    """The distributed optimizer divides masters and moments by the four data-parallel ranks."""
    run = planned(tmp_path)
    assert not [*memory_problems(run, UNLIMITED)]
    sharded = planned(tmp_path, "placement.gangs.all.layout.distributed_optimizer=true")
    limits = MemoryLimits(host_bytes(sharded, workers_memory(sharded)) + GIB, math.inf, 0)
    (problem,) = memory_problems(run, limits)
    assert problem.key == "placement.gangs.all.layout"
    layout = "{tensor: 2, pipeline: 1, sequence_parallel: false, distributed_optimizer: false, recompute: none"
    assert problem.given == f"{layout}, recompute_modules: []}}"
    gang = next(gang for gang in run.config.gangs() if gang.name == "all")
    fitting = fitting_layouts(run, limits, gang)
    assert sharded.config.placement.gangs["all"].layout in fitting
    assert run.config.placement.gangs["all"].layout not in fitting
    assert all(8 % (layout.tensor * layout.pipeline) == 0 for layout in fitting)


def test_a_layout_that_fits_can_be_given_as_it_is_written(tmp_path: Path) -> None:
    """The text has all settings, so that it replaces every setting of an earlier layout."""
    before = "placement.gangs.all.layout={sequence_parallel: true, recompute: selective, recompute_modules: [mlp]}"
    large = "model.policy.micro_batch_tokens=32768"
    limits = MemoryLimits(math.inf, 80 * GIB, 10)
    run = planned(tmp_path, before, large, on_gpus=True)
    gang = next(gang for gang in run.config.gangs() if gang.name == "all")
    fitting = fitting_layouts(run, limits, gang)
    assert {layout.recompute for layout in fitting} >= {"selective", "full"}
    for layout in fitting:
        again = planned(tmp_path, before, large, f"placement.gangs.all.layout={layout_text(layout)}", on_gpus=True)
        assert again.config.placement.gangs["all"].layout == layout
        assert not [*memory_problems(again, limits)]


def test_only_settings_that_can_still_save_memory_are_named(tmp_path: Path) -> None:
    """The weights of an engine that is too large are divided by its ranks; a run in bfloat16 is in it already."""
    ranks, replicas = memory_problems(planned(tmp_path, on_gpus=True), MemoryLimits(math.inf, GIB, 10))
    assert "engine.tensor_parallel" in replicas.need
    assert "micro_batch_tokens" not in replicas.need
    assert "micro_batch_tokens" in ranks.need
    assert "bfloat16" not in replicas.need + ranks.need
    single = planned(tmp_path, "model.dtype=float32", on_gpus=True)
    ranks, _ = memory_problems(single, MemoryLimits(math.inf, GIB, 10))
    assert "model.dtype=bfloat16" in ranks.need


def test_where_no_layout_fits_it_is_said(tmp_path: Path) -> None:
    (problem,) = memory_problems(planned(tmp_path), MemoryLimits(GIB, math.inf, 0))
    assert (problem.key, problem.given) == ("placement.gangs.all.workers", 8)


def test_a_gpu_that_is_too_small_is_refused(tmp_path: Path) -> None:
    """80 GiB each, ten of them: a rank of two tensor-parallel ones needs more; over eight ranks it fits."""
    run = planned(tmp_path, on_gpus=True)
    (problem,) = memory_problems(run, MemoryLimits(math.inf, 80 * GIB, 10))
    assert problem.key == "placement.gangs.all.layout"


@pytest.mark.parametrize("tokens", [5, 70, 100, 4096])
@pytest.mark.parametrize("most_rows", [None, 3])
def test_no_micro_batch_is_larger_than_the_largest(tmp_path: Path, tokens: int, most_rows: int | None) -> None:
    """Rows of at most 8 + 24 tokens, of any lengths: no cut outdoes it, and some come near."""
    config = planned(tmp_path, "prompts.max_tokens=8", "sampling.max_new_tokens=24").config
    optimizer = OptimizerConfig(micro_batch_tokens=tokens, micro_batch_rows=most_rows)
    largest = largest_micro_batch(optimizer, config)
    rng = np.random.default_rng(0)
    most = [0, 0]
    for trial in range(60):
        shortest = (1, 8)[trial % 2]
        prompts, new = rng.integers(1, shortest + 1, 64), rng.integers([1, 23][trial % 2], 25, 64)
        for rows in micro_batches(np.arange(64), prompts + new, max_tokens=tokens, max_rows=most_rows):
            most = [max(most[0], (prompts + new)[rows].sum()), max(most[1], new[rows].sum())]
    assert 0.75 * largest.tokens <= most[0] <= largest.tokens
    assert 0.65 * largest.sampled <= most[1] <= largest.sampled


def test_idle_models_are_in_the_hosts_memory(tmp_path: Path) -> None:
    stay = planned(tmp_path, on_gpus=True)
    gangs = GANGS.replace("{tensor: 2}}", "{tensor: 2}, offload: idle}")
    leave = planned(tmp_path, gangs, on_gpus=True)
    before, after = (next(w for w in workers_memory(run) if w.worker == ("all", 1)) for run in (stay, leave))
    assert after.on_device < before.on_device
    assert after.on_host - before.on_host == after.items["offloaded"]
    limits = MemoryLimits(math.inf, 80 * GIB, 10)
    assert list(memory_problems(stay, limits))
    assert not list(memory_problems(leave, limits))


def test_gangs_that_share_a_gpu_share_its_memory(tmp_path: Path) -> None:
    run = planned(tmp_path, "placement.oversubscribe=true", on_gpus=True)
    apart, shared = (
        max(
            device.num_bytes
            for device in devices_memory(run, workers_memory(run), place_all_here(run.config.gangs()), number)
        )
        for number in (10, 8)
    )
    assert shared > apart


def test_of_gangs_that_take_turns_the_largest_counts(tmp_path: Path) -> None:
    """On each GPU the largest gang counts; sleeping ones are in the host's memory, except for what is allocated
    anew."""
    device_sharing = "placement.device_sharing=[[all,generate]]"
    together = planned(tmp_path, "placement.oversubscribe=true", on_gpus=True)
    in_turn = planned(tmp_path, device_sharing, on_gpus=True)
    workers = workers_memory(in_turn)
    rank, replica = (next(w for w in workers if w.worker == (name, 0)) for name in ("all", "generate"))
    on_device = rank.on_device + replica.remaining
    assert rank.on_device - rank.remaining > replica.on_device - replica.remaining
    assert 0 < replica.remaining == replica.items["CUDA context"]
    assert [*memory_problems(in_turn, MemoryLimits(math.inf, on_device - 1, 8))]
    assert not list(memory_problems(in_turn, MemoryLimits(math.inf, on_device, 8)))
    offloaded = sum(worker.offloaded_bytes for worker in workers if worker.worker[0] in ("all", "generate"))
    assert host_bytes(in_turn, workers) - host_bytes(together, workers_memory(together)) == offloaded > 0
    for worker in workers:
        assert worker.offloaded_bytes <= worker.on_device


VLLM = ("engine.kind=vllm", "engine.python=x", "model.path=x", "engine.max_rows=2")


def test_vllm_takes_its_whole_cache_in_a_process_more(tmp_path: Path) -> None:
    """A row has a block of 16 tokens at most; the embedded engine takes what its rows can fill of the budget."""
    ours, theirs = (items(planned(tmp_path, "engine.max_rows=2", *own), "generate") for own in ((), VLLM))
    assert ours["KV cache"] == 2 * 16 * 2 * 32 * 8 * 128 * 2
    assert theirs["KV cache"] == 512 << 20
    assert "engine's processes" not in ours
    assert theirs["engine's processes"] > PROCESS_BYTES
    assert theirs["process"] == ours["process"]
    assert theirs["engine weights"] == ours["engine weights"]
    assert ours["refit"] == 2 * PARAMETERS, "packed beside the old ones"
    assert theirs["refit"] == 2 * 128256 * 4096, "in place, one after another"


def test_a_process_of_an_engines_own_is_in_the_hosts_memory(tmp_path: Path) -> None:
    ours, theirs = (planned(tmp_path, *own, on_gpus=True) for own in ((), VLLM))
    one = items(theirs, "generate")["engine's processes"]
    assert one > PROCESS_BYTES + CUDA_PROCESS_BYTES
    assert host_bytes(theirs, workers_memory(theirs)) - host_bytes(ours, workers_memory(ours)) == 2 * one
    wide = planned(tmp_path, *VLLM, "engine.tensor_parallel=2", on_gpus=True)
    assert items(wide, "generate")["engine's processes"] == 3 * one, "a server, and its ranks"


def test_tensorrt_llm_takes_its_whole_cache_and_a_bucket(tmp_path: Path) -> None:
    own = ("engine.kind=tensorrt_llm", "engine.python=x", "model.path=x", "sampling.min_new_tokens=0")
    found = items(planned(tmp_path, *own, on_gpus=True), "generate")
    assert (found["KV cache"], found["refit"]) == (512 << 20, 1024 << 20)


def test_a_cache_that_is_taken_whole_and_does_not_fit_is_refused_by_its_key(tmp_path: Path) -> None:
    """The embedded engine would take only what it needs."""
    large = "engine.kv_budget_mb=3000000"
    run, usual = planned(tmp_path, *VLLM, large), planned(tmp_path, *VLLM)
    limits = MemoryLimits(host_bytes(usual, workers_memory(usual)) + 20 * GIB, math.inf, 0)
    (problem,) = memory_problems(run, limits)
    most = fitting_cache_mb(run, limits)
    assert most > 10 * 1024, "of 20 GiB, for each of two replicas"
    assert (problem.key, problem.given) == ("engine.kv_budget_mb", 3000000)
    assert problem.need.endswith(f"vllm takes all of its cache at its start: at most {most} fits")
    assert not [*memory_problems(planned(tmp_path, *VLLM, f"engine.kv_budget_mb={most}"), limits)]
    assert [*memory_problems(planned(tmp_path, *VLLM, f"engine.kv_budget_mb={most + 1}"), limits)]
    ours = planned(tmp_path, large)
    assert not [*memory_problems(ours, MemoryLimits(host_bytes(ours, workers_memory(ours)), math.inf, 0))]
    assert items(ours, "generate")["KV cache"] < 1 << 30
    (problem,) = memory_problems(run, MemoryLimits(GIB, math.inf, 0))
    assert problem.key != "engine.kv_budget_mb", "no cache fits"


def test_preflight_refuses_by_the_limit_that_is_given(tmp_path: Path) -> None:
    write_config(tmp_path)
    file, *own = arguments(tmp_path)
    with pytest.raises(ConfigError, match=r"this host would need .* and has 0\.50 \(cluster\.host_memory_gb\)"):
        preflight(load_config([file], [*own, "cluster.host_memory_gb=0.5"]))
    config = load_config([file], [*own, "cluster.host_memory_gb=4", "cluster.device_memory_gb=2"])
    limits = memory_limits(config)
    assert (limits.host, limits.device) == (4 * GIB, 2 * GIB)
    found = memory_limits(load_config([file], own))
    assert 0 < found.host < 1 << 60
