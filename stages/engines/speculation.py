"""How many drafted tokens to verify in the next pass: as many as maximise expected tokens per second.

With gains g_1 >= g_2 >= ... of all the drafted tokens there are (the probability that a token is accepted, together
with all drafts before it in its row), the best k of them give B + g_1 + ... + g_k tokens in T(n + k) seconds, for B
rows that decode and n tokens that are fed anyway. T is measured, and so is acceptance, by kind of draft and position.
k = 0 is plain decoding: at large batches, where a pass costs in proportion to its tokens, that is the answer.

Standard library and stages.engines only; no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from stages.engines.drafting import Draft, Drafter
from stages.engines.rows import Row
from stages.engines.scheduler import Chunk

CALIBRATED = (1, 2, 4, 8, 16, 32, 64, 128)
"""Sizes of the passes that are timed before the first draft."""
_PRIOR_ACCEPTED, _PRIOR_TRIED = 2.0, 3.0
"""Acceptance that is assumed before anything is seen: optimistic, so that every kind is tried."""
_MEMORY = 0.998
"""What a pass leaves of older counts: a kind that was given up is tried again some hundreds of passes later."""
_LEARNING_RATE = 0.1
_DRAFTING_SHARE = 0.02
"""Looking for drafts takes about this share of a pass with few rows: a gain below it is none."""


class PassCosts:
    """Owns the measured seconds of a pass by its number of tokens: linear between the calibrated sizes, and moved
    toward every pass that is run."""

    def __init__(self, seconds: Mapping[int, float]) -> None:
        """`seconds`: of at least two sizes. Raises ValueError for fewer."""
        if len(seconds) < 2:
            raise ValueError("a line needs two points")
        self._sizes = sorted(seconds)
        self._seconds = [seconds[size] for size in self._sizes]
        for i in range(1, len(self._seconds)):  # more tokens are never faster: that was another process's doing
            self._seconds[i] = max(self._seconds[i], self._seconds[i - 1])

    @property
    def curve(self) -> dict[int, float]:
        return dict(zip(self._sizes, self._seconds, strict=True))

    def seconds(self, num_tokens: int) -> float:
        left, weight = self._place(num_tokens)
        return (1 - weight) * self._seconds[left] + weight * self._seconds[left + 1]

    def observe(self, num_tokens: int, seconds: float) -> None:
        left, weight = self._place(num_tokens)
        factor = min(max(seconds / self.seconds(num_tokens), 0.5), 2.0)
        weight = min(max(weight, 0.0), 1.0)
        self._seconds[left] *= factor ** (_LEARNING_RATE * (1 - weight))
        self._seconds[left + 1] *= factor ** (_LEARNING_RATE * weight)

    def _place(self, num_tokens: int) -> tuple[int, float]:
        """The interval (its left end's index), and how far into it; beyond the last one its line is prolonged."""
        left = 0
        while left < len(self._sizes) - 2 and self._sizes[left + 1] <= num_tokens:
            left += 1
        return left, (num_tokens - self._sizes[left]) / (self._sizes[left + 1] - self._sizes[left])


def choose_lengths(
    num_rows: int, num_tokens: int, gains: Sequence[Sequence[float]], seconds: Callable[[int], float]
) -> list[int]:
    """Drafted tokens to verify, of each draft. `gains[i][j]`: probability that its tokens 0..j are all accepted."""
    ranked = sorted(((gain, -j, i) for i, row in enumerate(gains) for j, gain in enumerate(row)), reverse=True)
    best, best_count = num_rows / seconds(num_tokens) * (1 + _DRAFTING_SHARE), 0
    expected = float(num_rows)
    for count, (gain, _, _) in enumerate(ranked, 1):
        expected += gain
        rate = expected / seconds(num_tokens + count)
        if rate > best:
            best, best_count = rate, count
    lengths = [0] * len(gains)
    for _, _, i in ranked[:best_count]:
        lengths[i] += 1
    return lengths


@dataclass
class _Tally:
    accepted: float = 0.0
    tried: float = 0.0

    @property
    def rate(self) -> float:
        return (self.accepted + _PRIOR_ACCEPTED) / (self.tried + _PRIOR_TRIED)


@dataclass
class DraftCounts:
    """For `EngineStats`: since they were last taken."""

    drafted: Counter[str] = field(default_factory=Counter)
    """Tokens verified, by kind."""
    accepted: Counter[str] = field(default_factory=Counter)
    lengths: Counter[int] = field(default_factory=Counter)
    """How often a decoding row had so many drafted tokens in a pass."""


class Speculation:
    """Owns the drafter, and what has been measured of passes and of acceptance."""

    def __init__(
        self, drafter: Drafter, costs: PassCosts, longest: int, lengths: Literal["measured", "longest"]
    ) -> None:
        self.costs = costs
        self.counts = DraftCounts()
        self._drafter, self._longest, self._lengths = drafter, longest, lengths
        self._tallies: dict[tuple[str, int], _Tally] = {}
        self._kinds: dict[Row, str] = {}

    def propose(self, rows: Sequence[Row], num_other_tokens: int) -> dict[Row, tuple[int, ...]]:
        """Drafts for rows that decode in the next pass, beside `num_other_tokens` of prompts; those worth verifying."""
        self._kinds = {}
        num_tokens = len(rows) + num_other_tokens
        measured = self._lengths == "measured"
        if measured and not self._can_pay(len(rows), num_tokens):
            return {}
        drafts: list[tuple[Row, Draft]] = []
        for row in rows:
            room = min(self._longest, row.num_left - 1)
            draft = self._drafter.propose(row, room) if room > 0 else None
            if draft is not None:
                drafts.append((row, draft))
        lengths = [len(draft.tokens) for _, draft in drafts]
        if measured:
            gains = [self._gains(draft.kind, len(draft.tokens)) for _, draft in drafts]
            lengths = choose_lengths(len(rows), num_tokens, gains, self.costs.seconds)
        self._kinds = {row: draft.kind for row, draft in drafts}
        return {row: draft.tokens[:n] for (row, draft), n in zip(drafts, lengths, strict=True) if n}

    def observe(self, chunks: Sequence[Chunk], kept: Sequence[int], seconds: float | None) -> None:
        """What became of a pass: the tokens that each sampling chunk kept, and how long it took (None if prompts were
        fed in it, whose tokens are cheaper: nothing is sampled after them)."""
        if seconds is not None:
            self.costs.observe(sum(chunk.count + len(chunk.drafts) for chunk in chunks), seconds)
        for tally in self._tallies.values():
            tally.accepted *= _MEMORY
            tally.tried *= _MEMORY
        for chunk, num_kept in zip(chunks, kept, strict=True):
            self.counts.lengths[len(chunk.drafts)] += 1
            if not chunk.drafts:
                continue
            kind, accepted = self._kinds[chunk.row], num_kept - 1
            self.counts.drafted[kind] += len(chunk.drafts)
            self.counts.accepted[kind] += accepted
            # tokens after the first wrong one, or after the row's end, say nothing
            ended = chunk.row.finished is not None
            for j in range(accepted if ended else min(accepted + 1, len(chunk.drafts))):
                tally = self._tallies.setdefault((kind, j), _Tally())
                tally.tried += 1
                tally.accepted += j < accepted

    def finish(self, row: Row) -> None:
        self._drafter.finish(row)

    def _gains(self, kind: str, length: int) -> list[float]:
        gains, together = [], 1.0
        for j in range(length):
            together *= self._tallies.get((kind, j), _Tally()).rate
            gains.append(together)
        return gains

    def _can_pay(self, num_rows: int, num_tokens: int) -> bool:
        """Whether any draft would be verified if every row had one of the best kind: if not, none is looked for."""
        kinds = {kind for kind, _ in self._tallies}
        best = max((self._gains(kind, self._longest) for kind in kinds), default=self._gains("", self._longest))
        return any(choose_lengths(num_rows, num_tokens, [best] * num_rows, self.costs.seconds))
