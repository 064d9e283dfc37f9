"""Which rank of a gang hangs: notes in the gang's store, read when a collective fails.

    rank 0   at update_policy[3] ──► all_reduce ──time-out──► "gave up" ──┐ each waits for the others' notes
    rank 1   at update_policy[3] ──► all_reduce ──time-out──► "gave up" ──┤
    rank 2   at logprob[3, 1]        hangs                                └─► RanksMissing: 2, last at logprob[3, 1]

A collective itself tells only that it was not finished. Whoever takes part in one and is alive sees it fail, sooner or
later, and says so; whoever hangs, or has died, says nothing.

With gloo the error is raised where the collective was called. With NCCL its watchdog ends the process after the same
time, unless the error comes up in the call first: the gang is then lost without a name (never run on GPUs).

The notes are in the store by which the ranks met, which rank 0's process keeps (`meeting.py`).

May import torch.distributed and stages.models.{errors, meeting, protocol}.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch.distributed as dist

from stages.models.errors import RanksMissing
from stages.models.meeting import store_of
from stages.models.protocol import Rank

_MEETING_S = 86_400.0
"""For all ranks to come: whoever starts them has a deadline for that, and ends them."""
_LONGEST_ANSWER_S = 30.0
"""For the other ranks to see the same collective, or one that waits for it, fail."""
_ANSWER_S = 2.0
"""For rank 0's process to answer, beyond that: it keeps the notes."""


class RollCall:
    """Owns this rank's notes in its gang's store."""

    def __init__(self, rank: Rank) -> None:
        """Blocks until every rank of the gang has come."""
        self._index, self._size, self._timeout_s = rank.index, rank.size, rank.collective_timeout_s
        self.store: Any
        """The gang's, which process groups may be made from."""
        self.store = store_of(rank)
        self._notes: Any = dist.PrefixStore("roll_call", self.store)
        self._note("came", "")
        self._notes.wait([f"came/{index}" for index in range(self._size)], timedelta(seconds=_MEETING_S))

    @property
    def timeout(self) -> timedelta:
        """Of every collective of the gang."""
        return timedelta(seconds=self._timeout_s)

    @contextmanager
    def collectives_of(self, where: str) -> Iterator[None]:
        """Around collectives: says what they belong to.

        Raises:
            RanksMissing: one of them failed, and not every rank has seen that.
        """
        if self._size == 1:
            yield
            return
        self._note("at", where)
        try:
            yield
        except RuntimeError as error:
            if not _is_of_a_collective(error):
                raise
            try:
                found = self._call_the_roll(where)
            except dist.DistNetworkError:  # rank 0, which keeps the notes, has ended: its death is news already
                raise error from None
            if found is None:
                raise
            raise found from error

    def _call_the_roll(self, where: str) -> RanksMissing | None:
        """Who has not seen a collective fail, if anybody. Rank 0's process keeps the notes: where it does not answer,
        it is the one. Raises DistNetworkError where it has ended."""
        answer: SimpleQueue[RanksMissing | dist.DistNetworkError | None] = SimpleQueue()

        def ask() -> None:
            try:
                self._note("gave_up", where)
                missing = self._silent_ranks()
                answer.put(RanksMissing(where, missing, self._detail(missing)) if missing else None)
            except dist.DistNetworkError as error:
                answer.put(error)

        Thread(target=ask, name="roll-call", daemon=True).start()
        try:
            found = answer.get(timeout=min(self._timeout_s, _LONGEST_ANSWER_S) + _ANSWER_S)
        except Empty:
            return RanksMissing(
                where, (0,), self._said((0,), ["0 (which keeps the gang's notes, and does not answer)"])
            )
        if isinstance(found, dist.DistNetworkError):
            raise found
        return found

    def _silent_ranks(self) -> tuple[int, ...]:
        """Those that do not say that a collective has failed for them, either."""
        notes = {index: f"gave_up/{index}" for index in range(self._size)}
        try:
            self._notes.wait([*notes.values()], timedelta(seconds=min(self._timeout_s, _LONGEST_ANSWER_S)))
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # a file store's way to say that time is up, and a DistStoreError is one
            pass
        return tuple(index for index, note in notes.items() if not self._notes.check([note]))

    def _detail(self, missing: tuple[int, ...]) -> str:
        return self._said(missing, [f"{index} (last seen at {self._last_seen(index)})" for index in missing])

    def _said(self, missing: tuple[int, ...], last: list[str]) -> str:
        ranks = "rank" if len(last) == 1 else "ranks"
        return (
            f"{ranks} {', '.join(last)} of {self._size} did not come to a collective: not within "
            f"cluster.collective_timeout_s = {self._timeout_s:g}, or ended before"
        )

    def _last_seen(self, index: int) -> str:
        note = f"at/{index}"
        return self._notes.get(note).decode() if self._notes.check([note]) else "the gang's start"

    def _note(self, kind: str, text: str) -> None:
        self._notes.set(f"{kind}/{self._index}", text)


def _is_of_a_collective(error: RuntimeError) -> bool:
    """Whether torch.distributed raised it: gloo's errors are plain RuntimeErrors that begin with gloo's source file."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error).partition("]")[0]
