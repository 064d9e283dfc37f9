"""The learned drafter: a small recurrent head on the model's hidden state, trained by distillation as the run goes.

    h     hidden state (normed) from which the row's last token y was drawn      s_0 = h
    s_k+1 = s_k + a * W_down (silu(g) * u),   [g, u] = W_up [s_k / rms(s_k), E(y)]
    logits = U s_k+1                           the next guess, and y of the next step

s imitates the hidden state that the model itself would have after y, so U starts as the model's own output rows, E as
its embedding. Both are of a reduced vocabulary: the tokens most frequent in the run's responses (`distillation`). A
guess is drawn with the noise of its own position (Gumbel coupling): where the head's distribution is near the model's,
so is the token, also at temperature 1. After ReDrafter (Cheng et al. 2024) and EAGLE (Li et al. 2024).

The head is about speed only, so it is saved nowhere; every engine learns its own. May import numpy, torch,
stages.engines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64, UInt64

from stages.engines.embedded.draft_tree import DraftTree
from stages.engines.embedded.drafts.distillation import Head, Student, cell_input
from stages.engines.embedded.drafts.drafters import Draft
from stages.engines.embedded.kernels.protocol import DraftingKernels, Guessed, HeadWeights, Kernels
from stages.engines.embedded.rows import Row
from stages.engines.embedded.sampling.noise import gumbel_of, noise_keys, token_words

_GAPS = (0.5, 1.5, 3.0)
"""Bounds between the classes of confidence: how far the best token is ahead of the second, and each other one behind
the best, in nats, noise included."""
_RANKS = 4
"""Guesses behind one token that are distinguished in confidence: the best, the second, ..."""
KIND = "learned"


@dataclass(frozen=True, eq=False)
class _Working:
    """The head as it drafts: a copy, packed like the model's own layers."""

    weights: HeadWeights
    ids: Int64[np.ndarray, " R"]
    slots: Mapping[int, int]
    """Token -> its index among `ids`."""


