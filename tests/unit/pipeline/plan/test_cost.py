"""Seconds of nodes: by hand, and what physics demands of them."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

import pipeline.plan.links
from pipeline.config.hardware import read_cluster
from pipeline.config.memory import workers_memory
from pipeline.plan.calibration import ELEMENTS, STAGE_KIND, StageSpeed, typical
from pipeline.plan.cost import CALLS, FIXED, Costs, costs_of
from pipeline.plan.training import ARITHMETIC, BUBBLE, DATA, OPTIMIZER, TENSOR, WEIGHTS
from stages.models.flops import forward_flops, update_flops
from stages.models.layouts import adapter_parameters
from stages.models.memory import DTYPE_BYTES, published_tensors
from stages.models.protocol import Role
from tests.support.plans import PEAKS, costs, nodes_by_stage, planned, seconds

TINY = ("placement.gangs.train.threads=1",)
ON_GPUS = ("one_gpu", "8xh100_8b", "slurm_70b")
CLUSTERS = {"one_gpu": "1x1xH100-80", "8xh100_8b": "1x8xH100-80", "slurm_70b": "16x8xH100-80"}


@pytest.mark.parametrize("name", ["tiny", *ON_GPUS])
def test_every_node_of_a_shipped_config_has_a_cost(name: str) -> None:
    """The parts sum to the seconds, and no node is faster than its roofline."""
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


@pytest.mark.parametrize("name", ["tiny", "tiny, frozen", *ON_GPUS])
def test_nodes_that_are_computed_together_take_as_long_as_each_alone(name: str) -> None:
    """Short and long rows: memory or arithmetic limits them, one or several micro-batches, one or several threads."""
    file, _, more = name.partition(", ")
    changes = ["model.frozen_blocks=2", "placement.gangs.train.threads=2"] if more else []
    cluster = CLUSTERS.get(file, "1xcpu")
    found = costs(file, cluster, *changes, calibration=typical("any", on_gpus=cluster in CLUSTERS.values()))
    count = found.run.config.rows_per_shard
    shards = [[1] * count, [7 * n + 1 for n in range(count)], [4096] * count]
    for stage, node in nodes_by_stage(found).items():
        if stage not in ("generate", "evaluate", "canary", "canary_logprob"):
            alone = [found.seconds(node, lengths) for lengths in shards]
            assert found.seconds_of_nodes(stage, np.array(shards)) == pytest.approx(alone, rel=1e-12), stage


def only_products(found: Costs, **peaks: float) -> Costs:
    """Operations on single numbers take no time, and training has these peaks."""
    gang = replace(found.models["train"], element_flops=math.inf, **{"small_flops": math.inf, **peaks})
    return replace(found, models={"train": gang})


def test_an_update_on_one_rank_is_its_operations_at_the_peak() -> None:
    """Arithmetic limits it if the memory is fast: 16 rows of 16 + 8 tokens, each trained on once."""
    found = costs("tiny", "1xcpu", *TINY, "ppo.epochs=1")
    fast = only_products(found, flops=1e9, bytes_per_s=1e15)
    work = fast.work(nodes_by_stage(fast)["update_policy"], [8] * 16)
    lengths = [24] * 16
    flops = update_flops(found.run.spec, 4, np.array(lengths), outputs=256, num_outputs=16 * 8, output_trained=True)
    assert work.parts[ARITHMETIC] == pytest.approx(flops / 1e9)
    assert work.calls == 2 * 4, "two minibatches of one micro-batch of 8 rows, through four blocks"


def test_a_forward_pass_is_a_third_of_an_update() -> None:
    found = only_products(costs("tiny", "1xcpu", *TINY, "ppo={epochs: 1, minibatches: 1}"))
    nodes = nodes_by_stage(found)
    forward, update = (found.work(nodes[stage], [8] * 16).parts[ARITHMETIC] for stage in ("logprob", "update_policy"))
    assert update == pytest.approx(3 * forward)


def test_a_kept_forward_pass_is_not_computed_again() -> None:
    """Two epochs: of their six passes' worth of operations the first epoch's forward is saved."""
    settings = ("ppo={epochs: 2, minibatches: 1, proximal: recompute}", "rollout.shards=1")
    plain = only_products(costs("tiny", "1xcpu", *TINY, *settings))
    kept = only_products(costs("tiny", "1xcpu", *TINY, *settings, "model.reuse_forward=[policy]"))
    whole, less = (of.work(nodes_by_stage(of)["update_policy"], [8] * 16).parts[ARITHMETIC] for of in (plain, kept))
    assert less == pytest.approx(5 / 6 * whole)


def test_frozen_blocks_are_computed_by_the_first_stage_that_needs_them() -> None:
    """Two of four blocks are frozen. The reference computes all four; the others compute the upper two."""
    found = costs("tiny", "1xcpu", *TINY, "model.frozen_blocks=2")
    nodes = nodes_by_stage(found)
    first, then = (found.work(nodes[stage], [8] * 8).parts[ARITHMETIC] for stage in ("reference", "logprob"))
    whole = costs("tiny", "1xcpu", *TINY)
    assert first == pytest.approx(whole.work(nodes["reference"], [8] * 8).parts[ARITHMETIC])
    assert then < 0.6 * first


def test_operations_on_single_numbers_take_a_cpu_s_float32_time() -> None:
    """8 rows of 16 + 8 tokens through 4 blocks of hidden size 64, 176 in the MLP, 4 heads, and 256 outputs: a forward
    pass has 4 x (192 x (6 x 64 + 2 x 176) + 8 x 4 x 8 x 24^2) + 10 x 256 x 64 numbers, of 50 operations each."""
    found = costs("tiny", "1xcpu", *TINY)
    gang = replace(found.models["train"], flops=1e15, bytes_per_s=1e15, small_flops=math.inf, element_flops=1e9)
    work = replace(found, models={"train": gang}).work(nodes_by_stage(found)["reference"], [8] * 8)
    assert work.parts[ELEMENTS] == pytest.approx(50 * 1_318_912 / 1e9)


def test_few_cores_reach_a_part_of_the_node_s_bandwidth() -> None:
    node = replace(read_cluster("1xcpu").hardware, memory_bytes_per_s=100.0, core_bytes_per_s=30.0)
    assert [node.host_bytes_per_s(cores) for cores in (1, 2, 4)] == [30, 60, 100]
    assert replace(node, core_bytes_per_s=None).host_bytes_per_s(1) == 100


def test_frozen_blocks_are_called_for_each_width_of_a_micro_batch_s_rows() -> None:
    """Two of four blocks are frozen. A micro-batch of one row has one width; 8 rows that are spread
    evenly over 8 widths have 8 (1 - (7/8)^8) = 5.25 different ones on average."""
    for rows, widths in ((1, 1.0), (8, 8 * (1 - (7 / 8) ** 8))):
        found = costs("tiny", "1xcpu", *TINY, "model.frozen_blocks=2", f"model.policy.micro_batch_rows={rows}")
        nodes = nodes_by_stage(found)
        calls = {stage: found.work(nodes[stage], [8] * 8).calls for stage in ("reference", "logprob")}
        assert calls == pytest.approx({"reference": (2 + 2 * widths) * 8 / rows, "logprob": 2 * 8 / rows})


def test_threads_and_16_bits_gain_nothing_in_small_micro_batches() -> None:
    """A row of n tokens has 64 n hidden numbers. Below 32,768 of them a micro-batch has one thread and the rate of
    float32, above 4 * 32,768 four threads."""
    small, large = ["sampling.max_new_tokens=8"], ["sampling.max_new_tokens=600"]
    for sizes, length, gain in ((small, 8, 1.0), (large, 600, 4.0)):
        one, four = (costs("tiny", "1xcpu", *sizes, f"placement.gangs.train.threads={threads}") for threads in (1, 4))
        before, after = (of.work(nodes_by_stage(of)["logprob"], [length] * 8).parts[ARITHMETIC] for of in (one, four))
        assert before == pytest.approx(gain * after)
    half = costs("tiny", "1xcpu", *TINY, *small, "model.dtype=bfloat16")
    plain = costs("tiny", "1xcpu", *TINY, *small)
    passes = [of.work(nodes_by_stage(of)["logprob"], [8] * 8).parts[ARITHMETIC] for of in (half, plain)]
    assert passes[0] == pytest.approx(passes[1])


@pytest.mark.parametrize("name", ["tiny", *ON_GPUS])
def test_hardware_that_is_twice_as_fast_takes_half_the_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rate is doubled and every latency halved. So each term is operations over a rate, bytes over a bandwidth,
    or a number of latencies."""
    monkeypatch.setattr(pipeline.plan.links, "LAUNCH_S", 0.0)
    cluster = read_cluster(CLUSTERS.get(name, "1xcpu"))
    of = cluster.hardware
    rates = ("bf16_flops", "fp32_flops", "memory_bytes_per_s", "nvlink_bytes_per_s", "pcie_bytes_per_s")
    faster = {rate: 2 * getattr(of, rate) for rate in (*rates, "link_bytes_per_s")}
    faster |= {"core_bytes_per_s": of.core_bytes_per_s and 2 * of.core_bytes_per_s}
    faster |= {latency: getattr(of, latency) / 2 for latency in ("nvlink_latency_s", "link_latency_s")}
    run = planned(name, on_gpus=cluster.gpus > 0)
    slow, fast = (costs_of(run, replace(cluster, hardware=hardware), PEAKS) for hardware in (of, replace(of, **faster)))
    for stage, node in nodes_by_stage(slow).items():
        lengths = [] if stage == "publish" else [1 + row % 8 for row in range(run.config.rows_per_shard)]
        assert fast.seconds(node, lengths) == pytest.approx(slow.seconds(node, lengths) / 2), stage
    assert fast.refit_s() == pytest.approx(slow.refit_s() / 2)


