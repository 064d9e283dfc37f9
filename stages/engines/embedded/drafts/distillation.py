"""Training of the draft head, from the hidden states of finished rows, in steps of some tens of milliseconds.

The head learns from the model (the teacher). This needs no extra pass of the model, since the engine stores the hidden
states that it computes anyway. The teacher's distribution after state h is softmax(W h), where W holds the rows of the
model's output layer for the tokens of a reduced vocabulary. The head starts from the state h_j from which token y_j was
drawn. The head is unrolled over y_j and the tokens that followed. The loss at step k is

    KL(softmax(W h_{j+k}) || softmax(U s_k)) + b * smooth_l1(s_k / a, h_{j+k} / a)        k = 1 .. UNROLLED

where s_k is the head's state after k steps, U its output layer, a the root mean square of a state's numbers
(`Student.scale`), and b `_FEATURE_WEIGHT`. Tokens outside the reduced vocabulary are never targets. As inputs of the
head, these tokens share one embedding.

Memory: hidden states take up to `budget_bytes`, three quarters of it for finished rows (2 bytes per number) and a
quarter for rows in flight (4 bytes per number; see `draft_head`). Let C be the hidden size and R the number of tokens
in the reduced vocabulary. The head takes about 4 * 4 * (5 C² + 2 R C) bytes, for float32 weights, gradients and AdamW's
two moments. W takes 4 R C bytes. Together this is 110 MB at C = 576, R = 4096.
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
"""Number of drafted positions in training. Longer drafts apply the same recurrent cell more often."""
_BATCH = 64
"""Number of positions of rows that one training step learns from."""
_PASSES_PER_PLACE = 8
"""Mean number of times that a position is trained on before training stops."""
_LEARNING_RATE = 1e-3
_FEATURE_WEIGHT = 0.1
_ENOUGH_TOKENS = 512
"""Minimum number of response tokens that must be collected before the draft head is created. The head's vocabulary is
chosen from these tokens."""
_PUBLISH_STEPS = 16
"""Number of training steps between two published copies of the head. A copy is also published when training stops."""
_PLACE_BYTES = 16
"""Bytes of a stored position in addition to its hidden state."""
_MIN_COVERAGE_GAIN = 0.02
"""Minimum gain with which a new vocabulary replaces the old one. The gain is the share of the responses' tokens in the
new vocabulary, minus their share in the old one."""


def cell_input(
    state: Float32[torch.Tensor, "B C"], embedded: Float32[torch.Tensor, "B C"]
) -> Float32[torch.Tensor, "B 2*C"]:
    return torch.cat([F.rms_norm(state, state.shape[-1:]), embedded], -1)


@dataclass(frozen=True, eq=False)
class Teacher:
    """The parts of the model that the head is initialised with and learns from: embedding, output layer and final
    norm."""

    embedding: Callable[[Sequence[int]], torch.Tensor]
    """Tokens -> their embeddings [n, C]."""
    out: Callable[[Sequence[int]], torch.Tensor]
    """Tokens -> their rows of the output layer [n, C]."""
    out_name: str
    """Name of the output layer among the tensors of new weights."""
    norm: Float32[torch.Tensor, " C"]
    """Weight of the final norm."""
    norm_name: str
    norm_eps: float


@dataclass(frozen=True, eq=False)
class Head:
    """A draft head for a vocabulary of R tokens and hidden size C. Its tensors change in training."""

    ids: Int64[torch.Tensor, " R"]
    """Token ids of the head's vocabulary, on the CPU."""
    up: Float32[torch.Tensor, "2*C 2*C"]
    down: Float32[torch.Tensor, "C C"]
    out: Float32[torch.Tensor, "R C"]
    embedding: Float32[torch.Tensor, "R+1 C"]
    """Embedding of each token of the head, in the order of `ids`. The last row is the embedding of all other tokens."""

    @property
    def parameters(self) -> list[torch.Tensor]:
        return [self.up, self.down, self.out, self.embedding]


class FinishedRows:
    """Owns the hidden states and tokens of the last finished rows, in a ring buffer."""

    def __init__(self, num_places: int, hidden: int) -> None:
        self.num_places = num_places
        self.hidden = torch.zeros(num_places, hidden, dtype=torch.float16)
        """[places, C], after the final norm. For each place, the state from which its token was drawn."""
        self.tokens = torch.zeros(num_places, dtype=torch.int64)
        self.ends = torch.zeros(num_places, dtype=torch.int64)
        """For each place, the end of the row that the place belongs to: one more than the row's last place."""
        self._next = 0

    def add(self, hidden: Float32[torch.Tensor, "n C"], tokens: Sequence[int]) -> None:
        """Store a row in the ring buffer, over the oldest entries. If the row is longer than the buffer, the beginning
        of the row is dropped. `hidden`: for each token, the state from which it was drawn, after the final norm."""
        hidden, tokens = hidden[-self.num_places :], tokens[-self.num_places :]
        if self._next + len(tokens) > self.num_places:
            self._next = 0
        start, stop = self._next, self._next + len(tokens)
        self.hidden[start:stop] = hidden.to(torch.float16).cpu()
        self.tokens[start:stop] = torch.tensor(tokens)
        self.ends[start:stop] = stop
        self._next = stop

    def starts(self) -> Int64[torch.Tensor, " starts"]:
        """Return the places at which training can start: all places of each row except its last one."""
        return (torch.arange(self.num_places) + 1 < self.ends).nonzero()[:, 0]


