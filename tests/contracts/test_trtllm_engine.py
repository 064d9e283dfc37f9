"""The adapter of TensorRT-LLM, against its recorded interface (tests/support/trtllm_stand_in); and against the real
one, which it has never met, where STAGELINE_TRTLLM_PYTHON names the Python of an environment that has it:

    make test-trtllm PYTHON=python3.12
    STAGELINE_TRTLLM_PYTHON=PYTHON python -m pytest tests/contracts/test_trtllm_engine.py

The first tests share one engine: they are the smoke test. The class at the end is the whole contract, as far as the
engine says that it goes, with an engine for each test: an hour or more.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from transformers import LlamaForCausalLM

from stages.engines.build import build_engine
from stages.engines.capabilities import tensorrt_llm_capabilities
from stages.engines.config import EngineConfig
from stages.engines.protocol import NO_VERSION, EngineLost, GenerationEngine, RequestError, WeightsError
from stages.engines.remote import build
from stages.engines.remote.client import RemoteEngine
from stages.engines.remote.serving import trtllm_adapter
from stages.engines.remote.serving.adapter import Settings
from stages.engines.remote.serving.trtllm_adapter import TrtllmAdapter, buckets
from tests.contracts.engine_contract import (
    EOS,
    MAX_SEQ,
    assert_logprobs,
    assert_same_tokens,
    contract_of,
    make_requests,
    random_llama,
    trained_tensors,
)
from tests.support.engines import by_row
from tests.support.paths import ROOT

STAND_IN = Path(__file__).resolve().parents[1] / "support/trtllm_stand_in"
PYTHON = os.environ.get("STAGELINE_TRTLLM_PYTHON")
HEAD_DIM = 64
"""The smallest head dimension that TensorRT-LLM's attention supports."""
needs_trtllm = pytest.mark.skipif(PYTHON is None, reason="STAGELINE_TRTLLM_PYTHON names no environment")


def real(path: Path, max_rows: int = 4) -> GenerationEngine:
    config = EngineConfig(kind="tensorrt_llm", python=PYTHON, max_rows=max_rows, kv_budget_mb=256)
    return build_engine(str(path), config, max_seq=MAX_SEQ, threads=1)


