"""A gang's publication in every layout: the bytes, the order and the digest are those of one rank, whether all ranks
share a board, or some are on other hosts and send their parts. A rank that cannot write stops no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from stages.models import weights as gathering
from stages.models.config import LayoutConfig, LoraConfig, ModelConfig, SamplingConfig
from stages.models.host import MegatronHost
from stages.models.protocol import Rank, Role
from stages.ppo.config import PPOConfig
from storage.errors import StoreRefused
from storage.weights import FilePlace, Manifest, WeightBoard, WeightWrite
from tests.support.collectives import run_ranks
from tests.support.families import random_model

pytestmark = pytest.mark.processes

BLOCK_BYTES = 1000
"""A few rows of these models."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "TP2, PP2": ("padded", {"tensor": 2, "pipeline": 2}, {}),
    "TP4": ("padded", {"tensor": 4}, {}),
    "TP4, one head of keys": ("one head", {"tensor": 4}, {}),
    "TP2, DP2, biases, bfloat16": ("biases", {"tensor": 2}, {"dtype": "bfloat16"}),
    "TP2, DP2, adapters": ("biases", {"tensor": 2}, {"lora": LoraConfig(rank=3, targets=["qkv", "fc1", "fc2"])}),
}


class FullBoard(WeightBoard):
    """Owns what `WeightBoard` does. Its memory is full."""

    def put(self, write: WeightWrite, place: FilePlace, rows: np.ndarray, start: int = 0, stride: int = 0) -> None:
        raise StoreRefused("full")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of the models, of a board for each case with what one rank publishes, and of those of four ranks."""
    root = tmp_path_factory.mktemp("publication")
    sizes: dict[str, Any] = {"hidden_size": 36, "head_dim": 8, "num_attention_heads": 9, "num_key_value_heads": 3}
    sizes |= {"intermediate_size": 51, "tie_word_embeddings": True, "num_hidden_layers": 4}
    random_model("Llama 3.1", **sizes).save_pretrained(root / "padded")
    random_model("Qwen 2.5", num_attention_heads=4).save_pretrained(root / "biases")
    random_model("Qwen 2.5", num_attention_heads=4, num_key_value_heads=1).save_pretrained(root / "one head")
    for name in CASES:
        host = make_host(name, root, 0, 1)
        host.publish(WeightBoard(root / name / "alone"), 0)
        (root / name / "digest").write_text(host.digest(Role.POLICY))
        host.close()
    run_ranks(publish_all, 4, root)
    return root


def make_host(name: str, root: Path, index: int, size: int) -> MegatronHost:
    model, layout, settings = CASES[name]
    (root / name).mkdir(exist_ok=True)
    return MegatronHost(
        ModelConfig(path=str(root / model), **settings), SamplingConfig(), PPOConfig(),
        LayoutConfig(**layout) if size > 1 else LayoutConfig(), frozenset({Role.POLICY}),
        Rank(index, size, f"file://{root / name}/rendezvous{size}", 1), seed=0, total_steps=1,
    )  # fmt: skip


def publish_all(index: int, root: Path) -> None:
    gathering.BLOCK_BYTES = BLOCK_BYTES
    for name in CASES:
        host = make_host(name, root, index, 4)
        assert host.digest(Role.POLICY) == (root / name / "digest").read_text()
        shared = WeightBoard(root / name / "shared")
        two_hosts = WeightBoard(root / name / f"host {index % 2}")
        for board in (shared, two_hosts):
            refused = FullBoard(board.directory) if index == 1 or board is two_hosts else board
            if name != "TP2, DP2, adapters":  # rank 1 writes nothing of merged weights
                with pytest.raises(StoreRefused) if index == 0 else pytest.MonkeyPatch.context():
                    assert host.publish(refused, 0) is None
                dist.barrier()
                assert list(board.directory.iterdir()) == []
                dist.barrier()
            first = host.publish(board, 0)
            assert (first is None) == bool(index)
            assert host.publish(board, 0) == first, "again: it is compared, nothing is written"
        host.close()


def published(directory: Path) -> tuple[Manifest, bytes]:
    with WeightBoard(directory).open(0) as lease:
        lease.verify()
        return lease.manifest, lease.file.read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_several_ranks_publish_what_one_does(root: Path, name: str) -> None:
    expected, whole = published(root / name / "alone")
    assert len(expected.tensors) > 10
    for board in ("shared", "host 0"):
        found, read = published(root / name / board)
        assert (found.tensors, found.digest) == (expected.tensors, expected.digest)
        assert read == whole
    assert list((root / name / "host 1").iterdir()) == []
