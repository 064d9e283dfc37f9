"""A run's stages in this process alone: what `replay` and `export` compute with. Nothing is written to the run.

May import everything below.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
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


def held_in_one_process(config: RunConfig, roles: Collection[Role]) -> bool:
    """Whether the run held the models of each of these roles in one process, too: sums may then have the same bits."""
    gangs = [config.placement.gangs[config.placement.roles[role.value]] for role in roles if role in MODEL_ROLES]
    return all(gang.workers == 1 for gang in gangs)


@contextmanager
def runtime_for(config: RunConfig, roles: Role | Collection[Role]) -> Iterator[StageRuntime]:
    """A runtime in this process that holds what a role (or several, with the first one's threads) needs and nothing
    else."""
    held = [roles] if isinstance(roles, Role) else [*roles]
    only = copy.deepcopy(config)
    gangs = [only.placement.roles[role.value] for role in held]
    settings = only.placement.gangs[gangs[0]]
    one_rank = held_in_one_process(config, held)
    settings.workers, settings.layout, settings.offload = 1, LayoutConfig(), "none"
    only.cluster.move_rows_below = 0  # there is no other replica
    only.placement.gangs = {"replay": settings, "elsewhere": copy.deepcopy(settings)}
    only.placement.roles = {r.value: "replay" if r in held else "elsewhere" for r in Role}
    only.placement.gangs["replay"].slots = 1
    only.placement.gangs["elsewhere"].slots = 1
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
