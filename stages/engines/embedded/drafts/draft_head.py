"""The learned drafter: a small recurrent head on the model's hidden state, trained by distillation during the run.

    h     hidden state (normed) from which the row's last token y was drawn      s_0 = h
    s_k+1 = s_k + a * W_down (silu(g) * u),   [g, u] = W_up [s_k / rms(s_k), E(y)]
    logits = U s_k+1                           the next guess, which is y of the next step

The constant a is the root mean square of a state's numbers (`Student.scale`), and E an embedding. s_k+1 imitates the
hidden state that the model itself would have after y. So U starts as a copy of rows of the model's output layer, and E
as a copy of rows of its embedding, divided by their standard deviation. Both copies cover only a reduced vocabulary:
the most frequent tokens of the run's responses (`distillation`). A guess is drawn with the noise of its own position
(Gumbel coupling): if the head's distribution is close to the model's, the guess is usually the token that the model
draws, also at temperature 1. After ReDrafter (Cheng et al. 2024) and EAGLE (Li et al. 2024).

The head changes the speed only. It is not saved; every engine trains its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int64, UInt64

from stages.engines.embedded.drafts.distillation import Head, Student, cell_input
from stages.engines.embedded.drafts.drafters import Draft
from stages.engines.embedded.kernels.protocol import DraftingKernels, Guessed, HeadWeights, Kernels
from stages.engines.embedded.rows import DraftTree, Row
from stages.engines.embedded.sampling import gumbel_of, position_keys, token_words

_LEVEL_BOUNDS = (0.5, 1.5, 3.0)
"""Upper bounds of the confidence classes, in nats. The class of the best guess depends on its lead over the second-best
one. The class of any other guess depends on its distance from the best one. Lead and distance are differences of logits
to which the Gumbel noise of sampling has been added."""
_RANKS = 4
"""Number of sets of confidence classes (see `_LEVEL_BOUNDS`). The set depends on the place of a guess among the guesses
after the same token: the best guess has place 0, the second best place 1, and so on. Each place has a set of its own,
except that all places from `_RANKS` - 1 on share the last set."""
KIND = "learned"


@dataclass(frozen=True, eq=False)
class _DraftingHead:
    """A copy of the head for drafting, packed like the model's own layers."""

    weights: HeadWeights
    ids: Int64[np.ndarray, " R"]
    draft_ids: Mapping[int, int]
    """Token -> its draft id, the index in `ids`."""


class LearnedDrafter:
    """Owns the draft head and the hidden states of the rows in flight. If the states exceed their memory budget, long
    rows keep only their latest states."""

    kinds: tuple[str, ...] = (KIND,)
    by_position = True
    wants_hidden = True

    def __init__(self, student: Student, kernels: Kernels, dtype: torch.dtype, branches: int = 1) -> None:
        """Create a drafter. It drafts nothing before `train` has published the first head.

        Args:
            student: the head in training, in float32.
            kernels: the kernels to draft with.
            dtype: dtype of the copy of the student's weights that is used for drafting. Kernels that make a whole draft
                in one call use bfloat16 instead.
            branches: number of guesses per position of a draft.
        """
        self.generation = 0
        self._branches = branches
        self._student, self._kernels = student, kernels
        self._dtype = dtype
        self._unroll: Callable[..., Guessed] = partial(unroll, kernels)
        if isinstance(kernels, DraftingKernels):
            self._dtype, self._unroll = torch.bfloat16, kernels.unroll
        self._drafting_head: _DraftingHead | None = None
        self._hidden: dict[Row, list[np.ndarray]] = {}
        """Hidden states of each row up to its latest token, as consecutive parts: one for each pass. The oldest states
        may have been dropped."""
        self.held_bytes = 0
        """Bytes of the states in `_hidden`."""

    def observe(self, row: Row, hidden: Float32[np.ndarray, "kept C"]) -> None:
        self._hidden.setdefault(row, []).append(hidden.copy())  # a view would keep the whole pass's states
        self.held_bytes += hidden.nbytes
        while self.held_bytes > self._student.in_flight_bytes and self._drop_states():
            pass

    def _drop_states(self) -> bool:
        """Drop the older half of the hidden states of the row with the most. Return False if every row has states of
        one pass."""
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
        drafting_head = self._drafting_head
        known = [row for row in rows if row in self._hidden] if drafting_head is not None else []
        if drafting_head is None or not known:
            return [None] * len(rows)
        limits = dict(zip(rows, longest, strict=True))
        depth = max(limits[row] for row in known)
        state = self._student.normed(torch.from_numpy(np.stack([self._hidden[row][-1][-1] for row in known])))
        other = len(drafting_head.ids)
        draft_ids = np.array([drafting_head.draft_ids.get(row.tokens[-1], other) for row in known], np.int64)
        temperatures = [row.request.sampling.temperature for row in known]
        keys = _keys(known, depth) if any(temperatures) else np.zeros((len(known), depth), np.uint64)
        banned = [self._draft_ids_of(row.banned(ahead)) for row in known for ahead in range(depth)]
        guessed = self._unroll(
            drafting_head.weights, state, draft_ids, depth, self._branches, temperatures, keys, banned
        )
        tokens = drafting_head.ids[guessed.draft_ids]
        levels = np.minimum(guessed.ranks, _RANKS - 1) * (len(_LEVEL_BOUNDS) + 1) + np.digitize(
            guessed.gaps, _LEVEL_BOUNDS
        )
        drafts = {
            row: _draft(limits[row], tokens[i], guessed.parents[i], guessed.ranks[i], levels[i])
            for i, row in enumerate(known)
        }
        return [drafts.get(row) for row in rows]

    def _draft_ids_of(self, banned: tuple[int, ...]) -> tuple[int, ...]:
        """Return the draft ids of those banned tokens that the head could guess."""
        drafting_head = self._drafting_head
        assert drafting_head is not None
        return tuple(drafting_head.draft_ids[token] for token in banned if token in drafting_head.draft_ids)

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
        self._drafting_head = _DraftingHead(weights, ids, {token: i for i, token in enumerate(ids.tolist())})
        self.generation += 1


