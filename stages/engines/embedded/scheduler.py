"""The scheduler chooses the rows of the next batch, and how many tokens of each row are fed, i.e. run through the
model. It uses no tensors, clock or threads.

    waiting ──admit──► running ──retire──► (finished)
       ▲                 │
       └────preempt──────┘   when blocks run out: the youngest row, which is then admitted first and fed again

Every batch feeds the last token of every running row that decodes. It also feeds accepted guesses of the row again if
their keys are not in the cache yet (`Row.num_to_refeed`). Prompts and preempted rows are fed oldest first. A batch
feeds at most `BATCH_PROMPT_TOKENS` of their tokens, so a long prompt is fed in pieces and does not delay the rows that
decode.

If `depth` > 1 (pipeline stages on several ranks), several batches are under way at the same time. A row is in at most
one of them. Each batch takes at most an equal share of the rows, so `depth` batches together have room for all rows. A
row whose batch is under way keeps its blocks. A batch may read keys that an earlier batch writes, since every rank runs
the batches in order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stages.engines.embedded.cache import BlockPool
from stages.engines.embedded.kernels.blocks import BLOCK_TOKENS, blocks_for
from stages.engines.embedded.rows import NO_GUESSES, DraftTree, Row

BATCH_PROMPT_TOKENS = 512
"""Maximum number of tokens of prompts and preempted rows in a batch. It bounds the delay of rows that decode, and the
memory of activations."""


@dataclass(eq=False, slots=True)
class Chunk:
    """One row's part of a batch. It consists of `count` tokens of the row from position `start` on, and then of
    `drafts`, the guesses of the following tokens. It is not frozen, because frozen objects are slower to make, and
    one is made for each row and pass."""

    row: Row
    start: int
    count: int
    samples: bool
    """True if the chunk contains the row's last token, so that the next token can be sampled."""
    drafts: DraftTree = NO_GUESSES
    decodes: bool = True
    """True if the chunk, apart from its guesses, has only the row's last token and tokens before it that are fed again.
    Tokens are fed again if they were accepted guesses whose keys are at wrong positions of the cache
    (`Row.num_to_refeed`)."""

    @property
    def stop(self) -> int:
        """Position after the chunk's last token, not counting the guesses."""
        return self.start + self.count


