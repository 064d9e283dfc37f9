"""How the draft head learns: from the hidden states of finished rows, in steps of some tens of milliseconds.

The teacher needs no pass of its own. A row's hidden states are kept as they come, and the distribution after each is
softmax(W h) with W the model's own output rows of the reduced vocabulary. From the state h_j behind token y_j the head
is unrolled over the tokens that followed; its loss at step k is

    KL(softmax(W h_{j+k}) || softmax(U s_k)) + b * smooth_l1(s_k, h_{j+k})        k = 1 .. UNROLLED

Tokens outside the reduced vocabulary are no targets; fed to the head, they share one embedding.

Memory: hidden states up to `budget_bytes`, three quarters of it for finished rows (2 bytes a number) and a quarter for
those in flight (4 bytes; `draft_head`); the head in float32 with AdamW's two moments, about
4 * (5 C² + 3 R C) * 4 bytes for hidden size C and R tokens (W included): 110 MB at C = 576, R = 4096.

May import numpy and torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float32, Int64

UNROLLED = 4
"""Drafted positions that are trained; longer drafts use the same cell."""
_BATCH = 64
"""Places in rows that a step learns from."""
_LOOKS = 8
"""How often a place is looked at on average, before training rests."""
_LEARNING_RATE = 1e-3
_FEATURE_WEIGHT = 0.1
_ENOUGH_TOKENS = 512
"""Finished rows have so many tokens before the head is made: its vocabulary is chosen from them."""
_PUBLISH_STEPS = 16
"""Training steps between two copies that draft."""
_PLACE_BYTES = 16
"""Of a place, beside its hidden state."""
_WORTH_CHANGING = 0.02
"""The vocabulary is chosen again where that covers so much more of the responses."""


def cell_input(
    state: Float32[torch.Tensor, "B C"], embedded: Float32[torch.Tensor, "B C"]
) -> Float32[torch.Tensor, "B 2*C"]:
    return torch.cat([F.rms_norm(state, state.shape[-1:]), embedded], -1)


@dataclass(frozen=True, eq=False)
class Teacher:
    """What the head starts from and is taught by: the model's embedding, output layer and final norm."""

    embedding: Callable[[Sequence[int]], torch.Tensor]
    """Tokens -> their embeddings [n, C]."""
    out: Callable[[Sequence[int]], torch.Tensor]
    """Tokens -> their rows of the output layer [n, C]."""
    out_name: str
    """Of the output layer, in a refit."""
    norm: Float32[torch.Tensor, " C"]
    """Weight of the final norm."""
    norm_name: str
    norm_eps: float


