"""kind -> engine: the one place that knows which engines there are."""

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
"""`engine.kind` -> what builds it, by `module:name`; called as `build_engine` is."""


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
    on_lost: Callable[[str], None] | None = None,
    log: Path | None = None,
) -> GenerationEngine:
    """The engine that `config.kind` names.

    `path`: a Hugging Face directory or `random:tiny`, whose weights become `version`. `max_seq`: longest prompt plus
    response, in tokens. `threads`: of torch. `device`: of the engine's first rank; None: its own choice.
    `eos_token_ids`: empty means the model's own. `migratable`: whether rows are to go on in other engines
    (`MigratableRows`). `on_lost`: called with what happened when a process of the engine is lost. `log`: where an
    engine in an environment of its own writes what it has to say; None: nowhere.

    Raises ValueError for settings that cannot work, WeightsError for weights that do not fit, EngineLost for an engine
    of its own environment that does not come up."""
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
        on_lost=on_lost,
        log=log,
    )