class LearnedDrafter:
    """Owns the head, and the hidden states of the rows in flight: of long ones, where they are too many for their part
    of the memory, the last ones."""

    kinds: tuple[str, ...] = (KIND,)
    by_position = True
    wants_hidden = True

    def __init__(self, student: Student, kernels: Kernels, dtype: torch.dtype, branches: int = 1) -> None:
        """`dtype`: of the head's weights when it drafts, bfloat16 where that is in one call; it learns in float32.
        `branches`: guesses for each position of a draft."""
        self.generation = 0
        self._branches = branches
        self._student, self._kernels = student, kernels
        self._dtype = dtype
        self._unroll: Callable[..., Guessed] = partial(unroll, kernels)
        if isinstance(kernels, DraftingKernels):
            self._dtype, self._unroll = torch.bfloat16, kernels.unroll
        self._working: _Working | None = None
        self._hidden: dict[Row, list[np.ndarray]] = {}
        """Hidden states of each row, of its last tokens without a gap."""
        self.held_bytes = 0
        """Of those."""

    def observe(self, row: Row, hidden: Float32[np.ndarray, "kept C"]) -> None:
        self._hidden.setdefault(row, []).append(hidden.copy())  # a view would keep the whole pass's
        self.held_bytes += hidden.nbytes
        while self.held_bytes > self._student.in_flight_bytes and self._forget():
            pass

    def _forget(self) -> bool:
        """The older half of what is held of the row of which most is; False if nothing is but each row's last pass."""
        states = max(self._hidden.values(), key=len)
        older = states[: len(states) // 2]
        del states[: len(older)]
        self.held_bytes -= sum(part.nbytes for part in older)
        return bool(older)

    def finish(self, row: Row) -> None:
        states = self._hidden.pop(row, None)
        self.held_bytes -= sum(part.nbytes for part in states or ())
        if states is not None and row.finished is not None:
            hidden = np.concatenate(states)
            self._student.add(hidden, row.tokens[-len(hidden) :])

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._student.refit(tensors)

    def train(self) -> bool:
        if not self._student.step():
            return False
        if self._student.head_is_due:
            self._publish(self._student.publish())
        return True

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        working = self._working
        known = [row for row in rows if row in self._hidden] if working is not None else []
        if working is None or not known:
            return [None] * len(rows)
        limits = dict(zip(rows, longest, strict=True))
        depth = max(limits[row] for row in known)
        state = self._student.normed(torch.from_numpy(np.stack([self._hidden[row][-1][-1] for row in known])))
        other = len(working.ids)
        slots = np.array([working.slots.get(row.tokens[-1], other) for row in known], np.int64)
        temperatures = [row.request.sampling.temperature for row in known]
        keys = _keys(known, depth) if any(temperatures) else np.zeros((len(known), depth), np.uint64)
        banned = [self._slots_of(row.banned(ahead)) for row in known for ahead in range(depth)]
        guessed = self._unroll(working.weights, state, slots, depth, self._branches, temperatures, keys, banned)
        tokens = working.ids[guessed.slots]
        levels = np.minimum(guessed.ranks, _RANKS - 1) * (len(_GAPS) + 1) + np.digitize(guessed.gaps, _GAPS)
        drafts = {
            row: _draft(limits[row], tokens[i], guessed.parents[i], guessed.ranks[i], levels[i])
            for i, row in enumerate(known)
        }
        return [drafts.get(row) for row in rows]

    def _slots_of(self, banned: tuple[int, ...]) -> tuple[int, ...]:
        """Of the tokens that a row cannot get, those that the head could guess."""
        working = self._working
        assert working is not None
        return tuple(working.slots[token] for token in banned if token in working.slots)

    @torch.inference_mode()
    def _publish(self, head: Head) -> None:
        ids, device = head.ids.numpy().copy(), head.out.device
        weights = HeadWeights(
            up=self._kernels.pack({0: head.up}, self._dtype, wide=True),
            down=self._kernels.pack({0: self._student.scale * head.down}, self._dtype, wide=True),
            out=self._kernels.pack({0: head.out}, self._dtype, wide=True),
            embedding=head.embedding.clone(),
            words=token_words(self._student.vocab, device)[:, torch.from_numpy(ids).to(device)],
        )
        self._working = _Working(weights, ids, {token: slot for slot, token in enumerate(ids.tolist())})
        self.generation += 1


def _draft(
    depth: int,
    tokens: Int64[np.ndarray, "depth G"],
    parents: Int64[np.ndarray, "depth G"],
    ranks: Int64[np.ndarray, "depth G"],
    levels: Int64[np.ndarray, "depth G"],
) -> Draft:
    """Of one row, down to so many positions."""
    there = ranks[:depth] >= 0
    numbers = np.cumsum(there.ravel()).reshape(there.shape) - 1
    """Of each guess in the tree."""
    behind = np.full_like(numbers, -1)
    behind[1:] = np.take_along_axis(numbers[:-1], parents[1:depth], 1)
    tree = DraftTree(tuple(tokens[:depth][there].tolist()), tuple(behind[there].tolist()))
    return Draft(tree, KIND, tuple(levels[:depth][there].tolist()))


def _keys(rows: Sequence[Row], depth: int) -> UInt64[np.ndarray, "rows depth"]:
    """Of the noise at the positions to be drafted."""
    parts = np.array([(r.request.seed, r.request.step, r.request.row, len(r.tokens)) for r in rows], np.int64)
    seeds, steps, numbers, positions = parts.T[:, :, None]
    return noise_keys(seeds, steps, numbers, positions + np.arange(depth))


def unroll(
    kernels: Kernels,
    head: HeadWeights,
    state: Float32[torch.Tensor, "rows C"],
    slots: Int64[np.ndarray, " rows"],
    depth: int,
    branches: int,
    temperatures: Sequence[float],
    keys: UInt64[np.ndarray, "rows depth"],
    banned: Sequence[Sequence[int]],
) -> Guessed:
    """The head's guesses for `depth` positions, as slots: of each position the `branches` that are least behind the
    best, summed over their path; those of one position are fed back for the next. `slots`: of the last tokens;
    `banned`: of each row and position, slots that it cannot get. Logits are not divided by the temperature: noise is
    multiplied by it."""
    num_rows, device = len(state), state.device
    warmth = torch.tensor(temperatures, device=device)
    noise = gumbel_of(keys.ravel(), head.words).view(num_rows, depth, -1) if any(temperatures) else None
    state, last = state[:, None], torch.from_numpy(slots).to(device)[:, None]
    totals = torch.zeros(num_rows, 1, device=device)
    found: list[tuple[torch.Tensor, ...]] = []
    for position in range(depth):
        items = last.shape[1]
        flat = state.reshape(num_rows * items, -1)
        fed = kernels.linear(cell_input(flat, head.embedding[last.reshape(-1)]), head.up, torch.float32)
        flat = flat + kernels.linear(kernels.gate(fed), head.down, torch.float32)
        scores = kernels.linear(flat, head.out, torch.float32).view(num_rows, items, -1)
        if noise is not None:
            scores = scores + (noise[:, position] * warmth[:, None])[:, None]
        for row in range(num_rows):
            for slot in banned[row * depth + position]:
                scores[row, :, slot] = float("-inf")
        best = scores.topk(min(max(branches, 2), scores.shape[-1]), dim=-1)
        behind = best.values[..., :1] - best.values
        sums = (totals[..., None] + behind).nan_to_num(nan=torch.inf, posinf=torch.inf).view(num_rows, -1)
        wanted = best.indices.shape[-1]
        lacking = max(branches - sums.shape[1], 0)
        least = F.pad(sums, (0, lacking), value=torch.inf).sort(stable=True, dim=-1)
        totals, chosen = least.values[:, :branches], least.indices[:, :branches].clamp(max=sums.shape[1] - 1)
        parents, ranks = chosen // wanted, chosen % wanted
        last = best.indices.view(num_rows, -1).gather(1, chosen)
        gaps = behind.view(num_rows, -1).gather(1, chosen + (ranks == 0).long())
        found.append((last, parents, ranks.masked_fill(totals == torch.inf, -1), gaps))
        state = flat.view(num_rows, items, -1).gather(1, parents[..., None].expand(-1, -1, flat.shape[-1]))
    return Guessed(*(torch.stack(each, 1).cpu().numpy() for each in zip(*found, strict=True)))
