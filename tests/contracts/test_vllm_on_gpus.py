"""The adapter's use of what vLLM's CPU build does not have: sleep levels, GPUs with their memory, CUDA graphs, ranks in
processes. A stand-in of vLLM on GPUs (tests/support/vllm_stand_in) records the calls, and refuses what vLLM would. Its
signatures are compared with the real ones, if vLLM is installed."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from stages.engines.capabilities import vllm_capabilities
from stages.engines.config import EngineConfig
from stages.engines.remote.process import ENVIRONMENTS, environment_problem
from stages.engines.remote.serving.adapter import Settings
from stages.engines.remote.weights import places_in
from storage.locks import open_lock, take_lock
from tests.contracts.test_vllm_engine import PYTHON

STAND_IN = Path(__file__).resolve().parents[1] / "support/vllm_stand_in"
ADAPTER = "stages.engines.remote.serving.vllm_adapter"
SIGNATURES = """
import inspect, json
from vllm import LLM
from vllm.platforms import current_platform
from vllm.utils.import_utils import import_pynvml
from vllm.v1.kv_cache_interface import KVCacheConfig
NVML = ("nvmlInit", "nvmlShutdown", "nvmlDeviceGetHandleByUUID", "nvmlDeviceGetMemoryInfo")
able = type(current_platform).is_sleep_mode_available
kind = type(current_platform)
found = {"needs_kv_cache_zeroing": isinstance(KVCacheConfig.needs_kv_cache_zeroing, property)}
found["nvml"] = [callable(getattr(import_pynvml(), name)) for name in NVML]
of_platform = (able, kind.get_device_total_memory, kind.get_device_uuid)
for call in (LLM.sleep, LLM.wake_up, LLM.collective_rpc, LLM.reset_prefix_cache, *of_platform):
    found[call.__name__] = [(p.name, repr(p.default)) for p in inspect.signature(call).parameters.values()]
