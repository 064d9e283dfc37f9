"""A row on its way through the engine, and a tree of guesses (drafts) of the tokens that follow it.

    row ... the ─┬─ film ─┬─ is ── a        tokens   film  is  a  was  movie
                 │        └─ was            parents   -1    0  1   0    -1
                 └─ movie                   depths     0    1  2   1     0

All guesses of a row are fed in one batch. Each guess attends to the row and to its ancestors in the tree. Of several
guesses with the same parent at most one is right.

The list of guesses begins with the main chain, in which each guess is the child of the one before it. Here these are
film, is, a. The key of guess j is written j + 1 positions after the key of the row's last token. A right guess of the
main chain becomes the token at exactly this position. So its key can stay. A right guess outside the main chain (was,
movie) has its key at a wrong position. It is fed again in the next batch.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from jaxtyping import Int32

from stages.engines.embedded.sampling import row_noise
from stages.engines.protocol import Completion, Request
from storage.records import FinishReason


@dataclass(frozen=True)
class DraftTree:
    """Guesses of the tokens that follow a row, parents before children."""

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Index of each guess's parent: the guess that it continues. -1 if it continues the row itself."""

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def depths(self) -> list[int]:
        """Number of ancestors of each guess."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    @property
    def is_chain(self) -> bool:
        """True if every guess follows the one before it, so that the tree does not branch."""
        return self.parents == tuple(range(-1, len(self.parents) - 1))

    def path_to(self, guess: int) -> list[int]:
        """Return the indices of a guess's ancestors, the oldest first, and then `guess` itself."""
        path = [guess]
        while (parent := self.parents[path[-1]]) >= 0:
            path.append(parent)
        return path[::-1]

    def find_child(self, guess: int, token: int) -> int | None:
        """Return the index of the guess with this token whose parent is `guess` (-1: the row). Return None if there is
        no such guess."""
        for other, (each, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            if parent == guess and each == token:
                return other
        return None

    def first(self, num: int) -> DraftTree:
        """Return the tree of the first `num` guesses."""
        return DraftTree(self.tokens[:num], self.parents[:num])

    def only(self, chosen: Sequence[int]) -> DraftTree:
        """Return the tree of the chosen guesses in the given order, which must put parents before children."""
        places = {guess: place for place, guess in enumerate(chosen)} | {-1: -1}
        return DraftTree(
            tuple(self.tokens[guess] for guess in chosen), tuple(places[self.parents[guess]] for guess in chosen)
        )


def chain(tokens: Sequence[int]) -> DraftTree:
    """Return a tree that does not branch: each token follows the one before it."""
    return DraftTree(tuple(tokens), tuple(range(-1, len(tokens) - 1)))


NO_GUESSES = DraftTree()


# ---- rows ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class GenerateCall:
    """A call of `generate` or `migrate_in`: the queue of its results, and an event that is set when its caller has
    gone."""

    results: queue.SimpleQueue[tuple[Row, Completion | Exception] | None]
    """Queue of rows, each with its completion or error. None in the queue means that the engine has stopped."""
    abandoned: threading.Event
    num_local_rows: int = 0
    """Number of unfinished rows of the call that are in this engine. The call may have further rows in other
    engines."""


@dataclass(eq=False)
class Row:
    """A request, the tokens sampled for it, and its part of the cache."""

    request: Request
    call: GenerateCall
    eos_ids: Set[int]
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Blocks of the cache. The first ones may be shared with other rows. The list is only appended to, or replaced by
    another list: `table` relies on this."""
    num_cached: int = 0
    """Number of positions whose keys are in the blocks or are written by the batch under way. Between two batches the
    last token is not counted, since it is fed only to sample the next one."""
    num_to_refeed: int = 0
    """Number of tokens just before the row's last token that are fed again in the next batch. They were right guesses
    outside the main chain of the tree. So their keys are at wrong positions of the cache (see the top of this module).
    """
    failure: FloatingPointError | None = None
    """The error that ends this row, if any."""
    dropped: bool = False
    """True if this row is no longer wanted. Other rows of its call may still be wanted."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        sampling = self.request.sampling
        self._suppressed = tuple(sorted(sampling.suppress_token_ids))
        self._suppressed_early = tuple(sorted({*self._suppressed, *self.eos_ids}))
        self._min_new, self._max_new = sampling.min_new_tokens, sampling.max_new_tokens
        self.noise = int(row_noise(self.request.seed, self.request.step, self.request.row)[0])
        """The part of the keys of the row's noise that is the same at all positions (`sampling.position_keys`)."""
        self._table = np.zeros(0, np.int32)
        """The first `_table_length` entries of the list `_table_of`, with room for more."""
        self._table_of, self._table_length = self.blocks, 0
        """`_table_of`: the list that `blocks` was when `table` was last called."""

    @property
    def num_new(self) -> int:
        """Number of tokens sampled so far."""
        return len(self.logprobs)

    @property
    def num_pending(self) -> int:
        """Number of tokens to feed before the next one can be sampled. It is small while the row decodes, and larger
        after admission or preemption."""
        return len(self.tokens) - self.num_cached

    @property
    def decodes(self) -> bool:
        """True if only the last token, and the `num_to_refeed` tokens before it, must be fed to sample the next one."""
        return self.num_pending == 1 + self.num_to_refeed

    @property
    def num_left(self) -> int:
        """Maximum number of tokens that the row can still get."""
        return self._max_new - len(self.logprobs)

    def banned(self, ahead: int) -> tuple[int, ...]:
        """Return the tokens that must not be sampled at a coming position. `ahead`: 0 for the next position, 1 for the
        one after it, and so on."""
        early = len(self.logprobs) + ahead < self._min_new
        return self._suppressed_early if early else self._suppressed

    def forced(self, ahead: int) -> int | None:
        """Return the token that the request prescribes at a coming position (`ahead`: see `banned`), or None."""
        tokens = self.request.forced
        return tokens[self.num_new + ahead] if self.num_new + ahead < len(tokens) else None

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    @property
    def unwanted(self) -> bool:
        """True if no caller waits for this row any more."""
        return self.dropped or self.call.abandoned.is_set()

    @property
    def finished(self) -> FinishReason | None:
        num_new = len(self.logprobs)
        if num_new and self.tokens[-1] in self.eos_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if num_new >= self._max_new else None

    def table(self, num_blocks: int) -> Int32[np.ndarray, " num_blocks"]:
        """Return the row's first blocks. Do not change the array. Only new blocks are copied into it, because
        converting a long list in each pass is slow."""
        blocks = self.blocks
        if self._table_of is not blocks:
            self._table_of, self._table_length = blocks, 0
        if len(blocks) > len(self._table):
            self._table, self._table_length = np.empty(2 * len(blocks), np.int32), 0
        if self._table_length < len(blocks):
            self._table[self._table_length : len(blocks)] = blocks[self._table_length :]
            self._table_length = len(blocks)
        assert num_blocks <= self._table_length, "a row is fed without blocks for its keys"
        return self._table[:num_blocks]

    def outcome(self) -> Completion | FloatingPointError:
        """Return the completion of a finished row, or the error of a failed one."""
        if self.failure is not None:
            return self.failure
        reason = self.finished
        assert reason is not None
        return self.completion(reason)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            row=self.request.row,
            tokens=np.array(self.tokens[len(self.request.tokens) :], np.int32),
            logprobs=np.minimum(np.array(self.logprobs, np.float32), 0.0),
            versions=np.array(self.versions, np.int32),
            finish_reason=reason,
        )
