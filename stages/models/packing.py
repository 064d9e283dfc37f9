"""Describe packed rows, the rows of a micro-batch one after another without padding, for Megatron and attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from stages.models.kernels.protocol import RotaryAngles


@dataclass
class Packing(PackedSeqParams):
    """Megatron's description of packed rows, which it passes to every block, with fields of our own. See `pack`."""

    positions: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    """int64: the position of each token within its row."""
    runs: tuple[tuple[int, int, int], ...] = ()
    """(first token, number of rows, length) of each run of adjacent rows of the same length."""
    _of_frequencies: Tensor | None = None
    _angles: RotaryAngles | None = None

    def angles(self, frequencies_P11D: Tensor) -> RotaryAngles:
        """Return cosines and sines of Megatron's rotary frequencies [positions, 1, 1, head dimension]. They are
        computed once, since they are the same for every block of a model."""
        if self._angles is None or self._of_frequencies is not frequencies_P11D:
            half_PD = frequencies_P11D[:, 0, 0].chunk(2, -1)[0].float()
            self._angles = RotaryAngles(half_PD.cos(), half_PD.sin(), self.positions)
            self._of_frequencies = frequencies_P11D
        return self._angles


def pack(lengths: Sequence[int], device: torch.device) -> Packing:
    """Return the packing of rows of these lengths, in this order. Rows of the same length should be adjacent."""
    runs, start = [], 0
    for length, alike in groupby(lengths):
        rows = len(list(alike))
        runs.append((start, rows, length))
        start += rows * length
    positions = torch.cat([torch.arange(length).repeat(rows) for _, rows, length in runs])
    starts = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32).to(device)
    longest = max(lengths)
    return Packing(
        qkv_format="thd",
        cu_seqlens_q=starts,
        cu_seqlens_kv=starts,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        positions=positions.to(device),
        runs=tuple(runs),
    )
