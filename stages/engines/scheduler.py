"""Which rows run in the next pass, and with how many tokens each: rows and blocks, no tensors, no clock, no threads.

    waiting ──admit──► flying ──retire──► (finished)
       ▲                 │
       └────preempt──────┘   youngest first, when the blocks run out; resumed first, from its tokens

Every flying row that decodes feeds its last token in every pass. Prompts (and rows that come back) share what
`PASS_TOKENS` leaves, oldest first, in pieces if need be, so a long prompt does not hold up those that decode.
May import stages.engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.engines.kv_cache import BLOCK_TOKENS, BlockPool, blocks_for
from stages.engines.rows import Row

PASS_TOKENS = 512
"""Prompt tokens of one pass: bounds the wait of those that decode, and the memory of activations."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The tokens of one row in a pass: `count` of its own from `start` on, then drafts of those to come."""

    row: Row
    start: int
    count: int
    samples: bool
    """Whether the last of its own is the row's last, so that the next can be sampled."""
    drafts: tuple[int, ...] = ()

    @property
    def tokens(self) -> list[int]:
        return [*self.row.tokens[self.start : self.start + self.count], *self.drafts]


class Scheduler:
    """Owns the rows and their blocks."""

    def __init__(self, num_slots: int, pool: BlockPool) -> None:
        self.num_slots = num_slots
        self.pool = pool
        self.waiting: deque[Row] = deque()
        self.flying: list[Row] = []
        """Oldest first."""
        self.num_preemptions = 0
        self.num_shared_tokens = 0
        """Prompt positions found in another row's blocks, since the start."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.flying

    def plan(self, drafts: Mapping[Row, Sequence[int]] | None = None) -> list[Chunk]:
        """The next pass; at least one chunk unless idle. Rows with a token ahead of them in it may read blocks that it
        writes. `drafts`: guesses for rows that decode, cut where blocks are short."""
        chunks: list[Chunk] = []
        budget = PASS_TOKENS
        for row in list(self.flying):
            if row not in self.flying:
                break  # preempted for an older row, as is everything after it
            chunk = self._chunk(row, budget, tuple((drafts or {}).get(row, ())))
            if chunk is None:
                continue
            budget -= chunk.count if row.num_pending > 1 else 0
            chunks.append(chunk)
        while budget > 0 and self._admit():
            chunk = self._chunk(self.flying[-1], budget, ())
            assert chunk is not None
            budget -= chunk.count
            chunks.append(chunk)
        return chunks

    def retire(self, row: Row) -> None:
        """Takes a flying row out and gives its blocks back."""
        self.flying.remove(row)
        self._drop_blocks(row)

    def drop_abandoned(self) -> list[Row]:
        """Forgets the rows whose caller went away, and says which."""
        gone = [row for row in (*self.flying, *self.waiting) if row.call.abandoned.is_set()]
        for row in gone:
            if row in self.flying:
                self.retire(row)
            else:
                self.waiting.remove(row)
        return gone

    def recompute(self) -> None:
        """The weights changed: what the blocks hold is of the old ones, and rows in flight start over from their
        tokens."""
        self.pool.forget()
        for row in self.flying:
            self._drop_blocks(row)

    def _admit(self) -> bool:
        """Moves the first waiting row to the flying ones, if there are a slot and blocks for what it has to feed plus
        one more for every row in flight, so that it is not sent back at once."""
        if not self.waiting or len(self.flying) >= self.num_slots:
            return False
        row = self.waiting[0]
        if self.flying and blocks_for(len(row.tokens)) + len(self.flying) > self.pool.num_free:
            return False
        self.flying.append(self.waiting.popleft())
        return True

    def _chunk(self, row: Row, budget: int, drafts: tuple[int, ...]) -> Chunk | None:
        """None: nothing to do for this row in this pass (no budget left, or it was preempted itself)."""
        if not row.blocks:
            # never the last token: feeding it is what gives the next one
            row.blocks = self.pool.match(row.tokens[: len(row.request.tokens) - 1])
            row.num_cached = len(row.blocks) * BLOCK_TOKENS
            self.num_shared_tokens += row.num_cached
        count = row.num_pending if row.num_pending == 1 else min(row.num_pending, budget)
        if count == 0 or not self._hold(row, row.num_cached + count):
            return None
        while drafts and blocks_for(row.num_cached + count + len(drafts)) - len(row.blocks) > self.pool.num_free:
            drafts = drafts[:-1]
        self._hold(row, row.num_cached + count + len(drafts))
        chunk = Chunk(row, row.num_cached, count, count == row.num_pending, drafts)
        row.num_cached += count
        self.pool.publish(row.blocks, row.tokens[: min(row.num_cached, len(row.request.tokens))])
        return chunk

    def _hold(self, row: Row, num_tokens: int) -> bool:
        """Gives a row blocks for so many positions, taking them from the youngest rows where none is free; False if
        it was the youngest itself."""
        while len(row.blocks) < blocks_for(num_tokens):
            if self.pool.num_free:
                row.blocks.append(self.pool.take())
                continue
            youngest = self.flying.pop()
            self._drop_blocks(youngest)
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
            if youngest is row:
                return False
        return True

    def _drop_blocks(self, row: Row) -> None:
        self.pool.release(row.blocks)
        row.blocks = []
        row.num_cached = 0
