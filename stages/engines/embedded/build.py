"""An embedded engine put together as its config asks: the plain one, and around it drafts, ranks and migration.

Of the engine, this alone imports these three folders, by name, and only where they are asked for: without them the
plain engine works. (Around the engine, a run's checks read `ranks.sharding`, and workers and graph speak of rows in the
terms of `migration`.) May import torch, stages.engines, stages.models.hf_config.
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
from stages.engines.protocol import GenerationEngine
from stages.models.hf_config import read_eos_ids

_PARTS = {
    "drafts": "stages.engines.embedded.drafts.calibration:build_speculation",
    "ranks": "stages.engines.embedded.ranks.parallel_runner:ParallelRunner",
    "migration": "stages.engines.embedded.migration.migrating_engine:MigratingEngine",
}
"""What a folder brings: a function or class, by `module:name`."""


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
    drafters: Sequence[object] = (),
    on_lost: Callable[[str], None] | None = None,
    log: object = None,
) -> GenerationEngine:
    """An `EmbeddedEngine`; if its rows are to be `migratable` a `MigratingEngine` around one.

    `path`: a Hugging Face directory or `random:tiny`, whose weights become `version`. `max_seq`: longest prompt plus
    response, in tokens. `threads`: of torch, in the engine's own thread (with several ranks: of each). `device`: the
    first GPU, if there is one, unless given; with several ranks that of rank 0. `eos_token_ids`: empty means the
    model's own. `drafters`: `Drafter`s instead of those that `engine.embedded.speculation` names. `on_lost`: see
    `RankProcesses`. `log` is of no use: its ranks write where this process does.

    Raises ValueError for sizes that cannot work, WeightsError for weights that do not fit, NoNativeKernelsError or
    NoTritonKernelsError where such kernels are asked for and cannot be had, RankLost if a rank ends meanwhile."""
    eos_ids = frozenset(eos_token_ids or read_eos_ids(path))
    device = device or torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with ExitStack() as stack:
        runner: Runner
        if config.tensor_parallel * config.pipeline_parallel == 1:
            runner = LocalRunner(path, config, max_seq=max_seq, device=device)
        else:
            runner = _part("ranks")(path, config, max_seq=max_seq, device=device, threads=threads, on_lost=on_lost)
        stack.callback(runner.close)
        scheduler = Scheduler(config.slots, BlockPool(runner.num_blocks), runner.depth)
        drafts: Drafts | None = None
        if drafters or config.embedded.speculation.drafter != "none":
            drafts = _part("drafts")(
                config, drafters, path, runner, scheduler.pool, max_seq=max_seq, threads=threads, device=device
            )
        engine = EmbeddedEngine(
            runner,
            scheduler,
            capabilities=capabilities_of(config, "cuda" if device.type == "cuda" else "cpu"),
            max_seq=max_seq,
            threads=threads,
            eos_ids=eos_ids,
            version=version,
            in_flight=config.update == "inflight",
            drafts=drafts,
        )
        stack.pop_all()
    if not migratable:
        return engine
    migrating: GenerationEngine = _part("migration")(engine)
    return migrating


def _part(name: str) -> Any:
    module, _, attribute = _PARTS[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
