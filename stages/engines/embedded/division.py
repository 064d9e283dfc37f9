"""Divide a model among ranks. Loads no torch, because the checks of a config use this module too.

Ranks are numbered stage by stage. With T = engine.tensor_parallel, rank r belongs to stage r // T and has index r % T
in it.

    engine.pipeline_parallel   a stage holds some of the blocks. The first stage also holds the embedding, the last one
                               the final norm and the output layer
    engine.tensor_parallel     a rank holds a part of each block: some heads (rows of q, k, v and of their biases;
                               columns of out) and some hidden units of the MLP (rows of gate and up; columns of down).
                               In the last stage it also holds some rows of the output layer

Parts need not be equal. A key/value head and its query heads stay together. For example, two ranks divide 3 key/value
heads into 1 and 2. If there are more ranks than key/value heads, several ranks hold the same key/value head, each with
some of its query heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from stages.models.spec import ModelSpec


@dataclass(frozen=True)
class Share:
    """The part of a model that one rank holds."""

    layers: range
    heads: range
    kv_heads: range
    intermediate: range
    """Indices of the hidden units of the MLP that this rank holds."""
    tokens: range
    """Rows of the output layer, one per token; unused outside the last stage."""
    first: bool
    last: bool

    def spec(self, whole: ModelSpec) -> ModelSpec:
        """Return the sizes of this rank's part of the model `whole`. In the part, embedding and output layer are
        separate tensors, even if the whole model ties them. A rank may hold different rows of the two."""
        return replace(
            whole,
            num_layers=len(self.layers),
            num_heads=len(self.heads),
            num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate),
            tied_embeddings=False,
        )


def divide(spec: ModelSpec, tensor: int, pipeline: int) -> list[Share]:
    """Return the share of every rank. Raises ValueError if the model cannot be divided this way. The message begins
    with the config key."""
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
    """Check that `divide` can make this division. Raises ValueError if it cannot. The message begins with the config
    key."""
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


def _part(size: int, parts: int, index: int) -> range:
    """Cut range(size) into `parts` nearly equal parts, and return part number `index`."""
    return range(size * index // parts, size * (index + 1) // parts)


def _heads(num_heads: int, num_kv_heads: int, tensor: int, index: int) -> tuple[range, range]:
    group = num_heads // num_kv_heads
    if tensor <= num_kv_heads:
        keys = _part(num_kv_heads, tensor, index)
        return range(keys.start * group, keys.stop * group), keys
    heads = _part(num_heads, tensor, index)
    return heads, range(heads.start // group, heads.start // group + 1)


def _stages(spec: ModelSpec, pipeline: int) -> list[range]:
    """Return the blocks of each pipeline stage, with nearly the same number of weights to multiply by. The output layer
    counts in blocks. Stage 0 also runs the scheduler, so it gets no more blocks than a middle stage."""
    block = spec.hidden_size * (2 * spec.q_size + 2 * spec.kv_size + 3 * spec.intermediate_size)
    head = spec.vocab_size * spec.hidden_size / block
    num_before = pipeline - 1
    num_last = min(max(1, round((spec.num_layers + head) / pipeline - head)), spec.num_layers - num_before)
    num_last = spec.num_layers if pipeline == 1 else num_last
    cuts = [(spec.num_layers - num_last) * i // max(num_before, 1) for i in range(num_before)]
    cuts += [spec.num_layers - num_last, spec.num_layers]
    return [range(start, stop) for start, stop in pairwise(cuts)]
