"""The trace of a gang on GPUs that are not there: its memory against the prediction, its collectives, its operations.

A process that traces can use no other device afterwards, so every test runs it in one of its own.
"""

from __future__ import annotations

import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch

from pipeline.cli.trace import group_repeats, predicted_bytes
from stages.models.config import LayoutConfig, ModelConfig, OptimizerConfig, SamplingConfig
from stages.models.fake_gpu import DEVICE, PINNED, Collective
from stages.models.memory import DTYPE_BYTES
from stages.models.protocol import MODEL_ROLES, Role
from stages.models.spec import read_spec, tensor_shapes
from stages.models.trace import TracedGang, TracedRank, trace_stage
from stages.ppo.config import PPOConfig


def gang(path: str, ranks: int, *, tokens: int, new: int, dtype: Any = "bfloat16", **layout: Any) -> TracedGang:
    optimizer = OptimizerConfig(micro_batch_tokens=tokens)
    model = ModelConfig(path=path, dtype=dtype, policy=optimizer, critic=optimizer)
    return TracedGang(
        model, SamplingConfig(max_new_tokens=new), PPOConfig(), LayoutConfig(**layout), MODEL_ROLES, ranks, new
    )


def with_small_state(given: TracedGang) -> TracedGang:
    optimizer = replace(given.model.policy, gradients_dtype="bfloat16", moments_dtype="bfloat16")
    return replace(given, model=replace(given.model, policy=optimizer, critic=optimizer))


def traced(given: TracedGang) -> list[TracedRank]:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
        return [process.submit(trace_stage, given, s).result() for s in range(given.layout.pipeline)]


@pytest.fixture(scope="module")
def tiny() -> tuple[TracedGang, list[TracedRank]]:
    """TP2 x PP2 x DP2 with everything that shards."""
    given = gang(
        "random:tiny", 8, tokens=512, new=63, tensor=2, pipeline=2, sequence_parallel=True, distributed_optimizer=True
    )
    return given, traced(given)


def test_state_and_published_bytes_are_exact(tiny: tuple[TracedGang, list[TracedRank]]) -> None:
    _, ranks = tiny
    spec = read_spec("random:tiny")
    parameters = sum(torch.Size(shape).numel() for shape in tensor_shapes(spec).values())
    published = [rank.published_bytes for rank in ranks]
    assert sum(published) == DTYPE_BYTES["bfloat16"] * parameters
    assert min(published) > 0
    for rank in ranks:
        saved = {phase.name: phase.peak[PINNED] for phase in rank.phases if phase.peak.get(PINNED)}
        assert set(saved) == {"checkpoint policy", "checkpoint critic"}


def test_the_stages_send_each_other_what_the_other_expects(tiny: tuple[TracedGang, list[TracedRank]]) -> None:
    _, (first, last) = tiny
    for phase, other in zip(first.phases, last.phases, strict=True):
        assert phase.name == other.name
        for one, two in ((phase, other), (other, phase)):
            sent = [c.shapes for c in one.collectives if c.operation == "send" and c.group == "pipeline"]
            received = [c.shapes for c in two.collectives if c.operation == "recv" and c.group == "pipeline"]
            assert sent == received


def test_an_update_calls_no_operation_that_torch_refuses_in_deterministic_runs(
    tiny: tuple[TracedGang, list[TracedRank]],
) -> None:
    """torch's documentation lists them: some have a deterministic form, the others raise an error."""
    text = str(torch.use_deterministic_algorithms.__doc__)
    _, *parts = text.split("The following normally-nondeterministic operations will ")
    deterministic, refused = (
        set(re.findall(r"\* +:\w+:`~?torch\.(?:Tensor\.|nn\.functional\.)?(\w+)", part)) for part in parts
    )
    assert {"scatter_add_", "index_add"} <= deterministic
    assert {"put_", "bincount"} <= refused
    called = {name.removeprefix("aten::").partition(".")[0] for rank in tiny[1] for name in rank.operations}
    assert {"mm", "_fused_adamw_"} <= called
    assert called & refused <= {"cumsum"}, "of integers, on the host"
    assert called & deterministic <= {"gather", "index_put", "scatter_add_", "index_select", "bmm"}


@pytest.mark.parametrize("deterministic", [True, False])
def test_rows_of_all_lengths_share_a_call_of_attention_unless_bits_must_repeat(deterministic: bool) -> None:
    given = gang("random:tiny", 1, tokens=512, new=63)
    given = replace(given, roles=frozenset({Role.REFERENCE}), model=replace(given.model, deterministic=deterministic))
    called = traced(given)[0].operations
    assert ("torch_attn::_varlen_attn" in called) is not deterministic
    assert ("aten::_scaled_dot_product_flash_attention" in called) is deterministic


MANY = {"tokens": 8192, "new": 1024, "sequence_parallel": True, "distributed_optimizer": True}


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(gang("random:tiny", 1, tokens=2048, new=127, dtype="float32"), id="float32, shared keys"),
        pytest.param(
            gang("random:tiny", 1, tokens=2048, new=127, dtype="float32", recompute="selective"),
            id="float32, shared keys, recomputed attention",
        ),
        pytest.param(gang("random:8b-shape", 4, tensor=4, **MANY), id="8B", marks=pytest.mark.full),
        pytest.param(
            gang("random:70b-shape", 64, tensor=8, pipeline=4, recompute="full", **MANY),
            id="70B",
            marks=pytest.mark.full,
        ),
    ],
)
def test_the_prediction_is_within_a_tenth_of_the_trace(given: TracedGang) -> None:
    """In float32 attention of heads that share keys keeps a matrix of scores. A publication takes at most 1 GB beside
    the models' state, which is all that a checkpoint has on the device."""
    for rank in traced(given):
        on_device = predicted_bytes(given, rank.stage)[DEVICE]
        assert on_device == pytest.approx(rank.peak(DEVICE), rel=0.1), f"stage {rank.stage}"
        peaks = {phase.name: phase.peak.get(DEVICE, 0) for phase in rank.phases}
        assert peaks["publish"] - peaks["checkpoint policy"] <= 10**9, f"stage {rank.stage}"


def test_state_in_bfloat16_saves_the_bytes_that_are_predicted() -> None:
    """Everything else of an update takes the same memory, so the two peaks differ by the state alone."""
    large = gang("random:tiny", 1, tokens=2048, new=127)
    small = with_small_state(large)
    (before,), (after,) = traced(large), traced(small)
    predicted = predicted_bytes(large, 0)[DEVICE] - predicted_bytes(small, 0)[DEVICE]
    assert predicted > 0
    assert before.peak(DEVICE) - after.peak(DEVICE) == pytest.approx(predicted, rel=0.01)


def test_repeated_collectives_are_given_once() -> None:
    a, b, c = (Collective(name, "tensor", 2, ((1,),), 4) for name in "abc")
    assert list(group_repeats([c, a, b, a, b, a, b, c, c])) == [(1, [c]), (3, [a, b]), (2, [c])]
    assert list(group_repeats([])) == []
