"""The places of a rank's tensors in the whole model, against whole tensors cut by hand."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch

from stages.models.build import Blueprint
from stages.models.checkpoints import _cut, pieces_of, rectangles
from stages.models.config import LayoutConfig, ModelConfig
from stages.models.kernels.blocks import ComposedKernels
from stages.models.parallel import ParallelRank
from stages.models.spec import read_spec


def test_rectangles_hold_a_run_of_elements_in_order() -> None:
    for columns in (1, 2, 5):
        matrix = np.arange(4 * columns).reshape(4, columns)
        for start, end in itertools.combinations_with_replacement(range(matrix.size + 1), 2):
            found = list(rectangles(start, end, columns))
            elements = [matrix[r : r + h, c : c + w].ravel() for r, c, h, w in found]
            assert np.concatenate([np.empty(0, int), *elements]).tolist() == list(range(start, end))
            assert len(found) <= 3


def blueprint(tensor_rank: int, tensor_size: int, size: int = 256) -> Blueprint:
    spec = dataclasses.replace(read_spec("random:tiny"), vocab_size=size, intermediate_size=size)
    rank = ParallelRank(tensor_rank, tensor_size, 0, 1, 0, 1, torch.device("cpu"), missing_ranks=None)
    return Blueprint(ModelConfig(path="random:tiny"), spec, LayoutConfig(tensor=tensor_size), rank, ComposedKernels())


@pytest.mark.parametrize(
    ("name", "whole", "axis"),
    [
        ("self_attention.linear_qkv.weight", (8, 3), 0),
        ("self_attention.linear_proj.weight", (3, 8), 1),
        ("mlp.linear_fc1.weight", (8, 3), 0),
        ("input_layernorm.weight", (5,), None),
        ("output_layer.weight", (1, 4), None),
        ("embedding.word_embeddings.weight", (7, 3), 0),
        ("mlp.linear_fc2.weight", (3, 7), 1),
    ],
)
@pytest.mark.parametrize("shards", [1, 3])
def test_ranks_cover_the_whole_tensor_once(name: str, whole: tuple[int, ...], axis: int | None, shards: int) -> None:
    """Cut over two tensor-parallel ranks, and each part over data-parallel ones at places that are no rows' ends. The
    embedding's 7 rows, and the 7 columns of a product, were filled up to 8."""
    padded = tuple(8 if size == 7 else size for size in whole)
    tensor = torch.arange(int(np.prod(padded)), dtype=torch.float32).view(padded)
    if name == "mlp.linear_fc1.weight":  # Megatron cuts gate and up each, and puts a rank's halves together
        gate, up = tensor.chunk(2)
        parts = [torch.cat([gate.chunk(2)[rank], up.chunk(2)[rank]]) for rank in range(2)]
        expected = {
            "weights.blocks.3.mlp.linear_fc1.weight.gate": gate,
            "weights.blocks.3.mlp.linear_fc1.weight.up": up,
        }
    else:
        parts = [tensor, tensor] if axis is None else list(tensor.chunk(2, axis))
        expected = {f"weights.blocks.3.{name}": tensor[tuple(map(slice, whole))]}
    found = {key: torch.full_like(t, -1.0) for key, t in expected.items()}
    for rank, part in enumerate(parts):
        if axis is None and rank:
            continue
        for piece in pieces_of(name, 3, part, blueprint(rank, 2, 7)):
            start = 0
            for run in part.contiguous().view(-1).tensor_split(shards):
                for shard in _cut("weights", piece, part, run, start, 0):
                    target = found[shard.key][shard.global_slice()]
                    assert (target == -1).all(), "written twice"
                    assert shard.global_shape == tuple(expected[shard.key].shape)
                    found[shard.key][shard.global_slice()] = shard.data
                start += run.numel()
    for key, whole_tensor in expected.items():
        assert torch.equal(found[key], whole_tensor), key