@dataclass(frozen=True, eq=False)
class Head:
    """R tokens, hidden size C. The tensors are those that are trained."""

    ids: Int64[torch.Tensor, " R"]
    """On the CPU."""
    up: Float32[torch.Tensor, "2*C 2*C"]
    down: Float32[torch.Tensor, "C C"]
    out: Float32[torch.Tensor, "R C"]
    embedding: Float32[torch.Tensor, "R+1 C"]
    """The last row stands for all other tokens."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.up, self.down, self.out, self.embedding]


class FinishedRows:
    """Owns the hidden states of the last finished rows and their tokens, one after the other in a ring."""

    def __init__(self, num_places: int, hidden: int) -> None:
        self.num_places = num_places
        self.hidden = torch.zeros(num_places, hidden, dtype=torch.float16)
        """[places, C], normed: of the state from which the token was drawn."""
        self.tokens = torch.zeros(num_places, dtype=torch.int64)
        self.ends = torch.zeros(num_places, dtype=torch.int64)
        """Where the row ends that a place belongs to."""
        self._next = 0

    def add(self, hidden: Float32[torch.Tensor, "n C"], tokens: Sequence[int]) -> None:
        """Overwrites the oldest; of a row longer than the ring, its beginning."""
        hidden, tokens = hidden[-self.num_places :], tokens[-self.num_places :]
        if self._next + len(tokens) > self.num_places:
            self._next = 0
        start, stop = self._next, self._next + len(tokens)
        self.hidden[start:stop] = hidden.to(torch.float16).cpu()
        self.tokens[start:stop] = torch.tensor(tokens)
        self.ends[start:stop] = stop
        self._next = stop

    def starts(self) -> Int64[torch.Tensor, " starts"]:
        """Places that are followed by another of their row."""
        return (torch.arange(self.num_places) + 1 < self.ends).nonzero()[:, 0]


class Student:
    """Owns the head while it learns, its optimiser, and the rows it learns from. `refit` may be called from any
    thread; everything else from one."""

    def __init__(
        self, teacher: Teacher, vocab: int, head_vocab: int, budget_bytes: int, device: torch.device, seed: int = 0
    ) -> None:
        hidden = len(teacher.norm)
        self.vocab = vocab
        self.head_is_due = False
        """Whether there is something new to `publish`."""
        self._teacher, self._device = teacher, device
        self._norm = teacher.norm.to(device)
        self.scale = float(self._norm.square().mean().sqrt())
        """Root mean square of a normed state, about: sizes the head's first steps."""
        self._num_tokens = min(head_vocab, vocab)
        self.in_flight_bytes = budget_bytes // 4
        """That the hidden states of rows in flight may take."""
        places = (budget_bytes - self.in_flight_bytes) // (2 * hidden + _PLACE_BYTES)
        self._rows = FinishedRows(max(places, 2 * UNROLLED), hidden)
        self._generator = torch.Generator().manual_seed(seed)
        self._counts: Counter[int] = Counter()
        """Of the responses' tokens."""
        self._fresh = False
        """Whether rows have come since the last step."""
        self._owed = 0.0
        """Places still to be looked at."""
        self._steps = 0
        self._head: Head | None = None
        self._taught_by = torch.empty(0)
        self._slots = torch.empty(0)
        self._starts = torch.empty(0, dtype=torch.int64)
        self._optimizer: torch.optim.AdamW | None = None
        self._rounded = device.type == "cuda" or torch.cpu._is_amx_tile_supported()
        """Whether products of bfloat16 are much faster than those of float32, which the head can do without."""
        self._incoming: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None = None

    def normed(self, hidden: Float32[torch.Tensor, "n C"]) -> Float32[torch.Tensor, "n C"]:
        """The model's final norm of its last block's output."""
        return F.rms_norm(hidden.to(self._device), self._norm.shape, self._norm, self._teacher.norm_eps)

    def add(self, hidden: Float32[np.ndarray, "n C"], tokens: Sequence[int]) -> None:
        """A finished row: states of the last block, and the token drawn from each."""
        self._rows.add(self.normed(torch.from_numpy(hidden)), tokens)
        self._counts.update(tokens)
        self._fresh = True
        self._owed = min(self._owed + _LOOKS * len(tokens), float(_LOOKS * self._rows.num_places))
        self._starts = self._starts[:0]

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Takes what concerns the teacher out of the model's new weights."""
        head, out, norm = self._head, tensors.get(self._teacher.out_name), tensors.get(self._teacher.norm_name)
        ids = None if head is None or out is None else head.ids.clone()
        rows = None if ids is None or out is None else out.detach()[ids.to(out.device)].float().cpu()
        if rows is not None or norm is not None:
            self._incoming = (ids, rows, None if norm is None else norm.detach().float().cpu().clone())

    def step(self) -> bool:
        """Learns from one batch; False if every row has been looked at often enough, or there are too few."""
        if self._owed <= 0 or self._counts.total() < _ENOUGH_TOKENS:
            return False
        self._take_incoming()
        if self._fresh:
            self._fresh = False
            if self._head is None or self._missed_share(self._head) > _WORTH_CHANGING:
                self._choose_vocabulary()
        if not len(self._starts):
            self._starts = self._rows.starts()
        if not len(self._starts):
            return False
        chosen = torch.randint(len(self._starts), (_BATCH,), generator=self._generator)
        self._learn(self._starts[chosen])
        self._owed -= _BATCH
        self._steps += 1
        self.head_is_due = self._steps % _PUBLISH_STEPS == 0 or self._owed <= 0
        return True

    def publish(self) -> Head:
        """The head as it is now, to be copied."""
        assert self._head is not None
        self.head_is_due = False
        return self._head

    def _learn(self, places: Int64[torch.Tensor, " B"]) -> None:
        assert self._head is not None
        assert self._optimizer is not None
        head, rows, device = self._head, self._rows, self._device
        following = places[:, None] + torch.arange(1, UNROLLED + 1)
        there = following < rows.ends[places][:, None]
        following = torch.where(there, following, places[:, None])
        wanted = rows.hidden[following].to(device, torch.float32)
        fed = self._slots[rows.tokens[torch.cat([places[:, None], following[:, :-1]], 1)]].to(device)
        state, states, embedded = rows.hidden[places].to(device, torch.float32), [], F.embedding(fed, head.embedding)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._rounded):
            with torch.no_grad():
                taught = F.linear(wanted, self._taught_by).float().softmax(-1)
            for step in range(UNROLLED):
                gate, up = F.linear(cell_input(state, embedded[:, step]), head.up).chunk(2, -1)
                state = state + self.scale * F.linear(F.silu(gate) * up, head.down)
                states.append(state)
            made = torch.stack(states, 1)
            guessed = F.linear(made, head.out).float()
        loss = masked_loss(guessed, taught, made / self.scale, wanted / self.scale, there.to(device))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(head.parameters, 1.0)
        if torch.isfinite(norm):
            self._optimizer.step()

    def _missed_share(self, head: Head) -> float:
        """Of all tokens in responses, those that another vocabulary would cover and the head's does not."""
        possible = sum(count for _, count in self._counts.most_common(self._num_tokens))
        covered = sum(self._counts[token] for token in head.ids.tolist())
        return (possible - covered) / self._counts.total()

    def _choose_vocabulary(self) -> None:
        """The most frequent tokens; what is left is filled with the first ids, which tokenizers give to frequent ones.
        Tokens that stay keep what has been learned, in a new optimiser."""
        old, old_slots, taught_before = self._head, self._slots, self._taught_by
        frequent = [token for token, _ in self._counts.most_common(self._num_tokens)]
        taken = set(frequent)
        rest = (token for token in range(self.vocab) if token not in taken)
        ids = frequent + [next(rest) for _ in range(self._num_tokens - len(frequent))]
        embedding = self._teacher.embedding(ids).float()
        self._taught_by = self._teacher.out(ids).float().to(self._device)
        out, width = self._taught_by.cpu().clone(), self._norm.shape[0]
        embedding = embedding / embedding.std()
        embedding = torch.cat([embedding, embedding.mean(0, keepdim=True)])
        if old is None:
            up = torch.randn(2 * width, 2 * width, generator=self._generator) / (2 * width) ** 0.5
            down = torch.randn(width, width, generator=self._generator) * 0.02 / width**0.5
        else:
            up, down = old.up.detach(), old.down.detach()
            slots = old_slots[torch.tensor(ids)]
            kept = slots < self._num_tokens
            self._taught_by[kept] = taught_before[slots[kept]]  # which may have been refitted
            out[kept] = old.out.detach().cpu()[slots[kept]]
            embedding[:-1][kept] = old.embedding.detach().cpu()[slots[kept]]
            embedding[-1] = old.embedding.detach().cpu()[-1]
        tensors = [t.to(self._device, copy=True).requires_grad_() for t in (up, down, out, embedding)]
        self._head = Head(torch.tensor(ids), *tensors)
        self._slots = torch.full((self.vocab,), self._num_tokens)
        self._slots[self._head.ids] = torch.arange(self._num_tokens)
        self._optimizer = torch.optim.AdamW(tensors, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def _take_incoming(self) -> None:
        if self._incoming is None:
            return
        (ids, rows, norm), self._incoming = self._incoming, None
        if norm is not None:
            self._norm = norm.to(self._device)
        if ids is not None and rows is not None and self._head is not None and torch.equal(ids, self._head.ids):
            self._taught_by = rows.to(self._device)


def masked_loss(
    logits: Float32[torch.Tensor, "B K R"],
    taught: Float32[torch.Tensor, "B K R"],
    made: Float32[torch.Tensor, "B K C"],
    wanted: Float32[torch.Tensor, "B K C"],
    there: Bool[torch.Tensor, "B K"],
) -> Float32[torch.Tensor, ""]:
    """Mean over the places that are there: cross-entropy with the teacher's distribution (its KL up to a constant), and
    the distance of the states."""
    entropy = -(taught * logits.log_softmax(-1)).sum(-1)
    distance = F.smooth_l1_loss(made, wanted, reduction="none").mean(-1)
    return ((entropy + _FEATURE_WEIGHT * distance) * there).sum() / there.sum().clamp(min=1)
