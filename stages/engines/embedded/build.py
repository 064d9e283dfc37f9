"""Build an embedded engine from its config.

Three parts are optional: speculative decoding, several ranks, and migration of rows. They are built if the config or
the caller asks for them. Inside the embedded engine, only this module and the optional modules themselves import these
parts. This module imports only the parts that are used.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from stages.engines.capabilities import capabilities_of
from stages.engines.config import EngineConfig
from stages.engines.embedded.cache import BlockPool
from stages.engines.embedded.engine import EmbeddedEngine
from stages.engines.embedded.extensions import Drafts
from stages.engines.embedded.runner import LocalRunner, Runner
from stages.engines.embedded.scheduler import Scheduler
from stages.models.spec import read_eos_ids

_PARTS = {
    "drafts": "stages.engines.embedded.drafts.calibration:build_speculation",
    "ranks": "stages.engines.embedded.ranks.parallel_runner:ParallelRunner",
    "migration": "stages.engines.embedded.migration:MigratingEngine",
}
"""Optional part -> the function or class that builds it, as `module:name`."""


def build_embedded(
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
    device_sharing: object = None,
    drafters: Sequence[object] = (),
    on_lost: Callable[[str], None] | None = None,
    log: object = None,
    start_s: object = None,
) -> EmbeddedEngine:
    """Return an `EmbeddedEngine`, or a `MigratingEngine` if `migratable` is set.

    Args:
        path: a Hugging Face directory or `random:tiny`. Its weights become `version`.
        max_seq: maximum length of a prompt and its response together, in tokens.
        threads: number of CPU threads that torch uses for the engine's computation. If the model has several ranks,
            each rank uses this number.
        device: device of the engine, or of rank 0 if the model has several ranks. The default is the first GPU, or the
            CPU if there is no GPU.
        eos_token_ids: EOS tokens; empty: the model's EOS tokens.
        in_flight: see `build_engine`.
        drafters: drafters to use; empty: the drafters that `engine.embedded.speculation` names.
        on_lost: see `RankProcesses`.
        device_sharing, log, start_s: ignored; this engine needs none of them.

    Raises:
        ValueError: `max_seq` or the settings do not suit the model.
        WeightsError: a tensor is missing, unknown, of another shape or not finite.
        NoNativeKernelsError, NoTritonKernelsError: the config asks for kernels that are not available.
        RankLost: the process of a rank ended during the start.
    """
    eos_ids = frozenset(eos_token_ids or read_eos_ids(path))
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        runner: Runner
        if config.tensor_parallel * config.pipeline_parallel == 1:
            runner = LocalRunner(path, config, max_seq=max_seq, device=device)
        else:
            runner = _part("ranks")(path, config, max_seq=max_seq, device=device, threads=threads, on_lost=on_lost)
        stack.callback(runner.close)
        scheduler = Scheduler(config.max_rows, BlockPool(runner.num_blocks), runner.depth)
        drafts: Drafts | None = None
        if drafters or config.embedded.speculation.drafter != "none":
            drafts = _part("drafts")(
                config, drafters, path, runner, scheduler.pool, max_seq=max_seq, threads=threads, device=device
            )
        make: Callable[..., EmbeddedEngine] = _part("migration") if migratable else EmbeddedEngine
        engine = make(
            runner,
            scheduler,
            capabilities=capabilities_of(config, "cuda" if device.type == "cuda" else "cpu"),
            max_seq=max_seq,
            threads=threads,
            eos_ids=eos_ids,
            version=version,
            in_flight=in_flight,
            drafts=drafts,
        )
        stack.pop_all()
    return engine


def _part(name: str) -> Any:
    module, _, attribute = _PARTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