def _draft(
    depth: int,
    tokens: Int64[np.ndarray, "depth G"],
    parents: Int64[np.ndarray, "depth G"],
    ranks: Int64[np.ndarray, "depth G"],
    levels: Int64[np.ndarray, "depth G"],
) -> Draft:
    """Return one row's draft of up to `depth` positions. `tokens`: token ids of the guesses. `parents` and `ranks`: the
    row's part of the fields of `Guessed`. `levels`: confidence classes of the guesses."""
    drafted = ranks[:depth] >= 0
    numbers = np.cumsum(drafted.ravel()).reshape(drafted.shape) - 1
    """Index of each guess in the tree."""
    tree_parents = np.full_like(numbers, -1)
    tree_parents[1:] = np.take_along_axis(numbers[:-1], parents[1:depth], 1)
    tree = DraftTree(tuple(tokens[:depth][drafted].tolist()), tuple(tree_parents[drafted].tolist()))
    return Draft(tree, KIND, tuple(levels[:depth][drafted].tolist()))


def _keys(rows: Sequence[Row], depth: int) -> UInt64[np.ndarray, "rows depth"]:
    """Return a key for each position to draft. The sampling noise of the position is computed from its key."""
    noise, lengths = np.array([r.noise for r in rows], np.uint64), np.array([len(r.tokens) for r in rows], np.int64)
    return position_keys(noise[:, None], lengths[:, None] + np.arange(depth))


def unroll(
    kernels: Kernels,
    head: HeadWeights,
    state: Float32[torch.Tensor, "rows C"],
    draft_ids: Int64[np.ndarray, " rows"],
    depth: int,
    branches: int,
    temperatures: Sequence[float],
    keys: UInt64[np.ndarray, "rows depth"],
    banned: Sequence[Sequence[int]],
) -> Guessed:
    """Return the head's guesses for `depth` positions, as draft ids.

    Several guesses may follow the same token. The cost of a guess is the best logit among them minus its own logit. The
    cost of a path is the sum of the costs of its guesses. At each position the `branches` cheapest paths are kept.
    Their last guesses are the inputs of the next position.

    Logits include the noise. Instead of dividing the logits by the temperature, the noise is multiplied by it, which
    gives the same order.

    Args:
        state: hidden state of each row after the final norm.
        draft_ids: draft id of each row's latest token.
        depth: number of positions to draft.
        branches: maximum number of guesses per position.
        temperatures: temperature of each row.
        keys: noise keys of the positions.
        banned: draft ids that must not be guessed. There is one entry for each position of each row, row by row.
    """
    num_rows, device = len(state), state.device
    noise_scales = torch.tensor(temperatures, device=device)
    noise = gumbel_of(keys.ravel(), head.words).view(num_rows, depth, -1) if any(temperatures) else None
    state, last = state[:, None], torch.from_numpy(draft_ids).to(device)[:, None]
    totals = torch.zeros(num_rows, 1, device=device)
    guesses: list[tuple[torch.Tensor, ...]] = []
    for position in range(depth):
        items = last.shape[1]
        flat = state.reshape(num_rows * items, -1)
        fed = kernels.linear(cell_input(flat, head.embedding[last.reshape(-1)]), head.up, torch.float32)
        flat = flat + kernels.linear(kernels.gate(fed), head.down, torch.float32)
        scores = kernels.linear(flat, head.out, torch.float32).view(num_rows, items, -1)
        if noise is not None:
            scores = scores + (noise[:, position] * noise_scales[:, None])[:, None]
        for row in range(num_rows):
            for draft_id in banned[row * depth + position]:
                scores[row, :, draft_id] = float("-inf")
        best = scores.topk(min(max(branches, 2), scores.shape[-1]), dim=-1)
        distances = best.values[..., :1] - best.values
        sums = (totals[..., None] + distances).nan_to_num(nan=torch.inf, posinf=torch.inf).view(num_rows, -1)
        wanted = best.indices.shape[-1]
        missing = max(branches - sums.shape[1], 0)
        least = F.pad(sums, (0, missing), value=torch.inf).sort(stable=True, dim=-1)
        totals, chosen = least.values[:, :branches], least.indices[:, :branches].clamp(max=sums.shape[1] - 1)
        parents, ranks = chosen // wanted, chosen % wanted
        last = best.indices.view(num_rows, -1).gather(1, chosen)
        gaps = distances.view(num_rows, -1).gather(1, chosen + (ranks == 0).long())
        guesses.append((last, parents, ranks.masked_fill(totals == torch.inf, -1), gaps))
        state = flat.view(num_rows, items, -1).gather(1, parents[..., None].expand(-1, -1, flat.shape[-1]))
    return Guessed(*(torch.stack(each, 1).cpu().numpy() for each in zip(*guesses, strict=True)))
