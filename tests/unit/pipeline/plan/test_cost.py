"""Seconds of nodes: by hand, and what physics demands of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from pipeline.config.memory import workers_memory
from pipeline.plan.calibration import STAGE_KIND, StageSpeed, typical
from pipeline.plan.cost import CALLS, FIXED
from pipeline.plan.training import ARITHMETIC, BUBBLE, DATA, OPTIMIZER, TENSOR, WEIGHTS
from stages.models.flops import update_flops
from stages.models.memory import DTYPE_BYTES
from tests.support.plans import PEAKS, costs, nodes_by_stage, seconds

TINY = ("placement.gangs.train.threads=1",)
ON_GPUS = ("one_gpu", "8xh100_8b", "slurm_70b")
CLUSTERS = {"one_gpu": "1x1xH100-80", "8xh100_8b": "1x8xH100-80", "slurm_70b": "16x8xH100-80"}


@pytest.mark.parametrize("name", ["tiny", *ON_GPUS])
def test_every_node_of_a_shipped_config_has_a_cost(name: str) -> None:
    """What it consists of sums to the seconds, and the roofline is the least that they can be."""
    cluster = CLUSTERS.get(name, "1xcpu")
    found = costs(name, cluster, calibration=typical("any", on_gpus=cluster in CLUSTERS.values()))
    rows, most = found.run.config.rows_per_shard, found.run.config.sampling.max_new_tokens
    for stage, node in nodes_by_stage(found, step=0).items():
        lengths = [] if stage == "publish" else [1 + row % most for row in range(rows)]
        parts, work = found.parts(node, lengths), found.work(node, lengths)
        assert all(part > 0 and math.isfinite(part) for part in parts.values()), (stage, parts)
        assert found.seconds(node, lengths) == pytest.approx(math.fsum(parts.values()))
        assert found.seconds(node, lengths) > work.roofline >= 0, stage
        assert found.speed_of(stage) == getattr(found.calibration, STAGE_KIND[stage])
    assert found.refit_s() > 0


def test_an_update_on_one_rank_is_its_operations_at_the_peak() -> None:
    """Arithmetic limits it if the memory is fast: 16 rows of 16 + 8 tokens, each trained on once."""
    found = costs("tiny", "1xcpu", *TINY, "ppo.epochs=1")
    gang = found.models["train"]
    fast = replace(found, models={"train": replace(gang, flops=1e9, bytes_per_s=1e15)})
    work = fast.work(nodes_by_stage(fast)["update_policy"], [8] * 16)
    lengths = [24] * 16
    flops = update_flops(found.run.spec, 4, np.array(lengths), outputs=256, num_outputs=16 * 8, output_trained=True)
    assert work.parts[ARITHMETIC] == pytest.approx(flops / 1e9)
    assert work.calls == 2, "two minibatches of one micro-batch of 8 rows"


def test_a_forward_pass_is_a_third_of_an_update() -> None:
    found = costs("tiny", "1xcpu", *TINY, "ppo={epochs: 1, minibatches: 1}")
    nodes = nodes_by_stage(found)
    forward, update = (found.work(nodes[stage], [8] * 16).parts[ARITHMETIC] for stage in ("logprob", "update_policy"))
    assert update == pytest.approx(3 * forward)


def test_a_kept_forward_pass_is_not_computed_again() -> None:
    """Two epochs: of their six passes' worth of operations the first epoch's forward is saved."""
    settings = ("ppo={epochs: 2, minibatches: 1, proximal: recompute}", "rollout.shards=1")
    plain = costs("tiny", "1xcpu", *TINY, *settings)
    kept = costs("tiny", "1xcpu", *TINY, *settings, "model.policy.reuse_forward=true")
    whole, less = (of.work(nodes_by_stage(of)["update_policy"], [8] * 16).parts[ARITHMETIC] for of in (plain, kept))
    assert less == pytest.approx(5 / 6 * whole)


def test_frozen_blocks_are_computed_by_the_first_stage_that_needs_them() -> None:
    """Of four blocks two are frozen: the reference computes all, the others only those above."""
    found = costs("tiny", "1xcpu", *TINY, "model.frozen_blocks=2")
    nodes = nodes_by_stage(found)
    first, then = (found.work(nodes[stage], [8] * 8).parts[ARITHMETIC] for stage in ("reference", "logprob"))
    whole = costs("tiny", "1xcpu", *TINY)
    assert first == pytest.approx(whole.work(nodes["reference"], [8] * 8).parts[ARITHMETIC])
    assert then < 0.6 * first


def test_adapters_save_the_gradients_of_frozen_weights() -> None:
    full, lora = (costs("tiny", "1xcpu", *TINY, *changes) for changes in ((), ("model.lora.rank=2",)))
    assert seconds(lora, "update_policy", [8] * 16) < 0.9 * seconds(full, "update_policy", [8] * 16)


def train(pipeline: int, workers: int, **layout: str) -> tuple[str, ...]:
    """The 70B policy's gang, tensor-parallel over 8 ranks, in rows of one micro-batch each."""
    given = "".join(f", {key}: {value}" for key, value in ({"recompute": "none"} | layout).items())
    return (
        f"placement.gangs.train={{workers: {workers}, layout: {{tensor: 8, pipeline: {pipeline}{given}}}}}",
        "model.policy.micro_batch_rows=1",
        "ppo.minibatches=1",
        "rollout={rows: 64, shards: 4, responses_per_prompt: 1}",
    )


