"""Which rows run in the next batch, and with how many tokens each: rows and blocks, no tensors, no clock, no threads.

    waiting ──admit──► running ──retire──► (finished)
       ▲                 │
       └────preempt──────┘   youngest first, when the blocks run out; resumed first, from its tokens

Every running row that decodes feeds its last token in every batch (with one or two before it, where guesses were right
whose keys are not in place: see `draft_tree`). Prompts (and rows that come back) share what `BATCH_PROMPT_TOKENS`
leaves, oldest first, in pieces if need be, so a long prompt does not hold up those that decode.

Where several batches are under way at once (`depth`; a model whose stages are on several ranks), a row is in one of
them at most, and each takes an equal share of the rows. As rows finish, what a batch leaves over fits into the next
one, since the shares together hold all rows. Nothing is taken from a row whose batch is under way; what one batch
writes the later ones may read, since every rank runs them in order.

May import, of stages.engines.embedded, cache (its block pool), rows, draft_tree and paging.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.engines.embedded.cache import BlockPool
from stages.engines.embedded.draft_tree import NO_GUESSES, DraftTree
from stages.engines.embedded.kernels.paging import BLOCK_TOKENS, blocks_for
from stages.engines.embedded.rows import Row

BATCH_PROMPT_TOKENS = 512
"""Prompt tokens of one batch: bounds the wait of those that decode, and the memory of activations."""


@dataclass(frozen=True, eq=False)
class Chunk:
    """The tokens of one row in a batch: `count` of its own from `start` on, then drafts of those to come."""

    row: Row
    start: int
    count: int
    samples: bool
    """Whether the last of its own is the row's last, so that the next can be sampled."""
    drafts: DraftTree = NO_GUESSES
    decodes: bool = True
    """Whether its own tokens are the last one and what is fed again with it, not a prompt."""

    @property
    def stop(self) -> int:
        """Behind its own tokens."""
        return self.start + self.count

    @property
    def tokens(self) -> list[int]:
        return [*self.row.tokens[self.start : self.stop], *self.drafts.tokens]


