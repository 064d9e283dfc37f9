"""Memory that vLLM takes, beside the predicted memory of a run that uses it. Skipped where vLLM is not installed."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import cast

import psutil
import pytest

from pipeline.config.loading import load_config
from pipeline.config.memory import PlannedModel, PlannedRun, workers_memory
from stages.engines.build import build_engine
from stages.engines.remote.client import RemoteEngine
from stages.engines.remote.process import ENVIRONMENTS, environment_problem
from stages.models.spec import read_spec
from tests.contracts.engine_contract import make_requests, random_llama
from tests.support.configs import arguments, write_config
from tests.support.paths import ROOT

PYTHON = os.environ.get("STAGELINE_VLLM_PYTHON", str(ROOT / ".engines/vllm/bin/python"))


@pytest.mark.skipif(
    environment_problem(PYTHON, ENVIRONMENTS["vllm"]) is not None, reason="no environment with vLLM: make engine-vllm"
)
def test_the_server_takes_what_is_predicted(tmp_path: Path) -> None:
    """From above: libraries and buffers of a model this small are 300 MB fewer. Its rows never fill the cache."""
    random_llama(0, True, 32).save_pretrained(tmp_path / "llama")
    write_config(tmp_path)
    file, *own = arguments(tmp_path)
    settings = ("engine.kind=vllm", f"engine.python={PYTHON}", "engine.kv_budget_mb=1024", "engine.max_rows=4")
    config = load_config([file], [*own, *settings, f"model.path={tmp_path / 'llama'}"])
    model = PlannedModel(config.model.path, read_spec(config.model.path), 0)
    (worker,) = workers_memory(PlannedRun(config, model, on_gpus=False))
    predicted = sum(worker.items[name] for name in ("engine's processes", "engine weights", "KV cache"))
    with closing(build_engine(config.model.path, config.engine, max_seq=64, threads=1)) as engine:
        list(engine.generate(make_requests(4)))
        server = psutil.Process(cast(RemoteEngine, engine)._server.process.pid)
        taken = server.memory_info().rss
    assert predicted - (400 << 20) <= taken <= predicted