class Scheduler:
    """Owns the waiting and running rows and their blocks."""

    def __init__(self, max_rows: int, pool: BlockPool, depth: int = 1) -> None:
        """`depth`: maximum number of batches under way. A batch is under way from `plan` until `returned` is called for
        it."""
        self.max_rows = max_rows
        self._depth = depth
        self._rows_under_way: set[Row] = set()
        """Rows of the batches under way. Always empty if the depth is 1."""
        self.pool = pool
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        """Running rows, the oldest first."""
        self.num_preemptions = 0
        self.num_shared_tokens = 0
        """Number of prompt positions that were not fed because their keys were in the cache already. The engine resets
        this number."""

    @property
    def idle(self) -> bool:
        return not self.waiting and not self.running

    def next_rows(self) -> list[Row]:
        """Return the running rows for the next batch, oldest first. If `depth` > 1, rows that are in a batch under way
        are left out, and the number of rows is at most `_max_batch_rows`."""
        if self._depth == 1:
            return list(self.running)
        return [row for row in self.running if row not in self._rows_under_way][: self._max_batch_rows]

    def plan(self, drafts: Mapping[Row, DraftTree] | None = None) -> list[Chunk]:
        """Return the chunks of the next batch.

        The result is empty if the scheduler is idle. It is also empty if every row is under way or waits for blocks of
        a row that is under way. A row may read blocks that an earlier row of the same batch writes. `drafts`: guesses
        for rows that decode. If blocks run short, some guesses are cut off."""
        chunks: list[Chunk] = []
        budget, preempted_before = BATCH_PROMPT_TOKENS, self.num_preemptions
        for row in self.next_rows():
            if self.num_preemptions > preempted_before and row not in self.running:
                break  # this row was preempted for an older one, and so were all rows after it
            chunk = self._chunk(row, budget, drafts.get(row, NO_GUESSES) if drafts else NO_GUESSES)
            if chunk is None:
                continue
            budget -= 0 if chunk.decodes else chunk.count
            chunks.append(chunk)
        while budget > 0 and len(chunks) < self._max_batch_rows and self._admit():
            chunk = self._chunk(self.running[-1], budget, NO_GUESSES)
            assert chunk is not None
            budget -= chunk.count
            chunks.append(chunk)
        if self._depth > 1:
            self._rows_under_way.update(chunk.row for chunk in chunks)
        return chunks

    def returned(self, chunks: Sequence[Chunk]) -> None:
        """Note that the batch of these chunks is no longer under way."""
        self._rows_under_way.difference_update(chunk.row for chunk in chunks)

    @property
    def _max_batch_rows(self) -> int:
        """The most rows in a batch: the rows that can run, divided among the `depth` batches under way."""
        return -(-min(self.max_rows, len(self.running) + len(self.waiting)) // self._depth)

    def retire(self, row: Row) -> None:
        """Remove a running row and release its blocks."""
        self.running.remove(row)
        self._drop_blocks(row)

    def remove(self, row: Row) -> None:
        """Remove an unfinished row, running or waiting."""
        if row in self.running:
            self.retire(row)
        else:
            self.waiting.remove(row)

    def drop_abandoned(self) -> list[Row]:
        """Remove the rows that no caller waits for, and return them. A row in a batch under way stays until the batch
        ends."""
        abandoned = [row for row in (*self.running, *self.waiting) if row.unwanted and row not in self._rows_under_way]
        for row in abandoned:
            self.remove(row)
        return abandoned

    def take_blocks(self, num_blocks: int) -> list[int] | None:
        """Return blocks for keys and values of a row from another engine. Afterwards, each running row and the new row
        must still find one free block. If there are too few, return None and change nothing."""
        if num_blocks + len(self.running) + 1 > self.pool.num_free:
            return None
        return [self.pool.take() for _ in range(num_blocks)]

    def admit_with_blocks(self, row: Row, blocks: list[int]) -> bool:
        """Start a row at once, with blocks that hold its keys and values. Return False, and change nothing, if
        `max_rows` rows are running already."""
        if len(self.running) >= self.max_rows:
            return False
        row.blocks = blocks
        self.running.append(row)
        return True

    def recompute(self) -> None:
        """Drop the contents of the cache, because the weights are new or the memory was released. All running rows lose
        their blocks and are fed again from their first token."""
        self.pool.forget()
        for row in self.running:
            self._drop_blocks(row)

    def _admit(self) -> bool:
        """Move the first waiting row to the running ones, and return True if that is possible. Beside other rows, all
        its tokens and one more block for each running row must fit; else it would soon be preempted."""
        if not self.waiting or len(self.running) >= self.max_rows:
            return False
        row = self.waiting[0]
        if self.running and blocks_for(len(row.tokens)) + len(self.running) > self.pool.num_free:
            return False
        self.running.append(self.waiting.popleft())
        return True

    def _chunk(self, row: Row, budget: int, drafts: DraftTree) -> Chunk | None:
        """Return the row's chunk of the next batch. None if the row does not decode yet and the `budget` of tokens for
        such rows is used up, or if blocks are short: the youngest row is preempted, others wait for batches under way.
        Then also the last guesses (`drafts`) are left out."""
        if not row.blocks:
            # the prompt's last token is not matched: it must be fed, so that the next token can be sampled
            row.blocks = self.pool.match(row.tokens[: len(row.request.tokens) - 1])
            row.num_cached = len(row.blocks) * BLOCK_TOKENS
            self.num_shared_tokens += row.num_cached
        pending = row.num_pending
        decodes = pending == 1 + row.num_to_refeed
        count = pending if decodes else min(pending, budget)
        stop = row.num_cached + count
        if count == 0 or (stop > len(row.blocks) * BLOCK_TOKENS and not self._reserve_blocks(row, stop)):
            return None
        if drafts is not NO_GUESSES:
            while drafts and blocks_for(stop + len(drafts)) - len(row.blocks) > self.pool.num_free:
                drafts = drafts.first(len(drafts) - 1)
            self._reserve_blocks(row, stop + len(drafts))
        chunk = Chunk(row, row.num_cached, count, count == pending, drafts, decodes)
        row.num_cached = stop
        prompt = len(row.request.tokens)
        if chunk.start < prompt:  # otherwise the whole prompt is published already
            self.pool.publish(row.blocks, row.tokens[: min(stop, prompt)])
        return chunk

    def _reserve_blocks(self, row: Row, num_tokens: int) -> bool:
        """Give a row blocks for `num_tokens` positions, preempting the youngest row that is not under way while none is
        free. Return False if the row itself is the youngest, and was preempted, or if it must wait for younger rows
        under way."""
        while len(row.blocks) < blocks_for(num_tokens):
            if self.pool.num_free:
                row.blocks.append(self.pool.take())
                continue
            youngest = next(other for other in reversed(self.running) if other not in self._rows_under_way)
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
        row.num_cached = row.num_to_refeed = 0