print(json.dumps(found))
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's module, on the stand-in."""
    monkeypatch.syspath_prepend(STAND_IN)
    for name in (
        "OMP_NUM_THREADS",
        "VLLM_USE_V2_MODEL_RUNNER",
        "VLLM_WORKER_MULTIPROC_METHOD",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
    ):
        monkeypatch.setenv(name, "1")  # which the adapter sets

    yield importlib.import_module(ADAPTER)
    for name in [name for name in sys.modules if name == ADAPTER or name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def settings(*, sleeps: bool = False) -> Settings:
    extra = {
        "compile": False,
        "cuda_graphs": True,
        "prefix_caching": True,
        "sleeps": sleeps,
        "parameters": 8 * 10**9,
        "work_bytes": 2 << 30,
    }
    return Settings("model", "bfloat16", 64, 4, 64, 1, 1, 1, extra)


def places(folder: Path, rows: int = 2) -> list[dict[str, Any]]:
    """The places of a model's tensors, whose sum is 2."""
    save_file({"model.embed_tokens.weight": torch.full((rows,), 2.0 / rows)}, folder / "model.safetensors")
    return [asdict(place) for place in places_in(folder / "model.safetensors")]


def test_an_engine_that_shares_its_devices_frees_its_weights(stand_in: Any, tmp_path: Path) -> None:
    """The client has no version resident afterwards, so `load` comes before the next row."""
    assert vllm_capabilities(EngineConfig(kind="vllm"), "cuda").sleeps == "weights"
    adapter = stand_in.VllmAdapter(settings(sleeps=True))
    adapter.sleep()
    adapter.wake()
    adapter.load(places(tmp_path))
    assert adapter._llm.calls == [
        ("sleep", 2),
        ("wake_up", None),
        ("reload_weights", {"lm_head.weight": 2.0, "model.embed_tokens.weight": 2.0}),
        ("reset_prefix_cache", True),
    ]


def test_ranks_share_the_replicas_cache(stand_in: Any) -> None:
    """vLLM's figure is of one device."""
    ranks = replace(settings(), tensor_parallel=2, kv_budget_mb=64)
    assert stand_in.VllmAdapter(ranks)._llm.settings["kv_cache_memory_bytes"] == 32 << 20


def test_ranks_are_told_where_weights_lie_and_map_them(stand_in: Any, tmp_path: Path) -> None:
    """vLLM pickles a call's arguments for the ranks' processes: an 8B model would be 16 GB."""
    adapter = stand_in.VllmAdapter(replace(settings(), tensor_parallel=2))
    adapter.load(places(tmp_path, rows=1 << 20))
    assert adapter._llm.calls[0] == ("reload_weights", {"model.embed_tokens.weight": 2.0, "lm_head.weight": 2.0})
    assert 0 < adapter._llm.sent_bytes < 4096


def test_the_model_runner_is_the_one_that_takes_our_draws(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """V2 is vLLM's default on CUDA, and rejects the processor. A vLLM that uses it all the same is refused."""
    assert stand_in.VllmAdapter(settings())._llm.llm_engine.vllm_config.use_v2_model_runner is False
    build = stand_in.LLM.__init__

    def stubborn(llm: Any, *args: Any, **kwargs: Any) -> None:
        build(llm, *args, **kwargs)
        llm.llm_engine.vllm_config.use_v2_model_runner = True

    monkeypatch.setattr(stand_in.LLM, "__init__", stubborn)
    with pytest.raises(RuntimeError, match="uses its model runner V2"):
        stand_in.VllmAdapter(settings())


def test_ranks_processes_are_spawned(stand_in: Any) -> None:
    assert stand_in.VllmAdapter(settings())._llm.started_with == {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}


@pytest.mark.parametrize(
    ("device", "extra", "expected"),
    [
        ("cuda", {}, {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}),
        ("cuda", {"cuda_graphs": False}, {"enforce_eager": True}),
        ("cuda", {"compile": True}, {}),
        ("cuda", {"compile": True, "cuda_graphs": False}, {"compilation_config": {"cudagraph_mode": "NONE"}}),
        ("cpu", {}, {"enforce_eager": True}),
        ("cpu", {"compile": True}, {}),
    ],
)
def test_decoding_is_captured_in_cuda_graphs(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, device: str, extra: dict[str, bool], expected: dict[str, Any]
) -> None:
    """`enforce_eager` switches graphs off together with compilation."""
    monkeypatch.setattr(stand_in.current_platform, "device_type", device)
    given = settings()
    found = stand_in.VllmAdapter(replace(given, extra={**given.extra, **extra}))._llm.settings
    assert {key: found[key] for key in ("enforce_eager", "compilation_config") if key in found} == expected


def test_it_starts_beside_a_trainer_with_the_memory_that_it_needs(stand_in: Any) -> None:
    """8B in bfloat16 and the cache: 16 of 80 GB. vLLM wants 92 % to be free, unless it is told otherwise."""
    (gpu, _) = importlib.import_module("vllm.platforms").GPUS
    gpu.free_now = lambda: 20 * 10**9
    found = stand_in.VllmAdapter(settings())._llm.settings["gpu_memory_utilization"]
    assert found == (16 * 10**9 + (64 << 20)) / (80 * 10**9)


def test_it_waits_until_a_trainer_has_left_the_device(
    stand_in: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stand_in, "_LOOK_S", 0.0)
    (gpu, _) = importlib.import_module("vllm.platforms").GPUS
    free = [10**9] * 3
    gpu.free_now = lambda: free.pop() if free else 80 * 10**9
    stand_in.VllmAdapter(settings())
    assert free == []
    assert capsys.readouterr().out.count("of GPU-b, which has 953 MB free") == 1


def test_a_gpu_that_is_too_small_is_refused(stand_in: Any) -> None:
    with pytest.raises(RuntimeError, match=r"needs 21\d+ MB of its GPU, which has 76293: .*engine\.kv_budget_mb"):
        stand_in.VllmAdapter(replace(settings(), kv_budget_mb=200_000))


def test_engines_that_share_a_device_start_one_after_another(
    stand_in: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    stand_in.VllmAdapter(settings())
    (path,) = tmp_path.glob("stageline-*-GPU-b.lock")
    waiting, started = threading.Event(), threading.Event()

    def take(*arguments: Any) -> None:
        waiting.set()
        take_lock(*arguments)

    monkeypatch.setattr(stand_in, "take_lock", take)
    thread = threading.Thread(target=lambda: (stand_in.VllmAdapter(settings()), started.set()))
    with open_lock(path) as other:
        take_lock(other, path, 0.0)
        thread.start()
        assert waiting.wait(60)
        assert not started.is_set()
    thread.join(60)
    assert started.is_set()


def test_an_engine_with_devices_of_its_own_keeps_its_memory(stand_in: Any) -> None:
    adapter = stand_in.VllmAdapter(settings())
    adapter.sleep()
    adapter.wake()
    assert not adapter._llm.settings["enable_sleep_mode"]
    assert adapter._llm.calls == [("reset_prefix_cache", False)]


def test_a_platform_that_cannot_sleep_is_refused_by_the_key(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.current_platform, "device_type", "cpu")
    with pytest.raises(RuntimeError, match=r"placement\.device_sharing: vLLM 0\.32\.0 .* on cpu"):
        stand_in.VllmAdapter(settings(sleeps=True))


@pytest.mark.skipif(
    environment_problem(PYTHON, ENVIRONMENTS["vllm"]) is not None,
    reason="no environment with vLLM: make engine-vllm",
)
def test_the_stand_in_has_the_signatures_of_vllm() -> None:
    def of(python: str, *path: str) -> Any:
        program = f"import sys; sys.path[:0] = {list(path)}\n{SIGNATURES}"
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert of(sys.executable, str(STAND_IN)) == of(PYTHON)
