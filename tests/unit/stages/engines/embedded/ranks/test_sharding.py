"""The division of a model among ranks: the parts make the whole, and stages have equal work."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from stages.engines.embedded.division import divide
from stages.engines.embedded.ranks.rank_model import shard_tensors
from stages.models.spec import ModelSpec, tensor_shapes

SMOLLM2 = ModelSpec(
    num_layers=30,
    hidden_size=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    intermediate_size=1536,
    vocab_size=49152,
    max_positions=8192,
    norm_eps=1e-5,
    rope_theta=1e5,
    tied_embeddings=True,
)
SMALL = replace(
    SMOLLM2, num_layers=5, hidden_size=12, num_heads=6, head_dim=4, intermediate_size=17, vocab_size=31,
    max_positions=8, tied_embeddings=False,
)  # fmt: skip


def test_stages_have_about_equal_work() -> None:
    """SmolLM2's head has 49152 x 576 weights, a block 3.54 million: as much as 8 blocks. So 38 over p."""
    sizes = {p: [len(share.layers) for share in divide(SMOLLM2, 1, p)] for p in (1, 2, 3, 4)}
    assert sizes == {1: [30], 2: [19, 11], 3: [12, 13, 5], 4: [9, 9, 10, 2]}


def test_heads_go_with_their_keys() -> None:
    shares = divide(SMOLLM2, 2, 1)
    assert [(share.heads, share.kv_heads) for share in shares] == [
        (range(0, 3), range(0, 1)),
        (range(3, 9), range(1, 3)),
    ]
    assert [share.spec(SMOLLM2).num_heads // share.spec(SMOLLM2).num_kv_heads for share in shares] == [3, 3]
    replicated = divide(SMALL, 6, 1)
    assert [(share.heads.start, share.kv_heads) for share in replicated] == [
        (i, range(i // 2, i // 2 + 1)) for i in range(6)
    ]


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 2), (2, 1), (3, 2), (2, 5)])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("features", [(), ("qkv_bias", "qk_norm")])
def test_the_parts_are_the_whole(tensor: int, pipeline: int, tied: bool, features: tuple[str, ...]) -> None:
    """Every number of the model is on some rank, once (norms and embedding: once a rank that uses them)."""
    spec = replace(SMALL, tied_embeddings=tied, **dict.fromkeys(features, True))
    sizes = tensor_shapes(spec)
    total = sum(torch.Size(size).numel() for size in sizes.values())
    numbers = torch.arange(1, total + 1, dtype=torch.float64).split([torch.Size(s).numel() for s in sizes.values()])
    tensors = {name: part.view(size) for (name, size), part in zip(sizes.items(), numbers, strict=True)}
    shares = divide(spec, tensor, pipeline)
    assert [layer for share in shares[::tensor] for layer in share.layers] == list(range(5))
    held: dict[int, int] = {}
    for share in shares:
        mine = shard_tensors(share, spec, tensors)
        own = tensor_shapes(share.spec(spec))
        assert mine.keys() == own.keys()
        for name, part in mine.items():
            if "proj" in name or "norm" in name:
                assert tuple(part.shape) == own[name]
            used = (name != "lm_head.weight" or share.last) and (name != "model.embed_tokens.weight" or share.first)
            for number in part.flatten().tolist() if used else []:
                held[int(number)] = held.get(int(number), 0) + 1
    assert held.keys() == set(range(1, total + 1))
    once = {name for name in tensors if "proj" in name or name == "lm_head.weight"}
    assert {held[int(n)] for name in once for n in tensors[name].flatten().tolist()} == {1}


@pytest.mark.parametrize("first", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_copy_of_a_tied_embedding_changes_nothing(first: str) -> None:
    """In whatever order the two come: the head's rows are taken from the embedding."""
    spec = replace(SMALL, tied_embeddings=True)
    embedding = torch.arange(31.0 * 12).view(31, 12)
    tensors = {first: embedding, "lm_head.weight": embedding, "model.embed_tokens.weight": embedding}
    for share in divide(spec, 2, 2):
        mine, expected = (shard_tensors(share, spec, t) for t in (tensors, {"model.embed_tokens.weight": embedding}))
        assert mine.keys() == expected.keys()
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "message"),
    [
        (4, 1, r"engine\.tensor_parallel: given 4; .*9 query and 3 key/value heads can be held by 1, 2, 3, 9 ranks"),
        (0, 1, r"engine\.tensor_parallel: given 0"),
        (1, 31, r"engine\.pipeline_parallel: given 31; the model has 30 blocks, so from 1 to 30 stages"),
    ],
)
def test_what_cannot_be_divided_is_refused(tensor: int, pipeline: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        divide(SMOLLM2, tensor, pipeline)
