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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Float32, Int32, Int64

from stages.engines.distillation import Head, Pupil, cell_input
from stages.engines.drafting import Draft
from stages.engines.kernels import Kernels
from stages.engines.noise import gumbel_of, noise_keys, token_words
from stages.engines.packed import Packed
from stages.engines.rows import Row

_MARGINS = (0.5, 1.5, 3.0)
"""Bounds between the classes of confidence: how far the best token is ahead of the second, in nats, noise included."""
KIND = "learned"


@dataclass(frozen=True, eq=False)
class _Working:
    """The head as it drafts: a copy, packed like the model's own layers."""

    up: Packed
    down: Packed
    out: Packed
    embedding: Float[torch.Tensor, "R+1 C"]
    ids: Int64[np.ndarray, " R"]
    words: Int32[torch.Tensor, "1 R"]
    """Of the noise."""
    slots: Mapping[int, int]
    """Token -> its index among `ids`."""


class LearnedDrafter:
    """Owns the head, and the hidden states of the rows in flight."""

    kinds: tuple[str, ...] = (KIND,)
    by_position = True
    wants_hidden = True

    def __init__(self, pupil: Pupil, kernels: Kernels, dtype: torch.dtype) -> None:
        """`dtype`: of the head's weights when it drafts; it learns in float32."""
        self.generation = 0
        self._pupil, self._kernels, self._dtype = pupil, kernels, dtype
        self._working: _Working | None = None
        self._hidden: dict[Row, list[np.ndarray]] = {}
        """Normed hidden states of each row, of its last tokens without a gap."""
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def observe(self, row: Row, hidden: Float32[np.ndarray, "kept C"]) -> None:
        self._hidden.setdefault(row, []).append(hidden.copy())  # a view would keep the whole pass's

    def finish(self, row: Row) -> None:
        states = self._hidden.pop(row, None)
        if states is not None and row.finished is not None:
            hidden = np.concatenate(states)
            self._pupil.add(hidden, row.tokens[-len(hidden) :])

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._pupil.refit(tensors)

    def train(self) -> bool:
        if not self._pupil.step():
            return False
        if self._pupil.head_is_due:
            self._publish(self._pupil.publish())
        return True

    @torch.inference_mode()
    def propose(self, rows: Sequence[Row], longest: Sequence[int]) -> list[Draft | None]:
        working = self._working
        known = [row for row in rows if row in self._hidden] if working is not None else []
        if working is None or not known:
            return [None] * len(rows)
        limits = dict(zip(rows, longest, strict=True))
        depth = max(limits[row] for row in known)
        noise = self._noise(working, known, depth)
        state = self._pupil.normed(torch.from_numpy(np.stack([self._hidden[row][-1][-1] for row in known])))
        other = len(working.ids)
        slots = torch.tensor([working.slots.get(row.tokens[-1], other) for row in known], device=state.device)
        scale = self._pupil.scale
        best_slots, margins = [], []
        for position in range(depth):
            gated = self._kernels.gate(self._product(cell_input(state, working.embedding[slots]), working.up))
            state = state + scale * self._product(gated, working.down)
            scores = self._product(state, working.out)
            if noise is not None:
                scores = noise[:, position].add_(scores)
            self._ban(scores, known, position)
            best = scores.topk(2, dim=-1)
            slots = best.indices[:, 0]
            best_slots.append(slots)
            margins.append(best.values[:, 0] - best.values[:, 1])
        tokens = working.ids[torch.stack(best_slots, 1).cpu().numpy()]
        levels = np.digitize(torch.stack(margins, 1).cpu().numpy(), _MARGINS)
        drafts = {
            row: Draft(tuple(tokens[i, : limits[row]].tolist()), KIND, tuple(levels[i, : limits[row]].tolist()))
            for i, row in enumerate(known)
        }
        return [drafts.get(row) for row in rows]

    def _noise(
        self, working: _Working, rows: Sequence[Row], depth: int
    ) -> Float32[torch.Tensor, "rows depth R"] | None:
        """Of the positions to be drafted, times the temperature (logits are not divided by it then); None where all
        rows are greedy."""
        temperatures = [row.request.sampling.temperature for row in rows]
        if not any(temperatures):
            return None
        parts = np.array([(r.request.seed, r.request.step, r.request.row, len(r.tokens)) for r in rows], np.int64)
        seeds, steps, numbers, positions = parts.T[:, :, None]
        keys = noise_keys(seeds, steps, numbers, positions + np.arange(depth))
        noise = gumbel_of(keys.ravel(), working.words).view(len(rows), depth, -1)
        if any(t != 1.0 for t in temperatures):
            noise.mul_(torch.tensor(temperatures, device=noise.device)[:, None, None])
        return noise

    def _product(self, x: Float32[torch.Tensor, "rows in"], weight: Packed) -> Float32[torch.Tensor, "rows out"]:
        return self._kernels.linear(x, weight, torch.float32)

    def _ban(self, scores: Float32[torch.Tensor, "rows R"], rows: Sequence[Row], ahead: int) -> None:
        """Takes the tokens that a row cannot get out of its guesses."""
        for i, row in enumerate(rows):
            banned = row.banned(ahead)
            if banned:
                scores[i].index_fill_(0, self._slots_of(banned), float("-inf"))

    def _slots_of(self, banned: tuple[int, ...]) -> Int64[torch.Tensor, " banned"]:
        working = self._working
        assert working is not None
        if banned not in self._masks:
            slots = [working.slots[token] for token in banned if token in working.slots]
            self._masks[banned] = torch.tensor(slots, dtype=torch.int64, device=working.words.device)
        return self._masks[banned]

    @torch.inference_mode()
    def _publish(self, head: Head) -> None:
        ids = head.ids.numpy().copy()
        self._working = _Working(
            up=self._kernels.pack({0: head.up}, self._dtype, wide=True),
            down=self._kernels.pack({0: head.down}, self._dtype, wide=True),
            out=self._kernels.pack({0: head.out}, self._dtype, wide=True),
            embedding=head.embedding.clone(),
            ids=ids,
            words=token_words(self._pupil.vocab, head.out.device)[:, torch.from_numpy(ids).to(head.out.device)],
            slots={token: slot for slot, token in enumerate(ids.tolist())},
        )
        self._masks.clear()
        self.generation += 1