class Scheduler:
    """Owns the rows and their blocks."""

    def __init__(self, num_slots: int, pool: BlockPool, depth: int = 1) -> None:
        """`depth`: batches that are planned before the first is `returned`."""
        self.num_slots = num_slots
        self._depth = depth
        self._under_way: set[Row] = set()
        """Rows of batches that have not returned; always empty where there is one batch at a time."""
        self.pool = pool
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        """Oldest first."""
        self.num_preemptions = 0
        self.num_shared_tokens = 0
        """Prompt positions found in another row's blocks, since the start."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def next_rows(self) -> list[Row]:
        """The running rows that the next batch feeds, oldest first."""
        if self._depth == 1:
            return list(self.running)
        return [row for row in self.running if row not in self._under_way][: self._share]

    def plan(self, drafts: Mapping[Row, DraftTree] | None = None) -> list[Chunk]:
        """The next batch; at least one chunk unless idle or all rows are under way. Rows with a token ahead of them in
        it may read blocks that it writes. `drafts`: guesses for rows that decode, cut where blocks are short."""
        chunks: list[Chunk] = []
        budget = BATCH_PROMPT_TOKENS
        for row in self.next_rows():
            if row not in self.running:
                break  # preempted for an older row, as is everything after it
            chunk = self._chunk(row, budget, (drafts or {}).get(row, NO_GUESSES))
            if chunk is None:
                continue
            budget -= 0 if chunk.decodes else chunk.count
            chunks.append(chunk)
        while budget > 0 and len(chunks) < self._share and self._admit():
            chunk = self._chunk(self.running[-1], budget, NO_GUESSES)
            assert chunk is not None
            budget -= chunk.count
            chunks.append(chunk)
        if self._depth > 1:
            self._under_way.update(chunk.row for chunk in chunks)
        return chunks

    def returned(self, chunks: Sequence[Chunk]) -> None:
        """The batch of these is over."""
        self._under_way.difference_update(chunk.row for chunk in chunks)

    @property
    def _share(self) -> int:
        """Rows of a batch at most: of those that run or could run."""
        return -(-min(self.num_slots, len(self.running) + len(self.waiting)) // self._depth)

    def retire(self, row: Row) -> None:
        """Takes a running row out and gives its blocks back."""
        self.running.remove(row)
        self._drop_blocks(row)

    def remove(self, row: Row) -> None:
        """Takes a row out that is not finished."""
        if row in self.running:
            self.retire(row)
        else:
            self.waiting.remove(row)

    def drop_abandoned(self) -> list[Row]:
        """Forgets the rows whose caller went away, and says which. Those in a batch under way have to wait for it."""
        gone = [row for row in (*self.running, *self.waiting) if row.unwanted and row not in self._under_way]
        for row in gone:
            self.remove(row)
        return gone

    def admit_with_blocks(self, row: Row, num_blocks: int) -> bool:
        """Lets a row run at once and gives it so many blocks, for keys and values that it brings; False, and nothing,
        without a slot or without blocks for them plus one more for every running row."""
        if len(self.running) >= self.num_slots or num_blocks + len(self.running) + 1 > self.pool.num_free:
            return False
        row.blocks = [self.pool.take() for _ in range(num_blocks)]
        self.running.append(row)
        return True

    def recompute(self) -> None:
        """The weights changed, or the memory was given back: what the blocks hold is no longer true, and running
        rows start over from their tokens."""
        self.pool.forget()
        for row in self.running:
            self._drop_blocks(row)

    def _admit(self) -> bool:
        """Moves the first waiting row to the running ones, if there are a slot and blocks for what it has to feed plus
        one more for every running row, so that it is not sent back at once."""
        if not self.waiting or len(self.running) >= self.num_slots:
            return False
        row = self.waiting[0]
        if self.running and blocks_for(len(row.tokens)) + len(self.running) > self.pool.num_free:
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _chunk(self, row: Row, budget: int, drafts: DraftTree) -> Chunk | None:
        """None: nothing to do for this row in this batch (no budget left, or it was preempted itself)."""
        if not row.blocks:
            # never the last token: feeding it is what gives the next one
            row.blocks = self.pool.match(row.tokens[: len(row.request.tokens) - 1])
            row.num_cached = len(row.blocks) * BLOCK_TOKENS
            self.num_shared_tokens += row.num_cached
        decodes = row.decodes
        count = row.num_pending if decodes else min(row.num_pending, budget)
        if count == 0 or not self._hold(row, row.num_cached + count):
            return None
        while drafts and blocks_for(row.num_cached + count + len(drafts)) - len(row.blocks) > self.pool.num_free:
            drafts = drafts.first(len(drafts) - 1)
        self._hold(row, row.num_cached + count + len(drafts))
        chunk = Chunk(row, row.num_cached, count, count == row.num_pending, drafts, decodes)
        row.num_cached += count
        prompt = len(row.request.tokens)
        if chunk.start < prompt:  # else all of it is known already
            self.pool.publish(row.blocks, row.tokens[: min(row.num_cached, prompt)])
        return chunk

    def _hold(self, row: Row, num_tokens: int) -> bool:
        """Gives a row blocks for so many positions, taking them from the youngest rows where none is free; False if
        it was the youngest itself, or all younger ones are under way: then it waits for them."""
        while len(row.blocks) < blocks_for(num_tokens):
            if self.pool.num_free:
                row.blocks.append(self.pool.take())
                continue
            youngest = next(other for other in reversed(self.running) if other not in self._under_way)
            if youngest is row and self.running[-1] is not row:
                return False
            self.running.remove(youngest)
            self._drop_blocks(youngest)
            self.waiting.appendleft(youngest)
            self.num_preemptions += 1
            if youngest is row:
                return False
        return True

    def _drop_blocks(self, row: Row) -> None:
        self.pool.release(row.blocks)
        row.blocks = []
        row.num_cached = row.num_again = 0