def test_the_bubble_is_the_stages_that_wait_over_the_micro_batches() -> None:
    """1F1B: (p - 1) / m of the time of the work itself; 64 rows on one data-parallel rank, then on two."""
    for workers, micro_batches in ((32, 64), (64, 32)):
        found = costs("slurm_70b", "16x8xH100-80", *train(4, workers))
        parts = found.work(nodes_by_stage(found)["update_policy"], [256] * 64).parts
        assert parts[BUBBLE] == pytest.approx(3 / micro_batches * (parts.get(ARITHMETIC, 0) + parts.get(WEIGHTS, 0)))


def test_full_recomputation_is_a_fourth_forward_pass() -> None:
    once, again = (
        costs("slurm_70b", "16x8xH100-80", *train(4, 32, recompute=kind), "sampling.max_new_tokens=4096")
        for kind in ("none", "full")
    )
    of_once, of_again = (
        of.work(nodes_by_stage(of)["update_policy"], [3000] * 64).parts[ARITHMETIC] for of in (once, again)
    )
    assert of_again == pytest.approx(4 / 3 * of_once)


def test_zero_1_divides_the_optimizer_and_sends_less_than_twice() -> None:
    """Eight data-parallel ranks: gradients are reduce-scattered in 4 bytes, weights gathered in 2, against 4 and 4."""
    plain, zero = (
        costs("slurm_70b", "32x8xH100-80", *train(2, 128, distributed_optimizer=kind)) for kind in ("false", "true")
    )
    of_plain, of_zero = (of.work(nodes_by_stage(of)["update_policy"], [64] * 64) for of in (plain, zero))
    assert of_zero.parts[OPTIMIZER] < 0.5 * of_plain.parts[OPTIMIZER]
    assert of_zero.links[DATA] == pytest.approx(0.75 * of_plain.links[DATA], rel=0.01)


@pytest.mark.parametrize("stage", ["generate", "reference", "logprob", "value"])
@pytest.mark.parametrize("lengths", [[16] * 64, [1024] + [4] * 63, [700] * 3], ids=["short", "one long", "few"])
def test_more_data_parallel_ranks_never_cost_a_forward_pass_more(stage: str, lengths: list[int]) -> None:
    times = []
    for workers in (32, 64, 128, 256):
        gangs = [f"placement.gangs.{gang}.workers={workers}" for gang in ("train", "critic")]
        times.append(seconds(costs("slurm_70b", "64x8xH100-80", *gangs), stage, lengths))
    assert times == sorted(times, reverse=True)


def test_tensor_parallelism_costs_collectives() -> None:
    found = costs("slurm_70b", "16x8xH100-80")
    assert found.work(nodes_by_stage(found)["logprob"], [64] * 64).links[TENSOR] > 0


@pytest.mark.parametrize("name", ON_GPUS)
def test_a_decoding_pass_reads_all_weights(name: str) -> None:
    """So a response of n tokens takes at least n times the weights over the bandwidth of a replica's GPUs."""
    found = costs(name, CLUSTERS[name])
    config, spec = found.run.config, found.run.spec
    hidden = spec.vocab_size * spec.hidden_size
    numbers = spec.num_layers * spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    least = 50 * DTYPE_BYTES[config.engine.dtype] * (numbers + hidden) / config.replica_ranks / 3.35e12
    assert seconds(found, "generate", [50]) >= least
    workers = [worker for worker in workers_memory(found.run) if "engine weights" in worker.items]
    assert workers
    assert all(worker.on_device >= DTYPE_BYTES[config.engine.dtype] * numbers for worker in workers)


def test_a_speed_divides_the_roofline_and_adds_to_it() -> None:
    speed = StageSpeed(efficiency=0.25, call_s=0.5, node_s=3.0)
    peaks, slower = costs("tiny", "1xcpu"), costs("tiny", "1xcpu", calibration=replace(PEAKS, update=speed))
    node, lengths = nodes_by_stage(peaks)["update_policy"], [8] * 16
    work, parts = peaks.work(node, lengths), slower.parts(node, lengths)
    assert math.fsum(parts.values()) == pytest.approx(4 * work.roofline + 0.5 * work.calls + 3)
    assert (parts[CALLS], parts[FIXED]) == (0.5 * work.calls, 3.0)


def test_longer_responses_take_longer() -> None:
    found = costs("slurm_70b", "16x8xH100-80")
    for stage in ("generate", "reference", "value", "update_policy"):
        assert seconds(found, stage, [100] * 64) < seconds(found, stage, [200] * 64)
