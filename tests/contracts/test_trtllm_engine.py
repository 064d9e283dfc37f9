"""The adapter of TensorRT-LLM, against its recorded interface (tests/support/trtllm_stand_in); and against the real
one, which it has never met, where STAGELINE_TRTLLM_PYTHON names the Python of an environment that has it:

    make test-trtllm      or: STAGELINE_TRTLLM_PYTHON=PYTHON python -m pytest tests/contracts/test_trtllm_engine.py

The first tests share one engine: they are the smoke test. The class at the end is the whole contract, as far as the
engine says that it goes, with an engine for each test: an hour or more.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from stages.engines.build import build_engine
from stages.engines.capabilities import tensorrt_llm_capabilities
from stages.engines.config import EngineConfig, TensorrtLlmConfig
from stages.engines.protocol import NO_VERSION, EngineLost, GenerationEngine, RequestError, WeightsError
from stages.engines.remote.build import build_tensorrt_llm
from stages.engines.remote.client import RemoteEngine
from stages.engines.remote.serving.trtllm_api import buckets
from tests.contracts.engine_contract import (
    EOS,
    MAX_SEQ,
    assert_same_tokens,
    contract_of,
    make_requests,
    oracle_logprobs,
    random_llama,
    trained_tensors,
)
from tests.support.engines import by_row

STAND_IN = Path(__file__).resolve().parents[1] / "support/trtllm_stand_in"
PYTHON = os.environ.get("STAGELINE_TRTLLM_PYTHON")
HEAD_DIM = 64
"""Of those that TensorRT-LLM's attention knows, the smallest."""
needs_trtllm = pytest.mark.skipif(PYTHON is None, reason="STAGELINE_TRTLLM_PYTHON names no environment")


def real(path: Path, slots: int = 4) -> GenerationEngine:
    config = EngineConfig(kind="tensorrt_llm", python=PYTHON, slots=slots, kv_budget_mb=256)
    return build_engine(str(path), config, max_seq=MAX_SEQ, threads=1)


def stand_in(path: Path, **settings: object) -> RemoteEngine:
    own = TensorrtLlmConfig(cache=str(path.parent / "compiled"), **settings)  # type: ignore[arg-type]
    config = EngineConfig(kind="tensorrt_llm", python=sys.executable, slots=4, kv_budget_mb=64, tensorrt_llm=own)
    engine = build_tensorrt_llm(
        str(path), config, max_seq=MAX_SEQ, threads=1, modules=STAND_IN, adapter="trtllm_on_cpu:OnCpu"
    )
    return cast(RemoteEngine, engine)


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return random_llama(0, True, HEAD_DIM)


