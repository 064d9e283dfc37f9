"""Run stages in this process alone, for `replay` and `export`. Writes nothing to the run."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.config.loading import to_yaml
from pipeline.config.placement import gang_of
from pipeline.config.preflight import check_secrets
from pipeline.config.run import RunConfig
from pipeline.workers.messages import WorkerSpec
from pipeline.workers.runtime import StageRuntime
from stages.models.config import LayoutConfig
from stages.models.protocol import MODEL_ROLES, Role


def alone(config: RunConfig, scratch: Path) -> RunConfig:
    """Return the config for this process alone, with its own place for published weights."""
    single = copy.deepcopy(config)
    single.cluster.weights_dir = str(scratch / "board")
    for gang in single.placement.gangs.values():
        gang.weights_dir = None
    return single


def held_in_one_process(config: RunConfig, roles: Collection[Role]) -> bool:
    """Return True if the run, too, held the models of each of these roles in one process. Then sums may have the same
    bits."""
    gangs = [config.placement.gangs[config.placement.roles[role.value]] for role in roles if role in MODEL_ROLES]
    return all(gang.workers == 1 for gang in gangs)


@contextmanager
def runtime_for(config: RunConfig, roles: Role | Collection[Role]) -> Iterator[StageRuntime]:
    """Return a runtime in this process with only what these roles need. The first role decides the
    number of threads."""
    check_secrets(config)
    held = [roles] if isinstance(roles, Role) else [*roles]
    only = copy.deepcopy(config)
    gangs = [gang_of(only.placement, role) for role in held]
    settings = only.placement.gangs[gangs[0]]
    one_rank = held_in_one_process(config, held)
    settings.workers, settings.layout, settings.offload = 1, LayoutConfig(), "none"
    only.cluster.migrate_rows_below = 0  # there is no other replica
    only.placement.gangs = {"replay": settings, "elsewhere": copy.deepcopy(settings)}
    only.placement.roles = {r.value: "replay" if r in held else "elsewhere" for r in Role}
    only.placement.gangs["replay"].concurrent_shards = 1
    only.placement.gangs["elsewhere"].concurrent_shards = 1
    spec = WorkerSpec(
        gang="replay",
        index=0,
        size=1,
        incarnation=0,
        runtime="",
        config_yaml=to_yaml(only),
    )
    runtime = StageRuntime(spec, same_layout=one_rank)
    try:
        yield runtime
    finally:
        runtime.close()