class Student:
    """Owns the head in training, its optimiser, and the rows it learns from. Any thread may call `refit`; one thread
    calls everything else."""

    def __init__(
        self, teacher: Teacher, vocab: int, head_vocab: int, budget_bytes: int, device: torch.device, seed: int = 0
    ) -> None:
        hidden = len(teacher.norm)
        self.vocab = vocab
        self.head_is_due = False
        """True if there is a new head to `publish`."""
        self._teacher, self._device = teacher, device
        self._norm = teacher.norm.to(device)
        self.scale = float(self._norm.square().mean().sqrt())
        """Approximate root mean square of a state after the final norm. The outputs of the head's cell are multiplied
        by this number."""
        self._num_tokens = min(head_vocab, vocab)
        self.in_flight_bytes = budget_bytes // 4
        """Maximum number of bytes for the hidden states of rows in flight."""
        places = (budget_bytes - self.in_flight_bytes) // (2 * hidden + _PLACE_BYTES)
        self._rows = FinishedRows(max(places, 2 * UNROLLED), hidden)
        self._generator = torch.Generator().manual_seed(seed)
        self._counts: Counter[int] = Counter()
        """How often each token occurred in responses."""
        self._has_new_rows = False
        """True if a row was added after the latest training step."""
        self._num_due = 0.0
        """Number of positions to train on before training stops, repetitions included."""
        self._steps = 0
        self._head: Head | None = None
        self._teacher_out = torch.empty(0)
        self._draft_ids = torch.empty(0)
        self._starts = torch.empty(0, dtype=torch.int64)
        self._optimizer: torch.optim.AdamW | None = None
        self._use_bfloat16 = device.type == "cuda" or torch.cpu._is_amx_tile_supported()
        """True if bfloat16 products are much faster than float32 ones on this device. The head does not need the
        precision of float32."""
        self._pending_refit: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None] | None = None

    def normed(self, hidden: Float32[torch.Tensor, "n C"]) -> Float32[torch.Tensor, "n C"]:
        """Apply the model's final norm to outputs of the model's last block, and return the result."""
        return F.rms_norm(hidden.to(self._device), self._norm.shape, self._norm, self._teacher.norm_eps)

    def add(self, hidden: Float32[np.ndarray, "n C"], tokens: Sequence[int]) -> None:
        """Add a finished row. `hidden`: outputs of the model's last block. `tokens`: the token that was drawn from each
        output."""
        self._rows.add(self.normed(torch.from_numpy(hidden)), tokens)
        self._counts.update(tokens)
        self._has_new_rows = True
        self._num_due = min(
            self._num_due + _PASSES_PER_PLACE * len(tokens), float(_PASSES_PER_PLACE * self._rows.num_places)
        )
        self._starts = self._starts[:0]

    def refit(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors that the draft head is trained against: the final norm of the model's new weights, and the
        rows of the output layer for the head's vocabulary. The method `step` uses the copies from its next call on."""
        head, out, norm = self._head, tensors.get(self._teacher.out_name), tensors.get(self._teacher.norm_name)
        ids = None if head is None or out is None else head.ids.clone()
        rows = None if ids is None or out is None else out.detach()[ids.to(out.device)].float().cpu()
        if rows is not None or norm is not None:
            self._pending_refit = (ids, rows, None if norm is None else norm.detach().float().cpu().clone())

    def step(self) -> bool:
        """Train on one batch. Return False, without training, if the rows have been trained on often enough, if too few
        tokens have been collected, or if every row has only one token."""
        if self._num_due <= 0 or self._counts.total() < _ENOUGH_TOKENS:
            return False
        self._apply_refit()
        if self._has_new_rows:
            self._has_new_rows = False
            if self._head is None or self._missed_share(self._head) > _MIN_COVERAGE_GAIN:
                self._choose_vocabulary()
        if not len(self._starts):
            self._starts = self._rows.starts()
        if not len(self._starts):
            return False
        chosen = torch.randint(len(self._starts), (_BATCH,), generator=self._generator)
        self._learn(self._starts[chosen])
        self._num_due -= _BATCH
        self._steps += 1
        self.head_is_due = self._steps % _PUBLISH_STEPS == 0 or self._num_due <= 0
        return True

    def publish(self) -> Head:
        """Return the current head. The caller must copy it, since further training changes it."""
        assert self._head is not None
        self.head_is_due = False
        return self._head

    def _learn(self, places: Int64[torch.Tensor, " B"]) -> None:
        assert self._head is not None
        assert self._optimizer is not None
        head, rows, device = self._head, self._rows, self._device
        following = places[:, None] + torch.arange(1, UNROLLED + 1)
        mask = following < rows.ends[places][:, None]
        following = torch.where(mask, following, places[:, None])
        wanted = rows.hidden[following].to(device, torch.float32)
        inputs = self._draft_ids[rows.tokens[torch.cat([places[:, None], following[:, :-1]], 1)]].to(device)
        state, states, embedded = rows.hidden[places].to(device, torch.float32), [], F.embedding(inputs, head.embedding)
        with torch.autocast(device.type, torch.bfloat16, enabled=self._use_bfloat16):
            with torch.no_grad():
                teacher_probs = F.linear(wanted, self._teacher_out).float().softmax(-1)
            for step in range(UNROLLED):
                gate, up = F.linear(cell_input(state, embedded[:, step]), head.up).chunk(2, -1)
                state = state + self.scale * F.linear(F.silu(gate) * up, head.down)
                states.append(state)
            made = torch.stack(states, 1)
            guessed = F.linear(made, head.out).float()
        loss = masked_loss(guessed, teacher_probs, made / self.scale, wanted / self.scale, mask.to(device))
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(head.parameters, 1.0)
        if torch.isfinite(norm):
            self._optimizer.step()

    def _missed_share(self, head: Head) -> float:
        """Return the share of the responses' tokens that a new vocabulary of the same size would cover in addition."""
        possible = sum(count for _, count in self._counts.most_common(self._num_tokens))
        covered = sum(self._counts[token] for token in head.ids.tolist())
        return (possible - covered) / self._counts.total()

    def _choose_vocabulary(self) -> None:
        """Create a head with the most frequent tokens of the responses, and the lowest ids (frequent in tokenizers) if
        there are too few. Tokens of the old vocabulary keep their learned weights. The optimiser's state is reset."""
        old, old_draft_ids, old_teacher_out = self._head, self._draft_ids, self._teacher_out
        frequent = [token for token, _ in self._counts.most_common(self._num_tokens)]
        taken = set(frequent)
        remaining = (token for token in range(self.vocab) if token not in taken)
        ids = frequent + [next(remaining) for _ in range(self._num_tokens - len(frequent))]
        embedding = self._teacher.embedding(ids).float()
        self._teacher_out = self._teacher.out(ids).float().to(self._device)
        out, width = self._teacher_out.cpu().clone(), self._norm.shape[0]
        embedding = embedding / embedding.std()
        embedding = torch.cat([embedding, embedding.mean(0, keepdim=True)])
        if old is None:
            up = torch.randn(2 * width, 2 * width, generator=self._generator) / (2 * width) ** 0.5
            down = torch.randn(width, width, generator=self._generator) * 0.02 / width**0.5
        else:
            up, down = old.up.detach(), old.down.detach()
            draft_ids = old_draft_ids[torch.tensor(ids)]
            kept = draft_ids < self._num_tokens
            self._teacher_out[kept] = old_teacher_out[draft_ids[kept]]  # a refit may have changed these rows
            out[kept] = old.out.detach().cpu()[draft_ids[kept]]
            embedding[:-1][kept] = old.embedding.detach().cpu()[draft_ids[kept]]
            embedding[-1] = old.embedding.detach().cpu()[-1]
        tensors = [t.to(self._device, copy=True).requires_grad_() for t in (up, down, out, embedding)]
        self._head = Head(torch.tensor(ids), *tensors)
        self._draft_ids = torch.full((self.vocab,), self._num_tokens)
        self._draft_ids[self._head.ids] = torch.arange(self._num_tokens)
        self._optimizer = torch.optim.AdamW(tensors, lr=_LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True)

    def _apply_refit(self) -> None:
        if self._pending_refit is None:
            return
        (ids, rows, norm), self._pending_refit = self._pending_refit, None
        if norm is not None:
            self._norm = norm.to(self._device)
        if ids is not None and rows is not None and self._head is not None and torch.equal(ids, self._head.ids):
            self._teacher_out = rows.to(self._device)


def masked_loss(
    logits: Float32[torch.Tensor, "B K R"],
    teacher_probs: Float32[torch.Tensor, "B K R"],
    made: Float32[torch.Tensor, "B K C"],
    wanted: Float32[torch.Tensor, "B K C"],
    mask: Bool[torch.Tensor, "B K"],
) -> Float32[torch.Tensor, ""]:
    """Return the mean loss over the entries in `mask`. The loss of an entry is the sum of two terms:

    - the cross-entropy with the teacher's distribution, which is the KL divergence up to a constant
    - `_FEATURE_WEIGHT` times the smooth L1 distance between the head's state `made` and the model's state `wanted`"""
    entropy = -(teacher_probs * logits.log_softmax(-1)).sum(-1)
    distance = F.smooth_l1_loss(made, wanted, reduction="none").mean(-1)
    return ((entropy + _FEATURE_WEIGHT * distance) * mask).sum() / mask.sum().clamp(min=1)