@pytest.mark.parametrize("name", ON_GPUS)
def test_the_ranks_of_a_gang_hold_its_models_weights(name: str) -> None:
    """The memory of all ranks together is at least that of the weights of one model."""
    run = planned(name, on_gpus=True)
    weights = DTYPE_BYTES[run.config.model.dtype] * sum(published_tensors(run.spec, run.config.model).values())
    of_gang: dict[str, int] = {}
    for worker in workers_memory(run):
        of_gang[worker.worker[0]] = of_gang.get(worker.worker[0], 0) + worker.on_device
    for gang in run.config.gangs():
        if gang.roles & {Role.POLICY, Role.REFERENCE, Role.GENERATE}:
            assert of_gang[gang.name] >= weights, gang.name


def test_adapters_save_the_gradients_of_frozen_weights() -> None:
    full, lora = (costs("tiny", "1xcpu", *TINY, *changes) for changes in ((), ("model.lora.rank=2",)))
    assert seconds(lora, "update_policy", [8] * 16) < 0.9 * seconds(full, "update_policy", [8] * 16)


def train(pipeline: int, workers: int, **layout: str) -> tuple[str, ...]:
    """The gang of the 70B policy and its reference, tensor-parallel over 8 ranks, in rows of one micro-batch each."""
    given = "".join(f", {key}: {value}" for key, value in ({"recompute": "none"} | layout).items())
    return (
        f"placement.gangs.train={{workers: {workers}, layout: {{tensor: 8, pipeline: {pipeline}{given}}}}}",
        "placement.roles.reference=train",
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


def test_other_optimizers_by_hand() -> None:
    """Llama-3.2-1B in bfloat16, 4 optimizer steps. AdamW moves 38 bytes a parameter: 12 of gradients, 8 of masters, 16
    of moments, 2 of weights. Muon has one moment for matrices, and five iterations on each."""
    found = {
        kind: costs("one_gpu", "1x1xH100-80", f"model.policy.optimizer={kind}")
        for kind in ("adamw", "adafactor", "muon")
    }
    taken = {
        kind: of.work(nodes_by_stage(of)["update_policy"], [64] * 256).parts[OPTIMIZER] for kind, of in found.items()
    }
    assert taken["adafactor"] == pytest.approx(22 / 38 * taken["adamw"], rel=0.01)
    h, kv, f, vocabulary = 2048, 512, 8192, 128_256
    matrices = 16 * (2 * h * h + 2 * kv * h + 3 * f * h)
    moved = (38 * vocabulary * h + 30 * matrices) / (38 * (vocabulary * h + matrices)) * taken["adamw"]
    sides = 2 * [(h, h)] + 2 * [(kv, h)] + 3 * [(h, f)]
    operations = 4 * 16 * 5 * sum(4 * m * m * n + 2 * m**3 for m, n in sides)
    assert taken["muon"] - moved == pytest.approx(operations / found["muon"].models["train"].flops, rel=0.01)


@pytest.mark.parametrize("stage", ["generate", "reference", "logprob", "value"])
@pytest.mark.parametrize("lengths", [[16] * 64, [1024] + [4] * 63, [700] * 3], ids=["short", "one long", "few"])
def test_more_data_parallel_ranks_never_cost_a_forward_pass_more(stage: str, lengths: list[int]) -> None:
    times = []
    for workers in (32, 64, 128, 256):
        gangs = [f"placement.gangs.{gang}.workers={workers}" for gang in ("train", "critic")]
        times.append(seconds(costs("slurm_70b", "64x8xH100-80", *gangs), stage, lengths))
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize(
    ("layout", "forward", "update"),
    [
        ({"sequence_parallel": "false"}, 4, 8),
        ({"sequence_parallel": "false", "recompute": "selective", "recompute_modules": "[mlp]"}, 4, 10),
        ({"sequence_parallel": "false", "recompute": "full"}, 4, 12),
        ({"sequence_parallel": "true"}, 4, 10),
        ({"sequence_parallel": "true", "recompute": "selective", "recompute_modules": "[mlp]"}, 4, 12),
        ({"sequence_parallel": "true", "recompute": "full"}, 4, 14),
    ],
    ids=["no recomputation", "MLPs again", "all again", "SP", "SP, MLPs again", "SP, all again"],
)
def test_the_exchanges_of_tensor_parallelism_by_hand(layout: dict[str, str], forward: int, update: int) -> None:
    """64 rows of 512 + 256 tokens in 80 blocks of hidden size 8192, over NVLink's 450 GB/s. In each block an all-reduce
    is two halves: 2 all-reduces forward and 2 backward; with sequence parallelism the backward pass of each of the two
    linears that gather their input gathers it once more."""
    found = costs("slurm_70b", "16x8xH100-80", *train(1, 8, **layout))
    nodes, rows = nodes_by_stage(found), 64
    tokens = found.prompt_tokens + 256
    half = 6.6e-6 + 7 * (0.47e-6 + tokens * 8192 * 2 / 8 / 450e9)
    if layout["sequence_parallel"] == "false":
        half = (6.6e-6 + 14 * (0.47e-6 + tokens * 8192 * 2 / 8 / 450e9)) / 2
    of_forward, of_update = (
        found.work(nodes[stage], [256] * rows).links[TENSOR] for stage in ("reference", "update_policy")
    )
    assert of_forward == pytest.approx(rows * 80 * forward * half)
    assert of_update == pytest.approx(rows * 80 * update * half)


def test_data_parallel_exchanges_count_where_no_pass_hides_them() -> None:
    """Two data-parallel ranks of 8 tensor-parallel ones, on two nodes of 50 GB/s a GPU; 2 optimizer steps. Gradients in
    float32 stick out of one micro-batch's backward pass, weights of its forward pass; the last weights are hidden by
    nothing. With endless micro-batches one bucket of 40 million parameters sticks out."""
    settings = (*train(1, 16, distributed_optimizer="true"), "ppo={epochs: 1, minibatches: 2, proximal: recompute}")
    found = costs("slurm_70b", "16x8xH100-80", *settings)
    gang, node = found.models["train"], nodes_by_stage(found)["update_policy"]
    numbers = gang.trained[Role.POLICY]
    gradients, weights = (6.6e-6 + 2.7e-6 + number * numbers / 2 / 50e9 for number in (4, 2))
    operations = forward_flops(
        found.run.spec, 80, found.prompt_tokens + 256, (found.prompt_tokens + 256) ** 2, outputs=128256, num_outputs=256
    )
    forward = max(operations / 8 / gang.flops, 2 * gang.numbers[Role.POLICY] / gang.bytes_per_s)
    backward = max(2 * operations / 8 / gang.flops, (2 + 8) * numbers / gang.bytes_per_s)
    assert forward < weights
    expected = 2 * (gradients - backward) + (weights - forward) + weights
    assert found.work(node, [256] * 64).links[DATA] == pytest.approx(expected)
    slow = replace(found, models=found.models | {"train": replace(gang, flops=1e9)})
    buckets = math.ceil(numbers / 40e6)
    expected = (2 * gradients + weights) / buckets + weights
    assert slow.work(node, [256] * 64).links[DATA] == pytest.approx(expected)


def test_on_cpus_data_parallel_exchanges_wait_for_the_passes() -> None:
    """Two ranks: an all-reduce of all gradients in each of two optimizer steps."""
    found = costs("tiny", "2xcpu", "placement.gangs.train={workers: 2, threads: 1}", "ppo.epochs=1")
    numbers = found.models["train"].trained[Role.POLICY]
    work = found.work(nodes_by_stage(found)["update_policy"], [8] * 16)
    assert work.links[DATA] == pytest.approx(2 * (2 * 25e-6 + 4 * numbers / 12.5e9))


def test_a_short_update_moves_weights_twice_and_gradients_in_float32() -> None:
    """Endless arithmetic: of 64 micro-batches each reads the weights forward and backward (2 bytes each), and reads and
    writes the gradients (4 bytes): 12 bytes a parameter."""
    found = costs("slurm_70b", "16x8xH100-80", *train(1, 8))
    gang = replace(found.models["train"], flops=1e30)
    work = replace(found, models={"train": gang}).work(nodes_by_stage(found)["update_policy"], [256] * 64)
    assert work.parts[WEIGHTS] == pytest.approx(64 * 12 * gang.numbers[Role.POLICY] / 3.35e12)


def test_adapters_move_no_gradients_of_frozen_weights() -> None:
    found = costs("slurm_70b", "16x8xH100-80", *train(1, 8), "model.lora.rank=16")
    gang = replace(found.models["train"], flops=1e30)
    work = replace(found, models={"train": gang}).work(nodes_by_stage(found)["update_policy"], [256] * 64)
    moved = 4 * gang.numbers[Role.POLICY] + 8 * gang.trained[Role.POLICY]
    assert work.parts[WEIGHTS] == pytest.approx(64 * moved / 3.35e12)


def test_the_operations_of_adapters_are_those_of_the_metrics() -> None:
    """The output layer is frozen, and has no gradient of its weights."""
    found = costs("tiny", "1xcpu", *TINY, "ppo.epochs=1", "model.lora.rank=2")
    fast = only_products(found, flops=1e9, bytes_per_s=1e15)
    adapters = adapter_parameters(found.run.spec, found.run.config.model.lora, tensor=1)
    flops = update_flops(
        found.run.spec,
        4,
        np.array([24] * 16),
        outputs=256,
        num_outputs=16 * 8,
        output_trained=False,
        adapters=adapters,
    )
    assert fast.work(nodes_by_stage(fast)["update_policy"], [8] * 16).parts[ARITHMETIC] == pytest.approx(flops / 1e9)


@pytest.mark.parametrize(
    ("layout", "workers", "away"),
    [("tensor: 4, pipeline: 2", 8, 0), ("tensor: 4, pipeline: 2", 16, 0.5), ("tensor: 4, pipeline: 1", 16, 0)],
    ids=["on a node", "the second stage on another node", "copies on another node"],
)
def test_parts_on_other_nodes_are_sent_to_the_board(layout: str, workers: int, away: float) -> None:
    """All stages of the first copy write: 8 ranks, or 4. A stage's copies come before the next stage."""
    gang = f"placement.gangs.train={{workers: {workers}, layout: {{{layout}}}}}"
    found = costs("slurm_70b", "16x8xH100-80", gang)
    links = found.work(nodes_by_stage(found)["publish"], []).links
    num_bytes = 2 * sum(published_tensors(found.run.spec, found.run.config.model).values())
    expected = {"sending": pytest.approx(6.6e-6 + 2.7e-6 + away * num_bytes / 50e9)} if away else {}
    assert links == expected


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
    speed = StageSpeed(efficiency=0.25, element_efficiency=0.5, call_s=0.5, node_s=3.0)
    peaks, slower = costs("tiny", "1xcpu"), costs("tiny", "1xcpu", calibration=replace(PEAKS, update=speed))
    node, lengths = nodes_by_stage(peaks)["update_policy"], [8] * 16
    work, parts = peaks.work(node, lengths), slower.parts(node, lengths)
    fixed = 0.5 * work.calls + 3
    assert math.fsum(parts.values()) == pytest.approx(4 * work.roofline - 2 * work.parts[ELEMENTS] + fixed)
    assert (parts[CALLS], parts[FIXED]) == (0.5 * work.calls, 3.0)
