"""vLLM's sleep levels, which its CPU build does not have: what the adapter calls, against a stand-in of vLLM on a GPU
(tests/support/vllm_stand_in); what each of several devices is given; and the stand-in against the signatures of the
real one, where there is one."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from stages.engines.capabilities import vllm_capabilities
from stages.engines.config import EngineConfig, VllmConfig
from stages.engines.remote.environments import ENVIRONMENTS, environment_problem
from stages.engines.remote.serving.adapter import Settings
from tests.contracts.test_vllm_engine import PYTHON

STAND_IN = Path(__file__).resolve().parents[1] / "support/vllm_stand_in"
ADAPTER = "stages.engines.remote.serving.vllm_adapter"
SIGNATURES = """
import inspect, json
from vllm import LLM
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig
able = type(current_platform).is_sleep_mode_available
found = {"needs_kv_cache_zeroing": isinstance(KVCacheConfig.needs_kv_cache_zeroing, property)}
for call in (LLM.sleep, LLM.wake_up, LLM.collective_rpc, LLM.reset_prefix_cache, able):
    found[call.__name__] = [(p.name, repr(p.default)) for p in inspect.signature(call).parameters.values()]
print(json.dumps(found))
"""


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The adapter's module, on the stand-in."""
    monkeypatch.syspath_prepend(STAND_IN)
    for name in (
        "OMP_NUM_THREADS",
        "VLLM_CPU_OMP_THREADS_BIND",
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_NO_USAGE_STATS",
    ):
        monkeypatch.setenv(name, "1")  # which the adapter sets

    yield importlib.import_module(ADAPTER)
    for name in [name for name in sys.modules if name == ADAPTER or name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def settings(sleep_level: int) -> Settings:
    extra = {"compile": False, "prefix_caching": True, "sleep_level": sleep_level}
    return Settings("model", "float32", 64, 4, 64, 1, 1, 1, extra)


@pytest.mark.parametrize(("level", "sleeps"), [(1, "cache"), (2, "weights")])
def test_it_sleeps_at_the_level_that_is_asked_for(stand_in: Any, level: int, sleeps: str) -> None:
    """After level 2 the client has no version resident, so `load` comes before the next row."""
    config = EngineConfig(kind="vllm", vllm=VllmConfig(sleep_level=level))
    assert vllm_capabilities(config, "cuda").sleeps == sleeps
    adapter = stand_in.VllmAdapter(settings(level))
    adapter.sleep()
    adapter.wake()
    adapter.load({"model.embed_tokens.weight": torch.zeros(2)})
    assert adapter._llm.calls == [
        ("sleep", level),
        ("wake_up", None),
        ("reload_weights", ["lm_head.weight", "model.embed_tokens.weight"]),
        ("reset_prefix_cache", True),
    ]


def test_ranks_share_the_replicas_cache(stand_in: Any) -> None:
    """vLLM's figure is of one device."""
    ranks = replace(settings(0), tensor_parallel=2, pipeline_parallel=2, kv_budget_mb=64)
    assert stand_in.VllmAdapter(ranks)._llm.settings["kv_cache_memory_bytes"] == 16 << 20


def test_level_0_keeps_its_memory(stand_in: Any) -> None:
    assert vllm_capabilities(EngineConfig(kind="vllm"), "cuda").sleeps == "nothing"
    adapter = stand_in.VllmAdapter(settings(0))
    adapter.sleep()
    adapter.wake()
    assert not adapter._llm.settings["enable_sleep_mode"]
    assert adapter._llm.calls == [("reset_prefix_cache", False)]


def test_a_platform_that_cannot_sleep_is_refused_by_the_key(stand_in: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in.current_platform, "device_type", "cpu")
    with pytest.raises(RuntimeError, match=r"engine\.vllm\.sleep_level = 2: vLLM 0\.32\.0 .* on cpu: must be 0"):
        stand_in.VllmAdapter(settings(2))


@pytest.mark.skipif(
    environment_problem(PYTHON, ENVIRONMENTS["vllm"]) is not None, reason="no environment with vLLM: make engine-vllm"
)
def test_the_stand_in_has_the_signatures_of_vllm() -> None:
    def of(python: str, *path: str) -> Any:
        program = f"import sys; sys.path[:0] = {list(path)}\n{SIGNATURES}"
        done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    assert of(sys.executable, str(STAND_IN)) == of(PYTHON)
