"""A run's stages in this process alone: what `replay` and `export` compute with. Nothing is written to the run.

May import everything below.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.loading import to_yaml
from pipeline.config.run import RunConfig
from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.models.config import LayoutConfig
from stages.models.protocol import MODEL_ROLES, Role


def alone(config: RunConfig, scratch: Path) -> RunConfig:
    """The config for this process alone: published weights in a place of its own."""
    single = copy.deepcopy(config)
    single.cluster.weights_dir = str(scratch / "board")
    for gang in single.placement.gangs.values():
        gang.weights_dir = None
    return single


@contextmanager
def runtime_for(config: RunConfig, role: Role, scratch: Path) -> Iterator[StageRuntime]:
    """A runtime in this process that holds what `role` needs and nothing else."""
    only = copy.deepcopy(config)
    gang = only.placement.roles[role.value]
    settings = only.placement.gangs[gang]
    one_rank = settings.workers == 1 or role not in MODEL_ROLES
    settings.workers, settings.layout, settings.offload = 1, LayoutConfig(), "none"
    only.placement.gangs = {"replay": settings, "elsewhere": copy.deepcopy(settings)}
    only.placement.roles = {r.value: "replay" if r is role else "elsewhere" for r in Role}
    only.placement.gangs["replay"].slots = 1
    only.placement.gangs["elsewhere"].slots = 1
    spec = WorkerSpec(
        gang="replay",
        index=0,
        size=1,
        incarnation=0,
        rendezvous=f"file://{scratch / uuid.uuid4().hex}",
        runtime="",
        config_yaml=to_yaml(only),
    )
    runtime = StageRuntime(spec, same_layout=one_rank)
    try:
        yield runtime
    finally:
        runtime.close()
