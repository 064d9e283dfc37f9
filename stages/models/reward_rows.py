"""Rows of tokens that a reward model scores at their last token: as arrays, as this rank's micro-batches, and the
scores read off the hidden states.

Suffixes: B rows of a micro-batch, N tokens of all of them, H hidden.

May import numpy, torch, jaxtyping, stages.ppo and this folder.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from beartype import beartype
from jaxtyping import Int, jaxtyped
from torch import Tensor

from stages.models.build import Blueprint
from stages.models.forward import MicroBatch, cut_micro_batches
from stages.models.layers import HiddenOutput
from stages.models.products import rows_multiple
from stages.ppo.micro_batches import balanced, micro_batches


@jaxtyped(typechecker=beartype)
@dataclass(frozen=True)
class TokenRows:
    """Rows of two tokens or more; what lies after a row's end is read by nobody."""

    tokens: Int[np.ndarray, "rows seq"]
    lengths: Int[np.ndarray, " rows"]

    @staticmethod
    def of(rows: Sequence[Sequence[int]]) -> TokenRows:
        """Rows of uneven lengths as one array."""
        lengths = np.array([len(row) for row in rows], np.int32)
        tokens = np.zeros((len(rows), int(lengths.max(initial=0))), np.int32)
        for padded, row in zip(tokens, rows, strict=True):
            padded[: len(row)] = row
        return TokenRows(tokens, lengths)

    def last_tokens(self) -> np.ndarray:
        """bool [rows, seq]: the last token of each row."""
        return np.arange(self.tokens.shape[1]) == self.lengths[:, None] - 1


def ended(tokens: Sequence[int], eos_ids: Sequence[int]) -> list[int]:
    """A row as reward models see it, prompt and response: it ends in EOS, once, also where a response was cut."""
    return [*tokens] if tokens and tokens[-1] in eos_ids else [*tokens, eos_ids[0]]


def score_micro_batches(rows: TokenRows, blueprint: Blueprint, max_tokens: int) -> list[MicroBatch]:
    """This rank's share of some rows that are scored: nearly as many tokens as every other's."""
    rank = blueprint.parallel_rank
    share = balanced(rows.lengths, rank.data_size)[rank.data_rank]
    if not len(share):
        return []
    return cut_micro_batches(
        rows.tokens, rows.last_tokens(), share, rank.device, max_tokens=max_tokens, multiple=_multiple(blueprint)
    )


def group_micro_batches(
    rows: TokenRows, groups: Sequence[np.ndarray], blueprint: Blueprint, max_tokens: int
) -> list[MicroBatch]:
    """This rank's share of groups of rows that are compared with one another: a group is never cut, so that its pairs
    are in one micro-batch, which may then have more than `max_tokens`. At least one, since every rank takes part in the
    reduction of gradients; `is_share` tells whether it counts."""
    rank = blueprint.parallel_rank
    sizes = np.array([int(rows.lengths[group].sum()) for group in groups])
    share = balanced(sizes, rank.data_size)[rank.data_rank]
    if not len(share):
        share = np.zeros(1, np.int64)
    made = []
    for part in micro_batches(share, sizes[share], max_tokens=max_tokens):
        together = np.concatenate([groups[number] for number in part])
        made += cut_micro_batches(
            rows.tokens,
            rows.last_tokens(),
            together,
            rank.device,
            max_tokens=int(sizes[part].sum()),
            multiple=_multiple(blueprint),
        )
    return made


def is_share(groups: Sequence[np.ndarray], blueprint: Blueprint) -> bool:
    """Whether this rank's micro-batches of `group_micro_batches` are its own; otherwise nothing of the loss may depend
    on them: another rank has them too."""
    return blueprint.parallel_rank.data_rank < len(groups)


def last_scores(hidden_NH: Tensor, batch: MicroBatch, head: HiddenOutput) -> Tensor:
    """The head's output at each row's last token, float32 [B], in the micro-batch's order."""
    assert head.weight is not None  # a critic's stand-in always has one
    last = torch.from_numpy(np.cumsum(batch.lengths) - 1).to(hidden_NH.device)
    return F.linear(hidden_NH[last].float(), head.weight, head.bias)[:, 0]


def _multiple(blueprint: Blueprint) -> int:
    rank = blueprint.parallel_rank
    sequence = rank.tensor_size if blueprint.layout.sequence_parallel else 1
    return math.lcm(sequence, rows_multiple(blueprint.dtype, rank.device))
