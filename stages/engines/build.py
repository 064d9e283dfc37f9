"""Build an engine from a config. `_BUILDERS` names the builder of each kind of engine."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from stages.engines.config import EngineConfig
from stages.engines.protocol import GenerationEngine

_BUILDERS = {
    "embedded": "stages.engines.embedded.build:build_embedded",
    "vllm": "stages.engines.remote.build:build_vllm",
    "tensorrt_llm": "stages.engines.remote.build:build_tensorrt_llm",
}
"""`engine.kind` -> the function that builds this kind, as `module:name`. It takes the arguments of `build_engine`."""


def build_engine(
    path: str,
    config: EngineConfig,
    *,
    max_seq: int,
    threads: int,
    device: torch.device | None = None,
    eos_token_ids: Sequence[int] = (),
    version: int = 0,
    migratable: bool = False,
    in_flight: bool = False,
    device_sharing: bool = False,
    on_lost: Callable[[str], None] | None = None,
    log: Path | None = None,
    start_s: float | None = None,
) -> GenerationEngine:
    """Return a new engine of `config.kind`.

    Args:
        path: a Hugging Face directory or `random:tiny`. Its weights become `version`.
        config: section `engine` of the config.
        max_seq: maximum length of a prompt and its response together, in tokens.
        threads: number of torch threads.
        device: device of the engine's first rank; None: the engine chooses.
        eos_token_ids: EOS tokens; empty: the model's EOS tokens.
        version: version of the weights in `path`.
        migratable: True if the engine's rows must be able to move to other engines (`MigratingEngine`).
        in_flight: True to load new weights between two tokens, while rows run. By default they are loaded after the
            rows in flight have finished.
        device_sharing: True to build the engine so that it can sleep and leave its devices to other gangs (groups of
            processes of the run). Without this, vLLM and TensorRT-LLM cannot sleep.
        on_lost: called with the reason if a process of the engine is lost.
        log: log file, for an engine that runs in a Python environment of its own; None: its output is kept only for
            error messages.
        start_s: maximum seconds that an engine in a Python environment of its own may take to start; None: 600.

    Raises:
        ValueError: `max_seq`, `migratable` or a setting does not suit the model or the kind of engine.
        WeightsError: a tensor is missing, unknown, of another shape or not finite.
        EngineLost: an engine in a Python environment of its own did not start.
        Further errors: see `build_embedded` and `build_remote`.
    """
    module, _, name = _BUILDERS[config.kind].partition(":")
    build: Callable[..., GenerationEngine] = getattr(importlib.import_module(module), name)
    return build(
        path,
        config,
        max_seq=max_seq,
        threads=threads,
        device=device,
        eos_token_ids=eos_token_ids,
        version=version,
        migratable=migratable,
        in_flight=in_flight,
        device_sharing=device_sharing,
        on_lost=on_lost,
        log=log,
        start_s=start_s,
    )
