"""A gang's process group, and a collective that notices when its ranks do different things."""

from __future__ import annotations

import hashlib

import torch
import torch.distributed as dist

from pipeline.workers.messages import WorkerSpec
from stages.models.parallel import CollectiveWatch
from stages.models.protocol import Rank


def join(spec: WorkerSpec, collective_timeout_s: float) -> CollectiveWatch:
    rank = Rank(
        spec.index, spec.size, spec.rendezvous, 1, collective_timeout_s=collective_timeout_s, listening=spec.listening
    )
    missing_ranks = CollectiveWatch(rank)
    dist.init_process_group(
        "gloo", store=missing_ranks.store, rank=spec.index, world_size=spec.size, timeout=missing_ranks.timeout
    )
    return missing_ranks


def leave() -> None:
    dist.destroy_process_group()


def assert_same_everywhere(text: str) -> None:
    """Every rank must call this with the same text."""
    mine = int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big")
    total = torch.tensor([mine], dtype=torch.int64)
    dist.all_reduce(total)
    assert total.item() == mine * dist.get_world_size(), f"the ranks run different nodes; this one {text}"
