"""Which rank of a gang hangs: notes in the gang's store, read when a collective fails.

    rank 0   at update_policy[3] ──► all_reduce ──time-out──► "gave up" ──┐ each waits for the others' notes
    rank 1   at update_policy[3] ──► all_reduce ──time-out──► "gave up" ──┤
    rank 2   at logprob[3, 1]        hangs                                └─► RanksMissing: 2, last at logprob[3, 1]

A collective itself tells only that it was not finished. Whoever takes part in one and is alive sees it fail, sooner or
later, and says so; whoever hangs, or has died, says nothing.

With gloo the error is raised where the collective was called. With NCCL its watchdog ends the process after the same
time, unless the error comes up in the call first: the gang is then lost without a name (never run on GPUs).

May import torch.distributed and stages.models.{errors, protocol}.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from stages.models.errors import RanksMissing
from stages.models.protocol import Rank

_MEETING_S = 86_400.0
"""For all ranks to come: whoever starts them has a deadline for that, and ends them."""
_LONGEST_ANSWER_S = 30.0
"""For the other ranks to see the same collective, or one that waits for it, fail."""


class RollCall:
    """Owns this rank's notes in its gang's store."""

    def __init__(self, rank: Rank) -> None:
        """Blocks until every rank of the gang has come."""
        self._index, self._size, self._timeout_s = rank.index, rank.size, rank.collective_timeout_s
        self.store: Any
        """The gang's, which process groups may be made from."""
        self.store, _, _ = next(dist.rendezvous(rank.rendezvous, rank.index, rank.size))
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
            self._note("gave_up", where)
            missing = self._silent_ranks()
            if not missing:
                raise
            raise RanksMissing(where, missing, self._detail(missing)) from error

    def _silent_ranks(self) -> tuple[int, ...]:
        """Those that do not say that a collective has failed for them, either."""
        notes = {index: f"gave_up/{index}" for index in range(self._size)}
        with suppress(RuntimeError):  # a file store's way to say that time is up, and a DistStoreError is one
            self._notes.wait([*notes.values()], timedelta(seconds=min(self._timeout_s, _LONGEST_ANSWER_S)))
        return tuple(index for index, note in notes.items() if not self._notes.check([note]))

    def _detail(self, missing: tuple[int, ...]) -> str:
        last = [f"{index} (last seen at {self._last_seen(index)})" for index in missing]
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
