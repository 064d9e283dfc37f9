"""Build engines of other projects, which run in Python environments of their own."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from stages.engines.capabilities import (
    TENSORRT_LLM_BUCKET_MB,
    Capabilities,
    Device,
    tensorrt_llm_capabilities,
    vllm_capabilities,
)
from stages.engines.config import ENGINE_WORK_BYTES, EngineConfig, interpreter
from stages.engines.protocol import GenerationEngine
from stages.engines.remote.client import RemoteEngine, RemoteSettings
from stages.engines.remote.process import ServerProcess
from stages.engines.remote.weights import ModelFiles
from stages.models.spec import read_eos_ids, read_spec, tensor_shapes
from stages.native.compile import cache_folder

_VLLM = "stages.engines.remote.serving.vllm_adapter:VllmAdapter"
_START_S = 600.0
"""Default of `start_s` in `build_engine`: maximum seconds that an engine may take to start. A run does not use this
default. It passes a limit below the start timeout of the worker, so that the error of the engine is seen first."""
_MESSAGE_TIMEOUT_S = 60.0
"""Maximum number of seconds without a message from an engine's process, which sends one every second. After that time
the process counts as lost."""
_TENSORRT_LLM = "stages.engines.remote.serving.trtllm_adapter:TrtllmAdapter"


def build_vllm(path: str, config: EngineConfig, *, device_sharing: bool = False, **settings: Any) -> GenerationEngine:
    """Build vLLM in the environment of `engine.python`. Takes the arguments of `build_engine`, and raises the errors of
    `build_remote`."""
    # prefix_caching: rows of one prompt share its keys and values. It changes no result, and costs next to nothing.
    extra = {
        **dataclasses.asdict(config.vllm),
        "cuda_graphs": config.cuda_graphs,
        "sleeps": device_sharing,
        "prefix_caching": True,
        "parameters": _parameters(path),
        "work_bytes": ENGINE_WORK_BYTES,
    }
    stated = _stated(vllm_capabilities, sleeps=device_sharing)
    return build_remote(path, config, adapter=_VLLM, stated=stated, extra=extra, **settings)


def build_tensorrt_llm(
    path: str, config: EngineConfig, *, device_sharing: bool = False, **settings: Any
) -> GenerationEngine:
    """Build TensorRT-LLM in the environment of `engine.python`. Takes the arguments and raises the errors of
    `build_vllm`."""
    extra = {
        "sleeps": device_sharing,
        "bucket_mb": TENSORRT_LLM_BUCKET_MB,
        "cache": str(cache_folder() / "tensorrt_llm"),
        "parameters": _parameters(path),
    }
    settings = {"adapter": _TENSORRT_LLM, **settings}
    stated = _stated(tensorrt_llm_capabilities, sleeps=device_sharing)
    return build_remote(path, config, stated=stated, extra=extra, **settings)


def _stated(
    stated: Callable[[EngineConfig, Device], Capabilities], *, sleeps: bool
) -> Callable[[EngineConfig, Device], Capabilities]:
    """Return the capabilities of `stated`, without sleep if the engine is built without it."""
    return stated if sleeps else lambda config, device: dataclasses.replace(stated(config, device), sleeps="nothing")


def build_remote(
    path: str,
    config: EngineConfig,
    *,
    adapter: str,
    stated: Callable[[EngineConfig, Device], Capabilities],
    extra: Mapping[str, Any],
    max_seq: int,
    threads: int,
    device: torch.device | None = None,
    eos_token_ids: Sequence[int] = (),
    version: int = 0,
    migratable: bool = False,
    in_flight: bool = False,
    on_lost: Callable[[str], None] | None = None,
    log: Path | None = None,
    modules: Path | None = None,
    start_s: float | None = None,
    message_timeout_s: float = _MESSAGE_TIMEOUT_S,
) -> GenerationEngine:
    """Start an engine of another project in the environment of `engine.python`. `build_engine` describes the arguments
    that are not listed here.

    Args:
        adapter: class that serves the engine, as `module:Class`.
        stated: returns the engine's capabilities, given the device that the engine reports.
        extra: settings for this kind of engine.
        log: file for the server's output; None: the output is kept for errors only.
        modules: a folder that `adapter` may be imported from.
        message_timeout_s: seconds without a message after which the server counts as lost.

    Raises:
        ValueError: `migratable` is set, or `max_seq` is not positive or exceeds the model's positions.
        OSError: the interpreter cannot be run, or the model has no weights in files.
        WeightsError: a tensor is missing or has a dtype that cannot be mapped.
        EngineLost: the engine did not start. The message has the last lines of the server's log.
    """
    assert config.python is not None, "checked with the config"
    if migratable:  # `pipeline/config/rules.py` refuses such a config before
        raise ValueError(f"rows of engine.kind={config.kind} cannot migrate between replicas (cluster.migrate_rows)")
    files = _model_files(path, max_seq)
    with ExitStack() as stack:
        server = ServerProcess(interpreter(config.python), log, modules)
        stack.callback(server.close)
        engine = RemoteEngine(
            server,
            files,
            RemoteSettings(
                adapter=adapter,
                stated=lambda device: stated(config, device),
                server={
                    "model": str(Path(path).resolve()),
                    "dtype": config.dtype,
                    "max_seq": max_seq,
                    "max_rows": config.max_rows,
                    "kv_budget_mb": config.kv_budget_mb,
                    "tensor_parallel": config.tensor_parallel,
                    "pipeline_parallel": config.pipeline_parallel,
                    "threads": threads,
                    "extra": dict(extra),
                },
                max_seq=max_seq,
                max_rows=config.max_rows,
                eos_ids=frozenset(eos_token_ids or read_eos_ids(path)),
                start_s=_START_S if start_s is None else start_s,
                message_timeout_s=message_timeout_s,
                in_flight=in_flight,
            ),
            version=version,
            on_lost=on_lost,
        )
        stack.pop_all()
    return engine


def _parameters(path: str) -> int:
    return sum(map(math.prod, tensor_shapes(read_spec(path)).values()))


def _model_files(path: str, max_seq: int) -> ModelFiles:
    """Return the files of a model. Raises ValueError unless `max_seq` is from 1 to the model's number of positions."""
    files = ModelFiles(path)
    if not 0 < max_seq <= files.spec.max_positions:
        raise ValueError(f"max_seq is {max_seq}; {path!r} has positions for {files.spec.max_positions} tokens")
    return files