@pytest.fixture(scope="module")
def path(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trtllm") / "llama"
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module", params=["stand-in", pytest.param("real", marks=needs_trtllm)])
def engine(request: pytest.FixtureRequest, path: Path) -> Iterator[GenerationEngine]:
    with closing(stand_in(path, bucket_mb=1) if request.param == "stand-in" else real(path)) as engine:
        yield engine


def assert_of_the_model(engine: GenerationEngine, model: LlamaForCausalLM, temperature: float = 1.0) -> None:
    requests = make_requests(5, version=engine.version, temperature=temperature)
    for row, completion in by_row(engine.generate(requests)).items():
        expected = oracle_logprobs(model, requests[row], completion.tokens)
        chosen = expected[range(len(completion.tokens)), completion.tokens.tolist()]
        np.testing.assert_allclose(completion.logprobs, chosen.numpy(), atol=1e-3)
        ended = len(completion.tokens) < 16
        assert (completion.tokens[-1] == EOS) == (ended or EOS in completion.tokens)
        if temperature == 0:
            assert completion.tokens.tolist() == expected.argmax(-1).tolist()


def test_logprobs_are_those_of_the_drawn_tokens(engine: GenerationEngine, model: LlamaForCausalLM) -> None:
    """Wherever a step's mapping has them; greedy too."""
    assert_of_the_model(engine, model)
    assert_of_the_model(engine, model, temperature=0.0)


def test_a_row_repeats_in_its_engine(engine: GenerationEngine) -> None:
    requests = make_requests(6, version=engine.version, temperature=1.0)
    first = by_row(engine.generate(requests))
    assert_same_tokens(by_row(engine.generate(requests[::-1])), first, atol=1e-3)
    assert len({tuple(row.tokens.tolist()) for row in first.values()}) > 3


def test_what_its_logprobs_do_not_know_is_refused_by_the_row(engine: GenerationEngine) -> None:
    for sampling, message in (
        ({"temperature": 0.7}, "row 0 is drawn at temperature 0.7"),
        ({"temperature": 1.0, "suppress_token_ids": [5]}, "row 0 has tokens that are not allowed"),
        ({"temperature": 1.0, "min_new_tokens": 3}, "row 0 has tokens that are not allowed"),
    ):
        with pytest.raises(RequestError, match=message):
            engine.generate(make_requests(1, version=engine.version, **sampling))


def test_a_refit_by_buckets_is_the_new_model(engine: GenerationEngine, model: LlamaForCausalLM) -> None:
    bad = trained_tensors(model)
    bad["model.norm.weight"][0] = torch.nan
    with pytest.raises(WeightsError, match=r"model\.norm\.weight"):
        engine.load_weights(3, bad)
    assert_of_the_model(engine, model)
    other = random_llama(1, True, HEAD_DIM)
    engine.load_weights(4, trained_tensors(other))
    assert_of_the_model(engine, other)
    engine.load_weights(5, trained_tensors(model))
    assert_of_the_model(engine, model)


def test_rows_that_nobody_waits_for_are_waited_for_by_a_refit(
    engine: GenerationEngine, model: LlamaForCausalLM
) -> None:
    running = engine.generate(make_requests(6, version=engine.version, temperature=1.0))
    next(running)
    running.close()
    engine.load_weights(engine.version + 1, trained_tensors(model))
    assert_of_the_model(engine, model)


def test_it_says_what_it_is(path: Path) -> None:
    with closing(stand_in(path)) as engine:
        assert engine.engine == "tensorrt_llm 1.3.0"
        assert "torch.build" in engine.kernels
        assert "dtype float32" in engine.kernels
        assert (engine.device, engine.capabilities.draws, engine.capabilities.sleeps) == ("cuda", "seeded", "nothing")
        assert len(list((path.parent / "compiled").iterdir())) == 1


@pytest.mark.parametrize("version", ["old", ""])
def test_weights_that_were_given_back_are_loaded_before_the_next_row(
    path: Path, model: LlamaForCausalLM, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version has `enable_sleep`, all of the model's memory under one tag, and log-probs as numbers."""
    monkeypatch.setenv("STAND_IN_TRTLLM", version)
    with closing(stand_in(path, unload_engine_train=True)) as engine:
        assert engine.engine == f"tensorrt_llm {'1.2.1' if version == 'old' else '1.3.0'}"
        assert engine.capabilities.sleeps == "weights"
        assert_of_the_model(engine, model)
        running = engine.generate(make_requests(6, temperature=1.0))
        next(running)
        running.close()  # the others run to their end, before the memory goes
        engine.sleep()
        engine.wake()
        assert engine.version == NO_VERSION
        with pytest.raises(RequestError, match="version -1 is resident"):
            engine.generate(make_requests(1, temperature=1.0))
        engine.load_weights(1, trained_tensors(model))
        assert_of_the_model(engine, model)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("bare", r"MissingFeatureError: TensorRT-LLM 1\.3\.0 has no AsyncLLM"),
        ("old,bare", r"MissingFeatureError: TensorRT-LLM 1\.2\.1 has no AsyncLLM"),
    ],
)
def test_a_version_that_lacks_something_is_named(
    path: Path, changes: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_TRTLLM", changes)
    with pytest.raises(EngineLost, match=message):
        stand_in(path)


def test_a_refit_that_fails_half_way_ends_the_engine(
    path: Path, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STAND_IN_TRTLLM", "fault=1")
    with closing(stand_in(path)) as engine:
        with pytest.raises(EngineLost, match=r"tensorrt_llm 1\.3\.0.*illegal memory access"):
            engine.load_weights(1, trained_tensors(model))
        with pytest.raises(EngineLost, match="has stopped"):
            engine.generate(make_requests(1, temperature=1.0))


def test_a_block_stays_in_one_bucket() -> None:
    tensors = {
        "model.embed_tokens.weight": torch.zeros(10),
        **{f"model.layers.{i}.self_attn.{n}_proj.weight": torch.zeros(10) for i in range(3) for n in "qkv"},
        "lm_head.weight": torch.zeros(10),
    }
    found = [list(bucket) for bucket in buckets(tensors, torch.bfloat16, 100)]
    assert [name for bucket in found for name in bucket] == list(tensors)
    assert [len(bucket) for bucket in found] == [4, 3, 4]
    assert [len(b) for b in buckets(tensors, torch.float32, 1)] == [1, 3, 3, 3, 1]


@needs_trtllm
@pytest.mark.timeout(1800)
class TestTrtllmEngine(contract_of(tensorrt_llm_capabilities(EngineConfig(kind="tensorrt_llm"), "cuda"))):
    knows_its_cache = False

    @pytest.fixture(scope="class", params=[True, False], ids=["tied", "untied"])
    def model(self, request: pytest.FixtureRequest) -> LlamaForCausalLM:
        return random_llama(0, request.param, HEAD_DIM)

    def make(self, path: Path, slots: int = 4) -> GenerationEngine:
        return real(path, slots)
