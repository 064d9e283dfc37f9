"""A row on its way through the engine. May import numpy, stages.engines.protocol, storage.records."""

from __future__ import annotations

import queue
import threading
from collections.abc import Set
from dataclasses import dataclass, field

import numpy as np

from stages.engines.protocol import Completion, Request
from storage.records import FinishReason


@dataclass(eq=False)
class GenerateCall:
    """One `generate`: where its results go, and whether its caller went away."""

    results: queue.SimpleQueue[tuple[Row, Completion | Exception] | None]
    """A row and its completion, or why there will be none; None alone: the engine stopped."""
    abandoned: threading.Event
    num_here: int = 0
    """Its rows that are unfinished and not in another engine."""


@dataclass(eq=False)
class Row:
    """A request, what has been sampled for it, and what the cache holds of it."""

    request: Request
    call: GenerateCall
    eos_ids: Set[int]
    tokens: list[int] = field(default_factory=list)
    """Prompt and response."""
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    """Of the cache; the first positions may be shared with other rows."""
    num_cached: int = 0
    """Positions whose keys are in the blocks: always fewer than tokens, since a token is fed to get the next."""
    num_again: int = 0
    """Last tokens but one that have been fed, as guesses, but whose keys are not in place."""
    failure: FloatingPointError | None = None
    """Why nothing more can be made of it."""
    dropped: bool = False
    """Nobody waits for this row, though others of its call may be wanted."""

    def __post_init__(self) -> None:
        self.tokens = list(self.request.tokens)
        sampling = self.request.sampling
        self._suppressed = tuple(sorted(sampling.suppress_token_ids))
        self._suppressed_early = tuple(sorted({*self._suppressed, *self.eos_ids}))

    @property
    def num_new(self) -> int:
        """Tokens sampled so far."""
        return len(self.logprobs)

    @property
    def num_pending(self) -> int:
        """Tokens to feed before the next can be sampled: few while decoding, more after admission or preemption."""
        return len(self.tokens) - self.num_cached

    @property
    def decodes(self) -> bool:
        """Whether nothing is to be fed but its last token, and what is fed again with it."""
        return self.num_pending == 1 + self.num_again

    @property
    def num_left(self) -> int:
        """Tokens it may still get."""
        return self.request.sampling.max_new_tokens - self.num_new

    def banned(self, ahead: int) -> tuple[int, ...]:
        """Tokens that cannot be sampled `ahead` positions after the next one."""
        early = self.num_new + ahead < self.request.sampling.min_new_tokens
        return self._suppressed_early if early else self._suppressed

    def forced(self, ahead: int) -> int | None:
        """The token that is given and not drawn `ahead` positions after the next one, if any."""
        given = self.request.forced
        return given[self.num_new + ahead] if self.num_new + ahead < len(given) else None

    def append(self, token: int, logprob: float, version: int) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)

    @property
    def unwanted(self) -> bool:
        """Whether nobody waits for it any more."""
        return self.dropped or self.call.abandoned.is_set()

    @property
    def finished(self) -> FinishReason | None:
        if self.num_new and self.tokens[-1] in self.eos_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left <= 0 else None

    def outcome(self) -> Completion | FloatingPointError:
        """What its caller gets of it, now that it is finished or failed."""
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