def stand_in(path: Path, *, bucket_mb: int = 1024, device_sharing: bool = False) -> RemoteEngine:
    config = EngineConfig(kind="tensorrt_llm", python=sys.executable, max_rows=4, kv_budget_mb=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "cache_folder", lambda: path.parent / "compiled")
        patch.setattr(build, "TENSORRT_LLM_BUCKET_MB", bucket_mb)
        engine = build.build_tensorrt_llm(
            str(path),
            config,
            max_seq=MAX_SEQ,
            threads=1,
            modules=STAND_IN,
            adapter="trtllm_on_cpu:OnCpu",
            device_sharing=device_sharing,
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
        expected = assert_logprobs(model, requests[row], completion, atol=1e-3)
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
        ({"temperature": 1.0, "suppress_token_ids": [5]}, "row 0 excludes tokens"),
        ({"temperature": 1.0, "min_new_tokens": 3}, "row 0 excludes tokens"),
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


def test_a_refit_waits_for_rows_that_nobody_waits_for(engine: GenerationEngine, model: LlamaForCausalLM) -> None:
    running = engine.generate(make_requests(6, version=engine.version, temperature=1.0))
    next(running)
    running.close()
    engine.load_weights(engine.version + 1, trained_tensors(model))
    assert_of_the_model(engine, model)


def test_it_says_what_it_is(path: Path) -> None:
    with closing(stand_in(path)) as engine:
        assert engine.engine == "tensorrt_llm 1.3.0"
        assert "torch.build" in engine.numerics["kernels"]
        assert "dtype float32" in engine.numerics["kernels"]
        assert (engine.numerics["device"], engine.capabilities.draws, engine.capabilities.sleeps) == (
            "cuda",
            "seeded",
            "nothing",
        )
        assert len(list((path.parent / "compiled/tensorrt_llm").iterdir())) == 1


@pytest.mark.parametrize("version", ["old", ""])
def test_weights_that_were_given_back_are_loaded_before_the_next_row(
    path: Path, model: LlamaForCausalLM, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An older version has `enable_sleep`, all of the model's memory under one tag, and log-probs as numbers."""
    monkeypatch.setenv("STAND_IN_TRTLLM", version)
    with closing(stand_in(path, device_sharing=True)) as engine:
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
        ("rayless", r"RuntimeError: TensorRT-LLM 1\.3\.0: .*async_llm cannot be imported: No module named 'ray'"),
    ],
)
def test_missing_parts_are_named(path: Path, changes: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_TRTLLM", changes)
    with pytest.raises(EngineLost, match=message):
        stand_in(path)


def test_a_half_done_refit_ends_the_engine(
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


def bare_adapter(dtype: str = "bfloat16", **settings: object) -> TrtllmAdapter:
    """Without an engine, with two devices that there are not; what it calls is for the test to say."""
    adapter = object.__new__(TrtllmAdapter)
    adapter._settings = Settings("m", dtype, 64, 4, 64, 2, 1, 1, settings)
    adapter._api = cast(Any, SimpleNamespace(version="1.3.0", kv_cache_config=dict))
    adapter._dtype, adapter._tasks, adapter._asleep = getattr(torch, dtype), {}, False
    adapter._devices = {f"GPU-{number}": torch.device("cuda", number) for number in range(2)}
    return adapter


def test_a_refit_has_one_bucket_on_a_device_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, calls = bare_adapter(bucket_mb=1), []
    alive: list[weakref.ref[torch.Tensor]] = []
    most = 0

    def to(tensor: torch.Tensor, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        nonlocal most
        copy = torch.empty(tensor.shape, dtype=dtype)
        alive.append(weakref.ref(copy))
        most = max(most, sum(c.numel() * c.itemsize for ref in alive if (c := ref()) is not None))
        return copy

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(trtllm_adapter, "reduce_tensor", lambda tensor: ("handle", tensor.shape))
    monkeypatch.setattr(adapter, "_call", lambda method, handles: calls.append(handles))
    tensors = {f"model.layers.{i}.w": torch.zeros(1 << 19) for i in range(5)}
    monkeypatch.setattr(trtllm_adapter, "map_tensors", lambda _: {**tensors, "lm_head.weight": torch.zeros(8)})
    adapter.load([])
    assert [handles is None for handles in calls] == [False] * 6 + [True]
    assert most == 2 * (1 << 20), "a bucket on each of two devices"


def test_weights_that_come_while_it_is_asleep_are_refused_by_name() -> None:
    adapter = bare_adapter(bucket_mb=1)
    adapter._asleep = True
    with pytest.raises(RuntimeError, match=r"TensorRT-LLM 1\.3\.0 is asleep: wake it"):
        adapter.load([])


def test_the_caches_share_is_of_what_is_free_beside_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the engine's dtype, whatever the files have; on the device that has the least."""
    free = {0: 300 << 20, 1: 200 << 20}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[device.index], 1 << 30))
    found = bare_adapter(parameters=40 << 20)._kv_cache()
    assert found == {"enable_block_reuse": True, "free_gpu_memory_fraction": 32 / (200 - 40)}
    with pytest.raises(RuntimeError, match=r"engine\.kv_budget_mb = 64: of a device 20 MB are free"):
        bare_adapter(parameters=180 << 20)._kv_cache()


@pytest.mark.parametrize(("max_seq", "tokens_of_a_pass"), [(64, 8192), (20_000, 20_000)])
def test_the_longest_prompt_fits_a_pass(max_seq: int, tokens_of_a_pass: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-LLM feeds 8192 tokens in a pass, unless it is told otherwise, and a prompt whole."""
    asked: dict[str, Any] = {}
    adapter = bare_adapter(parameters=0)
    adapter._settings = replace(adapter._settings, max_seq=max_seq)
    api = SimpleNamespace(version="1.3.0", kv_cache_config=dict, sleep_options={}, make_llm=asked.update)
    adapter._api = cast(Any, api)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 30, 1 << 30))
    asyncio.run(adapter._start())
    assert (asked["max_input_len"], asked["max_num_tokens"]) == (max_seq, tokens_of_a_pass)


@pytest.mark.skipif(sys.version_info[:2] in ((3, 10), (3, 12)), reason="TensorRT-LLM has wheels for this Python")
def test_an_environment_of_a_python_without_wheels_is_refused_before_anything_is_installed(tmp_path: Path) -> None:
    given = ["make", "engine-trtllm", f"PYTHON={sys.executable}", f"ENGINES={tmp_path}/engines"]
    made = subprocess.run(given, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode != 0
    assert "make engine-trtllm PYTHON=python3.12" in made.stderr
    assert not (tmp_path / "engines").exists()


@needs_trtllm
@pytest.mark.timeout(1800)
class TestTrtllmEngine(contract_of(tensorrt_llm_capabilities(EngineConfig(kind="tensorrt_llm"), "cuda"))):
    head_dim = HEAD_DIM
    knows_its_cache = False

    def make(self, path: Path, max_rows: int = 4) -> GenerationEngine:
        return real(path, max_rows)
