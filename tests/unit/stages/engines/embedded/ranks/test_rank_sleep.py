"""A rank of an engine that sleeps leaves no memory on its device. The device is a CPU that is said to be a GPU:
storages move as they would between the two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from stages.engines.config import EmbeddedConfig, EngineConfig
from stages.engines.embedded.division import divide
from stages.engines.embedded.ranks.rank_model import BUSY_FILE, RankModel, RankSpec, shard_tensors
from stages.engines.embedded.runner import all_tensors
from stages.models.spec import RANDOM_TINY, read_spec, tensor_shapes

SPEC = replace(read_spec(RANDOM_TINY), tied_embeddings=False)


def test_a_sleeping_ranks_cache_and_weights_leave_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.zeros(1).tofile(tmp_path / BUSY_FILE)
    # oneDNN's opaque tensors are for CPUs alone: a GPU's are plain
    monkeypatch.setattr("stages.engines.embedded.kernels.reference.pack", _plain)
    (share,) = divide(SPEC, 1, 1)
    engine = EngineConfig(embedded=EmbeddedConfig(kernels="torch"))
    rank = RankModel(RankSpec(0, 1, 1, share, SPEC, engine, 32, 4, "cpu", 1, str(tmp_path)))
    rng = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=rng) for name, shape in tensor_shapes(SPEC).items()}
    rank.set_weights(rank.prepare(shard_tensors(share, SPEC, tensors)))
    assert rank._weights is not None
    monkeypatch.setattr(rank, "_device", torch.device("cuda"))
    own = all_tensors(rank._weights)
    before = [tensor.clone() for tensor in own]
    rank.sleep()
    assert not rank.awake
    assert {tensor.untyped_storage().nbytes() for tensor in own} == {0}
    rank.wake()
    assert rank.awake
    assert all(torch.equal(now, then) for now, then in zip(own, before, strict=True))


def _plain(parts: dict[int, torch.Tensor], dtype: torch.dtype, old: torch.Tensor | None, wide: bool) -> torch.Tensor:
    assert old is None
    return torch.cat([parts[start].to(dtype) for start in sorted(parts)])
