"""Which part of a model each rank holds, when several ranks hold it together: sizes and slices, no processes.

Ranks are numbered stage by stage: rank r is number r % T of stage r // T, with T = engine.tensor_parallel.

    engine.pipeline_parallel   a stage has some of the blocks; the first one the embedding, the last one norm and head
    engine.tensor_parallel     of each block a rank has some heads (rows of q, k, v and of their biases; columns of
                               out) and some of the MLP (rows of gate and up; columns of down); of the head some tokens

Parts need not be equal: heads go in groups of a key/value head with its queries, so 3 key/value heads on 2 ranks are
2 + 1. Where there are more ranks than key/value heads, several ranks hold the same one.
May import torch, stages.models.spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise

import torch

from stages.models.spec import (
    DOWN_PROJ,
    EMBEDDING,
    FINAL_NORM,
    GATE_PROJ,
    K_BIAS,
    K_PROJ,
    LM_HEAD,
    O_PROJ,
    Q_BIAS,
    Q_PROJ,
    UP_PROJ,
    V_BIAS,
    V_PROJ,
    ModelSpec,
    layer_and_part,
    layer_tensor,
)


@dataclass(frozen=True)
class Share:
    """What one rank holds."""

    layers: range
    heads: range
    kv_heads: range
    intermediate: range
    """Of the MLP."""
    tokens: range
    """Rows of the head; of no use on ranks that are not of the last stage."""
    first: bool
    last: bool

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """Of the model that this rank computes. Untied: embedding and head are different parts."""
        return replace(
            whole,
            num_layers=len(self.layers),
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
            tied_embeddings=False,
        )


def divide(spec: ModelSpec, tensor: int, pipeline: int) -> list[Share]:
    """The share of every rank. Raises ValueError, key path first, for a division that cannot be."""
    check_division(spec, tensor, pipeline)
    stages = _stages(spec, pipeline)
    return [
        Share(
            layers=layers,
            heads=_heads(spec.num_heads, spec.num_kv_heads, tensor, index)[0],
            kv_heads=_heads(spec.num_heads, spec.num_kv_heads, tensor, index)[1],
            intermediate=_part(spec.intermediate_size, tensor, index),
            tokens=_part(spec.vocab_size, tensor, index),
            first=stage == 0,
            last=stage == pipeline - 1,
        )
        for stage, layers in enumerate(stages)
        for index in range(tensor)
    ]


def check_division(spec: ModelSpec, tensor: int, pipeline: int) -> None:
    """Raises ValueError, key path first, for what `divide` cannot do."""
    num_heads, num_kv_heads, num_layers = spec.num_heads, spec.num_kv_heads, spec.num_layers
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


def shard_tensors(share: Share, spec: ModelSpec, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """This rank's slices (views) of some of the model's checked tensors, under the names that its own model has for
    them. Where it does not use embedding or head it has one row of it, since a packed matrix has at least one."""
    mine: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        of_layer = layer_and_part(name)
        if of_layer is not None:
            layer, part = of_layer
            if layer in share.layers:
                mine[layer_tensor(layer - share.layers.start, part)] = _slice(share, spec, part, tensor)
        elif name == FINAL_NORM:
            mine[name] = tensor
        elif name == EMBEDDING:
            mine[name] = tensor if share.first else tensor[:1]
        if name == spec.output_tensor:  # a copy of a tied embedding adds nothing: the embedding comes too
            mine[LM_HEAD] = _rows(tensor, share.tokens) if share.last else tensor[:1]
    return mine


def _slice(share: Share, spec: ModelSpec, part: str, tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of a block: norms are whole on every rank."""
    dim = spec.head_dim
    queries = range(share.heads.start * dim, share.heads.stop * dim)
    keys = range(share.kv_heads.start * dim, share.kv_heads.stop * dim)
    rows = {
        **dict.fromkeys((Q_PROJ, Q_BIAS), queries),
        **dict.fromkeys((K_PROJ, V_PROJ, K_BIAS, V_BIAS), keys),
        **dict.fromkeys((GATE_PROJ, UP_PROJ), share.intermediate),
    }
    columns = {O_PROJ: queries, DOWN_PROJ: share.intermediate}
    if part in rows:
        return _rows(tensor, rows[part])
    if part in columns:
        return tensor[:, columns[part].start : columns[part].stop]
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


def _stages(spec: ModelSpec, pipeline: int) -> list[range]:
    """The blocks of each stage, so that all have nearly the same number of weights to multiply with: the head counts as
    the blocks that it is as large as. Stage 0, where the scheduler runs too, is never the largest by rounding."""
    block = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    head = spec.vocab_size * spec.hidden_size / block
    before = pipeline - 1
    of_last = min(max(1, round((spec.num_layers + head) / pipeline - head)), spec.num_layers - before)
    of_last = spec.num_layers if pipeline == 1 else of_last
    cuts = [(spec.num_layers - of_last) * i // max(before, 1) for i in range(before)]
    cuts += [spec.num_layers - of_last, spec.num_layers]
    return [range(start, stop) for start, stop in pairwise(cuts)]
