"""Zeros that make a model divide over tensor-parallel ranks.

    vocabulary   rows of embedding and output layer; their logits are excluded from every softmax
    MLP          rows of gate and up, columns of down
    attention    whole groups of queries with their key and value: rows of q, k, v, columns of o

Each is zero at the start and stays so, exactly, without a mask: a padded unit's output is zero, so that the gradient of
what it is multiplied with is; and what it is multiplied with is zero, so that its own gradient is. AdamW moves a zero
with a zero gradient nowhere, and a gradient norm does not see it. (Queries added to a group that has others would not
do: they read that group's values, and the gradient of their columns of o is not zero.) Nothing outside a rank sees
padding: `hf_conversion` adds it on the way in and takes it off on the way out.

May import stages.models.spec and the standard library.
"""

from __future__ import annotations

from dataclasses import replace

from stages.models.spec import ModelSpec


def padded(spec: ModelSpec, tensor: int) -> ModelSpec:
    """The model as `tensor` ranks hold it in equal parts; for 1 the model itself."""
    groups = spec.num_kv_heads if _divides(spec, tensor) else _multiple(spec.num_kv_heads, tensor)
    return replace(
        spec,
        num_heads=spec.num_heads // spec.num_kv_heads * groups,
        num_kv_heads=groups,
        intermediate_size=_multiple(spec.intermediate_size, tensor),
        vocab_size=_multiple(spec.vocab_size, tensor),
    )


def _divides(spec: ModelSpec, tensor: int) -> bool:
    """Whether heads need no padding: every rank has as many whole groups, or (Megatron's own way where there are fewer
    groups than ranks) the ranks of a group share its key and value and split its queries, and hold equal parts of the
    fused projection."""
    if spec.num_kv_heads % tensor == 0:
        return True
    fused = spec.q_size + 2 * spec.kv_size
    return tensor % spec.num_kv_heads == spec.num_heads % tensor == fused % tensor == 0


def _multiple(size: int, of: int) -> int:
    return -(-size // of) * of
