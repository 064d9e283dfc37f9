"""What this host and its GPUs have of memory, and the run as its memory is predicted (`memory.py`).

May import torch, pipeline.config.{memory, role_models, run}, stages.models (hf_config, protocol, spec).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from pipeline.config.memory import GIB, MemoryLimits, PlannedRun, PlannedScorer, board_bytes
from pipeline.config.role_models import read_model, role_models
from pipeline.config.run import RunConfig
from stages.models.hf_config import RANDOM_TINY
from stages.models.protocol import Role
from stages.models.spec import ModelSpec, read_spec

_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files that hold a number where the container has a limit: of control groups 2 and 1."""


def memory_limits(config: RunConfig) -> MemoryLimits:
    """The memory of this host, or of the container that this process is in, and of its GPUs, unless the config says."""
    given, num_devices = config.cluster, torch.cuda.device_count()
    host, device = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), math.inf
    for path in _CONTAINER_LIMITS:
        text = path.read_text().strip() if path.is_file() else ""
        host = min(host, int(text)) if text.isdigit() else host
    if num_devices and given.device_memory_gb is None and torch.cuda.is_available():
        device = min(torch.cuda.get_device_properties(number).total_memory for number in range(num_devices))
    return MemoryLimits(
        host=host if given.host_memory_gb is None else given.host_memory_gb * GIB,
        device=device if given.device_memory_gb is None else given.device_memory_gb * GIB,
        num_devices=num_devices,
    )


def planned_run(config: RunConfig, models: Mapping[Role, ModelSpec], limits: MemoryLimits) -> PlannedRun:
    """The run as its memory is predicted from. `models`: of `role_models`."""
    path = config.model.path
    own = {role: spec for role, spec in models.items() if config.model.path_of(role) != path}
    scorers = {(str(args["path"]), str(args.get("dtype", "float32"))) for args in config.scoring_models().values()}
    return PlannedRun(
        config,
        models[Role.POLICY],
        _stored_bytes(path),
        limits.num_devices > 0,
        own,
        scorers=tuple(PlannedScorer(read_spec(path), dtype, _stored_bytes(path)) for path, dtype in sorted(scorers)),
    )


def _stored_bytes(path: str) -> int:
    return 0 if path == RANDOM_TINY else sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))


def weights_bytes(config: RunConfig) -> int:
    """What published weights take on each host that has any. For a config that `preflight` let pass."""
    models = role_models(config, read_model("model.path", config.model.path))
    return board_bytes(planned_run(config, models, memory_limits(config)))
