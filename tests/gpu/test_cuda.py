"""Tests on a CUDA device: its noise and draws, repeated updates, whole runs."""

from __future__ import annotations

from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from pipeline.cli.verification import verify_run
from pipeline.config.loading import load_config
from pipeline.driver.results import open_history
from pipeline.driver.run import run
from stages.engines.config import EngineConfig
from stages.engines.embedded.build import build_embedded
from stages.engines.embedded.sampling import gumbel, noise_keys
from stages.engines.protocol import Request
from stages.models.config import ModelConfig, SamplingConfig
from stages.models.protocol import PolicyBatch, Role
from stages.models.spec import RANDOM_TINY
from storage.records import Advantages
from tests.support.models import opened, random_rollout
from tests.support.paths import TINY, TINY_PROMPTS

pytestmark = pytest.mark.gpu


def test_noise_is_the_same_on_both_devices() -> None:
    """The integer part has the same bits; the two logarithms are each device's own, good to a few ulp."""
    keys = noise_keys(0, np.arange(8), 3, 5)
    on_cpu, on_gpu = (gumbel(keys, 4096, torch.device(device)).cpu() for device in ("cpu", "cuda"))
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-5, atol=1e-5)


def test_the_engine_samples_the_same_tokens_as_on_the_cpu() -> None:
    requests = [
        Request(row, 0, 1, tuple(range(10 + row, 20 + row)), 0, SamplingConfig(max_new_tokens=12)) for row in range(6)
    ]
    found = []
    for device in ("cpu", "cuda"):
        engine = build_embedded(RANDOM_TINY, EngineConfig(), max_seq=64, threads=1, device=torch.device(device))
        try:
            found.append({c.row: c for c in engine.generate(requests)})
        finally:
            engine.close()
    for row, completion in found[0].items():
        np.testing.assert_array_equal(found[1][row].tokens, completion.tokens)
        np.testing.assert_allclose(found[1][row].logprobs, completion.logprobs, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_updates_repeat_their_bits_and_idle_models_leave_the_device(tmp_path: Path, dtype: Any) -> None:
    """Deterministic by default, for digests are compared; storages that went to pinned memory and back among them."""
    rollout = random_rollout(np.random.default_rng(0), 8, 12)
    noise = np.where(rollout.response_mask, 0.5, 0).astype(np.float32)
    advantages = Advantages(noise, noise, noise, rollout.response_mask)
    found = []
    for offload in ("none", "none", "idle"):
        with opened(tmp_path, ModelConfig(path=RANDOM_TINY, dtype=dtype), offload=offload) as host:
            policy, reference = host.policy_logprobs(rollout), host.ref_logprobs(rollout)
            assert reference is not None
            host.update_policy(0, PolicyBatch(rollout, advantages, policy, reference, 0.1))
            found.append((host.digest(Role.POLICY), policy.policy_logprobs.tolist()))
        (tmp_path / "rendezvous").unlink(missing_ok=True)
    assert found[0] == found[1] == found[2]


@pytest.mark.processes
@pytest.mark.parametrize("staleness", [0, 2])
def test_a_whole_run_on_the_device(tmp_path: Path, staleness: int) -> None:
    config = load_config(
        [TINY],
        [
            f"runs_dir={tmp_path}",
            f"staleness={staleness}",
            f"prompts.url={TINY_PROMPTS}",
            "tracking.uri=null",
            "cluster.dashboard=null",
        ],
    )
    summary = run(config, Console(file=StringIO())).summary
    assert summary.staleness.max == staleness
    assert verify_run(config).is_sound
    metrics = open_history(config).read_step_metrics(0)
    assert metrics["mismatch/mean_abs"] <= 1e-3
