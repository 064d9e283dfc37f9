"""Which part of a model each rank holds, when several ranks hold it together: sizes and slices, no processes.

Ranks are numbered stage by stage: rank r is number r % T of stage r // T, with T = engine.tensor_parallel.

    engine.pipeline_parallel   a stage has some of the blocks; the first one the embedding, the last one norm and head
    engine.tensor_parallel     of each block a rank has some heads (rows of q, k, v; columns of out) and some of the
                               MLP (rows of gate and up; columns of down); of the head some tokens

Parts need not be equal: heads go in groups of a key/value head with its queries, so 3 key/value heads on 2 ranks are
2 + 1. Where there are more ranks than key/value heads, several ranks hold the same one.
May import torch, stages.engines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from stages.engines.embedded.model.llama import LlamaShape

_EMBEDDING, _FINAL_NORM, _HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
_LAYERS = "model.layers."


@dataclass(frozen=True)
class Share:
    """What one rank holds."""

    layers: range
    heads: range
    kv_heads: range
    ffn: range
    tokens: range
    """Rows of the head; of no use on ranks that are not of the last stage."""
    first: bool
    last: bool

    def shape(self, whole: LlamaShape) -> LlamaShape:
        """Of the model that this rank computes. Untied: embedding and head are different parts."""
        return replace(
            whole,
            num_layers=len(self.layers),
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            ffn=len(self.ffn),
            tied=False,
        )


def divide(shape: LlamaShape, tensor: int, pipeline: int) -> list[Share]:
    """The share of every rank. Raises ValueError, key path first, for a division that cannot be."""
    check_division(shape.num_heads, shape.num_kv_heads, shape.num_layers, tensor, pipeline)
    stages = _stages(shape, pipeline)
    return [
        Share(
            layers=layers,
            heads=_heads(shape.num_heads, shape.num_kv_heads, tensor, index)[0],
            kv_heads=_heads(shape.num_heads, shape.num_kv_heads, tensor, index)[1],
            ffn=_part(shape.ffn, tensor, index),
            tokens=_part(shape.vocab, tensor, index),
            first=stage == 0,
            last=stage == pipeline - 1,
        )
        for stage, layers in enumerate(stages)
        for index in range(tensor)
    ]


def check_division(num_heads: int, num_kv_heads: int, num_layers: int, tensor: int, pipeline: int) -> None:
    """Raises ValueError, key path first, for what `divide` cannot do."""
    possible = [n for n in range(1, num_heads + 1) if n <= num_kv_heads or (n % num_kv_heads == num_heads % n == 0)]
    if tensor not in possible:
        raise ValueError(
            f"engine.tensor_parallel: given {tensor}; the model's {num_heads} query and {num_kv_heads} key/value heads "
            f"can be held by {', '.join(map(str, possible))} ranks"
        )
    if not 1 <= pipeline <= num_layers:
        raise ValueError(
            f"engine.pipeline_parallel: given {pipeline}; the model has {num_layers} blocks, so from 1 to {num_layers} "
            "stages"
        )


def shard_tensors(share: Share, shape: LlamaShape, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's slices (views) of some of the model's checked tensors, under the names that its own model has for
    them. Where it does not use embedding or head it has one row of it, since a packed matrix has at least one."""
    mine: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(_LAYERS):
            layer, _, part = name.removeprefix(_LAYERS).partition(".")
            if int(layer) in share.layers:
                mine[f"{_LAYERS}{int(layer) - share.layers.start}.{part}"] = _slice(share, shape, part, tensor)
        elif name == _FINAL_NORM:
            mine[name] = tensor
        elif name == _EMBEDDING:
            mine[name] = tensor if share.first else tensor[:1]
        if share.last and name == (_EMBEDDING if shape.tied else _HEAD):
            mine[_HEAD] = _rows(tensor, share.tokens)
        elif name == _HEAD or (shape.tied and name == _EMBEDDING):
            mine[_HEAD] = tensor[:1]
    return mine


def _slice(share: Share, shape: LlamaShape, part: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a block: norms are whole on every rank."""
    dim = shape.head_dim
    queries = range(share.heads.start * dim, share.heads.stop * dim)
    keys = range(share.kv_heads.start * dim, share.kv_heads.stop * dim)
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "gate_proj": share.ffn, "up_proj": share.ffn}
    columns = {"o_proj": queries, "down_proj": share.ffn}
    linear = part.split(".")[-2]
    if linear in rows:
        return _rows(tensor, rows[linear])
    if linear in columns:
        return tensor[:, columns[linear].start : columns[linear].stop]
    return tensor


def _rows(tensor: torch.Tensor, rows: range) -> torch.Tensor:
    return tensor[rows.start : rows.stop]


def _part(size: int, parts: int, index: int) -> range:
    """The index-th of nearly equal parts."""
    return range(size * index // parts, size * (index + 1) // parts)


def _heads(num_heads: int, num_kv_heads: int, tensor: int, index: int) -> tuple[range, range]:
    group = num_heads // num_kv_heads
    if tensor <= num_kv_heads:
        keys = _part(num_kv_heads, tensor, index)
        return range(keys.start * group, keys.stop * group), keys
    heads = _part(num_heads, tensor, index)
    return heads, range(heads.start // group, heads.start // group + 1)


def _stages(shape: LlamaShape, pipeline: int) -> list[range]:
    """The blocks of each stage, so that all have nearly the same number of weights to multiply with: the head counts as
    the blocks that it is as large as. Stage 0, where the scheduler runs too, is never the largest by rounding."""
    heads, keys = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    block = shape.hidden * (2 * heads + 2 * keys + 3 * shape.ffn)
    head = shape.vocab * shape.hidden / block
    before = pipeline - 1
    of_last = min(max(1, round((shape.num_layers + head) / pipeline - head)), shape.num_layers - before)
    of_last = shape.num_layers if pipeline == 1 else of_last
    cuts = [(shape.num_layers - of_last) * i // max(before, 1) for i in range(before)]
    cuts += [shape.num_layers - of_last, shape.num_layers]
    return [range(start, stop) for start, stop in pairwise(cuts)]
